"""Every kind of input, every batch axis, nothing read too early."""

from collections import OrderedDict
from typing import NamedTuple

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, mlp, sequential
from jax.sharding import PartitionSpec
from pydatasets import in_batches

import keras_tpu_dist as ktd
from keras_tpu_dist.input.batch_axis import element_names
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.input.iterator import DeviceIterator

X, Y = data(29)


@pytest.fixture
def mesh():
    return ktd.TPUStrategy({"data": 4, "model": 2}).mesh


def _trimmed(placer, batch):
    return jax.jit(lambda b: jax.tree.map(lambda a: a * 1, placer.trim(b)))(placer.place(batch))


@pytest.mark.parametrize("rows", range(1, 14))
def test_place_and_trim_return_the_batch(mesh, rows):
    placer = BatchPlacer(mesh, ("data",))
    batch = ({"a": np.arange(rows * 3.0).reshape(rows, 3), "b": None}, [np.arange(rows)])
    placed = placer.place(batch)
    assert placed.ragged == bool(rows % 4)
    assert placed.data[0]["a"].shape[0] == -(-rows // 4) * 4
    assert placed.data[0]["a"].sharding.spec == PartitionSpec("data")
    found = _trimmed(placer, batch)
    assert found[0]["b"] is None
    assert_close([found[0]["a"], found[1][0]], [batch[0]["a"], batch[1][0]], 0)


def test_several_data_axes_and_none():
    strategy = ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2})
    placer = BatchPlacer(strategy.mesh, strategy.data_axes)
    assert placer.place(X[:8]).data.sharding.spec == PartitionSpec(("data", "fsdp"))
    assert placer.place(X[:5]).data.shape[0] == 8
    whole = BatchPlacer(strategy.mesh, ()).place(X[:5])
    assert whole.data.sharding.spec == PartitionSpec()
    assert not whole.ragged


@pytest.mark.parametrize(
    ("batch_axis", "batch", "axes"),
    [
        (0, (X, Y), [0, 0]),
        (1, (X, X), [1, 1]),
        ((1, 0), (X.T, Y), [1, 0]),
        ((1, 0), (X.T, Y, Y), [1, 0, 0]),
        ((1, 0), (X.T,), [1]),
        ((1, 0), X.T, [1]),
        (None, (X, Y), [None, None]),
        ((0, None), (X, Y), [0, None]),
        (({"a": 0, "b": None}, 0), ({"b": X, "a": X}, Y), [0, None, 0]),
        ({"b": None}, ({"b": X, "a": X}, Y), [0, None, 0]),
        ({"b": None}, (OrderedDict(b=X, a=X), Y), [None, 0, 0]),
        (((0, None), 0), ([X, X], Y), [0, None, 0]),
        ((None,), ([X, X], Y), [None, None, 0]),
        (0, (X, np.float32(3.0)), [0, None]),
        (0, (X, None, Y), [0, 0]),
        ((0, 0, {"head": 1}), (X, Y, None), [0, 0]),
    ],
)
def test_batch_axis(mesh, batch_axis, batch, axes):
    placed = BatchPlacer(mesh, ("data",), batch_axis).place(batch)
    assert [slot.axis for slot in placed.slots] == axes


@pytest.mark.parametrize(
    ("batch_axis", "batch", "words"),
    [
        (({"anchor": 0}, 0), ({"anchors": X}, Y), r"prefix.*Did you mean 'anchors'\?"),
        (((0, 0, 0), 0), ([X, X], Y), r"must be a prefix of the batch's.*batch\[0\]"),
        (({"a": 0}, 0), (X, Y), r"must be a prefix.*batch='ndarray'"),
        ((0, 1), (X, Y), r"must have its batch axis: dimension 1.*element='y', shape=\(29,\)"),
        (0, (X, Y[:28]), r"same number of rows.*x with 29 rows and y with 28.*None in its place"),
        (0, (X[:0], Y[:0]), r"at least one row.*element='x', shape=\(0, 6\)"),
        (0, ({"t": np.array(["a", "b"])},), r"must be numeric.*element=\"x\['t'\]\".*StringLookup"),
    ],
)
def test_batches_that_do_not_fit(mesh, batch_axis, batch, words):
    with pytest.raises(ValueError, match=words):
        BatchPlacer(mesh, ("data",), batch_axis).place(batch)


def test_iterator_looks_ahead_but_not_beyond_the_epoch():
    read = []

    def source():
        for i in range(100):
            read.append(i)
            yield i

    iterator = DeviceIterator(source(), prefetch=3, steps_per_epoch=5)
    ahead = []
    for _ in range(10):
        list(iterator.launches(1, lambda batch: batch))
        ahead.append(len(read))
    assert ahead == [4, 5, 5, 5, 5, 9, 10, 10, 10, 10]


def _fit(strategy, x, y=None, build=mlp, **options):
    model = built(build, strategy)
    history = model.fit(x, y, shuffle=False, verbose=0, **options).history
    return [history, model.get_weights()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "list", "float64", "pydataset", "on_mesh"])
def test_kinds_of_arrays(kind):
    expected = _fit(None, X, Y, batch_size=10)
    x, y, options = X, Y, {"batch_size": 10}
    strategy = ktd.TPUStrategy()
    if kind == "jax":
        x, y = jax.numpy.asarray(X), jax.numpy.asarray(Y)
    elif kind == "on_mesh":
        x = jax.device_put(X, jax.sharding.NamedSharding(strategy.mesh, PartitionSpec()))
    elif kind == "float64":
        x = X.astype("float64")
    elif kind == "list":
        x, y, options = [X], [Y], {"batch_size": 10}
    elif kind == "pydataset":
        x, y, options = in_batches(10, X[:30], Y[:30]), None, {}
    if kind == "list":

        def build():
            model = keras.Model(*_functional())
            model.compile("adam", "sparse_categorical_crossentropy")
            return model

        expected = _fit(None, [X], Y, build=build, batch_size=10)
        assert_close(_fit(strategy, x, Y, build=build, **options), expected)
        return
    assert_close(_fit(strategy, x, y, **options), expected)


def _functional():
    one = keras.Input((6,))
    return [one], keras.layers.Dense(3, activation="softmax")(one)


class _OfOneDense(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)


@pytest.mark.slow
def test_time_major_input():
    class TimeMajor(_OfOneDense):
        def call(self, x):
            return self.dense(keras.ops.mean(x, axis=0))

    def build():
        model = TimeMajor()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    rng = np.random.default_rng(0)
    batches = [
        (rng.normal(size=(7, rows, 6)).astype("float32"), rng.integers(0, 3, rows))
        for rows in (13, 16, 5)
    ]
    strategy = ktd.TPUStrategy(batch_axis=(1, 0))
    expected = _fit(None, (b for b in batches), build=build, steps_per_epoch=3)
    found = _fit(strategy, (b for b in batches), build=build, steps_per_epoch=3)
    assert_close(found, expected)
    model = built(build, strategy)
    assert model.predict_on_batch(batches[0][0]).shape == (13, 3)
    assert model.predict((b[:1] for b in batches), steps=3, verbose=0).shape == (34, 3)


def test_rank_0_and_shared_elements():
    class Scaled(_OfOneDense):
        def call(self, inputs):
            return self.dense(inputs["a"] @ inputs["basis"]) * inputs["scale"]

    def build():
        model = Scaled()
        model.compile("adam", "mse")
        return model

    rng = np.random.default_rng(0)
    basis = rng.normal(size=(6, 5)).astype("float32")

    def batches():
        for rows in (13, 8, 3):
            x = {
                "a": rng.normal(size=(rows, 6)).astype("float32"),
                "basis": basis,
                "scale": np.float32(0.5),
            }
            yield x, rng.normal(size=(rows, 3)).astype("float32")

    stored = list(batches())
    expected = _fit(None, (b for b in stored), build=build, steps_per_epoch=3)
    strategy = ktd.TPUStrategy(batch_axis={"basis": None})
    found = _fit(strategy, (b for b in stored), build=build, steps_per_epoch=3)
    assert_close(found, expected)
    with pytest.raises(ValueError, match=r"same number of rows.*x\['basis'\] with 6"):
        _fit(ktd.TPUStrategy(), (b for b in stored), build=build)


def test_batches_whose_rank_or_structure_changes():
    class Flexible(_OfOneDense):
        def call(self, x):
            return self.dense(x if len(x.shape) == 2 else keras.ops.mean(x, axis=1))

    def build():
        model = Flexible()
        model.compile("adam", "mse")
        return model

    rng = np.random.default_rng(0)
    shapes = [(13, 6), (8, 4, 6), (5, 2, 6), (16, 6)]
    stored = [
        (rng.normal(size=s).astype("float32"), rng.normal(size=(s[0], 3)).astype("float32"))
        for s in shapes
    ]
    stored[2] = (*stored[2], np.linspace(0, 1, 5, dtype="float32"))
    expected = _fit(None, (b for b in stored), build=build, steps_per_epoch=4)
    found = _fit(ktd.TPUStrategy(), (b for b in stored), build=build, steps_per_epoch=4)
    assert_close(found, expected)


@pytest.mark.slow
def test_one_trace_for_each_true_shape(monkeypatch):
    # A remainder is traced once more, to see whether it may share a program.
    monkeypatch.setattr(BatchPlacer, "pads_rows", False)
    traces = []

    class Counting(keras.Sequential):
        def train_step(self, state, data):
            traces.append(("train", data[0].shape))
            return super().train_step(state, data)

        def test_step(self, state, data):
            traces.append(("test", data[0].shape))
            return super().test_step(state, data)

        def predict_step(self, state, data):
            traces.append(("predict", keras.tree.flatten(data)[0].shape))
            return super().predict_step(state, data)

    def build():
        model = Counting(
            [
                keras.Input((6,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("kernel", (None, ("model",)))][:0])
    model = built(build, strategy)
    with jax.log_compiles(False):
        for _ in range(2):
            model.fit(X, Y, batch_size=10, epochs=2, verbose=0, validation_data=(X, Y))
            model.evaluate(X, Y, batch_size=10, verbose=0)
            model.predict(X, batch_size=10, verbose=0)
    assert sorted(traces) == [
        (kind, (rows, 6)) for kind in ("predict", "test", "train") for rows in (9, 10)
    ]


NO_DATA = r"need data with at least one row.*Pass arrays, a generator"


def test_no_data():
    model = built(mlp, ktd.TPUStrategy())
    for name in ("fit", "evaluate", "predict"):
        with pytest.raises(ValueError, match=NO_DATA):
            getattr(model, name)(None)
        with pytest.raises(ValueError, match=NO_DATA):
            getattr(model, name)(X[:0])
    with pytest.raises(ValueError, match=NO_DATA):
        model.fit()
    with pytest.raises(ValueError, match=NO_DATA):
        model.train_on_batch(X[:0], Y[:0])

    class Empty(keras.utils.PyDataset):
        def __len__(self):
            return 0

        def __getitem__(self, index):
            raise IndexError(index)

    # Keras 3.16 asks for a batch earlier.
    is_new = not keras.__version__.startswith("3.15.")
    words = "train or validation dataset is empty" if is_new else "input without any batch"
    with pytest.raises(ValueError, match=words):
        model.fit(Empty(), shuffle=False, verbose=0)


def test_sparse_input_is_replicated(mesh):
    from jax.experimental import sparse

    matrix = sparse.BCOO.fromdense(np.eye(5, dtype="float32"))
    placed = BatchPlacer(mesh, ("data",)).place((matrix, np.arange(5)))
    assert [slot.axis for slot in placed.slots] == [None, 0]
    assert_close(placed.data[0].todense(), np.eye(5), 0)


@pytest.mark.parametrize("sparse_first", [False, True])
def test_sparse_and_dense_batches_of_one_shape(sparse_first):
    from jax.experimental import sparse

    dense, y = np.eye(5, 3, dtype="float32"), np.ones((5, 4), "float32")
    batches = [dense, sparse.BCOO.fromdense(dense, n_batch=1)]
    batches = batches[::-1] if sparse_first else batches

    def one(x):
        yield x, y

    def build():
        return sequential(3, keras.layers.Dense(4))

    models = [built(build, strategy) for strategy in (ktd.TPUStrategy(), None)]
    for model in models:
        for batch in batches:
            model.fit(one(batch), steps_per_epoch=1, shuffle=False, verbose=0)
    assert_close(models[0].get_weights(), models[1].get_weights())


def test_a_batch_with_names():
    class Batch(NamedTuple):
        x: np.ndarray
        y: np.ndarray

    batch = Batch(np.zeros((5, 2)), np.zeros((4, 1)))
    assert element_names(batch) == ["x", "y"]
    placer = ktd.TPUStrategy().placer
    with pytest.raises(ValueError, match=r"same number of rows.*x with 5 rows and y with 4"):
        placer.place(batch)
    placed = placer.place(Batch(np.zeros((5, 2)), np.zeros((5, 1))))
    assert isinstance(placed.data, Batch)
