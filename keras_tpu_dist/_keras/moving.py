"""Moves variables: their layouts are set, their values sent in few transfers."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy
from jax.sharding import NamedSharding

from keras_tpu_dist._keras.variables import claim

# Variables move together, up to so many bytes: a state that fills the memory cannot exist twice.
_MOVED_AT_ONCE_BYTES = 64 * 2**20

# From so many equal arrays on, a program for so many at once is worth its compilation.
_FEWEST_FOR_A_PROGRAM, _MOVED_BY_A_PROGRAM = 512, 64


def move_variables(moves: Sequence[tuple[Any, Any]]) -> None:
    """Sets the layouts of variables and moves their values; uninitialized ones only get the layout.

    Args:
        moves: Pairs of a `keras.Variable` and a `jax.sharding.Sharding`, or `None` to leave the
            value in place.
    """
    together: list[tuple[Any, Any]] = []
    size = 0
    for variable, layout in moves:
        claim(variable)
        value = variable._value
        if isinstance(value, jax.Array) and _is_here(value.sharding) and _is_here(layout):
            together.append((variable, layout))
            size += value.nbytes
            if size >= _MOVED_AT_ONCE_BYTES:
                _move_together(together)
                together, size = [], 0
            continue
        variable._layout = layout
        if value is not None:
            variable._direct_assign(value)
    _move_together(together)


def _is_here(layout: Any) -> bool:
    """Whether a layout is on the devices of this process alone."""
    return isinstance(layout, NamedSharding) and layout.is_fully_addressable


def _move_together(moves: list[tuple[Any, Any]]) -> None:
    """Moves values in one transfer: Keras's `assign` of thousands of them takes seconds."""
    alike: dict[Any, list[tuple[Any, Any]]] = {}
    for variable, layout in moves:
        value = variable._value
        key = value.shape, value.dtype, value.sharding, layout
        alike.setdefault(key, []).append((variable, layout))
    rest: list[tuple[Any, Any]] = []
    for (_, _, before, layout), those in alike.items():
        by_program = 0
        if len(those) >= _FEWEST_FOR_A_PROGRAM and _same_devices(before, layout):
            by_program = len(those) // _MOVED_BY_A_PROGRAM * _MOVED_BY_A_PROGRAM
            _move_by_program([variable for variable, _ in those[:by_program]], layout)
        rest += those[by_program:]
    values = [variable._value for variable, _ in rest]
    # JAX sends a value that is whole on every device through the host, too, after a long search.
    values = [
        numpy.asarray(value)
        if value.is_fully_replicated and not layout.is_fully_replicated
        else value
        for value, (_, layout) in zip(values, rest, strict=True)
    ]
    placed = jax.device_put(values, [layout for _, layout in rest])
    for (variable, layout), value in zip(rest, placed, strict=True):
        variable._layout, variable._value = layout, value


def _same_devices(before: Any, layout: Any) -> bool:
    """Whether one program can take arrays of one layout and return them in the other."""
    if not isinstance(before, NamedSharding) or before.memory_kind != layout.memory_kind:
        return False
    meshes: list[Any] = [before.mesh, layout.mesh]
    here, there = (list(used.devices.flat) for used in meshes)
    return here == there


def _move_by_program(variables: list, layout: Any) -> None:
    """Moves equal variables: for each array, JAX's transfer takes three times as long."""
    many = _MOVED_BY_A_PROGRAM
    move = jax.jit(lambda *values: values, out_shardings=(layout,) * many)
    for start in range(0, len(variables), many):
        group = variables[start : start + many]
        for variable, value in zip(group, move(*[v._value for v in group]), strict=True):
            variable._layout, variable._value = layout, value
