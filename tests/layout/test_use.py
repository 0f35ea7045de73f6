"""Vocabularies that do not divide: stored by width, used by words."""

import re

import jax
import keras
import numpy as np
import pytest
from decoders import TIME, VOCABULARIES, WORDS
from helpers import assert_close, built, stepped
from programs import collectives, program

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras

MESHES = [{"data": 4, "model": 2}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2}]
slow = pytest.mark.slow
X, Y = np.random.default_rng(0).integers(0, WORDS, (2, 26, TIME)).astype("int32")


def compiled(name, optimizer="sgd", **options):
    def build():
        model = VOCABULARIES[name]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], **options)
        return model

    return build


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=slow) for n in ("untied", "headed", "tied")] + ["gpt"]
)
def test_logits_stay_split_and_the_table_is_sent_twice(name):
    plan = ktd.Planner("tensor_parallel", min_size=1024)
    strategy = ktd.TPUStrategy({"data": 2, "model": 4}, plan)
    # Its slots are not sent.
    model = built(compiled(name, "adam"), strategy)
    (row,) = [r for r in strategy.explain(model).rows if "used by" in r.reason]
    assert f"padded: {WORDS} is not divisible by 4" in row.reason
    text = program(model, strategy, X[:8], Y[:8])
    padded = -(-WORDS // 4) * 4
    kinds = "all-reduce|all-gather|reduce-scatter"
    assert not re.findall(rf"= [^=]*,({WORDS}|{padded}|{padded // 4})\][^=]* ({kinds})", text)
    # From the width to the words, and the gradient back: an update needs neither.
    assert len(collectives(text, "all-to-all")) == 2
    assert not collectives(text, "collective-permute")


def results(model, **options):
    history = model.fit(X, Y, batch_size=13, epochs=2, shuffle=False, verbose=0, **options).history
    metrics = model.evaluate(X[:7], Y[:7], verbose=0)
    return [history["loss"], metrics, model.predict(X[:5], verbose=0), model.get_weights()]


@slow
@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equal_to_one_device(name, mesh):
    make = compiled(name, steps_per_execution=3)
    expected = results(built(make, None))
    for kind in ("tensor_parallel", "auto"):
        strategy = ktd.TPUStrategy(mesh, ktd.Planner(kind, min_size=1024))
        assert_close(results(built(make, strategy)), expected)


@slow
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "eager"])
def test_updates_are_made_where_the_table_lies(optimizer):
    options = {"run_eagerly": True} if optimizer == "eager" else {}
    make = compiled("gpt", "sgd" if options else optimizer, **options)

    def run(strategy):
        model = built(make, strategy)
        return [model.train_on_batch(X[:13], Y[:13])[0], model.get_weights()]

    assert_close(run(ktd.TPUStrategy(MESHES[0], "tensor_parallel")), run(None))


@slow
def test_in_strategy_run_and_on_one_logical_device():
    def run(strategy, assigned=False):
        make = compiled("tied")

        def build():
            model = make()
            if assigned:
                ktd.assign(model.get_layer("token"), 1)
            return model

        return built(build, strategy)

    strategy = ktd.TPUStrategy(MESHES[0], "tensor_parallel")
    model = run(strategy)
    assert_close(
        run(strategy, assigned=True).predict(X[:9], verbose=0), model.predict(X[:9], verbose=0)
    )

    def step(x, y):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        stepped(model, model.optimizer, x, lambda logits: loss(y, logits))

    for batch in strategy.distribute_dataset((X[:24], Y[:24]), batch_size=12):
        strategy.run(step, args=batch)
    alone = run(None)
    alone.fit(X[:24], Y[:24], batch_size=12, shuffle=False, verbose=0)
    assert_close(model.get_weights(), alone.get_weights())


@pytest.mark.parametrize("within", ["scan", pytest.param("checkpoint", marks=slow)])
def test_a_table_that_is_first_read_within_another_program(within):
    """What is computed within it must not be there outside of it."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.token = keras.layers.Embedding(WORDS, 16)
            self.dense = keras.layers.Dense(16)

        def call(self, x):
            def looked_up(ids):
                return keras.ops.take(self.token.embeddings, ids, axis=0)

            if within == "scan":
                y = jax.lax.scan(lambda carry, ids: (carry, looked_up(ids)), 0.0, x.T)[1]
                y = keras.ops.transpose(y, (1, 0, 2))
            else:
                y = jax.checkpoint(looked_up)(x)
            return keras.ops.matmul(self.dense(y), keras.ops.transpose(self.token.embeddings))

    def build():
        model = Model()
        model.token.build((None, TIME))
        model(X[:2])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    def run(strategy):
        model = built(build, strategy)
        if strategy is not None:
            assert "used by vocabulary" in str(strategy.explain(model))
        return [model.train_on_batch(X[:13], Y[:13]), model.get_weights()]

    assert_close(run(ktd.TPUStrategy(MESHES[0], "tensor_parallel")), run(None))


def test_a_variable_without_a_layout_is_read():
    """As that of a copy, which no strategy has placed yet."""
    strategy = ktd.TPUStrategy(MESHES[0])
    with strategy.scope():
        variable = keras.Variable(np.ones((WORDS, 4), "float32"))
        _keras.set_use(variable, ("model", None))
        variable._layout = None
        assert variable.value.shape == (WORDS, 4)


def test_a_variable_knows_what_an_update_is():
    seen = []

    class Noting(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(_keras.in_update())
            super().update_step(gradient, variable, learning_rate)

    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(Noting(0.1), "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    assert set(seen) == {True}
    assert not _keras.in_update()
