"""Datasets and values distributed over replicas; the numbers of tf.distribute's examples."""

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_tpu_dist as ktd


def lists(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.local_results(value)]


def test_tf_example_of_distribute_dataset(two):
    batches = two.experimental_distribute_dataset([np.array([0, 1]), np.array([2, 3])])
    result = [two.run(lambda x: x * 2, args=(x,)) for x in batches]
    # PerReplica:{0: [0], 1: [2]}, PerReplica:{0: [4], 1: [6]}
    assert [lists(two, r) for r in result] == [[[0], [2]], [[4], [6]]]
    assert len(batches) == 2


def test_tf_examples_of_distributed_values(two):
    """tf.distribute.DistributedValues, examples 1, 3, 4 and 5."""
    dataset = two.distribute_dataset(np.float32([5, 6, 7, 8]), batch_size=2)
    values = next(iter(dataset))
    assert repr(values) == (
        "PerReplica:{\n  0: array([5.], dtype=float32),\n  1: array([6.], dtype=float32)\n}"
    )
    assert lists(two, two.run(lambda x: x + 1.0, args=(values,))) == [[6.0], [7.0]]
    assert float(two.reduce("SUM", values, axis=0)) == 11.0
    assert lists(two, values) == [[5.0], [6.0]]


def test_tf_examples_of_values_from_a_function(two):
    array = np.array([3.0, 2.0, 1.0])
    for value_fn, expected in (
        (lambda ctx: np.float32(1), [1.0, 1.0]),
        (lambda ctx: array[ctx.replica_id_in_sync_group], [3.0, 2.0]),
        (lambda ctx: ctx.num_replicas_in_sync, [2, 2]),
    ):
        values = two.experimental_distribute_values_from_function(value_fn)
        assert lists(two, values) == expected


def test_tf_examples_of_the_contexts():
    context = ktd.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    assert context.replica_id_in_sync_group / context.num_replicas_in_sync == 0.5
    context = ktd.InputContext(num_replicas_in_sync=4)
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.get_per_replica_batch_size(32) == 8
    with pytest.raises(ValueError, match=r"divisible by the number of replicas.*=30"):
        context.get_per_replica_batch_size(30)


def test_values_that_do_not_fit_together(two):
    bad = {
        "number": lambda c: "text",
        "same structure": lambda c: [1] * (c.replica_id_in_sync_group + 1),
        "same dtype on all replicas, and the same shape": lambda c: np.ones(
            (2, c.replica_id_in_sync_group + 1)
        ),
    }
    for words, value_fn in bad.items():
        with pytest.raises(ValueError, match=words):
            two.distribute_values_from_function(value_fn)


def test_structures_batch_axes_and_elements_without_a_batch(devices):
    strategy = ktd.TPUStrategy(
        devices=devices[:2], batch_axis=({"time": 1, "anchors": None, "image": 0}, 0)
    )
    x = {"time": np.arange(12).reshape(3, 4), "anchors": np.arange(3), "image": np.zeros((4, 2))}
    ((x, y, weight),) = strategy.distribute_dataset([(x, np.arange(4), None)])
    assert weight is None
    assert isinstance(x["anchors"], np.ndarray | type(x["time"].array))
    first, second = strategy.local_results({"x": x, "y": y})
    assert first["x"]["time"].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert second["x"]["time"].tolist() == [[2, 3], [6, 7], [10, 11]]
    assert second["y"].tolist() == [2, 3]
    result = strategy.run(lambda x: (x["time"].sum(1), x["anchors"]), (x,))
    assert lists(strategy, result[1]) == [[0, 1, 2]] * 2
    assert strategy.gather(x["time"], 1).tolist() == np.arange(12).reshape(3, 4).tolist()
    assert strategy.reduce("sum", x["time"], axis=1).tolist() == [6, 22, 38]


class Squares(keras.utils.PyDataset):
    """Three batches of squares."""

    epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return (np.arange(4) + 4 * index) ** 2

    def on_epoch_end(self):
        self.epochs += 1


def test_datasets_generators_and_iterators_are_distributed(four):
    dataset = Squares()
    distributed = four.distribute_dataset(dataset)
    assert len(distributed) == 3
    for _ in range(2):
        assert [lists(four, batch) for batch in distributed][2] == [[64], [81], [100], [121]]
    assert dataset.epochs == 2
    once = four.distribute_dataset(np.full(4, i) for i in range(2))
    assert [lists(four, b)[0] for b in once] == [[0], [1]]
    assert list(once) == []
    with pytest.raises(TypeError, match="without len"):
        len(once)

    class TensorFlow:
        def as_numpy_iterator(self):
            return iter([{"x": np.arange(8)}])

    (batch,) = four.distribute_dataset(TensorFlow())
    assert lists(four, batch["x"])[3] == [6, 7]
    pairs = four.distribute_dataset(({"x": np.arange(9)}, np.arange(9)), batch_size=4)
    assert [lists(four, y)[0] for _, y in pairs] == [[0], [4], [8]]
    assert len(pairs) == 3
    tf_data = pytest.importorskip("tensorflow").data.Dataset.range(10).batch(4)
    assert [len(four.distribute_dataset(d)) for d in (tf_data, tf_data.repeat(2))] == [3, 6]
    with pytest.raises(TypeError, match=r"without len\(\)"):
        len(four.distribute_dataset(tf_data.repeat()))


def test_arrays_are_cut_along_their_batch_axis(devices):
    """Time-major arrays, and one without a batch, which each batch has whole."""
    strategy = ktd.TPUStrategy(devices=devices[:2], batch_axis=({"time": 1, "table": None}, 0))
    time, table, y = np.arange(3 * 7).reshape(3, 7), np.arange(2.0), np.arange(7)
    batches = list(strategy.distribute_dataset(({"time": time, "table": table}, y), batch_size=4))
    assert [batch[0]["table"].tolist() for batch in batches] == [[0, 1], [0, 1]]
    found = [strategy.gather(x["time"], 1) for x, _ in batches]
    assert np.concatenate(found, axis=1).tolist() == time.tolist()
    assert [strategy.gather(y, 0).tolist() for _, y in batches] == [[0, 1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="same number of rows"):
        strategy.distribute_dataset(({"time": time, "table": table}, time), batch_size=4)


def test_a_source_that_fails(four):
    def batches():
        yield np.arange(4)
        raise OSError("disk")

    for prefetch in (0, 2):
        strategy = ktd.TPUStrategy(devices=list(four.mesh.devices.flat), prefetch=prefetch)
        iterator = iter(strategy.distribute_dataset(batches()))
        assert lists(strategy, next(iterator))[3] == [3]
        with pytest.raises(OSError, match="disk"):
            next(iterator)


def test_datasets_from_a_function(four):
    def dataset_fn(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        size = context.get_per_replica_batch_size(8)
        return [(np.arange(size) + 10 * i, np.float32(i)) for i in range(6)]

    distributed = four.distribute_datasets_from_function(dataset_fn)
    assert len(distributed) == 2
    (x, scalar), (last, _) = distributed
    assert lists(four, x) == [[0, 1], [10, 11], [20, 21], [30, 31]]
    assert lists(four, scalar) == [0, 1, 2, 3]
    # the dataset ends within the step: the other replicas get no rows
    assert lists(four, last) == [[40, 41], [50, 51], [], []]
    mixed = four.distribute_datasets_from_function(
        lambda c: map(np.array, [[1, 2, 3], [4], [5, 6], [7]])
    )
    (x,) = mixed
    assert lists(four, x) == [[1, 2, 3], [4], [5, 6], [7]]
    assert four.gather(x, 0).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_bad_datasets(four):
    x = np.arange(8)
    for use in (
        lambda: four.distribute_dataset(x),
        lambda: four.distribute_dataset((x, x)),
        lambda: four.distribute_dataset([x], batch_size=4),
    ):
        with pytest.raises(ValueError, match=r"iterable of global batches.*batch_size=32"):
            use()
    with pytest.raises(TypeError, match=r"same options as run.*prefetch"):
        four.distribute_dataset([x], 2)  # pyright: ignore
    with pytest.raises(ValueError, match="same number of rows"):
        four.distribute_dataset((x, x[:3]), batch_size=4)
    with pytest.raises(ValueError, match="same number of rows"):
        next(iter(four.distribute_dataset([(x, x[:3])])))
    with pytest.raises(ValueError, match="at least one row"):
        next(iter(four.distribute_dataset([x[:0]])))
    for other in (x.astype("float32"), x[:, None], x.reshape(4, 2)):
        with pytest.raises(ValueError, match="one dtype, and one shape apart from their rows"):
            next(iter(four.distribute_datasets_from_function(lambda c, o=other: [x, o, x, x])))
    with pytest.raises(ValueError, match="one structure"):
        next(iter(four.distribute_datasets_from_function(lambda c: [x, (x, x), x, x])))


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(
    rows=st.integers(1, 11),
    replicas=st.sampled_from([1, 2, 3, 8]),
    axis=st.integers(0, 1),
    op=st.sampled_from(["sum", "mean", "max", "min"]),
)
def test_distributed_batches_gather_and_reduce_as_the_batch_itself(rows, replicas, axis, op):
    strategy = ktd.TPUStrategy(devices=jax.devices()[:replicas], batch_axis=axis)
    x = np.random.default_rng(rows).integers(-9, 9, (rows, 2)).astype("float32")
    x = x if axis == 0 else x.T
    (value,) = strategy.distribute_dataset([x])
    assert len(strategy.local_results(value)) == replicas
    np.testing.assert_array_equal(strategy.gather(value, axis), x)
    expected = getattr(np, op)(x, axis=axis)
    np.testing.assert_allclose(strategy.reduce(op, value, axis=axis), expected, 1e-6)
    np.testing.assert_allclose(strategy.reduce(op, value, axis=(0, 1)), getattr(np, op)(x), 1e-6)
