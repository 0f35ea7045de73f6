"""NameNaN: the first step that is not finite, by name, and the weights before it."""

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, data, mlp, sequential

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks import NameNaN

X, Y = data(4 * 14 + 3)  # 15 batches, the last one ragged


def _build(n=8, optimizer="adam"):
    def build():
        return compiled(mlp(), optimizer, "sparse_categorical_crossentropy", steps_per_execution=n)

    return build


def _fit(model, x=X, callbacks=(), epochs=1, **options):
    options = {"batch_size": 4, "shuffle": False, "verbose": 0} | options
    return model.fit(x, Y[: len(x)], epochs=epochs, callbacks=list(callbacks), **options)


def _poisoned(step):
    x = X.copy()
    x[4 * (step - 1) + 1, 2] = np.nan
    return x


def _state(model):
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


@pytest.fixture(scope="module")
def after():
    """The state after each number of steps of an undisturbed run."""
    model = built(_build(1), None)
    model.optimizer.build(model.trainable_variables)
    states = [_state(model)]
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: note_state())
    note_state = lambda: states.append(_state(note.model))  # noqa: E731
    _fit(model, callbacks=[note])
    return states


@pytest.fixture(scope="module")
def models():
    """One model for each way of launching, given its first weights back for each case."""
    made = {}

    def model_for(n, donate):
        if (n, donate) not in made:
            strategy = ktd.TPUStrategy({"data": 4, "model": 2}, donate_state=donate)
            model = built(_build(n), strategy)
            made[n, donate] = model, model.get_weights()
        model, weights = made[n, donate]
        model.set_weights(weights)
        for variable in model.optimizer.variables[2:]:
            variable.assign(variable.numpy() * 0)
        model.optimizer.iterations.assign(0)
        return model

    return model_for


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "donate", "step"),
    [
        *((8, True, step) for step in (1, 6, 8, 9, 15)),
        *((4, False, step) for step in (1, 6, 12, 15)),
        *((1, True, 1), (1, True, 6), (1, False, 15)),
    ],
)
def test_the_exact_step_and_the_weights_before_it(models, after, n, donate, step):
    model, name = models(n, donate), NameNaN()
    with pytest.raises(FloatingPointError, match=rf"at step {step} of this fit.*batch.*in x") as at:
        _fit(model, _poisoned(step), [name])
    assert_close(_state(model), after[step - 1])
    found = name.found
    assert found.step == step
    first, last = found.launch
    assert first <= step <= last
    assert last - first + 1 in (1, n)
    assert list(found.losses) == ["loss"]
    assert np.isnan(found.losses["loss"])
    assert len(found.variables) >= 4
    assert found.inputs == ("x",)
    assert f"after {step - 1} steps of this fit. Clean the input" in str(at.value)
    assert found.to_dict()["step"] == step


@pytest.mark.slow
def test_a_finite_run_is_left_alone(models):
    model, name = models(8, True), NameNaN()
    history = _fit(model, callbacks=[name], epochs=2).history
    expected = built(_build(1), None)
    assert_close(history, _fit(expected, epochs=2).history)
    assert_close(_state(model), _state(expected))
    assert name.found is None


@pytest.mark.slow
def test_stop_instead_of_an_error(models, after, caplog):
    model, name = models(4, False), NameNaN(stop=True)
    _fit(model, _poisoned(6), [name], epochs=3)
    assert name.found.step == 6
    assert "at step 6 of this fit" in caplog.text
    assert_close(_state(model), after[5])
    # A second fit begins anew, finite or not.
    _fit(model, X, [name])
    assert name.found is None
    assert np.isfinite(model.get_weights()[0]).all()
    _fit(model, _poisoned(2), [name])
    assert name.found.step == 2
    assert name.found.iterations == 5 + 15
    assert "begun after 20 optimizer steps" in str(name.found)


class Overflow(keras.layers.Layer):
    """Finite at first, with a gradient that is infinite from the start: sqrt at 0."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="zeros", name="scale")
        self.mask = self.add_weight(
            shape=(2,), initializer=lambda *a, **k: np.full(2, -np.inf), trainable=False, name="m"
        )

    def call(self, x):
        return x + keras.ops.sqrt(self.scale)


def test_a_variable_is_named_when_the_loss_is_still_finite():
    def build():
        return sequential(6, Overflow(name="odd"), keras.layers.Dense(1), steps_per_execution=4)

    model, name = built(build, ktd.TPUStrategy()), NameNaN()
    before = model.trainable_variables[0].numpy()
    with pytest.raises(FloatingPointError, match=r"at step 1 .*infinity in .*odd/scale.*clipnorm"):
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[name])
    # The mask was infinite before training, and the rest of the step was fine.
    assert name.found.variables == ("sequential/odd/scale",)
    assert name.found.losses == {}
    assert name.found.inputs == ()
    assert_close(model.trainable_variables[0].numpy(), before, 0)


def test_a_custom_train_step_and_its_losses():
    class Two(keras.Sequential):
        def train_step(self, state, batch):
            logs, state = super().train_step(state, batch)
            x = batch[0]
            return {
                "g_loss": logs["loss"] * 0,
                "d_loss": x.sum(),
                "ratio": 1 / (0 * x.sum()),
            }, state

    def build():
        model = Two([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
        return model

    huge = X.copy()
    huge[21] = 3e38
    model, name = built(build, ktd.TPUStrategy()), NameNaN()
    with pytest.raises(FloatingPointError, match=r"at step 6 .*d_loss became inf"):
        _fit(model, huge, [name])
    assert list(name.found.losses) == ["g_loss", "d_loss"] or "d_loss" in name.found.losses
    assert "ratio" not in name.found.losses


def test_run_eagerly():
    def build():
        return sequential(6, keras.layers.Dense(1), run_eagerly=True)

    model, name = built(build, ktd.TPUStrategy()), NameNaN()
    before = model.get_weights()
    with pytest.raises(FloatingPointError, match="at step 1 of"):
        _fit(model, _poisoned(1)[:4], [name])
    assert_close(model.get_weights(), before, 0)


@pytest.mark.slow
def test_the_checkpoint_of_the_epoch_is_finite(models, after, tmp_path):
    path = tmp_path / "at.weights.h5"
    model = models(8, True)
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    # Raising could come before the end of the epoch, and with it before the checkpoint.
    _fit(model, _poisoned(15), [save, NameNaN(stop=True)])
    model.load_weights(path)
    assert_close(_state(model), after[14])


def test_weights_that_are_not_finite_before_training(models):
    model = models(8, True)
    model.layers[0].bias.assign(np.full(16, np.inf, "float32"))
    with pytest.raises(ValueError, match=r"begin with finite weights.*hidden/bias"):
        _fit(model, callbacks=[NameNaN()])


def test_together_with_stop_at_step(models, after):
    model = models(8, True)
    _fit(model, callbacks=[NameNaN(), ktd.callbacks.StopAtStep(11)])
    assert_close(_state(model), after[11])


def test_stock_keras_is_told_of_its_own():
    with pytest.raises(ValueError, match="TerminateOnNaN"):
        _fit(built(_build(1), None), callbacks=[NameNaN()])
