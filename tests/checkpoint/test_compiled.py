"""A run that is continued with an optimizer that was compiled differently."""

import logging

import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd

X = np.random.default_rng(0).normal(size=(13, 6)).astype("float32")
Y = X[:, :2]
ADAM = keras.optimizers.Adam


class Halves(keras.callbacks.Callback):
    """Halves the rate after each epoch, as `ReduceLROnPlateau` may."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2


def fit(folder, optimizer, epochs, *callbacks, by=None):
    """A fit of a new process, as it were; `by` loads before it, instead of the callback."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy({"data": 4, "model": 2}).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(optimizer, "mse")
    if by is not None:
        by(model, folder)
        return model
    saved = ktd.callbacks.Checkpoint(folder)
    model.fit(X, Y, 4, epochs, verbose=0, callbacks=[saved, *callbacks])
    return model


def rate(model):
    return float(model.optimizer.learning_rate)


@pytest.mark.parametrize("by", [pytest.param(None, marks=pytest.mark.slow), ktd.restore])
@pytest.mark.parametrize(
    ("then", "expected", "said"),
    [(1e-2, 5e-3, False), (1e-4, 1e-4, True)],
)
def test_a_rate_that_was_compiled_is_wanted_and_one_that_was_set_is_state(
    by, then, expected, said, tmp_path, caplog
):
    fit(tmp_path, ADAM(1e-2), 1, Halves())
    with caplog.at_level(logging.WARNING):
        model = fit(tmp_path, ADAM(then), 2, by=by)
    assert rate(model) == pytest.approx(expected)
    words = "with the learning rate 0.0001, as you compiled it: the run began with 0.01, and had"
    assert (words in caplog.text) == said
    if by is None:
        # The wish holds for later runs too, and is said once.
        caplog.clear()
        assert rate(fit(tmp_path, ADAM(then), 3)) == pytest.approx(expected)
        assert "as you compiled it" not in caplog.text


@pytest.mark.parametrize(("then", "expected"), [(1e-2, 5e-3), (1e-4, 1e-4)])
def test_loops_of_ones_own_too(then, expected, tmp_path, caplog):
    def made(rate):
        keras.utils.clear_session(free_memory=False)
        with ktd.TPUStrategy({"data": 4, "model": 2}).scope():
            model, optimizer = (
                keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]),
                ADAM(rate),
            )
            optimizer.build(model.trainable_variables)
        return optimizer, model, ktd.LoopCheckpoint(tmp_path, model, optimizer)

    optimizer, model, saved = made(1e-2)
    with saved:
        gradients = [np.ones(v.shape, "float32") for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        optimizer.learning_rate = 5e-3
        saved.save(1)
    optimizer, _, saved = made(then)
    with saved:
        saved.restore()
    assert float(optimizer.learning_rate) == pytest.approx(expected)
    assert ("as you compiled it" in caplog.text) == (then == 1e-4)


@pytest.mark.slow
def test_callbacks_and_schedules_of_rates_go_on(tmp_path, caplog):
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    fit(tmp_path / "a", ADAM(1e-2), 1, scheduler)
    assert rate(fit(tmp_path / "a", ADAM(1e-2), 2, scheduler)) == pytest.approx(0.05)
    decay = keras.optimizers.schedules.ExponentialDecay
    fit(tmp_path / "b", ADAM(decay(1e-2, 4, 0.5)), 1)
    model = fit(tmp_path / "b", ADAM(decay(1e-2, 4, 0.5)), 2)
    assert int(model.optimizer.iterations) == 8
    assert "as you compiled it" not in caplog.text


@pytest.mark.slow
def test_the_same_process_goes_on_with_the_saved_rate(tmp_path, caplog):
    model = fit(tmp_path, ADAM(1e-2), 1, Halves())
    model.optimizer.learning_rate = 0.3
    saved = ktd.callbacks.Checkpoint(tmp_path)
    model.fit(X, Y, 4, 2, verbose=0, callbacks=[saved])
    assert rate(model) == pytest.approx(5e-3)
    assert rate(fit(tmp_path, ADAM(1e-2), 3)) == pytest.approx(5e-3)
    assert "as you compiled it" not in caplog.text


@pytest.mark.parametrize("steps", [2, None])
def test_sums_of_another_accumulation_are_left_out(steps, tmp_path, caplog):
    # 8 steps in two epochs of 4: two updates of 3 steps, and the sums of two.
    fit(tmp_path, ADAM(1e-2, gradient_accumulation_steps=3), 2)
    with caplog.at_level(logging.WARNING):
        optimizer = ADAM(1e-2, gradient_accumulation_steps=steps)
        model = fit(tmp_path, optimizer, 2, by=ktd.restore)
    assert int(model.optimizer.iterations) == 2
    sums = [v for v in model.optimizer.variables if "accum" in v.path]
    assert bool(sums) == (steps == 2)
    assert all((np.asarray(v) == 0).all() for v in sums)
    assert f"gradients of {steps or 1} steps are accumulated now, of 3 when" in caplog.text
    assert "the sums of 2 steps are left out" in caplog.text


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: ADAM(1e-2, amsgrad=True), id="amsgrad"),
        pytest.param(lambda: keras.optimizers.AdamW(1e-2), id="AdamW"),
        pytest.param(lambda: ADAM(1e-2, use_ema=True), id="ema"),
    ],
)
def test_moments_that_fit_are_loaded(other, tmp_path, caplog):
    first = fit(tmp_path, ADAM(1e-2), 1)
    with caplog.at_level(logging.WARNING):
        model = fit(tmp_path, other(), 1, by=ktd.restore)
    here = {v.path.partition("/")[2]: np.asarray(v) for v in model.optimizer.variables}
    for variable in first.optimizer.variables:
        name = variable.path.partition("/")[2]
        np.testing.assert_allclose(here[name], np.asarray(variable), rtol=1e-6, err_msg=name)
    for name, value in here.items():
        if "average" in name:
            weight = model.layers[0].kernel if "kernel" in name else model.layers[0].bias
            np.testing.assert_allclose(value, np.asarray(weight), rtol=1e-6)
    assert caplog.text.count("the optimizer differs from the saved one") == 1


def test_moments_of_another_meaning_are_not(tmp_path, caplog):
    fit(tmp_path, ADAM(1e-2), 1)
    model = fit(tmp_path, keras.optimizers.SGD(1e-2, 0.9), 1, by=ktd.restore)
    assert int(model.optimizer.iterations) == 0
    assert "Adam saved it, and it does not fit" in caplog.text
