"""One device = every plan on a two-axis mesh, for every kind of layer."""

import keras
import numpy as np
import pytest
from helpers import assert_close, built
from test_planner import Experts

import keras_tpu_dist as ktd
from keras_tpu_dist.common.axes import split_ways
from keras_tpu_dist.layout.planner import Planner

L = keras.layers


def sequential(*layers, shape, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, L.Dense(3)])


def cnn():
    return sequential(
        L.Conv2D(8, 3), L.BatchNormalization(), L.ReLU(), L.Conv2D(6, 3), L.Conv2DTranspose(4, 2),
        L.GlobalAveragePooling2D(), shape=(8, 8, 4),
    )  # fmt: skip


def transformer(attention):
    x = keras.Input((5, 16))
    h = L.Add()([x, attention(L.LayerNormalization()(x), L.LayerNormalization()(x))])
    g = L.LayerNormalization()(h)
    g = L.Dense(16)(L.Multiply()([L.Dense(24, activation="silu")(g), L.Dense(24)(g)]))
    return keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(L.Add()([h, g]))))


def recurrent():
    return sequential(
        L.Bidirectional(L.GRU(6, return_sequences=True)), L.LSTM(8, return_sequences=True),
        L.SimpleRNN(4), shape=(5, 4),
    )  # fmt: skip


def einsum():
    return sequential(
        L.EinsumDense("abc,cde->abde", (5, 4, 6), bias_axes="de"),
        L.Activation("gelu"),
        L.EinsumDense("abde,dec->abc", (5, 8), bias_axes="c"),
        L.Flatten(), shape=(5, 7),
    )  # fmt: skip


def lora():
    first, second = L.Dense(16, activation="relu"), L.Dense(12)
    model = sequential(first, second, shape=(6,))
    first.enable_lora(2)
    second.enable_lora(3)
    return model


def shared_and_nested():
    inner_in = keras.Input((8,))
    inner = keras.Model(inner_in, L.Dense(8)(L.Dense(16, activation="relu")(inner_in)))
    x = keras.Input((8,))
    shared = L.Dense(8, activation="tanh")
    return keras.Model(x, L.Dense(3)(L.Add()([shared(x), inner(shared(inner(x)))])))


MODELS = {
    "mlp": lambda: sequential(L.Dense(16, activation="relu"), L.Dense(8), shape=(6,)),
    "cnn": cnn,
    "attention": lambda: transformer(L.MultiHeadAttention(4, 4)),
    "grouped": lambda: transformer(L.GroupQueryAttention(4, 4, 2)),
    "recurrent": recurrent,
    "embedding": lambda: sequential(
        L.Embedding(21, 8, mask_zero=True), L.GlobalAveragePooling1D(), shape=(7,), dtype="int32"
    ),
    "einsum": einsum,
    "experts": lambda: sequential(Experts(4, 6), shape=(8,)),
    "lora": lora,
    "shared": shared_and_nested,
    # Every dimension is prime: nothing divides, everything must still be right.
    "primes": lambda: sequential(L.Dense(13, activation="relu"), L.Dense(11), shape=(7,)),
}
# Model axis of 2 and of 4, three axes; "auto" is made to choose both by a tiny memory.
PLANS = {
    "fsdp": ({"data": 8}, Planner("fsdp", min_size=1), {}),
    "tensor": ({"data": 2, "model": 4}, Planner("tensor_parallel", min_size=1), {}),
    "both": ({"data": 2, "model": 2, "fsdp": 2}, Planner("auto", 1, memory_bytes=1), {}),
    "zero1": ({"data": 4, "model": 2}, Planner("tensor_parallel", 1), {"shard_optimizer": True}),
}

ZERO1 = ("cnn", "attention", "primes")


def compiled(build):
    def make():
        model = build()
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    return make


def run(model):
    shape = (39, *model.input_shape[1:])
    rng = np.random.default_rng(0)
    integers = model.inputs[0].dtype == "int32"
    x = rng.integers(0, 21, shape) if integers else rng.normal(size=shape)
    # Three steps of 13 rows, which divide by no mesh here: one program for each plan.
    history = model.fit(x, rng.integers(0, 3, 39), batch_size=13, verbose=0).history
    return [history, model.get_weights()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plans_equal_one_device(name):
    expected = run(built(compiled(MODELS[name]), None))
    for plan, (mesh, layout, options) in PLANS.items():
        if plan == "zero1" and name not in ZERO1:
            continue
        strategy = ktd.TPUStrategy(mesh, layout, **options)
        model = built(compiled(MODELS[name]), strategy)
        assert_close(run(model), expected)
        explanation = strategy.explain(model)
        split = [row for row in explanation.rows if split_ways(strategy.mesh, row.axes) > 1]
        assert split or name == "primes", (name, plan)
        for row, variable in zip(explanation.rows, [*model.trainable_variables,
                                                    *model.non_trainable_variables]):  # fmt: skip
            ways = split_ways(strategy.mesh, row.axes)
            shard = variable.value.addressable_shards[0].data
            assert shard.size * ways == variable.value.size
