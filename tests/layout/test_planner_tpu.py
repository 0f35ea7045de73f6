"""What the TPU compiler makes of the plans, through a dry run: no chip is needed."""

import keras
import pytest

import keras_tpu_dist as ktd

pytestmark = pytest.mark.tpu_compiler
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


def _wide():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        layers = keras.layers
        tokens = keras.Input((2048, 4 * WIDTH))
        hidden = layers.Dense(16 * WIDTH, "gelu", use_bias=False)(tokens)
        hidden = layers.Dense(4 * WIDTH, use_bias=False)(hidden)
        hidden = layers.Dense(16 * WIDTH, "gelu", use_bias=False)(tokens + hidden)
        model = keras.Model(tokens, layers.Dense(4 * WIDTH, use_bias=False)(hidden))
        model.compile("sgd", "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:8x8", "v5e:4x8"])
def test_chips_compute_while_gradients_are_summed(topology):
    """On 8x8 the compiler sums them whole, on 4x8 it cuts products into rings."""
    runs = []
    for options in (None, "auto"):
        strategy = ktd.TPUStrategy(None, "fsdp", topology=topology, compiler_options=options)
        batch = 2 * strategy.mesh.size
        runs.append(ktd.dry_run(_wide, strategy, batch_size=batch, effort="exact"))
    alone, chosen = (run.estimate for run in runs)
    assert chosen.step < 0.92 * alone.step
    assert chosen.exposed_link < 0.7 * alone.exposed_link
    assert runs[1].total_bytes < 1.1 * runs[0].total_bytes
