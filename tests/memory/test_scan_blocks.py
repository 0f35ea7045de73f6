"""Equal blocks that run as one loop: equal to those that run one by one."""

import jax
import keras
import numpy as np
import pytest
from helpers import built, compiled, largest_difference
from test_remat import (
    MESHES,
    TIME,
    WIDTH,
    Attending,
    Losing,
    Plain,
    convolutions,
    fitted,
    sequences,
)

import keras_tpu_dist as ktd

L = keras.layers
BLOCKS = 3


def in_a_row(make, x, blocks=BLOCKS):
    for i in range(blocks):
        x = make(i)(x)
    return x


def dense(x):
    def block(i):
        inner = [L.Dense(16, "relu"), L.Dropout(0.3), L.LayerNormalization(), L.Dense(WIDTH)]
        return keras.Sequential(inner, name=f"block_{i}")

    return in_a_row(block, x)


def convolution(x):
    return in_a_row(lambda i: convolutions(f"block_{i}"), x)


def attention(x):
    return in_a_row(lambda i: Attending(name=f"block_{i}"), L.Masking(0.0)(x))


def grouped(x):
    return in_a_row(lambda i: Attending("GroupQueryAttention", name=f"block_{i}"), x)


def again(x):
    """Blocks that are computed again: the policies act within the loop."""
    full = [ktd.remat(Attending(name=f"full_{i}"), "full") for i in range(2)]
    named = [ktd.remat(Attending(name=f"named_{i}"), ["attention", "up"]) for i in range(2)]
    part = [ktd.remat(Attending(name=f"part_{i}"), "attention") for i in range(2)]
    return in_a_row([*full, *named, *part].__getitem__, x, 6)


class Stacked(keras.Model):
    """A subclassed model: blocks in a list, called in a loop, one of them with a mask for all."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Masked(name=f"block_{i}") for i in range(BLOCKS)]
        self.norm = L.LayerNormalization(name="norm")

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)
        self.norm.build(shape)

    def call(self, x):
        mask = keras.ops.any(x != 0, axis=-1)[:, None]
        for block in self.blocks:
            x = block(x, attention_mask=mask)
        return self.norm(x)


class Masked(L.Layer):
    """Attention that is given its mask."""

    def build(self, shape):
        self.attention = L.MultiHeadAttention(2, 4, dropout=0.2)
        self.attention.build(shape, shape)

    def call(self, x, attention_mask):
        return x + self.attention(x, x, attention_mask=attention_mask)


def subclassed(x):
    return Stacked(name="stack")(x)


class Counting(Losing):
    """Adds losses, and counts its calls; gives the next one an array."""

    def call(self, x):
        results = super().call(x)
        return results["y"] + results["kept"][0]


def losing(x):
    return in_a_row(lambda i: Counting(name=f"block_{i}"), x)


def low_rank(x):
    layers = [L.Dense(WIDTH, "relu", name=f"block_{i}") for i in range(BLOCKS)]
    for layer in layers:
        layer.build(x.shape)
        layer.enable_lora(2)
    return in_a_row(layers.__getitem__, x)


def frozen(x):
    layers = [Plain(name=f"block_{i}") for i in range(5)]
    for layer in layers[:2]:
        layer.trainable = False
    return in_a_row(layers.__getitem__, x, 5)


def tapped(x):
    """What is between blocks is used once more at the end."""
    first = dense(x)
    return L.Add()([x, first, in_a_row(lambda i: Plain(name=f"plain_{i}"), first)])


class Leaning(L.Layer):
    """A block with a layer of its own and one that all blocks share."""

    def __init__(self, shared, **kwargs):
        super().__init__(**kwargs)
        self.shared, self.own = shared, L.Dense(WIDTH, "tanh")

    def build(self, shape):
        for layer in (self.shared, self.own):
            if not layer.built:
                layer.build(shape)

    def call(self, x):
        return x + self.own(self.shared(x))


def assigned(x):
    blocks = [ktd.assign(Plain(name=f"block_{i}"), 1) for i in range(BLOCKS)]
    return in_a_row(blocks.__getitem__, x)


def sharing(x):
    shared = L.Dense(WIDTH, name="shared")
    return in_a_row(lambda i: Leaning(shared, name=f"block_{i}"), x)


def classifier(body, **options):
    x = keras.Input((TIME, WIDTH))
    model = keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(body(x))), name="classifier")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return compiled(model, optimizer, loss, metrics=["accuracy"], **options)


def trained(body, scan, strategy, forward=False, **options):
    """Everything that two steps of 13 rows leave, seeds and moving statistics included."""
    epochs = options.pop("epochs", 1)
    model = built(lambda: classifier(body, **options), strategy)
    if scan:
        assert ktd.scan_blocks(model).runs
    return fitted(model, epochs, forward)


CASES = [
    (dense, "none", {"forward": True}),
    (dense, "fsdp", {"steps_per_execution": 4, "epochs": 4}),
    (convolution, "data8", {}),
    (convolution, "fsdp", {"forward": True}),
    (attention, "tensor", {"steps_per_execution": 4, "epochs": 2}),
    (attention, "fsdp", {"forward": True}),
    (grouped, "tensor", {}),
    (again, "fsdp", {}),
    (again, "none", {}),
    (subclassed, "tensor", {"forward": True}),
    (losing, "fsdp", {}),
    (losing, "data8", {"run_eagerly": True}),
    (low_rank, "fsdp", {}),
    (frozen, "data8", {}),
    (tapped, "fsdp", {}),
    (tapped, "none", {}),
    (sharing, "fsdp", {"forward": True}),
    (assigned, "tensor", {}),
]


def in_parts(found, expected):
    """Two structures of arrays, those that are larger than 1 as parts of the largest expected."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    scales = [max(1.0, float(np.abs(each).max())) for each in expected]
    return [[a / scale for a, scale in zip(each, scales)] for each in (found, expected)]


def assert_same(body, mesh, tolerance=1e-5, **options):
    strategy = MESHES[mesh]()
    plain = trained(body, False, None, **options)
    assert (
        largest_difference(*in_parts(trained(body, True, strategy, **options), plain)) <= tolerance
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "mesh", "options"),
    CASES,
    ids=lambda v: getattr(v, "__name__", None) if callable(v) else None,
)
def test_a_loop_leaves_what_blocks_one_by_one_on_one_device_leave(body, mesh, options):
    assert_same(body, mesh, **options)


@pytest.mark.slow
def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    plain, loop = (trained(dense, scan, MESHES["fsdp"](), forward=True) for scan in (False, True))
    assert largest_difference(*in_parts(loop, plain)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("scan", [(True, False), (False, True), (True, True)], ids=str)
def test_a_checkpoint_of_a_loop_goes_on_block_by_block_and_back(tmp_path, scan):
    x, y = sequences()
    options = {"batch_size": 5, "shuffle": False, "verbose": 0}
    straight = built(lambda: classifier(in_plain_blocks), None)
    straight.fit(x, y, epochs=4, **options)
    for first, mesh, epochs in zip(scan, ("fsdp", "tensor"), (2, 4)):
        model = built(lambda: classifier(in_plain_blocks), MESHES[mesh](), seed=epochs // 2)
        assert not first or ktd.scan_blocks(model).runs
        saved = ktd.callbacks.Checkpoint(tmp_path, every_epochs=1)
        model.fit(x, y, epochs=epochs, callbacks=[saved], **options)
    assert largest_difference(model.get_weights(), straight.get_weights()) <= 1e-5


def in_plain_blocks(x):
    return in_a_row(lambda i: Leaning(L.LayerNormalization(), name=f"block_{i}"), x)


@pytest.mark.slow
def test_in_replica_code():
    strategy, x = MESHES["data8"](), sequences(16)[0]
    model = built(lambda: classifier(dense), strategy)
    expected = model.predict(x, verbose=0)
    assert ktd.scan_blocks(model).runs
    found = strategy.run(model, args=(x,))
    # Each replica is given all rows.
    assert largest_difference(strategy.gather(found, 0), np.tile(expected, (8, 1))) <= 1e-5
