import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware import libtpu, topology
from keras_tpu_dist.hardware.topology import CHIPS, Topology


@pytest.mark.parametrize(
    ("spelling", "name", "chips", "devices"),
    [
        ("v5e:4x4", "v5e:4x4", 16, 16),
        ("v5litepod-16", "v5e:4x4", 16, 16),
        ("v5e-16", "v5e:4x4", 16, 16),
        ("V5E-4x4", "v5e:4x4", 16, 16),
        ("v5e-1", "v5e:1x1", 1, 1),
        ("v6e-256", "v6e:16x16", 256, 256),
        ("trillium-8", "v6e:2x4", 8, 8),
        ("v5p-128", "v5p:4x4x4", 64, 64),
        ("v4:4x4x4", "v4:4x4x4", 64, 64),
        ("v4-8", "v4:2x2x1", 4, 4),
        ("v4-3072", "v4:8x12x16", 1536, 1536),
        ("v3-32", "v3:4x4", 16, 32),
        ("v2-8", "v2:2x2", 4, 8),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 8),
        ("ironwood-8", "tpu7x:2x2x1", 4, 8),
        ("4*v5e:16x16", "4*v5e:16x16", 1024, 1024),
        (" 2 * v6e-8 ", "2*v6e:2x4", 16, 16),
    ],
)
def test_every_spelling_users_have(spelling, name, chips, devices):
    slice_ = Topology.parse(spelling)
    assert (slice_.name, slice_.num_chips, slice_.num_devices) == (name, chips, devices)
    assert len(slice_.devices()) == devices
    assert Topology.parse(slice_.name) == slice_


def test_accelerator_types_agree_with_googles_tables():
    # cloud.google.com/tpu/docs/v4, /v5p, /v5e
    shapes = {
        "v4-16": "2x2x2",
        "v4-32": "2x2x4",
        "v4-64": "2x4x4",
        "v4-256": "4x4x8",
        "v4-512": "4x8x8",
        "v4-1024": "8x8x8",
        "v4-2048": "8x8x16",
        "v5p-12288": "16x16x24",
        "v5litepod-8": "2x4",
        "v5litepod-32": "4x8",
        "v5litepod-128": "8x16",
        "v3-2048": "32x32",
        "v3-1024": "16x32",
    }
    assert {n: Topology.parse(n).name.split(":")[1] for n in shapes} == shapes


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("v5e:32x32", r"^Did you mean '.*exists\. Received: topology='v5e:32x32'.*v5e:16x16"),
        ("v5e:3x3", r"Use one of: v5e:1x1, v5e:2x2"),
        ("v4-12", r"v4:2x2x1.*multiples of 4"),
        ("v5litepods-16", r"Did you mean 'v5litepod-16'"),
        ("v5p:4x4", r"v5p:2x2x1"),
        ("v9:2x2", r"^Did you mean '.*Use one of v2, v3.*v5e:4x4"),
        ("tpu", r"accelerator type"),
        ("v3-7", r"v3:4x4"),
    ],
)
def test_an_unknown_slice_is_refused_with_the_nearest(bad, words):
    with pytest.raises(ValueError, match=words):
        Topology.parse(bad)


def test_v3_slices_cannot_be_joined():
    with pytest.raises(ValueError, match=r"1 on TPU v2 and v3.*num_slices=2"):
        Topology.parse("2*v3:4x4")
    with pytest.raises(ValueError, match=r"1 on TPU v2 and v3.*num_slices=2"):
        Topology.parse(Topology.parse("v3:4x4"), num_slices=2)
    assert Topology.parse("v5e:4x4", num_slices=2).num_chips == 32
    assert Topology.parse(Topology.parse("v5e:4x4"), num_slices=2).name == "2*v5e:4x4"


def test_numbers_of_a_slice():
    slice_ = Topology.parse("v3-32")
    assert slice_.num_hosts == 4
    assert slice_.chips_per_host == 4
    # a v3 device is one of two cores: half of the chip's peak and bandwidth
    assert slice_.peak_flops() == 123e12 / 2
    assert slice_.hbm_bandwidth == 450e9
    v5e = Topology.parse("v5e-256")
    assert v5e.peak_flops("int8") == 393e12
    assert v5e.peak_flops("float32") == v5e.peak_flops("bfloat16") == 197e12
    assert [v5e.wraps(0), Topology.parse("v5e:8x16").wraps(0)] == [True, False]
    # Switches join cubes of 4x4x4; what is smaller has no ring, along a side of 4 neither.
    assert Topology.parse("v4:4x4x4").wraps(2)
    assert not any(Topology.parse("v4:2x2x4").wraps(axis) for axis in range(3))
    assert json.loads(json.dumps(v5e.to_dict()))["num_chips"] == 256


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("v5e-1", 1),
        ("v5e-4", 1),
        ("v5e-8", 1),
        ("v6e-8", 1),
        ("v5e-16", 4),
        ("v6e-256", 64),
        ("v2-8", 1),
        ("v3-32", 4),
        ("v4-8", 1),
        ("v4-16", 2),
        ("v5p-8", 1),
        ("v5p-16", 2),
        ("tpu7x-8", 1),
        ("tpu7x-128", 16),
        ("2*v5e:2x4", 2),
    ],
)
def test_hosts_are_those_of_googles_tables(name, hosts):
    slice_ = Topology.parse(name)
    assert slice_.num_hosts == hosts
    assert len({d.process_index for d in slice_.devices()}) == hosts


def test_hosts_can_be_given():
    two = Topology.parse("v5e-8", chips_per_host=4)
    assert (two.num_hosts, two.name) == (2, "v5e:2x4")
    assert [d.process_index for d in two.devices()] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert Topology.parse(two) is two
    assert topology.of_devices(two.devices()) == two != Topology.parse("v5e-8")
    assert Topology.parse(two, num_slices=2).num_hosts == 4
    assert Topology.parse("v5e-8", chips_per_host=1).num_hosts == 8
    assert ktd.TPUStrategy(topology=two).num_hosts == 2
    assert ktd.TPUStrategy(topology="v5e-8").num_hosts == 1


@pytest.mark.parametrize("bad", [2, 16])
@pytest.mark.parametrize("name", ["v5e-8", Topology.parse("v5e-8")], ids=["name", "topology"])
def test_hosts_that_do_not_exist_are_refused(name, bad):
    with pytest.raises(ValueError, match=r"1 or 4 chips.*one of 1, 4, 8"):
        Topology.parse(name, chips_per_host=bad)


@given(st.sampled_from(topology.all_names()), st.sampled_from([1, 2]))
@settings(max_examples=30)
def test_devices_fill_the_torus_once(name, slices):
    slice_ = Topology.parse(name)
    slice_ = dataclasses.replace(slice_, num_slices=slices if slice_.chip.dcn_bandwidth else 1)
    devices = slice_.devices()
    places = {(d.slice_index, *d.coords, d.core_on_chip) for d in devices}
    assert len(places) == len({d.id for d in devices}) == slice_.num_devices
    last = devices[-1]
    assert last.coords == tuple(s - 1 for s in (*slice_.shape, 1)[:3])
    hosts = np.bincount([d.process_index for d in devices])
    assert set(hosts) == {slice_.chips_per_host * slice_.chip.devices}
    assert topology.of_devices(devices) == slice_


def test_part_of_a_slice_and_cpus_have_no_topology(devices):
    assert topology.of_devices(devices) is None
    assert topology.of_devices(topology.devices("v5e:4x4")[:15]) is None


def test_programs_lower_for_a_pod_without_libtpu():
    slice_ = topology.devices("v5e:16x16")
    grid = mesh_utils.create_device_mesh((64, 4), slice_, allow_split_physical_axes=True)
    mesh = Mesh(grid, ("data", "model"))
    x = jax.ShapeDtypeStruct(
        (128, 8), "float32", sharding=NamedSharding(mesh, PartitionSpec("data", "model"))
    )
    text = jax.jit(lambda x: x @ x.T).lower(x).as_text()
    assert 'sdy.mesh @mesh = <["data"=64, "model"=4]>' in text
    assert "num_partitions = 256" in text


@pytest.fixture
def tpu_compiler():
    """Runs code in a process that may load libtpu and returns what it prints."""

    def run(code, *arguments):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **libtpu.libtpu_environment()},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""  # quiet, whatever libtpu would like to say
        return done.stdout

    return run


@pytest.mark.tpu_compiler
def test_described_devices_are_those_of_libtpu(tpu_compiler):
    """Read in one process of its own: libtpu is never loaded into the tests' process."""
    names = ["v2:2x2", "v3:4x4", "v4:2x2x4", "v4:4x4x4", "v5e:1x1", "v5e:4x8", "v5p:2x2x2"]
    names += ["v6e:8x8", "tpu7x:2x2x2", "2*v5e:2x4", "2*tpu7x:2x2x1"]
    code = """
import json, sys
from jax.experimental import topologies
def read(arguments):
    devices = topologies.get_topology_desc(**arguments).devices
    return sorted([d.id, d.process_index, list(d.coords), d.core_on_chip, d.device_kind,
        getattr(d, "slice_index", None) or 0] for d in devices)
print(json.dumps([read(a) for a in json.loads(sys.argv[1])]))
"""
    # libtpu describes hosts of 4 chips, also where Google has machines of 8
    slices = [Topology.parse(name, chips_per_host=None if "1x1" in name else 4) for name in names]
    theirs = json.loads(tpu_compiler(code, json.dumps([s.libtpu_arguments() for s in slices])))
    for slice_, devices in zip(slices, theirs):
        ours = [
            [d.id, d.process_index, list(d.coords), d.core_on_chip, d.device_kind, d.slice_index]
            for d in slice_.devices()
        ]
        assert sorted(ours) == devices, slice_.name


def test_every_chip_is_complete():
    for chip in CHIPS.values():
        assert dict(chip.flops)["bfloat16"] > 1e13
        assert set(chip.assumed) <= {f.name for f in dataclasses.fields(chip)}
        assert chip.dims == len(chip.shapes[0])
        # a chip that did nothing but read its HBM would need 10 ms to 70 ms
        assert 0.01 < chip.device_hbm_bytes * chip.devices / chip.hbm_bandwidth < 0.07
