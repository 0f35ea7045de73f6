"""What to write instead of what JAX cannot trace, in errors of replica code."""

import sys
import traceback
from collections.abc import Iterator
from types import FrameType

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import runtime_error

_OF_TENSORFLOW = (
    "TensorFlow's operations, tf.function and tf.GradientTape do not work within strategy.run, "
    "whose function JAX compiles. Write keras.ops for tf operations, nothing for tf.function, and "
    "ktd.loss_and_gradients(loss, model) for a tape: docs/migration.md has both side by side."
)
_COMPILED = "A function of strategy.run is compiled"
_LATER = f"{_COMPILED}, and its values are computed later, on the devices"
# By JAX's error: what the function did, and what to write. A subclass stands before its base.
_OF_JAX: tuple[tuple[type[Exception], str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        f"{_LATER}: `if`, `while`, `and`, `not` and assert cannot ask for one. Write "
        "keras.ops.where(condition, a, b) or jax.lax.cond; or return the value and decide after "
        "the call.",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        f"{_LATER}: one cannot be an index of a list, a range or a size. Write keras.ops.take for "
        "an index; a size is a number of Python, such as x.shape[0].",
    ),
    (
        jax.errors.TracerArrayConversionError,
        f"{_LATER}: NumPy and other libraries cannot compute with one. Write keras.ops or "
        "jax.numpy for numpy; or return the value and compute after the call.",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        f"{_LATER}: how many rows a mask keeps is not known. Write keras.ops.where(mask, x, 0), "
        "and divide by the sum of the mask.",
    ),
    (
        jax.errors.ConcretizationTypeError,
        f"{_LATER}: float(x), int(x), x.item() and sizes that are computed cannot have one. Return "
        'it, and read it after the call: float(strategy.reduce("mean", losses)). '
        "jax.debug.print shows one on the way.",
    ),
    (
        jax.errors.UnexpectedTracerError,
        f"{_LATER}: one that the function put into a list, an attribute or a global is gone after "
        "the call. Return it, or assign it to a keras.Variable.",
    ),
)


def add_advice(error: Exception) -> None:
    """Adds what to write to an error that was raised while a function was traced or compiled."""
    if _within_tensorflow(error):
        error.add_note(_OF_TENSORFLOW)
        return
    for frame in _frames(error):
        if (why := _keras.why_uncompiled(frame.f_locals.get("self"))) is not None:
            error.add_note(f"{_COMPILED}, and {why.path} cannot be. {why.words} {why.fix}")
            return
    for kind, advice in _OF_JAX:
        if isinstance(error, kind):
            error.add_note(advice)
            return


def _within_tensorflow(error: Exception) -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame in _frames(error))
    return any(module.partition(".")[0] == "tensorflow" for module in modules)


def _frames(error: Exception) -> Iterator[FrameType]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame


def check_no_graph() -> None:
    """Raises a `RuntimeError` within `tf.function`, which would run the step once for good."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.inside_function():
        raise runtime_error(
            "strategy.run is called outside of tf.function.",
            received="a call while TensorFlow traces a function.",
            fix="Remove @tf.function: strategy.run compiles its function, and with steps=N or "
            "strategy.loop many steps of it.",
        )
