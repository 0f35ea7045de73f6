"""One device = eight devices = a two-axis mesh, for models, batch sizes and ways to train."""

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, data, mlp, results, sequential
from jax.sharding import PartitionSpec

import keras_tpu_dist as ktd

MESHES = [{"data": 8}, {"data": 4, "model": 2}]


def _cnn():
    return sequential(
        (8, 8, 1),
        keras.layers.Conv2D(4, 3),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, activation="softmax"),
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )


def _dropout():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, "adam", loss, metrics=["accuracy"])


def _lstm():
    return sequential(
        (5, 4),
        keras.layers.LSTM(6),
        keras.layers.Dense(3, activation="softmax"),
        optimizer="adam",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )


def _embedding():
    return sequential(
        keras.Input((7,), dtype="int32"),
        keras.layers.Embedding(20, 8, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3, activation="softmax"),
        optimizer="adam",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )


def _inputs(name, rows):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, rows)
    shape = {"cnn": (rows, 8, 8, 1), "lstm": (rows, 5, 4)}.get(name, (rows, 6))
    if name == "embedding":
        return rng.integers(0, 20, (rows, 7)).astype("int32"), y
    return rng.normal(size=shape).astype("float32"), y


MODELS = {"mlp": mlp, "cnn": _cnn, "dropout": _dropout, "lstm": _lstm, "embedding": _embedding}


def check(build, run, meshes=MESHES, tolerance=1e-5, **strategy):
    """`run(model)` gives the same on one device and on every mesh."""
    expected = run(built(build, None))
    for mesh in meshes:
        found = run(built(build, ktd.TPUStrategy(mesh, **strategy)))
        assert_close(found, expected, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 30, 32, 64])
@pytest.mark.parametrize("name", MODELS)
def test_fit_equals_one_device(name, batch_size):
    x, y = _inputs(name, 103)
    check(MODELS[name], lambda m: results(m, x, y, batch_size=batch_size, epochs=3))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 30, 32, 64])
def test_two_inputs_two_outputs_with_sample_and_class_weights(batch_size):
    def build():
        a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
        hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Concatenate()([a, b]))
        outputs = {
            "label": keras.layers.Dense(3, activation="softmax", name="label")(hidden),
            "value": keras.layers.Dense(1, name="value")(hidden),
        }
        return compiled(
            keras.Model({"a": a, "b": b}, outputs),
            "adam",
            {"label": "sparse_categorical_crossentropy", "value": "mse"},
            loss_weights={"label": 1.0, "value": 0.3},
            metrics={"label": ["accuracy"], "value": ["mae"]},
            weighted_metrics={"value": ["mse"]},
        )

    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(103, 6)), "b": rng.normal(size=(103, 2))}
    y = {"label": rng.integers(0, 3, 103), "value": rng.normal(size=(103, 1))}
    weights = {"label": rng.uniform(size=103), "value": rng.uniform(size=103)}

    def run(model):
        history = model.fit(
            x, y, sample_weight=weights, batch_size=batch_size, epochs=3, verbose=0
        ).history
        return [history, model.get_weights(), model.predict(x, batch_size=32, verbose=0)]

    check(build, run)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [30, 64])
def test_class_weight(batch_size):
    x, y = data()
    weight = {0: 1.0, 1: 0.2, 2: 3.0}
    check(mlp, lambda m: results(m, x, y, batch_size=batch_size, epochs=3, class_weight=weight))


@pytest.mark.slow
def test_validation_split_and_validation_data():
    x, y = data()
    check(mlp, lambda m: results(m, x, y, batch_size=30, epochs=3, validation_split=0.21))
    check(
        mlp,
        lambda m: results(
            m, x, y, batch_size=32, epochs=3, validation_data=(*data(29), np.arange(29.0))
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_evaluate_and_predict_for_every_number_of_rows(mesh):
    x, y = data(33)
    alone = built(mlp, None)
    expected = alone.predict(x, batch_size=33, verbose=0).astype("float64")
    losses = -np.log(expected[np.arange(33), y])
    hits = expected.argmax(axis=1) == y
    model = built(mlp, ktd.TPUStrategy(mesh))
    for n in range(1, 34):
        found = model.predict(x[:n], batch_size=64, verbose=0)
        assert_close(found, expected[:n])
        evaluation = model.evaluate(x[:n], y[:n], batch_size=64, verbose=0)
        assert_close(evaluation, [losses[:n].mean(), hits[:n].mean()])


def test_one_generator_through_two_fits_is_read_no_further_than_on_one_device():
    x, y = data()

    def run(model):
        def batches():
            for start in range(0, 103, 9):
                yield x[start : start + 9], y[start : start + 9]

        generator = batches()
        first = model.fit(generator, steps_per_epoch=4, shuffle=False, verbose=0).history
        second = model.fit(generator, steps_per_epoch=4, shuffle=False, verbose=0).history
        left = sum(len(labels) for _, labels in generator)
        return [first, second, model.get_weights(), left]

    check(mlp, run)


@pytest.mark.slow
def test_run_eagerly():
    def build():
        return compiled(
            mlp(), "adam", "sparse_categorical_crossentropy", metrics=["accuracy"], run_eagerly=True
        )

    x, y = data(29)
    check(build, lambda m: results(m, x, y, batch_size=10, epochs=1), meshes=MESHES[:1])


def test_custom_train_step():
    class Doubled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.tracker = keras.metrics.Mean(name="doubled")

        def call(self, x):
            return self.dense(x)

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            x, y = data

            def loss_fn(trainable, non_trainable):
                out, non_trainable = self.stateless_call(trainable, non_trainable, x)
                return 2 * keras.ops.mean((out - y) ** 2), non_trainable

            (loss, non_trainable), grads = jax.value_and_grad(loss_fn, has_aux=True)(
                trainable, non_trainable
            )
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
            metrics = self.tracker.stateless_update_state(metrics, loss)
            logs = {"doubled": self.tracker.stateless_result(metrics)}
            return logs, (trainable, non_trainable, optimizer, metrics)

    def build():
        return compiled(Doubled(), keras.optimizers.Adam(0.01))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(103, 6)).astype("float32"), rng.normal(size=(103, 3))

    def run(model):
        history = model.fit(x, y.astype("float32"), batch_size=30, epochs=3, verbose=0).history
        return [history, model.get_weights(), model.predict(x, verbose=0)]

    check(build, run)


OPTIMIZERS = {
    "adamw with weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "gradient accumulation": lambda: keras.optimizers.Adam(gradient_accumulation_steps=3),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=5),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "global clipnorm": lambda: keras.optimizers.Adam(global_clipnorm=0.1),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    def build():
        return compiled(mlp(), OPTIMIZERS[name](), "sparse_categorical_crossentropy")

    x, y = data()
    check(build, lambda m: results(m, x, y, batch_size=30, epochs=3))


@pytest.mark.slow
def test_mixed_bfloat16():
    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        return mlp()

    x, y = data()
    check(build, lambda m: results(m, x, y, batch_size=30, epochs=3), tolerance=2e-2)


class LargestConfidence(keras.metrics.Metric):
    """A stateful metric whose value depends on each single row."""

    def __init__(self, name="largest_confidence", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_variable((), initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self):
        return keras.ops.convert_to_tensor(self.largest)


@pytest.mark.slow
def test_metrics_are_exact_on_ragged_tails():
    def build():
        return sequential(
            6,
            keras.layers.Dense(3, activation="softmax", name="out"),
            optimizer="adam",
            loss="categorical_crossentropy",
            metrics=[
                keras.metrics.AUC(num_thresholds=50),
                keras.metrics.Precision(),
                keras.metrics.TopKCategoricalAccuracy(2),
                keras.metrics.F1Score(),
                LargestConfidence(),
            ],
        )

    x, labels = data()
    y = np.eye(3, dtype="float32")[labels]
    check(build, lambda m: results(m, x, y, batch_size=30, epochs=2))


@pytest.mark.slow
def test_train_test_and_predict_on_batch():
    x, y = data(13)

    def run(model):
        weights = np.linspace(0, 1, 13)
        found = [
            model.train_on_batch(x, y),
            model.train_on_batch(x[:5], y[:5], sample_weight=weights[:5]),
            model.train_on_batch(x[:8], y[:8], class_weight={0: 1.0, 1: 2.0, 2: 0.5}),
            model.test_on_batch(x, y),
            model.predict_on_batch(x),
        ]
        assert found[-1].shape == (13, 3)
        return [*found, model.get_weights()]

    check(mlp, run)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_that_a_callback_runs_within_evaluate(steps):
    x, y = data(40)
    with ktd.TPUStrategy({"data": 4, "model": 2}).scope():
        model = mlp()
        model.steps_per_execution = steps

    class Runs(keras.callbacks.Callback):
        # Not through `self.model`, which would have Keras bring its variables up to date.
        def on_test_batch_end(self, batch, logs=None):
            model.predict_on_batch(x[:8])

    alone = model.evaluate(x, y, batch_size=8, verbose=0)
    assert_close(model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[Runs()]), alone)


@pytest.mark.slow
def test_stock_layout_map():
    def build(strategy=None):
        return mlp()

    x, y = data()
    run = lambda m: results(m, x, y, batch_size=30, epochs=3)  # noqa: E731
    expected = run(built(build, None))
    mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*hidden/kernel"] = (None, "model")
    strategy = ktd.TPUStrategy(layout=layout_map)
    model = built(build, strategy)
    assert model.layers[0].kernel.value.sharding.spec == PartitionSpec(None, "model")
    assert strategy.data_axes == ("batch",)
    assert_close(run(model), expected)
