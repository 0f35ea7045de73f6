"""The time loop as one kernel, its steps run as plain JAX; what the TPU compiler makes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from compile_only import lower
from jax.experimental.pallas import tpu as pltpu
from recurrent import close, mask_for
from test_recurrence import BATCH, CELLS, FEATURES, UNITS, case, cases_of, check
from test_recurrence import weights_for as weights_of_case

import keras_tpu_dist as ktd
from keras_tpu_dist import recurrence as rec
from keras_tpu_dist.layers.recurrent import FastRecurrence
from keras_tpu_dist.tools.dryrun.compile import compile_lowered
from keras_tpu_dist.tools.hlo.kernels import is_kernel
from keras_tpu_dist.tools.hlo.loops import executions
from keras_tpu_dist.tools.hlo.parse import parse

KERNEL = rec.Kernel(interpret=True)
ON_TPU = {"kernel": KERNEL}
VARIANTS = [
    {"keep": True},
    {"keep": True, "hoist": False, "unroll": 32},  # one block
    {"hoist": False, "unroll": 3},
    {"keep": True, "unroll": 2, "kernel": rec.Kernel(reread=True, interpret=True)},
    {"keep": True, "segment": 3},
    {"keep": True, "segment": 4, "hoist": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_equals_autodiff_of_a_plain_scan(name):
    variants = [ON_TPU | variant for variant in VARIANTS]
    in_parts = ON_TPU | {"kernel": rec.Kernel(parts=4, interpret=True)}
    parts = case(CELLS[name], steps=5, batch=16, mask="arbitrary", unroll=2, **in_parts)
    check([*cases_of(name, variants, steps=(6, 8, 1)), parts])


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("keep", [True, False])
def test_two_directions_in_one_kernel(name, keep):
    rng = np.random.default_rng(0)
    cell, steps = CELLS[name], 6
    pair = [weights_of_case(cell, rng) for _ in range(2)]
    weights = jax.tree.map(lambda *w: jnp.stack(w), *pair)
    x = jnp.asarray(rng.normal(size=(BATCH, steps, FEATURES)), jnp.float32)
    state = tuple(
        jnp.asarray(rng.normal(size=(2, BATCH, UNITS)), jnp.float32) for _ in range(cell.num_states)
    )
    mask = mask_for("padded", rng, BATCH, steps)

    def gradients(loop):
        def loss(weights, x, state):
            outputs = rec.recur(loop, rec.Split(), x, weights, state, mask)
            return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(outputs)), outputs

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(weights, x, state)

    plain = rec.Loop(cell, directions=2)
    kernel = dataclasses.replace(plain, **(ON_TPU | {"keep": keep, "unroll": 2}))
    close(gradients(kernel), gradients(plain))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_equals_autodiff_with_a_simulated_memory(name):
    # Copies between HBM and VMEM run as on a TPU, and nothing is zero that nobody wrote.
    simulated = pltpu.InterpretParams(uninitialized_memory="nan")
    loop = ON_TPU | {"kernel": rec.Kernel(parts=2, interpret=simulated), "unroll": 2}
    check(
        [
            case(CELLS[name], steps=4, batch=4, mask="padded", hoist=False, **loop),
            case(CELLS[name], steps=4, batch=4, reverse=True, keep=True, **loop),
        ]
    )


@pytest.mark.slow
def test_operands_are_rounded_as_without_a_kernel():
    rng = np.random.default_rng(0)
    weights = weights_of_case(rec.LSTM(), rng)
    x = jnp.asarray(rng.normal(size=(BATCH, 5, FEATURES)), jnp.float32)
    state = (jnp.zeros((BATCH, UNITS)),) * 2

    def gradients(**how):
        loop = rec.Loop(rec.LSTM(), product=rec.Product("bfloat16"), keep=True, **how)

        def loss(weights):
            return jnp.sum(rec.recur(loop, rec.Split(), x, weights, state)[0] ** 2)

        return jax.jit(jax.grad(loss))(weights)

    rounded = gradients(kernel=KERNEL)
    # Sums in another order can turn a rounding; all are off the exact by what rounding does.
    close(rounded, gradients(), tolerance=2e-2)
    exact = dataclasses.replace(rec.Loop(rec.LSTM()), keep=True)
    full = jax.grad(lambda w: jnp.sum(rec.recur(exact, rec.Split(), x, w, state)[0] ** 2))(weights)
    assert np.abs(rounded.recurrent - full.recurrent).max() > 1e-4


@pytest.mark.slow
def test_gradients_are_differentiable_and_mapped():
    rng = np.random.default_rng(0)
    weights = weights_of_case(rec.GRU(), rng)
    x = jnp.asarray(rng.normal(size=(2, BATCH, 4, FEATURES)), jnp.float32)
    mask = mask_for("padded", rng, BATCH, 4)
    state = (jnp.zeros((BATCH, UNITS)),)

    def curved(loop):
        def loss(x):
            return jnp.sum(rec.recur(loop, rec.Split(), x, weights, state, mask)[0] ** 2)

        def twice(x):
            return jnp.sum(jax.grad(loss)(x) ** 2)

        return jax.jit(jax.vmap(jax.value_and_grad(twice)))(x)

    plain = rec.Loop(rec.GRU())
    close(curved(dataclasses.replace(plain, **ON_TPU, keep=True)), curved(plain), 1e-4)


def test_a_row_of_units_that_was_added_changes_nothing():
    # Activations that are not 0 at 0 let the added units live; nothing leads from them back.
    cell = rec.SimpleRNN(rec.BUILT_IN["sigmoid"])
    check([case(cell, steps=4, mask="padded", keep=True, **ON_TPU)])


def tpu(cell=None, **changes):
    config = {"batch": 128, "steps": 128, "units": 256, "features": 256}
    config |= {"core": rec.Core(128 * 2**20)} | changes
    return rec.choose(cell or rec.LSTM(), platform="tpu", **config)


def test_the_rule_says_when_there_is_a_kernel_and_why_not():
    chosen = tpu()
    assert chosen.kernel.parts == 1
    assert (chosen.unroll, chosen.hoist) == (4, False)
    assert str(chosen).startswith("one kernel for all steps, in blocks of 4, activations' inputs")
    asked = tpu(unroll=True)
    assert asked.kernel is not None
    assert "unroll=True: the kernel is faster than separate steps" in str(asked)
    assert "unroll" not in chosen.reason
    assert tpu(directions=2).hoist
    assert tpu(unroll=2).unroll == 2
    assert tpu(segment=16).kernel is not None
    for changes, words in (
        ({"units": 32}, "of 32 units most of a tile's 128 values would be padding"),
        ({"core": "nothing is known of 'TPU v9'"}, "no kernel, as nothing is known of 'TPU v9'"),
        ({"units": 8192}, "128 MiB on the chip are too few"),
        ({"cell": rec.LSTM(rec.Activation("gelu", jax.nn.gelu))}, "activation 'gelu' is none of"),
    ):
        assert tpu(**changes).kernel is None
        assert words in str(tpu(**changes))
    assert asked == dataclasses.replace(chosen, reason=asked.reason)  # nothing is faster
    # Two cores share the rows; more parts make room for many rows; weights may lie there once.
    assert tpu(core=rec.Core(64 * 2**20, cores=2)).kernel.parts == 2
    assert tpu(batch=8192, units=1024).kernel.parts > 1
    assert tpu(core=rec.Core(16 * 2**20), units=1024, batch=8).kernel is not None
    assert tpu(core=rec.Core(20 * 2**20), units=1024, batch=8, features=28).kernel.reread
    assert tpu(core=rec.Core(16 * 2**20), batch=100).kernel.parts == 1


def test_the_rule_says_when_there_is_no_loop_and_why():
    few = {"units": 10, "features": 10}
    for changes, words in (
        (few | {"unroll": True}, "unroll=True asks for no loop"),
        (few | {"unroll": True, "steps": 1000}, "unroll=True asks for no loop"),
        (few, "10 units are computed sooner than a loop starts its kernels"),
        ({"unroll": True, "core": "v3 has none"}, "no kernel, as v3 has none; unroll=True asks"),
    ):
        chosen = tpu(**changes)
        assert (chosen.unrolled, chosen.kernel) == (True, None)
        assert words in str(chosen)
        assert str(chosen).startswith("no loop, every step with arrays of its own, ")
    for changes in ({"steps": 1000}, {"unroll": 4}, {"segment": 16}, {"directions": 2}):
        assert not tpu(**few | changes).unrolled
    assert not tpu(core="v3 has none").unrolled
    assert not rec.choose(rec.LSTM(), platform="cpu", batch=8, steps=9, units=9).unrolled


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN", "Bidirectional"])
def test_layers_under_a_strategy_equal_those_of_keras(layer, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 6, 3)).astype("float32")
    x[3, 2:] = 0
    usual = FastRecurrence._loop

    def with_kernel(self, *args, **kwargs):
        loop = usual(self, *args, **kwargs)
        return dataclasses.replace(loop, kernel=KERNEL, segment=None, unroll=2)

    monkeypatch.setattr(FastRecurrence, "_loop", with_kernel)

    def trained(package, scope):
        keras.utils.set_random_seed(0)
        with scope:
            inputs = keras.Input((6, 3))
            h = keras.layers.Masking()(inputs)
            inner = "LSTM" if layer == "Bidirectional" else layer
            inner = getattr(package, inner)(5, return_sequences=True)
            h = package.Bidirectional(inner)(h) if layer == "Bidirectional" else inner(h)
            model = keras.Model(inputs, keras.layers.Dense(1)(h))
            model.compile("sgd", "mse")
            model.fit(x, x[..., :1], batch_size=16, epochs=2, verbose=0)
            return model.get_weights()

    ours = trained(ktd.layers, ktd.TPUStrategy().scope())
    monkeypatch.undo()
    theirs = trained(keras.layers, ktd.TPUStrategy({"data": 1}, devices=jax.devices()[:1]).scope())
    close(ours, theirs)


def several_layers():
    """Every layer, masked; units that fill a tile and that do not."""
    x = keras.Input((8, 32))
    h = keras.layers.Masking()(x)
    h = ktd.layers.LSTM(128, return_sequences=True, name="lstm")(h)
    h = ktd.layers.Bidirectional(ktd.layers.LSTM(64, return_sequences=True), name="both")(h)
    h = ktd.layers.GRU(100, return_sequences=True, go_backwards=True, name="gru")(h)
    h = ktd.layers.SimpleRNN(128, name="simple")(h)
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "policy"), [("v5e:2x4", "float32"), ("v5p:2x2x1", "mixed_bfloat16")]
)
def test_no_loop_is_left_to_the_compiler(topology, policy):
    keras.config.set_dtype_policy(policy)
    try:
        strategy = ktd.TPUStrategy(topology=topology)
        lowered = lower(several_layers, strategy, batch_size=256)
    finally:
        keras.config.set_dtype_policy("float32")
    compiled = compile_lowered(lowered, effort="quick", timeout=400)
    assert compiled.error is None
    program = parse(compiled.text)
    runs = executions(program).executions
    kernels = [run.instruction for run in runs if is_kernel(run.instruction)]
    assert len(kernels) == 8
    cells = (("lstm", "lstm"), ("both", "lstm"), ("gru", "gru"), ("simple", "simplernn"))
    for layer, name in cells:
        for way in ("forwards", "backwards"):
            found = [k for k in kernels if f"({layer})" in k.op_name]
            assert any(f"{name}_{way}" in k.op_name for k in found), (layer, way)
    assert not [run for run in runs if run.instruction.opcode == "while"]


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("kind", "unroll"), [("LSTM", True), ("GRU", False)])
def test_few_units_cost_no_more_than_keras_unrolled(kind, unroll):
    def run(package, unroll):
        def build():
            layer = getattr(package, kind)(10, unroll=unroll)
            model = keras.Sequential([keras.Input((10, 10)), layer])
            model.compile("sgd", "mse")
            return model

        strategy = ktd.TPUStrategy(topology="v5e:2x4")
        return ktd.dry_run(build, strategy, batch_size=1024, effort="exact")

    ours, theirs = run(ktd.layers, unroll), run(keras.layers, True)
    assert ours.cost.cycles <= theirs.cost.cycles
    assert ours.total_bytes <= theirs.total_bytes
