"""Fits and dry runs in several threads at once: each is what it is alone."""

import contextlib
import threading

import keras
import numpy as np
import pytest
from helpers import assert_close, data

import keras_tpu_dist as ktd

X, Y = data(40)


def model(seed, units):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(units, name="hidden"), keras.layers.Dense(3)]
    made = keras.Sequential(layers)
    made.compile("adam", "mse", steps_per_execution="auto")
    return made


def fit(trained, epochs=4):
    history = trained.fit(X, np.eye(3)[Y], batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"], trained.get_weights()


def in_threads(*functions):
    """What each gives, run at once; an error in one is raised here."""
    results, start = [None] * len(functions), threading.Barrier(len(functions))

    def run(number, function):
        start.wait()
        with contextlib.suppress(StopIteration):
            try:
                results[number] = function()
            except BaseException as error:
                results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("layout", [None, "fsdp"])
def test_two_fits_of_one_strategy(layout):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, layout)
    with strategy.scope():
        alone = [fit(model(seed, units)) for seed, units in ((1, 8), (2, 16))]
        models = [model(seed, units) for seed, units in ((1, 8), (2, 16))]
    together = in_threads(*(lambda each=each: fit(each) for each in models))
    assert_close(together, alone)


def test_a_dry_run_beside_a_fit():
    """Variables of a dry run get no values; those that another thread makes meanwhile do."""
    with ktd.TPUStrategy().scope():
        alone = fit(model(1, 8))
        trained = model(1, 8)
    described = ktd.TPUStrategy(topology="v5e:2x4")
    made = threading.Event()

    def dry():
        with described.scope():
            layer = keras.layers.Dense(4)
            layer.build((None, 2))
            made.wait(60)
            return layer.kernel._value

    def beside():
        layer = keras.layers.Dense(4)
        layer.build((None, 2))
        made.set()
        return layer.kernel._value, fit(trained)

    abstract, (value, result) = in_threads(dry, beside)
    assert abstract is None
    assert value is not None
    assert_close(result, alone)
