"""One comparison: an operation, layer or model on a mesh against one device."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import assigned
import assigned_layers
import jax
import keras
import layers
import models
import moves
import numpy as np
import operations
import pairs
import replicas
from helpers import layout_named
from precision import in_float64

import keras_tpu_dist as ktd
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.hardware.mesh import checked_data_axes
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.programs.partitioner import Jitted

MESHES: dict[str, dict[str, int]] = {
    "8": {"data": 8},
    "4x2": {"data": 4, "model": 2},
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "model": 2},
    "2x2t2": {"data": 2, "sequence": 2, "model": 2},
}
EVEN, RAGGED = 16, 13
TOLERANCE = 1e-5
# Kinds that compare results; the others compare what a step adds to weights.
_COMPUTED = ("operation", "move", "pair", "replica_operation")
# Kinds that are also computed in float64.
_PRECISE = ("layer", "model", "replica_layer", "assigned_layer", "assigned_pair", "pair")
# Between the names of operations that one program computes.
TOGETHER = " + "
# A weight's update over a whole model: sums of many rounded terms, relative to the largest.
UPDATE_TOLERANCE = 1e-4
# The same in float64, for parts that Keras computes in float32 all the same, as softmaxes.
PRECISE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Job:
    """What to compare.

    Attributes:
        kind: A name of `CASES`, or `"probe"` for what the runner must survive.
        case: The case's name.
        rows: The number of rows.
        mesh: A name of `MESHES`.
        plan: `"none"` or a plan.
        repair: Whether programs are made right; `False` shows what XLA makes of them.
        float64: Whether to train in float64.
        nudged: What an ulp or two in the data is drawn from; 0 for none.
    """

    kind: str
    case: str
    rows: int
    mesh: str
    plan: str = "none"
    repair: bool = True
    float64: bool = False
    nudged: int = 0

    def __str__(self):
        rows = {EVEN: "even", RAGGED: "ragged"}.get(self.rows, f"{self.rows} rows")
        return f"{self.kind} {self.case} on {self.mesh}, {rows}, {self.plan}"

    def to_dict(self) -> dict[str, Any]:
        """The job as plain values."""
        return asdict(self)


def all_jobs(kinds: tuple[str, ...], repair: bool = True) -> list[Job]:
    """Every job of some kinds; those of one case and number of rows stand together."""
    return [job for kind in kinds for job in jobs_of(kind, CASES[kind], repair)]


def jobs_of(kind: str, cases: Iterable[str], repair: bool = True) -> list[Job]:
    """The jobs of some cases of a kind; see `all_jobs`."""
    jobs = []
    for case in cases:
        own = assigned_layers.rows(case) if kind == "assigned_pair" else None
        for rows in own or _ROWS.get(kind, (EVEN, RAGGED)):
            meshes = assigned.MESHES if kind in ("assigned", "assigned_layer") else MESHES
            meshes = assigned_layers.meshes(case) if kind == "assigned_pair" else meshes
            meshes = pairs.meshes(case) if kind == "pair" else meshes
            combinations = [(mesh, "none") for mesh in meshes]
            if kind in ("layer", "model"):
                combinations += PLANNED[kind, rows]
            elif kind in REPLICAS:
                planned = PLANNED[kind, rows]
                combinations = [p for p in planned if not replicas.is_refused(case, p[1])]
            jobs += [Job(kind, case, rows, *pair, repair) for pair in combinations]
    return jobs


CASES: dict[str, dict[str, Any]] = {
    "operation": {case.name: case for case in operations.CASES},
    "move": moves.FAMILIES,
    "assigned": assigned.CASES,
    "assigned_layer": dict.fromkeys(assigned_layers.SINGLE),
    "assigned_pair": dict.fromkeys(assigned_layers.PAIRS),
    "layer": {case.name: case for case in layers.CASES},
    "model": {case.name: case for case in models.CASES},
    "pair": pairs.CASES,
}
# The same inside of `strategy.run`.
REPLICAS = {"replica_operation": "operation", "replica_layer": "layer"}
CASES |= {kind: CASES[same] for kind, same in REPLICAS.items()}
_ROWS = {
    **{"move": moves.ROWS, "assigned": assigned.ROWS, "assigned_layer": assigned_layers.ROWS},
    **dict.fromkeys(REPLICAS, replicas.ROWS),
}
PLANNED = {
    ("layer", EVEN): [
        ("2x4", "tensor_parallel"),
        ("2x2x2", "auto"),
        ("2x2t2", "fsdp"),
        ("2x2x2", "split_between"),
    ],
    ("layer", RAGGED): [
        ("4x2", "tensor_parallel"),
        ("2x2x2", "fsdp"),
        ("4x2", "split_between"),
    ],
    ("model", EVEN): [
        ("2x4", "tensor_parallel"),
        ("2x2x2", "auto"),
        ("2x2x2", "split_between"),
    ],
    ("model", RAGGED): [
        ("8", "fsdp"),
        ("4x2", "tensor_parallel"),
        ("2x4", "tensor_parallel"),
        ("2x4", "auto"),
        ("2x2x2", "fsdp"),
        ("2x2x2", "tensor_parallel"),
        ("2x2t2", "fsdp"),
        ("2x4", "split_between"),
        ("2x2x2", "split_between"),
    ],
    **{("replica_operation", rows): replicas.OPERATIONS for rows in replicas.ROWS},
    **{("replica_layer", rows): replicas.LAYERS for rows in replicas.ROWS},
}


def compared(job: Job) -> dict[str, Any]:
    """Whether a job is right, the largest difference and where it is.

    What differs in float32 may be rounding that a normalization or many layers amplified (in two
    right programs of an Xception up to 4e-2); float64 tells it from a fault.
    """
    difference, where = worst_difference(job)
    asked = difference > tolerance(job) and job.kind in _PRECISE and job.repair
    if asked and os.environ.get("KTD_COMPILER") == "libtpu":
        # It compiles no float64; as in `verify`, what an ulp or two does tells it.
        alone, expected = _alone(job), _expected(_alone(job))
        moved = [_RUN[job.kind](replace(alone, nudged=seed)) for seed in (1, 2)]
        explained = 8 * max(_worst(each, expected, job)[0] for each in moved)
        where = f"{where} (rounding explains {explained:.1e})"
        return {"right": difference <= explained, "difference": difference, "where": where}
    if asked:
        again = replace(job, float64=True)
        precise, there = worst_difference(again)
        where = f"{where} ({precise:.1e} at {there} in float64)"
        return {"right": precise <= tolerance(again), "difference": difference, "where": where}
    return {"right": difference <= tolerance(job), "difference": difference, "where": where}


def worst_difference(job: Job) -> tuple[float, str]:
    """The largest difference from one device relative to the largest value, and where it is."""
    return _worst(_RUN[job.kind](job), _expected(_alone(job)), job)


def _alone(job: Job) -> Job:
    """The job that computes on one device what another one should get."""
    alone = replicas.alone(job) if job.kind in REPLICAS else replace(job, mesh="1", plan="none")
    return replace(alone, repair=True)


def nudged(data: Any, job: Job) -> Any:
    """Data with an ulp or two more or less, if the job asks for that."""
    rng = np.random.default_rng(job.nudged)

    def nudge(array: np.ndarray) -> np.ndarray:
        if not job.nudged or not _is_float(array):
            return array
        return (array * (1 + 2.0**-22 * rng.choice([-1.0, 1.0], array.shape))).astype(array.dtype)

    return keras.tree.map_structure(nudge, data)


def _worst(got: dict, expected: dict, job: Job) -> tuple[float, str]:
    assert list(got) == list(expected), f"{list(got)} and {list(expected)}"
    sizes = {name: _largest(value) for name, value in expected.items()}
    # An operation's results are compared with 1 if they are smaller; a variable's update with the
    # updates of all, since a bias in front of a normalization has none but rounding.
    least = 1.0 if job.kind in _COMPUTED else 1e-3 * max(sizes.values())
    differences = {
        name: _largest_gap(got[name], expected[name]) / max(sizes[name], least) for name in expected
    }
    name = max(differences, key=differences.get)
    return differences[name], name


def _moved(job: Job) -> dict[str, np.ndarray]:
    """Results of a family of moves and their gradients."""
    x = np.arange(1.0, job.rows + 1, dtype="float32") / job.rows
    results = lambda laid, gradient: moves.results(job.case, job.rows, gradient, laid)  # noqa: E731
    if job.mesh == "1":
        return _of_both(lambda gradient: jax.jit(results(lambda y: y, gradient))(x))
    return _of_both(lambda gradient: _over_mesh(job, gradient, results, (x,)))


def _paired(job: Job) -> dict[str, np.ndarray]:
    """Results of operations that follow one another, and their gradients."""
    with jax.enable_x64(job.float64):
        return _paired_in(job, "float64" if job.float64 else "float32")


def _paired_in(job: Job, dtype: str) -> dict[str, np.ndarray]:
    cases = job.case.split(TOGETHER)
    x, ids = pairs.arrays(cases[0], job.rows)
    batch = nudged(x.astype(dtype), job), ids
    results = lambda laid, gradient: pairs.results(cases, laid, gradient)  # noqa: E731
    if job.mesh == "1":
        # One by one: compiled for one device, `x[order].at[1:3]` updated by rows of its own is
        # wrong, for XLA on CPU writes over what it still reads (openxla/xla#49176).
        with jax.disable_jit():
            arrays = [*map(jax.numpy.asarray, batch)]
            return _of_both(lambda gradient: results(lambda y: y, gradient)(*arrays))
    along = batch[0].ndim == 3
    return _of_both(lambda gradient: _over_mesh(job, gradient, results, batch, along))


def _of_both(results: Callable) -> dict[str, np.ndarray]:
    return _named({f"gradient {gradient}": results(gradient) for gradient in (False, True)})


def _over_mesh(job: Job, gradient: bool, results: Callable, batch: tuple, along=False) -> Any:
    """What `results(laid, gradient)` computes of a batch in parts of its rows, and of its time."""
    mesh = _mesh(job.mesh)
    placer = BatchPlacer(mesh, checked_data_axes(None, tuple(mesh.axis_names)))

    def laid(y):
        rows = 0 if y.ndim else None
        time = placer.time(y, rows) if along and y.ndim > 1 else None
        return jax.lax.with_sharding_constraint(y, placer.sharding(rows, time))

    made = results(laid, gradient)

    def program(batch):
        results = made(*placer.trim(batch))
        return jax.lax.with_sharding_constraint(results, named_sharding(mesh))

    layouts = lambda batch: (placer.shardings(batch),)  # noqa: E731
    program = Jitted(program, mesh, layouts) if job.repair else jax.jit(program)
    return program(placer.place(batch))


def tolerance(job: Job) -> float:
    """What may differ."""
    if job.float64:
        return PRECISE_TOLERANCE
    return TOLERANCE if job.kind in _COMPUTED else UPDATE_TOLERANCE


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def _largest_gap(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape, f"{got.shape} and {expected.shape}"
    got, expected = (np.asarray(a, np.complex128) for a in (got, expected))
    if np.any(np.isnan(got) != np.isnan(expected)):
        return float("inf")
    return float(np.nanmax(np.where(got == expected, 0.0, np.abs(got - expected)), initial=0.0))


@functools.lru_cache(maxsize=2)
def _expected(job: Job) -> dict[str, np.ndarray]:
    return _RUN[job.kind](job)


class _Used:
    """The arrays of a pool that a case reads, each float one times a weight of its own."""

    def __init__(self, arrays: dict, weights: dict):
        self._arrays, self._weights = arrays, weights
        self.read: set[str] = set()

    def __getattr__(self, name: str):
        self.read.add(name)
        if name.startswith("w_"):
            return self._weights[name]
        array = self._arrays[name]
        return array * self._weights[name] if name in self._weights else array


def _computed(job: Job) -> dict[str, np.ndarray]:
    """Results and gradients of operations on a job's mesh, or on one device."""
    cases = [CASES["operation"][name] for name in job.case.split(TOGETHER)]
    pool = operations.pool(job.rows)
    weights = {name: _weight(name, array) for name, array in pool.items() if _is_float(array)}
    weights |= {name: array for name, array in pool.items() if name.startswith("w_")}
    used = {case: _names_used(case, pool, weights) for case in cases}
    names = sorted(set().union(*used.values()))
    batch = {n: pool[n] for n in names if not n.startswith("w_")}
    weights = {n: weights[n] for n in names if n in weights}

    def function(weights, batch):
        found = {}
        for case, own in used.items():
            arrays = [{n: a for n, a in each.items() if n in own} for each in (weights, batch)]
            found[case.name] = _results(case, *arrays)
        return found

    if job.mesh == "1":
        return _named(jax.jit(function)(weights, batch))
    mesh = _mesh(job.mesh)
    placer = BatchPlacer(mesh, checked_data_axes(None, tuple(mesh.axis_names)))
    whole = named_sharding(mesh)

    def program(weights, batch):
        results = function(weights, placer.trim(batch)[0])
        # Uneven rows cannot leave a program split over devices.
        return jax.lax.with_sharding_constraint(results, whole)

    def layouts(weights, batch):
        return whole, placer.shardings(batch)

    program = Jitted(program, mesh, layouts) if job.repair else jax.jit(program)
    return _named(program(jax.device_put(weights, whole), placer.place((batch,))))


def _names_used(case, pool: dict, weights: dict) -> set[str]:
    names: set[str] = set()

    def look(pool, weights):
        used = _Used(pool, weights)
        try:
            return case.fn(used)
        finally:
            names.update(used.read)

    jax.eval_shape(look, pool, weights)
    return names


def _results(case, weights: dict, batch: dict) -> dict[str, Any]:
    floats = {n: a for n, a in batch.items() if n in weights}

    def loss(weights, floats):
        outputs = jax.tree.leaves(case.fn(_Used({**batch, **floats}, weights)))
        return sum(map(_scalar, outputs)), outputs

    if not case.differentiable:
        return {"output": loss(weights, floats)[1]}
    gradients, outputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, floats)
    return {"output": outputs, "gradient": gradients}


def _scalar(output) -> Any:
    output = jax.numpy.asarray(output)
    if not jax.numpy.issubdtype(output.dtype, jax.numpy.inexact):
        return 0.0
    if jax.numpy.iscomplexobj(output):
        return _scalar(output.real) + _scalar(output.imag)
    flat = jax.lax.broadcasted_iota(output.dtype, output.shape or (1,), max(output.ndim - 1, 0))
    pattern = jax.numpy.cos(flat.reshape(output.shape))
    return (jax.numpy.sin(output) * pattern + 0.5 * output).sum()


def _is_float(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.floating)


def _weight(name: str, array: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(len(name))
    return rng.uniform(0.95, 1.05, array.shape[1:]).astype(array.dtype)


def _named(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _mesh(name: str):
    return _strategy(Job("", "", 0, name)).mesh


def _strategy(job: Job) -> ktd.TPUStrategy:
    return ktd.TPUStrategy(MESHES[job.mesh], layout_named(job.plan))


def _trained(job: Job) -> dict[str, np.ndarray]:
    """The loss of a model, and what one step of SGD adds to each of its variables."""
    with in_float64() if job.float64 else contextlib.nullcontext():
        return _updates(job)


def _updates(job: Job) -> dict[str, np.ndarray]:
    strategy = None if job.mesh == "1" else _strategy(job)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model, x, y = _compiled(job)
    x, y = nudged((x, y), job)
    if job.float64:
        precise = lambda a: a.astype("float64") if _is_float(a) else a  # noqa: E731
        x, y = keras.tree.map_structure(precise, (x, y))
    before = [np.asarray(v.value) for v in model.weights]
    found = {"loss": np.asarray(model.train_on_batch(x, y))}
    for i, (variable, old) in enumerate(zip(model.weights, before)):
        if np.issubdtype(old.dtype, np.inexact):
            found[f"{i} {variable.path}"] = np.asarray(variable.value) - old
    return found


_ASSIGNED = (assigned_layers.model_of, assigned_layers.data_of)


def _compiled(job: Job) -> tuple:
    case = CASES[job.kind][job.case]
    if job.kind == "assigned":
        model, (x, y), loss = case(), assigned.data(job.rows), "mse"
    elif job.kind in ("assigned_layer", "assigned_pair"):
        model, (x, y) = (part(job.case, job.rows) for part in _ASSIGNED)
        loss = "mse"
    elif job.kind == "layer":
        model, (x, y), loss = layers.model_of(case, job.rows), layers.data_of(case, job.rows), "mse"
    else:
        model, (x, y), loss = (
            case.build(),
            case.data(job.rows, np.random.default_rng(0)),
            case.loss(),
        )
    # One step whose updates are large beside the weights they are taken off: nothing is rounded.
    model.compile(keras.optimizers.SGD(100.0), loss)
    return model, x, y


def _probed(job: Job) -> dict[str, np.ndarray]:
    """What the processes that compare are to survive."""
    if job.case == "abort":
        os.abort()
    time.sleep(3600)
    return {}


_RUN = {
    **{"operation": _computed, "move": _moved, "layer": _trained, "model": _trained},
    **{"assigned_layer": _trained, "assigned_pair": _trained},
    **{"assigned": _trained, "pair": _paired, "probe": _probed},
    **{"replica_operation": replicas.operation, "replica_layer": replicas.layer},
}
