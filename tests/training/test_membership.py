"""A model keeps its strategy; what was built elsewhere is moved, once, and said so."""

import contextlib
import logging
import weakref

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, mlp, results, sequential
from jax.sharding import NamedSharding

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist._keras import active
from keras_tpu_dist.common import once
from keras_tpu_dist.training import adoption, membership

X, Y = data()


def _run(model):
    return results(model, X, Y, batch_size=30, epochs=2)


@pytest.fixture
def expected():
    return _run(built(mlp, None))


def _on_mesh(model, strategy):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return all(
        isinstance(v.value.sharding, NamedSharding) and v.value.sharding.mesh == strategy.mesh
        for v in variables
    )


@pytest.mark.slow
def test_fit_outside_of_the_scope_keeps_the_strategy(expected):
    strategy = ktd.TPUStrategy()
    model = built(mlp, strategy)
    assert keras.distribution.distribution() is None
    assert_close(_run(model), expected)
    assert _on_mesh(model, strategy)
    assert keras.distribution.distribution() is None


@pytest.mark.slow
def test_set_distribution_is_enough(expected):
    strategy = ktd.TPUStrategy()
    keras.distribution.set_distribution(strategy)
    keras.utils.set_random_seed(1)
    model = mlp()
    assert_close(_run(model), expected)
    assert _on_mesh(model, strategy)
    assert keras.distribution.distribution() is strategy


def test_model_optimizer_and_metric_built_before_the_scope_are_moved_once(expected, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    model = built(mlp, None)
    model.optimizer.build(model.trainable_variables)
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        assert_close(_run(model), expected)
    assert _on_mesh(model, strategy)
    told = [r.getMessage() for r in caplog.records if "built outside of the scope" in r.message]
    assert len(told) == 1
    assert "onto the mesh {'data': 8}" in told[0]
    assert "build and compile inside strategy.scope()" in told[0]


@pytest.mark.slow
def test_a_model_that_trained_on_one_device_goes_on_under_a_strategy():
    def run(model):
        return results(model, X, Y, batch_size=30, epochs=2, shuffle=False)

    first = built(mlp, None)
    found = built(mlp, None)
    run(first)
    run(found)
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    with strategy.scope():
        second = run(found)
    assert_close(second, run(first))
    slots = [v for v in found.optimizer.variables if v.shape == (6, 16)]
    assert len(slots) == 2
    assert all("model" in v.value.sharding.spec for v in slots)


@pytest.mark.slow
def test_a_model_moves_to_the_strategy_it_is_called_under(expected, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    one, two = ktd.TPUStrategy(), ktd.TPUStrategy({"data": 4, "model": 2})
    model = built(mlp, one)
    model.predict(X[:8], verbose=0)
    with two.scope():
        assert_close(_run(model), expected)
    assert _on_mesh(model, two)
    assert "moves from <TPUStrategy mesh={'data': 8}" in caplog.text
    # From now on it is the second one's, inside or outside of a scope.
    model.evaluate(X[:8], Y[:8], verbose=0)
    assert _on_mesh(model, two)


@pytest.mark.slow
def test_model_compiled_in_another_scope_than_it_was_built_in(expected):
    one, two = ktd.TPUStrategy(), ktd.TPUStrategy({"data": 4, "model": 2})
    model = built(mlp, one)
    with two.scope():
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    assert_close(_run(model), expected)
    assert _on_mesh(model, two)


def test_another_distribution_is_refused_clearly():
    model = built(mlp, ktd.TPUStrategy())
    before = model.get_weights()
    with (
        keras.distribution.DataParallel().scope(),
        pytest.raises(
            ValueError,
            match=r"belongs to a TPUStrategy cannot run under another distribution.*"
            r"model='sequential'.*DataParallel.*inside its strategy.scope\(\)",
        ),
    ):
        model.fit(X, Y, verbose=0)
    assert_close(model.get_weights(), before, 0)


DOORS = {
    "scope": lambda strategy: strategy.scope(),
    "set_distribution": lambda strategy: contextlib.nullcontext(
        keras.distribution.set_distribution(strategy)
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("first", ["variable", "layer", "model"])
def test_clear_session_does_not_turn_distribution_off(expected, door, first, caplog):
    """Whatever is made first after it, and whichever way the strategy was made the active one."""
    strategy = ktd.TPUStrategy()
    with DOORS[door](strategy):
        keras.utils.clear_session(free_memory=first == "model")
        if first == "variable":
            assert _keras.variable_layout(keras.Variable(np.zeros(3))).mesh is strategy.mesh
        elif first == "layer":
            layer = keras.layers.Dense(3)
            layer.build((None, 6))
            assert _keras.variable_layout(layer.kernel).mesh is strategy.mesh
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        model = mlp()
        assert_close(_run(model), expected)
        assert keras.distribution.distribution() is strategy
    assert _on_mesh(model, strategy)
    (said,) = [record for record in caplog.records if "clear_session" in record.message]
    assert said.levelname == "WARNING"
    assert said.message == (
        f"keras.utils.clear_session() had turned distribution off: {strategy!r} is on again, as "
        "its scope() or set_distribution() says. To turn it off, leave the scope, or call "
        "keras.distribution.set_distribution(None)"
    )


def test_keras_may_turn_distribution_off_itself_when_it_clears(expected):
    """As in Keras 3.16, where `clear_session` calls `set_distribution(None)`."""
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        active._clear_session(lambda: keras.distribution.set_distribution(None))
        keras.utils.set_random_seed(1)
        model = mlp()
        assert_close(_run(model), expected)
        assert keras.distribution.distribution() is strategy
    assert _on_mesh(model, strategy)


def test_clear_session_outside_of_a_scope(expected):
    strategy = ktd.TPUStrategy()
    model = built(mlp, strategy)
    keras.utils.clear_session()
    assert keras.distribution.distribution() is None
    assert mlp().layers[0].kernel.value.devices() == {jax.devices()[0]}
    assert_close(_run(model), expected)
    assert _on_mesh(model, strategy)


def test_set_distribution_turns_a_strategy_off(caplog):
    """Also before or after a `clear_session`, and within a scope; another thread has its own."""
    strategy, stock = ktd.TPUStrategy(), keras.distribution.DataParallel()
    keras.distribution.set_distribution(strategy)
    keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    assert mlp().layers[0].kernel.value.devices() == {jax.devices()[0]}
    with strategy.scope():
        keras.distribution.set_distribution(None)
        assert keras.Variable(np.zeros(3)).value.devices() == {jax.devices()[0]}
    keras.distribution.set_distribution(strategy)
    keras.distribution.set_distribution(stock)
    keras.utils.clear_session(free_memory=False)
    assert keras.Variable(np.zeros(3)).value.devices() == {jax.devices()[0]}
    assert "clear_session" not in caplog.text


def test_a_scope_within_restores_what_clear_session_dropped():
    strategy, other = ktd.TPUStrategy(), ktd.TPUStrategy({"model": 8})
    keras.distribution.set_distribution(strategy)
    keras.utils.clear_session(free_memory=False)
    with other.scope():
        assert keras.distribution.distribution() is other
    assert keras.distribution.distribution() is strategy


def test_scopes_nest_and_restore_what_was_there():
    one, two = ktd.TPUStrategy(), ktd.TPUStrategy({"model": 8})
    stock = keras.distribution.DataParallel()
    with stock.scope():
        with one.scope() as entered, two.scope(), two.scope():
            assert entered is one
            assert keras.distribution.distribution() is two
        assert keras.distribution.distribution() is stock


def test_a_scope_is_left_after_an_exception():
    with pytest.raises(OSError, match="inside"), ktd.TPUStrategy().scope():
        raise OSError("inside")
    assert keras.distribution.distribution() is None
    assert _keras.active_strategy() is None


def test_one_scope_object_cannot_be_entered_twice():
    scope = ktd.TPUStrategy().scope()
    words = r"can be entered only once.*Write `with strategy.scope\(\):` every time"
    with scope, pytest.raises(RuntimeError, match=words):
        scope.__enter__()
    assert keras.distribution.distribution() is None
    with pytest.raises(RuntimeError, match=words), scope:
        pass


@pytest.mark.slow
def test_an_unbuilt_model_is_built_on_the_mesh():
    def build():
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    strategy = ktd.TPUStrategy()
    expected = _run(built(build, None))
    found = built(build, strategy)
    assert_close(_run(found), expected)
    assert _on_mesh(found, strategy)
    untouched = built(lambda: keras.Sequential([keras.layers.Dense(4)]), strategy)
    assert untouched.predict(X[:13], verbose=0).shape == (13, 4)


def test_loading_weights_keeps_them_on_the_mesh():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    model = built(mlp, strategy)
    other = built(mlp, None, seed=2)
    model.set_weights(other.get_weights())
    assert "model" in model.layers[0].kernel.value.sharding.spec
    assert_close(model.predict(X, verbose=0), other.predict(X, verbose=0))


@pytest.mark.slow
def test_cloned_models_and_submodels():
    strategy = ktd.TPUStrategy()
    model = built(mlp, strategy)
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "sparse_categorical_crossentropy")
    with strategy.scope():
        clone.fit(X, Y, batch_size=30, verbose=0)
        outer = sequential(6, model, keras.layers.Dense(2), loss="sparse_categorical_crossentropy")
    outer.fit(X, np.minimum(Y, 1), batch_size=30, verbose=0)
    assert _on_mesh(clone, strategy)
    assert _on_mesh(outer, strategy)


def test_new_variables_of_a_model_that_is_in_place_are_no_warning(caplog):
    """Compiled outside of the scope, or given a LoRA: nobody built the model elsewhere."""
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    model = built(mlp, ktd.TPUStrategy())
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    model.layers[0].enable_lora(2)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    said = [(r.levelname, r.getMessage()) for r in caplog.records if "variable(s)" in r.message]
    assert said
    assert {level for level, _ in said} == {"INFO"}
    assert all("new variable(s) of model" in text for _, text in said)


@pytest.mark.parametrize("layout", ["fsdp", "tensor_parallel"])
def test_a_variable_is_shown_where_it_will_lie(layout):
    strategy = ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2}, layout)
    with strategy.scope():
        model = sequential(64, *map(keras.layers.Dense, (64, 64)), optimizer="adam")
    before = [str(strategy.show(v)) for v in model.weights]
    model.predict(np.zeros((8, 64)), verbose=0)
    assert [str(strategy.show(v)) for v in model.weights] == before
    assert any("replicated" not in text for text in before)


@pytest.fixture
def warned(monkeypatch, caplog):
    """The warnings of a forgotten scope since the last call, of strategies of this test."""
    monkeypatch.setattr(logging.getLogger("keras_tpu_dist"), "filters", [])
    monkeypatch.setattr(membership, "_alive", weakref.WeakSet())

    def texts():
        records = [(r.levelname, r.message) for r in caplog.records if "no strategy" in r.message]
        caplog.clear()
        return records

    return texts


@pytest.mark.parametrize("run", ["fit", "train_on_batch", "predict"])
def test_a_forgotten_scope_is_one_warning(run, warned):
    def forgotten():
        model = keras.Sequential([keras.layers.Dense(3)], name="forgotten")
        model.compile("sgd", "mse")
        assert not warned()  # it may still run in the scope
        getattr(model, run)(*([np.ones((4, 3))] * (1 if run == "predict" else 2)))
        return warned()

    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    ((level, text),) = forgotten()
    assert level == "WARNING"
    assert text.startswith(
        f"model 'forgotten' runs under no strategy, without the devices of {strategy!r}: build"
    )
    assert "`with strategy.scope():`" in text
    assert not forgotten()
    once.forget()
    eval(text.partition("silence this by ")[2])  # the line that users are given
    assert not forgotten()


def test_what_is_no_forgotten_scope(warned):
    gone = weakref.ref(ktd.TPUStrategy())
    described = ktd.TPUStrategy(topology="v5e:2x4")
    one = ktd.TPUStrategy(devices=jax.devices()[:1])
    built(mlp, one).predict(X[:4], verbose=0)
    built(mlp, None).predict(X[:4], verbose=0)
    assert gone() is None
    strategy = ktd.TPUStrategy()
    built(mlp, strategy).predict(X[:4], verbose=0)
    with keras.distribution.DataParallel(devices=jax.devices()[:2]).scope():
        mlp().predict(X[:4], verbose=0)
    assert not warned()
    del described


def test_explain_says_whether_the_strategy_trains_the_model():
    strategy, other = ktd.TPUStrategy({"data": 4, "model": 2}), ktd.TPUStrategy()
    words = "this strategy does not train the model"
    model = built(mlp, None)
    assert f"{words}, which belongs to none: build and compile it, or run it" in str(
        strategy.explain(model)
    )
    with strategy.scope():
        assert words not in str(strategy.explain(model))
        model.predict(X[:4], verbose=0)
    assert words not in str(strategy.explain(model))
    part = keras.Sequential(model.layers[:1])
    assert words not in str(strategy.explain(part))
    assert f"{words}: it belongs to {strategy!r}" in " ".join(str(other.explain(model)).split())


def test_many_equal_arrays_are_moved_by_one_program(monkeypatch):
    def build():
        inputs = x = keras.Input((4,))
        for _ in range(24):
            x = keras.layers.Dense(4)(x)
        return keras.Model(inputs, x)

    monkeypatch.setattr("keras_tpu_dist._keras.moving._FEWEST_FOR_A_PROGRAM", 64)
    strategy = ktd.TPUStrategy({"data": 2, "model": 4}, "tensor_parallel")
    with strategy.scope():
        model = build()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        rng = np.random.default_rng(0)
        variables = [*model.variables, *model.optimizer.variables]
        values = [rng.normal(size=v.shape).astype(v.dtype) for v in variables]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        adoption.adopt(model, strategy)
    kernels = [v for v in variables if len(v.shape) == 2]
    assert len(kernels) == 3 * 24
    assert not any(v.value.is_fully_replicated for v in kernels)
    for variable, value in zip(variables, values, strict=True):
        assert _keras.variable_layout(variable) == variable.value.sharding
        np.testing.assert_array_equal(variable.value, value)
