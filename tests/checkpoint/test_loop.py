"""A loop of one's own over `strategy.run` that is cut and resumed ends as one that was not."""

import random
import signal

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, stepped

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.reader import CheckpointReader

ROWS, BATCH, EPOCHS = 48, 8, 3
X = np.random.default_rng(0).normal(size=(ROWS, 12)).astype("float32")
Y = X[:, :4]
MESHES = ({"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2})
slow = pytest.mark.slow


class Shuffled(keras.utils.PyDataset):
    """Batches in an order of their own each time, by Python's random numbers."""

    def __init__(self):
        super().__init__()
        self.order: list[int] = []

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        if index == 0:
            self.order = random.sample(range(ROWS // BATCH), ROWS // BATCH)
        rows = slice(self.order[index] * BATCH, (self.order[index] + 1) * BATCH)
        return X[rows], Y[rows]


def grain_rows():
    grain = pytest.importorskip("grain")

    rows = grain.MapDataset.range(ROWS).seed(3).shuffle().map(lambda i: (X[i], Y[i]))
    return rows.batch(BATCH).to_iter_dataset()


INPUTS = {
    "arrays": lambda strategy: strategy.distribute_dataset((X, Y), batch_size=BATCH),
    "pydataset": lambda strategy: strategy.distribute_dataset(Shuffled()),
    "grain": lambda strategy: strategy.distribute_dataset(grain_rows()),
    "function": lambda strategy: strategy.distribute_datasets_from_function(
        lambda context: [
            (X[i : i + 2], Y[i : i + 2])
            for i in range(0, ROWS, context.get_per_replica_batch_size(BATCH))
        ]
    ),
}


class Loop:
    """A loop with a model, its optimizer, a metric, a variable of its own."""

    def __init__(self, mesh=MESHES[0], layout=None, dropout=0.3, feed="arrays"):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        self.strategy = ktd.TPUStrategy(mesh, layout)
        with self.strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((12,)),
                    keras.layers.Dense(16, activation="relu"),
                    keras.layers.Dropout(dropout),
                    keras.layers.Dense(4),
                ]
            )
            self.optimizer = keras.optimizers.Adam(0.01)
            self.metric = keras.metrics.MeanSquaredError()
            self.rows = keras.Variable(0.0, name="rows", aggregation="sum", trainable=False)
        self.dataset = INPUTS[feed](self.strategy)
        self.losses = {}

    def objects(self):
        return self.model, self.optimizer, self.metric, self.rows, self.dataset

    def step(self, batch):
        x, y = batch
        loss, predicted = stepped(
            self.model, self.optimizer, x, lambda predicted: ((predicted - y) ** 2).mean()
        )
        self.metric.update_state(y, predicted)
        return loss

    def run(self, saved=None, every=4, cut=None):
        """Runs to its end, or until it is cut in the middle of a step after so many."""
        noted = {} if saved is None else saved.restore()
        done = noted.get("step", 0)
        for epoch in range(noted.get("epoch", 0), EPOCHS):
            for batch in self.dataset:
                if done == cut:
                    return self
                loss = self.strategy.run(self.step, (batch,))
                done += 1
                self.losses[done] = float(self.strategy.reduce("mean", loss))
                if saved is not None and done % every == 0:
                    saved.save(done, epoch=epoch)
            self.rows.assign(self.rows + 1.0)
        return self

    def state(self):
        variables = [*self.model.variables, *self.optimizer.variables, *self.metric.variables]
        return [np.asarray(v.value) for v in (*variables, self.rows)]


@pytest.mark.parametrize(
    ("feed", "every", "cut", "mesh"),
    [
        ("arrays", 4, 9, 0),
        *(pytest.param("arrays", 3, cut, 1, marks=slow) for cut in (5, 6, 7, 13)),
        pytest.param("pydataset", 4, 10, 0, marks=slow),
        pytest.param("pydataset", 5, 17, 1, marks=slow),
        pytest.param("grain", 4, 10, 0, marks=slow),
        pytest.param("function", 4, 11, 1, marks=slow),
    ],
)
def test_a_loop_that_was_cut_ends_as_one_that_was_not(feed, every, cut, mesh, tmp_path):
    random.seed(5)
    whole = Loop(feed=feed).run()
    random.seed(5)
    with ktd.LoopCheckpoint(tmp_path, *(cuts := Loop(feed=feed)).objects()) as saved:
        cuts.run(saved, every, cut)
    random.seed(99)
    again = Loop(MESHES[mesh], "fsdp" if mesh else "tensor_parallel", feed=feed)
    with ktd.LoopCheckpoint(tmp_path, *again.objects()) as saved:
        again.run(saved, every)
        assert saved.steps[-1] == ROWS // BATCH * EPOCHS // every * every
    last = cut // every * every
    expected = {step: loss for step, loss in whole.losses.items() if step > last}
    assert sorted(again.losses) == sorted(expected)
    assert_close(again.losses, dict(sorted(expected.items())))
    for found, value in zip(again.state(), whole.state()):
        # A running sum is of hundreds.
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5)


def test_an_epoch_that_ended_is_not_read_again(tmp_path):
    loop = Loop()
    with ktd.LoopCheckpoint(tmp_path, *loop.objects(), asynchronous=True) as saved:
        assert saved.restore() == {}
        for batch in loop.dataset:
            loop.strategy.run(loop.step, (batch,))
        saved.save(6, epoch=1, note="between", best=0.5, done=False)
    again = Loop(MESHES[1], "fsdp")
    with ktd.LoopCheckpoint(tmp_path, *again.objects()) as saved:
        noted = saved.restore()
    assert noted == {"step": 6, "epoch": 1, "note": "between", "best": 0.5, "done": False}
    assert len(list(again.dataset)) == len(list(again.dataset)) == ROWS // BATCH


def test_the_model_is_read_by_restore_and_compared_with_what_is_there(tmp_path):
    loop = Loop()
    with ktd.LoopCheckpoint(tmp_path, *loop.objects()) as saved:
        loop.run(saved, 6, 7)
    other = Loop(MESHES[1], "fsdp")
    other.model.compile(keras.optimizers.Adam(0.01), "mse")
    report = ktd.restore(other.model, tmp_path, step=6)
    assert (report.kept, report.unused, report.optimizer) == ((), (), True)
    loop = Loop()
    with ktd.LoopCheckpoint(tmp_path, *loop.objects()) as saved:
        saved.restore()
    assert_close(other.model.get_weights(), loop.model.get_weights())
    # Other objects are one error, and leave what is there as it is.
    before = other.model.get_weights()
    with ktd.LoopCheckpoint(tmp_path, other.model, other.optimizer) as saved:
        with pytest.raises(ValueError, match=r"objects it was saved from.*unexpected"):
            saved.restore()
    assert_close(other.model.get_weights(), before)
    # A fit does not take it for one of its own.
    with pytest.raises(ktd.CheckpointError, match="has no state of a fit"):
        other.model.fit(X, Y, verbose=0, callbacks=[ktd.callbacks.Checkpoint(tmp_path)])


def test_a_damaged_one_is_left_out(tmp_path, caplog):
    loop = Loop()
    with ktd.LoopCheckpoint(tmp_path, *loop.objects()) as saved:
        loop.run(saved, 2, 5)
    manifest = tmp_path / "4/manifest/metadata"
    manifest.write_text(manifest.read_text().replace('"step"', '"stop"'))
    with ktd.LoopCheckpoint(tmp_path, *Loop().objects()) as saved:
        assert saved.restore() == {"step": 2, "epoch": 0}
    assert "Trying the previous checkpoint" in caplog.text


def test_a_checkpoint_of_a_fit_is_none_of_a_loop(tmp_path):
    loop = Loop()
    loop.model.compile("sgd", "mse")
    loop.model.fit(X, Y, verbose=0, callbacks=[ktd.callbacks.Checkpoint(tmp_path)])
    with ktd.LoopCheckpoint(tmp_path, loop.model) as saved:
        with pytest.raises(ktd.CheckpointError, match="has no position of a loop"):
            saved.restore()
    assert CheckpointReader(tmp_path).steps == [2]


def test_a_loop_that_looks_saves_before_the_signal_ends_it(tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        loop = Loop()
        with ktd.LoopCheckpoint(tmp_path, *loop.objects()) as saved:
            signal.raise_signal(signal.SIGTERM)
            assert len(came) == 1  # nobody has looked yet
            assert not saved.preempted
            for done, batch in enumerate(loop.dataset, 1):
                loop.strategy.run(loop.step, (batch,))
                if done == 2:
                    signal.raise_signal(signal.SIGTERM)
                if saved.preempted:
                    saved.save(done)
                    break
            assert (done, len(came)) == (2, 1)
        assert len(came) == 2
        assert saved.steps == [2]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_numbers_of_numpy_and_jax_are_numbers(tmp_path):
    numbers = {"epoch": np.int64(3), "best": np.float32(0.5), "last": jnp.float32(0.25)}
    with ktd.LoopCheckpoint(tmp_path, keras.Variable(1.0)) as saved:
        saved.save(1, **numbers, done=np.bool_(True))
        found = saved.restore()
    assert found == {"step": 1, "epoch": 3, "best": 0.5, "last": 0.25, "done": True}
    assert {type(value) for value in found.values()} == {int, float, bool}


def test_odd_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"takes models, optimizers.*'objects': 3|objects=3"):
        ktd.LoopCheckpoint(tmp_path, Loop().model, 3)
    with pytest.raises(ValueError, match="takes models, optimizers"):
        ktd.LoopCheckpoint(tmp_path)
    with ktd.LoopCheckpoint(tmp_path, Loop().model) as saved:
        with pytest.raises(ValueError, match=r"numbers and texts.*keras\.Variable"):
            saved.save(3, weights=np.ones(3))
