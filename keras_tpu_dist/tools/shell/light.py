"""Commands that need neither Keras nor JAX, and start at once."""

import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.records import check_ours
from keras_tpu_dist.show.page import file_of
from keras_tpu_dist.tools.goodput.report import goodput_of
from keras_tpu_dist.tools.launcher.launch import launch
from keras_tpu_dist.tools.launcher.restart import Restarts

Answered = tuple[Any, int]


def check_page(options: Namespace) -> None:
    """Raises an error if the page cannot be written, before minutes of work."""
    if options.html is not None:
        file_of(options.html)


def with_page(options: Namespace, answer: Any) -> Any:
    """Writes an answer as a page if `--html` is given, and returns it."""
    if options.html is not None:
        answer.to_html(options.html)
    return answer


def _numbers(options: Namespace) -> tuple[int, int | None]:
    """How many processes there are, and how many devices each simulates."""
    given = {"processes": options.processes, "devices": options.devices}
    given["processes_from"] = options.processes_from
    if options.here:
        if any(value is not None for value in given.values()):
            raise value_error(
                "--here starts one process with the devices of this host.",
                received={name: value for name, value in given.items() if value is not None},
                fix="Leave --here out to simulate several hosts on this machine.",
            )
        return 1, None
    processes = 2 if options.processes is None else options.processes
    devices = 4 if options.devices is None else options.devices
    if processes < 1 or devices < 1:
        raise value_error(
            "launch needs at least one process with at least one device.",
            received={"processes": processes, "devices": devices},
            fix="Write --processes 2 --devices 4.",
        )
    if options.processes_from is not None and not options.restart:
        raise value_error(
            "--processes-from is read before each restart.",
            received={"processes_from": options.processes_from, "restart": options.restart},
            fix="Add --restart 10.",
        )
    return processes, devices


def _check_file(script: str) -> None:
    """Raises an error if Python cannot run a file, before processes start that would all fail."""
    path = Path(script)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    raise value_error(
        "launch needs a Python file, or a folder with a __main__.py.",
        received={"script": script},
        fix="Check the path.",
        name=script,
        choices=map(str, path.parent.glob("*.py")),
    )


def _launch(options: Namespace) -> Answered:
    processes, devices = _numbers(options)
    if not options.module:
        _check_file(options.script)
    for name in ("backoff", "longest_backoff"):
        if not 0 <= getattr(options, name) < threading.TIMEOUT_MAX:
            raise value_error(
                "Seconds to wait must be at least 0.",
                received={name: getattr(options, name)},
                fix="Write --backoff 1 --longest-backoff 300.",
            )
    if options.restart < 0:
        raise value_error(
            "The number of restarts must be at least 0.",
            received={"restart": options.restart},
            fix="Write --restart 10.",
        )
    if options.goodput is not None:
        file_of(options.goodput)
        check_ours(options.goodput)
    as_module = ["-m"] if options.module else []
    command: Sequence[str] = [sys.executable, *as_module, options.script, *options.arguments]
    return None, launch(
        command,
        processes,
        devices,
        restarts=Restarts(
            options.restart, options.backoff, options.longest_backoff, options.processes_from
        ),
        logs=options.logs,
        goodput=options.goodput,
    )


def _goodput(options: Namespace) -> Answered:
    check_page(options)
    return with_page(options, goodput_of(options.file)), 0


COMMANDS: dict[str, Callable[[Namespace], Answered]] = {"launch": _launch, "goodput": _goodput}
