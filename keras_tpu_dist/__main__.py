"""`python -m keras_tpu_dist`: slices, devices, dry runs and checkpoints from the shell."""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.hardware.libtpu import start_without_tpu
from keras_tpu_dist.hardware.topology import CHIPS, Topology, all_names
from keras_tpu_dist.show.page import file_of
from keras_tpu_dist.show.progress import show_progress, stages
from keras_tpu_dist.show.text import size_text, text_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The words behind `python -m keras_tpu_dist`; `None` takes those of this process.

    Returns:
        The exit code: 0, 1 if a dry run does not fit or lint finds a mistake, 2 for wrong
        arguments; of `launch` that of its processes.

    Raises:
        SystemExit: For words that are no command with its options (code 2), or ask for help (0).
    """
    parser = argparse.ArgumentParser("python -m keras_tpu_dist", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in _COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_topologies(commands: Any) -> None:
    parser = commands.add_parser("topologies", help="TPU slices by name, and what each has")
    parser.add_argument("chip", nargs="?", choices=sorted(CHIPS), help="only this chip's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_topologies)


def _topologies(options: argparse.Namespace) -> int:
    slices = [Topology.parse(name) for name in all_names()]
    slices = [s for s in slices if options.chip in (None, s.chip.name)]
    if options.json:
        print(json.dumps([s.to_dict() for s in slices], indent=1))
        return 0
    header = (
        "slice",
        "type",
        "chips",
        "devices",
        "hosts",
        "HBM/device",
        "bf16 TFLOP/s",
        "HBM GB/s",
    )
    rows = [
        (
            s.name,
            f"{(s.chip.aliases or (s.chip.name,))[0] if s.chip.name == 'v5e' else s.chip.name}-"
            f"{s.num_chips * (s.chip.cores if s.chip.counts == 'cores' else 1)}",
            str(s.num_chips),
            str(s.num_devices),
            str(s.num_hosts),
            size_text(s.hbm_bytes),
            f"{s.peak_flops() / 1e12:,.0f}",
            f"{s.hbm_bandwidth / 1e9:,.0f}",
        )
        for s in slices
    ]
    print(text_table(header, rows))
    print("3D chips also take any sides that are multiples of 4; '2*v5e:16x16' joins two slices.")
    return 0


def _add_devices(commands: Any) -> None:
    parser = commands.add_parser("devices", help="the devices that JAX sees here")
    parser.set_defaults(run=_devices)


def _devices(options: argparse.Namespace) -> int:
    start_without_tpu()
    import jax

    rows = [
        (str(d.id), d.platform, d.device_kind, str(getattr(d, "coords", "")), str(d.process_index))
        for d in jax.devices()
    ]
    print(text_table(("id", "platform", "kind", "coords", "process"), rows))
    return 0


def _add_dry_run(commands: Any) -> None:
    parser = commands.add_parser(
        "dry-run",
        help="compile a model for a slice nobody has to own; exit code 1 if it does not fit",
    )
    parser.add_argument("build", help="module:function that returns a compiled model")
    parser.add_argument("--topology", required=True, help="the slice, such as v5e:16x16")
    _add_strategy(parser)
    parser.add_argument("--remat", help="full, dots, attention, or pattern=policy,...")
    parser.add_argument("--batch-size", type=int, required=True, help="rows of all devices")
    parser.add_argument(
        "--x", help="input, such as int32:512 or float32:224,224,3, without the batch"
    )
    parser.add_argument("--y", help="target, likewise")
    parser.add_argument("--mode", default="train", choices=("train", "evaluate", "predict"))
    parser.add_argument("--effort", default="quick", choices=("quick", "exact"))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_dry_run)


def _add_strategy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", help="axis sizes, such as data=64,model=4; default: data=-1")
    parser.add_argument(
        "--layout", help="fsdp, tensor_parallel, auto, or a JSON file of LayoutRules"
    )


def _add_lint(commands: Any) -> None:
    parser = commands.add_parser(
        "lint", help="mistakes in the layouts of what a function builds; exit code 1 if there are"
    )
    parser.add_argument(
        "build",
        help="module:function or FILE.py:function, which returns (model, strategy), or a model "
        "alone as for dry-run",
    )
    parser.add_argument("--topology", help="the slice, such as v5e:16x16; default: what is here")
    _add_strategy(parser)
    parser.add_argument("--batch-size", type=int, help="rows of all devices")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_lint)


def _add_launch(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a script as several processes with simulated devices, as on several hosts; the "
        "script calls ktd.initialize()",
    )
    parser.add_argument("--processes", type=int, default=2, help="how many; default: 2")
    parser.add_argument("--devices", type=int, default=4, help="CPU devices of each; default: 4")
    parser.add_argument("-m", action="store_true", dest="module", help="script names a module")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from keras_tpu_dist.processes.launch import launch

    if options.processes < 1 or options.devices < 1:
        raise ValueError(
            message(
                "There is at least one process, with at least one device.",
                received={"processes": options.processes, "devices": options.devices},
                fix="Write --processes 2 --devices 4.",
            )
        )
    as_module = ["-m"] if options.module else []
    command = [sys.executable, *as_module, options.script, *options.arguments]
    return launch(command, options.processes, options.devices)


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser("checkpoint", help="what a directory of checkpoints holds")
    parser.add_argument("directory", help="that of keras_tpu_dist.callbacks.Checkpoint")
    parser.add_argument("--diff", metavar="DIRECTORY", help="compare the newest with another's")
    parser.add_argument("--to-keras", metavar="FILE", help="write .keras or .weights.h5")
    parser.add_argument("--build", help="module:function that returns the model, for --to-keras")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_checkpoint)


def _checkpoint(options: argparse.Namespace) -> int:
    from keras_tpu_dist.checkpoint import CheckpointError, restore
    from keras_tpu_dist.checkpoint.contents import contents, difference

    try:
        if options.to_keras is not None:
            print(_converted(options, restore))
            return 0
        if options.diff is not None:
            found = difference(options.directory, options.diff)
        else:
            found = contents(options.directory)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    print(json.dumps(found.to_dict(), indent=1) if options.json else found)
    return 0


def _converted(options: argparse.Namespace, restore: Callable) -> Any:
    """Writes a checkpoint as a file of Keras's, and gives back what was loaded."""
    with show_progress(), stages("checkpoint", 3) as begin:
        begin("building")
        model = _build_function(options.build or "")()
        begin("reading")
        report = restore(model, options.directory, options.step)
        begin(f"writing {options.to_keras}")
        save = model.save if options.to_keras.endswith(".keras") else model.save_weights
        save(options.to_keras)
    return report


def _lint(options: argparse.Namespace) -> int:
    model, strategy = _linted(options)
    report = strategy.lint(model, batch_size=options.batch_size)
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 0 if report.ok else 1


def _linted(options: argparse.Namespace) -> tuple:
    """A model and its strategy: the function's own, or that of the options."""
    if options.topology is not None:
        start_without_tpu()
    import keras

    from keras_tpu_dist.strategy import TPUStrategy

    build = _build_function(options.build)
    if (options.topology, options.mesh, options.layout) == (None, None, None):
        built = build()
        pair = isinstance(built, (tuple, list)) and len(built) == 2
        if pair and isinstance(built[0], keras.Model) and isinstance(built[1], TPUStrategy):
            return tuple(built)
        raise ValueError(
            message(
                "A function to lint returns (model, strategy), unless the strategy is given here.",
                received={"build": options.build, "which returned": type(built).__name__},
                fix="Add --mesh data=4,model=2, --layout fsdp or --topology v5e:4x4.",
            )
        )
    strategy = TPUStrategy(_mesh(options.mesh), _layout(options.layout), topology=options.topology)
    with strategy.scope():
        built = build()
    model = built[0] if isinstance(built, (tuple, list)) and built else built
    if not isinstance(model, keras.Model):
        raise ValueError(
            message(
                "A function to lint returns a model, or a model and a strategy.",
                received={"build": options.build, "which returned": type(model).__name__},
                fix="End it with `return model`.",
            )
        )
    return model, strategy


def _dry_run(options: argparse.Namespace) -> int:
    if options.html is not None:
        file_of(options.html)  # not only after minutes
    start_without_tpu()
    from keras_tpu_dist.dryrun.run import dry_run
    from keras_tpu_dist.strategy import TPUStrategy

    strategy = TPUStrategy(
        _mesh(options.mesh),
        _layout(options.layout),
        topology=options.topology,
        remat=_remat(options.remat),
    )
    with show_progress():
        result = dry_run(
            _build_function(options.build),
            strategy,
            x=_array(options.x),
            y=_array(options.y),
            batch_size=options.batch_size,
            mode=options.mode,
            effort=options.effort,
            timeout=options.timeout,
        )
    if options.html is not None:
        result.to_html(options.html)
    print(result.to_json() if options.json else result)
    return 1 if result.fits is False else 0


def _remat(text: str | None) -> str | dict[str, str] | None:
    if text is None or "=" not in text:
        return text
    pairs = [rule.partition("=") for rule in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(
            message(
                "--remat is a policy, or patterns with one each.",
                received={"remat": text},
                fix="Write --remat as full, or as block_*=dots,head=full.",
            )
        )
    return {pattern.strip(): policy.strip() for pattern, _, policy in pairs}


def _build_function(name: str) -> Callable:
    module, colon, attribute = name.rpartition(":")
    if not colon or module.startswith(".") or not module:
        raise ValueError(
            message(
                "The function that builds is named as module:function or FILE.py:function.",
                received={"build": name},
                fix="Write for example models:build or path/to/models.py:build.",
            )
        )
    sys.path.insert(0, os.getcwd())
    found = _module_of_file(module) if module.endswith(".py") else importlib.import_module(module)
    if not callable(getattr(found, attribute, None)):
        raise ValueError(
            message(
                f"Module {module!r} has no function {attribute!r}.",
                received={"build": name},
                fix="Name a function in it.",
                name=attribute,
                choices=[n for n, value in vars(found).items() if callable(value)],
            )
        )
    return getattr(found, attribute)


def _module_of_file(file: str) -> Any:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(
            message(
                "FILE.py:function names a Python file that exists.",
                received={"file": file},
                fix="Give the path of one.",
            )
        )
    module = importlib.util.module_from_spec(spec)
    # A model's pickles and dataclasses look their module up.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _mesh(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        sizes = {name.strip(): int(number) for name, _, number in pairs}
    except ValueError:
        sizes = {}
    if not sizes or len(sizes) < len(pairs) or not all(sizes):
        raise ValueError(
            message(
                "--mesh has axes with their sizes, each axis once.",
                received={"mesh": text},
                fix="Write --mesh as data=64,model=4.",
            )
        )
    return sizes


def _layout(text: str | None) -> Any:
    if text is None or not text.endswith(".json"):
        return text
    from keras_tpu_dist.layout.rules import LayoutRules

    return LayoutRules.from_json(Path(text).read_text())


def _array(text: str | None) -> Any:
    if text is None:
        return None
    import jax

    dtype, _, dims = text.partition(":")
    try:
        shape = tuple(int(n) for n in dims.split(",") if n)
        jax.numpy.empty(0, dtype)  # refuses strings and objects
        if min(shape, default=1) < 1:
            raise ValueError(shape)
        return jax.ShapeDtypeStruct((1, *shape), dtype)
    except (ValueError, TypeError, OverflowError, SyntaxError):
        raise ValueError(
            message(
                "An input is described as dtype:sizes.",
                received={"input": text},
                fix="Write an input as dtype:sizes, such as int32:512.",
            )
        ) from None


_COMMANDS = (
    _add_topologies,
    _add_devices,
    _add_dry_run,
    _add_lint,
    _add_launch,
    _add_checkpoint,
)


if __name__ == "__main__":
    sys.exit(main())
