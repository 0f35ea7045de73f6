"""Which axes of a mesh cross hosts and slices: what is said, and what crosses by default."""

import keras
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.crossings import crossings, crossings_text

DCN, ICI, HOST = "across slices (DCN)", "across hosts (ICI)", "within a host"


@pytest.mark.parametrize(
    ("topology", "mesh", "expected"),
    [
        ("v5e:2x2", {"data": 2, "model": 2}, {}),
        ("v5e:4x4", {"data": 16}, {"data": ICI}),
        ("2*v5e:4x4", {"data": 8, "model": 4}, {"data": DCN}),
        ("2*v5e:4x4", {"model": 4, "data": 8}, {"data": DCN}),
        ("4*v5e:2x4", {"model": 8, "fsdp": 4}, {"fsdp": DCN}),
        ("2*v5e:2x2", {"a": 2, "b": 4}, {"a": DCN, "b": HOST}),
    ],
)
def test_the_data_axis_crosses(topology, mesh, expected):
    strategy = ktd.TPUStrategy(mesh, topology=topology, data_axes=() if "a" in mesh else None)
    found = crossings(strategy.mesh)
    assert set(found) == (set(mesh) if expected else set())
    assert {name: found[name] for name in expected} == expected
    if expected:
        others = set(mesh) - set(expected)
        assert all(found[name] in (ICI, HOST) for name in others)


def test_explain_says_it():
    strategy = ktd.TPUStrategy({"data": 8, "model": 4}, topology="2*v5e:4x4")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    assert f"data {DCN}" in crossings_text(strategy.mesh)
    assert f"axes: data {DCN}" in str(strategy.explain(model))
    assert "axes:" not in str(ktd.TPUStrategy({"data": 8}).explain(model))


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_a_dry_run_says_what_each_host_transfers_and_what_crosses_slices():
    def build():
        model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(256)])
        model.compile("sgd", "mse")
        return model

    strategy = ktd.TPUStrategy({"data": 16}, topology="2*v5e:2x4")
    run = ktd.dry_run(build, strategy, batch_size=64)
    assert run.hosts == strategy.num_hosts
    # x and y of 64 rows, float32; each host transfers its part.
    assert run.state.inputs_per_host * run.hosts == 64 * (1024 + 256) * 4
    assert run.estimate.dcn > 0
    text = str(run)
    assert f"{run.hosts} hosts" in text
    assert "of them between slices" in text
    assert "axis data" in text
    one = ktd.dry_run(build, ktd.TPUStrategy(topology="v5e:2x2"), batch_size=64)
    assert (one.hosts, one.estimate.dcn) == (1, 0.0)
