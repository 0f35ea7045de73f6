"""Layers and collectives of one kind as one: the rows of a report's tables."""

import math
import re
from collections.abc import Sequence

from keras_tpu_dist.show.folding import families, kind_of
from keras_tpu_dist.tools.dryrun.figures import CollectiveGroup, exchanges
from keras_tpu_dist.tools.hlo import ProgramCost
from keras_tpu_dist.tools.hlo.analysis import LayerCost

# Layers whose exchanges the compiler joined: "dense and 4 more".
_MORE = re.compile(r" and (\d+) more$")
# Names such as "block2a_dwconv", whose number is that of a block.
_OF_A_BLOCK = re.compile(r"\d[a-z]?_[a-z_]+$")


def amount_of(cost: ProgramCost, layer: LayerCost) -> int:
    """What a layer is ranked by: its cycles, or its operations if there are no cycles."""
    return layer.cycles if cost.cycles else layer.flops


def layers_by_kind(cost: ProgramCost) -> list[LayerCost]:
    """The layers of a program, those of one kind and size as one, the largest first.

    Args:
        cost: The cost of the program.
    """
    groups = families(cost.layers, lambda c: c.layer, lambda c: _scale(c.layer, c.flops), kind_of)
    rows = []
    for pattern, group in groups:
        name = f"{pattern} ({len(group)})" if len(group) > 1 else pattern
        rows.append(sum_of_layers(name, group))
    return sorted(rows, key=lambda row: -amount_of(cost, row))


def sum_of_layers(name: str, layers: Sequence[LayerCost]) -> LayerCost:
    """The cost of several layers together.

    Args:
        name: Their name.
        layers: The layers.
    """
    return LayerCost(
        name,
        sum(layer.flops for layer in layers),
        sum(layer.hbm_bytes for layer in layers),
        sum(layer.cycles for layer in layers),
        sum(layer.backward_cycles for layer in layers),
        sum(layer.link_seconds for layer in layers),
        sum(layer.float32_bytes for layer in layers),
    )


def exchanges_by_kind(cost: ProgramCost) -> list[CollectiveGroup]:
    """Collectives of the same kind, axes, overlap and kind of layer as one, the longest first.

    Args:
        cost: The cost of the program.
    """
    groups = families(
        exchanges(cost),
        lambda e: _MORE.sub("", e.layer),
        lambda e: (e.kind, e.axes, e.network, e.overlapped, _scale(e.layer, e.bytes / e.times)),
        kind_of,
    )
    rows = []
    for pattern, group in groups:
        first = group[0]
        more = sum(int(number) for e in group for number in _MORE.findall(e.layer))
        rows.append(
            CollectiveGroup(
                first.kind,
                first.axes,
                first.network,
                first.overlapped,
                f"{pattern} and {more} more" if more else pattern,
                sum(e.bytes for e in group),
                sum(e.times for e in group),
                sum(e.seconds for e in group),
            )
        )
    return sorted(rows, key=lambda row: -(row.seconds or row.bytes))


def _scale(layer: str, amount: float) -> int:
    """Equal for layers of one row: of one place in a block by name, or of about equal amounts."""
    if amount <= 1 or _OF_A_BLOCK.search(_MORE.sub("", layer)):
        return 0
    return round(math.log2(amount))
