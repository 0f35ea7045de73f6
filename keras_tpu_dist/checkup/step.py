"""One step of the user's own model: all devices against one, and twice the same bits."""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkup.aside import aside, on_one
from keras_tpu_dist.checkup.batch import Given
from keras_tpu_dist.checkup.bench import Bench, Job, odd_ones, same_bits
from keras_tpu_dist.checkup.bounds import gap, largest, tolerance
from keras_tpu_dist.checkup.prepared import Prepared, State, prepared, why_not
from keras_tpu_dist.checkup.report import (
    LEAVE_OUT,
    RIGHT,
    CheckPart,
    Problem,
    corrupts,
    counted,
    numbered,
)

# Rounding of the model's own: how much its results move if weights and inputs do by an ulp or two,
# measured so often, and how many times that a mesh may be off. In half precision a mesh also rounds
# the sum of each device before it adds them up, which one device does not do: of 200 random models
# the gradients of two biases were 10 and 12 times off.
_DRAWS, _TIMES, _TIMES_OF_HALF = 2, 8.0, 16.0
_MOST_NAMED = 3


class _Gradients(keras.optimizers.Optimizer):
    """Keeps gradients, and leaves weights as they are."""

    def __init__(self):
        super().__init__(learning_rate=0.0, name="gradients")
        self.kept: dict[int, Any] = {}

    def build(self, variables):
        """See `keras.optimizers.Optimizer`."""
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            self.kept[id(variable)] = self.add_variable_from_reference(variable, "gradient")

    def update_step(self, gradient, variable, learning_rate):
        """See `keras.optimizers.Optimizer`."""
        self.assign(self.kept[id(variable)], gradient)


@dataclass(frozen=True)
class _Ran:
    """A step that ran on the mesh, and what it gave.

    Args:
        step: The step.
        names: What each result is.
        first: The results.
        second: Those of the same step, run again.
        alone: Runs the step on one device: from host values to results.
    """

    step: Prepared
    names: list[str]
    first: list[jax.Array]
    second: list[jax.Array]
    alone: Callable[[State, Any], list[np.ndarray]]


def own_step(bench: Bench, model: keras.Model, given: Given) -> CheckPart:
    """Compares one training step on the mesh with one on a single device.

    Args:
        bench: What parts share.
        model: The user's model, which is left as it is.
        given: The batch.
    """
    why = why_not(model)
    if why:
        return CheckPart("step", RIGHT, left_out=why)
    with aside(), _run(bench, model, given) as ran:
        problems = list(_different(bench, ran.step)) or list(_unsteady(bench, ran))
        if problems:
            return CheckPart("step", RIGHT, "the same step, twice", tuple(problems))
        expected, allowed, why = _expected(bench, model, ran)
        if why:
            words = f"twice the same bits; not compared with one device: {why}"
            return CheckPart("step", RIGHT, words)
        wrong, worst = _compared(bench, ran, expected, allowed)
    rows, count = given.rows(bench.strategy), len(model.trainable_variables)
    words = f"{model.name}, {rows} rows: loss and {count} gradients"
    if not wrong:
        words += f" as on one device within {worst:.0e}, twice the same bits"
    return CheckPart("step", RIGHT, words, tuple(wrong), {"largest difference": worst})


@contextlib.contextmanager
def _run(bench: Bench, model: keras.Model, given: Given) -> Iterator[_Ran]:
    """The step on the mesh, twice, and what repeats it on one device."""
    # A step of the model's own class may do anything with its optimizer.
    own = type(model).train_step is not keras.Model.train_step
    reader = None if own else _Gradients()
    if reader is not None:
        reader.build(model.trainable_variables)
    with prepared(bench, model, given, reader) as step:
        keep, job = _kept(model, own), Job("step")
        args = step.placed_state, step.placed_batch
        results = [keep(*bench.launches.run(job, step.program, *args)) for _ in range(2)]
        on_host = jax.jit(model.train_step)

        def alone(state: State, batch: Any) -> list[np.ndarray]:
            with on_one(bench.local[0]):
                outputs, after = on_host(tuple(state), batch)
            return [np.asarray(each) for each in keep(outputs, after)[1]]

        (names, first), (_, second) = results
        yield _Ran(step, names, first, second, alone)


def _kept(model: keras.Model, own: bool) -> Callable[[Any, Any], tuple[list[str], list]]:
    """What of a step's results is compared, with names."""
    groups = _keras.state_groups(model)

    def keep(outputs: Any, after: Any) -> tuple[list[str], list]:
        logs = outputs if isinstance(outputs, dict) else {}
        names, found = [], []
        if "loss" in logs:
            names, found = ["the loss"], [logs["loss"]]
        if own:
            chosen = [("", groups[0], after[0])]
        else:
            slots = _slots(model, groups[2], after[2])
            chosen = [("the gradient of ", [v for v, _ in slots], [g for _, g in slots])]
        chosen.append(("", groups[1], after[1]))
        for words, variables, arrays in chosen:
            names += [f"{words}{v.path}" for v in variables]
            found += list(arrays)
        return names, found

    return keep


def _slots(model: keras.Model, variables: list, arrays: list) -> list[tuple[Any, Any]]:
    """Each weight with the array of its gradient."""
    reader: Any = model.optimizer
    places = {id(variable): n for n, variable in enumerate(variables)}
    return [
        (weight, arrays[places[id(reader.kept[id(weight)])]])
        for weight in model.trainable_variables
        if id(weight) in reader.kept
    ]


def _expected(
    bench: Bench, model: keras.Model, ran: _Ran
) -> tuple[list[np.ndarray], list[float], str]:
    """What one device gives, how far each result may be off, and why it is not known."""
    half = _is_half(model)
    try:
        expected = ran.alone(ran.step.state, ran.step.batch)
        moved = [ran.alone(*_nudged(ran.step, half, seed)) for seed in range(_DRAWS)]
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return [], [], "it does not fit on one"
        raise
    floats = [each for each in expected if each.dtype.kind not in "iub"]
    if not all(np.all(np.isfinite(np.asarray(each, np.float32))) for each in floats):
        return [], [], "its results are not finite there; give x= and y="
    least = tolerance(bench.platform, "bfloat16" if half else "float32")
    times = _TIMES_OF_HALF if half else _TIMES
    allowed = [
        max(least, *(times * gap(other[n], one) for other in moved))
        for n, one in enumerate(expected)
    ]
    return expected, allowed, ""


def _is_half(model: keras.Model) -> bool:
    dtypes = {layer.compute_dtype for layer in _keras.flatten_layers(model)}
    return not dtypes.isdisjoint(("bfloat16", "float16"))


def _nudged(step: Prepared, half: bool, seed: int) -> tuple[State, Any]:
    """Weights and inputs that differ by rounding."""
    rng = np.random.default_rng(seed)
    size = 2.0**-10 if half else 2.0**-22

    def nudge(leaf: np.ndarray) -> np.ndarray:
        if not jax.numpy.issubdtype(leaf.dtype, np.floating):
            return leaf
        wide = np.asarray(leaf, np.float64)
        return (wide * (1 + size * rng.choice([-1.0, 1.0], wide.shape))).astype(leaf.dtype)

    weights = [nudge(leaf) for leaf in step.state[0]]
    state = [weights, *step.state[1:]]
    if not isinstance(step.batch, tuple):
        return state, jax.tree.map(nudge, step.batch)
    x, *rest = step.batch
    return state, (jax.tree.map(nudge, x), *rest)


def _compared(
    bench: Bench, ran: _Ran, expected: list[np.ndarray], allowed: list[float]
) -> tuple[list[Problem], float]:
    """Devices whose results are off, and the largest difference there is."""
    mine: dict[int, list] = {}
    worst = 0.0
    for name, found, one, limit in zip(ran.names, ran.first, expected, allowed, strict=True):
        scale = largest(one)
        for part in found.addressable_shards:
            off = gap(part.data, one[part.index], scale)
            worst = max(worst, off)
            if off > limit:
                mine.setdefault(part.device.id, []).append([off, limit, name])
    shown = {n: sorted(each, reverse=True)[:_MOST_NAMED] for n, each in mine.items()}
    every = bench.by_device("results of the step", shown)
    return ([_differs(bench, every)] if every else []), worst


def _differs(bench: Bench, every: dict[int, list]) -> Problem:
    off, limit, name = max((each for of in every.values() for each in of), key=lambda e: e[0])
    names = list(dict.fromkeys(e[2] for of in every.values() for e in of))[:_MOST_NAMED]
    others = f" (also {', '.join(n for n in names if n != name)})" if len(names) > 1 else ""
    everywhere = len(every) == len(bench.devices)
    where = "all devices" if everywhere else numbered(every)
    what = (
        f"{where}: {name} is {off:.1e} off what one device gives, where rounding explains "
        f"{limit:.1e}{others}"
    )
    if everywhere:
        return Problem(
            what,
            "The program for the mesh computes something else than the model does.",
            "Try layout=None and a mesh of one axis; report it with the model and the output of "
            "`ktd --version`.",
            tuple(sorted(every)),
        )
    return Problem(
        what,
        "These devices compute wrongly, or got what belongs to others.",
        LEAVE_OUT,
        tuple(sorted(every)),
    )


def _different(bench: Bench, step: Prepared) -> Iterator[Problem]:
    """Processes that hold other weights than the first one."""
    mark = 0
    for value in (each for group in step.state for each in group):
        mark = _mark(value, mark)
    marks = bench.agreed("the model's weights", mark)
    others = [number for number, each in enumerate(marks) if each != marks[0]]
    if others:
        yield Problem(
            f"{counted('process', 'processes', others)}: the model's weights are not those of "
            "process 0",
            "Each process drew its own, so that no two devices train the same model.",
            "Call keras.utils.set_random_seed(0) in all processes, before the model is built.",
        )


def _unsteady(bench: Bench, ran: _Ran) -> Iterator[Problem]:
    """Devices that gave other bits at the second time, or than those that hold the same."""
    again = bench.by_device("repeats of the step", _unlike_before(ran))
    odd = bench.by_device("copies of results", _unlike_others(ran))
    for number in _odd_copies(bench, ran):
        odd.setdefault(number, "what several devices hold")
    if again:
        names = ", ".join(dict.fromkeys(again.values()))
        yield corrupts(f"the same training step ({names})", sorted(again))
    alone = sorted(set(odd) - set(again))
    if alone:
        names = ", ".join(list(dict.fromkeys(odd[n] for n in alone))[:_MOST_NAMED])
        yield Problem(
            f"{numbered(alone)}: after the step, {names} is not what the other devices hold of it",
            "Copies that must be equal are not: the device computes or receives wrongly, and "
            "weights drift apart.",
            LEAVE_OUT,
            tuple(alone),
        )


def _unlike_before(ran: _Ran) -> dict[int, str]:
    """Devices of this process with other bits at the second time, and of which result first."""
    found: dict[int, str] = {}
    for name, one, other in zip(ran.names, ran.first, ran.second, strict=True):
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            if not same_bits(np.asarray(a.data), np.asarray(b.data)):
                found.setdefault(a.device.id, name)
    return found


def _unlike_others(ran: _Ran) -> dict[int, str]:
    """Devices of this process that hold other bits than others here do of the same part."""
    found: dict[int, str] = {}
    for name, array in zip(ran.names, ran.first, strict=True):
        held: dict[str, dict[int, int]] = {}
        for part in array.addressable_shards:
            held.setdefault(str(part.index), {})[part.device.id] = _mark(part.data)
        for marks in held.values():
            for number in odd_ones(marks):
                found.setdefault(number, name)
    return found


def _odd_copies(bench: Bench, ran: _Ran) -> list[int]:
    """Devices that hold other bits than those of all processes that should hold the same."""
    marks: dict[str, dict[int, int]] = {}
    for array in ran.first:
        places = array.sharding.devices_indices_map(array.shape)
        parts = {str(index): n for n, index in enumerate(places.values())}
        # One mark for all arrays of which the same devices hold the same part.
        of = marks.setdefault(",".join(str(parts[str(index)]) for index in places.values()), {})
        for part in array.addressable_shards:
            of[part.device.id] = _mark(part.data, of.get(part.device.id, 0))
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
