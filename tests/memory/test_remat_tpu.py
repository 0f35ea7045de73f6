"""What the TPU compiler makes of layers that are computed again."""

import keras
import pytest
from helpers import compiled

import keras_tpu_dist as ktd

L = keras.layers
ROWS, WIDTH, BLOCKS = 16384, 128, 4

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]


def build():
    layers = [keras.Input((WIDTH,))]
    for i in range(BLOCKS):
        inner = [
            *(L.LayerNormalization(), L.Dense(4 * WIDTH, "gelu")),
            *(L.Dense(4 * WIDTH, "gelu"), L.Dense(WIDTH)),
        ]
        layers.append(keras.Sequential(inner, name=f"block_{i}"))
    return compiled(keras.Sequential([*layers, L.Dense(1)]), "sgd", "mse")


def temporaries(remat):
    strategy = ktd.TPUStrategy(topology="v5e:2x2", remat=remat)
    return ktd.dry_run(build, strategy, batch_size=ROWS).memory["temporaries"]


def test_what_is_computed_again_is_not_kept():
    """105.1 and 37.0 MiB; `python benchmarks/remat.py` has the other policies."""
    kept, full = map(temporaries, (None, "full"))
    assert full < 0.5 * kept
