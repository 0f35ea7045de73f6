"""The mesh of a strategy on another slice: `strategy.on_topology`."""

import math

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.mesh import SEQUENCE_AXIS
from keras_tpu_dist.hardware.topology import Topology


def grown(axes: dict[str, int], data_axes: tuple[str, ...], topology: Topology) -> dict[str, int]:
    """The axes, with the first data axis, or else that of time, as large as the slice allows."""
    grows = next(iter((*data_axes, *(name for name in axes if name == SEQUENCE_AXIS))), None)
    others = math.prod(size for name, size in axes.items() if name != grows)
    if grows is None or topology.num_devices % others:
        raise value_error(
            "On another slice, the first data axis gets the devices that the other axes leave.",
            received=f"{topology.num_devices} devices of {topology.name} for the mesh {axes} "
            f"with data axes {data_axes}.",
            fix='Give the axis sizes on that slice, as in mesh={"data": -1, "model": 4}.',
        )
    return {**axes, grows: topology.num_devices // others}
