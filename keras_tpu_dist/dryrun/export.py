"""A step as a program that another process compiles."""

from collections.abc import Callable

import jax
import jax.export

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.training.batches import PlacedBatch


def export_step(
    step: Callable, state: tuple, placed: PlacedBatch, platform: str
) -> jax.export.Exported:
    """Lowers a step for a platform.

    Args:
        step: `(state, batch) -> (outputs, state)`, jitted.
        state: The state as `jax.ShapeDtypeStruct`.
        placed: The batch, likewise.
        platform: `"tpu"` or `"cpu"`.

    Raises:
        ValueError: If the step calls code of the host, which is of this process.
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
    export = jax.export.export(jax.jit(flat_step), platforms=[platform], disabled_checks=allowed)
    try:
        return export(state, leaves)
    except NotImplementedError as error:
        if "host_callbacks" not in str(error):
            raise
        raise ValueError(
            message(
                "The step of a dry run is compiled elsewhere, where Python code of this process "
                "cannot be called.",
                received="a step that calls some, as jax.debug.print, jax.pure_callback and "
                "jax.experimental.io_callback do.",
                fix="Leave it out of the model that `build` returns.",
            )
        ) from error
