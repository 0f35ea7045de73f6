"""Lookups among replicas where other axes split: in a process, as XLA aborts if it is wrong."""

import subprocess
import sys

import pytest

PROGRAM = """
import keras_tpu_dist as ktd
ktd.simulate(8)
import sys
import jax, jax.numpy as jnp, keras, numpy as np

lookups = {
    "columns by row": lambda y, t: jnp.take_along_axis(y, jnp.argsort(y, axis=1), axis=1),
    "rows by column": lambda y, t: jnp.take_along_axis(y, jnp.argsort(y, axis=0), axis=0),
    "both": lambda y, t: y[jnp.argsort(y[:2], axis=0) % 4, jnp.arange(8)[None]],
    "columns": lambda y, t: y[:, jnp.argsort(y[0])],
    "rows": lambda y, t: y[jnp.argsort(y[:, 0])],
    "one row": lambda y, t: y[2, jnp.argsort(y[1])],
    "table": lambda y, t: t[jnp.argsort(y[0])],
    "table by each": lambda y, t: t[jnp.argsort(y, axis=1)],
    "quantiles": lambda y, t: jnp.nanquantile(y, jnp.array([0.25, 0.6]), axis=0),
}
mesh, w_axes, t_axes = map(eval, sys.argv[1:])
rng = np.random.default_rng(0)
weights = {"w": rng.random((4, 8)), "t": rng.random((8, 4))}
weights = {name: w.astype("float32") for name, w in weights.items()}
rules = ktd.LayoutRules([(name, axes) for name, axes in (("w", w_axes), ("t", t_axes))])
strategy = ktd.TPUStrategy(mesh, rules)
n = strategy.num_replicas_in_sync
batches = rng.random((n, 4, 8)).astype("float32")
with strategy.scope():
    variables = {name: keras.Variable(w, name=name) for name, w in weights.items()}


def results(values, x):
    def of(values):
        return {name: f(values["w"] * x, values["t"]) for name, f in lookups.items()}

    loss = lambda values: sum((y**2).sum() for y in of(values).values())
    return of(values), jax.grad(loss)(values)


def step(x):
    made, gradients = results({name: v.value for name, v in variables.items()}, x)
    return made, ktd.get_replica_context().all_reduce("sum", gradients)


of_replicas = strategy.distribute_values_from_function(
    lambda context: batches[context.replica_id_in_sync_group]
)
found = strategy.local_results(strategy.run(step, (of_replicas,)))
expected = [results(weights, x) for x in batches]
total = jax.tree.map(lambda *each: sum(each), *(gradients for _, gradients in expected))
for (made, gradients), (right, _) in zip(found, expected, strict=True):
    for name in lookups:
        np.testing.assert_allclose(made[name], right[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name in weights:
        np.testing.assert_allclose(gradients[name], total[name], rtol=1e-5, atol=1e-5)
print("right")
"""
SEQUENCE = {"data": 2, "sequence": 2, "model": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "w_axes", "t_axes"),
    [
        (SEQUENCE, (None, "model"), ("model", None)),
        (SEQUENCE, ("sequence", "model"), ("sequence", "model")),
        (SEQUENCE, ("model", None), (("sequence", "model"), None)),
        (SEQUENCE, (None, ("sequence", "model")), ("model", "sequence")),
        ({"sequence": 2, "model": 2, "data": 2}, ("model", "sequence"), ("model", None)),
        ({"data": 2, "fsdp": 2, "model": 2}, (None, "model"), ("model", None)),
        ({"data": 2, "model": 4}, ("model", None), ("model", None)),
    ],
)
def test_lookups_of_replicas_equal_one_device(mesh, w_axes, t_axes):
    arguments = [repr(each) for each in (mesh, w_axes, t_axes)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=150
    )
    assert done.stdout.endswith("right\n"), done.stderr[-3000:]
