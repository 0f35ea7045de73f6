import jax
import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.mesh import build_mesh, checked_data_axes


@pytest.mark.parametrize(
    ("mesh", "shape", "names"),
    [
        (None, (8,), ("data",)),
        ({"data": 8}, (8,), ("data",)),
        ({"data": -1, "model": 2}, (4, 2), ("data", "model")),
        ({"a": 2, "b": -1, "c": 2}, (2, 2, 2), ("a", "b", "c")),
        ({"data": 8, "model": -1}, (8, 1), ("data", "model")),
    ],
)
def test_meshes_from_nothing_and_from_sizes(mesh, shape, names):
    built = build_mesh(mesh)
    assert built.shape == shape
    assert tuple(built.axis_names) == names
    assert sorted(d.id for d in built.backend_mesh.devices.flat) == list(range(8))


def test_finished_meshes_keep_their_device_order():
    stock = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
    assert build_mesh(stock) is stock
    order = np.array(jax.devices())[::-1].reshape(4, 2)
    of_jax = jax.sharding.Mesh(order, ("data", "model"))
    assert ktd.TPUStrategy(of_jax).mesh == of_jax


def test_devices_by_object_and_by_name(devices):
    assert build_mesh(None, devices[:3]).shape == (3,)
    named = build_mesh({"data": 2}, ["cpu:5", "cpu:2"])
    assert [d.id for d in named.backend_mesh.devices.flat] == [5, 2]


def test_mesh_axes_are_auto():
    mesh = ktd.TPUStrategy({"data": 4, "model": 2}).mesh
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"data": 3}, r"must multiply to the number of devices.*multiply to 3, on 8 device"),
        ({"data": 3, "model": -1}, r"multiply to 3, on 8 device.*product is 8"),
        ({"data": -1, "model": -1}, r"Only one axis size may be -1.*all but one of data, model"),
    ],
)
def test_impossible_meshes(mesh, words):
    with pytest.raises(ValueError, match=words):
        ktd.TPUStrategy(mesh)


def test_impossible_devices(devices):
    with pytest.raises(ValueError, match=r"device='cpu:9'.*list_devices.*Did you mean 'cpu:"):
        build_mesh(None, ["cpu:9"])
    with pytest.raises(ValueError, match="only once"):
        build_mesh(None, [devices[0], devices[0]])
    with pytest.raises(ValueError, match="at least one device"):
        build_mesh(None, [])
    for given in (8, "cpu:0", range(8), np.array(devices).reshape(4, 2)):
        with pytest.raises(ValueError, match=r"flat list of jax.Device objects or of names"):
            build_mesh(None, given)
    assert build_mesh(None, iter(devices)).shape == (8,)
    finished = keras.distribution.DeviceMesh((8,), ("data",))
    with pytest.raises(ValueError, match="already has its devices"):
        build_mesh(finished, devices)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("data", "model"), ("data",)),
        (("data", "fsdp", "model"), ("data", "fsdp")),
        (("batch", "model"), ("batch",)),
        (("model",), ()),
    ],
)
def test_default_data_axes(names, expected):
    assert checked_data_axes(None, names) == expected


def test_data_axes_of_the_user():
    assert checked_data_axes("x", ("x", "y")) == ("x",)
    assert checked_data_axes(("y", "x"), ("x", "y")) == ("y", "x")
    assert checked_data_axes((), ("data",)) == ()
    with pytest.raises(ValueError, match=r"data_axes=\('dta',\).*Did you mean 'data'\?"):
        checked_data_axes("dta", ("data", "model"))
    assert checked_data_axes(iter(("x",)), ("x", "y")) == ("x",)
    with pytest.raises(ValueError, match=r"must be an axis of the mesh.*data_axes=\(5,\)"):
        checked_data_axes(5, ("data",))
    with pytest.raises(ValueError, match="only once"):
        checked_data_axes(("data", "data"), ("data",))


def test_a_strategy_counts_replicas_logical_devices_and_hosts():
    strategy = ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2})
    assert strategy.num_replicas_in_sync == strategy.num_model_replicas == 4
    assert strategy.num_logical_devices == 2
    assert strategy.num_hosts == 1
    assert "{'data': 2, 'fsdp': 2, 'model': 2} on 8 cpu" in repr(strategy)


def test_devices_that_are_no_block_keep_their_order_and_say_so(devices, monkeypatch, caplog):
    from jax.experimental import mesh_utils

    def refuse(*args, **kwargs):
        raise NotImplementedError("no block")

    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    mesh = build_mesh({"data": 2}, [devices[3], devices[1]])
    assert [d.id for d in mesh.devices.flat] == [3, 1]
    assert "cannot be arranged on the torus as (2,) (no block)" in caplog.text
