"""Layouts of activations: rows over the data axes, time over the sequence axis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, entry_names, named_sharding
from keras_tpu_dist.hardware.mesh import sequence_axis, state_axes

# (batch, time, features): arrays with fewer dimensions have no time, those with more may be images.
_RANK_OF_A_SEQUENCE = 3


@dataclass(frozen=True)
class Activations:
    """The layout of outputs whose shape is not known in advance.

    If a layer splits its weights over a model axis, the features stay as the layer computes them.

    Attributes:
        time: The axis that splits the second dimension of a sequence, or `None`.
        time_is_free: Whether sequences are split along time as their values are computed.
    """

    rows: str | tuple[str, ...] | None
    time: str | None = None
    time_is_free: bool = False

    def sharding(self, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
        """The layout of one output.

        Args:
            shape: Its shape. Time is split if it is a sequence, `(batch, time, features)`, whose
                length is divisible.
            mesh: The mesh.
        """
        sequence = self.time is not None and len(shape) == _RANK_OF_A_SEQUENCE
        time = self.time if sequence and not shape[1] % mesh.shape[self.time] else None
        entries = [self.rows, *(None,) * (len(shape) - 1)]
        if time is not None:
            entries[1] = time
        if self.time_is_free and len(shape) == _RANK_OF_A_SEQUENCE:
            entries[1] = PartitionSpec.UNCONSTRAINED
        if len(shape) > 1 and self._other_axes(mesh):
            entries[-1] = PartitionSpec.UNCONSTRAINED
            return NamedSharding(mesh, PartitionSpec(*entries))
        return named_sharding(mesh, tuple(entries))

    def _other_axes(self, mesh: Mesh) -> bool:
        taken = state_axes(mesh, entry_names(self.rows))
        return any(size > 1 and name not in taken for name, size in mesh.shape.items())


def block_outputs(model: Any, mesh: Mesh, data_axes: Sequence[str]) -> dict[str, Axes]:
    """Layouts that keep outputs of a model's own layers split by rows, and sequences also by time.

    Without these, XLA may gather the batch instead of the weights if the data axes split the
    weights.

    Args:
        model: A built model.
        mesh: The mesh.
        data_axes: The axes of the mesh that split the batch.
    """
    time = sequence_axis(mesh, data_axes)
    rows = (data_axes[0] if len(data_axes) == 1 else tuple(data_axes)) if data_axes else None
    axes: Axes = (rows,) if time is None else (rows, time)
    if not any(axes):
        return {}
    return {
        layer.path: axes
        for layer in _blocks(model)
        if layer.path and not isinstance(layer, keras.layers.InputLayer)
    }


def _blocks(model: Any) -> Iterator:
    for layer in _keras.sublayers(model):
        yield layer
        if isinstance(layer, keras.Model):
            yield from _blocks(layer)
