"""Input that stalls ends the run, input that is slow is reported; else nothing changes."""

import gc
import logging
import threading
import time

import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, in_launches

import keras_tpu_dist as ktd
from keras_tpu_dist.input import clock as reading
from keras_tpu_dist.input.clock import InputClock, InputWait, TimedInput

X, Y = data(80)


def _weights_after(steps):
    model = built(in_launches(1), None)
    model.fit(X[: 8 * steps], Y[: 8 * steps], batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def _batches(at=(), seconds=0.0, error=None, steps=10):
    for step in range(steps):
        if step in at:
            time.sleep(seconds)
            if error is not None:
                raise error
        yield X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]


def _stays(name):
    """Whether a thread of this name does not end."""
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name == name]
    for thread in threads:
        thread.join(10)
    return any(thread.is_alive() for thread in threads)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
def test_a_stall_is_an_error_that_keeps_the_steps_before_it(n):
    release = threading.Event()

    def batches():
        yield from _batches(steps=6)
        release.wait(60)

    model = built(in_launches(n), ktd.TPUStrategy(input_timeout_s=2.5))
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"within 2\.5 s.*none for step 7.*6 batches") as caught:
        model.fit(batches(), shuffle=False, verbose=0)
    assert time.perf_counter() - start < 30
    assert "input_timeout_s=" in str(caught.value)
    assert_close(model.get_weights(), _weights_after(6))
    # The thread that is stuck is left behind, and the next fit has one of its own.
    release.set()
    model.fit(X, Y, batch_size=8, verbose=0)
    assert not _stays("keras_tpu_dist input")


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
def test_in_time_changes_nothing(n):
    model = built(in_launches(n), ktd.TPUStrategy(input_timeout_s=20))
    expected = built(in_launches(1), None)
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    assert_close(model.fit(X, Y, **fit).history, expected.fit(X, Y, **fit).history)
    assert_close(model.predict(X[:13], verbose=0), expected.predict(X[:13], verbose=0))
    with pytest.raises(OSError, match="disk gone"):
        model.fit(_batches([3], error=OSError("disk gone")), shuffle=False, verbose=0)
    assert_close(model.get_weights(), _continued(expected, 3))
    assert not _stays("keras_tpu_dist input")


def _continued(model, steps):
    model.fit(X[: 8 * steps], Y[: 8 * steps], batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def test_timed_input():
    assert list(TimedInput(iter(range(5)), 5.0)) == [0, 1, 2, 3, 4]
    assert list(TimedInput(iter(()), 5.0)) == []
    stuck = threading.Event()

    def once():
        yield 1
        stuck.wait(60)
        yield 2

    timed = TimedInput(once(), 0.05)
    assert next(timed) == 1
    with pytest.raises(TimeoutError):
        next(timed)
    with pytest.raises(StopIteration):
        next(timed)
    stuck.set()
    for error in (KeyboardInterrupt, SystemExit):

        def failing(error=error):
            yield 1
            raise error

        timed = TimedInput(failing(), 5.0)
        next(timed)
        with pytest.raises(error):
            next(timed)
    abandoned = TimedInput(iter(range(5)), 5.0)
    next(abandoned)
    del abandoned, timed
    assert not _stays("keras_tpu_dist input")


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
def test_a_slow_generator_is_reported_at_the_end_of_the_epoch(n, caplog):
    strategy = ktd.TPUStrategy()
    model = built(in_launches(n), strategy)
    assert strategy.input_wait is None
    model.fit(X, Y, batch_size=8, verbose=0)
    assert "waited for input" not in caplog.text
    quick = strategy.input_wait
    assert quick.batches == 10
    assert quick.share < 0.1
    slow = _batches(range(1, 10), 0.12)
    ends = []
    end = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: ends.append(caplog.text))
    model.fit(slow, shuffle=False, verbose=0, steps_per_epoch=10, callbacks=[end])
    wait = strategy.input_wait
    assert wait.batches == 10
    assert 0.9 < wait.reading < wait.seconds
    assert 0.5 < wait.waited <= wait.reading
    assert f"waited for input for {wait.share:.0%} of the epoch" in ends[0]
    assert "PyDataset(workers" in caplog.text
    assert wait.to_dict()["share"] == wait.share == wait.waited / wait.seconds
    assert not _stays("keras_tpu_dist launches")


def test_an_epoch_that_stops_early_or_fails_is_measured_too():
    strategy = ktd.TPUStrategy()
    model = built(in_launches(4), strategy)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[ktd.callbacks.StopAtStep(6)])
    assert strategy.input_wait.batches == 6


class _Array:
    """An array whose computation ends when it is told to."""

    def __init__(self):
        self.ended = threading.Event()

    def block_until_ready(self):
        self.ended.wait(10)


def test_only_time_in_which_the_devices_have_nothing_to_do_counts(monkeypatch):
    found = []
    clock = InputClock(found.append)
    now = time.perf_counter
    began = now()
    # The first batch is waited for in full.
    clock.was_read(began, began + 0.01)
    clock.launched(None)
    # Reading turns out to be slow: from here on launches are watched.
    clock.was_read(began, began + 0.2)
    busy = _Array()
    clock.launched([busy])
    start = now()
    time.sleep(0.05)
    clock.was_read(start, now())  # beside a launch that goes on: no wait
    start = now()
    time.sleep(0.05)
    busy.ended.set()
    time.sleep(0.2)
    clock.was_read(start, now())  # beside one that ends early on
    clock.finish()
    (wait,) = found
    assert wait.batches == 4
    assert 0.16 <= wait.waited <= wait.reading - 0.25
    clock.finish()
    assert len(found) == 1


def test_a_launch_that_fails_does_not_stop_the_clock():
    class Failed(_Array):
        def block_until_ready(self):
            raise RuntimeError("the launch died")

    found = []
    clock = InputClock(found.append)
    began = time.perf_counter()
    clock.was_read(began, began + 0.01)
    clock.launched(None)
    clock.was_read(began, began + 0.2)
    clock.launched([Failed()])
    time.sleep(0.05)
    start = time.perf_counter()
    clock.was_read(start, start + 0.1)
    clock.finish()
    assert found[0].waited == pytest.approx(0.11, abs=0.01)


def test_input_wait_in_words():
    text = str(InputWait(seconds=10.0, waited=2.5, reading=5.0, batches=100))
    assert "25% of the epoch (2.50 of 10.00 s)" in text
    assert "50.0 ms" in text
    assert reading.REPORTED_SHARE == 0.1
    assert InputWait(0.0, 0.0, 0.0, 0).share == 0.0
    assert np.isfinite(InputWait(0.0, 0.0, 0.0, 0).share)
    assert logging.getLogger("keras_tpu_dist") is reading.logger
