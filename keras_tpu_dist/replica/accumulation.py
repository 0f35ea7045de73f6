"""Gradients of small batches, added up over the replicas once for each update.

With `gradient_accumulation_steps=N`, Keras adds up the gradients of N small batches, each of which
the replica function has reduced. In a launch of several steps, each replica adds up its own
gradients instead, in the same variables, and the sum over the replicas is made for the update.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from keras_tpu_dist import _keras
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.scopes import LAST_OF, RARE_BRANCH
from keras_tpu_dist.replica.context import ReplicaContext


class OwnSums:
    """The optimizers whose gradients a replica adds up itself within a launch."""

    def __init__(self) -> None:
        self._found: dict[int, Any] = {}

    def find(self, context: ReplicaContext, optimizer: Any, _: Any, gradients: list, *rest: Any):
        """Finds an optimizer by its gradients in a single step, which computes what Keras does."""
        every = len(gradients) == len(_keras.accumulated_for(optimizer))
        if every and all(context._own_part(gradient) is not None for gradient in gradients):
            self._found[id(optimizer)] = optimizer

    def add(
        self,
        context: ReplicaContext,
        optimizer: Any,
        is_last: Any,
        gradients: list,
        sums: list,
        values: list,
        update: Any,
    ) -> tuple[list, list] | None:
        """Adds the gradients of a step; see `_keras.accumulating`."""
        steps = optimizer.gradient_accumulation_steps
        if id(optimizer) not in self._found:
            log_once(
                f"optimizer {optimizer.name!r}: gradients are summed over the replicas at every "
                f"small batch, not once in {steps}: some are not results of all_reduce(); pass "
                "these as they are to optimizer.apply",
                logging.WARNING,
            )
            return None
        parts = map(context._own_part, gradients)
        sums = [total + part.astype(total.dtype) for total, part in zip(sums, parts, strict=True)]

        def last() -> tuple[list, list]:
            totals = context.all_reduce("sum", sums)
            return update([total / steps for total in totals], values), list(
                map(jnp.zeros_like, sums)
            )

        with jax.named_scope(LAST_OF.format(steps)):
            return jax.lax.cond(is_last, last, lambda: (values, sums))

    def begun(self, context: ReplicaContext, values: dict[int, Any]) -> dict[int, Any]:
        """The values of variables at the start of a launch: the first replica has the sums."""
        sums = {key: values[key] for one in self._found.values() for key in _sums_of(one)}
        is_first = context.replica_id_in_sync_group == 0
        own = jax.tree.map(lambda total: jnp.where(is_first, total, jnp.zeros_like(total)), sums)
        return {**values, **own}

    def ended(self, context: ReplicaContext, values: dict[int, Any]) -> dict[int, Any]:
        """Their values at its end: sums over the replicas, if it ends within an update."""
        for optimizer in self._found.values():
            own = [values[key] for key in _sums_of(optimizer)]
            count = values[id(_keras.counter_of(optimizer))]
            is_done = count % optimizer.gradient_accumulation_steps == 0
            with jax.named_scope(RARE_BRANCH):
                sums = jax.lax.cond(
                    is_done,
                    lambda own=own: own,
                    lambda own=own: context.all_reduce("sum", own),
                )
            values = {**values, **dict(zip(_sums_of(optimizer), sums, strict=True))}
        return values


def _sums_of(optimizer: Any) -> list[int]:
    return list(_keras.accumulated_for(optimizer))
