"""Vocabularies of random sizes: each plan equals one device, and lint states what is sent.

Sizes are drawn, the same in each run: primes, even ones that four does not divide, and those that
eight divides; few words, and more than a table has that is sent whole.
"""

import functools
import itertools
import random

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import Planner

L = keras.layers
WIDTH, TIME, ROWS = 16, 8, 13


def is_prime(n):
    return all(n % k for k in range(2, int(n**0.5) + 1))


KINDS = {
    "prime": is_prime,
    "even": lambda n: n % 4 == 2,
    "dividing": lambda n: n % 8 == 0,
}
RANGES = (64, 400), (4097, 4600)
FORMS = ("tied", "untied", "headed")
PLANS = [
    ("fsdp", {"data": 8}),
    ("fsdp", {"data": 2, "fsdp": 4}),
    ("tensor_parallel", {"data": 2, "model": 4}),
    ("auto", {"data": 4, "model": 2}),
    ("auto", {"data": 2, "fsdp": 2, "model": 2}),
]


def drawn(kind, rng):
    first, last = rng.choice(RANGES)
    return rng.choice([n for n in range(first, last) if KINDS[kind](n)])


def cases(*others, fast):
    """Each kind, form and choice of the others with a drawn size; the first few are fast."""
    rng = random.Random(37)
    every = [
        (form, drawn(kind, rng), *rest)
        for kind, form, *rest in itertools.product(KINDS, FORMS, *others)
    ]
    rng.shuffle(every)
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if n < fast else pytest.mark.slow)
        for n, case in enumerate(every)
    ]


def model_of(form, words, loss):
    def build():
        tokens = keras.Input((TIME,), dtype="int32")
        if form == "headed":
            first, last = L.Embedding(words, WIDTH, name="token"), L.Dense(words, name="head")
        else:
            first = L.ReversibleEmbedding(words, WIDTH, tie_weights=form == "tied", name="token")
            last = functools.partial(first, reverse=True)
        x = first(tokens)
        y = L.Dense(4 * WIDTH, activation="gelu", name="up")(L.LayerNormalization()(x))
        return compiled(keras.Model(tokens, last(x + L.Dense(WIDTH, name="down")(y))), "sgd", loss)

    return build


def strategy_of(kind, mesh):
    return ktd.TPUStrategy(mesh, Planner(kind, min_size=64, memory_bytes=1))


@functools.cache
def trained(form, words, plan=None):
    """Loss, predictions and weights after two steps of rows that do not divide."""
    strategy = None if plan is None else strategy_of(*PLANS[plan])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = built(model_of(form, words, loss), strategy)
    rng = np.random.default_rng(words)
    x, y = rng.integers(0, words, (2, 2, ROWS, TIME))
    losses = [model.train_on_batch(*batch) for batch in zip(x, y, strict=True)]
    return [losses, model.predict(x[0][:5], verbose=0), model.get_weights()]


@pytest.mark.parametrize(("form", "words", "plan"), cases(range(len(PLANS)), fast=2))
def test_equal_to_one_device(form, words, plan):
    assert_close(trained(form, words, plan), trained(form, words))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_lora_beside_vocabularies_equals_one_device(form):
    def build():
        model = model_of(form, 203, keras.losses.SparseCategoricalCrossentropy(from_logits=True))()
        name = "head" if form == "headed" else "token"
        model.get_layer(name).enable_lora(2, b_initializer="glorot_uniform")
        return compiled(model, "sgd", model.loss)

    x, y = np.random.default_rng(0).integers(0, 203, (2, ROWS, TIME))
    found = []
    for strategy in (None, strategy_of("tensor_parallel", {"data": 2, "model": 4})):
        model = built(build, strategy)
        found.append([[model.train_on_batch(x, y) for _ in range(2)], model.get_weights()])
    assert_close(*found)
