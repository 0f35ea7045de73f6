"""The call of a model that runs in this thread, and the calls around it."""

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.training.auto_steps import AutoSteps
from keras_tpu_dist.training.membership import Membership


@dataclass(frozen=True)
class RunningCall:
    """A running fit, evaluate, predict, *_on_batch or dry run.

    Attributes:
        model: Its model, `None` for code in which a model is only a part.
        outer: The call around it: `fit` for its validation and its callbacks' calls.
    """

    runner: Any
    member: Membership
    auto_steps: AutoSteps
    model: Any = None
    name: str = ""
    outer: "RunningCall | None" = None


# A context variable, because threads share the strategy.
_running: contextvars.ContextVar[RunningCall | None] = contextvars.ContextVar(
    "running", default=None
)


def running_call() -> RunningCall | None:
    """The innermost call that runs in this thread, or `None`."""
    return _running.get()


def as_running(call: RunningCall) -> contextlib.AbstractContextManager[RunningCall]:
    """A context in which a call runs in this thread.

    Args:
        call: The call.
    """
    return setting(_running, call)


def after_other_launch() -> Callable[[], None] | None:
    """The function that the innermost fit in this thread wants called after others' launches."""
    call = _running.get()
    while call is not None:
        if call.name == "fit" and call.member.fit.after_other_launch is not None:
            return call.member.fit.after_other_launch
        call = call.outer
    return None
