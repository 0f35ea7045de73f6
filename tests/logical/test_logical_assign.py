"""Layers that one logical device of each replica computes for all of them."""

import functools
import logging

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, largest_difference, through_conditionals

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.layout.annotations import annotation_of, split
from keras_tpu_dist.tools.hlo.parse import parse
from keras_tpu_dist.training.step import jitted_step

L = keras.layers
PAIRS = {"data": 4, "model": 2}
QUARTETS = {"data": 2, "model": 4}


def to(device):
    """What assigns a layer to the device; `None` leaves it as it is."""
    return lambda layer: layer if device is None else ktd.assign(layer, device)


def sgd(model, loss="mse", **options):
    return compiled(model, keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)


def train_program(model, strategy, x, y):
    """The compiled text of one step of fit."""
    with strategy.scope():
        _keras.symbolic_build(model, (x, y, None), "train")
        function = jitted_step(model, "train", strategy.placer, donate=False)
        state = tuple([v.value for v in group] for group in _keras.state_groups(model))
        batch = strategy.placer.place((x, y, None))
        return function.lower(state, batch).compile().as_text()


def test_the_matmul_stands_in_a_conditional():
    def build():
        model = keras.Sequential(
            [keras.Input((5,)), ktd.assign(L.Dense(7, name="one"), 1), L.Dense(2)]
        )
        return sgd(model)

    strategy = ktd.TPUStrategy(PAIRS)
    model = built(build, strategy)
    x, y = np.ones((16, 5), "float32"), np.ones((16, 2), "float32")
    program = parse(train_program(model, strategy, x, y))
    inside = through_conditionals(program)
    dots = {True: [], False: []}
    for computation in program:
        for instruction in computation:
            if instruction.opcode == "dot":
                dots[computation.name in inside].append(instruction.shapes[0].dims)
    assert (4, 7) in dots[True]  # 16 rows on 4 replicas
    assert {(7, 5), (5, 7)} & set(dots[True])  # the kernel's gradient
    assert not [dims for dims in dots[False] if 5 in dims]
    gathers = [i for c in program for i in c if i.opcode == "all-gather"]
    assert not gathers, "the batch stays split over the replicas"


def states_and_masks(assigned):
    """Several outputs, states in and out, masks in and out, a shared layer, a dict."""

    class Both(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = L.Dense(4)
            self.seen = keras.Variable(np.zeros(()), trainable=False, name="seen")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x, scale=1.0):
            self.seen.assign_add(1.0)
            self.add_loss(keras.ops.mean(x**2))
            y = self.dense(x) * scale
            return {"y": y, "nothing": None, "pair": (y + 1, keras.ops.shape(y)[1])}

        def compute_output_spec(self, x, scale=1.0):
            y = keras.KerasTensor((*x.shape[:-1], 4), x.dtype)
            return {"y": y, "nothing": None, "pair": (y, 4)}

    class Everything(keras.Model):
        def __init__(self):
            super().__init__()
            put = ktd.assign if assigned else lambda layer, k: layer
            self.embed = put(L.Embedding(9, 4, mask_zero=True), 1)
            self.first = put(L.LSTM(4, return_sequences=True, return_state=True), 0)
            self.second = put(L.GRU(4, return_sequences=True), 1)
            self.inner = put(keras.Sequential([keras.Input((4, 4)), L.LSTM(3)]), 0)
            self.inner.supports_masking = True
            self.both = put(Both(), 1)
            self.last = put(L.Dense(4), 0)
            self.pool = L.GlobalAveragePooling1D()

        def call(self, tokens, training=None):
            h = self.embed(tokens)
            h, *states = self.first(h)
            h = self.second(h, initial_state=states[0])
            pooled = self.pool(h)
            found = self.both(self.last(self.last(pooled)), scale=2.0)
            assert found["nothing"] is None
            assert found["pair"][1] == 4
            more = self.inner(h)
            return found["y"] + found["pair"][0] + keras.ops.sum(more, axis=-1, keepdims=True)

    return sgd(Everything())


@pytest.mark.slow
def test_states_masks_structures_losses_and_shared_layers():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (8, 4)), rng.normal(size=(8, 4)).astype("float32")
    x[:, 0] = 1  # a row that is all mask has no mean

    def fitted(model):
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
        return [history, model.get_weights()]

    expected = fitted(built(lambda: states_and_masks(False), None))
    strategy = ktd.TPUStrategy(PAIRS)
    model = built(lambda: states_and_masks(True), strategy)
    assert_close(fitted(model), expected)
    text = str(strategy.explain(model))
    assert "computed by logical device 1  (assign())" in text
    assert len(strategy.explain(model).logical_devices) == 6  # what is inside is not listed again
    assert not [f for f in strategy.lint(model).findings if f.code == "unused-axis"]


def wrappers(assign):
    """Assigned layers in wrappers, cells in loops, several inputs, and our recurrent layers."""
    x = keras.Input((4, 3))
    h = L.TimeDistributed(assign(L.Dense(4), 1))(x)
    h = assign(ktd.layers.LSTM(4, return_sequences=True), 0)(h)
    last = L.RNN(assign(L.GRUCell(4), 1))(h)
    h = assign(L.Concatenate(), 1)([last, assign(L.Flatten(), 0)(h)])
    return sgd(keras.Model(x, L.Dense(2)(assign(L.Dense(64, name="wide"), 1)(h))))


@pytest.mark.slow
def test_wrappers_and_split_weights():
    """Weights that are split over the replicas, and over the devices of a replica."""

    def fitted(strategy, assign):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(8, 4, 3)).astype("float32"), rng.normal(size=(8, 2))
        model = built(lambda: wrappers(assign), strategy)
        return [model.fit(x, y, batch_size=8, verbose=0).history, model.get_weights()]

    expected = fitted(None, lambda layer, device: layer)
    fsdp = ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2, "one": 1}, "fsdp")
    assert_close(fitted(fsdp, ktd.assign), expected)
    pairs = ktd.DeviceAssignment.build(computation_shape=(2,))
    split_weights = ktd.TPUStrategy(pairs, [("wide/kernel", (None, "logical"))])
    assert_close(fitted(split_weights, ktd.assign), expected)


@pytest.mark.slow
def test_a_whole_model_and_a_quantized_layer():
    strategy = ktd.TPUStrategy(PAIRS)

    def whole():
        return ktd.assign(small(), 0)

    assert_close(fit(built(whole, strategy)), fit(built(small, None)))

    def quantized(device=None):
        dense = to(device)(L.Dense(4))
        model = keras.Sequential([keras.Input((5,)), dense])
        dense.quantize("int8")
        return model

    x = np.random.default_rng(0).normal(size=(13, 5)).astype("float32")
    expected = built(quantized, None).predict(x, verbose=0)
    model = built(lambda: quantized(1), strategy)
    assert_close(model.predict(x, verbose=0), expected)
    with strategy.scope():
        text = jax.jit(lambda x: model(x)).lower(x).compile().as_text()
    assert "conditional(" in text


def small(device=None, dtype=None):
    layers = [L.Dense(4, dtype=dtype), L.BatchNormalization(dtype=dtype), L.Dropout(0.4, seed=1)]
    assigned = [to(device)(layer) for layer in layers]
    return sgd(keras.Sequential([keras.Input((5,)), *assigned, L.Dense(2, dtype=dtype)]))


def fit(model, **options):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(13, 5)).astype("float32"), rng.normal(size=(13, 2)).astype("float32")
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, **options)
    return model.get_weights()


@pytest.fixture(scope="module")
def plain():
    keras.config.set_dtype_policy("float32")
    return fit(built(small, None))


@pytest.mark.slow
def test_where_there_is_nothing_to_share(plain, caplog):
    """Without a strategy, with one device per replica, and where code is not compiled."""
    assert_close(fit(built(lambda: small(1), None)), plain)
    assert_close(
        fit(built(lambda: small(1), ktd.TPUStrategy({"data": 2}, devices=jax.devices()[:2]))), plain
    )

    def eager():
        model = small(1)
        model.run_eagerly = True
        return model

    with caplog.at_level(logging.INFO, "keras_tpu_dist"):
        assert_close(fit(built(eager, ktd.TPUStrategy(PAIRS))), plain)
    assert caplog.text.count("computed by all logical devices while code is not compiled") == 1


@pytest.mark.slow
def test_scanned_steps(plain):
    def scanned():
        model = small(1)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", steps_per_execution=2)
        return model

    assert_close(fit(built(scanned, ktd.TPUStrategy(PAIRS))), plain)


@pytest.mark.slow
def test_mixed_precision():
    strategy = ktd.TPUStrategy(PAIRS)
    expected = fit(built(lambda: small(None, "mixed_bfloat16"), strategy))
    found = fit(built(lambda: small(1, "mixed_bfloat16"), strategy))
    assert largest_difference(found, expected) < 2e-3  # one bfloat16 step of the sum's order
    assert {w.dtype for w in found} == {np.dtype("float32")}


@pytest.mark.slow
def test_after_fit_and_taken_back(plain):
    strategy = ktd.TPUStrategy(PAIRS)
    model = built(small, strategy)
    before = [v.copy() for v in model.get_weights()]
    assert_close(fit(model), plain)
    for device in (1, None):
        model.set_weights(before)
        for variable in model.optimizer.variables:
            if variable is not model.optimizer.learning_rate:
                variable.assign(np.zeros(variable.shape))
        seen = []
        ktd.assign(model.layers[0], device)
        function = model.train_function
        fit(model)
        seen.append(model.train_function is not function)
        assert seen == [True], "the step is compiled anew"
    assert strategy.explain(model).logical_devices == ()


def test_clones_keep_it_and_split_goes_with_it(tmp_path):
    model = keras.Sequential([keras.Input((5,)), ktd.assign(L.Dense(4), 1)])
    split(model.layers[0], kernel=("data",))
    note = annotation_of(model.layers[0])
    assert (note.logical_device, note.weights.rules) == (1, (("kernel", ("data",)),))
    clone = keras.models.clone_model(model)
    assert annotation_of(clone.layers[0]) == note
    ktd.replicate(clone.layers[0])
    assert annotation_of(clone.layers[0]).logical_device == 1
    model.save(tmp_path / "m.keras")
    assert annotation_of(keras.models.load_model(tmp_path / "m.keras").layers[0]) is None


@pytest.mark.slow
def test_a_scope_assigns_the_layers_made_in_it(plain):
    strategy = ktd.TPUStrategy(PAIRS)

    def build():
        x = keras.Input((5,))
        with strategy.logical_device(0):
            h = L.BatchNormalization()(L.Dense(4)(x))
        with strategy.experimental_logical_device(1):
            y = L.Dense(2)(L.Dropout(0.4, seed=1)(h))
            again = keras.Sequential([keras.Input((5,)), L.Dense(2)])
            model = keras.Model(x, y)
        assert annotation_of(L.Dense(1)) is None
        assert annotation_of(again) is annotation_of(model) is None
        assert annotation_of(again.layers[0]).logical_device == 1
        return sgd(model)

    model = built(build, strategy)
    found = [annotation_of(layer) for layer in model.layers]
    assert [n if n is None else n.logical_device for n in found] == [None, 0, 0, 1, 1]
    assert_close(fit(model), plain)


@pytest.mark.slow
def test_functions_assigned_within_a_layer():
    strategy = ktd.TPUStrategy(PAIRS)

    class Doubled(L.Layer):
        def __init__(self, strategy, **kwargs):
            super().__init__(**kwargs)
            self.strategy = strategy
            self.dense = L.Dense(4)
            self.norm = L.BatchNormalization()

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build((None, 4))

        def call(self, x, training=None):
            def function(x, factor):
                return factor * self.norm(self.dense(x), training=training)

            if self.strategy is not None:
                function = self.strategy.assign_to_logical_device(function, 1)
            return function(x, 2.0)

    def build(strategy=None):
        return sgd(keras.Sequential([keras.Input((5,)), Doubled(strategy), L.Dense(2)]))

    assert_close(fit(built(lambda: build(strategy), strategy)), fit(built(build, None)))

    def symbolic(strategy=None):
        x = keras.Input((5,))
        h = L.Dense(4)(x)
        square = lambda t: t**2  # noqa: E731
        if strategy is not None:
            assert strategy.assign_to_logical_device(h, 0) is h
            square = strategy.assign_to_logical_device(square, 1)
        h = square(h)
        model = sgd(keras.Model(x, L.Dense(2)(h)))
        if strategy is not None:
            assert annotation_of(model.layers[1]).logical_device == 0
            assert isinstance(model.layers[2], L.Lambda)
            assert annotation_of(model.layers[2]).logical_device == 1
        return model

    def stock():
        x = keras.Input((5,))
        h = L.Lambda(lambda t: t**2)(L.Dense(4)(x))
        return sgd(keras.Model(x, L.Dense(2)(h)))

    assert_close(fit(built(lambda: symbolic(strategy), strategy)), fit(built(stock, None)))


def test_within_a_function_of_one_replica():
    """Where strategy.run has split the batch already."""
    strategy = ktd.TPUStrategy(PAIRS)
    dense = L.Dense(3)
    dense.build((None, 5))
    x = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
    expected = dense(x)
    ktd.assign(dense, 1)
    P = jax.sharding.PartitionSpec
    run = jax.jit(
        jax.shard_map(
            lambda x: dense(x),
            mesh=strategy.mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        )
    )
    with strategy.scope():
        assert_close(run(x), expected)
        assert "conditional(" in run.lower(x).compile().as_text()


def test_an_assignment_to_no_logical_device_is_an_error():
    strategy = ktd.TPUStrategy(QUARTETS)
    with pytest.raises(ValueError, match=r"counted from 0.*logical_device_id=4.*Use 0 to 3"):
        strategy.assign_to_logical_device(L.Dense(3), 4)
    with pytest.raises(ValueError, match=r"logical_device_id=4"):
        strategy.logical_device(4).__enter__()
    with pytest.raises(ValueError, match=r"logical_device of assign is a whole number of at le"):
        ktd.assign(L.Dense(3), -1)
    with pytest.raises(ValueError, match=r"Only layers and models.*layer=3"):
        ktd.assign(3, 0)
    with pytest.raises(ValueError, match=r"An Input computes nothing"):
        ktd.assign(L.InputLayer((3,)), 0)
    for target in (3, keras.Input((3,)), keras.KerasTensor((2, 3))):
        with pytest.raises(ValueError, match=r"output of a layer, or a function can be assigned"):
            strategy.assign_to_logical_device(target, 0)
    model = built(lambda: small(4), strategy)
    with pytest.raises(ValueError, match=r"logical device=4.*devices=4.*Assign it to 0 to 3"):
        fit(model)
    array = jax.numpy.ones(3)
    assert strategy.assign_to_logical_device(array, 3) is array

    inner = keras.Sequential([keras.Input((5,)), ktd.assign(L.Dense(2), 1)])
    model = built(
        lambda: sgd(keras.Sequential([keras.Input((5,)), ktd.assign(inner, 0)])), strategy
    )
    with pytest.raises(
        ValueError, match=r"runs on the same device.*to=1, within one assigned to=0"
    ):
        fit(model)

    class Adds(L.Layer):
        def call(self, x):
            self.add_loss(x.sum())
            return x

    adds = Adds()
    function = strategy.assign_to_logical_device(lambda x: adds(x), 1)

    class Uses(keras.Model):
        def call(self, x):
            return function(x)

    with pytest.raises(ValueError, match=r"cannot call add_loss.*Assign the layer"):
        built(lambda: sgd(Uses()), strategy).predict(np.ones((4, 2)), verbose=0)


def test_a_failure_in_an_assigned_layer_leaves_nothing_behind(plain):
    strategy = ktd.TPUStrategy(PAIRS)
    fail = [True]

    class Fails(L.Layer):
        def call(self, x):
            if fail[0]:
                raise RuntimeError("boom")
            return x

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    def build():
        layers = [L.Dense(4), L.BatchNormalization(), Fails(), L.Dropout(0.4, seed=1)]
        return sgd(
            keras.Sequential(
                [keras.Input((5,)), *(ktd.assign(each, 1) for each in layers), L.Dense(2)]
            )
        )

    model = built(build, strategy)
    with pytest.raises(RuntimeError, match="boom"):
        fit(model)
    fail[0] = False
    assert_close(fit(model), plain)


def test_in_strategy_run():
    """Split, assigned and reduced in one function of a replica."""
    strategy = ktd.TPUStrategy(ktd.DeviceAssignment.build(computation_shape=(4,)))
    with strategy.scope():
        dense = L.Dense(4)
        dense.build((None, 4, 6))
    x = np.random.default_rng(0).normal(size=(6, 4, 6)).astype("float32")
    expected = np.tanh(dense(x))
    ktd.assign(dense, 3)

    def replica(x):
        y = keras.ops.tanh(dense(strategy.split_to_logical_devices(x, [1, 2, 2])))
        double = strategy.assign_to_logical_device(lambda t: 2 * t, 1)
        return double(y), ktd.get_replica_context().all_reduce("sum", y)

    doubled, summed = strategy.run(replica, (x,))
    for each in strategy.local_results(doubled):  # a plain array is the same for every replica
        assert_close(each, 2 * expected)
    for each in strategy.local_results(summed):
        assert_close(each, strategy.num_replicas_in_sync * expected)


def test_float32_weights_of_a_mixed_precision_layer_keep_their_precision():
    """A layer of another policy within an assigned one reads its weights unrounded."""

    def build(device):
        keras.config.set_dtype_policy("mixed_bfloat16")
        inner = [L.Dense(8, activation="relu"), L.Dense(3, dtype="float32")]
        model = keras.Sequential(
            [keras.Input((4,)), L.Dense(4), to(device)(keras.Sequential(inner))]
        )
        return sgd(model)

    strategy = ktd.TPUStrategy(PAIRS)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    expected, found = (
        built(functools.partial(build, device), strategy).predict(x, batch_size=16, verbose=0)
        for device in (None, 1)
    )
    assert_close(found, expected)


def test_a_split_within_a_scope_of_one_device_is_not_assigned():
    strategy = ktd.TPUStrategy(PAIRS)
    with strategy.scope():
        x = keras.Input((6,))
        with strategy.logical_device(1):
            h = strategy.split_to_logical_devices(L.Dense(4)(x), [1, 2])
            h = strategy.replicate_to_logical_devices(h)
        model = keras.Model(x, h)
    found = [annotation_of(each) for each in model.layers]
    devices = [each if each is None else each.logical_device for each in found]
    assert devices == [None, 1, None, None]


def test_functions_of_several_symbolic_tensors():
    strategy = ktd.TPUStrategy(PAIRS)
    with strategy.scope():
        one, two = keras.Input((3,)), keras.Input((3,))

        def function(a, b, *, mask, factor=1.0):
            return factor * a - b["of"] * mask

        assigned = strategy.assign_to_logical_device(function, 1)
        model = keras.Model([one, two], assigned(one, {"of": two}, mask=one, factor=3.0))
    assert annotation_of(model.layers[-1]).logical_device == 1
    a, b = (np.random.default_rng(n).normal(size=(9, 3)).astype("float32") for n in range(2))
    assert_close(model.predict([a, b], verbose=0), 3 * a - b * a)
