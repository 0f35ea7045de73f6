"""Heads of large vocabularies: what is computed in pieces equals one device, and is never whole."""

import logging
import random
import re
from unittest import mock

import jax
import keras
import numpy as np
import pytest
from comparing import gap
from conformance.precision import in_float64
from helpers import built
from keras import ops

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.head import pieces
from keras_tpu_dist.programs.head import step as steps

L = keras.layers
WIDTH, TIME = 16, 6
# Of about 40 words for a device's two rows.
PIECE_BYTES = 4 * 40 * 2 * TIME
# Relative to the largest value of each array. The head as a whole is up to 4.2e-7 from float64.
CLOSE = 1e-6
PLANS = {
    "data": ({"data": 8}, None),
    "fsdp": ({"data": 8}, ktd.Planner("fsdp", min_size=4)),
    "model": ({"data": 4, "model": 2}, ktd.Planner("tensor_parallel", min_size=4)),
    "left over": ({"data": 4, "model": 2}, None),
    "auto": ({"data": 2, "fsdp": 2, "model": 2}, ktd.Planner("auto", min_size=4)),
    "three": ({"data": 2, "fsdp": 2, "model": 2}, ktd.Planner("fsdp", min_size=4)),
    "both": ({"data": 4, "model": 2}, [("head/kernel", ("model", "data"))]),
    "words": ({"data": 4, "model": 2}, [("head/kernel", (None, ("data", "model")))]),
    "all words": ({"data": 1, "model": 8}, ktd.Planner("tensor_parallel", min_size=4)),
    "features": ({"data": 4, "model": 2}, [("head/kernel", ("model", None))]),
    "one": ({"data": 1}, None),
}


@pytest.fixture(autouse=True)
def _small_heads_too(monkeypatch):
    monkeypatch.setattr(steps, "LEAST_WORDS", 64)
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE_BYTES)


def cross_entropy(**options):
    """The usual loss, which computes in the dtype that is the default when it is built."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def hidden(words):
    ids = keras.Input((TIME,), dtype="int32")
    x = L.Embedding(words, WIDTH, name="words")(ids)
    return ids, L.Dense(WIDTH, activation="gelu")(x)


def dense(words):
    """Logits of a layer, with a bias and an accuracy."""
    ids, x = hidden(words)
    return keras.Model(ids, L.Dense(words, name="head")(x)), cross_entropy(), ["accuracy"]


class Tied(L.Layer):
    """Logits of the table that ids were looked up in, with a soft cap."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, x):
        logits = ops.matmul(x, ops.transpose(self.table.embeddings))
        return ops.tanh(logits / 3.0) * 3.0


def tied(words):
    """Shared weights, a soft cap, and a class that is not counted."""
    ids = keras.Input((TIME,), dtype="int32")
    table = L.Embedding(words, WIDTH, name="head")
    x = L.Dense(WIDTH, activation="gelu")(table(ids))
    return keras.Model(ids, Tied(table)(x)), cross_entropy(ignore_class=0), ["accuracy"]


def flat(words):
    """A loss of flat logits, with smoothed labels and the square of the normalizer."""
    ids, x = hidden(words)

    def loss(y, logits):
        logits = ops.reshape(logits, (-1, words))
        rows = ops.sparse_categorical_crossentropy(ops.reshape(y, (-1,)), logits, from_logits=True)
        normalizer = ops.logsumexp(logits, axis=-1)
        return ops.mean(rows + 0.01 * normalizer**2 - 0.1 * ops.mean(logits, axis=-1))

    return keras.Model(ids, L.Dense(words, use_bias=False, name="head")(x)), loss, []


def taken(words):
    """The logarithm of the label's probability, taken from all of them."""
    ids, x = hidden(words)

    def loss(y, logits):
        rows = ops.log_softmax(logits, axis=-1)
        return -ops.squeeze(ops.take_along_axis(rows, ops.cast(y, "int32")[..., None], -1), -1)

    head = L.EinsumDense("btd,dv->btv", (None, words), bias_axes="v", name="head")
    return keras.Model(ids, head(x)), loss, []


def probabilities(words):
    """A loss of probabilities, which takes five passes."""
    ids, x = hidden(words)
    model = keras.Model(ids, L.Dense(words, activation="softmax", name="head")(x))
    return model, "sparse_categorical_crossentropy", ["accuracy"]


class Distilled(L.Layer):
    """Adds the divergence from another head's probabilities."""

    def call(self, logits, teacher):
        teacher = ops.stop_gradient(ops.log_softmax(teacher, axis=-1))
        off = teacher - ops.log_softmax(logits, axis=-1)
        self.add_loss(0.5 * ops.mean(ops.sum(ops.exp(teacher) * off, axis=-1)))
        return logits


def distilled(words):
    """Two heads of which one is the other's teacher."""
    ids, x = hidden(words)
    teacher = L.Dense(words, name="teacher", trainable=False)(x)
    logits = Distilled()(L.Dense(words, name="head")(x), teacher)
    return keras.Model(ids, logits), cross_entropy(), []


def lora(words):
    """A head with an adapter."""
    ids, x = hidden(words)
    model = keras.Model(ids, L.Dense(words, name="head")(x))
    model.get_layer("head").enable_lora(2)
    return model, cross_entropy(), ["accuracy"]


def last(words):
    """Logits of the last token of each row alone."""
    ids, x = hidden(words)
    return keras.Model(ids, L.Dense(words, name="head")(x[:, -1])), cross_entropy(), ["accuracy"]


def banned(words):
    """Some words are banned by a constant of the program."""
    ids, x = hidden(words)
    mask = np.where(np.arange(words) % 7 == 3, -3.0, 0.0).astype("float32")
    logits = L.Lambda(lambda logits: logits + mask)(L.Dense(words, name="head")(x))
    return keras.Model(ids, logits), cross_entropy(), ["accuracy"]


MODELS = [dense, tied, flat, taken, probabilities, distilled, lora, last, banned]


def data(model, words, rows):
    numbers = np.random.default_rng(rows)
    x = numbers.integers(0, words, (rows, TIME)).astype("int32")
    y = numbers.integers(0, words, (rows, TIME)).astype("int32")
    weights = numbers.random((rows, TIME)).astype("float32") * (numbers.random((rows, TIME)) > 0.3)
    if model in (last, no_head):
        return x, y[:, -1], weights[:, -1]
    return x, y, None if model in (flat, sorted_words) else weights


def trained(model, words, rows, strategy, start=None, batch_size=13, optimizer=None, **options):
    """Trains for an epoch.

    Args:
        start: Weights to begin with, instead of those drawn.

    Returns:
        The model, the weights that it began with, and the losses, metrics, weights and slots.
    """

    def build():
        found, loss, metrics = model(words)
        # Slots begin as gradients. Adam would make updates of the rounding of those near zero.
        sgd = keras.optimizers.SGD(0.125, momentum=0.5, **(optimizer or {}))
        found.compile(sgd, loss, weighted_metrics=metrics, **options)
        return found

    found = built(build, strategy)
    if start is not None:
        found.set_weights(start)
    start = found.get_weights()
    x, y, weights = data(model, words, rows)
    given = {"batch_size": batch_size, "sample_weight": weights, "verbose": 0}
    results = found.fit(x, y, shuffle=False, **given).history
    evaluated = found.evaluate(x, y, return_dict=True, **given)
    results |= {f"evaluated {name}": number for name, number in evaluated.items()}
    results |= {v.path: v.numpy() for v in [*found.weights, *found.optimizer.variables]}
    return found, start, results


def check(model, words, plan, rows=29, head="pieces", strategy=None, **options):
    mesh, layout = PLANS[plan]
    if plan == "one":
        strategy = {**(strategy or {}), "devices": jax.devices()[:1]}
    strategy = ktd.TPUStrategy(mesh, layout, head=head, tables=None, **(strategy or {}))
    size = PIECE_BYTES // TIME if model is last else PIECE_BYTES
    with mock.patch.object(pieces, "PIECE_BYTES", size):
        found, start, own = trained(model, words, rows, strategy, **options)
    with in_float64():
        exact, _, expected = trained(model, words, rows, None, start, **options)
    assert exact.compute_dtype == "float64"
    gaps = {name: gap(own[name], expected[name], 1e-12) for name in expected}
    worst = max(gaps, key=gaps.__getitem__)
    print(model.__name__, plan, head, f"{gaps[worst]:.1e} {worst}", sep=" | ")
    assert gaps[worst] <= CLOSE, {name: off for name, off in gaps.items() if off > CLOSE}
    return found


CASES = [
    (dense, 104, "both"),
    (tied, 101, "three"),
    (flat, 104, "model"),
    (taken, 101, "fsdp"),
    (distilled, 104, "data"),
    (banned, 101, "three"),
]


@pytest.mark.parametrize(("model", "words", "plan"), CASES)
def test_training_equals_one_device(model, words, plan):
    found = check(model, words, plan, steps_per_execution=2)
    words_of = steps.described(found)
    assert any(path.startswith("head/") and "in pieces" in words_of[path] for path in words_of)


def drawn(seed):
    """A program drawn at random, its plan, and its options."""
    choose = random.Random(seed)
    model, plan = choose.choice(MODELS), choose.choice(list(PLANS))
    words = 104 if plan in ("both", "words") else choose.choice([101, 104, 128])
    optimizer = choose.choice([{}, {}, {"clipnorm": 0.1}, {"gradient_accumulation_steps": 2}])
    return {
        "model": model,
        "words": words,
        "plan": plan,
        "rows": choose.choice([5, 13, 29, 32]),
        "batch_size": choose.choice([1, 5, 8, 13]),
        "optimizer": optimizer,
        "steps_per_execution": choose.choice([1, 2, 3]),
        "strategy": {
            "shard_optimizer": choose.choice([False, False, True]),
            "donate_state": choose.choice([True, "auto"]),
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_drawn_heads_equal_one_device(seed):
    check(**drawn(seed))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_every_head_and_plan(model, plan):
    found = check(model, 104, plan, steps_per_execution=3)
    assert any("in pieces" in words for words in steps.described(found).values())


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_whole_head_is_as_far_from_float64(model):
    check(model, 104, "one", head="whole", steps_per_execution=3)


def test_accumulation_of_a_step_that_stays_whole():
    # The step was traced before, with the optimizer's update as one operation.
    options = {"optimizer": {"gradient_accumulation_steps": 2}, "steps_per_execution": 3}
    check(dense, 104, "data", rows=5, batch_size=1, **options)


def trained_with(head):
    strategy = ktd.TPUStrategy({"data": 8}, head=head)
    return trained(dense, 512, 16, strategy, batch_size=16)[0], strategy


def test_logits_are_never_whole(caplog):
    with caplog.at_level(logging.INFO, "keras_tpu_dist"):
        found, strategy = trained_with("pieces")
    words = "head in pieces: logits of 32 of 512 words at a time, computed 2 times"
    assert steps.described(found) == {"head/kernel": words}
    assert words in str(strategy.explain(found))
    assert words in caplog.text


def test_a_small_head_stays_whole():
    with mock.patch.object(pieces, "PIECE_BYTES", 2**20):
        found, _ = trained_with("pieces")
    words = steps.described(found)["head/kernel"]
    assert words == "head as a whole: its logits are no larger than a piece"


def test_a_large_head_is_in_pieces_by_itself(monkeypatch):
    monkeypatch.setattr(steps, "MOST_OF_ROOM", 0.0)
    found, _ = trained_with("auto")
    assert "in pieces" in steps.described(found)["head/kernel"]
    monkeypatch.setattr(steps, "MOST_OF_ROOM", 0.4)
    assert steps.described(trained_with("auto")[0]) == {}
    assert steps.described(trained_with("whole")[0]) == {}


def no_head(words):
    ids = keras.Input((TIME,), dtype="int32")
    x = L.Dense(words, activation="gelu")(L.Embedding(words, WIDTH)(ids))

    def loss(y, found):
        return ops.square(ops.cast(y % 2, "float32") - found[:, 0])

    return keras.Model(ids, L.Dense(1)(x[:, -1])), loss, []


def sorted_words(words):
    ids, x = hidden(words)

    def loss(y, logits):
        return cross_entropy()(y, logits) - 0.1 * ops.mean(ops.sort(logits, axis=-1)[..., -3:])

    return keras.Model(ids, L.Dense(words, name="head")(x)), loss, []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (no_head, "head as a whole: no layer computes logits of a vocabulary"),
        (sorted_words, "head as a whole: sort reads values of its whole vocabulary"),
    ],
)
def test_what_stays_whole_is_named(model, words, caplog):
    found = check(model, 104, "model")
    assert re.search(words, " ".join(steps.described(found).values()))
    assert [
        r for r in caplog.records if r.levelno == logging.WARNING and re.search(words, r.message)
    ]


def test_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match=r"head.*'piece'.*Did you mean 'pieces'"):
        ktd.TPUStrategy({"data": 8}, head="piece")
