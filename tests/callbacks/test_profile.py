"""Profiles of fits on simulated devices, and traces in the documented form of TPUs."""

import json
import logging
import re
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from helpers import At, Stop, sequential

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun.measured import device_events, read_profile

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


def test_a_profile_of_a_fit_beside_its_dry_run(directory, tmp_path):
    model = _model()
    profile = ktd.callbacks.Profile(steps=(4, 6), directory=directory)
    _fit(model, 8, [profile])
    assert profile.traced == [(4, 6)]
    assert _is_off()
    measured = read_profile(profile)
    assert (measured.steps, measured.num_steps, measured.devices) == (((4, 6),), 3, 8)
    layers, collectives = dict(measured.layers), dict(measured.collectives)
    assert layers["up"] > 0
    assert layers["down"] > 0
    assert list(collectives) == ["all-reduce"]
    assert measured.busy_s > 0
    assert measured.step_s > 0
    strategy = ktd.TPUStrategy({"data": 8})
    compared = strategy.dry_run(model, batch_size=ROWS).compare(directory)
    by_name = {each.name: each for each in compared.layers}
    assert by_name["up"].operations > by_name["down"].operations > 0
    assert compared.ratio is None
    text = str(compared)
    for words in ("without times", "up", "all-reduce", "share processors"):
        assert words in text
    compared.to_html(tmp_path / "page.html")
    assert "Collectives</h2>" in (tmp_path / "page.html").read_text()
    assert json.loads(json.dumps(compared.to_dict()))["profile"]["devices"] == 8


def test_launches_of_several_steps_are_traced_whole(directory, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    profile = ktd.callbacks.Profile(steps=(4, 6), directory=directory)
    _fit(_model(steps_per_execution=4), 12, [profile])
    assert profile.traced == [(1, 8)]
    assert "the launches that hold them are steps 1 to 8" in caplog.text
    measured = read_profile(directory)
    assert measured.num_steps == 8
    assert {"up", "down", "sgd"} <= set(dict(measured.layers))


def test_validation_between_the_steps_is_left_out(directory):
    model = _model()
    profile = ktd.callbacks.Profile(steps=(3, 6), directory=directory)
    data = np.ones((ROWS, 32), "float32"), np.ones((ROWS, 4), "float32")
    _fit(model, 4, [profile], epochs=2, validation_data=data)
    assert profile.traced == [(3, 4), (5, 6)]
    assert read_profile(directory).steps == ((3, 4), (5, 6))


def test_a_fit_that_raises_in_the_middle_stops_the_trace(directory):
    model = _model()
    profile = ktd.callbacks.Profile(steps=(4, 7), directory=directory)
    with pytest.raises(Stop):
        _fit(model, 8, [At(5), profile])
    assert _is_off()
    again = ktd.callbacks.Profile(steps=(2, 3), directory=directory)
    _fit(model, 4, [again])
    assert read_profile(directory).steps == ((2, 3),)


def test_steps_that_never_run(directory, caplog):
    profile = ktd.callbacks.Profile(steps=(10, 13), directory=directory)
    _fit(_model(), 4, [profile])
    assert "ended after step 4, before these" in caplog.text
    with pytest.raises(ValueError, match="which has no profile"):
        read_profile(directory)


def test_a_profiler_that_is_on_and_two_profiles(directory, tmp_path, caplog):
    first = ktd.callbacks.Profile(steps=(2, 3), directory=directory)
    second = ktd.callbacks.Profile(steps=(3, 4), directory=str(tmp_path / "second"))
    third = ktd.callbacks.Profile(steps=(5, 6), directory=str(tmp_path / "third"))
    _fit(_model(), 8, [first, second, third])
    assert (first.traced, third.traced) == ([(2, 3)], [(5, 6)])
    # The first ends its trace behind step 3, so the second begins behind that, or gives up.
    assert second.traced in ([], [(4, 4)])
    assert "does not start" in caplog.text or second.traced
    jax.profiler.start_trace(str(tmp_path / "own"))
    try:
        _fit(_model(), 4, [ktd.callbacks.Profile(steps=(2, 3), directory=directory)])
    finally:
        jax.profiler.stop_trace()
    assert "JAX's profiler does not start" in caplog.text


def test_a_run_that_goes_on(directory, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    saved = str(tmp_path / "saved")
    first = ktd.callbacks.Profile(steps=(6, 7), directory=directory)
    _fit(_model(), 4, [ktd.callbacks.Checkpoint(saved), first])
    assert first.traced == []
    second = ktd.callbacks.Profile(steps=(6, 7), directory=directory)
    _fit(_model(), 4, [ktd.callbacks.Checkpoint(saved), second], epochs=2)
    assert second.traced == [(6, 7)]


def test_without_a_strategy(directory):
    model = sequential(32, keras.layers.Dense(4))
    with pytest.raises(ValueError, match="launches of a TPUStrategy"):
        _fit(model, 2, [ktd.callbacks.Profile(directory=directory)])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"steps": [2, 1]}', '{"seconds": NaN}', "[" * 9999]
)
def test_odd_manifests(text, tmp_path):
    folder = tmp_path / "process_0" / "from_step_1"
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text(text)
    with pytest.raises(ValueError, match=r"callbacks\.Profile did not write in this form"):
        read_profile(tmp_path)


def _event(name, start, took, **stats):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=took, stats=list(stats.items()))


def _plane(name, **lines):
    made = [
        SimpleNamespace(name=line.replace("_", " "), events=events)
        for line, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=made)


def test_the_documented_form_of_a_tpu_trace():
    """Planes by device, operations on the line "XLA Ops", what a loop runs within it."""
    ops = [
        _event("%while.3 = (s32[]) while(%tuple.1)", 0, 1000, hlo_category="while"),
        _event("%fusion.7 = f32[8] fusion(%p)", 100, 300, tf_op="jit(f)/up/dot_general:"),
        _event("%all-reduce.1 = f32[8] all-reduce(%p)", 500, 400, tf_op="jit(f)/up/dot:"),
    ]
    planes = [
        _plane("/device:TPU:0", XLA_Modules=[_event("jit_train_step(1)", 0, 1000)], XLA_Ops=ops),
        _plane("/device:TPU:1", XLA_Ops=[], Steps=[_event("4", 0, 1000)]),
        _plane("/device:TPU:0 SparseCore 0", XLA_Ops=ops),
        _plane("/host:CPU", python=[_event("fit", 0, 5000)]),
        _plane("Task Environment"),
    ]
    found = {name: (d, s) for d, name, _, s in device_events(SimpleNamespace(planes=planes))}
    assert found == {
        "while.3": (0, pytest.approx(300e-9)),
        "fusion.7": (0, pytest.approx(300e-9)),
        "all-reduce.1": (0, pytest.approx(400e-9)),
    }


def test_a_tpu_trace_is_read_and_says_that_none_was_seen(tmp_path, monkeypatch):
    folder = tmp_path / "process_0" / "from_step_2"
    (folder / "plugins" / "profile" / "now").mkdir(parents=True)
    (folder / "plugins" / "profile" / "now" / "host.xplane.pb").write_bytes(b"")
    described = {
        "steps": [2, 3],
        "seconds": 4e-6,
        "devices": 1,
        "platform": "tpu",
        "device_kind": "TPU v5 lite",
        "layers": ["up"],
        "programs": {},
    }
    (folder / "profile.json").write_text(json.dumps(described))
    ops = [
        _event("%fusion.7 = f32[8] fusion(%p)", 0, 1000, tf_op="jit(f)/up/dot_general:"),
        _event("%all-reduce.1 = f32[8] all-reduce(%p)", 1000, 2000),
    ]
    data = SimpleNamespace(planes=[_plane("/device:TPU:0", XLA_Ops=ops)])
    monkeypatch.setattr(jax.profiler, "ProfileData", SimpleNamespace(from_file=lambda path: data))
    measured = read_profile(tmp_path)
    assert measured.layers == (("up", pytest.approx(0.5e-6)),)
    assert measured.collectives == (("all-reduce", pytest.approx(1e-6)),)
    assert measured.step_s == pytest.approx(2e-6)
    assert re.search("never tried with a trace of a TPU", measured._page())
