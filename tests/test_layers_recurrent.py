"""Our recurrent layers against Keras's: outputs, states and every gradient."""

import itertools
import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from test_recurrence import close, mask_for

from keras_tpu_dist import layers as fast

NAMES = ["LSTM", "GRU", "SimpleRNN"]
BATCH, FEATURES, UNITS = 4, 3, 5


def pair(name, steps, **config):
    """The same layer twice, Keras's and ours, with equal random weights."""
    stock_config = {k: v for k, v in config.items() if k not in ("segment",)}
    if not isinstance(config.get("unroll", False), bool):
        stock_config["unroll"] = False
    stock = getattr(keras.layers, name)(UNITS, **stock_config)
    ours = getattr(fast, name)(UNITS, **config)
    rng = np.random.default_rng(1)
    for layer in (stock, ours):
        layer.build((BATCH, steps, FEATURES))
    for a, b in zip(stock.weights, ours.weights):
        assert a.path.split("/")[-1] == b.path.split("/")[-1]
        value = rng.normal(size=a.shape) * 0.4
        a.assign(value)
        b.assign(value)
    return stock, ours


def program(layer, x, state, mask, cotangents=None):
    """Loss, outputs and gradients of one layer."""

    def loss(weights, x, state):
        frozen = [v.value for v in layer.non_trainable_variables]
        outputs, _ = layer.stateless_call(weights, frozen, x, initial_state=state, mask=mask)
        leaves = jax.tree.leaves(outputs)
        keys = jax.random.split(jax.random.key(3), len(leaves))
        factors = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)]
        return sum(jnp.vdot(a, b) for a, b in zip(leaves, factors)), leaves

    weights = [v.value for v in layer.trainable_variables]
    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(weights, x, state)


def compare(cases):
    """Runs every (stock, ours, x, state, mask) in one compiled program."""

    def everything(arrays):
        return [
            (program(stock, *a), program(ours, *a)) for (stock, ours), a in zip(layers, arrays)
        ]

    layers = [(stock, ours) for stock, ours, *_ in cases]
    for theirs, own in jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})([tuple(rest) for _, _, *rest in cases]):
        close(own, theirs)


def arrays(name, steps, mask, initial, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(BATCH, steps, FEATURES)), np.float32)
    state = None
    if initial:
        count = 2 if name == "LSTM" else 1
        state = [jnp.asarray(rng.normal(size=(BATCH, UNITS)), np.float32) for _ in range(count)]
    return x, state, mask_for(mask, rng, BATCH, steps)


# Every value of every column meets every value of every other column in some case; all products
# would be 5760 cases.
COLUMNS = dict(
    name=NAMES,
    unroll=[False, True, 2, 4, 5],
    mask=["none", "padded", "arbitrary", "row"],
    go_backwards=[False, True],
    return_sequences=[False, True],
    return_state=[False, True],
    use_bias=[True, False],
    initial=[False, True],
    zero_output_for_mask=[False, True],
    steps=[1, 2, 7],
)


def pairwise(columns, seed):
    """Rows that cover every pair of values, greedily."""
    rng = np.random.default_rng(seed)
    names = list(columns)
    missing = {
        (a, va, b, vb)
        for a, b in itertools.combinations(names, 2)
        for va in range(len(columns[a]))
        for vb in range(len(columns[b]))
    }
    rows = []
    while missing:
        candidates = [[rng.integers(len(columns[n])) for n in names] for _ in range(60)]

        def covered(row):
            at = dict(zip(names, row))
            return {(a, at[a], b, at[b]) for a, b in itertools.combinations(names, 2)} & missing

        best = max(candidates, key=lambda row: len(covered(row)))
        if covered(best):
            missing -= covered(best)
            rows.append({n: columns[n][i] for n, i in zip(names, best)})
    return rows


def test_equals_keras_over_the_grid():
    cases = []
    for number, row in enumerate(pairwise(COLUMNS, seed=0)):
        name, steps, mask, initial = (row.pop(k) for k in ("name", "steps", "mask", "initial"))
        if name == "GRU":
            row["reset_after"] = number % 2 == 0
        stock, ours = pair(name, steps, **row)
        cases.append((stock, ours, *arrays(name, steps, mask, initial, seed=number)))
    assert len(cases) >= 20
    compare(cases)
