"""What the TPU compiler makes of the plans, through a dry run: no chip is needed."""

import importlib.util

import keras
import pytest

import keras_tpu_dist as ktd

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu (extra 'tpu') is not installed"
    ),
]
WIDTH = 1024


def _build():
    layers = keras.layers
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(4 * WIDTH), layers.Dense(WIDTH)])
    model.compile("sgd", "mse")
    return model


def _collectives(layout, mesh):
    strategy = ktd.TPUStrategy(mesh, layout, topology="v5e:2x4")
    run = ktd.dry_run(_build, strategy, batch_size=512)
    assert run.fits
    return run, run.cost.collectives


@pytest.mark.slow
def test_fsdp_scatters_the_gradients_of_split_weights():
    run, collectives = _collectives("fsdp", {"data": 8})
    weight_bytes = 4 * WIDTH * 4 * WIDTH
    assert run.state.weights <= 1.1 * 2 * weight_bytes / 8
    for collective in collectives:
        if collective.kind == "all-reduce":
            assert collective.bytes < weight_bytes
    assert {"reduce-scatter", "all-gather"} <= {c.kind for c in collectives}


def test_data_parallel_reduces_them_whole():
    _, collectives = _collectives(None, {"data": 8})
    assert {c.kind for c in collectives} == {"all-reduce"}
    assert sum(c.bytes for c in collectives) >= 2 * 4 * WIDTH * 4 * WIDTH
