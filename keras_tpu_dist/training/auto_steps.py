"""`steps_per_execution="auto"`: chooses the steps of a launch, for every epoch."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax

from keras_tpu_dist import _keras

# With this many steps, the overhead of a launch is small. More would only make callbacks on
# batches, which run once per launch, less frequent.
MOST_STEPS = 32

# The share of a device's memory that the batches of one launch may take; the bytes are for devices
# that do not report their memory.
_FRACTION_OF_MEMORY = 0.05
_BYTES_WHERE_MEMORY_IS_UNKNOWN = 256 * 2**20


def steps_of_a_launch(num_batches: int | None, ragged: bool) -> int:
    """The number of steps for which an epoch needs the fewest launches.

    Args:
        num_batches: The batches of an epoch, or `None` if that is not known.
        ragged: Whether the last batch is smaller; it is launched alone.

    Returns:
        A number from 1 to 32. Steps that do not fill a launch are launched one by one.

    Example:

    >>> [steps_of_a_launch(n, False) for n in (1, 7, 64, 100, None)]
    [1, 7, 32, 25, 32]
    """
    if num_batches is None:
        return MOST_STEPS
    equal = num_batches - bool(ragged)
    choices = range(1, max(1, min(MOST_STEPS, equal)) + 1)
    return min(choices, key=lambda n: (equal // n + equal % n, n))


def steps_that_fit(bytes_per_device: float, steps: int) -> int:
    """The largest divisor of `steps` whose batches leave the devices' memory to the model.

    Args:
        bytes_per_device: The bytes of one batch on one device.
        steps: The steps of a launch, chosen without regard to memory.

    Returns:
        At least 1. The batches of a launch get 5 % of the device's memory, or 256 MiB if that is
        unknown.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    budget = limit * _FRACTION_OF_MEMORY if limit else _BYTES_WHERE_MEMORY_IS_UNKNOWN
    divisors = [n for n in range(1, steps + 1) if steps % n == 0]
    return max((n for n in divisors if n * bytes_per_device <= budget), default=1)


class _Chosen(int):
    """The `steps_per_execution` of a model that runs with `"auto"`.

    A separate class, to distinguish it from a number that a callback sets by compiling the model.
    """


_CHOSEN = _Chosen(MOST_STEPS)
# For models with "auto", the number of running calls, including nested ones and other threads.
_chosen_for: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class AutoSteps:
    """Gives `steps_per_execution="auto"` a number while a call runs a model.

    Every call has a number of its own, because another thread may run the model with other batches.
    Keras requires that the model has a number too; it is the largest one, and nothing depends on
    it.
    """

    def __init__(self):
        self._model: Any = None
        self._steps = MOST_STEPS

    @contextlib.contextmanager
    def chosen_for(self, model: Any) -> Iterator[None]:
        """The context in which the model's steps are chosen, if it has `"auto"`."""
        with _lock:
            if model.steps_per_execution != "auto" and model not in _chosen_for:
                model = None
            else:
                _chosen_for[model] = _chosen_for.get(model, 0) + 1
                model.steps_per_execution = _CHOSEN
        self._model = model
        try:
            yield
        finally:
            if model is not None:
                self._end(model)

    @staticmethod
    def _end(model: Any) -> None:
        with _lock:
            _chosen_for[model] -= 1
            if not _chosen_for[model]:
                del _chosen_for[model]
                # A callback may have compiled the model with another setting.
                if model.steps_per_execution is _CHOSEN:
                    model.steps_per_execution = "auto"

    def of(self, model: Any) -> int | None:
        """The steps in a launch of a model, or `None` if the user has set them.

        Args:
            model: The model.
        """
        return self._steps if self._model is model else None

    def choose(self, epoch_iterator: Any) -> None:
        """Sets the number for an epoch that is about to begin; Keras counts steps by it.

        Args:
            epoch_iterator: Keras's `EpochIterator` over the epoch.
        """
        if self._model is None:
            return
        ragged = not epoch_iterator.steps_per_epoch and _keras.ends_ragged(
            epoch_iterator.data_adapter
        )
        self._steps = steps_of_a_launch(epoch_iterator.num_batches, ragged)
        epoch_iterator.steps_per_execution = self._steps
