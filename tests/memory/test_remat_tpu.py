"""What the TPU compiler makes of layers that are computed again."""

import keras
import pytest

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
    model = keras.Sequential([*layers, L.Dense(1)])
    model.compile("sgd", "mse")
    return model


def temporaries(remat):
    pytest.importorskip("libtpu")
    strategy = ktd.TPUStrategy(topology="v5e:2x2", remat=remat)
    return ktd.dry_run(build, strategy, batch_size=ROWS).memory["temporaries"]


def test_the_more_is_computed_again_the_less_is_kept():
    kept, dots, full = map(temporaries, (None, "dots", "full"))
    assert full < 0.6 * dots
    assert dots < 0.9 * kept
