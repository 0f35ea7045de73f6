"""The step as compiled, and the guard that never loses the state it works on."""

import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.data import BatchPlacer, DeviceIterator, PlacedBatch
from keras_tpu_dist.layout import named_sharding

logger = logging.getLogger("keras_tpu_dist")

# Launches that may be under way at once where their inputs are kept. Two keep the device busy;
# each one more keeps one more copy of the state alive.
_LAUNCHES_IN_FLIGHT = 2

# Without donation a step needs the old and the new state at once, and the guard keeps another.
# That is free where the state is a small part of the memory.
_KEEP_FRACTION_OF_MEMORY = 0.05
_KEEP_BYTES_WHERE_MEMORY_IS_UNKNOWN = 256 * 2**20


class StateGuard:
    """Keeps enough of a training state to give it back when a launch fails.

    Kept state (`donate=False`): the inputs of the launches under way stay alive, so the state
    before the failing step is still there, whatever went wrong. Donated state: XLA overwrites
    the inputs, as a state that fills the memory demands; a failure before the launch (input,
    tracing, compilation) loses nothing either, and for a failure within it a copy in host memory
    is taken whenever the state is read from the model, that is at the start of each epoch.

    Args:
        donate: Whether launches consume their input state.
    """

    def __init__(self, donate: bool):
        self.donate = donate
        self._flight: deque[tuple[Any, jax.Array | None]] = deque()
        self._newest: Any = None
        self._host_copy: Any = None

    def read(self, state: Any) -> None:
        """Notes a state that was just read from the model's variables."""
        self._flight.clear()
        self._newest = state
        if self.donate:
            self._host_copy = jax.tree.map(_to_host_memory, state)

    def launch(self, step: Callable, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs `outputs, state = step(state, batch)`, remembering what it needs."""
        before = state
        if self.donate:
            with interrupts_held(lambda: _is_whole(before, wait=False)):
                outputs, state = step(state, batch)
                self._newest = state
            return outputs, state
        if len(self._flight) == _LAUNCHES_IN_FLIGHT:
            # The oldest launch must have ended well before its input may go.
            jax.block_until_ready(self._flight[0][1])
            self._flight.popleft()
        outputs, state = step(state, batch)
        self._flight.append((before, next(iter(jax.tree.leaves(outputs)), None)))
        self._newest = state
        return outputs, state

    def last_whole(self) -> Any:
        """The newest state that is neither consumed nor the result of a failed launch."""
        for state in (self._newest, *(before for before, _ in reversed(self._flight))):
            if state is not None and _is_whole(state):
                return state
        if self._host_copy is not None:
            logger.error(
                "the launch that failed had already consumed the donated training state: the "
                "model is given back the state of the start of the epoch; "
                "TPUStrategy(donate_state=False) keeps the state before every step"
            )
        return self._host_copy

    def release(self) -> None:
        """Lets go of every kept state."""
        self._flight.clear()
        self._newest = self._host_copy = None


def recover(trainer: Any, guard: StateGuard) -> None:
    """Gives a model its variables back after an exception, as of the last completed step."""
    trainer.jax_state_sync()
    if not _is_whole([v.value for v in _keras.state_variables(trainer)]):
        state = guard.last_whole()
        if state is not None:
            _keras.restore_state(trainer, state)
    _keras.forget_state(trainer)


@contextlib.contextmanager
def interrupts_held(may_interrupt: Callable[[], bool]):
    """Holds Ctrl-C back while the only whole copy of the state has no name yet.

    Args:
        may_interrupt: Whether an interrupt that arrives now would lose nothing.
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


def make_step(trainer: Any, kind: str, placer: BatchPlacer, guard: StateGuard) -> Callable:
    """Builds the function that Keras's loop calls: `(state, iterator) -> (outputs, state)`.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Puts batches on the mesh and trims them in the program.
        guard: Keeps the training state (used for `"train"`).

    Returns:
        The function; it takes a `DeviceIterator`, or any iterator over host batches.
    """
    compiled = not trainer.run_eagerly and trainer.jit_compile
    step = _step_function(trainer, kind, placer)
    if compiled:
        step = _jit(trainer, kind, step, placer, guard.donate)
    place = placer.place if compiled else placer.place_eagerly

    def one(state, iterator):
        if isinstance(iterator, DeviceIterator):
            batch = iterator.take(place)
        else:
            batch = place(next(iterator))
        if kind != "train":
            return step(state, batch)
        try:
            return guard.launch(step, state, batch)
        except BaseException:
            recover(trainer, guard)
            raise

    def many(state, iterator):
        outputs, state = one(state, iterator)
        collected = [outputs]
        for _ in range(trainer.steps_per_execution - 1):
            try:
                outputs, state = one(state, iterator)
            except StopIteration:
                break
            collected.append(outputs)
        if kind == "predict":
            outputs = jax.tree.map(lambda *rows: np.concatenate(rows), *collected)
        return outputs, state

    return many if trainer.steps_per_execution > 1 else one


def jitted_step(trainer: Any, kind: str, placer: BatchPlacer, donate: bool) -> Callable:
    """The jitted step alone, `(state, PlacedBatch) -> (outputs, state)`, as dry runs lower it.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Trims batches in the program.
        donate: Whether a train step consumes its input state.

    Returns:
        A `jax.jit` function.
    """
    return _jit(trainer, kind, _step_function(trainer, kind, placer), placer, donate)


def should_donate(setting: bool | str, variables: list) -> bool:
    """Resolves `donate_state`: `"auto"` donates only where keeping would cost memory that counts.

    Args:
        setting: `True`, `False` or `"auto"`.
        variables: The variables of the training state.

    Returns:
        Whether the train step consumes its input state.
    """
    if setting != "auto":
        return bool(setting)
    state_bytes = sum(_bytes_per_device(v.value) for v in variables)
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return state_bytes > _KEEP_BYTES_WHERE_MEMORY_IS_UNKNOWN
    return state_bytes > limit * _KEEP_FRACTION_OF_MEMORY


def _step_function(trainer, kind: str, placer: BatchPlacer) -> Callable:
    user_step = getattr(trainer, f"{kind}_step")
    if kind != "predict":
        return user_step

    def predict_step(state, data):
        outputs, non_trainable = user_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


def _jit(trainer, kind: str, step: Callable, placer: BatchPlacer, donate: bool) -> Callable:
    replicated = named_sharding(placer.mesh)
    shardings = _keras.state_shardings(trainer, kind)

    def train_step(state, batch: PlacedBatch):
        return step(state, placer.trim(batch))

    def forward_step(state, batch: PlacedBatch):
        outputs, new_state = step(state, placer.trim(batch))
        new_state = tuple(list(group) for group in new_state)
        if kind == "predict" and batch.ragged:
            # Uneven rows cannot leave a program split over devices.
            outputs = jax.lax.with_sharding_constraint(outputs, replicated)
        return outputs, jax.tree.map(_constrain_if_new, state, new_state, shardings)

    if kind == "train":
        return jax.jit(
            train_step,
            donate_argnums=(0,) if donate else (),
            out_shardings=(replicated, shardings),
        )
    # Weights that a step only reads are not among its outputs: JAX forwards them, neither copied
    # nor donated, as long as no output sharding is asked for.
    return jax.jit(forward_step)


def _constrain_if_new(old, new, sharding: NamedSharding):
    return old if new is old else jax.lax.with_sharding_constraint(new, sharding)


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


def _to_host_memory(array: jax.Array) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def _bytes_per_device(array: jax.Array) -> int:
    return int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
