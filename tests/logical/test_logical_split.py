"""Tensors split over the logical devices of each replica, as TPUStrategy would."""

import itertools
import math

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, results

import keras_tpu_dist as ktd
from keras_tpu_dist.logical.devices import ReplicateToLogicalDevices, SplitToLogicalDevices

L = keras.layers


def factorisations(number, rank):
    """All tuples of `rank` positive integers with this product."""
    sides = [n for n in range(1, number + 1) if number % n == 0]
    return [p for p in itertools.product(sides, repeat=rank) if math.prod(p) == number]


def line(size, replicas=None):
    """Replicas of `size` simulated devices."""
    return ktd.DeviceAssignment.build(computation_shape=(size,), num_replicas=replicas)


def assert_blocks(assignment, array, partition, split):
    """Every logical device holds numpy's block of its replica's rows."""
    held = {shard.device: np.asarray(shard.data) for shard in split.addressable_shards}
    rows = array.shape[0] // assignment.num_replicas
    numbers = np.arange(assignment.num_cores_per_replica).reshape(partition)
    for replica in range(assignment.num_replicas):
        part = array[replica * rows : (replica + 1) * rows]
        sizes = [n // p for n, p in zip(part.shape, partition)]
        for core in range(assignment.num_cores_per_replica):
            (index,) = np.argwhere(numbers == core)
            block = part[tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, sizes))]
            np.testing.assert_array_equal(held[assignment.tpu_device(replica, core)], block)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 4, 2])
def test_every_factorisation_over_four_dimensions(size):
    """1, 2 and 4 replicas of 8, 4 and 2 logical devices, 35 partitions in all: one program each."""
    assignment = line(size)
    strategy = ktd.TPUStrategy(assignment)
    partitions = factorisations(size, 4)
    assert len(partitions) == {8: 20, 4: 10, 2: 4}[size]
    array = np.arange(16 * 8 * 8 * 8, dtype="float32").reshape(16, 8, 8, 8)
    traced = jax.jit(lambda x: [strategy.split_to_logical_devices(x, p) for p in partitions])
    for partition, split in zip(partitions, traced(array)):
        assert_blocks(assignment, array, partition, split)
        assert_blocks(
            assignment, array, partition, strategy.split_to_logical_devices(array, partition)
        )


def test_other_ranks_and_the_batch_axis():
    strategy = ktd.TPUStrategy(line(4))
    names = ("logical_0", "logical_1")
    both = strategy.split_to_logical_devices(np.ones((8, 4)), [2, 2])
    assert tuple(both.sharding.spec) == (("data", "logical_0"), "logical_1")
    vector = strategy.split_to_logical_devices(np.ones(8), [4])
    assert tuple(vector.sharding.spec) == (("data", *names),)
    whole = strategy.split_to_logical_devices(np.ones((4, 3)), [4, 1], batch_axis=None)
    assert tuple(whole.sharding.spec) == (names, None)
    time_major = strategy.split_to_logical_devices(np.ones((4, 2, 3)), [4, 1, 1], batch_axis=1)
    assert tuple(time_major.sharding.spec) == (names, "data", None)
    last = strategy.split_to_logical_devices(np.ones((4, 2)), [4, 1], batch_axis=-1)
    assert tuple(last.sharding.spec) == (names, "data")
    replicated = strategy.replicate_to_logical_devices(both)
    assert tuple(replicated.sharding.spec) == ("data", None)
    assert strategy.replicate_to_logical_devices(np.float32(3)).sharding.is_fully_replicated
    table = strategy.replicate_to_logical_devices(np.ones((3, 2)), batch_axis=None)
    assert table.sharding.is_fully_replicated


def test_plain_meshes_express_what_their_axes_can():
    strategy = ktd.TPUStrategy({"rows": 2, "data": 2, "columns": 2})
    assert strategy.num_logical_devices == 4
    assert strategy.logical_axes == ("rows", "columns")
    x = np.ones((4, 4, 4))
    spec = strategy.split_to_logical_devices(x, [1, 2, 2]).sharding.spec
    assert tuple(spec) == ("data", "rows", "columns")
    spec = strategy.split_to_logical_devices(x, [1, 1, 4]).sharding.spec
    assert tuple(spec) == ("data", None, ("rows", "columns"))
    one_axis = ktd.TPUStrategy({"data": 1, "model": 8})
    assert one_axis.split_to_logical_devices(np.ones((1, 8)), [1, 8]).sharding.spec[1] == "model"
    with pytest.raises(
        ValueError,
        match=r"product of consecutive logical axes.*\[1, 2, 4, 1\].*\{'model': 8\}.*"
        r"mesh=\{'data': 1, 'part_0': 2, 'part_1': 4\}.*DeviceAssignment",
    ):
        one_axis.split_to_logical_devices(np.ones((4, 8, 8, 3)), [1, 2, 4, 1])
    rewritten = ktd.TPUStrategy({"data": 1, "part_0": 2, "part_1": 4})
    assert rewritten.split_to_logical_devices(np.ones((4, 8, 8, 3)), [1, 2, 4, 1]).size
    six = ktd.TPUStrategy(ktd.DeviceAssignment.build(jax.devices()[:6], (6,)))
    with pytest.raises(ValueError, match=r"\[3, 2\].*'part_0': 3, 'part_1': 2\} with n") as error:
        six.split_to_logical_devices(np.ones((3, 2)), [3, 2])
    assert "DeviceAssignment" not in str(error.value)


STRATEGY_ERRORS = [
    ((2, 8), [1, 4, 1], r"one number for every dimension of the tensor.*\(2, 8\).*Give 2 numbers"),
    ((2, 6), [1, 4], r"Dimension 1 must be divisible.*\(2, 6\).*\[1, 4\].*Pad it to 8"),
    ((2, 8), [1, 2], r"product of partition_dimensions must be.*replica, 4\..*\[1, 2\]"),
    ((2, 8), [1, 8], r"\[1, 8\].*build the mesh with DeviceAssignment"),
    ((3, 8), [1, 4], r"Outside of compiled code, the batch must be divisible.*multiple of 2 rows"),
]


@pytest.mark.parametrize(("shape", "partition", "words"), STRATEGY_ERRORS)
def test_the_three_errors_and_ours(shape, partition, words):
    strategy = ktd.TPUStrategy(line(4))
    with pytest.raises(ValueError, match=words):
        strategy.split_to_logical_devices(np.ones(shape), partition)
    if "Outside" not in words:
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(
                lambda x: strategy.split_to_logical_devices(x, partition), np.ones(shape)
            )
        with pytest.raises(ValueError, match=words.replace(r"\(2,", r"\(None,")):
            strategy.split_to_logical_devices(keras.Input(shape[1:]), partition)


def test_a_batch_axis_that_is_none():
    strategy = ktd.TPUStrategy(line(4))
    for call in (
        lambda x: strategy.split_to_logical_devices(x, [1, 4], batch_axis=2),
        lambda x: strategy.replicate_to_logical_devices(x, batch_axis=2),
    ):
        with pytest.raises(ValueError, match=r"batch_axis is a dimension.*batch_axis=2"):
            call(np.ones((2, 4)))


def test_arrays_on_a_slice_that_is_only_named():
    strategy = ktd.TPUStrategy(ktd.DeviceAssignment.build("v5e:2x4", (1, 2)))
    with pytest.raises(ValueError, match=r"cannot hold arrays.*topology='v5e:2x4'.*compiled"):
        strategy.split_to_logical_devices(np.ones((4, 2)), [1, 2])


def test_aliases():
    kind = ktd.TPUStrategy
    for name in ("split_to", "replicate_to", "assign_to"):
        stem = next(n for n in dir(kind) if n.startswith(name))
        assert getattr(kind, f"experimental_{stem}") is getattr(kind, stem)


def test_gradients_and_values_equal_one_device():
    """20 partitions on 1, and 4 on 4 replicas, in one program each; 13 rows do not divide."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 3, 3, 4)).astype("float32")
    for size in (8, 2):
        strategy = ktd.TPUStrategy(line(size))
        x = rng.normal(size=(13, 8, 8, 8)).astype("float32")
        partitions = factorisations(size, 4)

        def loss(x, w, partition=None):
            w = w[..., :1, :]
            if partition is not None:
                x = strategy.split_to_logical_devices(x, partition)
            y = jax.lax.conv_general_dilated(
                x,
                jax.numpy.tile(w, (1, 1, 1, 8)).reshape(3, 3, 8, 4),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            if partition is not None:
                y = strategy.replicate_to_logical_devices(y)
            return jax.numpy.tanh(y).mean()

        expected = jax.value_and_grad(loss, (0, 1))(x, w)
        some = partitions[::3]

        @jax.jit
        def found(x, w):
            return [jax.value_and_grad(lambda x, w: loss(x, w, p), (0, 1))(x, w) for p in some]

        for each in found(x, w):
            assert_close(list(jax.tree.leaves(each)), list(jax.tree.leaves(expected)))


class SplitImages(L.Layer):
    """Splits within call."""

    def __init__(self, partition, strategy, **kwargs):
        super().__init__(**kwargs)
        self.partition, self.strategy = partition, strategy

    def call(self, x):
        if self.strategy is not None:
            x = self.strategy.split_to_logical_devices(x, self.partition)
        return x


def cnn(strategy, partition, functional):
    inputs = keras.Input((8, 8, 3))
    x = inputs
    if functional and strategy is not None:
        x = strategy.split_to_logical_devices(x, partition)
    elif not functional:
        x = SplitImages(partition, strategy)(x)
    x = L.Conv2D(4, 3, padding="same", activation="relu", name="first")(x)
    x = L.BatchNormalization(name="norm")(x)
    x = L.Conv2D(4, 3, strides=2, padding="same", name="second")(x)
    x = L.MaxPooling2D()(x)
    if functional and strategy is not None:
        x = strategy.replicate_to_logical_devices(x)
    x = L.Dense(3, activation="softmax", name="out")(L.Flatten()(x))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "partition", "functional"),
    [
        (8, (1, 2, 4, 1), True),
        (4, (1, 2, 2, 1), False),
        (4, (2, 2, 1, 1), True),
    ],
)
def test_a_spatially_split_cnn_equals_one_device(size, partition, functional):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(21, 8, 8, 3)).astype("float32"), rng.integers(0, 3, 21)
    expected = results(
        built(lambda: cnn(None, partition, True), None),
        x,
        y,
        batch_size=8,
        evaluate=False,
    )
    strategy = ktd.TPUStrategy(line(size))
    model = built(lambda: cnn(strategy, partition, functional), strategy)
    assert_close(results(model, x, y, batch_size=8, evaluate=False), expected)


def test_the_convolution_is_computed_in_parts():
    strategy = ktd.TPUStrategy(line(8))
    model = built(lambda: cnn(strategy, (1, 2, 4, 1), True), strategy)

    def forward(x):
        return model.stateless_call(model.trainable_variables, model.non_trainable_variables, x)[0]

    with strategy.scope():
        text = jax.jit(forward).lower(np.ones((2, 8, 8, 3), "float32")).compile().as_text()
    assert "f32[2,4,2,4]" in text  # (batch, 8/2, 8/4, channels)
    assert "f32[2,8,8,4]" not in text
    assert "collective-permute" in text  # borders of neighbours


def test_functional_models_are_saved_with_their_splits(tmp_path):
    strategy = ktd.TPUStrategy(line(4))
    model = built(lambda: cnn(strategy, (1, 2, 2, 1), True), strategy)
    kinds = [type(layer) for layer in model.layers]
    assert kinds.count(SplitToLogicalDevices) == kinds.count(ReplicateToLogicalDevices) == 1
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 3)).astype("float32")
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras", compile=False)
    (split,) = [layer for layer in loaded.layers if isinstance(layer, SplitToLogicalDevices)]
    assert (split.partition_dimensions, split.batch_axis) == ((1, 2, 2, 1), 0)
    assert_close(loaded.predict(x, verbose=0), expected)  # on one device
    with ktd.TPUStrategy(line(2)).scope():
        with pytest.raises(ValueError, match=r"product of partition_dimensions.*replica, 2\."):
            loaded.predict(x, verbose=0)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert_close(clone.predict(x, verbose=0), expected)


@pytest.mark.parametrize("rows", [pytest.param(12, marks=pytest.mark.slow), 13])
def test_rows_that_do_not_divide_outside_of_compiled_code(rows):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")

    def build(strategy=None):
        inputs = keras.Input((4,))
        h = L.Dense(8)(inputs)
        if strategy is not None:
            h = strategy.split_to_logical_devices(h, [1, 2])
            h = strategy.replicate_to_logical_devices(h)
        return compiled(keras.Model(inputs, L.Dense(1)(h)), "sgd", "mse", run_eagerly=True)

    model, expected = built(lambda: build(strategy), strategy), built(build, None)
    for name in ("predict", "__call__"):
        options = {"verbose": 0} if name == "predict" else {}
        assert_close(getattr(model, name)(x, **options), getattr(expected, name)(x, **options))
    losses = [m.fit(x, x[:, :1], batch_size=rows, verbose=0).history for m in (model, expected)]
    assert_close(*[each["loss"] for each in losses])


def test_a_layer_that_splits_uneven_rows_outside_of_compiled_code_says_so():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    with strategy.scope():
        model = keras.Sequential([L.Dense(8), SplitImages([1, 2], strategy), L.Dense(1)])
        model.build((None, 4))
        model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((13, 4), "float32")
    with pytest.raises(ValueError, match="Outside of compiled code, the batch must be divisible"):
        model.fit(x, x[:, :1], batch_size=13, verbose=0)


@pytest.mark.slow
def test_dtypes_and_masks_pass_through():
    strategy = ktd.TPUStrategy(line(2))
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = keras.Input((4, 6), dtype="float32")
    assert strategy.split_to_logical_devices(x, [1, 1, 2]).dtype == "float32"
    ids = strategy.replicate_to_logical_devices(keras.Input((4,), dtype="int32"))
    assert ids.dtype == "int32"
    keras.config.set_dtype_policy("float32")

    def build(strategy=None):
        tokens = keras.Input((6,), dtype="int32")
        h = L.Embedding(9, 4, mask_zero=True)(tokens)
        if strategy is not None:
            h = strategy.split_to_logical_devices(h, [1, 1, 2])
        return compiled(keras.Model(tokens, L.Dense(1)(L.LSTM(3)(h))), "sgd", "mse")

    x = np.random.default_rng(0).integers(0, 3, (13, 6))
    expected = results(built(build, None), x, np.ones(13), batch_size=8, evaluate=False)
    model = built(lambda: build(strategy), strategy)
    assert_close(results(model, x, np.ones(13), batch_size=8, evaluate=False), expected)


def test_within_a_function_of_one_replica():
    """Where strategy.run has split the batch already, only the logical axes are left."""
    strategy = ktd.TPUStrategy(line(4))
    mesh = strategy.mesh
    P = jax.sharding.PartitionSpec

    def replica(x):
        y = strategy.split_to_logical_devices(x * 2, [1, 2, 2])
        return strategy.replicate_to_logical_devices(jax.numpy.tanh(y)) + y

    run = jax.jit(
        jax.shard_map(
            replica, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
    )
    x = np.random.default_rng(0).normal(size=(6, 4, 4)).astype("float32")
    assert_close(run(x), np.tanh(2 * x) + 2 * x)
    assert "f32[3,2,2]" in run.lower(x).compile().as_text()
