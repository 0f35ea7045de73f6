"""The logical devices of a replica: splits tensors over them, and assigns layers to one."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.hardware.mesh import LOGICAL_AXIS
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.logical.assign import assign as assign_layer
from keras_tpu_dist.logical.assign import assigning, on_logical_device
from keras_tpu_dist.programs.partitioner import in_compiled_code


class UnevenBatch(ValueError):
    """The devices cannot share the rows of an array outside of compiled code evenly."""


class _TensorAnnotation(keras.layers.Layer):
    """A layer that constrains the layout of its input; without a strategy it does nothing."""

    # Otherwise `strategy.logical_device` would assign this layer to one device.
    says_where = True

    def __init__(self, batch_axis: int | None = 0, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.batch_axis = batch_axis
        self.supports_masking = True

    def call(self, inputs):
        strategy = _keras.active_strategy()
        if strategy is None or strategy.num_logical_devices == 1:
            return inputs
        if isinstance(inputs, jax.core.Tracer) and not in_compiled_code():
            return inputs  # run_eagerly: the batch is whole
        try:
            return self._say(strategy, inputs)
        except UnevenBatch:
            return inputs  # only a compiled program can hold an uneven array

    def _say(self, strategy, inputs):
        raise NotImplementedError

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def get_config(self):
        return {**super().get_config(), "batch_axis": self.batch_axis}


@keras.saving.register_keras_serializable("keras_tpu_dist")
class SplitToLogicalDevices(_TensorAnnotation):
    """`strategy.split_to_logical_devices` as a layer of a functional model.

    It splits over the logical devices of the strategy that the model runs under. Without a
    strategy, or with one logical device, it returns its input.

    Args:
        partition_dimensions: The number of parts, for every dimension.
        batch_axis: The dimension that the replicas split, or `None`.
    """

    # Otherwise `lint` would report mesh axes that split no weight as unused.
    splits_over_logical_devices = True

    def __init__(self, partition_dimensions: Sequence[int], batch_axis: int | None = 0, **kwargs):
        super().__init__(batch_axis, **kwargs)
        self.partition_dimensions = tuple(partition_dimensions)

    def _say(self, strategy, inputs):
        return strategy.split_to_logical_devices(inputs, self.partition_dimensions, self.batch_axis)

    def get_config(self):
        """The arguments of the constructor."""
        return {**super().get_config(), "partition_dimensions": list(self.partition_dimensions)}


@keras.saving.register_keras_serializable("keras_tpu_dist")
class ReplicateToLogicalDevices(_TensorAnnotation):
    """`strategy.replicate_to_logical_devices` as a layer of a functional model."""

    def _say(self, strategy, inputs):
        return strategy.replicate_to_logical_devices(inputs, self.batch_axis)


@dataclasses.dataclass(frozen=True)
class LogicalDevices:
    """The devices that share one replica, and what is split over them or assigned to one.

    They are the devices along the mesh axes that do not split the batch, in row-major order of the
    axes.
    """

    mesh: Mesh
    data_axes: tuple[str, ...]
    topology: Topology | None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that make up a replica."""
        return tuple(name for name in self.mesh.axis_names if name not in self.data_axes)

    @property
    def number(self) -> int:
        """The number of devices that share one replica."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    def split(
        self, tensor: Any, partition_dimensions: Sequence[int], batch_axis: int | None = 0
    ) -> Any:
        """See `TPUStrategy.split_to_logical_devices`."""
        partition = self._checked_partition(partition_dimensions)
        if isinstance(tensor, keras.KerasTensor):
            _check_fits(tensor.shape, partition, batch_axis)
            return SplitToLogicalDevices(partition, batch_axis)(tensor)
        tensor = jax.numpy.asarray(tensor)
        _check_fits(tensor.shape, partition, batch_axis, sizes=not _keras.in_symbolic_scope())
        entries = self._entries(partition)
        if batch_axis is not None:
            batch_axis = _dimension(batch_axis, tensor.ndim)
            self._check_batch(tensor.shape, batch_axis, partition[batch_axis])
            entries[batch_axis] = (*self.data_axes, *entries[batch_axis])
        return self._constrain(tensor, entries)

    def replicate(self, tensor: Any, batch_axis: int | None = 0) -> Any:
        """See `TPUStrategy.replicate_to_logical_devices`."""
        if isinstance(tensor, keras.KerasTensor):
            return ReplicateToLogicalDevices(batch_axis)(tensor)
        tensor = jax.numpy.asarray(tensor)
        entries: list[tuple[str, ...]] = [()] * tensor.ndim
        if batch_axis is not None and tensor.ndim:
            batch_axis = _dimension(batch_axis, tensor.ndim)
            self._check_batch(tensor.shape, batch_axis, 1)
            entries[batch_axis] = self.data_axes
        return self._constrain(tensor, entries)

    def assign(self, target: Any, logical_device_id: int) -> Any:
        """See `TPUStrategy.assign_to_logical_device`."""
        self._check_logical_device(logical_device_id)
        if isinstance(target, keras.Layer):
            return assign_layer(target, logical_device_id)
        if isinstance(target, keras.KerasTensor):
            operation = _keras.producer(target)
            if isinstance(operation, keras.Layer) and not isinstance(
                operation, keras.layers.InputLayer
            ):
                assign_layer(operation, logical_device_id)
                return target
        elif isinstance(target, (jax.Array, np.ndarray)):
            log_once(
                "assign_to_logical_device got an array, which is already computed and stays where "
                "it is: pass the layer or the function that computes it"
            )
            return target
        elif callable(target):
            return on_logical_device(target, logical_device_id)
        raise value_error(
            "A layer, the output of a layer, or a function can be assigned.",
            received={"target": target},
            fix="Pass the layer or the function that computes the tensor.",
        )

    @contextlib.contextmanager
    def scope(self, logical_device_id: int) -> Iterator[None]:
        """See `TPUStrategy.logical_device`."""
        self._check_logical_device(logical_device_id)
        with assigning(logical_device_id):
            yield

    def _checked_partition(self, given: Any) -> tuple[int, ...]:
        fix = "Write for example partition_dimensions=[1, 2, 4, 1]."
        numbers = list(given) if isinstance(given, (Sequence, np.ndarray)) else [given]
        whole = all(map(is_count, numbers))
        if not whole or isinstance(given, (str, int)) or any(n < 1 for n in numbers):
            raise value_error(
                "partition_dimensions is a list of positive integers, one per dimension.",
                received={"partition_dimensions": given},
                fix=fix,
            )
        partition = tuple(map(int, numbers))
        if math.prod(partition) != self.number:
            raise value_error(
                "The product of partition_dimensions must be the number of logical devices of "
                f"a replica, {self.number}.",
                received={"partition_dimensions": list(partition), "mesh": dict(self.mesh.shape)},
                fix="Use all logical devices, or build the mesh with DeviceAssignment.build(...).",
            )
        self._entries(partition)
        return partition

    def _entries(self, partition: tuple[int, ...]) -> list[tuple[str, ...]]:
        """The mesh axes for every dimension: consecutive axes whose sizes multiply to its parts."""
        left = [name for name in self.axes if self.mesh.shape[name] > 1]
        entries = []
        for parts in partition:
            taken: list[str] = []
            while left and math.prod(self.mesh.shape[n] for n in taken) < parts:
                taken.append(left.pop(0))
            if math.prod(self.mesh.shape[n] for n in taken) != parts:
                raise ValueError(self._inexpressible(partition))
            entries.append(tuple(taken))
        return entries

    def _inexpressible(self, partition: tuple[int, ...]) -> str:
        axes = {name: self.mesh.shape[name] for name in self.axes}
        parts = {f"part_{i}": n for i, n in enumerate(n for n in partition if n > 1)}
        mesh = {**{name: self.mesh.shape[name] for name in self.data_axes}, **parts}
        ours = any(name.startswith(f"{LOGICAL_AXIS}_") for name in axes)
        other = "" if ours else ", or mesh=DeviceAssignment.build(...), which has prime axes"
        return message(
            "Every number in partition_dimensions must be the product of consecutive logical axes "
            "of the mesh.",
            received={"partition_dimensions": list(partition), "logical axes": axes},
            fix=f"Write mesh={mesh} with names you like{other}.",
        )

    def _check_batch(self, shape: tuple[int, ...], batch_axis: int, parts: int) -> None:
        ways = parts * math.prod(self.mesh.shape[name] for name in self.data_axes)
        if shape[batch_axis] % ways and not in_compiled_code():
            raise UnevenBatch(
                message(
                    "Outside of compiled code, the batch must be divisible by the replicas and by "
                    "its part of partition_dimensions.",
                    received={"shape": shape, "batch axis": batch_axis, "parts": ways},
                    fix=f"Use a multiple of {ways} rows, call it within jax.jit, or pass "
                    "batch_axis=None for a tensor without a batch.",
                )
            )

    def _constrain(self, tensor: jax.Array, entries: list[tuple[str, ...]]) -> jax.Array:
        if _keras.in_symbolic_scope():
            return tensor
        # Within strategy.run() a function sees the rows of its replica only.
        around = jax.sharding.get_abstract_mesh()
        taken = set(around.manual_axes)
        if not taken:
            spec = PartitionSpec(*(names or None for names in entries))
            sharding = NamedSharding(self.mesh, spec)
        elif taken & set(self.axes):
            log_once(
                "a tensor within an assigned layer is on one logical device, so it is neither "
                "split nor replicated there"
            )
            return tensor
        else:
            free = (tuple(name for name in names if name not in taken) for names in entries)
            sharding = NamedSharding(around, PartitionSpec(*(names or None for names in free)))
        if not taken and not isinstance(tensor, jax.core.Tracer):
            if self.topology is not None:
                raise value_error(
                    "A slice without its chips cannot hold arrays.",
                    received={"topology": self.topology.name, "shape": tensor.shape},
                    fix="Call it in code that is compiled, or on attached devices.",
                )
            placed = jax.device_put(tensor, sharding)
        else:
            placed = jax.lax.with_sharding_constraint(tensor, sharding)
        return _keras.with_keras_mask(placed, _keras.keras_mask(tensor))

    def _check_logical_device(self, logical_device_id: Any) -> None:
        counted = is_count(logical_device_id, 0)
        if not counted or logical_device_id >= self.number:
            raise value_error(
                "Logical devices are counted from 0 within their replica.",
                received={"logical_device_id": logical_device_id},
                fix=f"Use 0 to {self.number - 1}.",
            )


def _check_fits(
    shape: tuple[int | None, ...],
    partition: tuple[int, ...],
    batch_axis: int | None,
    sizes: bool = True,
) -> None:
    if len(partition) != len(shape):
        raise value_error(
            "partition_dimensions has one number for every dimension of the tensor.",
            received={"shape": tuple(shape), "partition_dimensions": list(partition)},
            fix=f"Give {len(shape)} numbers.",
        )
    batch = None if batch_axis is None else _dimension(batch_axis, len(shape))
    for dim, (size, parts) in enumerate(zip(shape, partition, strict=True)):
        if sizes and dim != batch and size is not None and size % parts:
            raise value_error(
                f"Dimension {dim} must be divisible by its part of partition_dimensions.",
                received={"shape": tuple(shape), "partition_dimensions": list(partition)},
                fix=f"Pad it to {-(-size // parts) * parts}, or split another dimension.",
            )


def _dimension(batch_axis: int, rank: int) -> int:
    if not is_count(batch_axis) or not -rank <= batch_axis < rank:
        raise value_error(
            "batch_axis is a dimension of the tensor.",
            received={"batch_axis": batch_axis, "rank": rank},
            fix="Count it from 0, or pass None for a tensor without a batch.",
        )
    return batch_axis % rank
