"""The input of a dry run: the given batch, or one that the model declares, without values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.tools.dryrun.open_sizes import filled
from keras_tpu_dist.training import membership
from keras_tpu_dist.training.protocol import Strategy


def check_asked(build: Any, strategy: Any, caller: str = "dry_run") -> Strategy:
    """Raises a `ValueError` unless a model and a strategy are given.

    Args:
        build: A function that makes a model, or a model.
        strategy: The strategy, or `None` for the one that the model belongs to, or that is in
            scope.
    """
    if strategy is None:
        member = membership.of_model(build) if isinstance(build, keras.Model) else None
        strategy = _keras.active_strategy() if member is None else member.strategy
    if not callable(build) or not hasattr(strategy, "placer"):
        raise value_error(
            f"{caller} takes a function that builds a model, or a model, and a TPUStrategy.",
            received={"build": build, "strategy": strategy},
            fix=f'Write {caller}(build, ktd.TPUStrategy(topology="v5e:2x4"), batch_size=64).',
        )
    return strategy


@dataclass(frozen=True)
class Inputs:
    """What a dry run, a check or a search is given for the input; see `dry_run`.

    Args:
        x: The input, its shapes, or `None` for what the model declares.
        y: The target, or its shapes.
    """

    x: Any = None
    y: Any = None
    sample_weight: Any = None
    sequence_length: int | None = None


def check_batch_size(batch_size: int, strategy: Strategy) -> None:
    """Raises a `ValueError` unless every part of the batch gets a row.

    Args:
        batch_size: Rows of all devices together, a whole number.
        strategy: The strategy, whose data axes split the batch into parts.
    """
    if not is_count(batch_size, strategy.num_replicas_in_sync):
        raise value_error(
            "The batch size is the global one, with at least one row for every part that the "
            "data axes make.",
            received=f"batch_size={batch_size!r} with {strategy.num_replicas_in_sync} part(s) "
            f"(data axes {strategy.data_axes}).",
            fix=f"Use a batch size of {strategy.num_replicas_in_sync} or more.",
        )


def described_batch(
    model: keras.Model,
    placer: BatchPlacer,
    inputs: Inputs,
    batch_size: int,
    mode: str,
    notes: list[str],
) -> tuple[Any, Any, Any]:
    """The batch `(x, y, sample_weight)` as `jax.ShapeDtypeStruct`.

    Without `y`, it is derived from outputs and losses, if there is a loss or the inputs are
    declared. Arrays may have any number of rows.

    Args:
        model: The model.
        placer: Knows the batch dimension of every array.
        inputs: What the user gave: `x`, `y`, `sample_weight` and `sequence_length`.
        batch_size: Rows of all devices together.
        mode: `"train"`, `"evaluate"` or `"predict"`, which drops `y` and `sample_weight`.
        notes: Gets a line if `y` is assumed, and one if `sequence_length` fills a size.
    """
    x, y, sample_weight = inputs.x, inputs.y, inputs.sample_weight
    declares = bool(getattr(model, "inputs", None))
    if x is None:
        if not declares:
            raise value_error(
                "A dry run needs to know the input.",
                received=f"x=None and model {model.name!r}, which declares no inputs.",
                fix='Pass x as an array, or as jax.ShapeDtypeStruct((1, 28, 28), "float32"); '
                "its rows are replaced by batch_size.",
            )
        x = _keras.declared_inputs(model)
    given = (x, None, None) if mode == "predict" else (x, y, sample_weight)
    x, y, sample_weight = filled(given, placer.axes, inputs.sequence_length, notes)
    if mode == "predict":
        return _of_rows((x, None, None), placer, batch_size)
    if y is not None or (model.loss is None and not declares):
        return _of_rows((x, y, sample_weight), placer, batch_size)
    y = _targets(model, _of_rows((x, None, None), placer, batch_size)[0])
    described = _of_rows((x, y, sample_weight), placer, batch_size)
    notes.append(f"y was not given, {_shapes_text(described[1])} is assumed from the outputs")
    return described


def _of_rows(batch: tuple, placer: BatchPlacer, batch_size: int) -> tuple[Any, Any, Any]:
    # `batch_axis` refers to the form in which a step gets it
    data = keras.utils.pack_x_y_sample_weight(*batch)
    leaves, treedef = flatten(data)
    described = [
        _described(leaf, a, batch_size) for leaf, a in zip(leaves, placer.axes(data), strict=True)
    ]
    return keras.utils.unpack_x_y_sample_weight(jax.tree.unflatten(treedef, described))


def _targets(model: keras.Model, x: Any) -> Any:
    """Targets derived from the model's outputs and their losses."""
    outputs = _keras.declared_outputs(model) if getattr(model, "inputs", None) else None
    if outputs is None or any(None in o.shape[1:] for o in jax.tree.leaves(outputs)):
        outputs = _keras.output_spec(model, symbolic(x))
    paths, treedef = jax.tree_util.tree_flatten_with_path(outputs)
    losses = model.loss
    if isinstance(losses, Mapping) and not isinstance(outputs, Mapping):
        losses = [losses.get(name) for name in getattr(model, "output_names", ())]
    if not isinstance(losses, (list, tuple)) or len(losses) != len(paths):
        losses = [_loss_at(losses, path) for path, _ in paths]
    return jax.tree.unflatten(
        treedef, [_target(o, loss) for (_, o), loss in zip(paths, losses, strict=True)]
    )


def _loss_at(losses: Any, path: tuple) -> Any:
    """The loss of one output; a single loss applies to all outputs."""
    for step in path:
        if isinstance(losses, Mapping):
            losses = losses.get(getattr(step, "key", None))
    return losses


def symbolic(batch: Any) -> Any:
    """A described batch as Keras's symbolic tensors.

    Args:
        batch: A structure of `jax.ShapeDtypeStruct`.
    """
    return jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype), batch)


def _target(output: Any, loss: Any) -> Any:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if "sparse" in name.lower():
        return keras.KerasTensor(output.shape[:-1], "int32")
    return keras.KerasTensor(output.shape, keras.config.floatx())


def _described(leaf: Any, axis: int | None, batch_size: int) -> jax.ShapeDtypeStruct:
    leaf = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    dtype = _dtype(leaf)
    shape = list(leaf.shape)
    if axis is not None and axis < len(shape):
        shape[axis] = batch_size
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _dtype(leaf: Any) -> np.dtype:
    """The dtype in which a step gets an array."""
    if getattr(leaf.dtype, "kind", None) in ("O", "S", "U") or "string" in str(leaf.dtype):
        if isinstance(leaf, keras.KerasTensor):
            raise value_error(
                "A TPU computes no text, so a dry run has no input of strings.",
                received=f"an input of shape {leaf.shape}, of dtype {leaf.dtype}.",
                fix="Leave out text layers, such as StringLookup or TextVectorization: apply "
                "them to the dataset, dataset.map(lambda x, y: (layer(x), y)), and begin the "
                'model with keras.Input(..., dtype="int32").',
            )
        raise value_error(
            "The input of a dry run must be numeric arrays, or their shapes.",
            received=f"{leaf!r}, of dtype {leaf.dtype}.",
            fix="Pass x and y separately, as one batch of a dataset or generator, or as "
            'jax.ShapeDtypeStruct((1, 28, 28), "float32").',
        )
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    # fit casts floats of arrays to the model's default float; those of a dataset do not change
    said = isinstance(leaf, (jax.ShapeDtypeStruct, keras.KerasTensor)) and dtype != "float64"
    if keras.backend.is_float_dtype(dtype) and not said:
        dtype = keras.config.floatx()
    return jax.dtypes.canonicalize_dtype(dtype)


def _shapes_text(structure: Any) -> str:
    return ", ".join(f"{t.dtype}{tuple(t.shape)}" for t in jax.tree.leaves(structure))
