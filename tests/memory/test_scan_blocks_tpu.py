"""What the TPU compiler makes of equal blocks as one loop."""

import logging

import keras
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.common import once

L = keras.layers
ROWS, WIDTH, BLOCKS = 8192, 256, 6

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]


def build(scan):
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = inputs = keras.Input((WIDTH,))
    for i in range(BLOCKS):
        inner = [L.LayerNormalization(), L.Dense(4 * WIDTH, "gelu"), L.Dense(WIDTH)]
        x = keras.Sequential(inner, name=f"block_{i}")(x)
    model = keras.Model(inputs, L.Dense(1)(x))
    model.compile("adam", "mse")
    if scan:
        assert ktd.scan_blocks(model).runs
    return model


def costs(scan):
    strategy = ktd.TPUStrategy(layout="fsdp", topology="v5e:2x2")
    run = ktd.dry_run(lambda: build(scan), strategy, batch_size=ROWS)
    sent = sum(each.sent_bytes * each.times for each in run.cost.collectives)
    return run.total_bytes, sent


def test_a_loop_takes_no_more_memory_and_collectives():
    """`python benchmarks/scan_blocks.py` has more layers, attention, and remat."""
    unrolled, scanned = map(costs, (False, True))
    assert all(a <= 1.05 * b for a, b in zip(scanned, unrolled))


class Attending(L.Layer):
    """Attention of a size for which there is a kernel."""

    def build(self, shape):
        self.attention = L.GroupQueryAttention(128, 4, 2)
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=True)


def test_blocks_that_call_a_kernel_are_equal(caplog):
    """The kernel is traced once: in the first block with another context than in the others."""

    def attending():
        x = inputs = keras.Input((512, 256))
        for i in range(3):
            x = Attending(name=f"block_{i}")(x)
        model = keras.Model(inputs, L.Dense(1)(x))
        model.compile("sgd", "mse")
        ktd.scan_blocks(model)
        once.forget()
        return model

    caplog.set_level(logging.INFO, "keras_tpu_dist")
    ktd.dry_run(attending, ktd.TPUStrategy(topology="v5e:2x4"), batch_size=8)
    (said,) = [r.getMessage() for r in caplog.records if "scan_blocks:" in r.getMessage()]
    assert "3 blocks Attending as one" in said
    assert "on its own" not in said
