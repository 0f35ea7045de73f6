"""What is added to a model's features is whole: tables, and what kernels without a partner make."""

import keras
import numpy as np
import pytest
from decoders import TIME, WIDTH, Attention, Block
from helpers import assert_close, built, results
from keras import ops
from programs import compiled, program, sent

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import Planner

L = keras.layers
BY_FOUR = {"data": 2, "model": 4}
ROWS, LENGTH = 13, 32
MANY = 4099  # words: more than are sent whole, and they divide by nothing


class Positions(L.Layer):
    """Learned positions, as in most encoders."""

    def build(self, shape):
        self.table = self.add_weight(shape=(LENGTH, shape[-1]), name="table")

    def call(self, x):
        return x + self.table[: x.shape[1]]


class Both(L.Layer):
    """Tokens and positions in one layer, as KerasHub has them."""

    def __init__(self):
        super().__init__()
        self.words, self.places = L.Embedding(MANY, WIDTH), Positions()

    def call(self, x):
        return self.places(self.words(x))


class Patches(L.Layer):
    """Images in pieces, behind a token for the class."""

    def __init__(self):
        super().__init__()
        self.pieces = L.Conv2D(WIDTH, 2, 2, name="pieces")

    def build(self, shape):
        self.pieces.build(shape)
        self.first = self.add_weight(shape=(1, 1, WIDTH), name="first")

    def call(self, x):
        y = ops.reshape(self.pieces(x), (-1, TIME - 1, WIDTH))
        first = ops.broadcast_to(self.first, (ops.shape(y)[0], 1, WIDTH))
        return ops.concatenate([first, y], 1)


def tokens():
    return keras.Input((TIME,), dtype="int32")


def types():
    x = tokens()
    return x, L.Embedding(64, WIDTH)(x) + L.Embedding(40, WIDTH, name="types")(x % 40)


def positions():
    x = tokens()
    return x, Positions()(L.Embedding(64, WIDTH)(x))


def many_words():
    x = tokens()
    return x, Both()(x)


def projected():
    x = tokens()
    return x, L.Dense(WIDTH)(L.Embedding(64, 2 * WIDTH)(x))


def by_heads():
    x = tokens()
    y = L.EinsumDense("btd,dnh->btnh", output_shape=(None, 8, 2), name="heads")
    return x, L.Reshape((TIME, WIDTH))(y(L.Embedding(64, 2 * WIDTH)(x)))


def patches():
    x = keras.Input((2, 2 * (TIME - 1), 3))
    return x, Patches()(x)


STARTS = [types, positions, many_words, projected, by_heads, patches]


def with_blocks(start, blocks):
    def build():
        x, y = start()
        for _ in range(blocks):
            y = Block(Attention(positions=None))(y)
        return keras.Model(x, L.Dense(3, name="head")(y))

    return compiled(build, "sgd")


def data(start):
    rng = np.random.default_rng(0)
    if start is patches:
        x = rng.normal(size=(2 * ROWS, 2, 2 * (TIME - 1), 3)).astype("float32")
    else:
        x = rng.integers(0, 64, (2 * ROWS, TIME)).astype("int32")
    return x, rng.normal(size=(2 * ROWS, TIME, 3)).astype("float32")


@pytest.mark.parametrize(
    "start", [STARTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in STARTS[1:])]
)
def test_a_block_sends_two_sums_forward_and_two_backward(start):
    x, y = data(start)
    found = []
    for blocks in (1, 2):
        strategy = ktd.TPUStrategy(BY_FOUR, Planner("tensor_parallel", min_size=128))
        model = built(with_blocks(start, blocks), strategy)
        found.append(sent(program(model, strategy, x[:8], y[:8]), BY_FOUR, "model"))
    found[1].subtract(found[0])
    assert +found[1] == {("all-reduce", "forward"): 2, ("all-reduce", "backward"): 2}
    assert not -found[1]


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_equal_to_one_device(start):
    x, y = data(start)

    def run(strategy):
        model = built(with_blocks(start, 1), strategy)
        return results(model, x, y, x[:5], evaluate=False, batch_size=ROWS, shuffle=False)

    expected = run(None)
    for mesh in ({"data": 4, "model": 2}, BY_FOUR, {"data": 2, "fsdp": 2, "model": 2}):
        plan = Planner("tensor_parallel", min_size=128)
        assert_close(run(ktd.TPUStrategy(mesh, plan)), expected)


def test_a_kernel_that_none_follows_leaves_its_features_in_parts():
    """Logits of a head, in a graph and in a model of its own."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.block = Block(Attention(positions=None))
            self.head = L.Dense(64, name="head")

        def call(self, x):
            return self.head(self.block(x))

    def graph():
        x = keras.Input((TIME, WIDTH))
        return keras.Model(x, L.Dense(64, name="head")(Block(Attention(positions=None))(x)))

    def own():
        model = Own()
        model(ops.zeros((2, TIME, WIDTH)))
        return model

    for build in (graph, own):
        strategy = ktd.TPUStrategy(BY_FOUR, Planner("tensor_parallel", min_size=128))
        rows = strategy.explain(built(build, strategy)).rows
        (head,) = [row for row in rows if row.path.endswith("head/kernel")]
        assert head.axes == (None, "model")
        assert "gathered" not in head.reason
