"""Where iterations over distributed datasets are, and where a restore moves them."""

import logging
import pathlib

import jax
import keras
import numpy as np
import pytest
from helpers import loaded

import keras_tpu_dist as ktd

pytest.importorskip("orbax.checkpoint")
iterations = loaded(pathlib.Path(__file__).with_name("iterations.py"), "iterations")
ROWS, BATCH = 52, 13


@pytest.fixture
def loop(tmp_path):
    """A dataset of four batches of 13 rows, and its checkpoints."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    with strategy.scope():
        variable = keras.Variable(0.0)
    dataset = strategy.distribute_dataset(np.arange(float(ROWS)), batch_size=BATCH)
    with ktd.LoopCheckpoint(tmp_path / "loop", variable, dataset) as saved:
        yield dataset, saved


def number(batch):
    return int(np.asarray(batch.values[0])[0]) // BATCH


@pytest.mark.parametrize("where", ["behind", "within", "left"])
def test_a_second_pass_within_an_epoch_does_not_move_training(loop, where, caplog):
    dataset, saved = loop
    for i, _ in enumerate(dataset):
        if i == 1:
            for j, _ in enumerate(dataset):
                if where == "within" and j == 2:
                    saved.save(2)
                if where == "left" and j == 0:
                    break
            if where != "within":
                saved.save(2)
            break
    assert ("several iterations" in caplog.text) == (where == "within")
    saved.restore()
    assert [number(batch) for batch in dataset] == [2, 3]


def test_a_generator_cannot_go_back_and_nothing_changes(tmp_path):
    strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    with strategy.scope():
        variable = keras.Variable(0.0)

    def made():
        dataset = strategy.distribute_dataset(np.full((2,), i) for i in range(9))
        return dataset, ktd.LoopCheckpoint(tmp_path, variable, dataset)

    dataset, saved = made()
    for _ in zip(range(3), dataset, strict=False):
        pass
    # A loop that begins again goes on with the generator's next batch, transferred ahead or not.
    assert int(np.asarray(next(iter(dataset)).values[0])[0]) == 3
    saved.save(4)
    next(iter(dataset))
    variable.assign(7.0)
    with pytest.raises(
        ValueError, match=r"A generator cannot go back.*5 batches were used, and a "
    ):
        saved.restore()
    assert float(variable) == 7
    saved.close()
    dataset, saved = made()
    with saved:
        next(iter(dataset))
        saved.restore()
        assert [int(np.asarray(batch.values[0])[0]) for batch in dataset] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("sized", [True, False])
def test_an_epoch_of_other_batches_begins_anew(sized, tmp_path, caplog):
    strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    with strategy.scope():
        variable = keras.Variable(0.0)

    def made(batches):
        rows = [np.full((2,), i) for i in range(batches)]
        dataset = strategy.distribute_dataset(rows if sized else iterations.Unsized(rows))
        return dataset, ktd.LoopCheckpoint(tmp_path, variable, dataset)

    dataset, saved = made(8)
    for _ in zip(range(5), dataset, strict=False):
        pass
    saved.save(5)
    saved.close()
    dataset, saved = made(3)
    with saved, caplog.at_level(logging.WARNING):
        saved.restore()
        assert [len(list(dataset)) for _ in range(2)] == [3, 3]
    assert caplog.text.count("The epoch begins anew") == 1
    assert "after 5 batches" in caplog.text


def test_random_programs_equal_a_model_of_lists(capsys):
    """`python tests/replica/iterations.py` runs 200."""
    assert iterations.main(["--count", "3", "--seed", "1000"]) == 0
    assert "3 programs, 0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "prefetch"), [(1, 0), (1, 2), (3, 0)])
def test_a_source_that_writes_into_the_batch_before(steps, prefetch):
    strategy = ktd.TPUStrategy(prefetch=prefetch)

    def batches():
        # Aligned, so that JAX's arrays on a CPU share the memory.
        memory = np.empty(2**18 + 64, "uint8")
        start = -memory.ctypes.data % 64
        buffer = memory[start : start + 2**18].view("float32").reshape(64, 1024)
        for i in range(4):
            buffer[:] = i
            yield buffer

    dataset = strategy.distribute_dataset(batches())
    if steps == 1:
        found = [batch.array for batch in list(dataset)]
    else:
        launches = strategy.loop(lambda x: x, dataset, steps, outputs="all")
        found = [x for _, of_launch in list(launches) for x in np.moveaxis(of_launch.array, 1, 0)]
    assert [sorted(set(np.ravel(x).tolist())) for x in found] == [[0], [1], [2], [3]]
