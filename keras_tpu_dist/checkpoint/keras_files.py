"""Loads files and directories that Keras saved: all of it, or one error."""

import contextlib
import logging
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.barriers import in_all
from keras_tpu_dist.checkpoint.beside import give_to_layers, load_values
from keras_tpu_dist.checkpoint.compiled import has_trained
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest, Saved
from keras_tpu_dist.checkpoint.names import (
    METRICS,
    OPTIMIZER,
    SLOTS,
    WEIGHTS,
    Entry,
    Matching,
    check_excluded,
    in_order_of_numbers,
    named_state,
    same_kind,
)
from keras_tpu_dist.checkpoint.reader import (
    CheckpointReader,
    checkpoint_errors,
    flat,
    folder,
    orbax,
)
from keras_tpu_dist.checkpoint.restored import (
    GROUP_BYTES,
    Restored,
    assign_in_groups,
    build_optimizer,
    grouped,
)
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.patterns import matches

logger = logging.getLogger("keras_tpu_dist")

SUFFIXES = (".keras", ".weights.h5", ".weights.json")
# Space in HDF5 files besides the arrays, for names and the tree of groups.
_SLACK_BYTES = 16 * 2**20
_OPTIMIZER = "optimizer/"
# A wrapping optimizer (LossScaleOptimizer) saves the inner optimizer's variables again below it.
_OPTIMIZER_VARIABLES = "optimizer/vars/"


def is_file_of_keras(path: str | os.PathLike) -> bool:
    """Whether a path has the suffix of a file with weights that Keras saves."""
    return os.fspath(path).endswith(SUFFIXES)


def load_file(
    model: Any, path: str | os.PathLike, strict: bool, exclude: tuple[str, ...], alone: bool
) -> Restored:
    """Loads a Keras file into a model, in groups of 64 MiB.

    Keras's files identify variables by the model's structure and not by their names, so there is
    nothing to rename.
    """
    name = os.fspath(path)
    with contextlib.ExitStack() as stack:

        def opened() -> tuple[Any, dict, dict]:
            # This opens every part of the file, so a damaged one fails before the model changes.
            with _file_errors(name):
                file = _keras.WeightsFile(name, _most_bytes(model))
                stack.callback(file.close)
                return file, file.names(), file.dtypes()

        def mark(opened: tuple[Any, dict, dict]) -> str:
            return f"crc32 {zlib.crc32(repr(opened[1:]).encode())}"

        file, saved, dtypes = in_all(f"opening {name}", opened, mark, alone=alone)
        layers = _layers_of_values(model, exclude)
        report, chosen = _chosen(model, saved, dtypes, name, strict, exclude, layers)

        def read(group: list[tuple[str, Any]]) -> list[Any]:
            with _file_errors(name):
                return [file.read(n) for n, _ in group]

        assign_in_groups(
            list(grouped(chosen, lambda pair: pair[1].value.nbytes, GROUP_BYTES)),
            lambda group: in_all(f"reading {name}", lambda: read(group), alone=alone),
            has_trained(getattr(model, "optimizer", None)),
        )

        def values_of(start: str) -> dict[str, Any]:
            names = [n for n in saved if _is_in(n, (start,))]
            size, most = 8 * sum(math.prod(saved[n]) for n in names), _most_bytes(model)
            with _file_errors(name):
                if size > most:
                    raise ValueError(f"{start} takes {size} bytes, this model at most {most}")
                return {n.removeprefix(start): file.read(n) for n in names}

        for start, layer in layers.items():
            values = in_all(f"reading {name}", lambda start=start: values_of(start), alone=alone)
            load_values(layer, values, repr(name), [model])
    give_to_layers(model, [variable for _, variable in chosen], repr(name), set(layers.values()))
    _keras.forget_state(model)
    return report


def _most_bytes(model: Any) -> int:
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
) -> tuple[Restored, list[tuple[str, Any]]]:
    """The report of a file, and the model's variables to load, with their names in the file."""
    here = {n: v for n, v in _keras.names_in_files(model)[0].items() if not _is_in(n, layers)}
    variables = {n: v for n, v in here.items() if isinstance(v, keras.Variable)}
    weights = {n: v for n, v in variables.items() if not n.startswith(_OPTIMIZER)}
    check_excluded(exclude, [variable.path for variable in weights.values()])
    wanted = {n: v for n, v in weights.items() if not matches(v.path, exclude)}
    fitting = [
        n
        for n, v in wanted.items()
        if saved.get(n) == tuple(v.shape) and same_kind(dtypes[n], v.dtype)
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
    optimizer = _optimizer_that_fits(model, saved, name) if whole else {}
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
    found, starts = _keras.names_in_files(model)
    values = [n for n, value in found.items() if not isinstance(value, keras.Variable)]
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


def _optimizer_that_fits(model: Any, saved: dict[str, tuple[int, ...]], name: str) -> dict:
    """The optimizer's variables by name, if the file has exactly these; else an empty dict."""
    shapes = {n: shape for n, shape in saved.items() if n.startswith(_OPTIMIZER_VARIABLES)}
    if not shapes:
        return {}
    build_optimizer(model)
    here, _ = _keras.names_in_files(model)
    found = {n: v for n, v in here.items() if n.startswith(_OPTIMIZER_VARIABLES)}
    if found and shapes != {n: tuple(v.shape) for n, v in found.items()}:
        logger.warning("the optimizer's state is not loaded: that in %r does not fit", name)
        return {}
    return found


@contextlib.contextmanager
def _file_errors(name: str) -> Iterator[None]:
    """A context in which any failure to read a file becomes a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{name!r} cannot be read: {words}") from error


_ARRAYS = "pytree"
# The groups of Keras's `get_state_tree`. Both kinds of weights are one kind here, because a frozen
# weight may have been trainable when it was saved.
_KINDS = {
    "trainable_variables": WEIGHTS,
    "non_trainable_variables": WEIGHTS,
    "optimizer_variables": OPTIMIZER,
    "metrics_variables": METRICS,
}


def is_directory_of_keras(directory: str | os.PathLike) -> bool:
    """Whether Keras's callback wrote a directory of checkpoints, or one of those in it."""
    path = folder(directory)
    if not path.is_dir():
        return False
    return (path / _ARRAYS).is_dir() or any(
        (path_in / _ARRAYS).is_dir() for path_in in path.iterdir() if path_in.name.isdigit()
    )


class KerasDirectory(CheckpointReader):
    """The checkpoints of `keras.callbacks.OrbaxCheckpoint`.

    Keras saves arrays by the paths of variables, without checksums, so damaged values are not
    detected.
    """

    @property
    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, the newest last."""
        if self._is_one:
            return [int(self._root.name) if self._root.name.isdigit() else 0]
        with checkpoint_errors(self.directory, "read"):
            return sorted(orbax().utils.checkpoint_steps(self._root))

    @property
    def steps_of_run(self) -> list[int]:
        """See `CheckpointReader`; Keras notes no run."""
        return self.steps

    def manifest(self, step: int, name: str = "") -> Manifest:
        """See `CheckpointReader`."""
        with checkpoint_errors(self.directory, "read", step):
            tree = orbax().PyTreeCheckpointHandler().metadata(self._arrays(step)).tree
        arrays: dict[str, list[Saved]] = {kind: [] for kind in (WEIGHTS, SLOTS, OPTIMIZER, METRICS)}
        for group, kind in _KINDS.items():
            for path, leaf in flat(tree.get(group) or {}):
                entry = Entry(path, tuple(leaf.shape), str(leaf.dtype))
                arrays[kind].append(Saved(entry, f"{group}/{path}", 0))
        arrays |= _slots_apart(arrays)
        optimizer = next((saved.entry.path for saved in arrays[OPTIMIZER]), "")
        return Manifest(
            {
                kind: tuple(in_order_of_numbers(rows, lambda saved: saved.entry.path))
                for kind, rows in arrays.items()
            },
            written={"optimizer": optimizer.partition("/")[0]},
        )

    def _check(self, step: int, saved: Sequence[Saved], arrays: list) -> None:
        """Checks nothing: there are no checksums."""

    @staticmethod
    def state_of(model: Any) -> dict[str, list[tuple[Entry, Any]]]:
        """The model's state, with Keras's names for slots, in the manifest's order."""
        state = named_state(model)
        state[SLOTS] = [
            (replace(entry, slot=_after(entry.path, variable.path)), variable)
            for entry, variable in state[SLOTS]
        ]
        return {
            kind: in_order_of_numbers(pairs, lambda pair: pair[0].path)
            for kind, pairs in state.items()
        }

    @property
    def _is_one(self) -> bool:
        return (self._root / _ARRAYS).is_dir()

    def _arrays(self, step: int) -> Any:
        return (self._root if self._is_one else self._root / str(step)) / _ARRAYS


def _slots_apart(arrays: Mapping[str, list[Saved]]) -> dict[str, list[Saved]]:
    """Separates slots: Keras names a slot by its weight's path, with underscores, and its name."""
    by_name = {saved.entry.path.replace("/", "_"): saved.entry.path for saved in arrays[WEIGHTS]}
    slots, rest = [], []
    for saved in arrays[OPTIMIZER]:
        last = saved.entry.path.rpartition("/")[2]
        names = [name for name in by_name if last.startswith(f"{name}_")]
        if not names:
            rest.append(saved)
            continue
        path = by_name[max(names, key=len)]
        entry = Entry(path, saved.entry.shape, saved.entry.dtype, _after(path, saved.entry.path))
        slots.append(Saved(entry, saved.key, saved.fingerprint))
    return {SLOTS: slots, OPTIMIZER: rest}


def _after(weight: str, slot: str) -> str:
    return slot.rpartition("/")[2].removeprefix(weight.replace("/", "_") + "_")
