"""Slices whose start is only known at run time: it is clamped before the array is partitioned."""

from typing import Any

from jax import lax
from jax.extend import core
from jax.sharding import Mesh

from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.indices import narrow, widened
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("dynamic_slice", "dynamic_update_slice")


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether the start of a slice is only known at run time, or may be outside.

    Args:
        equation: The slice, or the update of one.
        mesh: The mesh, which is not used.
    """
    return not all(_is_inside(start, last) for start, last in zip(*_places(equation), strict=True))


def repaired(equation: Any, spread: Spread) -> list | None:
    """A slice with a clamped start, or `None` if it is right already.

    A start beyond the end means the last position at which the slice fits. XLA's partitioner moves
    it back into every device's part instead.

    Args:
        equation: The slice, or the update of one.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    starts, last = _places(equation)
    atoms = [*equation.invars[: -len(last)], *equation.outvars]
    split = [any(spread.axes(atom, d) for atom in atoms) for d in range(len(last))]
    clamped = [split[d] and not _is_inside(start, last[d]) for d, start in enumerate(starts)]
    if not any(clamped):
        return None

    def sliced(*operands):
        arrays, starts = operands[: -len(last)], operands[-len(last) :]
        starts = [
            lax.clamp(start.dtype.type(0), start, start.dtype.type(end)) if clamp else start
            for start, end, clamp in zip(map(widened, starts), last, clamped, strict=True)
        ]
        return equation.primitive.bind(*arrays, *starts, **equation.params)

    return replacement(equation, sliced)


def _places(equation: Any) -> tuple[list, list[int]]:
    """The start along every dimension, and the last one at which the slice fits."""
    operand, *rest = equation.invars
    update = equation.primitive.name == "dynamic_update_slice"
    size = (rest if update else equation.outvars)[0].aval.shape
    last = [whole - part for whole, part in zip(operand.aval.shape, size, strict=True)]
    return rest[1:] if update else rest, last


def _is_inside(start: Any, last: int) -> bool:
    return isinstance(start, core.Literal) and 0 <= start.val <= last and not narrow(start)
