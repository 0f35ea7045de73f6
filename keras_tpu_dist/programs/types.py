"""Steps that return values of other types than they got, which no loop of XLA can carry.

A variable may begin with another dtype than its own: an initializer for float32 may return integers
or float16, and a step then returns float32. Keras compiles the second step for what the first one
returned. So here: a step that changes types runs apart, and a loop has the steps behind it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class TypesChange(Exception):
    """A step has returned a state of other types than it got."""


def types_of(arrays: Sequence[Any]) -> list[tuple[Any, bool]]:
    """The dtypes of arrays, and whether they give way to those of others, as 1.0 does."""
    return [(jnp.result_type(a), getattr(a, "weak_type", False)) for a in arrays]


def check_types(state: Any, after: Any) -> None:
    """Raises `TypesChange` if the state after a step has other types."""
    if types_of(jax.tree.leaves(state)) != types_of(jax.tree.leaves(after)):
        raise TypesChange


def in_one_loop(
    one: Callable, looped: Callable, state: Any, data: Any, steps: int, every: bool
) -> Any:
    """Several steps, of which the last ones are one loop.

    Args:
        one: A step, `(state, data) -> (outputs, state)`.
        looped: A loop, `(state, data, steps) -> (outputs, state)`; raises `TypesChange` if a step
            changes the types of its state.
        data: Arrays for all steps, stacked.
        every: Whether to return the outputs of all steps, stacked, or of the last one.

    Returns:
        The outputs and the state after the last step.
    """
    apart: list[Any] = []
    while steps > 0:
        try:
            outputs, state = looped(state, data, steps)
        except TypesChange:
            outputs, state = one(state, jax.tree.map(_first, data))
            apart.append(jax.tree.map(lambda of_one: of_one[None], outputs) if every else outputs)
            data, steps = jax.tree.map(_rest, data), steps - 1
        else:
            apart.append(outputs)
            break
    if every and len(apart) > 1:
        return jax.tree.map(lambda *of_steps: jnp.concatenate(of_steps), *apart), state
    return apart[-1], state


def _first(stack: Any) -> Any:
    return lax.index_in_dim(stack, 0, keepdims=False)


def _rest(stack: Any) -> Any:
    return lax.slice_in_dim(stack, 1, None)
