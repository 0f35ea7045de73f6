"""The command line's parser. Imports neither Keras nor JAX nor NumPy, so that help is fast."""

import argparse
import os
import re
import sys
from collections.abc import Callable
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
        """Prints the usage and the error, and exits with code 2."""
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

    Returns:
        A parser whose options have `command`, the command's name, and `parser`, its own parser.
    """
    parser = Parser(program, description=f"{program}: TPU tools for Keras.", epilog=_EPILOG)
    parser.add_argument("--version", action="store_true", help="print the versions in use and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (words, add) in _COMMANDS.items():
        one = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        add(one)
        one.set_defaults(parser=one)
    return parser


def _topologies(parser: Parser) -> None:
    parser.add_argument("chip", nargs="?", choices=sorted(CHIPS), help="only this chip's slices")
    _json(parser)


def _devices(parser: Parser) -> None:
    _json(parser)


def _search(parser: Parser) -> None:
    _build(parser)
    _slices(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        help="global batch size; default: as many rows as fit into each candidate's memory",
    )
    _inputs(parser)
    parser.add_argument(
        "--compilations", type=int, default=8, help="candidates to compile; default: 8"
    )
    parser.add_argument(
        "--exact",
        type=int,
        default=4,
        help="candidates to compile again, as for training; default: 4",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="start no compilation after this time, for each slice; default: 900",
    )
    _calibration(parser)
    parser.add_argument("--cache", metavar="FOLDER", help="cache compilations in this folder")
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    _price(parser)
    _written(parser)


def _compare(parser: Parser) -> None:
    _build(parser)
    _slices(parser)
    parser.add_argument(
        "--mesh",
        action="append",
        metavar="AXES",
        help="axis sizes, such as data=4,model=2; repeat it for several; default: data=-1",
    )
    parser.add_argument(
        "--layout",
        action="append",
        help="none, fsdp, tensor_parallel, auto, or a JSON file of LayoutRules; repeat it for "
        "several; default: none",
    )
    _batch_size(parser)
    _inputs(parser)
    _how(parser)
    _calibration(parser)
    _price(parser)
    _written(parser)


def _largest_batch(parser: Parser) -> None:
    _build(parser)
    _slice(parser)
    _strategy(parser)
    _inputs(parser)
    _how(parser)
    _effort(parser)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="stop when the relative error of the answer is below this; default: 0.05",
    )
    parser.add_argument(
        "--max-compiles", type=int, default=8, help="the most compilations; default: 8"
    )
    _calibration(parser)
    _written(parser)


def _dry_run(parser: Parser) -> None:
    _build(parser)
    _slice(parser)
    _strategy(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        help="global batch size; default: the largest that fits",
    )
    _inputs(parser)
    _how(parser)
    _effort(parser)
    _calibration(parser)
    parser.add_argument(
        "--verify", action="store_true", help="run the program on simulated devices too"
    )
    _written(parser)


def _verify(parser: Parser) -> None:
    _build(parser)
    _slice(parser)
    _strategy(parser)
    _batch_size(parser)
    _inputs(parser)
    _how(parser, _MODES[:3])
    parser.add_argument(
        "--steps", type=int, help="steps of a launch; default: steps_per_execution of compile"
    )
    parser.add_argument(
        "--as-on-chip",
        action="store_true",
        help="round operands of products to bfloat16, as the chip does",
    )
    _written(parser)


def _lint(parser: Parser) -> None:
    _build(parser, "; or one that returns (model, strategy)")
    _here(parser)
    _strategy(parser)
    parser.add_argument("--batch-size", type=int, help="global batch size")
    _json(parser)


def _explain(parser: Parser) -> None:
    _build(parser, "; or one that returns (model, strategy)")
    _here(parser)
    _strategy(parser)
    parser.add_argument(
        "--path", help="explain one variable, by the end of its path, with alternatives"
    )
    _json(parser)


def _show(parser: Parser) -> None:
    parser.add_argument(
        "build",
        nargs="?",
        metavar="BUILD",
        help="module:function or FILE.py:function that returns a model, or (model, strategy); "
        "without it, the mesh is drawn",
    )
    _here(parser)
    _strategy(parser)
    parser.add_argument("--save", metavar="FILE", help="write the picture as .svg")
    _json(parser)


def _check(parser: Parser) -> None:
    parser.add_argument(
        "--model", metavar="BUILD", dest="build", help="also check a training step of this model"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="the time limit; default: 3")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU"
    )
    parser.add_argument(
        "--pod",
        action="store_true",
        help="run as one of several processes, which all run this command",
    )
    _strategy(parser)
    parser.add_argument("--batch-size", type=int, help="global batch size of the step")
    _inputs(parser)
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="write the rates measured on a TPU as JSON, for dry-run and search",
    )
    _written(parser)
    parser.set_defaults(topology=None)


def _convert(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a .keras file, or BUILD: a function that returns a model"
    )
    parser.add_argument("output", metavar="OUTPUT", help="the .keras file to write")
    _json(parser)


def _checkpoint(parser: Parser) -> None:
    parser.add_argument("directory", help="the directory of keras_tpu_dist.callbacks.Checkpoint")
    parser.add_argument("--to-keras", metavar="FILE", help="write .keras or .weights.h5")
    parser.add_argument("--build", help="BUILD for --to-keras: module:function or FILE.py:function")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    _json(parser)


def _launch(parser: Parser) -> None:
    parser.add_argument("--processes", type=int, help="their number; default: 2")
    parser.add_argument("--devices", type=int, help="CPU devices per process; default: 4")
    parser.add_argument(
        "--here",
        action="store_true",
        help="start one process with the devices of this host, for a scheduler that runs this on "
        "each host",
    )
    parser.add_argument(
        "--restart",
        type=int,
        default=0,
        metavar="N",
        help="restart all processes if one fails, up to N times; not if the same error recurs "
        "at the same step; default: 0",
    )
    parser.add_argument(
        "--backoff",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="wait before a restart; twice as long after each run without a step; default: 1",
    )
    parser.add_argument(
        "--longest-backoff",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="the longest wait; default: 300",
    )
    parser.add_argument(
        "--processes-from",
        metavar="FILE",
        help="read the number of processes from this file before a restart, or run it and read its "
        "output if it is executable; default: as many as before",
    )
    parser.add_argument(
        "--logs",
        metavar="FOLDER",
        help="write the output here, one file per process; default: a temporary folder, which is "
        "deleted if nothing fails",
    )
    parser.add_argument(
        "--goodput",
        metavar="FILE",
        help="append to this file how the time is spent, for the command goodput",
    )
    parser.add_argument(
        "-m", action="store_true", dest="module", help="script is a module, as in python -m"
    )
    parser.add_argument("script", help="a Python file, which calls ktd.initialize()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def _goodput(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file from launch --goodput FILE")
    _written(parser)


def _build(parser: Parser, besides: str = "") -> None:
    parser.add_argument(
        "build",
        metavar="BUILD",
        help=f"module:function or FILE.py:function that returns a compiled model{besides}",
    )


def _slice(parser: Parser) -> None:
    parser.add_argument("--topology", required=True, help="the slice, such as v5e:16x16 or v5e-256")


def _slices(parser: Parser) -> None:
    parser.add_argument(
        "--topology",
        required=True,
        metavar="SLICES",
        help="one or several slices, such as v5e-8,v6e-8",
    )


def _here(parser: Parser) -> None:
    parser.add_argument(
        "--topology",
        help="a slice, which you need not have, such as v5e:16x16; default: this machine",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU"
    )


def _strategy(parser: Parser) -> None:
    parser.add_argument(
        "--mesh", metavar="AXES", help="axis sizes, such as data=64,model=4; default: data=-1"
    )
    parser.add_argument(
        "--layout", help="none, fsdp, tensor_parallel, auto, or a JSON file of LayoutRules"
    )
    parser.add_argument(
        "--remat", metavar="POLICY", help="full, dots, attention, or pattern=policy,..."
    )
    parser.add_argument(
        "--shard-optimizer", action="store_true", help="split optimizer slots over the data axes"
    )


def _batch_size(parser: Parser) -> None:
    parser.add_argument("--batch-size", type=int, required=True, help="global batch size")


def _inputs(parser: Parser) -> None:
    parser.add_argument(
        "--x", help="input, such as int32:512 or float32:224,224,3, without the batch"
    )
    parser.add_argument("--y", help="target, likewise")
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="the length of texts, for a model whose inputs have no fixed length",
    )


def _how(parser: Parser, modes: tuple[str, ...] = _MODES) -> None:
    parser.add_argument(
        "--mode",
        default="train",
        choices=modes,
        help="which step to compile; default: train",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="stop a compilation after this time; default: 1800",
    )


def _effort(parser: Parser) -> None:
    parser.add_argument(
        "--effort",
        default="quick",
        choices=("quick", "exact"),
        help="how hard the compiler tries; exact compiles as for training; default: quick",
    )


def _calibration(parser: Parser) -> None:
    parser.add_argument("--calibration", metavar="FILE", help="measurements on such chips, as JSON")


def _price(parser: Parser) -> None:
    parser.add_argument(
        "--price",
        help="the price of a chip-hour in any currency, to rank by price: 1.20, or "
        "v5e=1.20,v6e=2.70",
    )


def _written(parser: Parser) -> None:
    parser.add_argument("--html", metavar="FILE", help="also write the report as an HTML page")
    _json(parser)


def _json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


_COMMANDS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "topologies": ("list TPU slices, with their chips and memory", _topologies),
    "devices": ("list the devices that JAX finds on this machine", _devices),
    "search": ("find the fastest strategy for a model on one or several slices", _search),
    "compare": ("rank slices, meshes and layouts that you name", _compare),
    "dry-run": (
        "compile a model for a slice, which you need not have; exit code 1 if it does not fit",
        _dry_run,
    ),
    "largest-batch": ("find the largest batch that fits on a slice", _largest_batch),
    "verify": (
        "run what the TPU compiler makes of a model, without a TPU, beside one device; exit code "
        "1 if they differ",
        _verify,
    ),
    "check": (
        "check that the devices here compute correctly, and how fast; exit code 1 if not",
        _check,
    ),
    "lint": ("find mistakes in a model's layouts; exit code 1 if there are any", _lint),
    "explain": ("show how each variable of a model is split, and why", _explain),
    "show": ("draw a model or a mesh, coloured by the axes that split it", _show),
    "convert": (
        "write a model with faster recurrent layers and experts, and the same weights",
        _convert,
    ),
    "checkpoint": ("list the checkpoints in a directory, or convert one", _checkpoint),
    "launch": (
        "run a script as several processes with simulated devices, as on several hosts",
        _launch,
    ),
    "goodput": ("show how much of a run's time was training, and how the rest was spent", _goodput),
}
