"""Collectives and layers of a program as rows of tables."""

from collections.abc import Iterator
from dataclasses import dataclass

from keras_tpu_dist.show.text import duration_text
from keras_tpu_dist.hlo import ProgramCost

_TOP_LAYERS = 10


@dataclass(frozen=True)
class Exchange:
    """Collectives alike in kind, axes, network, overlap and layer.

    Args:
        kind: `"all-reduce"` and so on.
        axes: Mesh axes that they cross.
        network: `"ICI"` or `"DCN"`.
        overlapped: Whether the compiler overlaps them with other work.
        layer: The Keras layer they came from.
        bytes: Bytes of their arrays in one step.
        times: How often they run in one step.
        seconds: Their time in one step at the links' full speed.
    """

    kind: str
    axes: tuple[str, ...]
    network: str
    overlapped: bool
    layer: str
    bytes: int
    times: int
    seconds: float


def exchanges(cost: ProgramCost) -> Iterator[Exchange]:
    """A program's collectives, those alike as one, the longest first.

    Args:
        cost: The cost that has the collectives.
    """
    grouped: dict[tuple, list] = {}
    for c in cost.collectives:
        key = (c.kind, c.axes, c.network, c.asynchronous, c.layer)
        total = grouped.setdefault(key, [0, 0, 0.0])
        total[0] += c.bytes * c.times
        total[1] += c.times
        total[2] += c.total_seconds
    for key, total in sorted(grouped.items(), key=lambda item: (-item[1][2], -item[1][0])):
        yield Exchange(*key, *total)


def collective_rows(cost: ProgramCost, limit: int = 12) -> list[tuple[str, ...]]:
    """Collectives alike in kind, axes, layer and overlap as one row, longest first.

    Args:
        cost: The cost that has the collectives.
        limit: The most such rows; of more, a last row says how many are left out.

    Returns:
        Per row: kind, axes, network, megabytes and runs per step, time, whether it is overlapped,
        layer.
    """
    rows = [
        (
            e.kind,
            ",".join(e.axes) or "-",
            e.network,
            f"{e.bytes / 1e6:,.3f}",
            str(e.times),
            duration_text(e.seconds) if e.seconds else "-",
            "yes" if e.overlapped else "no",
            e.layer,
        )
        for e in exchanges(cost)
    ]
    if len(rows) > limit:
        rows = [*rows[:limit], (f"... {len(rows) - limit} more", *([""] * 7))]
    return rows


def layer_rows(cost: ProgramCost) -> list[tuple[str, ...]]:
    """The layers that take most cycles, or most operations where there are no cycles.

    Args:
        cost: The cost, whose layers are in that order.

    Returns:
        Per row: layer, billions of operations, megabytes of HBM traffic, cycles, the part of them
        in the backward pass, time of collectives. A last row says how many layers are left out.
    """
    rows = [
        (
            c.layer,
            f"{c.flops / 1e9:,.3f}",
            f"{c.hbm_bytes / 1e6:,.1f}",
            f"{c.cycles:,}" if cost.cycles else "-",
            f"{c.backward_cycles / c.cycles:.0%}" if c.cycles else "-",
            duration_text(c.link_seconds) if c.link_seconds else "-",
        )
        for c in cost.layers[:_TOP_LAYERS]
    ]
    if len(cost.layers) > _TOP_LAYERS:
        rows.append((f"... {len(cost.layers) - _TOP_LAYERS} more", "", "", "", "", ""))
    return rows
