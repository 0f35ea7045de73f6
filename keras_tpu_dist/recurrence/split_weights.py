"""Weights that are split over devices: gathered before the loop, or left to Keras's path."""

import dataclasses

from keras_tpu_dist.common.printed import Printed

# A sixteenth of the memory of the smallest TPU core that XLA still serves (v5e: 16 GB), the same
# limit as for values kept for the backward pass.
GATHERED_BYTES = 2**30


@dataclasses.dataclass(frozen=True, repr=False)
class Gathering(Printed):
    """How a layer handles weights that are split over devices.

    Args:
        gather: Whether its weights are gathered once before the loop, which then has no collective
            in it. Otherwise Keras's path runs.
        bytes: Bytes of its whole weights.
        reason: The reason.
    """

    gather: bool
    bytes: int
    reason: str

    def __str__(self):
        return self.reason

    def to_dict(self):
        """The choice as plain data."""
        return dataclasses.asdict(self)


def gathering(size: int) -> Gathering:
    """The choice for a layer whose weights are split over devices.

    If the split is kept inside the loop, every step exchanges states: hundreds of small collectives
    instead of two large ones. So weights are gathered if a device has room for all of them.

    Args:
        size: Bytes of the layer's whole weights.
    """
    have = f"its weights are split and {size / 2**20:.1f} MiB whole"
    if size <= GATHERED_BYTES:
        reason = f"{have}: gathered on every device before the loop, which has no collective in it"
        return Gathering(True, size, reason)
    limit = GATHERED_BYTES / 2**20
    reason = f"{have}, more than the {limit:.0f} MiB to gather: the loop is Keras's"
    return Gathering(False, size, reason)
