"""Indices with few bits, which cannot represent the start of a device's part."""

from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("gather",)


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether rows are gathered by indices with few bits.

    Args:
        equation: The gather.
        mesh: The mesh, which is not used.
    """
    return narrow(equation.invars[1])


def repaired(equation: Any, spread: Spread) -> list | None:
    """A gather by 32-bit indices, or `None` if it already has them.

    Args:
        equation: The gather.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    if not narrow(equation.invars[1]):
        return None

    def gather(operand, indices):
        return equation.primitive.bind(operand, widened(indices), **equation.params)

    return replacement(equation, gather)


def narrow(index: Any) -> bool:
    """Whether an index has too few bits for XLA, which adds and subtracts positions in its dtype.

    Scatters and slices by such indices are also repaired for this.

    Args:
        index: A value of a program.
    """
    return index.aval.dtype.itemsize < 4


def widened(index: Any) -> Any:
    """An index of at least 32 bits.

    Args:
        index: An array of whole numbers.
    """
    return index.astype("int32") if index.dtype.itemsize < 4 else index
