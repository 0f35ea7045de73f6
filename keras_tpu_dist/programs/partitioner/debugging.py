"""`jax_debug_nans` and `jax_debug_infs` on a mesh: they report the layer, also for uneven rows.

`jax.jit` runs a function again, operation by operation, to find the source of a NaN. It would do so
on padded and split arrays, in which operations on uneven rows are themselves errors.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist.common.errors import message


def checked(program: Callable, function: Callable, mesh: Mesh, args: tuple) -> Any:
    """The results of a program, if they are finite.

    Raises:
        FloatingPointError: If a result is not finite: JAX's own, from the layer that computes it,
            or ours if that cannot be found.
    """
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
    with jax.debug_nans(False), jax.debug_infs(False):
        results = program(*args)
        wrong = _wrong(results, nans, infs)
        one_process = NamedSharding(mesh, PartitionSpec()).is_fully_addressable
        whole = _whole(args, mesh) if wrong and one_process else None
    if not wrong:
        return results
    why = "several processes cannot run a step operation by operation"
    if whole is not None:
        try:
            # `disable_jit` runs loops step by step too, so the step of a scan is found.
            with jax.disable_jit():
                function(*whole)
            why = "no such value appeared when it ran operation by operation"
        except (ValueError, NotImplementedError) as error:
            # JAX can only compile a `shard_map` over some of the mesh's axes.
            why = f"it cannot be run operation by operation: {error}"
    raise FloatingPointError(
        message(
            f"A step computed {wrong}, and the layer was not found.",
            received=f"{why}.",
            fix="Use callbacks.NameNaN() with fit, or jax.debug.print in replica code.",
        )
    )


def _wrong(results: Any, nans: bool, infs: bool) -> str:
    """The kind of value in the shards of this process: "NaN", "infinite values", or nothing."""
    for leaf in jax.tree.leaves(results):
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            continue
        for shard in leaf.addressable_shards:
            values = np.asarray(shard.data)
            if nans and np.any(np.isnan(values)):
                return "NaN"
            if infs and np.any(np.isinf(values)):
                return "infinite values"
    return ""


def _whole(args: tuple, mesh: Mesh) -> tuple:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.device_put(leaf, everywhere), args)
