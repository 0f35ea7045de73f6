"""N steps in one launch give what N single steps give, with a bounded number of programs."""

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, in_launches

import keras_tpu_dist as ktd
from benchmarks.compilations import counted
from keras_tpu_dist import _keras
from keras_tpu_dist.programs.equal import EXECUTABLES
from keras_tpu_dist.training import loop


class Layered(keras.Model):
    """Dropout, batch statistics and a metric are its state."""

    def __init__(self):
        super().__init__()
        self.layers_of_it = [
            keras.layers.Dense(5, use_bias=False),  # batch statistics undo a bias
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, activation="softmax"),
        ]

    def call(self, x, training=False):
        for layer in self.layers_of_it:
            x = layer(x, training=training) if layer.name[0] in "bd" else layer(x)
        return x


def _build(steps_per_execution, optimizer=lambda: keras.optimizers.Adam(0.01)):
    return in_launches(steps_per_execution, Layered, optimizer, metrics=["accuracy"])


def _strategy():
    return ktd.TPUStrategy({"data": 4, "model": 2})


def _run(model, x, y, batch_size=4, epochs=2):
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0).history
    return {
        "history": history,
        "weights": model.get_weights(),
        "metrics": [v.numpy() for v in model.metrics_variables],
        "evaluation": model.evaluate(x, y, batch_size=batch_size, verbose=0),
        "predictions": model.predict(x, batch_size=batch_size, verbose=0),
        "optimizer": [v.numpy() for v in model.optimizer.variables],
    }


@pytest.mark.slow
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("steps", [1, 7, 64, 100])
def test_any_number_of_steps_equals_one_by_one(steps, tail):
    x, y = data(4 * steps + tail)
    expected = _run(built(_build(1), _strategy()), x, y)
    for n in (2, 7, 32):
        EXECUTABLES.clear()
        with counted() as counts:
            assert_close(_run(built(_build(n), _strategy()), x, y), expected, 1e-6)
        # Compiled: the scan where it fits, the single step for what is left over, the tail.
        scans, single = steps >= n, bool(steps % n) or (tail and steps % n) or steps < n
        mixed = tail and (steps + 1) % n == 0 and steps % n
        bound = int(scans) + int(bool(single or mixed)) + int(bool(tail))
        for kind in ("train", "test", "predict"):
            assert 1 <= counts[f"{kind}_step"] + counts[f"{kind}_steps"] <= bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_overwrite_frequency=5),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20)),
    ],
)
def test_optimizers_under_a_scan(optimizer):
    x, y = data(4 * 11 + 2)
    expected = _run(built(_build(1, optimizer), _strategy()), x, y)
    assert_close(_run(built(_build(4, optimizer), _strategy()), x, y), expected, 1e-6)


@pytest.mark.slow
def test_generators_with_steps_per_epoch_stop_exactly():
    x, y = data(4 * 30)

    def run(model):
        read = []

        def batches():
            for start in range(0, 120, 4):
                read.append(start)
                yield x[start : start + 4], y[start : start + 4]

        history = model.fit(
            batches(), steps_per_epoch=7, epochs=3, shuffle=False, verbose=0
        ).history
        return [history, model.get_weights(), int(model.optimizer.iterations), len(read)]

    expected = run(built(_build(1), None))
    assert expected[-2:] == [21, 21]
    for n in (2, 7, 32):
        assert_close(run(built(_build(n), _strategy())), expected)


@pytest.mark.slow
def test_batches_of_changing_size_in_one_launch():
    x, y = data(60)

    def run(model):
        def batches():
            start = 0
            for size in (4, 4, 4, 5, 4, 4, 3, 3):
                yield x[start : start + size], y[start : start + size]
                start += size

        history = model.fit(batches(), steps_per_epoch=8, shuffle=False, verbose=0).history
        return [history, model.get_weights()]

    assert_close(run(built(_build(3), _strategy())), run(built(_build(1), None)))


def test_a_scan_is_one_program_with_a_loop():
    model = built(_build(5), _strategy())
    x, y = data(40)
    model.fit(x, y, batch_size=4, verbose=0)
    strategy = _strategy()
    with strategy.scope():
        scan = loop.jitted_step(model, "train", strategy.placer, False, scanned=True)
        state = model._get_jax_state(
            trainable_variables=True,
            non_trainable_variables=True,
            optimizer_variables=True,
            metrics_variables=True,
        )
        batches = strategy.placer.place_many([(x[:4], y[:4])] * 5)
        program = scan.lower(state, batches).as_text()
    assert program.count("stablehlo.while") >= 1
    assert _keras.active_strategy() is None
    assert jax.tree.leaves(batches.data)[0].shape == (5, 4, 6)


def test_on_batch_methods_ignore_the_setting():
    x, y = data(13)
    model, expected = built(_build(4), _strategy()), built(_build(1), None)
    assert_close(model.train_on_batch(x, y), expected.train_on_batch(x, y))
    assert_close(model.predict_on_batch(x), expected.predict_on_batch(x))


def test_stacking_wants_equal_shapes():
    placer = _strategy().placer
    assert placer.place_many([(np.ones((4, 2)),), (np.ones((3, 2)),)]) is None
    assert placer.place_many([(np.ones((4, 2)),), [np.ones((4, 2))]]) is None
    stacked = placer.place_many([(np.ones((3, 2)),), (np.zeros((3, 2)),)])
    assert stacked.data[0].shape == (2, 4, 2)
