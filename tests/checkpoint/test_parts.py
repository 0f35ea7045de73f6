"""Arrays in parts: cut into cells by who holds them, and put together for another mesh."""

import itertools
import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_tpu_dist.checkpoint import local
from keras_tpu_dist.checkpoint.manifest import Manifest, Saved
from keras_tpu_dist.checkpoint.names import Entry
from keras_tpu_dist.checkpoint.parts import Layout, Parts, _layout, bounds, parts_of

SHAPES = [(8,), (8, 4), (16, 4, 6), (), (4, 0)]
SPECS = [P(), P("a"), P(("a", "b")), P(("b", "a")), P("b", "a"), P(None, "a")]


def sharding(spec):
    return NamedSharding(jax.make_mesh((4, 2), ("a", "b")), spec)


def divides(spec, shape):
    sizes = {"a": 4, "b": 2}
    if len(spec) > len(shape):
        return False
    for axes, size in zip(spec, shape):
        axes = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        if size % np.prod([sizes[axis] for axis in axes], dtype=int):
            return False
    return True


CASES = [case for case in itertools.product(SPECS, SHAPES) if divides(*case)]


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_cells_are_the_distinct_shards(spec, shape):
    layout = _layout(sharding(spec), shape)
    indices = {bounds(index, shape) for index in sharding(spec).devices_indices_map(shape).values()}
    found = [layout.index(cell, shape) for cell in range(len(layout.holders))]
    assert sorted(found) == sorted(indices)
    assert all(layout.cells_in(index, shape) == [cell] for cell, index in enumerate(found))
    assert layout.held_by(0) == list(range(len(found)))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("other", SPECS)
def test_cells_of_one_mesh_are_put_together_for_another(spec, other):
    shape = (8, 8)
    array = np.arange(64, dtype="float32").reshape(shape)
    layout, goal = _layout(sharding(spec), shape), _layout(sharding(other), shape)
    for cell in range(len(goal.holders)):
        box = goal.index(cell, shape)
        result = np.full([stop - start for start, stop in box], np.nan)
        for inside in layout.cells_in(box, shape):
            place = layout.index(inside, shape)
            part = array[tuple(slice(*each) for each in place)]
            local._paste(result, box, part, place)
        np.testing.assert_array_equal(result, array[tuple(slice(*each) for each in box)])


def two_hosts():
    """Parts of two arrays on two hosts: split over them, and a copy on both."""
    layouts = (Layout((2, 1), ((0,), (1,))), Layout((1,), ((0, 1),)))
    saved = [
        Saved(Entry("a", (4, 3), "float32"), "weights_00000", 1),
        Saved(Entry("b", (5,), "bfloat16"), "weights_00001", 2),
    ]
    parts = Parts(1, 2, layouts, {"weights_00000": 0, "weights_00001": 1}, {})
    crc32 = {"weights_00000": [7], "weights_00001": [8]}
    parts = Parts(parts.process, parts.processes, layouts, parts.of, crc32)
    return Manifest({"weights": tuple(saved)}, parts=parts.to_json()), parts


def test_what_is_written_is_read():
    manifest, parts = two_hosts()
    plain = json.loads(json.dumps(manifest.to_json()))
    assert parts_of(Manifest(manifest.arrays, parts=plain["parts"])) == parts


def test_every_part_must_be_on_a_host_that_is_here():
    _, parts = two_hosts()
    assert parts.covered_without([])
    assert not parts.covered_without([1])
    only_copies = Parts(0, 2, parts.layouts[1:], {}, {})
    assert only_copies.covered_without([1])
    assert not only_copies.covered_without([0, 1])


def test_the_bytes_of_a_hosts_file():
    manifest, parts = two_hosts()
    copy = local.Copy("nowhere", manifest, parts)
    assert copy.size == 2 * 3 * 4 + 5 * 2
    assert copy._offsets["weights_00001"] == 2 * 3 * 4


def test_candidates_are_the_newest_first_with_who_can_read_them():
    told = [
        [[8, 10.0, "x", [0]], [10, 20.0, "y", [0]]],
        [[8, 11.0, "x", [1]]],
        [[8, 12.0, "x", [2, 3]], [10, 19.0, "z", [2]]],
    ]
    found = local._candidates(told)
    assert found == [
        [10, 20.0, "y", [[1], [2]]],
        [10, 19.0, "z", [[0], [1]]],
        [8, 12.0, "x", [[2, 2, 3]]],
    ]


def test_who_sends_what():
    """Process 2 is new, and needs all; 0 and 1 send what they have."""
    layout = Layout((2,), ((0,), (1,)))
    plan = local._plan_of(layout, (8,), None, ((0,), (1,), ()))
    assert plan.moved == ((0, 0), (1, 1))
    assert plan.needed == {0, 1}
    assert plan.read == (0,)  # this is process 0
    replicated = Layout((1,), ((0, 1),))
    assert local._plan_of(replicated, (8,), None, ((0,), (1,))).moved == ()
    assert local._plan_of(replicated, (8,), None, ((), (1,))).moved == ((0, 1),)
    assert local._plan_of(replicated, (8,), None, ((), (1,))).read == ()
