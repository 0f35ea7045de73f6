"""What the TPU compiler makes of equal blocks as one loop."""

import keras
import pytest

import keras_tpu_dist as ktd

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
    pytest.importorskip("libtpu")
    strategy = ktd.TPUStrategy(layout="fsdp", topology="v5e:2x2")
    run = ktd.dry_run(lambda: build(scan), strategy, batch_size=ROWS)
    sent = sum(each.sent_bytes * each.times for each in run.cost.collectives)
    return run.total_bytes, sent


def test_a_loop_takes_no_more_memory_and_collectives():
    """`python benchmarks/scan_blocks.py` has more layers, attention, and remat."""
    unrolled, scanned = map(costs, (False, True))
    assert all(a <= 1.05 * b for a, b in zip(scanned, unrolled))
