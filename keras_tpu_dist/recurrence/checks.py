"""What `unroll` and `segment` may be."""

import math

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message


def check_unroll(unroll: bool | int) -> bool | int:
    """Refuses what cannot be a number of steps.

    Args:
        unroll: True for all steps, False to leave the number open, or the number of steps in one
            iteration of the compiled loop.

    Returns:
        What was given.

    Raises:
        ValueError: If it is neither a boolean nor a whole number of at least 1.
    """
    if isinstance(unroll, bool):
        return unroll
    if not is_count(unroll, 1):
        raise ValueError(
            message(
                "`unroll` must be True (all steps), False (one step) or a positive integer, the "
                "number of steps in one iteration of the compiled loop.",
                received={"unroll": unroll},
                fix="Write unroll=4, or leave it out.",
            )
        )
    return unroll


def check_segment(segment: int | str | None, steps: int | None = None) -> int | str | None:
    """Refuses segments that cannot be; with the number of steps, resolves "auto".

    Args:
        segment: None, "auto", or the number of steps between kept states.
        steps: The length of time if it is known.

    Returns:
        The segment as given, or for "auto" with known `steps` about the square root of it: states
        at the ends of the segments and one segment's gates then take about equal room.

    Raises:
        ValueError: If it is neither, or longer than time.

    References:
        Chen et al., "Training deep nets with sublinear memory cost",
        https://arxiv.org/abs/1604.06174.
    """
    if segment is None:
        return None
    if segment == "auto":
        return segment if steps is None else _near_root(steps)
    if not is_count(segment, 1):
        raise ValueError(
            message(
                "`segment` must be None, 'auto' or a positive integer, the number of steps between "
                "kept states.",
                received={"segment": segment},
                fix="Write segment='auto'.",
            )
        )
    if steps is not None and segment > steps:
        raise ValueError(
            message(
                "`segment` must not be longer than the sequence.",
                received={"segment": segment, "timesteps": steps},
                fix=f"Write segment='auto', which here means {_near_root(steps)}.",
            )
        )
    return segment


def _near_root(steps: int) -> int:
    """A divisor of `steps` within a factor of two of its root, else the root rounded up."""
    root = math.isqrt(steps - 1) + 1
    near = [d for d in range((root + 1) // 2, 2 * root + 1) if steps % d == 0]
    return min(near, key=lambda d: abs(d - root)) if near else root
