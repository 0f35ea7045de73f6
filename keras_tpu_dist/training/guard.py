"""Guards a training state: after any failure the model gets it back."""

import contextlib
import logging
import operator
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.sizes import bytes_per_device

logger = logging.getLogger("keras_tpu_dist")

# If a launch does not consume its input state, the inputs of running launches stay alive. At least
# two keep the devices busy, and there should be no more than help the host to run ahead. On CPU,
# where host and devices share cores, waiting for the 4th or 8th last launch cost 3 % of a small
# CNN's steps; JAX itself waits for the 32nd last.
_FEWEST_KEPT, _MOST_KEPT, _MOST_KEPT_ON_CPU = 2, 4, 32

# The share of the device's memory for kept states; the bytes are for CPU, where it is unknown.
# There, states larger than the cache made a step of an MLP with 670,000 weights 1.2 times as long.
_KEEP_FRACTION_OF_MEMORY = 0.1
_KEEP_BYTES_WHERE_MEMORY_IS_UNKNOWN = 8 * 2**20

# Keeping the input state means new buffers in every step: with 500 variables on 8 simulated devices
# that took a tenth of a step of 40 ms.
_MOST_VARIABLES_KEPT = 64

# Copying the whole state takes as long as many steps: an epoch of a few seconds needs none.
_COPY_EVERY_S = 60.0


class HostCopy:
    """A training state in host memory; replicated shards are stored once.

    Every process copies the shards of its own devices, one by one. A `device_put` of a whole array
    to other memory is a program over all processes, which jax 0.10.1 cannot compile for CPU and
    which a single process cannot start.

    Args:
        state: The state on the devices.
    """

    def __init__(self, state: Any):
        self._taken_s = time.monotonic()
        leaves, self._treedef = jax.tree.flatten(state)
        self._places = [(leaf.shape, leaf.sharding) for leaf in leaves]
        by_bounds = [_distinct_shards(leaf) for leaf in leaves]
        away = [
            data for shards in by_bounds for data in shards.values() if not _is_in_host_memory(data)
        ]
        places = [data.sharding.with_memory_kind("pinned_host") for data in away]
        moved = iter(jax.device_put(away, places))
        # NumPy is faster for arrays in host memory: 490 small arrays took 1 ms, and 24 ms with
        # `device_put`.
        self._shards = [
            {
                bounds: np.array(data) if _is_in_host_memory(data) else next(moved)
                for bounds, data in shards.items()
            }
            for shards in by_bounds
        ]

    @property
    def age_s(self) -> float:
        """Seconds since the copy."""
        return time.monotonic() - self._taken_s

    def on_devices(self) -> Any:
        """The state on the devices, with its shardings."""
        leaves = [
            _spread(shards, shape, sharding)
            for shards, (shape, sharding) in zip(self._shards, self._places, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)


_Bounds = tuple[tuple[int | None, int | None], ...]


def _distinct_shards(leaf: jax.Array) -> dict[_Bounds, jax.Array]:
    """The different shards of this process's devices, by their bounds in the array."""
    if leaf.sharding.is_fully_replicated:
        return {_bounds((slice(None),) * leaf.ndim): leaf.addressable_data(0)}
    return {_bounds(shard.index): shard.data for shard in reversed(leaf.addressable_shards)}


def _bounds(index: tuple[slice, ...] | None) -> _Bounds:
    return tuple((part.start, part.stop) for part in index or ())


def _is_in_host_memory(shard: jax.Array) -> bool:
    (device,) = shard.sharding.device_set
    return device.platform == "cpu"


def _spread(
    shards: dict[_Bounds, jax.Array | np.ndarray], shape: tuple[int, ...], sharding: Sharding
) -> jax.Array:
    # Shard by shard: a single `device_put` compares values between processes, with a collective.
    # With the memory kind: given the device alone, JAX assumes that a shard in host memory is in
    # that device's own memory.
    each = [
        jax.device_put(
            shards[_bounds(index)],
            SingleDeviceSharding(device, memory_kind=device.default_memory().kind),
        )
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, each)


class StateGuard:
    """Keeps enough of a training state to restore it if a launch fails.

    With kept states (`kept` of 2 or more), the inputs of running launches stay alive, so the state
    before the failing step still exists, whatever failed. With a donated state, XLA overwrites the
    inputs, which saves memory. A failure before the launch (input, tracing, compilation) loses
    nothing in that case either. For a failure within the launch there is a copy in host memory,
    made when the state is read from the model: at the start of an epoch, or by `train_on_batch`. A
    copy of less than a minute is used again, unless something else has changed the weights.

    Args:
        kept: How many launches may run with their input states kept; 0 donates.
    """

    def __init__(self, kept: int):
        self.kept = kept
        self._flight: deque[tuple[Any, jax.Array | None]] = deque()
        self._newest: Any = None
        self._host_copy: HostCopy | None = None
        # Whether `train_on_batch` runs, and the arrays that training left in the variables.
        self.on_batch = False
        self._left: list[weakref.ref] = []

    @property
    def donate(self) -> bool:
        """Whether launches consume their input state."""
        return self.kept == 0

    def read(self, state: Any) -> None:
        """Records a state that was just read from the model's variables.

        Args:
            state: The training state, as a train step takes it.
        """
        recent = self._has_recent_copy(state)
        self._flight.clear()
        self._newest = state
        self._left = []
        if self.donate and not recent:
            self._host_copy = HostCopy(state)

    def _has_recent_copy(self, state: Any) -> bool:
        """Whether training continues from the state that it left, and a copy is recent."""
        if self._host_copy is None or self._host_copy.age_s > _COPY_EVERY_S:
            return False
        left = [leaf() for leaf in self._left]
        if not left and self._newest is not None:
            left = _trained(self._newest)
        trained = _trained(state)
        return len(trained) == len(left) and all(map(operator.is_, left, trained))

    def launch(self, function: Callable, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs `outputs, state = function(state, batch)`, and keeps the state for a failure.

        Args:
            function: The compiled step, or several of them.
            state: The training state.
            batch: The batch of the steps.
        """
        before = state
        if not self.kept:
            self._newest = state
            with interrupts_held(lambda: _is_whole(before, wait=False)):
                outputs, state = function(state, batch)
                self._newest = state
        else:
            if len(self._flight) == self.kept:
                # The oldest launch must have succeeded before its input may be freed.
                jax.block_until_ready(self._flight[0][1])
                self._flight.popleft()
            outputs, state = function(state, batch)
            self._flight.append((before, next(iter(jax.tree.leaves(outputs)), None)))
            self._newest = state
        return outputs, state

    def last_whole(self) -> Any:
        """The newest state that was neither consumed nor returned by a failed launch."""
        for state in (self._newest, *(before for before, _ in reversed(self._flight))):
            if state is not None and _is_whole(state):
                return state
        if self._host_copy is not None:
            logger.error(
                "the launch that failed had already consumed the donated training state: the "
                "model gets back the state of %.0f seconds ago; "
                "TPUStrategy(donate_state=False) keeps the state before every step",
                self._host_copy.age_s,
            )
            return self._host_copy.on_devices()
        return None

    def release(self, end_of_fit: bool = True) -> None:
        """Frees every kept state.

        Args:
            end_of_fit: Whether a fit has ended; any other call may run within one.
        """
        self._flight.clear()
        if end_of_fit and not self.on_batch:
            self._host_copy, self._left = None, []
        elif self._newest is not None and self._host_copy is not None:
            self._left = [weakref.ref(leaf) for leaf in _trained(self._newest)]
        elif not self._left:
            self._host_copy = None
        self._newest, self.on_batch = None, False


def _trained(state: Any) -> list:
    """The trainable weights and slots: predict and evaluate only change metrics and seeds."""
    return jax.tree.leaves((state[0], state[2]))


def recover(trainer: Any, guard: StateGuard) -> None:
    """Restores a model's variables after an exception, to the last completed step.

    The variables get the outputs of every launch. So they are right unless a launch consumed its
    input and returned nothing, or its outputs turn out to have failed.

    Args:
        trainer: The model.
        guard: The guard of its training state.
    """
    if not _is_whole([v.value for v in _keras.state_variables(trainer)]):
        state = guard.last_whole()
        if state is not None:
            _keras.follow_state(_keras.state_groups(trainer), state)
    _keras.forget_state(trainer)


@contextlib.contextmanager
def interrupts_held(may_interrupt: Callable[[], bool]):
    """Delays Ctrl-C while the only complete state is the result of an unfinished call.

    Args:
        may_interrupt: Whether an interrupt would lose nothing now.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held = []

    def hold(signum, frame):
        if may_interrupt():
            handler(signum, frame)
        else:
            held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(signal.SIGINT, held[0])


def states_to_keep(setting: bool | str, variables: list) -> int:
    """Resolves `donate_state` to the number of input states kept alive.

    Args:
        setting: `True` (none), `False` (at least two), or `"auto"`: as many as fit in 10 % of the
            device's memory (8 MiB if that is unknown), at most 4 (32 on CPU), and none if not even
            two fit or there are more than 64 variables.
        variables: The variables of the training state.

    Returns:
        The number; 0 means that a train step consumes its input state.
    """
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    kept = states_that_fit(setting, [bytes_per_device(v.value) for v in variables], limit)
    return min(kept, _MOST_KEPT_ON_CPU if device.platform == "cpu" else _MOST_KEPT)


def states_that_fit(setting: bool | str, sizes: Sequence[int], memory_bytes: int | None) -> int:
    """The number of input states that `donate_state` keeps alive; see `states_to_keep`.

    Args:
        setting: `True`, `False` or `"auto"`.
        sizes: The bytes of every variable on one device.
        memory_bytes: The device's memory, or `None` if unknown.
    """
    if setting is True or (setting == "auto" and len(sizes) > _MOST_VARIABLES_KEPT):
        return 0
    budget = _KEEP_BYTES_WHERE_MEMORY_IS_UNKNOWN
    if memory_bytes:
        budget = memory_bytes * _KEEP_FRACTION_OF_MEMORY
    fitting = int(budget // max(sum(sizes), 1))
    if fitting >= _FEWEST_KEPT:
        return fitting
    return 0 if setting == "auto" else _FEWEST_KEPT


def _is_whole(state, wait: bool = True) -> bool:
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    if wait:
        try:
            jax.block_until_ready(leaves)
        except Exception as error:
            logger.info("a training state is not usable: %s", error)
            return False
    return True
