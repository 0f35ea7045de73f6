"""Where a layer runs: which mesh, which axes split its batch, which platform."""

import dataclasses
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.plain import only_plain_operations
from keras_tpu_dist.hardware.chips import WITHOUT_KERNELS, of_kind
from keras_tpu_dist.recurrence import Core, Gathering, Split

# At these, products of float32 round their operands to bfloat16 on TPU.
_ROUNDING = (None, "default", "bfloat16", "fastest")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer's arrays lie.

    Args:
        split: The mesh and the axes that split the batch, if one is active here.
        alone: Whether what the layer computes stays on one device, so that a memory layout may be
            asked for without an automatic partitioner meeting it.
        device: One of the devices, a `jax.Device`.
        gathering: What is done there about the layer's split weights, if it has any.
    """

    split: Split
    alone: bool
    device: Any
    gathering: Gathering | None = None

    @property
    def units_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the layer's units are split."""
        return () if self.gathering is None else self.gathering.units_axes

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return self.device.platform

    @property
    def rounds(self) -> bool:
        """Whether products of float32 round their operands to bfloat16."""
        return self.platform == "tpu" and jax.config.jax_default_matmul_precision in _ROUNDING

    @property
    def core(self) -> Core | str:
        """What a kernel would run on, or why there can be none."""
        if self.units_axes:
            return "its units are split over devices"
        if only_plain_operations():
            return "the program is lowered for another platform"
        if not self.alone:
            return "arrays may lie on several devices"
        if not self.rounds:
            return "jax_default_matmul_precision is set"
        kind = self.device.device_kind
        chip = of_kind(kind)
        if chip is None:
            return f"nothing is known of {kind!r}"
        if kind in WITHOUT_KERNELS:
            return f"{chip.name} has none for bfloat16"
        return Core(chip.vmem_bytes, chip.cores // chip.devices)


def find() -> Place:
    """The place of the layer that is being called.

    A `TPUStrategy` says it with `mesh` and `data_axes`; Keras's own distributions with their
    device mesh and batch axis.
    """
    distribution = keras.distribution.distribution()
    mesh, axes = (None, ()) if distribution is None else _mesh_and_axes(distribution)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around.manual_axes:
        # Inside somebody's shard_map: what is seen here is already one device's part.
        whole = set(around.manual_axes) == set(around.axis_names)
        return Place(Split(), whole, device)
    return Place(Split(mesh, axes), mesh is not None or jax.device_count() == 1, device)


def _mesh_and_axes(distribution):
    mesh = getattr(distribution, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh, tuple(distribution.data_axes)
    device_mesh = distribution.device_mesh
    axis = distribution.batch_dim_name
    return device_mesh.backend_mesh, (axis,) if axis in device_mesh.axis_names else ()


def axes_of(variable) -> tuple:
    """How the active distribution splits a variable, dimension by dimension.

    Args:
        variable: A `keras.Variable`.

    Returns:
        For each dimension the mesh axis or axes that split it, or None. Trailing dimensions that
        are whole may be missing; without a distribution all are.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return ()
    # As it lies: a plan decides once the model is built, and may change what it was made with.
    layout = _keras.variable_layout(variable) or distribution.get_variable_layout(variable)
    return tuple(layout.spec if isinstance(layout, jax.sharding.NamedSharding) else layout.axes)
