"""Layers that are computed again: equal to those that are kept, and fewer bytes."""

import keras
import numpy as np
import pytest
from helpers import built, compiled, largest_difference

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras

L = keras.layers
TIME, WIDTH = 6, 8
MESHES = {
    "none": lambda: None,
    "data8": lambda: ktd.TPUStrategy({"data": 8}),
    "tensor": lambda: ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel"),
    "fsdp": lambda: ktd.TPUStrategy(
        {"data": 2, "fsdp": 2, "model": 2}, ktd.Planner("fsdp", min_size=16)
    ),
}


class Attending(L.Layer):
    """A transformer block of Keras's own layers, with dropout and masks."""

    def __init__(self, attention="MultiHeadAttention", **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.kind = attention
        options = {"num_heads": 2, "key_dim": 4}
        if attention == "GroupQueryAttention":
            options = {"num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        self.attention = getattr(L, attention)(**options, dropout=0.2, name="attention")
        self.norm = L.LayerNormalization(name="norm")
        self.up = L.Dense(16, "gelu", name="up")
        self.down = L.Dense(WIDTH, name="down")
        self.dropout = L.Dropout(0.2, name="dropout")

    def build(self, shape):
        arguments = (shape, shape)
        self.attention.build(*arguments)
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, x, training=None):
        x = x + self.attention(x, x, training=training, use_causal_mask=True)
        h = self.down(self.up(self.norm(x)))
        return x + self.dropout(h, training=training)

    def get_config(self):
        return {**super().get_config(), "attention": self.kind}


class Losing(L.Layer):
    """Adds losses and counts its calls in a weight; its results are no plain array."""

    def build(self, shape):
        self.dense = L.Dense(WIDTH, activity_regularizer="l2", kernel_regularizer="l2")
        self.dense.build(shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x, *, scale=2.0):
        self.calls.assign_add(1.0)
        self.add_loss(0.1 * keras.ops.mean(x**2))
        y = self.dense(x) * scale
        self.add_loss(0.01 * keras.ops.mean(y**2))
        return {"y": y, "kept": (x, scale)}


class Plain(L.Layer):
    """A subclassed block that is called twice, one of whose layers is shared."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.Sequential([L.Dense(WIDTH, "tanh"), L.Dropout(0.3)])

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(self.inner(x))


def dense(remat, x):
    inner = [L.Dense(16, "relu"), L.Dropout(0.3), L.LayerNormalization(), L.Dense(WIDTH)]
    return remat(keras.Sequential(inner, name="block"))(x)


def convolution(remat, x):
    return remat(convolutions("block"))(x)


def convolutions(name):
    inner = [
        *(L.Conv1D(WIDTH, 3, padding="same", use_bias=False), L.BatchNormalization(momentum=0.8)),
        *(L.ReLU(), L.DepthwiseConv1D(3, padding="same"), L.BatchNormalization()),
    ]
    return keras.Sequential(inner, name=name)


def attention(remat, x):
    x = L.Masking(0.0)(x)
    return remat(Attending(name="second"))(remat(Attending(name="first"))(x))


def grouped(remat, x):
    return remat(Attending("GroupQueryAttention", name="block"))(x)


def recurrent(remat, x):
    x = remat(L.LSTM(WIDTH, return_sequences=True, dropout=0.2, recurrent_dropout=0.2))(x)
    return remat(ktd.layers.GRU(WIDTH, return_sequences=True, dropout=0.2))(L.Masking(0.0)(x))


def nested(remat, x):
    h = keras.Input((TIME, WIDTH))
    inner = keras.Model(h, remat(Plain(name="plain"))(L.BatchNormalization()(h)), name="inner")
    return remat(keras.Sequential([inner, L.Dense(WIDTH, "relu")], name="outer"))(x)


def shared(remat, x):
    block = remat(Plain(name="shared"))
    return block(L.Dense(WIDTH)(block(x)))


def losing(remat, x):
    results = remat(Losing(name="block"))(x, scale=1.5)
    return results["y"] + results["kept"][0]


def low_rank(remat, x):
    first = L.Dense(WIDTH, "relu", name="first")
    first.build(x.shape)
    first.enable_lora(2)
    return remat(keras.Sequential([first, L.Dropout(0.2), L.Dense(WIDTH)], name="block"))(x)


def classifier(block, remat, **options):
    x = keras.Input((TIME, WIDTH))
    y = L.Dense(3)(L.GlobalAveragePooling1D()(block(remat, x)))
    model = keras.Model(x, y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(
        0.05, momentum=0.9, gradient_accumulation_steps=options.pop("accumulate", None)
    )
    return compiled(model, optimizer, loss, metrics=["accuracy"], **options)


def sequences(rows=13):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, TIME, WIDTH)).astype("float32")
    x[::2, 4:] = 0.0  # masked
    return x, rng.integers(0, 3, rows)


def trained(block, policy, strategy, forward=False, **options):
    """Everything that two steps of 13 rows leave, seeds and moving statistics included."""

    def remat(layer):
        return layer if policy is None else ktd.remat(layer, policy)

    epochs = options.pop("epochs", 1)
    return fitted(built(lambda: classifier(block, remat, **options), strategy), epochs, forward)


def fitted(model, epochs, forward):
    x, y = sequences()
    found = {"history": model.fit(x, y, batch_size=8, epochs=epochs, verbose=0).history}
    if forward:
        found["predictions"] = model.predict(x, batch_size=8, verbose=0)
        found["evaluation"] = model.evaluate(x, y, batch_size=8, verbose=0)
    return found | {"state": {v.path: np.asarray(v.value) for v in _keras.state_variables(model)}}


def apart(again, kept):
    """How far results are from others, relative to the largest of these where that is above 1."""
    zeros = keras.tree.map_structure(np.zeros_like, kept)
    return largest_difference(again, kept) / max(1.0, largest_difference(kept, zeros))


def assert_same(block, policy, mesh, tolerance=1e-6, **options):
    strategy = MESHES[mesh]()
    kept = trained(block, None, strategy, **options)
    again = trained(block, policy, strategy, **options)
    assert apart(again, kept) <= tolerance
    return kept


CASES = [
    (dense, "full", "none", {}),
    (convolution, "dots", "data8", {}),
    (convolution, "full", "fsdp", {"accumulate": 2}),
    (attention, "full", "tensor", {"steps_per_execution": 3, "epochs": 2}),
    (attention, ("attention", "up"), "data8", {}),
    (attention, "attention", "fsdp", {}),
    (grouped, "dots", "fsdp", {}),
    (grouped, "attention", "none", {}),
    (recurrent, "full", "none", {}),
    (recurrent, "dots", "data8", {}),
    (nested, "full", "tensor", {}),
    (shared, "full", "data8", {"run_eagerly": True}),
    (shared, "full", "tensor", {}),
    (losing, "full", "fsdp", {}),
    (losing, "dots", "none", {}),
    (low_rank, "full", "tensor", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "policy", "mesh", "options"),
    CASES,
    ids=lambda v: getattr(v, "__name__", None) if callable(v) else None,
)
def test_remat_changes_nothing_that_training_leaves(block, policy, mesh, options):
    assert_same(block, policy, mesh, **options)


@pytest.mark.slow
def test_mixed_precision_under_a_rule_of_the_strategy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    strategies = [
        ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2}, remat=remat)
        for remat in (None, {"block": "full"})
    ]
    kept, again = (trained(dense, None, strategy, forward=True) for strategy in strategies)
    assert largest_difference(again, kept) <= 1e-6


@pytest.mark.slow
def test_a_block_may_be_assigned_to_a_logical_device():
    """Computed again within the branch of one device, with its seed's state."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})

    def assigned(policy):
        def block(remat, x):
            return dense(lambda layer: ktd.assign(remat(layer), 1), x)

        return trained(block, policy, strategy)

    assert largest_difference(assigned("full"), assigned(None)) <= 1e-6
