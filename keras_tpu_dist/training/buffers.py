"""Which arrays a step may consume: outputs of a launch without any other reference."""

import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.common.sizes import bytes_per_device

# A state that fills the memory cannot exist twice, so it is copied in groups of this size.
_GROUP_BYTES = 8 * 2**20


class Buffers:
    """The arrays of one model's training state, if launches consume them.

    XLA overwrites a donated array even if something else refers to it: another variable, because
    `assign` between variables with the same layout shares the array; the averages of an optimizer;
    a user who has `variable.value`, a shard of it, or an array that was assigned. A buffer has no
    reference count that we could read. So a launch only consumes outputs of the previous launch
    that nothing has read from the variable since. Any other array is copied first, once.
    """

    def __init__(self, lock: Any, owner: Any):
        self._lock, self._owner = lock, owner
        self._consumed = False
        self._made: list = []
        self._left: list[weakref.ref] = []
        self._handed_out: set[int] = set()

    def to_consume(self, variables: list) -> list:
        """The values of variables, without any other reference. The caller holds the lock."""
        values = _keras.values_of(variables)
        if self._left:
            self._made, self._left = [left() for left in self._left], []
        same = len(values) == len(self._made) and all(map(operator.is_, values, self._made))
        if same and not self._handed_out:
            return values
        self._consumed = True
        _keras.set_owner(variables, self._owner)
        made = self._made if len(self._made) == len(values) else [None] * len(values)
        foreign = [
            i
            for i, variable in enumerate(variables)
            if values[i] is not made[i] or id(variable) in self._handed_out
        ]
        self._made, made = [], []
        copy_apart(variables, values, foreign)
        self._handed_out.clear()
        return values

    def made(self, values: list) -> None:
        """Records a launch's outputs, which the variables now hold."""
        self._made = values

    def rest(self) -> None:
        """Keeps only weak references at the end of a call, to recognize the arrays at the next."""
        if self._made:
            self._left, self._made = [weakref.ref(value) for value in self._made], []

    def others_hold(self) -> None:
        """Records that anything may refer to any of the arrays."""
        self._made, self._left = [], []

    def hand_out(self, variable: Any, stock: Callable) -> Any:
        """Reads a variable for a caller that may keep the array."""
        if not self._consumed:
            return stock(variable)
        with self._lock:
            value = stock(variable)
            if _keras.holds(variable, value):
                self._handed_out.add(id(variable))
        return value


def copy_apart(variables: list, values: list, which: list[int]) -> None:
    """Replaces some values by copies, in the list and in the variables.

    Args:
        which: The positions of values that something else may hold too.
    """
    size = {i: bytes_per_device(values[i]) for i in which}
    several = sum(size.values()) > _GROUP_BYTES
    while which:
        group: list[int] = []
        while which and (not group or sum(size[i] for i in group) < _GROUP_BYTES):
            group.append(which.pop(0))
        copies = copies_apart([values[i] for i in group])
        if several:
            # The originals of this group are freed before the next one is copied.
            jax.block_until_ready(copies)
        for i, copy in zip(group, copies, strict=True):
            values[i] = copy
        _keras.follow_state(([variables[i] for i in group],), (copies,))
        del copies, copy


def copies_apart(arrays: list) -> list:
    """Copies of arrays, with the same layouts."""
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(arrays, [array.sharding for array in arrays], may_alias=False)
    # A `device_put` of an array that spans processes may be a collective, which others do not join.
    return [
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        for array in arrays
        for parts in [copies_apart([shard.data for shard in array.addressable_shards])]
    ]
