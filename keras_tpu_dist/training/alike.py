"""Several processes that run one model have the same weights, the same data, the same calls."""

import contextlib
import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.processes import watch
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.training.batch_axis import element_names, flatten
from keras_tpu_dist.training.membership import Membership

# Elements of an array that are compared: a difference in seed or order shows in the first ones.
_SAMPLE = 4096
# Calls that run many steps. What is done for each batch is not agreed on, to cost nothing.
_LONG_CALLS = ("fit", "evaluate", "predict")
_NO_BATCH = "no batch"


@contextlib.contextmanager
def together(name: str, model: Any) -> Iterator[None]:
    """The context of a call that all processes make.

    Args:
        name: `"fit"`, `"evaluate"`, and so on.
        model: The model.

    Raises:
        PeerError: If they do not.
    """
    if name not in _LONG_CALLS:
        yield
        return
    what = f"{name} of model {model.name!r}"
    agree(what, fix=f"Call model.{name} in all processes, with the same model.")
    outer = watch.at(f"in {what}", inside=True)
    try:
        yield
    except BaseException:
        watch.at(f"in {what}", inside=False)
        raise
    if outer is not None and outer[1]:
        watch.at(outer[0], inside=True)
    else:
        watch.at(f"after {what}", inside=False)


def check_callbacks(callbacks: Any) -> None:
    """Raises for callbacks whose files several processes would write.

    Args:
        callbacks: What `fit` was given.

    Raises:
        NotImplementedError: On all processes.
    """
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise NotImplementedError(
                message(
                    "BackupAndRestore works in one process for now.",
                    received=f"{type(callback).__name__} in a fit of {jax.process_count()} "
                    "processes.",
                    fix="Use keras.callbacks.ModelCheckpoint, which writes in one of them.",
                )
            )
        writes = isinstance(callback, (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard))
        if writes and jax.process_index():
            raise ValueError(
                message(
                    "Files of logs are written by process 0.",
                    received=f"{type(callback).__name__} in process {jax.process_index()}.",
                    fix="Write callbacks=[...] if jax.process_index() == 0 else [].",
                )
            )


def compare_weights(member: Membership, model: Any) -> None:
    """Raises if processes that hold the same part of a weight do not agree on its values.

    Args:
        member: The model's membership; it is done once for each.
        model: The model, built or not.

    Raises:
        ValueError: On all processes.
    """
    if member.compared or not _keras.is_built(model):
        return
    variables = _keras.state_variables(model)
    fix = (
        "Call keras.utils.set_random_seed(0) in all processes before the model is built, or load "
        "its weights from a file."
    )
    named = [f"{v.path} {tuple(v.shape)} {v.dtype}" for v in variables]
    what = f"comparing the weights of model {model.name!r}"
    told = agree(what, fix, {"names": named, "parts": _parts(variables)})
    _check_same_variables(named, [each["names"] for each in told])
    told = [each["parts"] for each in told]
    for index, variable in enumerate(variables):
        for part in {part for each in told for part in each[index]}:
            marks = {i: each[index][part] for i, each in enumerate(told) if part in each[index]}
            if len(set(marks.values())) > 1:
                raise ValueError(
                    message(
                        "All processes hold the same weights.",
                        received=f"variable {variable.path!r}, which differs between processes "
                        f"{sorted(marks)}.",
                        fix=fix,
                    )
                )
    member.compared = True


def _check_same_variables(mine: list[str], told: list[list[str]]) -> None:
    for i, theirs in enumerate(told):
        pairs = itertools.zip_longest(mine, theirs, fillvalue="nothing")
        different = next(((a, b) for a, b in pairs if a != b), None)
        if different is not None:
            raise ValueError(
                message(
                    "All processes build the same model.",
                    received=f"{different[0]} in process {jax.process_index()}, {different[1]} in "
                    f"process {i}.",
                    fix="Let nothing in the build depend on the process.",
                )
            )


def compared(batches: Iterable) -> Iterator:
    """Batches of which all processes have the same, the first compared.

    Args:
        batches: Host batches.

    Raises:
        ValueError: On all processes, if the first ones differ.
    """
    batches = iter(batches)
    first = next(batches, None)
    fix = (
        "Give each process the same arrays, or the same stream in the same order: seed what "
        "shuffles it (keras.utils.set_random_seed, tf.data.Dataset.shuffle(seed=...))."
    )
    mine = [_NO_BATCH] if first is None else _marks(first)
    for i, theirs in enumerate(agree("the first batch of an epoch", fix, mine)):
        if theirs != mine:
            names = ["batch"] if first is None else element_names(first)
            element = next((n for n, a, b in zip(names, mine, theirs) if a != b), "batch")
            raise ValueError(
                message(
                    "All processes read the same batches.",
                    received=f"{element} of an epoch's first batch, which differs between process "
                    f"{jax.process_index()} and process {i}.",
                    fix=fix,
                )
            )
    if first is not None:
        yield first
        yield from batches


def _marks(batch: Any) -> list[str]:
    leaves = [np.asarray(leaf) for leaf in flatten(batch)[0]]
    return [f"{leaf.shape} {leaf.dtype} {_mark(leaf)}" for leaf in leaves]


def _mark(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array.ravel()[:_SAMPLE]).tobytes())


def _parts(variables: list) -> list[dict[str, int]]:
    """For each variable a mark of each part that lies here."""
    marks = []
    for variable in variables:
        shards = getattr(variable.value, "addressable_shards", ())
        by_place = {str(shard.index): shard for shard in shards}
        marks.append({place: _mark(np.asarray(s.data)) for place, s in by_place.items()})
    return marks
