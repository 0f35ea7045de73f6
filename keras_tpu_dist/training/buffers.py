"""Which arrays a launch may consume: outputs of earlier launches without any other reference."""

import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.common.sizes import bytes_per_device

# A state that fills the memory cannot exist twice, so it is copied in groups of this size.
_GROUP_BYTES = 8 * 2**20


class Owner:
    """The owner of variables whose arrays its launches may consume. See `_keras.set_owner`.

    XLA overwrites a donated array even if something else refers to it: another variable, because
    `assign` between variables with the same layout shares the array; the averages of an optimizer;
    a user who has `variable.value`, a shard of it, or an array that was assigned. A buffer has no
    reference count that we could read. So a launch only consumes outputs of an earlier launch of
    the same owner that nothing has read from the variable since. Any other array is copied first,
    once. A variable of another owner has another lock, so what that one made is copied, too.

    Attributes:
        lock: Held while a launch consumes arrays, until the variables have the new ones; and while
            several variables of the same step are read.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self._consumes = False
        # What launches made and nobody has read, by the `id` of the variable. An `id` that is used
        # again is no danger: the array is compared.
        self._made: dict[int, weakref.ref[jax.Array]] = {}
        # What the last launch made, as it came: most often the next one consumes all of it.
        self._latest: tuple[list, list] = [], []

    @property
    def elsewhere(self) -> bool:
        """Whether another thread launches."""
        raise NotImplementedError

    def to_consume(self, variables: list) -> list:
        """The values of variables, without any other reference. The caller holds the lock."""
        values = _keras.values_of(variables)
        self._consumes = True
        latest, arrays = self._latest
        if latest is variables and all(map(operator.is_, values, arrays)):
            self._latest = [], []
            return values
        self.rest()
        made = [value_of and value_of() for value_of in map(self._made.get, map(id, variables))]
        foreign = [i for i, value in enumerate(values) if value is not made[i]]
        if foreign:
            del made
            # Those of variables that are gone. Of a list: another owner may take a variable now.
            for key in [key for key, value_of in list(self._made.items()) if value_of() is None]:
                self._made.pop(key, None)
            self.take([variables[i] for i in foreign])
            copy_apart(variables, values, foreign)
        return values

    def take(self, variables: list) -> None:
        """Becomes the owner of variables; the one before does not see who reads them any more."""
        for variable in variables:
            before = _keras.owner_of(variable)
            if before not in (None, self):
                before.forget([variable])
        _keras.set_owner(variables, self)

    def made(self, variables: list, values: list[jax.Array]) -> None:
        """Records a launch's outputs, which the variables now hold."""
        self.rest()
        self._latest = variables, values

    def rest(self) -> None:
        """Keeps only weak references to what launches made."""
        (variables, values), self._latest = self._latest, ([], [])
        self._made.update(zip(map(id, variables), map(weakref.ref, values), strict=True))

    def forget(self, variables: Iterable[Any] | None = None) -> None:
        """Records that anything may refer to the arrays of variables; by default, to all arrays."""
        self.rest()
        if variables is None:
            self._made.clear()
            return
        for variable in variables:
            self._made.pop(id(variable), None)

    def note_outside_reader(self, variables: Iterable[Any]) -> None:
        """Records that a call of a model reads variables, and keeps their arrays for long."""
        with self.lock:
            self.forget(variables)

    def hand_out(self, variable: Any, stock: Callable) -> Any:
        """Reads a variable for a caller that may keep the array."""
        if not self._consumes:
            return stock(variable)
        with self.lock:
            value = stock(variable)
            if _keras.holds(variable, value):
                self.forget([variable])
        return value

    def __reduce__(self):
        # A variable that is copied or pickled has its own array.
        return type(None), ()


def copy_apart(variables: list, values: list, which: list[int]) -> None:
    """Replaces some values by copies, in the list and in the variables.

    Args:
        variables: The variables.
        values: Their values; updated.
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
    """Copies of arrays, with the same layouts.

    Args:
        arrays: The arrays.
    """
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(arrays, [array.sharding for array in arrays], may_alias=False)
    # A `device_put` of an array that spans processes may be a collective, which others do not join.
    return [
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        for array in arrays
        for parts in [copies_apart([shard.data for shard in array.addressable_shards])]
    ]
