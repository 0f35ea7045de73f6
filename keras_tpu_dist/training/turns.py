"""One model in several threads: one trains it, while others may evaluate or predict."""

import contextlib
import logging
import operator
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import runtime_error
from keras_tpu_dist.training.buffers import Owner

logger = logging.getLogger("keras_tpu_dist")

TRAINING = ("fit", "train_on_batch")
_WITH_METRICS = ("evaluate", "test_on_batch")
_WARN_AFTER_S = 10.0
_LOOK_AFTER_S = 1.0


# Held while several variables are assigned one by one, and while a state is read: which models
# have a variable is not known everywhere. Taken before the lock of a model.
assigning = threading.RLock()


class Turns(Owner):
    """The threads that run a model now; the owner of its training state."""

    def __init__(self):
        super().__init__()
        self._changed = threading.Condition(self.lock)
        self._trainer: threading.Thread | None = None
        self._training = ""
        self._depth = 0
        self._ready = False
        self._readers: Counter[threading.Thread] = Counter()
        self._measuring: Counter[threading.Thread] = Counter()

    @property
    def elsewhere(self) -> bool:
        """Whether another thread trains the model."""
        return self._trainer not in (None, threading.current_thread())

    @property
    def here(self) -> bool:
        """Whether this thread trains the model."""
        return self._trainer is threading.current_thread()

    def ready(self, variables: list) -> None:
        """Records that the model in training is built and has its step function.

        Calls in other threads wait for it; otherwise both would build the model.

        Args:
            variables: The variables of its training state.
        """
        self.take(variables)
        self.steps()

    def steps(self) -> None:
        """Records that the model in training runs its step function, maybe one of before."""
        if not self._ready:
            with self._changed:
                self._ready = True
                self._changed.notify_all()

    def note_outside_reader(self, variables: Iterable[Any]) -> None:
        """See `Owner`; a call in the thread that trains ends before the next launch."""
        if self.elsewhere:
            super().note_outside_reader(variables)

    @contextlib.contextmanager
    def taken(self, name: str, model: Any) -> Iterator[bool]:
        """The context of a call.

        Args:
            name: `"fit"`, `"evaluate"`, and so on.
            model: The model.

        Yields:
            Whether another thread's call runs too, so that this one must not change the model.
        """
        if name in TRAINING:
            with self._trains(name, model):
                yield False
            return
        me = threading.current_thread()
        with self._changed:
            # Two threads cannot build a model.
            self._wait_while(
                lambda: self.elsewhere and not self._ready,
                f"{name} of model {model.name!r} waits until the {self._training} that another "
                "thread began has built it",
            )
            measures = name in _WITH_METRICS
            beside = self.elsewhere or (measures and bool(self._others(self._measuring)))
            counters = [] if beside else [self._readers, self._measuring][: 1 + measures]
            for counter in counters:
                counter[me] += 1
        try:
            yield beside
        finally:
            with self._changed:
                for counter in counters:
                    counter[me] -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _trains(self, name: str, model: Any) -> Iterator[None]:
        with self._changed:
            self.check_free(name, model)
            # An evaluate counts in the model's own metrics.
            self._wait_while(
                lambda: bool(self._others(self._measuring)),
                f"{name} of model {model.name!r} waits for an evaluate of it that another thread "
                "began before",
            )
            self.check_free(name, model)
            if not self._depth:
                self._trainer, self._training = threading.current_thread(), name
                self._ready = False
            self._depth += 1
            if self._others(self._readers):
                self.forget()  # their calls hold all arrays
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._trainer = None
                self._changed.notify_all()

    def check_free(self, name: str, model: Any) -> None:
        """Raises a `RuntimeError` if another thread trains the model.

        Args:
            name: The operation: `"fit"`, `"compile"`, and so on.
            model: The model.
        """
        if self.elsewhere:
            raise runtime_error(
                "One thread at a time trains a model, or compiles it.",
                received=f"{name} of model {model.name!r} in thread "
                f"{threading.current_thread().name!r}, while {self._training} of it runs in "
                f"thread {getattr(self._trainer, 'name', None)!r}.",
                fix="Wait for it, or train a copy; predict and evaluate may run beside fit.",
            )

    def _others(self, counter: Counter) -> list[threading.Thread]:
        me = threading.current_thread()
        return [thread for thread, count in counter.items() if count and thread is not me]

    def _wait_while(self, busy: Callable[[], bool], waits: str) -> None:
        """Waits for other threads, with a WARNING if it takes long."""
        warn_at = time.monotonic() + _WARN_AFTER_S
        while busy():
            if self._changed.wait(_LOOK_AFTER_S):
                continue
            if time.monotonic() > warn_at:
                logger.warning("%s; if that thread waits for this one, neither ends", waits)
                warn_at = time.monotonic() + _WARN_AFTER_S


_turns: "weakref.WeakKeyDictionary[Any, Turns]" = weakref.WeakKeyDictionary()
_creating = threading.Lock()


def turns_of(model: Any) -> Turns:
    """The turns of a model; always the same object.

    Args:
        model: The model.
    """
    with _creating:
        return _turns.setdefault(model, Turns())


@contextlib.contextmanager
def consistent_values(variables: list) -> Iterator[None]:
    """A context in which variables have the values of one step, those of its beginning.

    What is assigned within is discarded at its end.

    Args:
        variables: The variables.
    """
    owners = {id(owner): owner for v in variables if (owner := _keras.owner_of(v)) is not None}
    with contextlib.ExitStack() as held:
        held.enter_context(assigning)
        # Sorted: two threads that lock several models in different orders would deadlock.
        for _, owner in sorted(owners.items()):
            held.enter_context(owner.lock)
        values = [v.value for v in variables]
    with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
        yield


def read_together(variables: list, read: Callable[[], Any]) -> Any:
    """Calls a function that reads variables, such as `get_weights`, and returns its result.

    It sees the values of one step, even if another thread trains some of the variables, or begins
    to while it reads.
    """
    owners = (_keras.owner_of(v) for v in variables)
    if not any(owner is not None and owner.elsewhere for owner in owners):
        with assigning:
            before = _keras.values_of(variables)
        result = read()
        # A first launch in another thread may come in between: no owner knows of it in advance.
        if all(map(operator.is_, before, _keras.values_of(variables))):
            return result
    with consistent_values(variables):
        return read()


def assign_together(assign: Callable[[], Any]) -> Any:
    """Calls a function that assigns variables one by one, such as `set_weights`.

    What another thread starts meanwhile sees either none of the new values or all of them.
    """
    with assigning:
        return assign()


@contextlib.contextmanager
def compiling(model: Any) -> Iterator[None]:
    """The context in which a model is compiled.

    Args:
        model: The model.
    """
    turns = turns_of(model)
    turns.check_free("compile", model)
    yield
    if turns.here:
        # `compile` has no function: Keras's fit loop calls the attribute again at the next step.
        model.train_function = Recompiled(model.name)


class Recompiled:
    """The step function of a model that a callback compiled during its fit: an error."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, state: Any, iterator: Any) -> Any:
        """Raises a `RuntimeError`."""
        raise runtime_error(
            "A fit trains the model as it was compiled before it.",
            received=f"compile of model {self._name!r} in a callback, after which its fit went on.",
            fix="Stop the fit first (model.stop_training = True), or compile in on_train_end.",
        )
