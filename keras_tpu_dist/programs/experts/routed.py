"""Computes the chosen experts of tokens, on the devices that hold these experts.

References:
    - Grouped products of sorted rows, dropless: https://arxiv.org/abs/2211.15841
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.common.axes import axis_size
from keras_tpu_dist.programs.partitioner.places import mesh_here, padded_at_the_end


@dataclass(frozen=True)
class Where:
    """Which mesh axes split tokens and experts.

    Attributes:
        mesh: The mesh, or `None` for one device.
        experts: The axes that split experts; they may also split tokens.
    """

    mesh: Mesh | None = None
    tokens: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def size(self, axes: Sequence[str]) -> int:
        """The number of shards over some axes.

        Args:
            axes: Names of mesh axes.
        """
        return 1 if self.mesh is None else axis_size(self.mesh, tuple(axes))


@dataclass(frozen=True)
class Group:
    """The rows that one device computes: pairs of a token and an expert, sorted by expert.

    Attributes:
        tokens: The values of tokens, `(rows, ...)`.
        experts: The values of this device's experts, `(experts, ...)`.
        expert: The expert of each row; beyond the last one for rows of other devices.
        real: Whether each row belongs to this device; `None` if all do.
    """

    tokens: list[Any]
    experts: list[Any]
    whole: list[Any]
    sizes: Any
    expert: Any
    real: Any

    def product(self, rows: Any, kernels: Any, **options: Any) -> Any:
        """Multiplies each row by the kernel of its expert.

        Args:
            rows: `(rows, features)`.
            kernels: `(experts, features, units)`.
            options: Options of `jax.lax.ragged_dot`.
        """
        # On TPU, rows of other devices and their gradients contain arbitrary numbers or NaN.
        # Neither the sums of tokens nor the gradients of kernels read them.
        return lax.ragged_dot(rows, kernels, self.sizes, **options)

    def of_experts(self, values: Any) -> Any:
        """The value of each row's expert.

        Args:
            values: `(experts, ...)`.
        """
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            return jnp.take(values, self.expert, axis=0, mode="clip")
        # The gradient is a product too, which is faster than adding many rows to few experts.
        chosen = jax.nn.one_hot(self.expert, values.shape[0], dtype=values.dtype)
        flat = values.reshape(values.shape[0], -1)
        found = jnp.dot(chosen, flat, precision="highest")
        if self.real is not None:
            found = jnp.where(self.real[:, None], found, 0)  # and so is the gradient
        return found.reshape(len(self.expert), *values.shape[1:])


def routed(
    compute: Callable[[Group], Any],
    tokens: list[Any],
    experts: list[Any],
    whole: list[Any],
    indices: Any,
    count: int,
    where: Where,
    dtype: Any,
) -> Any:
    """The sum of its experts' results for every token. No token is dropped.

    A row is a token and one of its experts. Rows are sorted by expert, so that every expert
    multiplies adjacent rows. If a mesh axis splits the experts, every device computes the rows of
    its own experts. Tokens that are split over the same axis are gathered along it, and their sums
    are scattered. So a token is sent once to every device, and not once for every expert.

    Args:
        compute: A function from a `Group` to `(rows, ...)`.
        tokens: Values of tokens, `(tokens, ...)`.
        experts: Values of experts, `(experts, ...)`.
        whole: Other values that rows read.
        indices: `(tokens, chosen)`, different experts for every token.
        count: The number of experts, divisible by the axes that split experts.
        where: The mesh axes that split tokens and experts.
        dtype: The dtype of the sum and of the result.

    Returns:
        `(tokens, ...)`.
    """
    if where.mesh is None:
        return _on_device(compute, tokens, experts, whole, indices, count, 0, dtype)
    rows = indices.shape[0]
    short = -rows % where.size(where.tokens)
    *tokens, indices = (padded_at_the_end(array, {0: short}) for array in (*tokens, indices))
    by_token = PartitionSpec(where.tokens or None)
    by_expert = PartitionSpec(where.experts or None)
    specs = ([by_token] * len(tokens), [by_expert] * len(experts), [PartitionSpec()] * len(whole))
    mapped = jax.shard_map(
        functools.partial(_on_mesh, compute, count // where.size(where.experts), where, dtype),
        mesh=mesh_here(where.mesh),
        in_specs=(*specs, by_token),
        out_specs=by_token,
        check_vma=False,  # operations do not record over which axes their results vary
    )
    # Compiled in eager mode too: some kinds of `shard_map` only run compiled.
    return jax.jit(mapped)(tokens, experts, whole, indices)[:rows]


def _on_mesh(compute, count, where: Where, dtype, tokens, experts, whole, indices):
    """The part of one device: its tokens and `count` experts."""
    shared = tuple(name for name in where.experts if name in where.tokens)
    others = tuple(name for name in where.experts if name not in shared)
    first = lax.axis_index(where.experts) * count if where.experts else 0
    if shared:
        gather = functools.partial(lax.all_gather, axis_name=shared, tiled=True)
        tokens, indices = jax.tree.map(gather, (tokens, indices))
    sums = _on_device(compute, tokens, experts, whole, indices, count, first, dtype)
    if others:
        sums = _summed(sums, others)
    return lax.psum_scatter(sums, shared, tiled=True) if shared else sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(array: Any, axes: tuple[str, ...]) -> Any:
    """A sum over mesh axes that do not split the result.

    `shard_map` divides the gradient of such a result by the number of devices, and JAX's own rule
    sums it over them again. This rule avoids that exchange.
    """
    return lax.psum(array, axes)


def _summed_forward(array, axes):
    return lax.psum(array, axes), None


def _summed_backward(axes, _, gradient):
    return (gradient * lax.axis_size(axes),)


_summed.defvjp(_summed_forward, _summed_backward)


def _on_device(compute, tokens, experts, whole, indices, count, first, dtype):
    """Sums for tokens over their experts with numbers from `first` to `first + count`."""
    copies = indices.shape[1]
    # The most rows that this device can get.
    most = indices.shape[0] * min(copies, count)
    own = indices.reshape(-1) - first
    own = jnp.where((own >= 0) & (own < count), own, count)
    order = jnp.argsort(own)
    place = jnp.argsort(order)
    sizes = jnp.sum(own[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    total = jnp.sum(sizes)
    # If this device has all experts, it has all rows.
    kind = _Kind(copies, all_here=isinstance(first, int) and most == indices.size)
    if not kind.all_here:
        place = jnp.where(place < total, place, most)
    order = order[:most]
    group = Group(
        tokens=[_spread(kind, array, order, place) for array in tokens],
        experts=experts,
        whole=whole,
        sizes=sizes,
        expert=own[order],
        real=None if kind.all_here else jnp.arange(most) < total,
    )
    return _combined(kind, dtype, compute(group), order, place)


@dataclass(frozen=True)
class _Kind:
    """The number of rows of a token, and whether all of them are on this device."""

    copies: int
    all_here: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(kind: _Kind, tokens: Any, order: Any, place: Any) -> Any:
    """The token of each row. Its gradient is `_combined`, which adds no rows one by one."""
    return jnp.take(tokens, order // kind.copies, axis=0, mode="clip")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combined(kind: _Kind, dtype: Any, rows: Any, order: Any, place: Any) -> Any:
    """The sum of each token's rows, in a dtype; rows beyond the last one count as zero."""
    if kind.all_here:
        own = jnp.take(rows, place, axis=0, mode="clip")
    else:
        own = jnp.take(rows, place, axis=0, mode="fill", fill_value=0)
    return jnp.sum(own.reshape(-1, kind.copies, *rows.shape[1:]), axis=1, dtype=dtype)


def _spread_forward(kind, tokens, order, place):
    return _spread(kind, tokens, order, place), (order, place)


def _spread_backward(kind, residuals, gradient):
    return _combined(kind, gradient.dtype, gradient, *residuals), None, None


def _combined_forward(kind, dtype, rows, order, place):
    like = jnp.zeros((), rows.dtype)
    return _combined(kind, dtype, rows, order, place), (like, order, place)


def _combined_backward(kind, dtype, residuals, gradient):
    like, *places = residuals
    return _spread(kind, gradient.astype(like.dtype), *places), None, None


_spread.defvjp(_spread_forward, _spread_backward)
_combined.defvjp(_combined_forward, _combined_backward)
