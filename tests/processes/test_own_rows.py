"""Each process brings its own rows: the same numbers as one process that has them all."""

import json
import pathlib
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import loaded
from hypothesis import given
from hypothesis import strategies as st

import keras_tpu_dist as ktd
from keras_tpu_dist.input.batches import PlacedBatch, Slot
from keras_tpu_dist.input.own_input import ShardBatch
from keras_tpu_dist.input.process_rows import ProcessRowsPlacer
from keras_tpu_dist.input.shards import input_shards_by

HERE = pathlib.Path(__file__).parent


own_rows = loaded(HERE / "own_rows.py", "process_own_rows")
several = loaded(HERE / "test_processes.py", "process_test_processes")


def compared(folder, cases, processes, devices):
    several.all_run(HERE / "own_rows.py", folder, [json.dumps(cases)], devices, processes)
    for case in cases:
        name = "-".join(map(str, case))
        files = sorted(folder.glob(f"{name}-*.npz"))
        found = [dict(np.load(path)) for path in files]
        own_rows.fed.count = int(found[0]["count"])
        assert len(found) == own_rows.fed.count
        expected = own_rows.run(folder, *case)
        for key in ("predicted", "predicted_on_batch"):
            joined = np.concatenate([each.pop(key) for each in found])
            several.assert_equal(joined, expected.pop(key), f"{name}: {key}")
        for each in found:
            del each["count"]
            assert sorted(each) == sorted(expected)
            for key, value in expected.items():
                several.assert_equal(each[key], value, f"{name}: {key}")


@given(
    sizes=st.permutations([2, 2, 2]),
    split=st.sets(st.integers(0, 2)),
    processes=st.sampled_from([1, 2, 4, 8]),
    rows=st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_every_row_lies_where_its_process_has_devices(sizes, split, processes, rows):
    mesh = (np.arange(8) * processes // 8).reshape(sizes)
    axes = sorted(split)
    shares = [input_shards_by(mesh, axes, own) for own in range(processes)]
    assert all(each is not None for each in shares)
    blocks = np.moveaxis(mesh, axes, range(len(axes))).reshape(2 ** len(axes), -1)
    for own, each in enumerate(shares):
        assert own in each.shard.processes
        held = {block for block, holders in enumerate(blocks) if own in holders}
        assert held == set(each.blocks[each.own])
        assert sum(replace(each, own=i).of(29) for i in range(each.shard.count)) == 29
    own = rows[: shares[0].shard.count]
    longest, filled = shares[0].rows_of_blocks(own)
    assert sum(filled) == sum(own)
    assert max(filled) <= longest <= max(own)
    for number, blocks in zip(own, shares[0].blocks):
        assert sum(filled[block] for block in blocks) == number


def test_a_batch_takes_as_much_whether_a_process_brings_float64_or_float32():
    """Else processes would choose different numbers of steps for a launch, and wait for ever."""
    mesh = ktd.TPUStrategy().mesh
    placer = ProcessRowsPlacer(
        mesh, ("data",), 0, input_shards_by(np.repeat([0, 1], 4), [0], this_process=0)
    )
    shares = [ShardBatch(np.zeros((9, 4), dtype), (9, 9)) for dtype in ("float64", "float32")]
    assert [placer.bytes_per_device(share) for share in shares] == [48, 48]


def test_parts_that_overlap_cannot_be_brought():
    assert input_shards_by(np.array([[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2]]), [0], 0) is None


@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"data": 4, "model": 2}, {"a": 2, "b": 2, "model": 2}]
)
def test_rows_are_joined_in_the_program(mesh):
    strategy = ktd.TPUStrategy(mesh, data_axes=[name for name in mesh if name != "model"])
    placer, number = strategy.placer, strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    for filled in [rng.integers(0, 4, number) for _ in range(4)]:
        filled[0] = 3
        rows = np.arange(number * 3 * 2, dtype="float32").reshape(-1, 2)
        true = np.concatenate([rows[3 * i : 3 * i + n] for i, n in enumerate(filled)])
        slot = Slot(0, int(filled.sum()), tuple(map(int, filled)))
        placed = PlacedBatch(jax.device_put(rows, placer.sharding(0)), (slot,))
        found = jax.jit(lambda batch: placer.trim(batch) * 1, out_shardings=placer.sharding(None))
        np.testing.assert_array_equal(found(placed), true)


# Some cases; the table, 2 x 144, by `python tests/processes/run.py per_process`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "cases"),
    [
        (2, 4, [("data", "arrays", 1, "uneven"), ("tensor", "generator", 4, "none")]),
        (4, 2, [("data", "tf.data", 1, "none")]),
    ],
)
def test_own_rows_are_as_those_of_one_process(tmp_path, processes, devices, cases):
    pytest.importorskip("tensorflow")
    compared(tmp_path, cases, processes, devices)
