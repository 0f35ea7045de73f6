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
from keras_tpu_dist.checkup.batch import Given, values
from keras_tpu_dist.checkup.bench import Bench, Job, odd_ones, same_bits
from keras_tpu_dist.checkup.bounds import gap, largest, tolerance
from keras_tpu_dist.checkup.products import corrupts
from keras_tpu_dist.checkup.report import RIGHT, CheckPart, Problem, numbered
from keras_tpu_dist.dryrun.build import described
from keras_tpu_dist.input.position import random_numbers, set_random_numbers
from keras_tpu_dist.processes.arrays import put, whole
from keras_tpu_dist.training.step import jitted_step

# Rounding of the model's own: how much its results move if weights and inputs do by an ulp or two,
# measured so often, and how many times that a mesh may be off.
_DRAWS, _TIMES = 2, 8.0
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
class _Run:
    """A step on the mesh and what it gave.

    Args:
        names: What each result is.
        first: The results.
        second: Those of the same step, run again.
        again: Runs the step on one device: from host values to results.
        state: The values before the step, on the host.
        data: The batch, on the host.
    """

    names: list[str]
    first: list[jax.Array]
    second: list[jax.Array]
    again: Callable[[list, Any], list[np.ndarray]]
    state: list[list[np.ndarray]]
    data: Any


def why_not(model: keras.Model) -> str:
    """Why a model's step is not checked, or `""`.

    Args:
        model: The model.
    """
    if not model.compiled or getattr(model, "optimizer", None) is None:
        return "the model is not compiled"
    if not _keras.is_built(model):
        return "the model is not built: call it on data first, or give x= to build it"
    if model.run_eagerly:
        return "run_eagerly=True has no step that is compiled"
    return ""


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
    with aside(), _run(bench, model, given) as run:
        problems = list(_different(bench, run)) or list(_unsteady(bench, run))
        if problems:
            return CheckPart("step", RIGHT, "the same step, twice", tuple(problems))
        expected, allowed, why = _expected(bench, model, run)
        if why:
            return CheckPart(
                "step", RIGHT, f"twice the same bits; not compared with one device: {why}"
            )
        wrong, worst = _compared(bench, run, expected, allowed)
    rows = given.rows(bench.strategy)
    what = f"{model.name}, {rows} rows: loss and {len(model.trainable_variables)} gradients"
    words = f"{what} as on one device within {worst:.0e}, twice the same bits"
    return CheckPart(
        "step", RIGHT, what if wrong else words, tuple(wrong), {"largest difference": worst}
    )


@contextlib.contextmanager
def _run(bench: Bench, model: keras.Model, given: Given) -> Iterator[_Run]:
    """The step on the mesh, twice, and what repeats it on one device."""
    strategy, rows = bench.strategy, given.rows(bench.strategy)
    own = type(model).train_step is not keras.Model.train_step
    with contextlib.ExitStack() as stack:
        if not own:
            reader = _Gradients()
            reader.build(model.trainable_variables)
            stack.enter_context(optimized_by(model, reader))
        given_names = given.by_name()
        prepared = described(model, strategy, given_names, rows, "train", [])
        _, shapes = stack.enter_context(prepared)
        data = values(model, shapes, given, strategy.placer)
        state = host_state(model)
        placed = placed_state(model, state)
        options = strategy.runner.compiler_options
        program = jitted_step(model, "train", strategy.placer, False, compiler_options=options)
        batch = strategy.placer.place(data)
        job = Job("step")
        keep = _kept(model, own)
        first, second = (keep(*bench.launches.run(job, program, placed, batch)) for _ in range(2))
        alone = jax.jit(model.train_step)

        def again(state: list, data: Any) -> list[np.ndarray]:
            with _no_distribution(), jax.default_device(bench.local[0]):
                outputs, after = alone(tuple(state), data)
            return [np.asarray(each) for each in keep(outputs, after)[1]]

        yield _Run(first[0], first[1], second[1], again, state, data)


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


@contextlib.contextmanager
def optimized_by(model: keras.Model, optimizer: Any) -> Iterator[None]:
    """A model with another optimizer.

    Args:
        model: The model.
        optimizer: Its optimizer within.
    """
    own = model.optimizer
    model.optimizer = optimizer
    try:
        yield
    finally:
        model.optimizer = own


def host_state(model: keras.Model) -> list[list[np.ndarray]]:
    """The values of a model's training state, on the host.

    Args:
        model: The model.
    """
    groups = _keras.state_groups(model)
    return [[np.array(whole(v)) for v in _keras.full_values(group)] for group in groups]


def placed_state(model: keras.Model, state: list[list[np.ndarray]]) -> tuple[list, ...]:
    """A training state on the mesh, as the model's step takes it; within `described`.

    Args:
        model: The model.
        state: The values.
    """
    layouts = _keras.state_shardings(model, "train")
    return tuple(put(group, of) for group, of in zip(state, layouts, strict=True))


def _expected(
    bench: Bench, model: keras.Model, run: _Run
) -> tuple[list[np.ndarray], list[float], str]:
    """What one device gives, how far each result may be off, and why it is not known."""
    try:
        expected = run.again(run.state, run.data)
        moved = [run.again(*_nudged(model, run, seed)) for seed in range(_DRAWS)]
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return [], [], "it does not fit on one"
        raise
    floats = [each for each in expected if each.dtype.kind not in "iub"]
    if not all(np.all(np.isfinite(np.asarray(each, np.float32))) for each in floats):
        return [], [], "its results are not finite there; give x= and y="
    half = any(d in ("bfloat16", "float16") for d in _dtypes(model))
    least = tolerance(bench.platform, "bfloat16" if half else "float32")
    allowed = [
        max(least, *(_TIMES * gap(other[n], one) for other in moved))
        for n, one in enumerate(expected)
    ]
    return expected, allowed, ""


def _dtypes(model: keras.Model) -> set[str]:
    return {layer.compute_dtype for layer in _keras.flatten_layers(model)}


def _nudged(model: keras.Model, run: _Run, seed: int) -> tuple[list, Any]:
    """Weights and inputs that differ by rounding."""
    rng = np.random.default_rng(seed)
    half = any(d in ("bfloat16", "float16") for d in _dtypes(model))
    size = 2.0**-10 if half else 2.0**-22

    def nudge(leaf: np.ndarray) -> np.ndarray:
        if not np.issubdtype(leaf.dtype, np.floating) and leaf.dtype != jax.numpy.bfloat16:
            return leaf
        wide = np.asarray(leaf, np.float64)
        return (wide * (1 + size * rng.choice([-1.0, 1.0], wide.shape))).astype(leaf.dtype)

    x, *rest = run.data if isinstance(run.data, tuple) else (run.data,)
    data = (jax.tree.map(nudge, x), *rest)
    weights = [nudge(leaf) for leaf in run.state[0]]
    return [weights, *run.state[1:]], data if isinstance(run.data, tuple) else data[0]


def _compared(
    bench: Bench, run: _Run, expected: list[np.ndarray], allowed: list[float]
) -> tuple[list[Problem], float]:
    """Devices whose results are off, and the largest difference there is."""
    mine: dict[int, list] = {}
    worst = 0.0
    for name, found, one, limit in zip(run.names, run.first, expected, allowed, strict=True):
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
        "Leave them out, TPUStrategy(devices=[...]), and ask your cloud provider for another host.",
        tuple(sorted(every)),
    )


def _different(bench: Bench, run: _Run) -> Iterator[Problem]:
    """Processes that hold other weights than the first one."""
    mark = 0
    for value in (each for group in run.state for each in group):
        mark = zlib.crc32(np.ascontiguousarray(value).tobytes(), mark)
    marks = bench.agreed("the model's weights", mark)
    others = [number for number, each in enumerate(marks) if each != marks[0]]
    if others:
        yield Problem(
            f"process{'es' if len(others) > 1 else ''} {', '.join(map(str, others[:8]))}: the "
            "model's weights are not those of process 0",
            "Each process drew its own, so that no two devices train the same model.",
            "Call keras.utils.set_random_seed(0) in all processes, before the model is built.",
        )


def _unsteady(bench: Bench, run: _Run) -> Iterator[Problem]:
    """Devices that gave other bits at the second time, or than those that hold the same."""
    again: dict[int, str] = {}
    odd: dict[int, str] = {}
    whole_marks: dict[int, int] = {}
    for name, one, other in zip(run.names, run.first, run.second, strict=True):
        held: dict[str, dict[int, int]] = {}
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            number, bits = a.device.id, np.asarray(a.data)
            if not same_bits(bits, np.asarray(b.data)):
                again.setdefault(number, name)
            mark = zlib.crc32(bits.tobytes())
            held.setdefault(str(a.index), {})[number] = mark
            if one.is_fully_replicated:
                whole_marks[number] = zlib.crc32(bits.tobytes(), whole_marks.get(number, 0))
        for marks in held.values():
            for number in odd_ones(marks):
                odd.setdefault(number, name)
    again = bench.by_device("repeats of the step", again)
    odd = bench.by_device("copies of results", odd)
    for number in odd_ones(bench.by_device("replicated results", whole_marks)):
        odd.setdefault(number, "what all devices hold")
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
            "Leave it out, TPUStrategy(devices=[...]), and ask your cloud provider for another "
            "host.",
            tuple(alone),
        )


@contextlib.contextmanager
def _no_distribution() -> Iterator[None]:
    own = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(own)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """A context that leaves names and random numbers of the program as before."""
    numbers = random_numbers()
    try:
        with _keras.fresh_names():
            yield
    finally:
        set_random_numbers(numbers)
