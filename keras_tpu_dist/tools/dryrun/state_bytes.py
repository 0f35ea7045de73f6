"""Bytes of a step on one device: of its state by its layouts, of its program by the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from keras_tpu_dist.common.sizes import bytes_per_device
from keras_tpu_dist.input.batches import PlacedBatch


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a model's state on one device, by the arithmetic of its layouts.

    Args:
        weights: Trainable and other variables of the model.
        optimizer: Slots and scalars of the optimizer.
        metrics: Variables of the metrics.
        inputs: One batch.
        inputs_per_host: The part of a batch that a host transfers to its devices.
    """

    weights: int
    optimizer: int
    metrics: int
    inputs: int
    inputs_per_host: int = 0

    @property
    def lasting(self) -> int:
        """The bytes on a device between steps."""
        return self.weights + self.optimizer

    @property
    def arguments(self) -> int:
        """The bytes of a step's arguments."""
        return self.lasting + self.metrics + self.inputs


def total_of(memory: Mapping[str, int]) -> int:
    """The sum of a compiler's figures: arguments, new outputs, temporaries, code; 0 without any."""
    if not memory:
        return 0
    new = memory["outputs"] - memory["aliased"]
    return memory["arguments"] + new + memory["temporaries"] + memory["code"]


def state_bytes(state: tuple, kind: str, placed: PlacedBatch) -> StateBytes:
    """Bytes of a step's state.

    Args:
        state: The state as `jax.ShapeDtypeStruct`, in Keras's order.
        kind: `"train"`, `"test"` or `"predict"`.
        placed: The batch, likewise.
    """
    sizes = [sum(bytes_per_device(v) for v in group) for group in state]
    return StateBytes(
        weights=sizes[0] + sizes[1],
        optimizer=sizes[2] if kind == "train" else 0,
        metrics=sizes[-1] if kind != "predict" else 0,
        inputs=sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(placed)),
        inputs_per_host=sum(_bytes_per_host(leaf) for leaf in jax.tree.leaves(placed)),
    )


def _bytes_per_host(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on the host that needs most of it; parts that its devices share count
    once."""
    parts: dict[int, set[str]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        parts.setdefault(device.process_index, set()).add(str(index))
    return max(map(len, parts.values())) * bytes_per_device(array)
