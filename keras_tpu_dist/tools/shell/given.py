"""Parses the arguments of commands: functions, meshes, layouts, inputs, slices, prices."""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import jax
import keras

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.simulation import simulate
from keras_tpu_dist.layout.rules import LayoutRules
from keras_tpu_dist.strategy import TPUStrategy

_MODEL_OR_PAIR = "a model, or (model, strategy)"


def build_function(name: str) -> Callable:
    """The function that an argument names.

    From here to the end of the command `sys.argv` has the module's file alone, as if it was run:
    the module, or the function, may parse it, and the command's options are not theirs.

    Args:
        name: `module:function` or `FILE.py:function`; `.py` may be left out of a path.

    Raises:
        ImportError: If its module cannot be imported.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or module.startswith(".") or not module:
        raise value_error(
            "Name the function that builds the model as module:function or FILE.py:function.",
            received={"build": name},
            fix="Write for example models:build or path/to/models.py:build.",
        )
    is_path = module.endswith(".py") or "/" in module or "\\" in module
    found = _module_of_file(module) if is_path else _module_named(module)
    if not callable(getattr(found, attribute, None)):
        raise value_error(
            f"Module {module!r} has no function {attribute!r}.",
            received={"build": name},
            fix=_fix_of_module(module),
            name=attribute,
            choices=[n for n, value in vars(found).items() if callable(value)],
        )
    function = getattr(found, attribute)
    _check_takes_nothing(function, name)
    return function


def _fix_of_module(module: str) -> str:
    if not module.endswith(".py") and Path(f"{module}.py").is_file():
        return f"Name a function in it; write {module}.py for the file in this folder."
    return "Name a function in it."


def _check_takes_nothing(function: Callable, name: str) -> None:
    try:
        needed = inspect.signature(function)
    except (ValueError, TypeError):  # of a class or function in C
        return
    try:
        needed.bind()
    except TypeError:
        raise value_error(
            "The function that builds the model takes no arguments.",
            received={"build": name, "arguments": str(needed)},
            fix="Write one that calls it, or give the arguments default values.",
        ) from None


def _module_of_file(file: str) -> Any:
    path = Path(file if file.endswith(".py") else f"{file}.py")
    if not path.is_file():
        raise value_error(
            "FILE.py:function must name an existing Python file.",
            received={"file": file},
            fix="Check the path.",
        )
    path = path.resolve()
    if (path.parent / "__init__.py").is_file():
        return _module_of_package(path)
    _search_in(path.parent, os.getcwd())
    name = _free_name(path)
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    # Pickles and dataclasses of a model look up their module.
    sys.modules[name] = found
    sys.argv = [str(path)]
    spec.loader.exec_module(found)
    return found


def _module_of_package(path: Path) -> Any:
    """The module of a file that belongs to a package, which it may name, and import relatively."""
    root = next(folder for folder in path.parents if not (folder / "__init__.py").is_file())
    package, *rest = path.relative_to(root).with_suffix("").parts
    _search_in(root, os.getcwd())
    first = find_spec(package)
    if first is None or os.path.realpath(first.origin or "") != str(root / package / "__init__.py"):
        raise value_error(
            f"Python finds another {package!r} before the package of this file.",
            received={"file": str(path), "found": first and first.origin},
            fix="Give your package another name, or uninstall the other one.",
        )
    sys.argv = [str(path)]
    return importlib.import_module(".".join([package, *rest]).removesuffix(".__init__"))


def _module_named(name: str) -> Any:
    _search_in(os.getcwd(), os.path.join(os.getcwd(), "src"))
    sys.argv = [name]
    found = importlib.import_module(name)
    sys.argv = [getattr(found, "__file__", None) or name]
    return found


def _search_in(*folders: str | os.PathLike[str]) -> None:
    """Lets the user's code import what is in folders, behind what is installed.

    Python puts the folder of a program first: with a `random.py` in it, Keras imports that one.
    """
    for folder in folders:
        path = str(os.path.realpath(folder))
        if path not in sys.path:
            sys.path.append(path)


def _free_name(path: Path) -> str:
    """The name of a file's module: its own, unless another module has it."""
    name = path.stem
    if not name.isidentifier():
        return name
    known: Any = sys.modules.get(name) or find_spec(name)
    origin = getattr(known, "__file__", None) or getattr(known, "origin", None)
    own = known is None or (origin is not None and os.path.realpath(origin) == str(path))
    return name if own else f"{name}_py"


def strategy_of(options: argparse.Namespace) -> TPUStrategy:
    """The strategy that `--mesh`, `--layout` and so on describe.

    Args:
        options: The options of a command.
    """
    return TPUStrategy(
        mesh_of(options.mesh),
        layout_of(options.layout),
        topology=options.topology,
        remat=remat_of(options.remat),
        shard_optimizer=options.shard_optimizer,
    )


def model_and_strategy(options: argparse.Namespace) -> tuple[Any, TPUStrategy]:
    """A model and its strategy: both from the function, or the strategy from the options.

    Args:
        options: The options of a command that builds a model on this machine.
    """
    simulate_devices(options)
    build = build_function(options.build)
    given = (options.topology, options.mesh, options.layout, options.remat)
    if given == (None, None, None, None) and not options.shard_optimizer:
        built = build()
        pair = isinstance(built, (tuple, list)) and len(built) == 2
        if pair and isinstance(built[0], keras.Model) and isinstance(built[1], TPUStrategy):
            return built[0], built[1]
        _check_model(
            built[0] if pair else built, built, options.build, options.command, _MODEL_OR_PAIR
        )
        raise value_error(
            f"A function for {options.command} must return (model, strategy) if the command "
            "has no options for the strategy.",
            received={"build": options.build, "which returned": type(built).__name__},
            fix="Add --mesh data=4,model=2, --layout fsdp or --topology v5e:4x4.",
        )
    strategy = strategy_of(options)
    with strategy.scope():
        built = build()
    model = built[0] if isinstance(built, (tuple, list)) and built else built
    _check_model(model, built, options.build, options.command, _MODEL_OR_PAIR)
    return model, strategy


def model_of(name: str, command: str) -> keras.Model:
    """The model that a function makes.

    Args:
        name: `module:function` or `FILE.py:function`.
        command: The command, for errors.
    """
    model = build_function(name)()
    _check_model(model, model, name, command)
    return model


def _check_model(
    model: Any, returned: Any, name: str, command: str, wanted: str = "a model"
) -> None:
    if not isinstance(model, keras.Model):
        raise value_error(
            f"A function for {command} must return {wanted}.",
            received={"build": name, "which returned": type(returned).__name__},
            fix="End it with `return model`.",
        )


def simulate_devices(options: argparse.Namespace) -> None:
    """Splits the CPU into the number of devices in `--devices`.

    Args:
        options: The options of a command that has `--devices` and `--topology`.
    """
    if options.devices is None:
        return
    if options.topology is not None:
        raise value_error(
            "--devices simulates devices on this machine; --topology names a slice.",
            received={"devices": options.devices, "topology": options.topology},
            fix="Use only one of them.",
        )
    simulate(options.devices)
    jax.devices()  # so that a module that simulates another number raises an error


def mesh_of(text: str | None) -> dict[str, int] | None:
    """Axis sizes, from `data=64,model=4`.

    Args:
        text: The word, or `None`.
    """
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        sizes = {name.strip(): int(number) for name, _, number in pairs}
    except ValueError:
        sizes = {}
    if not sizes or len(sizes) < len(pairs) or not all(sizes):
        raise value_error(
            "--mesh is a list of axes with their sizes, without repetitions.",
            received={"mesh": text},
            fix="Write --mesh as data=64,model=4.",
        )
    return sizes


def layout_of(text: str | None) -> Any:
    """A layout, from its name or a JSON file.

    Args:
        text: The word; `None` and `none` replicate.
    """
    if text is None or text == "none":
        return None
    if not text.endswith(".json"):
        return text
    return LayoutRules.from_json(Path(text).read_text())


def remat_of(text: str | None) -> str | dict[str, str] | None:
    """A policy, or policies by pattern, from `full` or `block_*=dots,head=full`.

    Args:
        text: The word, or `None`.
    """
    if text is None or "=" not in text:
        return text
    pairs = [rule.partition("=") for rule in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise value_error(
            "--remat is a policy, or a list of patterns with policies.",
            received={"remat": text},
            fix="Write --remat as full, or as block_*=dots,head=full.",
        )
    return {pattern.strip(): policy.strip() for pattern, _, policy in pairs}


def inputs_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments `x`, `y` and `sequence_length` of a dry run.

    Args:
        options: The options of a command that has `--x`, `--y` and `--sequence-length`.
    """
    return {
        "x": _array(options.x),
        "y": _array(options.y),
        "sequence_length": options.sequence_length,
    }


def _array(text: str | None) -> Any:
    if text is None:
        return None
    dtype, _, dims = text.partition(":")
    try:
        shape = tuple(int(n) for n in dims.split(",") if n)
        jax.numpy.empty(0, dtype)  # raises an error for strings and objects
        if min(shape, default=1) < 1:
            raise ValueError(shape)
        return jax.ShapeDtypeStruct((1, *shape), dtype)
    except (ValueError, TypeError, OverflowError, SyntaxError):
        raise value_error(
            "An input is a dtype and sizes.",
            received={"input": text},
            fix="Write an input as dtype:sizes, such as int32:512.",
        ) from None


def prices_of(text: str | None) -> dict[str, float] | None:
    """The prices of a chip-hour, from `v5e=1.20,v6e=2.70`."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return {chip.strip(): float(price) for chip, _, price in pairs}
    except ValueError:
        raise value_error(
            "--price is the price of a chip-hour for each chip.",
            received={"price": text},
            fix="Write --price v5e=1.20,v6e=2.70.",
        ) from None
