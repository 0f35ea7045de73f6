"""The goodput file of a run: JSON lines from its launcher and from process 0."""

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once

logger = logging.getLogger("keras_tpu_dist")

# The environment variable by which `launch --goodput FILE` passes the file to its processes.
GOODPUT = "KTD_GOODPUT"
LAUNCH, START, SPENT, FAILED, ENDED = "launch", "start", "spent", "failed", "ended"
_KINDS = (LAUNCH, START, SPENT, FAILED, ENDED)
# A run of a month writes some 4 MB, of a year 5 MB (see `GoodputRecorder`): what reaches this has
# other lines, or 100,000 restarts.
MOST_BYTES = 64 * 2**20
_MOST_OF_A_LINE = 4096
_MOST_NAMES, _MOST_LETTERS = 32, 300
# Seconds since 1970, in the year 5138.
_LATEST_S = 1e11


def append(path: str, what: str, at: float | None = None, **fields: Any) -> bool:
    """Adds one line atomically. If the file is full, it logs one WARNING.

    Raises:
        OSError: If it cannot be written.
    """
    if what != SPENT:
        fields = {"host": socket.gethostname(), **fields}
    known = {name: value for name, value in fields.items() if value is not None}
    record = {"what": what, "at": round(time.time() if at is None else at, 3), **known}
    line = json.dumps(record).encode() + b"\n"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        if size > MOST_BYTES:
            log_once(
                f"goodput is no longer recorded: {path} has reached its largest size, "
                f"{MOST_BYTES:,} bytes. Use another file; `ktd goodput` still reads this one",
                logging.WARNING,
            )
            return False
        if len(line) > _MOST_OF_A_LINE:
            return True  # we write no such lines, and readers ignore them
        # A power failure may have left an incomplete line.
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(file, line)
        return True
    finally:
        os.close(file)


def try_append(path: str, what: str, at: float | None = None, **fields: Any) -> bool:
    """Like `append`, but a file that cannot be written is a WARNING, so that the run continues."""
    try:
        return append(path, what, at, **fields)
    except OSError as error:
        logger.warning("goodput is no longer recorded: %s cannot be written: %s", path, error)
        return False


def check_ours(path: str) -> None:
    """Checks that a file may be added to: it is missing, empty, or has lines of goodput."""
    try:
        found, others = read(path)
    except FileNotFoundError:
        return
    if others and not found:
        raise value_error(
            "Goodput is added to a new file, or to a goodput file.",
            received=f"{path!r}, which has no line of goodput and {others} other(s).",
            fix="Use another name, such as goodput.jsonl.",
        )


def is_full(path: str) -> bool:
    """Whether no further line is added to a file."""
    return os.stat(path).st_size > MOST_BYTES


def read(path: str) -> tuple[list[dict[str, Any]], int]:
    """Reads the valid lines of a file, and counts the invalid ones.

    Raises:
        OSError: If the file cannot be read.
    """
    found, others = [], 0
    for line in _lines(path):
        record = _record(line)
        if record is None:
            others += 1
        else:
            found.append(record)
    return found, others


def _lines(path: str) -> Iterator[bytes]:
    left = MOST_BYTES + _MOST_OF_A_LINE
    with open(path, "rb") as file:
        while left > 0 and (line := file.readline(_MOST_OF_A_LINE)):
            left -= len(line)
            if line.strip():
                yield line


def _record(line: bytes) -> dict[str, Any] | None:
    """A valid line as plain data; `None` for an invalid one."""
    if not line.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and record.get("what") in _KINDS and "at" in record:
            return record if all(map(_fits, record, record.values())) else None
    return None


def _fits(name: str, value: Any) -> bool:
    if name in ("at", "since"):
        return _is_number(value) and 0 <= value < _LATEST_S
    if name in ("step", "processes", "devices", "process", "code", "number"):
        return type(value) is int and abs(value) < 2**53
    if name == "seconds":
        return (
            isinstance(value, Mapping)
            and len(value) <= _MOST_NAMES
            # A negative number corrects an earlier line.
            and all(_is_number(item) and abs(item) < _LATEST_S for item in value.values())
        )
    return isinstance(value, str) and len(value) <= _MOST_LETTERS


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def reached(records: list[dict[str, Any]]) -> int:
    """The last step of starts that did not end successfully."""
    steps = [0]
    for record in records:
        if record["what"] == ENDED and not record.get("code"):
            steps = [0]
        steps.append(record.get("step", 0))
    return max(steps)
