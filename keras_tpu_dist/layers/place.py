"""Where a layer runs: its mesh, the axes that split its batch, its platform."""

import dataclasses
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.plain import only_plain_operations
from keras_tpu_dist.hardware.chips import WITHOUT_KERNELS, of_kind
from keras_tpu_dist.recurrence import Core, Gathering, Split

# With these precisions, TPUs round the operands of float32 products to bfloat16.
_ROUNDING = (None, "default", "bfloat16", "fastest")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the arrays of a layer are.

    Args:
        split: The mesh and the axes that split the batch, if there are any.
        alone: Whether the layer's arrays are on one device, so that it may request a memory layout
            without interference from an automatic partitioner.
        device: One of the devices, a `jax.Device`.
        gathering: How split weights of the layer are gathered, if it has any.
    """

    split: Split
    alone: bool
    device: Any
    gathering: Gathering | None = None

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
        """The core that a kernel would run on, or the reason why no kernel can run."""
        if only_plain_operations():
            return "the program is lowered for another platform"
        if not self.alone:
            return "arrays may be on several devices"
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

    A `TPUStrategy` provides it by `mesh` and `data_axes`, Keras's own distributions by their device
    mesh and batch axis.
    """
    mesh, axes = _keras.active_mesh()
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around.manual_axes:
        # Inside a shard_map of somebody else, arrays are already the part of one device.
        whole = set(around.manual_axes) == set(around.axis_names)
        return Place(Split(), whole, device)
    return Place(Split(mesh, axes), mesh is not None or jax.device_count() == 1, device)


def axes_of(variable) -> tuple:
    """How the active distribution splits a variable, by dimension.

    Args:
        variable: A `keras.Variable`.

    Returns:
        For every dimension the mesh axis or axes that split it, or None. Trailing dimensions that
        are not split may be missing. Without a distribution the result is empty.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return ()
    # The current layout: a plan decides once the model is built, and may change the first layout.
    layout = _keras.variable_layout(variable) or distribution.get_variable_layout(variable)
    return tuple(layout.spec if isinstance(layout, jax.sharding.NamedSharding) else layout.axes)
