"""Compares a launch on the mesh with stock Keras on one device, and with itself, repeated."""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.tools.checkup.aside import aside
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.bench import Bench, Job, odd_ones, same_bits
from keras_tpu_dist.tools.checkup.bounds import LEAST, State, allowed, gap, is_half, largest
from keras_tpu_dist.tools.checkup.prepared import Prepared, on_one_device, prepared
from keras_tpu_dist.tools.checkup.report import (
    LEAVE_OUT,
    CheckPart,
    Problem,
    corrupts,
    counted,
    numbered,
)

_MOST_NAMED = 3
_GRADIENT = "the gradient of "


class _Gradients(keras.optimizers.Optimizer):
    """Stores the gradients, and does not change the weights."""

    def __init__(self):
        super().__init__(learning_rate=0.0, name="gradients")
        self.stored: dict[int, Any] = {}

    def build(self, variables):
        """See `keras.optimizers.Optimizer`."""
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            self.stored[id(variable)] = self.add_variable_from_reference(variable, "gradient")

    def update_step(self, gradient, variable, learning_rate):
        """See `keras.optimizers.Optimizer`."""
        self.assign(self.stored[id(variable)], gradient)


@dataclass(frozen=True)
class _Ran:
    """A launch that ran on the mesh, and its results.

    Args:
        alone: Runs it on one device: a function from host values to results.
    """

    step: Prepared
    names: list[str]
    first: list[jax.Array]
    second: list[jax.Array]
    alone: Callable[[State, list], list[np.ndarray]]


@dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Args:
        why_not: Why it was not compared with one device, or `""`.
    """

    problems: tuple[Problem, ...] = ()
    difference: float = 0.0
    why_not: str = ""


def own_step(bench: Bench, model: keras.Model, given: Given) -> CheckPart:
    """Compares a training step of the user's model on the mesh with the same step on one device.

    Args:
        bench: The check's shared state.
        model: The user's model; it does not change.
        given: The batch.
    """
    # A `train_step` of the model's own class may use its optimizer in any way.
    own = type(model).train_step is not keras.Model.train_step
    found = compared(bench, model, given, gradients=not own)
    if found.why_not:
        words = f"same bits when repeated; not compared with one device: {found.why_not}"
        return CheckPart("step", words)
    rows, count = given.rows(bench.strategy), len(model.trainable_variables)
    words = f"{model.name}, {rows} rows: loss and {count} gradients"
    if not found.problems:
        off = f"{found.difference:.0e}"
        words += f" the same as on one device within {off}, same bits when repeated"
    figures = {"largest difference": found.difference}
    return CheckPart("step", words, found.problems, figures)


def compared(
    bench: Bench,
    model: keras.Model,
    given: Given,
    *,
    steps: int = 1,
    gradients: bool = False,
) -> Compared:
    """Compares a launch of a model's training on the mesh with stock Keras on one device.

    Args:
        model: A model for which `why_not` returns `""`; it does not change.
        gradients: Whether to compare gradients, which no learning rate can hide, instead of
            weights. Only for one step of Keras's own.
    """
    with aside(), _run(bench, model, given, steps, gradients) as ran:
        problems = list(_different(bench, ran.step)) or list(_unsteady(bench, ran))
        if problems:
            return Compared(tuple(problems))
        expected, limits, why = _expected(bench, model, ran)
        if why:
            return Compared(why_not=why)
        return _judged(bench, ran, expected, limits)


@contextlib.contextmanager
def _run(
    bench: Bench, model: keras.Model, given: Given, steps: int, gradients: bool
) -> Iterator[_Ran]:
    """Runs the launch on the mesh twice, with a function that repeats it on one device."""
    reader = _Gradients() if gradients else None
    if reader is not None:
        reader.build(model.trainable_variables)
    with prepared(bench, model, given, reader, steps) as step:
        select, job = _selection(model, gradients), Job("step")
        args = step.placed_state, step.placed_batch
        results = [select(*bench.launches.run(job, step.program, *args)) for _ in range(2)]
        run = on_one_device(model, "train", bench.local[0])

        def alone(state: State, batches: list) -> list[np.ndarray]:
            outputs, after = run(state, batches)
            return [np.asarray(array) for array in select(outputs[-1], after)[1]]

        (names, first), (_, second) = results
        yield _Ran(step, names, first, second, alone)


def _selection(model: keras.Model, gradients: bool) -> Callable[[Any, Any], tuple[list[str], list]]:
    """A function that selects the results of a step to compare, with their names."""
    groups = _keras.state_groups(model)

    def select(outputs: Any, after: Any) -> tuple[list[str], list]:
        logs = outputs if isinstance(outputs, dict) else {}
        names, found = [], []
        if "loss" in logs:
            names, found = ["the loss"], [logs["loss"]]
        if gradients:
            reader: Any = model.optimizer
            values = dict(zip(map(id, groups[2]), after[2], strict=True))
            weights = model.trainable_variables
            slots = [values[id(reader.stored[id(weight)])] for weight in weights]
            chosen = [(_GRADIENT, weights, slots)]
        else:
            chosen = [("", groups[0], after[0])]
        chosen.append(("", groups[1], after[1]))
        for words, variables, arrays in chosen:
            names += [f"{words}{v.path}" for v in variables]
            found += list(arrays)
        return names, found

    return select


def _expected(
    bench: Bench, model: keras.Model, ran: _Ran
) -> tuple[list[np.ndarray], list[float], str]:
    """The results on one device, their tolerances, and why they are unknown, or `""`."""
    state, batches = ran.step.state, ran.step.batches
    try:
        expected = ran.alone(state, batches)
        half = is_half(model)
        least = _least(ran, expected)
        limits = allowed(ran.alone, state, batches, expected, bench.platform, half, least=least)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return [], [], "it does not fit in its memory"
        raise
    floats = [array for array in expected if array.dtype.kind not in "iub"]
    if not all(np.all(np.isfinite(np.asarray(array, np.float32))) for array in floats):
        return [], [], "its results are not finite there; give x= and y="
    return expected, limits, ""


def _least(ran: _Ran, expected: list[np.ndarray]) -> float:
    """What differences are relative to if an array is smaller.

    All gradients of a mean over many outputs may be small.
    """
    pairs = zip(ran.names, expected, strict=True)
    gradients = [largest(one) for name, one in pairs if name.startswith(_GRADIENT)]
    return min(LEAST, max(gradients, default=0.0) or LEAST)


def _judged(bench: Bench, ran: _Ran, expected: list[np.ndarray], limits: list[float]) -> Compared:
    """The devices with wrong results, and the largest difference."""
    mine: dict[int, list] = {}
    worst, least = 0.0, _least(ran, expected)
    for name, found, one, limit in zip(ran.names, ran.first, expected, limits, strict=True):
        scale = largest(one)
        for part in found.addressable_shards:
            off = gap(part.data, one[part.index], scale, least)
            worst = max(worst, off)
            if off > limit:
                mine.setdefault(part.device.id, []).append([off, limit, name])
    shown = {n: sorted(offs, reverse=True)[:_MOST_NAMED] for n, offs in mine.items()}
    every = bench.by_device("results of the step", shown)
    return Compared((_differs(bench, every),) if every else (), worst)


def _differs(bench: Bench, every: dict[int, list]) -> Problem:
    off, limit, name = max((item for of in every.values() for item in of), key=lambda e: e[0])
    names = list(dict.fromkeys(e[2] for of in every.values() for e in of))[:_MOST_NAMED]
    others = f" (also {', '.join(n for n in names if n != name)})" if len(names) > 1 else ""
    everywhere = len(every) == len(bench.devices)
    where = "all devices" if everywhere else numbered(every)
    what = (
        f"{where}: {name} differs from one device by {off:.1e}; rounding explains "
        f"{limit:.1e}{others}"
    )
    if everywhere:
        return Problem(
            what,
            "The program for the mesh does not compute what the model computes.",
            "Try layout=None and a mesh of one axis; report it with the model and the output of "
            "`ktd --version`.",
            tuple(sorted(every)),
        )
    return Problem(
        what,
        "These devices compute wrong results, or got the data of other devices.",
        LEAVE_OUT,
        tuple(sorted(every)),
    )


def _different(bench: Bench, step: Prepared) -> Iterator[Problem]:
    """The problem of processes whose weights differ from those of process 0."""
    mark = 0
    for value in (array for group in step.state for array in group):
        mark = _mark(value, mark)
    marks = bench.agreed("the model's weights", mark)
    others = [number for number, one in enumerate(marks) if one != marks[0]]
    if others:
        yield Problem(
            f"{counted('process', 'processes', others)}: the model's weights differ from those of "
            "process 0",
            "The processes drew different weights, so they do not train the same model.",
            "Call keras.utils.set_random_seed(0) in all processes before you build the model.",
        )


def _unsteady(bench: Bench, ran: _Ran) -> Iterator[Problem]:
    """The problems of devices with different bits: when repeated, or from equal copies."""
    again = bench.by_device("repeats of the step", _unlike_before(ran))
    odd = _odd_copies(bench, ran)
    if again:
        names = ", ".join(dict.fromkeys(again.values()))
        yield corrupts(f"the same training step ({names})", sorted(again))
    alone = sorted(set(odd) - set(again))
    if alone:
        yield Problem(
            f"{numbered(alone)}: after the step, the copy of a result differs from the copies on "
            "the other devices",
            "Copies that must be equal are not: the device computes or receives wrong values, and "
            "weights drift apart.",
            LEAVE_OUT,
            tuple(alone),
        )


def _unlike_before(ran: _Ran) -> dict[int, str]:
    """The devices of this process with different bits when repeated, and the first such result."""
    found: dict[int, str] = {}
    for name, one, other in zip(ran.names, ran.first, ran.second, strict=True):
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            if not same_bits(np.asarray(a.data), np.asarray(b.data)):
                found.setdefault(a.device.id, name)
    return found


def _odd_copies(bench: Bench, ran: _Ran) -> list[int]:
    """The devices whose copy differs from the copies in all processes."""
    marks: dict[str, dict[int, int]] = {}
    for array in ran.first:
        places = array.sharding.devices_indices_map(array.shape)
        parts = {str(index): n for n, index in enumerate(places.values())}
        # Arrays that are laid out alike share one checksum. The key lists, device by device, which
        # part it holds: devices with the same part must agree.
        layout = ",".join(str(parts[str(index)]) for index in places.values())
        checksums = marks.setdefault(layout, {})
        for part in array.addressable_shards:
            number = part.device.id
            checksums[number] = _mark(part.data, checksums.get(number, 0))
    odd: set[int] = set()
    ids = [device.id for device in bench.devices]
    for layout in sorted(marks):
        every = bench.by_device(f"copies by layout {layout}", marks[layout])
        for part in set(layout.split(",")):
            same = [n for n, own in zip(ids, layout.split(","), strict=True) if own == part]
            odd.update(odd_ones({number: every[number] for number in same}))
    return sorted(odd)


def _mark(array: Any, start: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes(), start)
