"""Rates in the logs of epochs: with N steps a launch, validation, ragged ends, in any order."""

import copy
import csv
import time
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from dryrun.made import made_run
from helpers import At, Stop, compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks import rates as of_rates
from keras_tpu_dist.show.text import duration_text, span_text

X = np.random.default_rng(0).normal(size=(45, 4)).astype("float32")
Y = X[:, :3]


def made(steps=1, tokens=False):
    keras.utils.set_random_seed(0)
    with ktd.TPUStrategy({"data": 4, "model": 2}).scope():
        layers = [keras.Input((4,)), keras.layers.Dense(3)]
        if tokens:
            layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(7, 3)]
            layers.append(keras.layers.Flatten())
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", steps_per_execution=steps)
    return model


class Slow(keras.callbacks.Callback):
    """Makes a launch take 50 ms, and what is no training 300."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

    def on_test_begin(self, logs=None):
        time.sleep(0.3)

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.3)


def fed(kind):
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": 8}
    tf = pytest.importorskip("tensorflow")
    return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), "shuffle": False}


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("arrays", 1), pytest.param("arrays", 4), pytest.param("tf.data", 4, marks=pytest.mark.slow)],
)
def test_rates_count_steps_and_rows(kind, steps):
    began = time.perf_counter()
    callbacks = [ktd.callbacks.Rates(), Slow()]
    options = {"epochs": 3, "verbose": 0, "validation_data": (X, Y), "callbacks": callbacks}
    history = made(steps).fit(**fed(kind), **options).history
    whole = time.perf_counter() - began
    # Six steps with 45 rows in each epoch.
    seconds = [6 / rate for rate in history["steps_per_second"]]
    assert history["rows_per_second"] == pytest.approx([45 / each for each in seconds])
    assert min(seconds) > 0.05 * (6 if steps == 1 else 2)
    # Validation and what callbacks do at an epoch's end are left out, and so is compiling.
    assert sum(seconds) < whole - 3 * 0.6
    assert all(0 <= each < 1 for each in history["input_wait"])
    assert "mfu" not in history
    assert "tokens_per_second" not in history


def test_in_any_order_of_callbacks(tmp_path):
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    callbacks = [log, Sees(), ktd.callbacks.Rates()]
    history = made().fit(X, Y, epochs=2, verbose=0, callbacks=callbacks).history
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    for epoch, row in enumerate(rows):
        for name in ("steps_per_second", "rows_per_second", "input_wait"):
            assert float(row[name]) == pytest.approx(history[name][epoch])
            assert seen[epoch][name] == history[name][epoch]


def test_tokens_per_second_are_rows_times_their_length():
    tokens = np.random.default_rng(0).integers(0, 7, (45, 4)).astype("int32")
    targets = np.zeros((45, 12), "float32")
    rates = ktd.callbacks.Rates()
    fit = made(4, tokens=True).fit
    history = fit(tokens, targets, batch_size=8, epochs=1, verbose=0, callbacks=[rates]).history
    ratio = history["tokens_per_second"][0] / history["rows_per_second"][0]
    assert ratio == pytest.approx(4)


@pytest.mark.parametrize("steps", [1, 4])
def test_waiting_for_input_is_seen(steps):
    class Slowly(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            time.sleep(0.3)
            return X[:8], Y[:8]

    history = made(steps).fit(Slowly(), verbose=0, callbacks=[ktd.callbacks.Rates()]).history
    assert history["input_wait"][0] > 0.4


@pytest.mark.parametrize("steps", [1, 4])
def test_mfu_is_by_the_formula_of_dry_runs(steps, monkeypatch):
    chip = SimpleNamespace(flops={"bfloat16": 1e6}, devices=1)
    monkeypatch.setattr(of_rates, "of_kind", lambda kind: chip)
    model = made(steps)
    rates = ktd.callbacks.Rates()
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[rates]).history
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    run = ktd.dry_run(lambda: plain(), strategy, batch_size=8)
    seconds = 45 / history["rows_per_second"][1]
    expected = run.model_flops * 45 / 8 / (8 * 1e6 * seconds)
    assert history["mfu"][1] == pytest.approx(expected, rel=1e-6)
    assert run.model_flops == 3 * 2 * 8 * 4 * 3


def plain():
    return compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), "sgd", "mse")


def test_a_run_that_was_cut_counts_the_whole_epoch(tmp_path):
    saved = {"every_steps": 1, "asynchronous": False}
    with pytest.raises(Stop):
        made().fit(
            **fed("arrays"),
            verbose=0,
            callbacks=[ktd.callbacks.Checkpoint(tmp_path, **saved), ktd.callbacks.Rates(), At(4)],
        )
    rates = ktd.callbacks.Rates()
    again = [ktd.callbacks.Checkpoint(tmp_path, **saved), rates]
    made().fit(**fed("arrays"), verbose=0, callbacks=again)
    assert (rates._counts.steps, rates._counts.rows) == (6, 45)


def test_odd_state_is_left_out():
    rates = ktd.callbacks.Rates()
    rates.load_state_dict({"steps": float("nan"), "rows": "x", "tokens": -3, "flops": True})
    assert rates.state_dict()["steps"] == 0


def test_without_a_strategy():
    model = plain()
    with pytest.raises(ValueError, match="Rates counts in the loop of a TPUStrategy"):
        model.fit(X, Y, verbose=0, callbacks=[ktd.callbacks.Rates()])
    assert model.fit(X, Y, verbose=0).history["loss"]


def run_of(bound, effort):
    run = made_run(effort=effort)
    return replace(run, estimate=replace(run.estimate, bound=bound, low=0.01, high=0.02))


def beside(capsys, run, epochs=1):
    """What two epochs print, and the seconds of their steps."""
    rates = copy.deepcopy(ktd.callbacks.Rates(expected=run))
    history = made(2).fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[rates]).history
    seconds = [1 / rate for rate in history["steps_per_second"]]
    return capsys.readouterr().out.strip().split("\n\n"), seconds


def test_each_epoch_sets_a_step_beside_its_estimate(capsys):
    run = run_of("compute", "exact")
    run = replace(run, estimate=replace(run.estimate, low=0.01, high=0.01))
    printed, seconds = beside(capsys, run, epochs=2)
    assert len(printed) == 2
    for epoch, (text, took) in enumerate(zip(printed, seconds, strict=True)):
        first, measured, estimated, published = text.split("\n  ")
        assert first == (
            f"Epoch {epoch + 1}: {duration_text(took)} a step, {took / 0.01:,.2f} times the "
            "estimate of 10.00 ms"
        )
        # Five steps of 8 rows and one of 5.
        assert measured.startswith("measured: 7.5 rows on 8 x cpu, ")
        assert measured.endswith("% of the time waiting for input")
        assert estimated == "estimated: 1,024 rows on v5e:4x4, effort exact"
        spread = run.spread
        assert published == f"published: {spread.span} times the estimate: {spread.programs}"


def test_an_estimate_of_quick_effort_is_a_range_beside_a_step(capsys):
    run = run_of("compute", "quick")
    [text], [took] = beside(capsys, run)
    ratio = span_text(took / 0.02, took / 0.01, "{:,.2f}".format)
    assert f", {ratio} times the estimate of 10.00 to 20.00 ms\n" in text
    step, spread = run.estimate.step, run.spread
    times = span_text(spread.low * step, spread.high * step, duration_text)
    assert text.endswith(f"published: {times}: {spread.programs}")
    [text], _ = beside(capsys, run_of("kernels", "quick"))
    assert text.endswith("published: none of this kind")


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (3, "expected of Rates is a dry run of the training step.*expected=3"),
        (made_run(mode="predict"), "with times.*mode='predict', with times"),
        (made_run(estimate=None), "with times.*mode='train', without times"),
    ],
    ids=["a number", "another step", "no times"],
)
def test_what_cannot_be_expected(expected, words):
    with pytest.raises(ValueError, match=words):
        ktd.callbacks.Rates(expected=expected)
