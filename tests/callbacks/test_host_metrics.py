"""HostMetrics: plain Python metrics of the whole evaluation set, where other callbacks see them."""

import csv

import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, in_launches, sequential
from pydatasets import in_batches
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks import HostMetrics

X, Y = data(40)
VX, VY = data(21, seed=3)  # ragged for every batch size used here
WEIGHTS = np.linspace(0.1, 2, 21)


def _f1(y_true, y_pred, sample_weight=None):
    return f1_score(y_true, y_pred.argmax(-1), average="macro", sample_weight=sample_weight)


def _auc(y_true, y_pred, sample_weight=None):
    return roc_auc_score(y_true, y_pred, multi_class="ovr")


@pytest.fixture(scope="module")
def model():
    return built(in_launches(3), ktd.TPUStrategy({"data": 4, "model": 2}))


def _fit(model, *callbacks, epochs=2, **options):
    options = {"batch_size": 8, "shuffle": False, "verbose": 0} | options
    return model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options).history


def _batches(size=4):
    for start in range(0, 21, size):
        yield VX[start : start + size], VY[start : start + size]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stock", "strategy"])
def test_the_whole_set_at_the_end_of_each_epoch(model, where):
    if where == "stock":
        model = built(in_launches(1), None)
    expected = []

    def note(epoch, logs):
        probabilities = np.concatenate([model.predict_on_batch(VX[i : i + 7]) for i in (0, 7, 14)])
        expected.append((_f1(VY, probabilities), _auc(VY, probabilities)))

    metrics = HostMetrics({"f1": _f1, "auc": _auc})
    history = _fit(
        model,
        metrics,
        keras.callbacks.LambdaCallback(on_epoch_end=note),
        validation_data=(VX, VY),
        validation_batch_size=4,
        epochs=3,
    )
    assert_close(history["val_f1"], [f1 for f1, _ in expected])
    assert_close(history["val_auc"], [auc for _, auc in expected])
    assert set(history) >= {"loss", "val_loss", "val_f1", "val_auc"}


@pytest.mark.parametrize(
    ("source", "steps", "rows"),
    [
        ((VX, VY), None, 21),
        ((VX, VY), 2, 8),
        (in_batches(4, VX, VY), None, 21),
        (in_batches(4, VX, VY), 3, 12),
        (_batches, None, 21),
        (list(_batches()), None, 21),
        (_batches(), 6, 21),
    ],
)
def test_host_metrics_of_every_source_of_validation_data(model, source, steps, rows):
    if isinstance(source, list):
        # An iterable that is no list: Keras takes a list for arrays.
        batches = source
        source = type("Loader", (), {"__iter__": lambda self: iter(batches)})()
    metrics = HostMetrics({"f1": _f1}, source, batch_size=4, steps=steps)
    expected = _f1(VY[:rows], model.predict(VX[:rows], verbose=0))
    assert_close(metrics.compute(model)["val_f1"], expected)


def test_a_generator_of_its_own_gives_the_next_batches_each_epoch(model):
    seen = []

    def count(y_true, y_pred):
        seen.append(len(y_true))
        return 0.0

    _fit(model, HostMetrics({"rows": count}, _batches(7), steps=1), epochs=3)
    assert seen == [7, 7, 7]


def test_sample_weights(model):
    metrics = HostMetrics({"f1": _f1}, (VX, VY, WEIGHTS))
    probabilities = model.predict(VX, verbose=0)
    assert_close(metrics.compute(model)["val_f1"], _f1(VY, probabilities, WEIGHTS))
    assert abs(_f1(VY, probabilities, WEIGHTS) - _f1(VY, probabilities)) > 1e-4
    with pytest.raises(ValueError, match="plain, whose function has no sample_weight"):
        HostMetrics({"plain": lambda t, p: 0}, (VX, VY, WEIGHTS)).compute(model)


def test_models_of_several_outputs():
    def build(names):
        def builder():
            x = keras.Input((6,))
            outputs = {n: keras.layers.Dense(1, name=n)(x) for n in ("a", "b")}
            model = keras.Model(x, outputs if names else list(outputs.values()))
            model.compile("sgd", "mse", steps_per_execution=2)
            return model

        return builder

    ya, yb = VX[:, :1], VX[:, 1:2]

    def both(y_true, y_pred):
        parts = y_pred.values() if isinstance(y_pred, dict) else y_pred
        return sum(float(np.mean(part)) for part in parts)

    for names in (True, False):
        model = built(build(names), ktd.TPUStrategy())
        y = {"a": ya, "b": yb} if names else [ya, yb]
        metrics = HostMetrics({"both": both, "a": {"mae": mean_absolute_error}}, (VX, y))
        # The same batch by batch.
        halves = [
            (VX[i : i + 11], keras.tree.map_structure(lambda a, i=i: a[i : i + 11], y))
            for i in (0, 11)
        ]
        again = HostMetrics({"a": {"mae": mean_absolute_error}}, lambda: iter(halves))
        predicted = model.predict(VX, verbose=0)
        mae = mean_absolute_error(ya, predicted["a" if names else 0])
        found = metrics.compute(model)
        assert list(found) == ["val_both", "val_a_mae"]
        assert_close(found["val_a_mae"], mae)
        assert_close(found["val_both"], both(None, predicted))
        assert_close(again.compute(model)["val_a_mae"], mae)
        with pytest.raises(ValueError, match="needs the name of that output"):
            HostMetrics({"c": {"mae": mean_absolute_error}}, (VX, y)).compute(model)


def test_callbacks_after_it_see_the_values(model, tmp_path):
    values = iter([0.1, 0.5, 0.4, 0.3, 0.2])
    metrics = HostMetrics({"score": lambda t, p: next(values)}, (VX, VY))
    model.optimizer.learning_rate = 0.01
    history = _fit(
        model,
        metrics,
        keras.callbacks.ModelCheckpoint(
            tmp_path / "{val_score:.1f}.keras", "val_score", mode="max", save_best_only=True
        ),
        keras.callbacks.ReduceLROnPlateau("val_score", mode="max", patience=1),
        keras.callbacks.EarlyStopping("val_score", mode="max", patience=2),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        epochs=9,
    )
    assert history["val_score"] == [0.1, 0.5, 0.4, 0.3]
    assert history["learning_rate"][-1] < 0.01
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == ["0.1.keras", "0.5.keras"]
    with open(tmp_path / "log.csv") as file:
        assert [row["val_score"] for row in csv.DictReader(file)] == ["0.1", "0.5", "0.4", "0.3"]


@pytest.mark.parametrize("strategy", [True, False])
@pytest.mark.parametrize(
    "earlier",
    [
        keras.callbacks.EarlyStopping("val_f1", mode="max"),
        keras.callbacks.ModelCheckpoint("{val_f1:.2f}.keras"),
        keras.callbacks.CSVLogger("never.csv"),
    ],
)
def test_a_callback_that_needs_it_must_stand_after_it(model, earlier, strategy):
    if not strategy:
        model = built(in_launches(1), None)
    with pytest.raises(ValueError, match=f"{type(earlier).__name__} before HostMetrics.*first"):
        _fit(model, earlier, HostMetrics({"f1": _f1}, (VX, VY)))
    unrelated = keras.callbacks.EarlyStopping("loss")
    _fit(model, unrelated, HostMetrics({"f1": _f1}, (VX, VY)), epochs=1)


def test_validation_freq_is_followed(model):
    seen = []
    metrics = HostMetrics({"f1": _f1})
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda e, logs: seen.append("val_f1" in logs)
    )
    _fit(model, metrics, note, validation_data=(VX, VY), validation_freq=2, epochs=4)
    assert seen == [False, True, False, True]


def test_other_ways_to_hand_over_callbacks(model):
    metrics = HostMetrics({"f1": _f1}, (VX, VY))
    callbacks = keras.callbacks.CallbackList([metrics], add_history=True, model=model)
    assert "val_f1" in model.fit(X, Y, callbacks=callbacks, verbose=0).history
    assert "val_f1" in model.fit(X, Y, 8, 1, 0, [metrics]).history
    with pytest.raises(TypeError, match="epoch_count"):
        model.fit(X, Y, epoch_count=3, callbacks=[metrics])


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="only once"):
        HostMetrics({"f1": _f1}, _batches())
    with pytest.raises(ValueError, match="no validation_data"):
        _fit(model, HostMetrics({"f1": _f1}))
    with pytest.raises(ValueError, match=r"validation_split=0\.5"):
        _fit(model, HostMetrics({"f1": _f1}), validation_split=0.5)
    with pytest.raises(ValueError, match="only once"):
        _fit(model, HostMetrics({"f1": _f1}), validation_data=_batches())
    with pytest.raises(ValueError, match="without y"):
        HostMetrics({"f1": _f1}, (VX,)).compute(model)
    with pytest.raises(ValueError, match=r"one number.*shape \(3,\)"):
        HostMetrics({"f1": lambda t, p: np.ones(3)}, (VX, VY)).compute(model)
    with pytest.raises(ValueError, match="must not be in the logs already"):
        _fit(model, HostMetrics({"loss": _f1}, prefix=""), validation_data=(VX, VY))


def test_functions_get_floats_that_numpy_has():
    with ktd.TPUStrategy().scope():
        model = sequential(4, keras.layers.Dense(1, dtype="bfloat16", kernel_initializer="zeros"))
    x, y = np.ones((999, 4), "float32"), np.ones((999, 1), "float32")
    ones = HostMetrics({"ones": lambda y_true, y_pred: (y_pred * 0 + 1).mean()}, (x, y))
    error = HostMetrics({"mae": mean_absolute_error}, (x, y))  # in bfloat16 it fails
    assert ones.compute(model) == {"val_ones": 1.0}  # summed up in bfloat16 it is 0.256
    assert error.compute(model) == {"val_mae": 1.0}


def test_sample_weights_of_some_outputs():
    with ktd.TPUStrategy().scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, {n: keras.layers.Dense(1, name=n)(inputs) for n in "ab"})
    x, y = np.ones((9, 4), "float32"), {n: np.ones((9, 1), "float32") for n in "ab"}
    with_weights = {"a": {"n": lambda y_true, y_pred, sample_weight: sample_weight.sum()}}
    without = {"b": {"n": lambda y_true, y_pred: len(y_pred)}}
    for steps in (None, 3):
        batches = {"batch_size": 3, "steps": steps}
        data = x, y, {"a": np.full(9, 2.0), "b": None}
        metrics = HostMetrics({**with_weights, **without}, data, **batches)
        assert metrics.compute(model) == {"val_a_n": 18.0, "val_b_n": 9.0}


def test_whose_values_a_callback_needs_is_told_by_whole_names(model, tmp_path):
    metrics, data = HostMetrics({"f1": _f1}), {"validation_data": (VX, VY), "epochs": 1}
    other = HostMetrics({"f1_macro": _f1})
    named = keras.callbacks.ModelCheckpoint(str(tmp_path / "{val_f1_macro:.2f}.keras"))
    _fit(model, other, named, metrics, **data)
    ours = ktd.callbacks.Checkpoint(tmp_path / "ours", monitor="val_f1", mode="max")
    for early in (keras.callbacks.ModelCheckpoint(str(tmp_path / "{val_f1:.2f}.keras")), ours):
        with pytest.raises(ValueError, match="Checkpoint before HostMetrics"):
            _fit(model, early, metrics, **data)


def test_two_metrics_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"different name in the logs.*twice=\['a_b'\]"):
        HostMetrics({"a_b": _f1, "a": {"b": _f1}})
