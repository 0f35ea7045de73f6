"""Runs a command: parses its arguments, imports what it needs, and prints its answer."""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import keras_tpu_dist
from keras_tpu_dist.common.version import __version__
from keras_tpu_dist.tools.launcher.output import Folded
from keras_tpu_dist.tools.shell.parser import parser_of, program_name

_INTERRUPTED, _NO_READER = 130, 141  # as in a shell: 128 plus the number of the signal
# The command that imports neither Keras nor JAX, in `tools.shell.light`.
_LIGHT = "launch"
# What this package raises with a text of its own.
_FORESEEN = (ValueError, ImportError, RuntimeError, OSError)
_OWN_FRAME = '  File "'
_VERSIONS = ("keras", "jax", "jaxlib", "libtpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The words after `ktd`. Defaults to those of this process.

    Returns:
        The exit code. 0: success. 1: nothing fits, check finds something wrong, or there is nothing
        to convert. 2: wrong arguments. 130: Ctrl-C. `launch` returns that of its processes.

    Raises:
        SystemExit: For unknown commands or options (code 2), and for help (code 0).
    """
    parser = parser_of(program_name())
    options, unknown = parser.parse_known_args(arguments)
    if options.version:
        print(_versions())
        return 0
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    words = sys.argv
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe is gone: drop further output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except (Exception, SystemExit) as error:
        _print_error(error)
        return 2
    finally:
        sys.argv = words  # a function of the user's may have been given others


def _run(options: Any) -> int:
    if options.command == _LIGHT:
        commands = importlib.import_module("keras_tpu_dist.tools.shell.light")
    else:
        _make_quiet()
        keras_tpu_dist._load()
        importlib.import_module("keras_tpu_dist.hardware.libtpu").start_without_tpu()
        commands = importlib.import_module("keras_tpu_dist.tools.shell.commands")
    as_json = getattr(options, "json", False)
    # Output of a model's function is not JSON.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with _warnings_on_stderr(), elsewhere:
        answer, code = commands.COMMANDS[options.command](options)
    if answer is not None:
        print(_json_text(answer) if as_json else answer, flush=True)
    return code


def _print_error(error: BaseException) -> None:
    """Prints an error, and where in the user's own code it was raised, if it was.

    An error of another kind that this package raises is printed with all its frames.
    """
    lines = "".join(traceback.format_exception(error)).splitlines()
    folded = Folded(os.path.dirname(keras_tpu_dist.__file__))
    shown = [text for line in lines for text in folded.take(line)]
    if any(text.startswith(_OWN_FRAME) for text in shown) and folded.error is not None:
        first = len(shown) - 1 - shown[::-1].index(folded.error[1])
        shown[first] = f"error: {shown[first]}"
    elif isinstance(error, _FORESEEN):
        shown = [f"error: {error}"]
    elif isinstance(error, SystemExit):
        raise error
    else:
        shown = lines
    print(*shown, sep="\n", file=sys.stderr)


def _json_text(answer: Any) -> str:
    plain = answer.to_dict() if hasattr(answer, "to_dict") else dataclasses.asdict(answer)
    return json.dumps(plain, indent=1)


def _make_quiet() -> None:
    """Makes the C++ code of XLA and libtpu print only fatal errors, unless the user asks for more.

    Both read these variables when they are loaded. So does TensorFlow, which prints messages about
    its CPU kernels; Keras imports it with a model's config if it is installed.
    """
    if "jax" in sys.modules:
        return
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL"):
        os.environ.setdefault(name, "3")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Prints each warning of this package as a line that starts with `warning:`."""
    logger, handler = logging.getLogger("keras_tpu_dist"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return f"keras_tpu_dist {__version__} ({', '.join(found)})"
