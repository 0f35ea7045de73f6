"""The command line's parser. Imports neither Keras nor JAX nor NumPy, so that help is fast."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from keras_tpu_dist.common.errors import did_you_mean
from keras_tpu_dist.hardware.chips import CHIPS

_EPILOG = (
    "BUILD is a function without arguments that returns a compiled model, as module:function or "
    "FILE.py:function. `COMMAND --help` lists the options of a command."
)

_MODES = ("train", "evaluate", "predict", "generate")


class Parser(argparse.ArgumentParser):
    """A parser whose errors start with the nearest valid word, if there is one."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the error, and exits with code 2.

        Args:
            message: The error from `argparse`.
        """
        hint = _nearest_choice(message) or _nearest_option(message, self.format_help())
        super().error(f"{hint.strip()} {message}" if hint else message)


def _nearest_choice(message: str) -> str:
    found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
    return did_you_mean(found[1], re.findall(r"[\w.-]+", found[2])) if found else ""


def _nearest_option(message: str, help_text: str) -> str:
    found = re.search(r"unrecognized arguments: .*?(--[\w-]+)", message)
    options = sorted({*re.findall(r"--[a-z][a-z-]*", help_text)})
    return did_you_mean(found[1], options) if found else ""


def program_name() -> str:
    """How this process was started: `ktd`, or `python -m keras_tpu_dist`."""
    as_module = os.path.basename(sys.argv[0]) == "__main__.py"
    return "python -m keras_tpu_dist" if as_module else "ktd"


def parser_of(program: str) -> Parser:
    """The parser of all commands.

    Args:
        program: The name of the program, for usage lines.

    Returns:
        A parser whose options have `command`, the command's name, and `parser`, its own parser.
    """
    parser = Parser(program, description=f"{program}: TPU tools for Keras.", epilog=_EPILOG)
    parser.add_argument("--version", action="store_true", help="print the versions in use and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (words, options) in _COMMANDS.items():
        one = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        for names, settings in options:
            one.add_argument(*names, **settings)
        one.set_defaults(parser=one, topology=None)
    return parser


Option = tuple[tuple[str, ...], dict[str, Any]]


def _option(*names: str, **words: Any) -> Option:
    """The arguments of `add_argument`."""
    return names, words


# Options of several commands.
_JSON = _option("--json", action="store_true", help="print JSON")
_WRITTEN = (
    _option("--html", metavar="FILE", help="also write the report as an HTML page"),
    _JSON,
)
_OF_A_FUNCTION = "module:function or FILE.py:function that returns a"
_BUILD = _option("build", metavar="BUILD", help=f"{_OF_A_FUNCTION} compiled model")
_BUILD_OR_PAIR = _option(
    "build",
    metavar="BUILD",
    help=f"{_OF_A_FUNCTION} compiled model; or one that returns (model, strategy)",
)
_SLICE = _option("--topology", required=True, help="the slice, such as v5e:16x16 or v5e-256")
_SLICES = _option(
    "--topology",
    required=True,
    metavar="SLICES",
    help="one or several slices, such as v5e-8,v6e-8",
)
_DEVICES = _option(
    "--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU"
)
_HERE = (
    _option(
        "--topology",
        help="a slice, which you need not have, such as v5e:16x16; default: this machine",
    ),
    _DEVICES,
)
_LAYOUTS = "none, fsdp, tensor_parallel, auto, or a JSON file of LayoutRules"
_STRATEGY = (
    _option("--mesh", metavar="AXES", help="axis sizes, such as data=64,model=4; default: data=-1"),
    _option("--layout", help=_LAYOUTS),
    _option("--remat", metavar="POLICY", help="full, dots, attention, or pattern=policy,..."),
    _option(
        "--shard-optimizer", action="store_true", help="split optimizer slots over the data axes"
    ),
)
_BATCH_SIZE = _option("--batch-size", type=int, required=True, help="global batch size")
_INPUTS = (
    _option("--x", help="input, such as int32:512 or float32:224,224,3, without the batch"),
    _option("--y", help="target, likewise"),
    _option(
        "--sequence-length",
        type=int,
        metavar="N",
        help="the length of texts, for a model whose inputs have no fixed length",
    ),
)
_TIMEOUT = _option(
    "--timeout",
    type=float,
    default=1800.0,
    metavar="SECONDS",
    help="stop a compilation after this time; default: 1800",
)
_EFFORT = _option(
    "--effort",
    default="quick",
    choices=("quick", "exact"),
    help="how hard the compiler tries; exact compiles as for training; default: quick",
)
_PRICE = _option(
    "--price",
    help="the price of a chip-hour in any currency, to rank by price: v5e=1.20,v6e=2.70",
)


_OF_A_SLICE = (_BUILD, _SLICE, *_STRATEGY)


def _mode(modes: tuple[str, ...] = _MODES) -> Option:
    words = "which step to compile; default: train"
    return _option("--mode", default="train", choices=modes, help=words)


# What each command does, and its options.
_COMMANDS: dict[str, tuple[str, Sequence[Option]]] = {
    "topologies": (
        "list TPU slices, with their chips and memory",
        (
            _option("chip", nargs="?", choices=sorted(CHIPS), help="only this chip's slices"),
            _JSON,
        ),
    ),
    "search": (
        "find the fastest strategy for a model on one or several slices",
        (
            _BUILD,
            _SLICES,
            _option(
                "--batch-size",
                type=int,
                help="global batch size; default: as many rows as fit into each candidate's memory",
            ),
            *_INPUTS,
            _option(
                "--compilations", type=int, default=8, help="candidates to compile; default: 8"
            ),
            _option(
                "--exact",
                type=int,
                default=4,
                help="candidates to compile again, as for training; default: 4",
            ),
            _option(
                "--budget",
                type=float,
                default=900.0,
                metavar="SECONDS",
                help="start no compilation after this time, for each slice; default: 900",
            ),
            _option("--cache", metavar="FOLDER", help="cache compilations in this folder"),
            _option("--no-cache", action="store_true", help="compile everything again"),
            _PRICE,
            *_WRITTEN,
        ),
    ),
    "dry-run": (
        "compile a model for a slice, which you need not have; exit code 1 if it does not fit",
        (
            *_OF_A_SLICE,
            _option(
                "--batch-size", type=int, help="global batch size; default: the largest that fits"
            ),
            _option(
                "--rows", type=int, metavar="N", help="the rows of your data, for an epoch's time"
            ),
            *_INPUTS,
            _mode(),
            _TIMEOUT,
            _EFFORT,
            _option(
                "--verify", action="store_true", help="run the program on simulated devices too"
            ),
            *_WRITTEN,
        ),
    ),
    "verify": (
        "run what the TPU compiler makes of a model, without a TPU, beside one device; exit code "
        "1 if they differ",
        (
            *_OF_A_SLICE,
            _BATCH_SIZE,
            *_INPUTS,
            _mode(_MODES[:3]),
            _TIMEOUT,
            _option(
                "--steps",
                type=int,
                help="steps of a launch; default: steps_per_execution of compile",
            ),
            _option(
                "--as-on-chip",
                action="store_true",
                help="round operands of products to bfloat16, as the chip does",
            ),
            *_WRITTEN,
        ),
    ),
    "check": (
        "check that the devices here compute correctly; exit code 1 if not",
        (
            _option(
                "--model",
                metavar="BUILD",
                dest="build",
                help="also check a training step of this model",
            ),
            _option("--minutes", type=float, default=3.0, help="the time limit; default: 3"),
            _DEVICES,
            _option(
                "--pod",
                action="store_true",
                help="run as one of several processes, which all run this command",
            ),
            *_STRATEGY,
            _option("--batch-size", type=int, help="global batch size of the step"),
            *_INPUTS,
            *_WRITTEN,
        ),
    ),
    "explain": (
        "show how each variable of a model is split, and why",
        (
            _BUILD_OR_PAIR,
            *_HERE,
            *_STRATEGY,
            _option(
                "--path", help="explain one variable, by the end of its path, with alternatives"
            ),
            _JSON,
        ),
    ),
    "convert": (
        "write a model with faster recurrent layers and experts, and the same weights",
        (
            _option(
                "model",
                metavar="MODEL",
                help="a .keras file, or BUILD: a function that returns a model",
            ),
            _option("output", metavar="OUTPUT", help="the .keras file to write"),
            _JSON,
        ),
    ),
    "checkpoint": (
        "list the checkpoints in a directory, or convert one",
        (
            _option("directory", help="the directory of keras_tpu_dist.callbacks.Checkpoint"),
            _option("--to-keras", metavar="FILE", help="write .keras or .weights.h5"),
            _option("--build", help="BUILD for --to-keras: module:function or FILE.py:function"),
            _option("--step", type=int, help="which checkpoint; default: the newest"),
            _option("--base", help="for --to-keras: where the weights are that it leaves out"),
            _JSON,
        ),
    ),
    "launch": (
        "run a script as several processes with simulated devices, as on several hosts",
        (
            _option("--processes", type=int, help="their number; default: 2"),
            _option("--devices", type=int, help="CPU devices per process; default: 4"),
            _option(
                "--here",
                action="store_true",
                help="start one process with the devices of this host, for a scheduler that runs "
                "this on each host",
            ),
            _option(
                "--restart",
                type=int,
                default=0,
                metavar="N",
                help="restart all processes if one fails, up to N times; default: 0",
            ),
            _option(
                "--logs",
                metavar="FOLDER",
                help="write the output here, one file per process; default: a temporary folder, "
                "which is deleted if nothing fails",
            ),
            _option(
                "-m",
                action="store_true",
                dest="module",
                help="script is a module, as in python -m",
            ),
            _option("script", help="a Python file, which calls ktd.initialize()"),
            _option("arguments", nargs=argparse.REMAINDER, help="arguments of the script"),
        ),
    ),
}
