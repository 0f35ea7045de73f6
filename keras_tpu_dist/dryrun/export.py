"""A step as a program that another process compiles."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.extend import core

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.input.batches import PlacedBatch
from keras_tpu_dist.partitioner.jaxprs import (
    opened,
    replacement,
    with_equations,
    with_inner_jaxprs,
)


def export_step(
    step: Callable, state: tuple, placed: PlacedBatch, platform: str, notes: list[str]
) -> jax.export.Exported:
    """Lowers a step for a platform.

    Args:
        step: `(state, batch) -> (outputs, state)`, jitted.
        state: The state as `jax.ShapeDtypeStruct`.
        placed: The batch, likewise.
        platform: `"tpu"` or `"cpu"`.
        notes: Gets what is assumed.

    Raises:
        ValueError: If the step calls code of the host for its effects.
    """
    leaves, treedef = jax.tree.flatten(placed)

    def flat_step(state, leaves):
        return step(state, jax.tree.unflatten(treedef, leaves))

    # Programs are compiled by the same JAX that lowers them, so calls into the compiler without
    # a promise of compatibility are safe.
    allowed = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        # jax 0.10.1 does not know "ALL"
        for target in ("ALL", "LayoutConstraint")
    ]

    def exported(function: Callable) -> jax.export.Exported:
        jitted = jax.jit(function)
        export = jax.export.export(jitted, platforms=[platform], disabled_checks=allowed)
        return export(state, leaves)

    try:
        return exported(flat_step)
    except NotImplementedError as error:
        if "host_callbacks" not in str(error):
            raise
        cause = error
    notes.append(
        "what jax.pure_callback computes on the host is taken to be zeros, at once: no time or "
        "transfer of it is counted"
    )
    try:
        return exported(_with_zeros_of_the_host(flat_step, state, leaves))
    except NotImplementedError:
        raise ValueError(
            message(
                "The step of a dry run is compiled elsewhere, where Python code of this process "
                "cannot be called.",
                received="a step that calls some for its effects, as jax.debug.print and "
                "jax.experimental.io_callback do.",
                fix="Leave it out of the model that `build` returns.",
            )
        ) from cause


def _with_zeros_of_the_host(function: Callable, *args: Any) -> Callable:
    """A function with zeros in the place of what `jax.pure_callback` computes."""
    traced = jax.jit(function).trace(*args)
    program = core.jaxpr_as_fun(_without_callbacks(traced.jaxpr))
    structure = jax.tree.structure(traced.out_info)

    def with_zeros(*args):
        return jax.tree.unflatten(structure, program(*jax.tree.leaves(args)))

    return with_zeros


def _without_callbacks(jaxpr: Any) -> Any:
    equations: list[Any] = []
    for equation in opened(jaxpr).eqns:
        if equation.primitive.name == "pure_callback":
            results = [variable.aval for variable in equation.outvars]
            equations += replacement(
                equation, lambda *_, of=results: [jnp.zeros(r.shape, r.dtype) for r in of]
            )
        else:
            equations.append(with_inner_jaxprs(equation, _without_callbacks))
    return with_equations(jaxpr, equations)
