"""Profiles of fits on simulated devices."""

import re
import warnings
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from helpers import At, Stop, sequential

import keras_tpu_dist as ktd

ROWS = 16


def _model(**options):
    with ktd.TPUStrategy({"data": 8}).scope():
        model = sequential(
            32,
            keras.layers.Dense(64, activation="relu", name="up"),
            keras.layers.Dense(4, name="down"),
            **options,
        )
    return model


def _fit(model, steps, callbacks, **options):
    x, y = np.ones((steps * ROWS, 32), "float32"), np.ones((steps * ROWS, 4), "float32")
    return model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=callbacks, **options)


def _is_off():
    """Whether JAX's profiler is off: stopping it is an error then."""
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()
    return True


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path / "profile")


def launches(directory):
    """How many launches of train steps each trace has."""
    counts = []
    for file in sorted(Path(directory).glob("process_0/plugins/profile/*/*.xplane.pb")):
        with warnings.catch_warnings():  # JAX creates types whose metaclass newer Pythons dislike
            warnings.simplefilter("ignore", DeprecationWarning)
            data = jax.profiler.ProfileData.from_file(str(file))
            names = [event.name for p in data.planes for line in p.lines for event in line.events]
        # Of the launch; "[3] ..." are its parts on the devices.
        starts = [name for name in names if re.match(r"\w+::Execute \(jit_train_step\w*\)", name)]
        counts.append(len(starts))
    return counts


def test_a_trace_has_exactly_the_steps(directory):
    model = _model()
    profile = ktd.callbacks.Profile(steps=(4, 6), directory=directory)
    _fit(model, 8, [profile])
    assert profile.traced == (4, 6)
    assert _is_off()
    assert launches(directory) == [3]


def test_launches_of_several_steps_are_traced_whole(directory):
    profile = ktd.callbacks.Profile(steps=(6, 7), directory=directory)
    _fit(_model(steps_per_execution=4), 12, [profile])
    assert profile.traced == (5, 8)
    assert launches(directory) == [1]


def test_a_trace_ends_after_its_last_step_within_a_remainder(directory):
    profile = ktd.callbacks.Profile(steps=(5, 6), directory=directory)
    _fit(_model(steps_per_execution=4), 7, [profile])
    assert profile.traced == (5, 6)
    assert launches(directory) == [2]


def test_steps_of_two_epochs(directory):
    profile = ktd.callbacks.Profile(steps=(3, 6), directory=directory)
    data = np.ones((ROWS, 32), "float32"), np.ones((ROWS, 4), "float32")
    _fit(_model(), 4, [profile], epochs=2, validation_data=data)
    assert profile.traced == (3, 6)
    assert launches(directory) == [4]


def test_a_fit_that_raises_in_the_middle_stops_the_trace(directory):
    model = _model()
    profile = ktd.callbacks.Profile(steps=(4, 7), directory=directory)
    with pytest.raises(Stop):
        _fit(model, 8, [At(5), profile])
    assert _is_off()
    assert profile.traced == (4, 5)
    # Each fit counts from its own first step.
    _fit(model, 4, [ktd.callbacks.Profile(steps=(2, 3), directory=directory)])
    assert launches(directory)[-1] == 2


def test_a_launch_that_fails_is_no_step(directory):
    profile = ktd.callbacks.Profile(steps=(1, 3), directory=directory)
    with pytest.raises(Stop):
        _fit(_model(), 4, [profile, At(1, method="on_train_batch_begin")])
    assert _is_off()
    assert profile.traced is None


def test_steps_that_never_run(directory, caplog):
    profile = ktd.callbacks.Profile(steps=(10, 13), directory=directory)
    _fit(_model(), 4, [profile])
    assert "ended after 4 steps, before these" in caplog.text
    assert launches(directory) == []


def test_a_profiler_that_is_on(directory, tmp_path, caplog):
    first = ktd.callbacks.Profile(steps=(2, 4), directory=directory)
    second = ktd.callbacks.Profile(steps=(3, 5), directory=str(tmp_path / "second"))
    third = ktd.callbacks.Profile(steps=(5, 6), directory=str(tmp_path / "third"))
    _fit(_model(), 8, [first, second, third])
    assert (first.traced, second.traced, third.traced) == ((2, 4), None, (5, 6))
    assert caplog.text.count("JAX's profiler does not start, so nothing is traced") == 1
    assert _is_off()


def test_without_a_strategy(directory):
    model = sequential(32, keras.layers.Dense(4))
    with pytest.raises(ValueError, match="launches of a TPUStrategy"):
        _fit(model, 2, [ktd.callbacks.Profile(directory=directory)])


@pytest.mark.parametrize("steps", [(0, 2), (3, 2), (1,), 3])
def test_steps_are_the_first_and_the_last(steps):
    with pytest.raises(ValueError, match=r"the first and the last train step.*steps=\(10, 13\)"):
        ktd.callbacks.Profile(steps=steps)
