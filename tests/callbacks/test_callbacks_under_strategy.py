"""Keras's own callbacks and saving work under a strategy, onto other meshes too."""

import keras
import numpy as np
import pytest
from helpers import At, Stop, assert_close, built, data, in_launches, mlp
from jax.sharding import PartitionSpec

import keras_tpu_dist as ktd

X, Y = data(40)
RULES = [("hidden/kernel", (None, "model"))]


def _strategy(data=4, model=2):
    return ktd.TPUStrategy({"data": data, "model": model}, RULES)


def _fit(model, callbacks, epochs=4, **options):
    return model.fit(
        X,
        Y,
        batch_size=12,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(X[:13], Y[:13]),
        callbacks=callbacks,
        **options,
    )


def _both(callbacks):
    """History and weights of one device and of the mesh, each with its own callbacks."""
    found = []
    for strategy in (None, _strategy()):
        model = built(mlp, strategy)
        history = _fit(model, callbacks(), epochs=6).history
        found.append([history, model.get_weights()])
    assert_close(found[1], found[0])
    return found[1]


@pytest.mark.slow
def test_early_stopping_restores_the_best_weights():
    history, _ = _both(
        lambda: [
            keras.callbacks.EarlyStopping(
                "val_loss", patience=1, min_delta=0.5, restore_best_weights=True
            )
        ]
    )
    assert len(history["loss"]) == 2


@pytest.mark.slow
def test_learning_rates():
    schedule = lambda epoch, lr: 0.01 / (epoch + 1)  # noqa: E731
    history, _ = _both(lambda: [keras.callbacks.LearningRateScheduler(schedule)])
    assert_close(history["learning_rate"][-1], 0.01 / 6, 1e-8)
    history, _ = _both(
        lambda: [keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.5)]
    )
    assert history["learning_rate"][-1] < history["learning_rate"][0]


def test_terminate_on_nan():
    poisoned = X.copy()
    poisoned[20] = np.nan
    for strategy in (None, _strategy()):
        model = built(mlp, strategy)
        steps = []
        counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: steps.append(b))
        history = model.fit(
            poisoned,
            Y,
            batch_size=8,
            shuffle=False,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN(), counter],
        )
        assert steps == [0, 1, 2]
        assert not np.isfinite(history.history["loss"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best.keras", "best.weights.h5"])
def test_model_checkpoint_and_loading_onto_another_mesh(tmp_path, name):
    path = tmp_path / name
    weights_only = name.endswith(".weights.h5")
    model = built(mlp, _strategy())
    _fit(
        model,
        [keras.callbacks.ModelCheckpoint(path, save_weights_only=weights_only)],
    )
    other = _strategy(2, 4)
    with other.scope():
        if weights_only:
            loaded = mlp()
            loaded.optimizer.build(loaded.trainable_variables)
            loaded.load_weights(path)
        else:
            loaded = keras.models.load_model(path)
    kernel = loaded.get_layer("hidden").kernel
    assert kernel.value.sharding.mesh == other.mesh
    assert kernel.value.sharding.spec == PartitionSpec(None, "model")
    assert_close(loaded.get_weights(), model.get_weights(), 0)
    if not weights_only:
        assert_close(
            [v.numpy() for v in loaded.optimizer.variables],
            [v.numpy() for v in model.optimizer.variables],
            0,
        )
        _fit(model, [])
        _fit(loaded, [])
        assert_close(loaded.get_weights(), model.get_weights())
    alone = mlp() if weights_only else keras.models.load_model(path)
    if weights_only:
        alone.optimizer.build(alone.trainable_variables)
        alone.load_weights(path)
        assert_close(alone.predict(X, verbose=0), loaded.predict(X, verbose=0))


@pytest.mark.parametrize(
    ("save_freq", "steps"),
    [
        ("epoch", 1),
        pytest.param("epoch", 2, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(2, 4, marks=pytest.mark.slow),
    ],
)
def test_backup_and_restore_of_keras_does_what_it_does_without_a_strategy(
    save_freq, steps, tmp_path
):
    found = []
    for folder, strategies in (("stock", (None, None)), ("mesh", (_strategy(), _strategy(8, 1)))):
        backup = [keras.callbacks.BackupAndRestore(tmp_path / folder, save_freq) for _ in "12"]
        model = built(in_launches(steps), strategies[0])
        with pytest.raises(Stop):
            _fit(model, [backup[0], At(3, method="on_epoch_begin")])
        resumed = built(in_launches(steps), strategies[1], seed=7)
        history = _fit(resumed, [backup[1]])
        found.append([history.epoch, history.history, resumed.get_weights()])
        assert not (tmp_path / folder).exists()
    assert_close(found[1], found[0])
    if save_freq == "epoch":
        assert found[1][0] == [2, 3]
        whole = built(in_launches(steps), None)
        _fit(whole, [])
        assert_close(found[1][2], whole.get_weights())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Orbax warns of its own interfaces as Keras uses them.
def test_orbax_checkpoint_onto_another_mesh(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    model = built(mlp, _strategy())
    _fit(model, [keras.callbacks.OrbaxCheckpoint(tmp_path / "ckpt", save_freq="epoch")], epochs=1)
    other = _strategy(2, 4)
    loaded = built(mlp, other, seed=5)
    with other.scope():
        loaded.load_weights(tmp_path / "ckpt")
    assert_close(loaded.get_weights(), model.get_weights(), 0)
    assert loaded.get_layer("hidden").kernel.value.sharding.mesh == other.mesh


@pytest.mark.slow
def test_a_callback_that_reads_and_changes_weights_every_step():
    class Decay(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.set_weights([0.9 * w for w in self.model.get_weights()])

    _both(lambda: [Decay()])


@pytest.mark.slow
def test_a_callback_that_evaluates_within_the_epoch():
    class Peek(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.evaluate(X[:7], Y[:7], verbose=0)
                self.model.predict(X[:7], verbose=0)

    _both(lambda: [Peek()])


def test_stop_training_within_an_epoch():
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    history, _ = _both(lambda: [Stops()])
    assert len(history["loss"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
def test_a_model_called_by_its_own_name_within_an_epoch_is_up_to_date(donate):
    strategy = ktd.TPUStrategy(donate_state=donate)
    model = built(mlp, strategy)
    seen = []

    def look(batch, logs):
        # Not through `callback.model`, which would make Keras sync.
        seen.append(model.get_weights())
        if batch == 1:
            seen.append(model.predict(X[:5], verbose=0))
            model.evaluate(X[:5], Y[:5], verbose=0)

    history = _fit(model, [keras.callbacks.LambdaCallback(on_train_batch_end=look)], epochs=1)
    expected = built(mlp, None)
    weights = []
    for start in range(0, 40, 12):
        expected.fit(X[start : start + 12], Y[start : start + 12], 12, shuffle=False, verbose=0)
        weights.append(expected.get_weights())
        if start == 12:
            weights.append(expected.predict(X[:5], verbose=0))
    assert_close(seen, weights)
    assert_close(model.get_weights(), weights[-1])
    assert len(history.history["loss"]) == 1


def test_a_list_of_callbacks_is_made_by_keyword():
    ktd.TPUStrategy({"data": 8})
    callback = keras.callbacks.Callback()
    assert keras.callbacks.CallbackList(callbacks=[callback]).callbacks == [callback]
