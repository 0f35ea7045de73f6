"""Several processes are one machine: the same numbers as one process, files that open."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import assert_close, loaded

from keras_tpu_dist import _keras
from keras_tpu_dist.processes.saving import print_in_one_process

JOB = pathlib.Path(__file__).parent / "job.py"
job = loaded(JOB, "process_job")
PLANS = ("data", "fsdp", "tensor", "model", "cube", "zero")
FEEDS = ("arrays", "generator", "pydataset", "tf.data")


def launched(script, *arguments, processes, devices):
    command = [
        *(sys.executable, "-m", "keras_tpu_dist", "launch"),
        *("--processes", str(processes), "--devices", str(devices)),
        *(str(script), *map(str, arguments)),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def all_run(script, folder, cases, devices, processes=2):
    """The folder, after several processes have run all cases of a script in it."""
    done = launched(script, folder, *cases, processes=processes, devices=devices)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return folder


def assert_equal(found, expected, name):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def compared(tmp_path, cases, processes, devices):
    (tmp_path / "several").mkdir()
    (tmp_path / "one").mkdir()
    all_run(JOB, tmp_path / "several", [json.dumps(cases)], devices, processes)
    for case in cases:
        expected = (job.feature if len(case) == 1 else job.run)(tmp_path / "one", *case)
        name = "-".join(map(str, case))
        found = dict(np.load(tmp_path / "several" / f"{name}.npz"))
        assert sorted(found) == sorted(expected)
        for key, value in expected.items():
            if value.dtype.kind == "U":
                assert list(found[key]) == list(value)
                continue
            assert_equal(found[key], value, f"{name}: {key}")
        if len(case) == 1:
            continue
        # What several processes wrote opens here, without a strategy.
        opened = keras.saving.load_model(tmp_path / "several" / f"{name}.keras")
        weights = [value for key, value in found.items() if key.startswith("weight")]
        assert_close(opened.get_weights(), weights)
        opened.load_weights(tmp_path / "several" / f"{name}.weights.h5")


def test_a_bar_is_printed_where_its_program_prints():
    """Keras's flag holds for one thread, and its bar runs in another."""
    _keras.install()
    printed = []

    class Bar(keras.callbacks.Callback):
        async_safe = True

        def on_train_batch_end(self, batch, logs=None):
            printed.append(keras.config.is_interactive_logging_enabled())

    for expected in (False, True):
        switch = keras.config.enable_interactive_logging if expected else print_in_one_process
        callbacks = keras.callbacks.CallbackList([Bar()], model=keras.Sequential())
        try:
            switch(*([] if expected else [1]))
            callbacks.on_train_begin()
            callbacks.on_train_batch_end(0)
            callbacks.on_train_end()
        finally:
            keras.config.enable_interactive_logging()
        assert printed.pop() is expected


def test_two_processes_are_one(tmp_path):
    cases = [("tensor", "arrays", 1), ("made with a layout",), ("saved by functions",)]
    cases.append(("counted in call",))
    compared(tmp_path, cases, 2, 4)


# Some plans, each input; the whole table, 2 x 48 cases, by `python tests/processes/run.py`.
SOME = [
    (plan, FEEDS[i % len(FEEDS)], (1, 4)[i % 2])
    for i, plan in enumerate((*PLANS, "data", "tensor"))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "cases"),
    [
        (2, 4, SOME[:3]),
        (4, 2, SOME[4:5]),
        (2, 4, [("data", "arrays", "eager"), ("fsdp", "generator", "eager")]),
    ],
)
def test_every_plan_and_input(tmp_path, processes, devices, cases):
    pytest.importorskip("tensorflow")
    compared(tmp_path, cases, processes, devices)


@pytest.mark.slow
def test_every_feature_in_two_processes_equals_one(tmp_path):
    compared(tmp_path, [(name,) for name in (*job.FEATURES, *job.CALLBACKS)], 2, 4)
    # What ModelCheckpoint wrote in one of the processes opens here.
    one = job.model(1)
    one.optimizer.build(one.trainable_variables)
    one.load_weights(tmp_path / "several" / "kept.weights.h5")
