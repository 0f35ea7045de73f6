"""What a dry run feeds: the batch that was given, or that the model declares, without values."""

import math
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.training.batch_axis import flatten
from keras_tpu_dist.training.batches import BatchPlacer
from keras_tpu_dist.training.strategy import Strategy


def check_batch_size(batch_size: int, strategy: Strategy) -> None:
    """Raises a `ValueError` unless every part of the batch gets a row.

    Args:
        batch_size: Rows of all devices together, a whole number.
        strategy: The strategy, whose data axes split the batch into parts.
    """
    if not is_count(batch_size, strategy.num_replicas_in_sync):
        raise ValueError(
            message(
                "The batch size counts the rows of all devices together, at least one for each "
                "part that the data axes make.",
                received=f"batch_size={batch_size!r} with {strategy.num_replicas_in_sync} part(s) "
                f"(data axes {strategy.data_axes}).",
                fix=f"Use a batch size of {strategy.num_replicas_in_sync} or more.",
            )
        )


def described_batch(
    model: keras.Model,
    placer: BatchPlacer,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int,
    mode: str,
    notes: list[str],
) -> tuple[Any, Any, Any]:
    """The batch `(x, y, sample_weight)` as `jax.ShapeDtypeStruct`.

    Args:
        model: The model.
        placer: Says which dimension of each array is the batch.
        x: The input, arrays or their shapes, with any rows. `None`: what the model declares.
        y: The target, likewise. `None`: what outputs and losses suggest, if inputs are declared.
        sample_weight: Sample weights, likewise; `None`: none.
        batch_size: Rows of all devices together.
        mode: `"train"`, `"evaluate"` or `"predict"`, which drops `y` and `sample_weight`.
        notes: Gets a line if `y` is assumed.

    Raises:
        ValueError: If `x` is `None` and the model declares no inputs, or if a dimension other than
            the batch is not known.
    """
    if x is None:
        if not getattr(model, "inputs", None):
            raise ValueError(
                message(
                    "A dry run needs to know the input.",
                    received=f"x=None and model {model.name!r}, which declares no inputs.",
                    fix='Give x as an array, or jax.ShapeDtypeStruct((1, 28, 28), "float32"); '
                    "its rows are replaced by batch_size.",
                )
            )
        x = _keras.declared_inputs(model)
    assumed = False
    if mode == "predict":
        y = sample_weight = None
    elif y is None and getattr(model, "inputs", None):
        y = _targets(model)
        assumed = True
    batch = (x, y, sample_weight)
    leaves, treedef = flatten(batch)
    axes = placer.axes(batch)
    described = jax.tree.unflatten(
        treedef, [_described(leaf, axis, batch_size) for leaf, axis in zip(leaves, axes)]
    )
    if assumed:
        notes.append(f"y was not given, {_shapes_text(described[1])} is assumed from the outputs")
    return described


def _targets(model: keras.Model) -> Any:
    """What the model's outputs and their losses suggest as targets."""
    outputs, treedef = jax.tree.flatten(_keras.declared_outputs(model))
    losses = model.loss
    if isinstance(losses, dict):
        losses = [losses.get(name) for name in getattr(model, "output_names", ())]
    if not isinstance(losses, (list, tuple)) or len(losses) != len(outputs):
        losses = [losses] * len(outputs)
    return jax.tree.unflatten(treedef, [_target(o, loss) for o, loss in zip(outputs, losses)])


def _target(output: Any, loss: Any) -> Any:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if "sparse" in name.lower():
        return keras.KerasTensor(output.shape[:-1], "int32")
    return keras.KerasTensor(output.shape, keras.config.floatx())


def _described(leaf: Any, axis: int | None, batch_size: int) -> jax.ShapeDtypeStruct:
    leaf = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    shape = list(leaf.shape)
    if axis is not None and axis < len(shape):
        shape[axis] = batch_size
    if None in shape:
        raise ValueError(
            message(
                "Every dimension of an input but the batch must be known.",
                received={"shape": tuple(leaf.shape)},
                fix='Give x with its sizes, as in jax.ShapeDtypeStruct((1, 512), "int32").',
            )
        )
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    # fit casts what NumPy makes by default to the model's default float
    dtype = {"float64": keras.config.floatx(), "int64": "int32"}.get(dtype, dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _shapes_text(structure: Any) -> str:
    return ", ".join(f"{t.dtype}{tuple(t.shape)}" for t in jax.tree.leaves(structure))


def count_tokens(x: Any) -> int:
    """The tokens of an input of `(batch, time)` whole numbers; 0 for any other, such as pixels.

    Args:
        x: Arrays or their shapes, in any structure. The first such array counts, no further one.
    """
    for leaf in jax.tree.leaves(x):
        if np.dtype(leaf.dtype).kind in "iu" and leaf.dtype != np.uint8 and leaf.ndim == 2:
            return math.prod(leaf.shape)
    return 0
