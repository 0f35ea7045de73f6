"""Every case of the recurrent layers' grid against Keras's layers; too many for every run.

    PYTHONPATH=. python tests/grid.py                  # without a mesh: 7,680 cases
    PYTHONPATH=. python tests/grid.py --mesh data8     # on eight simulated devices
    PYTHONPATH=. python tests/grid.py --mesh data2_model4
    PYTHONPATH=. python tests/grid.py --part 0 2       # every second group, as one of two processes
    PYTHONPATH=. python tests/grid.py --steps 1 2 7    # some columns only

A group is one compiled program: Keras's layer, and ours with every `unroll`, run with every
kind of mask. Outputs, states and the gradients of every weight, the input and the initial state
are compared to 1e-5. Most of the time goes into compiling `unroll=True` at 64 steps, which
XLA_FLAGS=--xla_disable_hlo_passes=fusion makes three times as fast.
`tests/layers/test_layers_recurrent.py` runs a sample.
"""

import argparse
import ast
import contextlib
import itertools
import sys
import time

import conftest  # noqa: F401  eight simulated devices, before JAX starts
import jax
import jax.numpy as jnp
import keras
import numpy as np
from recurrent import MESHES as ON_MESHES
from recurrent import close, mask_for

import keras_tpu_dist as ktd
from keras_tpu_dist import layers as fast

UNROLLS = [False, True, 2, 4, 5]
MASKS = ["padded", "arbitrary", "row"]
GROUPS = {
    "steps": [1, 2, 7, 64],
    "name": ["LSTM", "GRU", "SimpleRNN"],
    "masked": [False, True],
    "go_backwards": [False, True],
    "return_sequences": [False, True],
    "return_state": [False, True],
    "use_bias": [True, False],
    "initial": [False, True],
}
MESHES = {"none": None, **ON_MESHES}
BATCH, FEATURES, UNITS = 8, 3, 8


def groups(names, steps):
    """All groups of some layers and lengths, as dictionaries."""
    columns = GROUPS | {"name": names, "steps": steps}
    return [dict(zip(columns, values)) for values in itertools.product(*columns.values())]


def run(group, strategy, unrolls=UNROLLS, tolerance=1e-5):
    """Compiles and compares one group."""
    # The weights are given later; drawing them first would take as long as all else.
    config = dict(group, kernel_initializer="zeros", recurrent_initializer="zeros")
    steps, name, masked, initial = (config.pop(k) for k in ("steps", "name", "masked", "initial"))
    stock = getattr(keras.layers, name)
    theirs = [built(stock(UNITS, **config), steps)]
    if masked and True in unrolls:
        # Keras's own result for rows that begin masked depends on it.
        theirs.append(built(stock(UNITS, unroll=True, **config), steps))
    ours = []
    for unroll in unrolls:
        with scope(strategy):
            ours.append(built(getattr(fast, name)(UNITS, unroll=unroll, **config), steps))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, steps, FEATURES)).astype("float32")
    states = 2 if name == "LSTM" else 1
    state = [rng.normal(size=(BATCH, UNITS)).astype("float32") for _ in range(states)]
    masks = [np.asarray(mask_for(m, rng, BATCH, steps)) for m in MASKS] if masked else [None]
    # With weights of 0.4 a SimpleRNN of 64 steps multiplies whatever enters it, and gradients of
    # float32, Keras's as ours, are 2e-5 to 4e-5 from those of float64.
    scale = np.float32(0.4 if steps < 64 else 0.2)
    values = [
        rng.normal(size=w.shape).astype("float32") * scale for w in theirs[0].trainable_variables
    ]

    def everything(*arrays):
        references = [gradients(layer, *arrays) for layer in theirs]
        with scope(strategy):
            return references, [gradients(layer, *arrays) for layer in ours]

    compiled = jax.jit(everything).lower(values, x, state if initial else None, masks[0]).compile()
    for mask in masks:
        references, results = compiled(values, x, state if initial else None, mask)
        for unroll, result in zip(unrolls, results):
            try:
                close(result, references[-1 if unroll is True else 0], tolerance)
            except AssertionError as error:
                error.add_note(f"{group}, unroll={unroll}")
                raise
    return len(masks) * len(ours)


def scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def built(layer, steps):
    layer.build((BATCH, steps, FEATURES))
    return layer


def cosines(leaves):
    """A factor for every output."""
    return [jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in leaves]


def gradients(layer, values, x, state, mask, factors=cosines):
    """Outputs, and the gradients of every weight, the input and the initial state."""
    frozen = [v.value for v in layer.non_trainable_variables]

    def loss(values, x, state):
        outputs, _ = layer.stateless_call(values, frozen, x, initial_state=state, mask=mask)
        leaves = jax.tree.leaves(outputs)
        return sum(jnp.vdot(a, f) for a, f in zip(leaves, factors(leaves))), leaves

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(values, x, state)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", choices=MESHES, default="none")
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1], metavar=("K", "N"))
    parser.add_argument("--only", nargs="*", default=GROUPS["name"], choices=GROUPS["name"])
    parser.add_argument("--steps", nargs="*", default=GROUPS["steps"], type=int)
    parser.add_argument("--unroll", nargs="*", default=UNROLLS, type=ast.literal_eval)
    args = parser.parse_args()
    strategy = MESHES[args.mesh] and ktd.TPUStrategy(*MESHES[args.mesh])
    part, parts = args.part
    mine = groups(args.only, args.steps)[part::parts]
    started, cases, wrong = time.time(), 0, 0
    for number, group in enumerate(mine, 1):
        try:
            cases += run(group, strategy, args.unroll)
        except AssertionError as error:
            wrong += 1
            print("DIFFERS", error, *error.__notes__, sep="\n", flush=True)
        if number % 16 == 0 or number == len(mine):
            jax.clear_caches()
            keras.utils.clear_session()
            print(
                f"{args.mesh}: {number} of {len(mine)} groups, {cases} cases equal, "
                f"{wrong} groups not, {time.time() - started:.0f} s",
                flush=True,
            )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
