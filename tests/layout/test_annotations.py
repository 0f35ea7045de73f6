import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built
from jax.sharding import PartitionSpec

import keras_tpu_dist as ktd
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.layout.annotations import annotation_of, place_output, replicate, split

L = keras.layers
MESH = {"data": 4, "model": 2}


def spec(variable):
    return tuple(variable.value.sharding.spec)


def fit(model, rows=26):
    shape = (rows, *model.input_shape[1:])
    x, y = np.random.default_rng(0).normal(size=shape), np.zeros((rows, *model.output_shape[1:]))
    model.fit(x, y, batch_size=13, verbose=0)
    return model.get_weights()


def compiled(build):
    def make():
        model = build()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    return make


def dense_model(annotate=True):
    first = L.Dense(8, name="first", activation="relu")
    if annotate:
        split(first, kernel=(None, "model"), bias=("model",), output=("data", "model"))
    return keras.Sequential([keras.Input((6,)), first, L.Dense(1, name="last")])


@pytest.mark.slow
def test_before_build_and_after_build():
    strategy = ktd.TPUStrategy(MESH)
    expected = fit(built(compiled(lambda: dense_model(False)), None))
    before = built(compiled(dense_model), strategy)
    assert_close(fit(before), expected)
    assert spec(before.layers[0].kernel) == (None, "model")
    after = built(compiled(lambda: dense_model(False)), strategy)
    fit(after, 13)
    assert spec(after.layers[1].kernel) == ()
    split(after.layers[1], kernel=("model",))
    after.train_on_batch(np.ones((13, 6)), np.ones(13))
    assert spec(after.layers[1].kernel) == ("model",)
    momentum = [v for v in after.optimizer.variables if v.shape == (8, 1)]
    assert [spec(v) for v in momentum] == [("model",)]


def test_output_layout_is_in_the_program():
    """Without the annotation nothing is split over the model axis."""
    strategy = ktd.TPUStrategy(MESH)
    model = built(lambda: dense_model(False), strategy)
    split(model.layers[0], output=("data", "model"))
    model.compile("sgd", "mse")
    seen = []
    stock = strategy.runner.place_output
    strategy.runner.place_output = lambda outputs, layout: (
        seen.append(layout) or stock(outputs, layout)
    )
    fit(model)
    assert {tuple(layout.spec) for layout in seen} == {("data", "model")}


@pytest.mark.slow
def test_wrappers_nested_models_attention_and_shared_layers():
    def build():
        x = keras.Input((5, 8))
        both = split(L.Bidirectional(L.LSTM(4, return_sequences=True)), kernel=(None, "model"))
        wrapped = split(L.TimeDistributed(L.Dense(8)), kernel=("model",))
        attention = split(
            L.MultiHeadAttention(2, 4),
            **{"(query|key|value)/kernel": (None, "model"), "attention_output/kernel": ("model",)},
        )
        inner = keras.Sequential([keras.Input((8,)), L.Dense(8, name="a"), L.Dense(8, name="b")])
        split(inner, kernel=(None, "model"))
        replicate(inner.layers[1])
        shared = split(L.Dense(8, name="shared"), kernel=("model",))
        h = wrapped(both(x))
        h = L.GlobalAveragePooling1D()(attention(h, h))
        return keras.Model(x, L.Dense(1)(shared(inner(shared(h)))))

    strategy = ktd.TPUStrategy(MESH)
    expected = fit(built(compiled(build), None))
    model = built(compiled(build), strategy)
    assert_close(fit(model), expected)
    found = {v.path: spec(v) for v in model.trainable_variables if v.name == "kernel"}
    ends = {
        "forward_lstm/lstm_cell/kernel": (None, "model"),
        "backward_lstm/lstm_cell/kernel": (None, "model"),
        "query/kernel": (None, "model"),
        "attention_output/kernel": ("model",),
        "a/kernel": (None, "model"),
        "b/kernel": (),
        "shared/kernel": ("model",),
    }
    for end, axes in ends.items():
        assert [s for p, s in found.items() if p.endswith(end)] == [axes], end
    assert len([p for p, s in found.items() if "time_distributed" in p and s == ("model",)]) == 1
    reasons = {row.path: row.reason for row in strategy.explain(model).rows}
    assert any(reason.startswith("replicate() on layer") for reason in reasons.values())


class Structured(keras.layers.Layer):
    """Returns a tuple and a dict."""

    def build(self, shape):
        self.dense = L.Dense(4)
        self.dense.build(shape)

    def call(self, x):
        y = self.dense(x)
        return (y, {"sum": y.sum(axis=-1), "twice": 2 * y})


class Subclassed(keras.Model):
    """Uses every kind of output."""

    def __init__(self, annotate):
        super().__init__()
        self.parts = Structured()
        self.lstm = L.LSTM(4, return_state=True, return_sequences=True)
        self.last = L.Dense(1)
        if annotate:
            split(self.parts, output=[("data", "model"), {"twice": ("data",)}])
            split(self.lstm, output=("data", None, "model"))

    def call(self, x):
        first, more = self.parts(x)
        sequence, h, c = self.lstm(keras.ops.expand_dims(more["twice"] + first, 1))
        return self.last(sequence[:, 0] + h + c) + more["sum"][:, None]


@pytest.mark.slow
def test_outputs_that_are_tuples_dicts_and_states():
    def run(annotate, strategy):
        model = built(compiled(lambda: Subclassed(annotate)), strategy)
        x = np.random.default_rng(0).normal(size=(26, 6))
        model.fit(x, np.zeros(26), batch_size=13, verbose=0)
        return model.get_weights()

    strategy = ktd.TPUStrategy(MESH)
    assert_close(run(True, strategy), run(False, None))


def test_place_output(devices):
    mesh = ktd.TPUStrategy(MESH).mesh
    x, row = jax.numpy.ones((8, 4)), jax.numpy.ones(8)
    placed = place_output((x, {"a": row, "b": x}), [None, {"b": ("data",)}], mesh)
    assert placed[0] is x
    assert placed[1]["a"] is row
    assert placed[1]["b"].sharding.spec == PartitionSpec("data")
    both = place_output([x, row], named_sharding(mesh, ("data", "model")), mesh)
    assert both[0].sharding.spec == PartitionSpec("data", "model")
    assert both[1] is row  # has fewer dimensions
    ragged = jax.numpy.ones((13, 4))
    assert place_output(ragged, ("data",), mesh) is ragged
    with pytest.raises(ValueError, match=r"must fit what the layer returns.*'c'"):
        place_output({"a": x}, {"c": ("data",)}, mesh)
    with pytest.raises(ValueError, match=r"must fit what the layer returns"):
        place_output(x, [("data",)], mesh)


def test_clones_keep_annotations_and_files_do_not(tmp_path):
    model = dense_model()
    clone = keras.models.clone_model(model)
    assert annotation_of(clone.layers[0]) == annotation_of(model.layers[0])
    strategy = ktd.TPUStrategy(MESH)
    clone.compile("sgd", "mse")
    with strategy.scope():
        fit(clone)
    assert spec(clone.layers[0].kernel) == (None, "model")
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert annotation_of(loaded.layers[0]) is None
    assert_close(loaded.get_weights(), model.get_weights())


def test_what_wins():
    device_mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"))
    strategy = ktd.TPUStrategy(device_mesh, [("kernel", ("data",))])

    def build():
        model = keras.Sequential([keras.Input((8,)), L.Dense(8), L.Dense(8), L.Dense(8)])
        split(model.layers[1], kernel=("model",))
        return model

    model = built(compiled(build), strategy)
    strategy.explain(model)
    fit(model)
    kernels = [layer.kernel for layer in model.layers]
    assert [spec(k) for k in kernels] == [("data",), ("model",), ("data",)]


@pytest.mark.parametrize("layout", ["fsdp", [("own", ("data",))]])
def test_a_layout_given_to_a_weight_stays_through_every_call(layout):
    device_mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"))

    class Own(L.Layer):
        def build(self, shape):
            self.own = keras.Variable(
                "glorot_uniform",
                shape=(8, 64, 8),
                name="own",
                layout=keras.distribution.TensorLayout((None, "model", None), device_mesh),
            )

        def call(self, x):
            return keras.ops.einsum("bi,ijk->bk", x, self.own)

    strategy = ktd.TPUStrategy(device_mesh, layout)
    model = built(compiled(lambda: keras.Sequential([keras.Input((8,)), Own()])), strategy)
    for _ in range(2):
        fit(model)
        replicate(L.Dense(1))  # whatever is derived from annotations is derived anew
        assert spec(model.layers[0].own) == (None, "model")
    slots = [v for v in model.optimizer.variables if v.shape == (8, 64, 8)]
    assert [spec(v) for v in slots] == [(None, "model")]


def test_a_wrong_annotation_is_an_error_with_the_fix():
    with pytest.raises(ValueError, match=r"needs the layout of a weight or of the output"):
        split(L.Dense(3))
    dense = L.Dense(3)
    dense.build((None, 4))
    with pytest.raises(ValueError, match=r"weights by their name.*kernal.*Did you mean 'kernel'"):
        split(dense, kernal=(None, "model"))
    with pytest.raises(ValueError, match=r"tuple with one entry per dimension"):
        split(dense, kernel="model")
    with pytest.raises(ValueError, match=r"only one dimension"):
        split(dense, output=[("data", "data")])
    model = keras.Sequential([keras.Input((4,)), split(L.Dense(3), kernel=(None, "modle"))])
    model.compile("sgd", "mse")
    runner = ktd.TPUStrategy(MESH).runner
    running = runner.running(ktd.TPUStrategy(MESH), model, "fit", {"x": np.ones((4, 4))})
    with pytest.raises(ValueError, match=r"axes of the mesh.*Did you mean 'model'"):
        running.__enter__()
    model.optimizer.build(model.trainable_variables)
    strategy = ktd.TPUStrategy(MESH, shard_optimizer=True)
    assert "axes of the mesh" in strategy.explain(model, "kernel").problem
    picture = strategy.show(model)
    assert "(None, 'modle')" in str(picture)
    for drawn in (picture._repr_html_(), picture.svg()):
        assert "Did you mean &#x27;model&#x27;" in drawn
