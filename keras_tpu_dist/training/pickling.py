"""Pickles and copies strategies, and models and variables that have one."""

import copyreg
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.hardware.assignment import DeviceAssignment
from keras_tpu_dist.hardware.mesh import auto_mesh, build_mesh
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")


def mesh_recipe(mesh: Mesh, given: Any, topology: Any) -> Any:
    """A mesh for pickling: device ids instead of devices, which only exist in this process.

    Args:
        mesh: The mesh.
        given: The user's `mesh` argument.
        topology: The slice, if it is not attached.
    """
    if topology is not None:
        return given if isinstance(given, DeviceAssignment) else dict(mesh.shape)
    if isinstance(given, DeviceAssignment):
        of = given.topology
        named = DeviceAssignment(
            Topology(of.chip, of.shape, of.num_slices), given.order, given.block
        )
        return named, [device.id for device in of.devices()]
    ids = [device.id for device in mesh.devices.flat]
    return tuple(mesh.axis_names), mesh.devices.shape, ids


def mesh_of(recipe: Any) -> Any:
    """The mesh of a recipe, on this process's devices.

    Args:
        recipe: The result of `mesh_recipe`; without device ids it is returned unchanged.
    """
    if not isinstance(recipe, tuple):
        return recipe
    *kind, ids = recipe
    if len(kind) == 1:
        devices = _devices_here(ids, f"an assignment on {kind[0].topology}")
        return replace(kind[0], topology=kind[0].topology.stood_in_by(devices))
    names, shape = kind
    devices = np.empty(len(ids), dtype=object)
    devices[:] = _devices_here(ids, f"the mesh {dict(zip(names, shape, strict=True))}")
    return auto_mesh(devices.reshape(shape), names)


def _devices_here(ids: list[int], of: str) -> list:
    here = {device.id: device for device in jax.devices()}
    missing = [number for number in ids if number not in here]
    if missing:
        raise value_error(
            "A strategy can only be unpickled if the devices it was pickled on are there.",
            received=f"{of}, whose devices {missing} are not among the {len(here)} here.",
            fix="Create a TPUStrategy for these devices, and load a saved model in its scope.",
        )
    return [here[number] for number in ids]


def layout_recipe(layout: Any) -> Any:
    """A layout for pickling, without devices; a `LayoutMap` as its name and pairs.

    Args:
        layout: A strategy's layout: `None`, rules, a `LayoutMap` or a planner.
    """
    if isinstance(layout, keras.distribution.LayoutMap):
        return "LayoutMap", [(key, tuple(value.axes)) for key, value in layout.items()]
    return layout


def layout_of(recipe: Any, mesh: Any, topology: Topology | None = None) -> Any:
    """The layout of a recipe, on a mesh.

    Args:
        recipe: The result of `layout_recipe`.
        mesh: A mesh, in any form that `TPUStrategy` takes.
        topology: The slice of the mesh, if it is not attached.
    """
    if not isinstance(recipe, tuple):
        return recipe
    described = None if topology is None else topology.devices()
    layout = keras.distribution.LayoutMap(build_mesh(mesh, described))
    for key, axes in recipe[1]:
        layout[key] = axes
    return layout


class _Belonging:
    """The strategy of a copied model: the same object in this process, a new one in another."""

    def __init__(self, strategy: Strategy | None):
        self.strategy = strategy

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return _belonging, (*self.strategy.__reduce__(),)


def _belonging(make: Any, arguments: tuple) -> _Belonging:
    try:
        return _Belonging(make(*arguments))
    except ValueError as error:
        logger.warning("a model that was unpickled is on one device: %s", error)
        return _Belonging(None)


class _PortableLayout:
    """The layout of a copied variable: the same in this process, an equal one in another."""

    def __init__(self, layout: Any):
        self.layout = layout

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        layout = self.layout
        recipe = mesh_recipe(layout.mesh, None, None)
        return _portable_layout, (recipe, tuple(layout.spec), layout.memory_kind)


def _portable_layout(recipe: Any, axes: tuple, memory_kind: str | None) -> _PortableLayout:
    try:
        mesh = mesh_of(recipe)
    except ValueError as error:
        log_once(f"a variable that was unpickled is on one device: {error}", logging.WARNING)
        return _PortableLayout(None)
    spec = PartitionSpec(*axes)
    return _PortableLayout(NamedSharding(mesh, spec, memory_kind=memory_kind))


_keras.serve_pickles(_PortableLayout)


def carry_strategy(kind: type, strategy_of: Callable[[Any], Strategy | None]) -> None:
    """Makes copies and pickles of models of a class keep their strategy.

    Python asks `copyreg` before the class, so no method of Keras is replaced.

    Args:
        kind: The class of a model; if it is registered already, nothing changes.
        strategy_of: Returns the strategy of a model, or `None`.
    """
    copyreg.dispatch_table.setdefault(kind, functools.partial(_reduce_model, strategy_of))


def _reduce_model(strategy_of: Callable[[Any], Strategy | None], model: Any) -> Any:
    # `copy` uses protocol 4, too.
    reduced = model.__reduce_ex__(4)
    strategy = strategy_of(model)
    if strategy is None or not isinstance(reduced, tuple):
        return reduced
    make, arguments, *rest = reduced
    return (_in_its_scope, (make, arguments, _Belonging(strategy)), *rest)


def _in_its_scope(make: Any, arguments: tuple, belonging: _Belonging) -> Any:
    if belonging.strategy is None:
        return make(*arguments)
    with belonging.strategy.scope():
        return make(*arguments)
