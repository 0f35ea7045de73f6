"""Checks that the processes of a model have the same weights and make the same calls."""

import contextlib
import itertools
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.processes import watch
from keras_tpu_dist.processes.arrays import checksum
from keras_tpu_dist.processes.assigned import (
    assignments,
    differ,
    forget,
    parts_differ,
    sampled_bytes,
    times_of,
)
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import encoded

# Calls with many steps agree at their start. A call of one batch agrees only once in so many calls,
# because agreeing takes as long as a small step.
_BATCHES_BETWEEN = 32
_LONG_CALLS = ("fit", "evaluate", "predict")
_BEGIN_ALIKE = (
    "Call keras.utils.set_random_seed(0) in all processes before the model is built, or load its "
    "weights from a file."
)
_ASSIGN_EVERYWHERE = (
    "Assign weights, learning rates and other variables in all processes, with the same values, "
    "not under `if jax.process_index() == 0`."
)
# Keras's callbacks that write files, and the attribute with the path.
_FILES = {keras.callbacks.CSVLogger: "filename", keras.callbacks.TensorBoard: "log_dir"}


@dataclass
class Agreed:
    """What the processes have agreed on about a model.

    Attributes:
        batches_alone: The number of calls with one batch, such as `train_on_batch`.
    """

    weights: bool = False
    batches_alone: int = 0


@contextlib.contextmanager
def agreed_call(name: str, model: Any) -> Iterator[None]:
    """The context of a call that all processes make.

    Args:
        name: `"fit"`, `"evaluate"`, and so on.
        model: The model.
    """
    if name not in _LONG_CALLS:
        yield
        return
    what = f"{name} of model {model.name!r}"
    fix = f"Call model.{name} in all processes, with the same model."
    variables = _keras.state_variables(model) if _keras.is_built(model) else []
    _check_changes(what, fix, model, variables)
    with watch.during(what, watch.INSIDE):
        yield


@contextlib.contextmanager
def files_of_one(callbacks: Iterable) -> Iterator[None]:
    """The context of a call in which only process 0 writes the callbacks' files.

    All processes run all callbacks, because reading a weight may need all of them. The others write
    into a temporary directory, which is deleted.

    Args:
        callbacks: The callbacks of the call.
    """
    moved = []
    with tempfile.TemporaryDirectory() as elsewhere:
        for callback in callbacks:
            _check_no_backup(callback)
            names = [name for kind, name in _FILES.items() if isinstance(callback, kind)]
            if names and jax.process_index():
                path = str(getattr(callback, names[0]))
                moved.append((callback, names[0], path))
                setattr(callback, names[0], os.path.join(elsewhere, str(len(moved))))
        try:
            yield
        finally:
            for callback, name, path in moved:
                setattr(callback, name, path)


def _check_no_backup(callback: Any) -> None:
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise NotImplementedError(
            message(
                "Keras's BackupAndRestore does not support several processes.",
                received=f"{type(callback).__name__} in a fit of {jax.process_count()} processes.",
                fix="Use keras_tpu_dist.callbacks.Checkpoint.",
            )
        )


def compare_changes(model: Any) -> None:
    """Raises if processes assigned different values to a model's variables since the last check.

    Args:
        model: The model.
    """
    fix = "Let all processes run the same callbacks and the same number of epochs."
    variables = _keras.state_variables(model)
    what = f"comparing assigned values of model {model.name!r}"
    _check_changes(what, fix, model, variables)


def compare_now_and_then(agreed: Agreed, model: Any, name: str) -> None:
    """Compares assigned values, at every 32nd call with one batch. See `compare_changes`.

    Args:
        agreed: The agreements about the model, with the count of its calls.
        model: The model.
        name: The call: `"train_on_batch"`, `"fit"`, and so on.
    """
    if name not in _LONG_CALLS:
        agreed.batches_alone += 1
        if not agreed.batches_alone % _BATCHES_BETWEEN and _keras.is_built(model):
            compare_changes(model)


def _check_changes(what: str, fix: str, model: Any, variables: list) -> None:
    if agree(what, fix, assignments(variables), reduce=differ):
        # Only values decide: assigning the value that the others already have is not an error.
        compare_variables(f"model {model.name!r}", variables, after=True)
    forget(variables)


def compare_weights(agreed: Agreed, model: Any) -> None:
    """Raises if processes with the same part of a weight have different values.

    Args:
        agreed: The agreements about the model; the check is made once.
        model: The model, built or not.
    """
    if agreed.weights or not _keras.is_built(model):
        return
    compare_variables(f"model {model.name!r}", _keras.state_variables(model))
    agreed.weights = True


def compare_variables(owner: str, variables: list, *, after: bool = False) -> None:
    """Raises if processes with the same part of a variable have different values.

    Args:
        owner: The owner of the variables, in words that are the same in all processes.
        variables: The variables, the same in all processes.
        after: Whether they were equal before. If so, whole values are compared; otherwise only
            their first elements, which differ if seeds do.
    """
    fix = _ASSIGN_EVERYWHERE if after else _BEGIN_ALIKE
    named = [f"{v.path} {tuple(v.shape)} {v.dtype}{_layout_suffix(v)}" for v in variables]
    what = f"comparing the weights of {owner}"
    parts = _parts(variables, whole=after)
    if not agree(what, fix, _marks(named, parts), reduce=parts_differ):
        return
    mine = {
        "names": named,
        "parts": parts,
        "times": times_of(variables),
    }
    answers = agree(what, fix, mine)
    different = first_difference(named, [answer["names"] for answer in answers])
    if different is not None:
        process, _, here, there = different
        raise value_error(
            "All processes must build the same model.",
            received=f"{here} in process {jax.process_index()}, {there} in process {process}.",
            fix="Build the model in the same way in all processes.",
        )
    # Variables that not all processes assigned come first: the others differ because of them.
    all_did = [
        len(set(times)) == 1 for times in zip(*(answer["times"] for answer in answers), strict=True)
    ]
    parts = [answer["parts"] for answer in answers]
    for index in sorted(range(len(variables)), key=all_did.__getitem__):
        variable = variables[index]
        for place in {place for of_process in parts for place in of_process[index]}:
            checksums = {
                i: of_process[index][place]
                for i, of_process in enumerate(parts)
                if place in of_process[index]
            }
            if len(set(checksums.values())) > 1:
                raise value_error(
                    "All processes must have the same values in their variables."
                    if after
                    else "All processes must have the same weights.",
                    received=f"variable {variable.path!r}, which differs between processes "
                    f"{sorted(checksums)}.",
                    fix=fix,
                )


def _marks(named: list[str], parts: list[dict[str, int]]) -> dict[str, str]:
    """Checksums of a process's parts, equal in processes with the same values.

    One covers the variables and their layouts, and one every set of variables of which this process
    has the part at the same place: a few checksums for thousands of weights.
    """
    marks = {"": zlib.crc32(encoded(named).encode())}
    places: dict[str, list[int]] = {}
    for n, (name, of_one) in enumerate(zip(named, parts, strict=True)):
        layout = name.partition(" ")[2]
        for place, mark in of_one.items():
            places.setdefault(f"{layout} {place}", []).extend((n, mark))
    marks |= {place: zlib.crc32(encoded(items).encode()) for place, items in places.items()}
    return {f"{zlib.crc32(place.encode()):08x}": f"{mark:08x}" for place, mark in marks.items()}


def _layout_suffix(variable: Any) -> str:
    """The layout as text: processes with different plans would otherwise wait for one another."""
    spec = getattr(variable.value.sharding, "spec", ())
    return f" {spec}" if any(spec) else ""


def first_difference(mine: list[str], answers: list[list[str]]) -> tuple[int, int, str, str] | None:
    """A process with another list than this one, the first place where, and both items there."""
    for process, theirs in enumerate(answers):
        pairs = itertools.zip_longest(mine, theirs, fillvalue="nothing")
        for place, (here, there) in enumerate(pairs):
            if here != there:
                return process, place, here, there
    return None


def _parts(variables: list, whole: bool) -> list[dict[str, int]]:
    """For every variable, the checksums of the parts on this process's devices, by place."""
    checksums = []
    for variable in variables:
        shards = getattr(variable.value, "addressable_shards", ())
        by_place = {str(shard.index): shard for shard in shards}
        checksums.append({place: _part_checksum(s.data, whole) for place, s in by_place.items()})
    return checksums


def _part_checksum(part: Any, whole: bool) -> int:
    return zlib.crc32(sampled_bytes(part)) if whole else checksum(np.asarray(part))
