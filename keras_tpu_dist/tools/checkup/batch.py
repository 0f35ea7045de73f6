"""The batch for checking a user's step: the user's data, or random data."""

from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.tools.dryrun.inputs import Inputs, symbolic
from keras_tpu_dist.training.protocol import Strategy


@dataclass(frozen=True)
class Given(Inputs):
    """The caller's description of the batch.

    Args:
        batch_size: Rows for all devices together, or `None`.
    """

    batch_size: int | None = None

    def rows(self, strategy: Strategy) -> int:
        """Rows of the batch: by default two for each part and one more, an uneven batch.

        Args:
            strategy: The strategy.
        """
        if self.batch_size is not None:
            return self.batch_size
        parts = strategy.num_replicas_in_sync
        few = [
            leaf.shape[0]
            for leaf in jax.tree.leaves((self.x, self.y))
            if not isinstance(leaf, jax.ShapeDtypeStruct) and getattr(leaf, "shape", ())
        ]
        return max(min([2 * parts + (parts > 1), *few]), parts)


NOTHING = Given()


def values(
    model: keras.Model, described: tuple, given: Given, placer: BatchPlacer, number: int = 0
) -> Any:
    """A step's batch on the host, `(x, y, sample_weight)` or shorter.

    Args:
        model: The model.
        described: The batch as `jax.ShapeDtypeStruct`, from `tools.dryrun.inputs.described_batch`.
        given: The caller's data; random numbers replace missing parts.
        placer: Finds the batch dimension.
        number: Which batch; the caller's rows are used in turn.
    """
    rng = np.random.default_rng(number)
    classes = _classes(model, described)
    wanted = keras.utils.pack_x_y_sample_weight(*described)
    own = (given.x, given.y, given.sample_weight)
    drawn = _drawn(rng, model, described, classes)
    chosen = [g if _has_values(g) else d for g, d in zip(own, drawn, strict=True)]
    parts = keras.utils.pack_x_y_sample_weight(*chosen)
    shapes, structure = flatten(wanted)
    leaves = [
        _cut(leaf, shape, axis, number)
        for leaf, shape, axis in zip(flatten(parts)[0], shapes, placer.axes(wanted), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def _has_values(part: Any) -> bool:
    leaves = jax.tree.leaves(part)
    return bool(leaves) and not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def _cut(leaf: Any, shape: jax.ShapeDtypeStruct, axis: int | None, number: int) -> np.ndarray:
    array = np.asarray(leaf)
    if axis is not None and axis < array.ndim:
        rows = shape.shape[axis]
        chosen = np.arange(number * rows, (number + 1) * rows) % array.shape[axis]
        array = np.take(array, chosen, axis)
    return array.astype(shape.dtype)


def _drawn(rng: Any, model: keras.Model, described: tuple, classes: list[int]) -> tuple:
    x, y, weight = described
    tokens = _tokens(model)
    paths, structure = jax.tree_util.tree_flatten_with_path(x)
    named = [(jax.tree_util.keystr(path).lower(), leaf) for path, leaf in paths]
    inputs = jax.tree.unflatten(
        structure, [_input(rng, leaf, tokens, name) for name, leaf in named]
    )
    leaves, structure = jax.tree.flatten(y)
    targets = [
        _target(rng, leaf, n) for leaf, n in zip(leaves, classes or [2] * len(leaves), strict=True)
    ]
    weights = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), weight)
    return inputs, jax.tree.unflatten(structure, targets), weights


def _input(rng: Any, leaf: jax.ShapeDtypeStruct, tokens: int, name: str) -> np.ndarray:
    kind = np.dtype(leaf.dtype).kind
    if "mask" in name or kind == "b":
        return np.ones(leaf.shape, leaf.dtype)
    if kind in "iu":
        bound = 256 if leaf.dtype == np.uint8 else tokens
        return rng.integers(0, bound, leaf.shape).astype(leaf.dtype)
    return rng.normal(size=leaf.shape).astype(leaf.dtype)


def _target(rng: Any, leaf: jax.ShapeDtypeStruct, classes: int) -> np.ndarray:
    if np.dtype(leaf.dtype).kind in "iu":
        return rng.integers(0, max(classes, 1), leaf.shape).astype(leaf.dtype)
    return rng.uniform(size=leaf.shape).astype(leaf.dtype)


def _tokens(model: keras.Model) -> int:
    """The number of tokens in the model's smallest embedding."""
    sizes = [
        layer.input_dim
        for layer in _keras.flatten_layers(model)
        if isinstance(layer, keras.layers.Embedding)
    ]
    return min(sizes, default=2)


def _classes(model: keras.Model, described: tuple) -> list[int]:
    """The last dimension of each output."""
    targets = jax.tree.leaves(described[1])
    outputs = jax.tree.leaves(_keras.output_spec(model, symbolic(described[0])))
    if len(outputs) != len(targets):
        return []
    return [int(o.shape[-1] or 1) if o.shape else 1 for o in outputs]
