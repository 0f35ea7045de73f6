"""What is done about weights that are split over devices."""

import dataclasses

# A sixteenth of the memory of the smallest TPU core that XLA still serves (v5e: 16 GB), as much as
# may be kept for the backward pass.
GATHERED_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Whether weights that are split over devices are brought together for the loop.

    Args:
        gather: Whether they are: once before the loop, which then has no collective in it.
        bytes: Bytes of the layer's weights, whole.
        reason: Why.
    """

    gather: bool
    bytes: int
    reason: str

    def __str__(self):
        return self.reason

    def to_dict(self):
        """The choice as plain values."""
        return dataclasses.asdict(self)


def gathering(size: int) -> Gathering:
    """The choice for a layer some of whose weights are split over devices.

    A split kept inside the loop would exchange states in every step, hundreds of small collectives
    where two large ones do. So weights are gathered as long as a device has room for all of them.

    Args:
        size: Bytes of the layer's weights, whole.
    """
    have = f"its weights are split and {size / 2**20:.1f} MiB whole"
    if size <= GATHERED_BYTES:
        reason = f"{have}: gathered on every device before the loop, which has no collective in it"
        return Gathering(True, size, reason)
    limit = f"{GATHERED_BYTES / 2**20:.0f} MiB"
    return Gathering(
        False, size, f"{have}, more than the {limit} to gather: the loop exchanges states instead"
    )
