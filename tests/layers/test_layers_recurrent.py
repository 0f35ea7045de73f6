"""Our recurrent layers against Keras's: outputs, states and every gradient."""

import itertools

import grid
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import sequential
from recurrent import close, mask_for, plain, without_loops

from keras_tpu_dist import layers as fast
from keras_tpu_dist.recurrence import Weights

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


def program(layer, x, state, mask):
    """Loss, outputs and gradients of one layer."""
    weights = [v.value for v in layer.trainable_variables]
    return grid.gradients(layer, weights, x, state, mask, factors)


def factors(leaves):
    """A random factor for every output."""
    keys = jax.random.split(jax.random.key(3), len(leaves))
    return [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)]


def compare(cases):
    """Runs every (stock, ours, x, state, mask) in one compiled program."""

    def everything(arrays):
        return [(program(stock, *a), program(ours, *a)) for (stock, ours), a in zip(layers, arrays)]

    layers = [(stock, ours) for stock, ours, *_ in cases]
    for theirs, own in jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})(
        [tuple(rest) for _, _, *rest in cases]
    ):
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
COLUMNS = {
    "name": NAMES,
    "unroll": [False, True, 2, 4, 5],
    "mask": ["none", "padded", "arbitrary", "row"],
    "go_backwards": [False, True],
    "return_sequences": [False, True],
    "return_state": [False, True],
    "use_bias": [True, False],
    "initial": [False, True],
    "zero_output_for_mask": [False, True],
    "steps": [1, 2, 7],
}


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


@pytest.mark.slow
@pytest.mark.parametrize("loop", [True, False])
def test_equals_keras_over_the_grid(loop, monkeypatch):
    if not loop:
        without_loops(monkeypatch)
    columns = COLUMNS if loop else COLUMNS | {"unroll": [False, True]}
    cases = []
    for number, row in enumerate(pairwise(columns, seed=0 if loop else 2)):
        name, steps, mask, initial = (row.pop(k) for k in ("name", "steps", "mask", "initial"))
        stock, ours = pair(name, steps, **row)
        assert loop or "no loop" in str(ours.variant((BATCH, steps, FEATURES)))
        cases.append((stock, ours, *arrays(name, steps, mask, initial, seed=number)))
    assert len(cases) >= (20 if loop else 1)
    compare(cases)


@pytest.mark.parametrize("config", [{"dropout": 0.5}, {"recurrent_dropout": 0.5}])
def test_without_a_loop_dropout_draws_what_keras_draws(config, monkeypatch):
    without_loops(monkeypatch)
    stock, ours = pair("GRU", 3, seed=7, unroll=True, **config)
    x, _, _ = arrays("GRU", 3, "none", False)
    close(ours(x, training=True), stock(x, training=True))


@pytest.mark.slow
def test_the_script_for_the_whole_grid_runs_and_notices():
    (group,) = (g for g in grid.groups(["GRU"], [2]) if list(g.values())[2:] == [True] * 6)
    assert len(grid.groups(grid.GROUPS["name"], grid.GROUPS["steps"])) == 768
    assert grid.run(group, None) == 15
    with pytest.raises(AssertionError, match="Not equal to tolerance") as caught:
        grid.run(group, None, tolerance=-1)
    assert "unroll=False" in caught.value.__notes__[0]


def test_config_and_weights_pass_both_ways():
    for name in NAMES:
        ours = getattr(fast, name)(UNITS, return_sequences=True, go_backwards=True)
        theirs = getattr(keras.layers, name).from_config(ours.get_config())
        assert theirs.get_config() == ours.get_config()
        assert getattr(fast, name).from_config(theirs.get_config()).get_config() == (
            ours.get_config()
        )


def test_segment_is_kept_in_the_config():
    layer = fast.LSTM(UNITS, segment="auto")
    assert fast.LSTM.from_config(layer.get_config()).segment == "auto"
    assert "segment" not in fast.LSTM(UNITS).get_config()


@pytest.mark.parametrize(("name", "loop"), [*((name, True) for name in NAMES), ("GRU", False)])
@pytest.mark.slow
def test_bfloat16_stays_close_to_float64(name, loop, monkeypatch):
    if not loop:
        without_loops(monkeypatch)
    _, ours = pair(name, 64, dtype="mixed_bfloat16", return_sequences=True)
    x, state, mask = arrays(name, 64, "padded", True)

    def rounded(a):
        # What bfloat16 can represent, so that only the arithmetic is compared.
        return jnp.asarray(a, jnp.bfloat16).astype(jnp.float32)

    for variable in ours.weights:
        variable.assign(rounded(variable.value))
    x, state = jax.tree.map(rounded, (x, state))
    values = [v.value for v in ours.trainable_variables]
    frozen = [v.value for v in ours.non_trainable_variables]

    def loss(values, x, state):
        y, _ = ours.stateless_call(values, frozen, x, initial_state=state, mask=mask)
        return jnp.mean(y.astype(jnp.float32)), y

    (_, y), own = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
        values, x, state
    )
    with jax.enable_x64(True):

        def exact(values, x, state):
            kernel, recurrent, bias = values
            bias, inner = bias if bias.ndim == 2 else (bias, None)
            weights = Weights(kernel, bias, recurrent, inner)
            y, _ = plain(ours._arithmetic(), weights, x, tuple(state), mask, False)
            return jnp.mean(y), y

        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (values, x, state))
        (_, wanted), gradients = jax.jit(
            jax.value_and_grad(exact, argnums=(0, 1, 2), has_aux=True)
        )(*wide)
        assert wanted.dtype == jnp.float64
        wanted, gradients = jax.tree.map(np.asarray, (wanted, gradients))
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, atol=1e-2 * np.abs(wanted).max())
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(gradients)):
        assert a.dtype == jnp.float32  # gradients of float32 variables are not rounded
        assert np.abs(np.asarray(a, np.float64) - b).max() <= 1e-2 * np.abs(b).max()


@pytest.mark.parametrize("loop", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stateful_carries_its_state_through_fit_and_predict(loop, monkeypatch):
    if not loop:
        without_loops(monkeypatch)

    def build(package):
        return sequential(
            keras.Input((3, FEATURES), batch_size=BATCH),
            package.LSTM(UNITS, stateful=True, name="memory"),
        )

    model, reference = build(fast), build(keras.layers)
    reference.set_weights([np.asarray(w.value) for w in model.weights])
    x = np.random.default_rng(0).normal(size=(2 * BATCH, 3, FEATURES)).astype("float32")
    # Keras carries the state only when the layer is called by hand.
    by_hand = [np.asarray(reference.layers[0](x[i : i + BATCH])) for i in (0, BATCH)]
    close(model.predict(x, batch_size=BATCH, verbose=0), np.concatenate(by_hand))
    states = [np.asarray(s.value) for s in model.layers[0].states]
    close(states, [np.asarray(s.value) for s in reference.layers[0].states])
    model.layers[0].reset_state()
    assert not np.asarray(model.layers[0].states[0].value).any()
    model.fit(x, np.ones((2 * BATCH, UNITS)), batch_size=BATCH, shuffle=False, verbose=0)
    assert np.asarray(model.layers[0].states[0].value).any()
    assert len(model.weights) == len(reference.weights)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"recurrent_dropout": 0.5}, "recurrent_dropout masks the state"),
        ({"activation": "softmax"}, "'softmax' is not an element-wise function"),
        ({"activation": lambda x: x * 2}, "'<lambda>' is not an element-wise function"),
    ],
)
def test_what_is_not_fast_is_said_once_and_right(config, reason, caplog):
    stock, ours = pair("LSTM", 3, unroll=2, **config)
    x, _, _ = arrays("LSTM", 3, "none", False)
    close(ours(x), stock(x))
    ours(x)
    assert caplog.text.count(reason) == 1


@pytest.mark.slow
def test_other_activations_are_fast():
    cases = []
    for activation, gate in [("relu", "hard_sigmoid"), ("elu", "sigmoid"), (None, "softsign")]:
        config = {"activation": activation, "recurrent_activation": gate}
        stock, ours = pair("GRU", 4, **config)
        cases.append((stock, ours, *arrays("GRU", 4, "none", True)))
        assert not isinstance(ours._arithmetic(), str)
    compare(cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_equal_keras(name):
    cases = []
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (BATCH, 5, FEATURES)), np.int32)
    for unroll, mask in [(False, "none"), (True, "arbitrary"), (2, "padded")]:
        stock, ours = pair(name, 5, unroll=unroll, return_sequences=True, return_state=True)
        _, state, given = arrays(name, 5, mask, initial=mask != "none")
        cases.append((stock, ours, x, state, given))
    for stock, ours, x, state, mask in cases:
        for options in ({}, {"initial_state": state, "mask": mask}):
            close(ours(x, **options), stock(x, **options))
    both = [package.Bidirectional(layer) for package, layer in zip((keras.layers, fast), cases[0])]
    for layer in both:
        layer.build(x.shape)
    both[1].set_weights(both[0].get_weights())
    close(both[1](x), both[0](x))
    close(ours(x > 0), stock(x > 0))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_no_rows(name):
    for layer in pair(name, 600, return_sequences=True):
        x = jnp.zeros((0, 600, FEATURES))
        assert layer(x).shape == (0, 600, UNITS)
        assert jax.grad(lambda x: layer(x).sum())(x).shape == x.shape


ONES = np.ones((BATCH, 4, FEATURES), "float32")


@pytest.mark.parametrize(
    ("config", "x", "mask", "words"),
    [
        ({"unroll": 0}, ONES, None, "a positive integer, the number of steps in one iteration"),
        ({"unroll": 2.0}, ONES, None, "Received: unroll=2.0"),
        ({"segment": 9}, ONES, None, "longer than the sequence. Received: segment=9, timesteps=4"),
        ({"unroll": True}, keras.Input((None, FEATURES)), None, "a known number of timesteps"),
        ({}, ONES, np.ones((BATCH, 3), bool), "one entry for every row and timestep"),
        ({}, ONES, np.ones((BATCH,), bool), "one entry for every row and timestep"),
        ({}, ONES, np.ones((BATCH, 4), "float32"), "must be boolean"),
    ],
)
def test_what_does_not_fit_is_refused(config, x, mask, words):
    with pytest.raises(ValueError, match=words):
        fast.LSTM(UNITS, **config)(x, mask=mask)
