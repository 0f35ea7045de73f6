"""Blocks of the torus: which device belongs to which replica."""

import json
import math

import numpy as np
import pytest
from helpers import assert_close, built, data, mlp, results
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.assignment import DeviceAssignment, prime_factors
from keras_tpu_dist.hardware.topology import Topology


def sides(topology):
    x, y, z = (*topology.shape, 1, 1)[:3]
    return (x, y, z, topology.chip.devices)


def assert_blocks(assignment, block):
    """Each replica is a box of the given sides, and the boxes stand on a grid of that pitch."""
    corners = []
    for replica in assignment.core_assignment:
        corner = replica.min(axis=0)
        assert (corner % block == 0).all()
        box = [tuple(corner + offset) for offset in np.ndindex(tuple(block))]
        # row-major: the last coordinate runs fastest
        assert [tuple(place) for place in replica] == box
        corners.append(tuple(corner))
    # x fastest, then y, then z
    assert corners == sorted(corners, key=lambda c: (c[2], c[1], c[0], c[3]))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("v4:4x4x4", s) for s in [(1, 1, 1), (2, 2, 2), (4, 1, 1), (1, 4, 2), (2, 2, 4)]),
        *(("v4:4x4x4", s) for s in [(4, 4, 1), (1, 1, 4), (4, 4, 4)]),
        *(("v5e:4x4", s) for s in [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 4)]),
    ],
)
def test_replicas_are_contiguous_blocks(name, shape):
    assignment = DeviceAssignment.build(name, computation_shape=shape)
    block = np.array([*shape, 1, 1][:4])
    assert assignment.computation_shape == shape
    assert assignment.num_cores_per_replica == math.prod(shape)
    assert assignment.num_replicas * math.prod(shape) == Topology.parse(name).num_devices
    assert_blocks(assignment, block)


def test_coordinates_written_out():
    pairs = DeviceAssignment.build("v5e:4x4", (2, 1))
    assert pairs.core_assignment[:3].tolist() == [
        [[0, 0, 0, 0], [1, 0, 0, 0]],
        [[2, 0, 0, 0], [3, 0, 0, 0]],
        [[0, 1, 0, 0], [1, 1, 0, 0]],
    ]
    device = pairs.tpu_device(replica=1, logical_core=1)
    assert (device.coords, device.core_on_chip) == ((3, 0, 0), 0)
    cubes = DeviceAssignment.build("v4:4x4x4", (2, 2, 2))
    assert cubes.coordinates(7, 7) == (3, 3, 3, 0)
    assert [cubes.coordinates(0, i) for i in (1, 2, 4)] == [
        (0, 0, 1, 0),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
    ]


@st.composite
def slices_and_blocks(draw):
    name = draw(st.sampled_from(["v5e:2x4", "v4:2x2x4", "v4:4x4x4", "v3:4x4", "tpu7x:2x2x1"]))
    topology = Topology.parse(f"2*{name}" if draw(st.booleans()) and name != "v3:4x4" else name)
    block = [
        draw(st.sampled_from([n for n in range(1, s + 1) if s % n == 0])) for s in sides(topology)
    ]
    return topology, tuple(block)


@settings(max_examples=60)
@given(slices_and_blocks())
def test_every_device_exactly_once(case):
    topology, block = case
    assignment = DeviceAssignment.build(topology, block)
    assert assignment.block == block
    found = [device.id for device in assignment.devices.flat]
    assert sorted(found) == sorted(device.id for device in topology.devices())
    for row in assignment.devices:
        assert len({device.slice_index for device in row}) == 1
    for replica, row in enumerate(assignment.devices):
        for core, device in enumerate(row):
            assert assignment.tpu_device(replica, core) == device
            place = (*device.coords, device.core_on_chip)
            assert assignment.coordinates(replica, core) == place


def test_cores_of_a_chip():
    chips = DeviceAssignment.build("v3:4x4", (1, 1))
    assert (chips.num_replicas, chips.num_cores_per_replica) == (16, 2)
    assert chips.computation_shape == (1, 1, 2)
    cores = DeviceAssignment.build("v3:4x4", (1, 1, 1))
    assert (cores.num_replicas, cores.computation_shape) == (32, (1, 1, 1))
    alone = DeviceAssignment.build("v3:4x4")
    assert alone.num_cores_per_replica == 1
    with_z = DeviceAssignment.build("v3:4x4", [2, 2, 1, 2])
    assert with_z.num_cores_per_replica == 8
    assert DeviceAssignment.build("v4:2x2x1", (1, 1, 1, 1)).num_replicas == 4


def test_an_assignment_from_ids_places_or_devices(devices):
    by_id = DeviceAssignment.from_order([[0, 3], [2, 1]], "v5e:2x2")
    places = [[by_id.coordinates(r, c) for c in range(2)] for r in range(2)]
    assert DeviceAssignment.from_order(places, "v5e:2x2") == by_id
    assert DeviceAssignment.from_order(np.array(places), "v5e:2x2") == by_id
    assert by_id.computation_shape is None
    line = DeviceAssignment.from_order([devices[5:7], devices[0:2]])
    assert [[d.id for d in row] for row in line.devices] == [[5, 6], [0, 1]]
    mesh = ktd.TPUStrategy(line).mesh
    assert [d.id for d in mesh.devices.flat] == [5, 6, 0, 1]
    for order, words in [
        ([[0, 1], [2]], r"same number of devices.*\[2, 1\]"),
        ([], r"at least one"),
        ([[0, 1], [1, 2]], r"only once.*id=1"),
        ([[0, 9]], r"must be one of v5e:2x2.*device=9"),
        ([[0, "a"]], r"device='a'"),
        ([[(7, 0, 0, 0)]], r"device=\(7, 0, 0, 0\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            DeviceAssignment.from_order(order, "v5e:2x2")


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            "v5e:4x4",
            (3, 1),
            r"must tile the slice.*computation_shape=\(3, 1\).*Use one of: \(1, 4\)",
        ),
        ("v4:4x4x4", (8, 1, 1), r"Use one of: \(1, 2, 4\)"),
        ("v4:4x4x4", (1, 1, 1, 2), r"must tile the slice"),
        ("v5e:4x4", (0, 1), r"is \(x, y\) in chips.*all positive"),
        ("v5e:4x4", (2,), r"is \(x, y\) in chips.*computation_shape=\(2,\)"),
        ("v5e:4x4", (2.0, 1), r"computation_shape=\(2\.0, 1\)"),
        ("v5e:3x3", (1, 1), r"must be a TPU slice that exists"),
    ],
)
def test_blocks_that_cannot_be(name, shape, words):
    with pytest.raises(ValueError, match=words):
        DeviceAssignment.build(name, shape)


def test_replicas_that_do_not_exist_are_an_error(devices):
    with pytest.raises(ValueError, match=r"holds 4 blocks of 2x2.*num_replicas=5.*1 to 4 replicas"):
        DeviceAssignment.build("v5e:4x4", (2, 2), num_replicas=5)
    with pytest.raises(ValueError, match=r"num_replicas=True"):
        DeviceAssignment.build("v5e:4x4", (2, 2), num_replicas=True)
    two = DeviceAssignment.build("v5e:2x2", (2, 1))
    with pytest.raises(ValueError, match=r"counted from 0.*replica=2.*replicas 0 to 1 with"):
        two.coordinates(2, 0)
    with pytest.raises(ValueError, match=r"logical_core=-1"):
        two.tpu_device(0, -1)
    with pytest.raises(ValueError, match=r"already has its devices"):
        ktd.TPUStrategy(two, devices=devices)
    with pytest.raises(ValueError, match=r"belongs to one slice.*on v5e:2x2.*topology='v5e:2x4'"):
        ktd.TPUStrategy(two, topology="v5e:2x4")
    with pytest.raises(ValueError, match=r"not attached to this machine.*cpu:8, which is attached"):
        ktd.TPUStrategy(topology=Topology.attached())
    with pytest.raises(ValueError, match=r"as many as the slice has.*'v5e:2x2', of=4, got=8"):
        Topology.parse("v5e:2x2").stood_in_by(devices)
    with pytest.raises(ValueError, match=r"only known from the devices of whole slices"):
        Topology.attached(Topology.parse("v5e:2x4").devices()[1:])
    with pytest.raises(
        ValueError, match=r"only known from the devices of whole slices.*devices=\[\]"
    ):
        DeviceAssignment.build([])
    with pytest.raises(ValueError, match=r"same number of devices.*\['no list', 'no list'\]"):
        DeviceAssignment.from_order([0, 1], "v5e:2x2")
    with pytest.raises(ValueError, match=r"must be one of v5e:2x2.*device=\('a', 0, 0, 0\)"):
        DeviceAssignment.from_order([[("a", 0, 0, 0)]], "v5e:2x2")


def test_topologies_of_attached_devices(devices):
    line = Topology.attached()
    assert (line.name, line.shape, line.num_hosts, line.wraps(0)) == ("cpu:8", (8,), 1, False)
    assert line.devices() == list(devices)
    assert line.coordinates()[3] == (3, 0, 0)
    shuffled = Topology.parse("v3:2x2").devices()
    found = Topology.attached([*shuffled[4:], *shuffled[:4]])
    assert found == Topology.parse("v3:2x2")
    assert found.devices() == shuffled
    json.dumps(line.to_dict())


def test_the_text():
    assignment = DeviceAssignment.build("v4:4x4x4", (1, 1, 2))
    text = str(assignment)
    assert text.startswith(
        "32 replica(s) of 2 logical device(s) on v4:4x4x4, each a block of 1x1x2"
    )
    assert "  replica 1 on host 0, 4: (1,0,0,0) (1,0,1,0)" in text
    assert text.endswith("and 16 more")
    again = DeviceAssignment.from_order(assignment.core_assignment, "v4:4x4x4")
    assert again.order == assignment.order


@pytest.mark.parametrize("number", [1, 2, 7, 12, 64, 97])
def test_prime_factors(number):
    factors = prime_factors(number)
    assert math.prod(factors) == number
    assert list(factors) == sorted(factors)
    assert all(n == 1 or all(n % d for d in range(2, n)) for n in factors)


def test_the_mesh_of_an_assignment(devices):
    for shape, sizes in [((1,), (8, 1)), ((2,), (4, 2)), ((4,), (2, 2, 2)), ((8,), (1, 2, 2, 2))]:
        strategy = ktd.TPUStrategy(DeviceAssignment.build(computation_shape=shape))
        names = ("data", *(f"logical_{i}" for i in range(len(sizes) - 1)))
        assert dict(strategy.mesh.shape) == dict(zip(names, sizes))
        assert strategy.num_replicas_in_sync == sizes[0]
        assert strategy.num_logical_devices == math.prod(sizes[1:])
    torus = Topology.parse("v5e:2x4").stood_in_by(devices)
    block = DeviceAssignment.build(torus, (2, 2))
    assert [d.id for d in ktd.TPUStrategy(block).mesh.devices.flat] == [0, 2, 1, 3, 4, 6, 5, 7]
    described = ktd.TPUStrategy(DeviceAssignment.build("v5e:2x4", (1, 2)))
    assert described.topology == Topology.parse("v5e:2x4")


@pytest.mark.slow
def test_the_axis_logical_in_rules_and_annotations():
    assignment = DeviceAssignment.build(computation_shape=(4,))
    rules = [("hidden/kernel", (None, "logical")), ("hidden/bias", ("logical_1",))]
    strategy = ktd.TPUStrategy(assignment, rules)
    x, y = data(26)
    expected = results(built(mlp, None), x, y, batch_size=8, evaluate=False)

    def annotated():
        model = mlp()
        ktd.split(model.layers[1], kernel=("logical",), output=("data",))
        ktd.split(model.layers[0], output=("data", "logical"))
        return model

    model = built(annotated, strategy)
    assert_close(results(model, x, y, batch_size=8, evaluate=False), expected)
    specs = [tuple(v.value.sharding.spec) for v in model.layers[0].weights]
    assert specs == [(None, ("logical_0", "logical_1")), ("logical_1",)]
    assert tuple(model.layers[1].kernel.value.sharding.spec) == (("logical_0", "logical_1"),)
    assert "(None, ('logical_0', 'logical_1'))" in str(strategy.explain(model))
    assert not strategy.lint(model).findings
    with pytest.raises(ValueError, match=r"axes of the mesh.*logicle"):
        ktd.TPUStrategy(assignment, [("kernel", ("logicle",))])
    with pytest.raises(ValueError, match=r"only use axes of the mesh"):
        ktd.TPUStrategy({"data": 8}, [("kernel", ("logical",))])


@pytest.mark.slow
def test_plans_use_the_logical_axes():
    strategy = ktd.TPUStrategy(DeviceAssignment.build(computation_shape=(4,)), "tensor_parallel")
    x, y = data(26)
    expected = results(built(mlp, None), x, y, batch_size=8, evaluate=False)
    model = built(mlp, strategy)
    assert_close(results(model, x, y, batch_size=8, evaluate=False), expected)
    assert any("logical_0" in str(w.value.sharding.spec) for w in model.weights)
