"""The operations and layers of the tables inside of `strategy.run`, their weights laid out.

Each replica computes its own rows. What it should get is computed on one device, replica by
replica: results, and gradients of a loss that also reads what `all_reduce` and `all_gather` make
of all replicas' results.
"""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import jobs
import keras
import layers
import numpy as np
import operations
from helpers import layout_named
from precision import in_float64

import keras_tpu_dist as ktd

# Of each replica.
ROWS = (4, 3)
# "first" and "last": rules that split that dimension of each weight, of those that divide.
OPERATIONS = [
    *(("4x2", "none"), ("4x2", "first"), ("4x2", "last"), ("2x4", "first"), ("2x4", "last")),
    *(("2x2x2", "first"), ("2x2x2", "last"), ("2x2t2", "first"), ("2x2t2", "last")),
]
# XLA's CPU refuses the gradient, with or without a strategy: its FFT wants rows in the usual order
# ("RET_CHECK failure ... fft_thunk.cc: IsMonotonicWithDim0Major").
_REFUSED = {("fft2/image", "first")}
LAYERS = [
    *(("4x2", "none"), ("4x2", "tensor_parallel"), ("2x4", "tensor_parallel"), ("4x2", "first")),
    *(("2x4", "last"), ("2x2x2", "auto"), ("2x2x2", "fsdp"), ("2x2x2", "tensor_parallel")),
    ("2x2t2", "tensor_parallel"),
]
# As `ReplicaContext` moves the seeds of replicas apart.
_STRIDE = 0x9E3779B9


def is_refused(case: str, plan: str) -> bool:
    """Whether a case cannot be compiled, as `strategy.run` compiles all, strategy or not."""
    return case.endswith("/eager") or (case, plan) in _REFUSED


def number(job) -> int:
    """How many replicas a job's mesh has; of what one device computes the plan says it."""
    if job.mesh == "1":
        return int(job.plan)
    sizes = jobs.MESHES[job.mesh]
    return sizes["data"] * sizes.get("fsdp", 1)


def alone(job):
    """The job that computes what another one should get."""
    return jobs.replace(job, mesh="1", plan=str(number(job)))


def operation(job) -> dict[str, np.ndarray]:
    """Results of operations on every replica, and gradients: their own, and reduced."""
    cases = [jobs.CASES["operation"][name] for name in job.case.split(jobs.TOGETHER)]
    pools = [operations.pool(job.rows, seed) for seed in range(number(job))]
    weights = {n: jobs._weight(n, a) for n, a in pools[0].items() if jobs._is_float(a)}
    weights |= {n: a for n, a in pools[0].items() if n.startswith("w_")}
    used = {case: jobs._names_used(case, pools[0], weights) for case in cases}
    names = sorted(set().union(*used.values()))
    batches = [{n: p[n] for n in names if not n.startswith("w_")} for p in pools]
    weights = {n: weights[n] for n in names if n in weights}
    if job.mesh == "1":
        return _alone(used, weights, batches)
    strategy = _strategy(job, {n: a.shape for n, a in weights.items()})
    with strategy.scope():
        variables = {n: keras.Variable(a, name=n) for n, a in weights.items()}
    _check_split(job, variables.values())

    def step(batch):
        values = {n: v.value for n, v in variables.items()}
        return {case.name: _with_others(case, own, values, batch) for case, own in used.items()}

    found = strategy.local_results(strategy.run(step, (_of_replicas(strategy, batches),)))
    return jobs._named({f"replica {i}": each for i, each in enumerate(found)})


def _parts(case, own: set, weights: dict, batch: dict) -> tuple:
    """What a case is differentiated by, and its results as a function of it."""
    weights, batch = ({n: a for n, a in d.items() if n in own} for d in (weights, batch))
    floats = {n: a for n, a in batch.items() if n in weights}

    def outputs(weights, floats):
        return jax.tree.leaves(case.fn(jobs._Used({**batch, **floats}, weights)))

    return (weights, floats), outputs


def _with_others(case, own: set, weights: dict, batch: dict) -> dict[str, Any]:
    context = ktd.get_replica_context()
    inputs, outputs = _parts(case, own, weights, batch)
    if not case.differentiable:
        return {"output": outputs(*inputs)}

    def loss(weights, floats):
        made = outputs(weights, floats)
        means = context.all_reduce("mean", made)
        gathered = context.all_gather([each for each in made if jnp.ndim(each)], 0)
        return _loss(made, means, gathered), made

    (by_weights, by_floats), made = jax.grad(loss, argnums=(0, 1), has_aux=True)(*inputs)
    return {"output": made, "weights": context.all_reduce("mean", by_weights), "own": by_floats}


def _loss(own: list, means: list, gathered: list) -> Any:
    return sum(
        factor * sum(map(jobs._scalar, each))
        for factor, each in ((1.0, own), (0.3, means), (0.2, gathered))
    )


def _alone(used: dict, weights: dict, batches: list[dict]) -> dict[str, np.ndarray]:
    """The same on one device, replica by replica, each program compiled once."""
    found: list[dict] = [{} for _ in batches]
    for case, own in used.items():
        made = [*map(jax.jit(lambda b, c=case, o=own: _outputs(c, o, weights, b)), batches)]
        for each, outputs in zip(found, made, strict=True):
            each[case.name] = {"output": outputs}
        if not case.differentiable:
            continue
        back = jax.jit(lambda b, g, c=case, o=own: _pulled(c, o, weights, b, g))
        gradients = [*map(back, batches, _cotangents(made))]
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *(w for w, _ in gradients))
        for each, (_, by_floats) in zip(found, gradients, strict=True):
            each[case.name] |= {"weights": mean, "own": by_floats}
    return jobs._named({f"replica {i}": each for i, each in enumerate(found)})


def _outputs(case, own: set, weights: dict, batch: dict) -> list:
    inputs, outputs = _parts(case, own, weights, batch)
    return [jnp.asarray(each) for each in outputs(*inputs)]


def _pulled(case, own: set, weights: dict, batch: dict, cotangents: list) -> tuple:
    inputs, outputs = _parts(case, own, weights, batch)

    def inexact(*inputs):
        return [y for y in map(jnp.asarray, outputs(*inputs)) if _is_inexact(y)]

    return jax.vjp(inexact, *inputs)[1](cotangents)


def _cotangents(made: list[list]) -> list[list]:
    """The gradient of all replicas' losses together by each inexact result of each replica."""

    def total(inexact):
        means = [sum(column) / len(column) for column in zip(*inexact, strict=True)]
        columns = [column for column in zip(*inexact, strict=True) if column[0].ndim]
        gathered = [jnp.concatenate(column) for column in columns]
        return sum(_loss(own, means, gathered) for own in inexact)

    inexact = [[y for y in each if _is_inexact(y)] for each in made]
    value, back = jax.vjp(jax.jit(total), inexact)
    return back(jnp.ones_like(value))[0]


def _is_inexact(array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def layer(job) -> dict[str, np.ndarray]:
    """The loss of a model, and what one step of SGD adds to each of its variables."""
    with in_float64() if job.float64 else contextlib.nullcontext():
        return _updates(job)


def _updates(job) -> dict[str, np.ndarray]:
    case, strategy = jobs.CASES["layer"][job.case], None
    data = [layers.data_of(case, job.rows, seed) for seed in range(number(job))]
    pairs = jobs.nudged(data, job)
    if job.float64:
        precise = lambda a: a.astype("float64") if jobs._is_float(a) else a  # noqa: E731
        pairs = keras.tree.map_structure(precise, pairs)
    if job.mesh != "1":
        strategy = _strategy(job, {v.path: v.shape for v in _model(case, job, None).variables})
    model = _model(case, job, strategy)
    before = [np.asarray(v.value) for v in model.weights]
    if strategy is None:
        losses, new = _step_alone(model, pairs)
    else:
        _check_split(job, model.weights)
        optimizer = keras.optimizers.SGD(100.0)
        losses = strategy.local_results(
            strategy.run(_step(model, optimizer), _of_replicas(strategy, pairs))
        )
        new = [v.value for v in model.weights]
    found = {f"loss {i}": np.asarray(each) for i, each in enumerate(losses)}
    for i, (variable, old, value) in enumerate(zip(model.weights, before, new, strict=True)):
        if np.issubdtype(old.dtype, np.inexact):
            found[f"{i} {variable.path}"] = np.asarray(value) - old
    return found


def _model(case, job, strategy) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        return layers.model_of(case, job.rows)


def _loss_and_gradients(model, trainable: list, others: list, x, y) -> tuple:
    def loss(trainable):
        outputs, new, losses = model.stateless_call(
            trainable, others, x, training=True, return_losses=True
        )
        return ((outputs - y) ** 2).mean() + sum(losses), new

    (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
    return value, gradients, new


def _step(model, optimizer):
    def step(x, y):
        trainable, others = model.trainable_variables, model.non_trainable_variables
        values = [[v.value for v in group] for group in (trainable, others)]
        loss, gradients, new = _loss_and_gradients(model, *values, x, y)
        gradients = ktd.get_replica_context().all_reduce("mean", gradients)
        optimizer.apply(gradients, trainable)
        for variable, value in zip(others, new, strict=True):
            variable.assign(value)
        return loss

    return step


def _step_alone(model, pairs: list) -> tuple[list, list]:
    """The losses of replicas, and the values of all weights after a step, on one device."""
    trainable, others = model.trainable_variables, model.non_trainable_variables
    values = [v.value for v in trainable]
    step = jax.jit(lambda *args: _loss_and_gradients(model, values, *args))
    found = []
    for replica, (x, y) in enumerate(pairs):
        state = [v.value for v in others]
        for i, variable in enumerate(others):
            if variable.dtype == "uint32":  # the state of a seed generator
                state[i] = state[i].at[0].add(jnp.uint32((replica * _STRIDE) % 2**32))
        found.append(step(state, x, y))
    gradients, averages = (
        jax.tree.map(lambda *each: sum(each) / len(each), *column)
        for column in ([g for _, g, _ in found], [s for _, _, s in found])
    )
    new = {id(v): w - 100.0 * g for v, w, g in zip(trainable, values, gradients, strict=True)}
    new |= {id(v): v.constraint(new[id(v)]) for v in trainable if v.constraint is not None}
    new |= {id(v): s for v, s in zip(others, averages, strict=True)}
    return [loss for loss, _, _ in found], [new[id(v)] for v in model.weights]


def _of_replicas(strategy, each: list) -> Any:
    return strategy.distribute_values_from_function(
        lambda context: each[context.replica_id_in_sync_group]
    )


def _strategy(job, shapes: dict[str, tuple]) -> ktd.TPUStrategy:
    plan: Any = layout_named(job.plan)
    if plan in ("first", "last"):
        axes = {path: _split(shape, job.mesh, plan) for path, shape in shapes.items()}
        plan = ktd.LayoutRules([(re.escape(path), each) for path, each in axes.items() if each])
    return ktd.TPUStrategy(jobs.MESHES[job.mesh], plan)


def _check_split(job, variables) -> None:
    """A comparison of weights that lie whole would show nothing."""
    if job.plan in ("first", "last"):
        for variable in variables:
            split = any(_split(variable.shape, job.mesh, job.plan))
            assert split != variable.value.sharding.is_fully_replicated, variable.path


def _split(shape: tuple, mesh: str, plan: str) -> tuple:
    """An entry for each dimension: the axis "model" for the first, or the last, that divides."""
    size = jobs.MESHES[mesh]["model"]
    fits = [d for d, n in enumerate(shape) if n and n % size == 0]
    chosen = (fits[0] if plan == "first" else fits[-1]) if fits else None
    return tuple("model" if d == chosen else None for d in range(len(shape)))
