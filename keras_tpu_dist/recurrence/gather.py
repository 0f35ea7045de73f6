"""What is done about weights that are split over devices."""

import dataclasses
import math
from collections.abc import Mapping

# A sixteenth of the memory of the smallest TPU core that XLA still serves (v5e: 16 GB), as much as
# may be kept for the backward pass.
GATHERED_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Gathering:
    """What a layer does some of whose weights are split over devices.

    Args:
        gather: Whether its weights are brought together, once before the loop, which then has no
            collective in it.
        units_axes: Otherwise the mesh axes over which its units are split, each with its part of
            every gate, so that the loop exchanges states; none where Keras's path must be taken.
        bytes: Bytes of its weights, whole.
        reason: Why.
    """

    gather: bool
    units_axes: tuple[str, ...]
    bytes: int
    reason: str

    def __str__(self):
        return self.reason

    def to_dict(self):
        """The choice as plain values."""
        return dataclasses.asdict(self)


def gathering(
    size: int,
    *,
    units: int,
    axes: tuple[str, ...],
    mesh: Mapping[str, int],
    data_axes: tuple[str, ...],
) -> Gathering:
    """The choice for a layer some of whose weights are split over devices.

    A split kept inside the loop exchanges states in every step, hundreds of small collectives where
    two large ones do. So weights are gathered as long as a device has room for all of them.

    Args:
        size: Bytes of the layer's weights, whole.
        units: Size of the state.
        axes: Mesh axes over which the recurrent kernel's last dimension is split.
        mesh: Sizes of the mesh's axes.
        data_axes: Those that split the batch.
    """
    have = f"its weights are split and {size / 2**20:.1f} MiB whole"
    if size <= GATHERED_BYTES:
        reason = f"{have}: gathered on every device before the loop, which has no collective in it"
        return Gathering(True, (), size, reason)
    have += f", more than the {GATHERED_BYTES / 2**20:.0f} MiB to gather"
    ways = math.prod(mesh[axis] for axis in axes)
    if axes and units % ways == 0 and not set(axes) & set(data_axes):
        over = " and ".join(repr(axis) for axis in axes)
        reason = f"{have}: every gate's units are split over {over}, and steps exchange states"
        return Gathering(False, axes, size, reason)
    why = "the recurrent kernel's columns are not split over axes of their own"
    if axes and units % ways:
        why = f"{units} units do not divide by {ways}"
    return Gathering(False, (), size, f"{have}, and {why}: the loop is Keras's")
