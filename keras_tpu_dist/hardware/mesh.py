"""Builds a mesh with named axes from a dict of sizes, with devices in torus order."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import mesh_utils

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import did_you_mean, value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.hardware.assignment import DeviceAssignment, prime_factors
from keras_tpu_dist.hardware.compile_only import CompileOnlyDevice
from keras_tpu_dist.hardware.topology import Topology

logger = logging.getLogger("keras_tpu_dist")

# Axes that split the batch by default. "batch" is the name that Keras's own DataParallel and most
# LayoutMap examples use.
DATA_AXIS_NAMES = ("data", "fsdp", "batch")

# The axis that splits sequences along time.
SEQUENCE_AXIS = "sequence"

# The sub-axes of a replica's logical devices are called "logical_0", "logical_1", ...
LOGICAL_AXIS = "logical"

MeshLike = (
    Mapping[str, int] | keras.distribution.DeviceMesh | jax.sharding.Mesh | DeviceAssignment | None
)


def build_mesh(mesh: MeshLike = None, devices: Sequence | None = None):
    """Builds a `keras.distribution.DeviceMesh` from the user's argument.

    Args:
        mesh: `None` for all devices on one axis `"data"`; a dict of axis sizes in order, of which
            one may be -1 (the remaining devices); a `keras.distribution.DeviceMesh` or
            `jax.sharding.Mesh`, whose device order is kept; or a `DeviceAssignment`. The replicas
            of an assignment are on axis `"data"`, and its logical devices, row-major, on axes
            `"logical_0"`, `"logical_1"`, ..., one for every prime factor of their number.
        devices: Devices to use, as `jax.Device` objects or Keras's `"cpu:0"` strings. Defaults to
            all of `jax.devices()`.

    Returns:
        A `keras.distribution.DeviceMesh` of `jax.Device` objects. For a dict, neighbours on an
        axis are neighbours on the TPU's torus.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = keras.distribution.DeviceMesh(mesh.devices.shape, mesh.axis_names, mesh.devices)
    finished = isinstance(mesh, keras.distribution.DeviceMesh)
    if finished or isinstance(mesh, DeviceAssignment):
        if devices is not None:
            raise value_error(
                "A finished mesh already has its devices.",
                received=f"mesh={mesh!r} and devices={list(devices)!r}.",
                fix="Leave `devices` out, or give the mesh as a dict of axis sizes.",
            )
        return mesh if finished else _of_assignment(mesh)
    chosen = _devices(devices)
    if mesh is None:
        mesh = {"data": len(chosen)}
    if not isinstance(mesh, Mapping):
        raise value_error(
            "A mesh is a dict of axis sizes, a keras.distribution.DeviceMesh, a "
            "DeviceAssignment or None.",
            received={"mesh": mesh},
            fix='Write for example mesh={"data": -1, "model": 2}.',
        )
    sizes = _axis_sizes(mesh, chosen)
    shape = tuple(sizes.values())
    return _device_mesh(shape, tuple(sizes), _in_torus_order(shape, tuple(sizes), chosen))


def _of_assignment(assignment: DeviceAssignment):
    # Prime sub-axes: every partition of a power of two is a tuple of them, so one mesh is enough.
    # Two meshes over the same devices cannot be used in one program.
    factors = prime_factors(assignment.num_cores_per_replica)
    shape = (assignment.num_replicas, *factors)
    names = ("data", *(f"{LOGICAL_AXIS}_{i}" for i in range(len(factors))))
    return _device_mesh(shape, names, assignment.devices.reshape(shape))


def _device_mesh(shape: tuple[int, ...], names: tuple[str, ...], devices: np.ndarray):
    described = isinstance(devices.flat[0], CompileOnlyDevice)
    kind = _DescribedMesh if described else keras.distribution.DeviceMesh
    return kind(shape, names, devices)


class _DescribedMesh(keras.distribution.DeviceMesh):
    """A mesh of devices that are not attached; Keras would look for them among the attached
    ones."""

    @property
    def backend_mesh(self) -> jax.sharding.Mesh:
        return auto_mesh(self.devices, self.axis_names)


def auto_mesh(devices: np.ndarray, names: Sequence[str]) -> jax.sharding.Mesh:
    """A mesh over whose axes the compiler splits, whatever the default of `jax.sharding.Mesh`."""
    types = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(devices, tuple(names), axis_types=types)


def default_data_axes(axis_names: Sequence[str]) -> tuple[str, ...]:
    """The axes of a mesh that split the batch by default.

    Args:
        axis_names: The mesh's axes.

    Returns:
        The axes whose names are in `DATA_AXIS_NAMES`, in the mesh's order.
    """
    return tuple(name for name in axis_names if name in DATA_AXIS_NAMES)


def sequence_axis(mesh: jax.sharding.Mesh, data_axes: Sequence[str]) -> str | None:
    """The axis of a mesh that splits activations along time, or `None`.

    Args:
        mesh: The mesh.
        data_axes: The axes of the mesh that split the batch. If `"sequence"` is one of them, it
            splits rows instead of time.
    """
    wide = mesh.shape.get(SEQUENCE_AXIS, 1) > 1
    return SEQUENCE_AXIS if wide and SEQUENCE_AXIS not in data_axes else None


def state_axes(mesh: jax.sharding.Mesh, data_axes: Sequence[str]) -> tuple[str, ...]:
    """The axes over which devices have different rows or times, so that they can share a state.

    Args:
        mesh: The mesh.
        data_axes: The axes of the mesh that split the batch.
    """
    time = sequence_axis(mesh, data_axes)
    return tuple(data_axes) if time is None else (*data_axes, time)


def replicated_batch(axis_names: Sequence[str]) -> str:
    """The warning if no axis splits the batch, unless you chose that.

    Args:
        axis_names: The mesh's axes.

    Returns:
        The warning, with a hint if just one name looks like a misspelt data axis.
    """
    names = {name for name in axis_names if did_you_mean(name, DATA_AXIS_NAMES)}
    hint = did_you_mean(names.pop(), DATA_AXIS_NAMES) if len(names) == 1 else ""
    return (
        f"the mesh axes {tuple(axis_names)} hold no data axis ({', '.join(DATA_AXIS_NAMES)}): "
        f"every device computes the whole batch; name the axis that splits it with "
        f"data_axes=(...), or data_axes=() if that is meant.{hint}"
    )


def splitting_axes(data_axes: Any, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes that split the batch; warns if by default no axis does.

    Args:
        data_axes: As for `checked_data_axes`.
        mesh: The mesh.
    """
    names = tuple(mesh.axis_names)
    split = checked_data_axes(data_axes, names)
    if data_axes is None and not state_axes(mesh, split) and mesh.size > 1:
        log_once(replicated_batch(names), logging.WARNING)
    return split


def checked_data_axes(data_axes, axis_names: Sequence[str]) -> tuple[str, ...]:
    """Checks `data_axes` against the mesh.

    Args:
        data_axes: One axis name, a sequence of them, an empty sequence (replicate the batch), or
            `None` for the default.
        axis_names: The mesh's axes.

    Returns:
        A tuple of axis names, in the order given.
    """
    if data_axes is None:
        return default_data_axes(axis_names)
    listed = isinstance(data_axes, Iterable) and not isinstance(data_axes, str)
    chosen: tuple[Any, ...] = tuple(data_axes) if listed else (data_axes,)
    for name in chosen:
        if name not in axis_names:
            raise value_error(
                "Every data axis must be an axis of the mesh.",
                received={"data_axes": chosen, "mesh axes": tuple(axis_names)},
                fix=f"Use names among {', '.join(axis_names)}.",
                name=name,
                choices=axis_names,
            )
    if len(set(chosen)) != len(chosen):
        raise value_error(
            "A data axis can occur only once.",
            received={"data_axes": chosen},
            fix="Name every axis once.",
        )
    return chosen


def _devices(devices) -> list:
    if devices is None:
        return list(jax.devices())
    listed = isinstance(devices, Iterable) and not isinstance(devices, str)
    chosen = list(devices) if listed else [devices]
    if not listed or not all(isinstance(d, str) or hasattr(d, "device_kind") for d in chosen):
        raise value_error(
            "Devices are a flat list of jax.Device objects or of names.",
            received={"devices": devices},
            fix='Write for example devices=jax.devices()[:4], or ["cpu:0", "cpu:1"].',
        )
    if not chosen:
        raise value_error(
            "A mesh needs at least one device.",
            received={"devices": chosen},
            fix="Leave `devices` out to use all of jax.devices().",
        )
    by_name = {}
    if any(isinstance(device, str) for device in chosen):
        by_name = {f"{device.platform}:{device.id}": device for device in jax.devices()}
    found = []
    for device in chosen:
        if isinstance(device, str) and device not in by_name:
            raise value_error(
                "Every device must be attached.",
                received={"device": device, "attached": sorted(by_name)},
                fix="Use names from keras.distribution.list_devices().",
                name=device,
                choices=by_name,
            )
        found.append(by_name.get(device, device) if isinstance(device, str) else device)
    if len(set(found)) != len(found):
        raise value_error(
            "A device can occur in a mesh only once.",
            received={"devices": chosen},
            fix="Name every device once.",
        )
    return found


def _axis_sizes(mesh: Mapping[str, int], devices: Sequence[Any]) -> dict[str, int]:
    sizes, num_devices = dict(mesh), len(devices)
    if not sizes:
        raise value_error(
            "A mesh needs at least one axis.",
            received={"mesh": sizes},
            fix='Write mesh={"data": -1}, or leave it out.',
        )
    for name, size in sizes.items():
        named = isinstance(name, str) and name.strip()
        if not named or not is_count(size, -1) or size == 0:
            raise value_error(
                "A mesh axis is a name with a positive size, or -1 for the remaining devices.",
                received={"axis": name, "size": size},
                fix='Write for example mesh={"data": -1, "model": 2}.',
            )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise value_error(
            "Only one axis size may be -1.",
            received={"mesh": sizes},
            fix=f"Give a number to all but one of {', '.join(open_axes)}.",
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and num_devices % fixed == 0:
        sizes[open_axes[0]] = num_devices // fixed
    elif open_axes or fixed != num_devices:
        raise value_error(
            "The axis sizes must multiply to the number of devices.",
            received=f"mesh={sizes!r}, whose sizes multiply to {fixed}, on {num_devices} "
            "device(s).",
            fix=f"Choose sizes whose product is {num_devices}, let one be -1, or pass "
            f"`devices` with {fixed} of them.{_simulation(fixed, devices)}",
        )
    return {name: int(size) for name, size in sizes.items()}


def _simulation(wanted: int, devices: Sequence[Any]) -> str:
    """How to get that many devices on a machine without a TPU, for an error."""
    if devices[0].platform != "cpu" or wanted <= len(devices):
        return ""
    return (
        f" To try the mesh on this machine's CPU, call ktd.simulate({wanted}) right after the "
        f"imports; in a notebook, restart the kernel first; in the shell, add --devices {wanted}."
    )


def _in_torus_order(shape: tuple[int, ...], names: Sequence[str], devices: list) -> np.ndarray:
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    try:
        if slices > 1:
            return _across_slices(shape, names, devices, slices)
        return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    except (ValueError, NotImplementedError, AssertionError) as error:
        # A selection of devices need not be a block of the torus; it is a valid mesh nevertheless.
        logger.warning(
            "the %d devices cannot be arranged on the torus as %s (%s): they keep the given order",
            len(devices),
            shape,
            error,
        )
        return np.asarray(devices, dtype=object).reshape(shape)


def _across_slices(
    shape: tuple[int, ...], names: Sequence[str], devices: list, slices: int
) -> np.ndarray:
    """A mesh with one axis across slices, and all others within one.

    It is the first possible data axis, so that the slices exchange only one gradient per step.
    """
    able = [i for i, size in enumerate(shape) if size % slices == 0]
    crossing = next((i for i in able if names[i] in DATA_AXIS_NAMES), next(iter(able), None))
    if crossing is None:
        raise ValueError(f"no axis of {shape} is a multiple of the {slices} slices")
    within = [size // slices if i == crossing else size for i, size in enumerate(shape)]
    across = [slices if i == crossing else 1 for i in range(len(shape))]
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices=devices, allow_split_physical_axes=True
    )


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
