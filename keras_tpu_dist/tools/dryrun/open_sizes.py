"""Open sizes in a model's inputs: fills some, and raises an error for the others."""

from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.input.batch_axis import element_names, flatten

_TEXT_RANK = 3


def filled(
    batch: tuple[Any, Any, Any],
    axes_of: Callable[[Any], list[int | None]],
    sequence_length: int | None,
    notes: list[str],
) -> tuple[Any, Any, Any]:
    """A batch without open sizes.

    Args:
        batch: `(x, y, sample_weight)`, of arrays or objects with shape and dtype.
        axes_of: Returns the batch dimension of every array, as `BatchPlacer.axes`.
        sequence_length: The size of every open time axis; `None` fills nothing.
        notes: Gets a line about the filled sizes.
    """
    data = keras.utils.pack_x_y_sample_weight(*batch)
    leaves, treedef = flatten(data)
    # A batch as `element_names` takes it: `x` alone may be a list.
    names, axes = element_names(data if isinstance(data, tuple) else (data,)), axes_of(data)
    sizes = [_open(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    if not any(sizes):
        if sequence_length is not None:
            raise _nothing_to_fill(sequence_length, leaves, names)
        return batch
    if sequence_length is not None:
        times = [n for n, open_ in enumerate(sizes) if _is_time(leaves[n], open_)]
        if times:
            shown = ", ".join(_shown(names[n], leaves[n]) for n in times)
            notes.append(f"sequence_length={sequence_length} is the open size of {shown}")
        for n in times:
            leaves[n], sizes[n] = _with_sizes(leaves[n], sizes[n], sequence_length), ()
    if any(sizes):
        raise _open_sizes(leaves, names, sizes)
    return keras.utils.unpack_x_y_sample_weight(jax.tree.unflatten(treedef, leaves))


def _open(leaf: Any, axis: int | None) -> tuple[int, ...]:
    """The dimensions of open size, except the batch."""
    shape = getattr(leaf, "shape", ())
    return tuple(i for i, size in enumerate(shape) if size is None and i != axis)


def _is_time(leaf: Any, open_: tuple[int, ...]) -> bool:
    """Whether open dimensions are time: those of texts, frames and masks, not of images."""
    return bool(open_) and len(leaf.shape) <= _TEXT_RANK


def _with_sizes(leaf: Any, open_: tuple[int, ...], size: int) -> Any:
    shape = tuple(size if i in open_ else n for i, n in enumerate(leaf.shape))
    if isinstance(leaf, keras.KerasTensor):
        return keras.KerasTensor(shape, leaf.dtype, name=leaf.name)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _shown(name: str, leaf: Any) -> str:
    """An array's place in the batch, and its name if the place does not include it."""
    own = getattr(leaf, "name", None)
    if own is None or own.startswith("keras_tensor") or f"'{own}'" in name:
        return name
    return f"{name} '{own}'"


def _nothing_to_fill(sequence_length: int, leaves: list, names: list[str]) -> ValueError:
    shapes = ", ".join(
        f"{n}{tuple(getattr(a, 'shape', ()))}" for n, a in zip(names, leaves, strict=True)
    )
    return value_error(
        "sequence_length fills open sizes of inputs, and none is open.",
        received=f"sequence_length={sequence_length} for {shapes}.",
        fix="Leave it out, or give x with the sizes that you want.",
    )


def _open_sizes(leaves: list, names: list[str], still: list[tuple[int, ...]]) -> ValueError:
    found = [
        f"{_shown(name, leaf)} of shape {tuple(leaf.shape)}"
        for name, leaf, open_ in zip(names, leaves, still, strict=True)
        if open_
    ]
    times = any(_is_time(leaf, open_) for leaf, open_ in zip(leaves, still, strict=True))
    length = "sequence_length=512 (in the shell --sequence-length 512), or " if times else ""
    own = " and ".join(
        {n.partition("[")[0]: 0 for n, open_ in zip(names, still, strict=True) if open_}
    )
    return value_error(
        "A dry run needs known sizes, but a size of an input is open.",
        received=f"{'; '.join(found)}.",
        fix=f"Give {length}{own} with your own sizes: arrays, or "
        "jax.ShapeDtypeStruct(shape, dtype).",
    )
