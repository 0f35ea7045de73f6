"""What groups of chips that talk at once share."""

import math
import random

import numpy as np
import pytest

from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools import hlo
from keras_tpu_dist.tools.hlo.wire import (
    bandwidth_of,
    latency_of,
    seconds_of,
    seconds_per_byte,
    sent_bytes,
)

LINK = 50e9  # bytes a second of one v5e link, in one direction
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def placed(name, axes, order=None):
    """A mesh over a slice: its chips in the order of their coordinates, or in another."""
    slice_ = Topology.parse(name)
    chips = sorted(slice_.devices(), key=lambda d: tuple(d.coords))
    chips = [chips[i] for i in order] if order else chips
    return hlo.Wire.of(axes, chips, slice_)


def test_pairs_across_the_middle_share_its_links():
    # (x, y) of 2 x 4, the larger side outermost: each pair lies two chips apart.
    by_y = [0, 4, 1, 5, 2, 6, 3, 7]
    wire = placed("v5e:2x4", {"model": 2, "data": 4}, by_y)
    for kind, whole in (("all-gather", 1e9), ("all-reduce", 1e9), ("all-to-all", 1e9)):
        alone = sent_bytes(kind, 10**9, 2) / LINK
        # Four pairs, two links.
        assert hlo.seconds_over(wire, kind, whole, ("model",)) == pytest.approx(2 * alone)
    neighbours = placed("v5e:2x4", {"model": 2, "data": 4})
    assert hlo.seconds_over(neighbours, "all-gather", 1e9, ("model",)) == 0.5e9 / LINK
    # Squares of 2 x 2, each with the links between its own chips.
    assert hlo.seconds_over(wire, "all-gather", 1e9, ("data",)) == 0.75e9 / (2 * LINK)


def test_what_everybody_sends_everybody_crosses_the_middle():
    ring = placed("v5e:16x16", {"data": 16, "model": 16})
    # Eight devices send a sixteenth each to eight others, over the two places where halves meet.
    assert hlo.seconds_over(ring, "all-to-all", 1e9, ("model",)) == 4e9 / (2 * LINK)
    line = placed("v5e:4x4", {"data": 4, "model": 4})
    assert hlo.seconds_over(line, "all-to-all", 1e9, ("model",)) == 1e9 / LINK
    square = placed("v5e:4x4", {"data": 16})
    assert hlo.seconds_over(square, "all-to-all", 1e9, ("data",)) == 4e9 / (4 * LINK)


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:4x8", "v5e:16x16", "v4:2x2x4", "v5p:4x4x4"])
def test_neighbours_share_nothing(name):
    shape = Topology.parse(name).shape
    axes = {f"axis{i}": side for i, side in enumerate(shape)}
    wire = placed(name, axes)
    grid = np.arange(math.prod(shape)).reshape(shape)
    for over in ([*axes][:1], [*axes][-1:], [*axes]):
        group = grid[tuple(slice(None) if a in over else 0 for a in axes)].flatten().tolist()
        for kind in KINDS[:3]:
            alone = sent_bytes(kind, 2**20, len(group)) / bandwidth_of(wire, (tuple(group),))[1]
            assert hlo.seconds_over(wire, kind, 2**20, over) == pytest.approx(alone)


def test_a_permute_is_bound_by_the_pairs_that_cross():
    wire = placed("v5e:16x16", {"data": 16, "model": 16})
    ring = [list(range(i, i + 16)) for i in range(0, 256, 16)]
    for far, seconds in ((1, 1e9 / LINK), (8, 8e9 / (2 * LINK))):
        pairs = tuple((row[i], row[(i + far) % 16]) for row in ring for i in range(16))
        assert seconds_of(wire, "collective-permute", 1e9, pairs) == ("ICI", seconds)
    assert seconds_of(wire, "collective-permute", 1e9, ((3, 3),))[1] <= 1e9 / LINK


def test_slices_have_links_of_their_own():
    two = Topology.parse("2*v5e:2x4")
    chips = sorted(two.devices(), key=lambda d: (d.slice_index, *d.coords))
    wire = hlo.Wire.of({"slice": 2, "data": 4, "model": 2}, chips, two)
    one = placed("v5e:2x4", {"data": 4, "model": 2})
    for axis in ("data", "model"):
        assert hlo.seconds_over(wire, "all-gather", 1e9, (axis,)) == hlo.seconds_over(
            one, "all-gather", 1e9, (axis,)
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_says_more_than_sending_along_the_links_takes(kind, seed):
    """On a line, sending each part to each member that needs it can be written out, and counted."""
    line = Topology.parse("v5e:1x1")
    line = type(line)(line.chip, (1, 8))
    order = list(range(8))
    random.Random(seed).shuffle(order)
    groups = tuple(tuple(order[i : i + 4]) for i in (0, 4))
    loads = np.zeros((2, 7))  # bytes over each link, in each direction
    for group in groups:
        for source in group:
            others = [place for place in group if place != source]
            # A part goes once over a link, however many are behind it; sums come back alike.
            spans = {
                "all-gather": [(0.25, others)],
                "all-to-all": [(0.25, [place]) for place in others],
                "reduce-scatter": [(0.25, [place]) for place in others],
                "all-reduce": [(1.0, others)],
            }[kind]
            for whole, to in spans:
                for place in range(source, max([source, *to])):
                    loads[0, place] += whole
                for place in range(min([source, *to]), source):
                    loads[1, place] += whole
    found = seconds_per_byte(line, tuple(line.devices()), kind, groups)
    assert 0 < found <= loads.max() / LINK + 1e-18
    if kind in ("all-to-all", "all-gather"):
        assert found == pytest.approx(loads.max() / LINK)


@pytest.mark.parametrize(
    ("name", "axes", "over", "hops"),
    [
        # The book's example: four chips in a row without wraparound.
        ("v5e:4x8", {"x": 8, "y": 4}, ("y",), 3),
        ("v5e:4x8", {"x": 8, "y": 4}, ("x",), 7),
        ("v5e:4x8", {"x": 8, "y": 4}, ("x", "y"), 10),
        ("v5e:16x16", {"x": 16, "y": 16}, ("y",), 8),  # a ring
        ("v5p:4x4x4", {"x": 4, "y": 4, "z": 4}, ("x", "y", "z"), 6),
        ("v5e:2x4", {"x": 8, "y": 1}, ("y",), 0),
        ("tpu7x:2x2x1", {"x": 4, "core": 2}, ("core",), 0),  # two devices of one chip
    ],
)
def test_few_bytes_take_a_microsecond_for_each_hop(name, axes, over, hops):
    wire = placed(name, axes)
    assert hlo.latency_over(wire, "all-gather", over) == pytest.approx(hops * 1e-6)
    assert hlo.latency_over(wire, "all-reduce", over) == pytest.approx(2 * hops * 1e-6)


def test_a_permute_waits_for_its_farthest_pair():
    wire = placed("v5e:16x16", {"data": 16, "model": 16})
    for pairs, hops in ((((0, 1), (1, 2)), 1), (((0, 1), (0, 8)), 8), (((0, 1), (0, 15)), 1)):
        assert latency_of(wire, "collective-permute", pairs) == pytest.approx(hops * 1e-6)


def test_between_slices_no_latency_is_known():
    two = Topology.parse("2*v5e:2x4")
    chips = sorted(two.devices(), key=lambda d: (d.slice_index, *d.coords))
    wire = hlo.Wire.of({"slice": 2, "data": 4, "model": 2}, chips, two)
    assert hlo.latency_over(wire, "all-reduce", ("slice",)) == 0
    assert hlo.latency_over(wire, "all-reduce", ("model",)) > 0
    assert hlo.latency_over(hlo.Wire.of({"data": 8}), "all-reduce", ("data",)) == 0
