"""Facts about a model on any mesh: its products, its weights, and its activations."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import entry_names
from keras_tpu_dist.common.plain import plain_operations
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.memory.remat import LayerPolicies
from keras_tpu_dist.programs.products import Lookup, MatrixProduct, lookups_of, products_of
from keras_tpu_dist.strategy import TPUStrategy
from keras_tpu_dist.tools.dryrun.build import Build, Subject, described
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.searches.activations import HeldArray, buffers_of
from keras_tpu_dist.training.flops import count_tokens, forward_pass

# The axes of every dimension of a weight.
Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Weight:
    """A weight of a model."""

    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    slot_bytes: int

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Kept:
    """The memory and the operations of a step under a remat policy.

    Attributes:
        flops: Operations of all products of a step, including recomputation.
    """

    flops: float
    buffers: tuple[HeldArray, ...]


@dataclass(frozen=True)
class Facts:
    """A model's step, independent of a mesh.

    Attributes:
        rows: The number of rows in the traced batch.
        tokens: The number of tokens in it, 0 if the model reads none.
        variables: The number of variables that a step reads or writes.
    """

    rows: int
    tokens: int
    weights: tuple[Weight, ...]
    products: tuple[MatrixProduct, ...]
    lookups: tuple[Lookup, ...]
    kept: dict[str | None, Kept]
    output_bytes: int
    input_bytes: int
    variables: int


class DescribedModel:
    """A model without memory, from which facts and layouts are derived.

    Args:
        model: The model.
        batch: Its batch's shapes.
        strategy: The strategy in whose scope it was built.
    """

    def __init__(self, model: keras.Model, batch: tuple, strategy: TPUStrategy):
        self._model, self._batch, self._strategy = model, batch, strategy
        self.name = model.name
        self._weights = _keras.variables_of(model)

    def facts(self, rows: int, policies: Sequence[str | None]) -> Facts:
        """Traces the forward pass.

        Args:
            rows: The number of rows in the batch.
            policies: The remat policies to trace.
        """
        with plain_operations():
            forward, arguments = forward_pass(self._model, self._batch, training=True)
            trace = jax.make_jaxpr(forward)(*arguments)
            outputs = jax.eval_shape(forward, *arguments)
        kept = {policy: self._kept(policy, rows, outputs) for policy in policies}
        num_weights = len(jax.tree.leaves(arguments[:2]))
        leaves = jax.tree.leaves(self._batch)
        return Facts(
            rows=rows,
            tokens=count_tokens(self._batch[0]),
            weights=tuple(self._described_weights()),
            products=products_of(trace, num_weights),
            lookups=lookups_of(trace, num_weights),
            kept=kept,
            output_bytes=sum(map(bytes_of, jax.tree.leaves(outputs))),
            input_bytes=sum(map(bytes_of, leaves)),
            variables=len(_keras.state_variables(self._model)),
        )

    def specs(self, strategy: TPUStrategy) -> list[Spec]:
        """The axes of each weight's dimensions under another strategy.

        Args:
            strategy: The strategy.
        """
        placement = strategy.placement(self._model)
        every = [(placement.decision(v).axes, len(v.shape)) for v in self._weights]
        # A layout may leave out dimensions at its end.
        return [tuple(map(entry_names, (*axes, *[None] * n)))[:n] for axes, n in every]

    def _described_weights(self) -> Iterator[Weight]:
        slots: dict[int, int] = {}
        for _, slot, weight in _keras.optimizer_slots(self._model):
            slots[id(weight)] = slots.get(id(weight), 0) + bytes_of(slot)
        trainable = {id(v) for v in self._model.trainable_variables}
        for v in self._weights:
            itemsize = np.dtype(v.dtype).itemsize
            yield Weight(tuple(v.shape), itemsize, id(v) in trainable, slots.get(id(v), 0))

    def _kept(self, policy: str | None, rows: int, outputs: Any) -> Kept:
        own = self._strategy.remat
        self._strategy.remat = LayerPolicies(policy)
        self._strategy.remat.choose(self._model)
        try:
            forward, arguments = forward_pass(self._model, self._batch, training=True)
            trainable, *rest = arguments

            def gradients(trainable, rest, outputs):
                return jax.vjp(lambda w: forward(w, *rest), trainable)[1](outputs)

            own_trace = jax.make_jaxpr(gradients)(trainable, rest, outputs)
            buffers = buffers_of(own_trace, len(self._weights), rows)
            with plain_operations():  # so that no product is inside a kernel
                trace = jax.make_jaxpr(gradients)(trainable, rest, outputs)
        finally:
            self._strategy.remat = own
        flops = sum(p.flops * p.times for p in products_of(trace, 0))
        return Kept(flops, buffers)


@contextlib.contextmanager
def describing(
    build: Build, strategy: TPUStrategy, given: Inputs, rows: int
) -> Iterator[DescribedModel]:
    """The model of a build function, without memory.

    Args:
        build: See `keras_tpu_dist.dry_run`.
        strategy: The strategy to build it under.
        given: `x`, `y`, `sample_weight` and `sequence_length`; see there.
        rows: The number of rows in the batch.
    """
    with described(Subject(build, strategy, rows, given), []) as (model, batch):
        yield DescribedModel(model, batch, strategy)
