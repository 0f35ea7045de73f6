"""The command `launch`, which needs neither Keras nor JAX, and starts at once."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.tools.launcher.launch import launch

Answered = tuple[Any, int]


def _numbers(options: Namespace) -> tuple[int, int | None]:
    """How many processes there are, and how many devices each simulates."""
    given = {"processes": options.processes, "devices": options.devices}
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
    if options.restart < 0:
        raise value_error(
            "The number of restarts must be at least 0.",
            received={"restart": options.restart},
            fix="Write --restart 10.",
        )
    as_module = ["-m"] if options.module else []
    command: Sequence[str] = [sys.executable, *as_module, options.script, *options.arguments]
    return None, launch(
        command,
        processes,
        devices,
        restarts=options.restart,
        logs=options.logs,
    )


COMMANDS: dict[str, Callable[[Namespace], Answered]] = {"launch": _launch}
