"""What to write instead of what a traced function cannot do."""

import sys
from types import TracebackType

import jax

from keras_tpu_dist.common.errors import runtime_error

_OF_TENSORFLOW = (
    "TensorFlow's operations, tf.function and tf.GradientTape do not work within strategy.run, "
    "whose function JAX compiles. Write keras.ops for tf operations, nothing for tf.function, and "
    "jax.value_and_grad over model.stateless_call for a tape: docs/migration.md has both side by "
    "side."
)
_OF_BRANCHES = (
    "Within strategy.run, no Python `if` or `while` can depend on a value, which is known only "
    "when the compiled program runs. Write keras.ops.where, keras.ops.cond or keras.ops.while_loop."
)
_OF_VALUES = (
    "Within strategy.run, a value is known only when the compiled program runs. Return it, and "
    "convert it outside: loss = strategy.run(step, args); float(strategy.reduce('mean', loss))."
)


def add_advice(error: Exception) -> None:
    """Adds a note to an error that the function of `strategy.run` raised while it was traced."""
    of_values = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    )
    if _passes_tensorflow(error.__traceback__):
        error.add_note(_OF_TENSORFLOW)
    elif isinstance(error, jax.errors.TracerBoolConversionError):
        error.add_note(_OF_BRANCHES)
    elif isinstance(error, of_values) or _of_attribute(error):
        error.add_note(_OF_VALUES)


def _passes_tensorflow(frame: TracebackType | None) -> bool:
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "tensorflow":
            return True
        frame = frame.tb_next
    return False


def _of_attribute(error: Exception) -> bool:
    """Whether a value was asked for an attribute that only arrays with values have."""
    return isinstance(error, AttributeError) and isinstance(error.obj, jax.core.Tracer)


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
