"""Dry runs of what plain models and other chips bring along."""

import json
import random

import jax
import keras
import numpy as np
import pytest
from helpers import compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun.compile import is_about_hbm
from keras_tpu_dist.tools.dryrun.run import dry_run
from keras_tpu_dist.tools.shell.main import main
from keras_tpu_dist.training.flops import count_tokens

L = keras.layers


def mlp():
    model = keras.Sequential([keras.Input((512,)), L.Dense(1024, activation="relu"), L.Dense(512)])
    model.compile("adam", "mse")
    return model


class Plain(keras.Model):
    """A model whose call knows of no training."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(4)

    def call(self, x):
        return self.dense(x)


def subclassed():
    return compiled(Plain(), "sgd", "mse")


@pytest.mark.slow
def test_a_call_without_training():
    x, y = np.ones((8, 3), "float32"), np.ones((8, 4), "float32")
    run = dry_run(subclassed, ktd.TPUStrategy({"data": 8}), x=x, y=y, batch_size=8)
    assert run.model_flops == 3 * 2 * 8 * 3 * 4


@pytest.mark.slow
def test_a_dry_run_leaves_random_numbers_and_reads_as_json():
    keras.utils.set_random_seed(0)
    expected, state = mlp().get_weights(), random.getstate()
    keras.utils.set_random_seed(0)
    run = dry_run(mlp, ktd.TPUStrategy({"data": 8}), batch_size=np.int64(16))
    for value, own in zip(mlp().get_weights(), expected, strict=True):
        np.testing.assert_array_equal(value, own)
    assert random.getstate() == state
    assert json.loads(json.dumps(run.to_dict()))["batch_size"] == 16


@pytest.mark.slow
def test_a_ranking_says_sizes():
    among = [{"mesh": {"data": -1, "model": 2}}]
    found = ktd.search(mlp, "v5e:2x4", batch_size=16, among=among, exact=0, cache=False)
    assert dict(found.best.mesh) == {"data": 4, "model": 2}


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("layout", [None, "fsdp"])
def test_what_a_sparse_core_does_is_found(layout):
    strategy = ktd.TPUStrategy({"data": 8}, layout, topology="tpu7x:2x2x1")
    run = dry_run(mlp, strategy, batch_size=4096)
    large = {(c.kind, c.bytes, c.asynchronous) for c in run.cost.collectives if c.bytes > 1e6}
    halves = 512 * 1024 * 4
    fsdp = {("all-gather", halves, True), ("reduce-scatter", halves, True)}
    assert large == (fsdp if layout else {("all-reduce", 2 * halves, True)})


def test_a_kernel_that_is_too_large_is_no_matter_of_the_batch():
    assert is_about_hbm("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.22G")
    kernel = "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory, space=vmem"
    assert not is_about_hbm(kernel)
    assert not is_about_hbm("INTERNAL: Mosaic failed")


def test_pixels_are_no_tokens():
    assert count_tokens(np.zeros((8, 784), "uint8")) == 0
    assert count_tokens(np.zeros((8, 784), "int32")) == 8 * 784


def test_a_failure_of_the_command_is_no_verdict(tmp_path, capsys, monkeypatch):
    (tmp_path / "models_of_a_user.py").write_text("def build(): raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["dry-run", "models_of_a_user:build", "--topology", "v5e:2x4", "--batch-size", "64"]
    assert main([*words, "--layout", "missing.json"]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.tpu_compiler
def test_rows_updated_in_place_cost_what_they_move():
    """512 rows of a table of 512 MiB: it counted as read and written whole, and took no cycles."""

    class Rows(L.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(2**20, 128), trainable=False, name="table")
            self.scale = self.add_weight(shape=(1,), name="scale")

        def call(self, ids):
            rows = jax.numpy.ones((ids.shape[0] * 8, 128)) * self.scale
            self.table.assign(self.table.value.at[ids.reshape(-1)].add(rows))
            return rows[: ids.shape[0]]

    def build():
        model = keras.Sequential([keras.Input((8,), dtype="int32", batch_size=64), Rows()])
        model.compile("sgd", "mse")
        return model

    strategy = ktd.TPUStrategy({"data": 1}, topology="v5e:1x1", donate_state=True)
    run = dry_run(build, strategy, batch_size=64)
    assert run.cost.hbm_bytes < 2 * 512 * (2 * 4096 + 512) + 2**20
    assert run.cost.silent_cycles == pytest.approx(512 * 60, rel=0.1)
    assert any("of the cycles are estimated here" in note for note in run.notes)
