"""Loads files and directories that Keras saved: all of it, or one error."""

import contextlib
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.barriers import in_all
from keras_tpu_dist.checkpoint.beside import give_to_layers, load_values
from keras_tpu_dist.checkpoint.compiled import has_trained, one_family
from keras_tpu_dist.checkpoint.manifest import CheckpointError, checkpoint_error
from keras_tpu_dist.checkpoint.names import (
    Matching,
    canonical,
    check_excluded,
    same_kind,
)
from keras_tpu_dist.checkpoint.reader import (
    folder,
)
from keras_tpu_dist.checkpoint.restored import (
    GROUP_BYTES,
    Restored,
    assign_in_groups,
    grouped,
)
from keras_tpu_dist.checkpoint.slots import begin_slots, build_optimizer
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.patterns import matches

logger = logging.getLogger("keras_tpu_dist")

SUFFIXES = (".keras", ".weights.h5", ".weights.json")
# Space in HDF5 files besides the arrays, for names and the tree of groups.
_SLACK_BYTES = 16 * 2**20
_OPTIMIZER = "optimizer/"
# In the directory of a checkpoint of `keras.callbacks.OrbaxCheckpoint`.
_ARRAYS_OF_KERAS = "pytree"
# A wrapping optimizer (LossScaleOptimizer) saves the inner optimizer's variables again below it.
_OPTIMIZER_VARIABLES = "optimizer/vars/"


def is_file_of_keras(path: str | os.PathLike) -> bool:
    """Whether a path has the suffix of a file with weights that Keras saves.

    Args:
        path: The path.
    """
    return os.fspath(path).endswith(SUFFIXES)


def load_file(
    model: Any,
    path: str | os.PathLike,
    strict: bool,
    exclude: tuple[str, ...],
    alone: bool,
    optimizer: bool = True,
) -> Restored:
    """Loads a Keras file into a model, in groups of 64 MiB.

    Keras's files identify variables by the model's structure and not by their names, so there is
    nothing to rename.

    Args:
        model: A built model.
        path: The file.
        strict: See `restore`.
        exclude: See `restore`; the patterns are for the model's paths.
        alone: Whether this process reads without the others, if there are several.
        optimizer: Whether the optimizer's state is loaded, too, if it fits.
    """
    name = os.fspath(path)
    with contextlib.ExitStack() as stack:

        def opened() -> tuple[Any, dict, dict]:
            # This opens every part of the file, so a damaged one fails before the model changes.
            with file_errors(name):
                file = _keras.WeightsFile(name, most_bytes(model))
                stack.callback(file.close)
                return file, file.names(), file.dtypes()

        def mark(opened: tuple[Any, dict, dict]) -> str:
            return f"crc32 {zlib.crc32(repr(opened[1:]).encode())}"

        file, saved, dtypes = in_all(f"opening {name}", opened, mark, alone=alone)
        layers = _layers_of_values(model, exclude)
        trained = has_trained(getattr(model, "optimizer", None))

        def names_of(starts: list[str]) -> list[str]:
            with file_errors(name):
                return [file.name_of(start) for start in starts]

        report, chosen = _chosen(
            model, saved, dtypes, name, strict, exclude, layers, names_of if optimizer else None
        )

        def read(group: list[tuple[str, Any]]) -> list[Any]:
            with file_errors(name):
                return [file.read(n) for n, _ in group]

        assign_in_groups(
            list(grouped(chosen, lambda pair: pair[1].value.nbytes, GROUP_BYTES)),
            lambda group: in_all(f"reading {name}", lambda: read(group), alone=alone),
            trained,
        )
        begin_slots(
            model, [variable for n, variable in chosen if n.startswith(_OPTIMIZER)], trained
        )

        def values_of(start: str) -> dict[str, Any]:
            names = [n for n in saved if _is_in(n, (start,))]
            size, most = 8 * sum(math.prod(saved[n]) for n in names), most_bytes(model)
            with file_errors(name):
                if size > most:
                    raise ValueError(f"{start} takes {size} bytes, this model at most {most}")
                return {n.removeprefix(start): file.read(n) for n in names}

        for start, layer in layers.items():
            values = in_all(f"reading {name}", lambda start=start: values_of(start), alone=alone)
            load_values(layer, values, repr(name), [model])
    give_to_layers(model, [variable for _, variable in chosen], repr(name), set(layers.values()))
    _keras.forget_state(model)
    return report


def most_bytes(model: Any) -> int:
    """The largest valid size of a file: every weight with three slots, 8 bytes per element."""
    numbers = sum(math.prod(variable.shape) for variable in model.variables)
    return _SLACK_BYTES + 4 * 8 * numbers


def _chosen(
    model: Any,
    saved: dict[str, tuple[int, ...]],
    dtypes: dict[str, str],
    name: str,
    strict: bool,
    exclude: tuple[str, ...],
    layers: Mapping[str, Any],
    names_of: Callable[[list[str]], list[str]] | None,
) -> tuple[Restored, list[tuple[str, Any]]]:
    """The report of a file, and the model's variables to load, with their names in the file.

    Args:
        names_of: Reads the names of objects, by the start of what they saved; `None` to leave the
            optimizer as it is.
    """
    here = {n: v for n, v in _keras.names_in_files(model)[0].items() if not _is_in(n, layers)}
    variables = {n: v for n, v in here.items() if isinstance(v, keras.Variable)}
    weights = {n: v for n, v in variables.items() if not n.startswith(_OPTIMIZER)}
    check_excluded(exclude, [variable.path for variable in weights.values()])
    wanted = {n: v for n, v in weights.items() if not matches(v.path, exclude)}
    fitting = [
        n
        for n, v in wanted.items()
        # A file has the dtype of a first value that an initializer gave, if nothing trained.
        if saved.get(n) == tuple(v.shape)
        and (same_kind(dtypes[n], v.dtype) or dtypes[n] == v.value.dtype)
    ]
    reshaped = [n for n in wanted if n in saved and n not in fitting]
    offered = [n for n in saved if not (n.startswith(_OPTIMIZER) or _is_in(n, layers))]
    matching = Matching(
        missing=tuple(v.path for n, v in wanted.items() if n not in saved),
        unexpected=tuple(n for n in offered if n not in weights),
        reshaped=tuple(
            f"{wanted[n].path} {tuple(wanted[n].shape)}, saved as {saved[n]}"
            + ("" if saved[n] != tuple(wanted[n].shape) else f" {dtypes[n]}")
            for n in reshaped
        ),
        kept=tuple(weights[n].path for n in sorted(weights.keys() - wanted.keys())),
    )
    if strict and not matching.complete:
        raise value_error(
            f"The file {name!r} must have exactly the weights of this model.",
            received=f"{'; '.join(matching.misfits)}.",
            fix="Pass exclude=[...], or strict=False to load only matching weights.",
        )
    whole = not (matching.missing or reshaped or matching.kept)
    optimizer = {}
    if whole and names_of is not None:
        optimizer = _optimizer_that_fits(model, saved, name, names_of)
    report = Restored(
        directory=name,
        step=0,
        loaded=tuple(weights[n].path for n in fitting),
        kept=(*matching.kept, *matching.missing, *(weights[n].path for n in reshaped)),
        unused=matching.unexpected,
        renamed={},
        optimizer=bool(optimizer),
    )
    return report, [*((n, weights[n]) for n in fitting), *optimizer.items()]


def _layers_of_values(model: Any, exclude: tuple[str, ...]) -> dict[str, Any]:
    """The layers that save other values than variables, by the start of their names in files.

    They load all of their values themselves, as in Keras: `Dense` with LoRA merges it into its
    kernel to save it, and sets it to zero when it loads.
    """
    by_name, starts = _keras.names_in_files(model)
    values = [n for n, value in by_name.items() if not isinstance(value, keras.Variable)]
    return {
        start: layer
        for layer in _keras.flatten_layers(model)
        if (start := starts.get(id(layer))) is not None
        and any(_is_in(n, (start,)) for n in values)
        and not any(matches(variable.path, exclude) for variable in layer.variables)
    }


def _is_in(name: str, starts: Iterable[str]) -> bool:
    """Whether a name is one of the layers with these starts, and not of a layer within them."""
    return any(name.startswith(start) and "/" not in name[len(start) :] for start in starts)


def _optimizer_that_fits(
    model: Any,
    saved: dict[str, tuple[int, ...]],
    name: str,
    names_of: Callable[[list[str]], list[str]],
) -> dict:
    """The optimizer's variables by name, if the file has exactly these; else an empty dict.

    A file has them in their order. Equal shapes do not tell Adam's means of gradients from
    `ScheduleFreeAdamW`'s copy of the weights, so the saved names of optimizers must fit, too.
    """
    shapes = {n: shape for n, shape in saved.items() if n.startswith(_OPTIMIZER_VARIABLES)}
    if not shapes:
        return {}
    build_optimizer(model)
    here, starts = _keras.names_in_files(model)
    variables = {n: v for n, v in here.items() if n.startswith(_OPTIMIZER_VARIABLES)}
    same = shapes == {n: tuple(v.shape) for n, v in variables.items()}
    optimizers = list(_keras.optimizers_in(model.optimizer).values())
    if same:
        names = names_of(
            [starts.get(id(optimizer), _OPTIMIZER_VARIABLES) for optimizer in optimizers]
        )
        names_here = {optimizer.name for optimizer in optimizers}
        same = all(
            _may_be(optimizer, there)
            and (there == optimizer.name or there not in names_here or _is_automatic(optimizer))
            for optimizer, there in zip(optimizers, names, strict=True)
        )
    if variables and not same:
        logger.warning("the optimizer's state is not loaded: that in %r does not fit", name)
        return {}
    return variables


def _is_automatic(optimizer: Any) -> bool:
    return canonical(optimizer.name) == _keras.to_snake_case(type(optimizer).__name__)


def _may_be(optimizer: Any, name: str) -> bool:
    """Whether an optimizer may have been saved with this name: it may be one that Keras makes."""
    kinds = {n for n, kind in vars(keras.optimizers).items() if isinstance(kind, type)}
    made = {_keras.to_snake_case(kind) for kind in kinds}
    families = [kind.__name__ for kind in type(optimizer).__mro__]
    is_given = canonical(name) in made and name != optimizer.name
    return not is_given or any(one_family(canonical(name), kind) for kind in families)


@contextlib.contextmanager
def file_errors(name: str) -> Iterator[None]:
    """A context in which any failure to read a file becomes a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{name!r} cannot be read: {words}") from error


def check_not_of_keras(directory: str | os.PathLike) -> None:
    """Raises a `CheckpointError` if `keras.callbacks.OrbaxCheckpoint` wrote the directory."""
    path = folder(directory)
    if not path.is_dir():
        return
    steps = [path, *(child for child in path.iterdir() if child.name.isdigit())]
    if any((step / _ARRAYS_OF_KERAS).is_dir() for step in steps):
        raise checkpoint_error(
            "restore reads checkpoints of keras_tpu_dist.callbacks.Checkpoint, and Keras's files.",
            received=f"{os.fspath(directory)!r}, which keras.callbacks.OrbaxCheckpoint wrote.",
            fix="Compile the model, and call model.load_weights(directory).",
        )
