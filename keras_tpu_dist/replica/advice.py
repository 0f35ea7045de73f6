"""What to write instead of TensorFlow's operations and functions, which JAX cannot trace."""

import sys

from keras_tpu_dist.common.errors import runtime_error

_OF_TENSORFLOW = (
    "TensorFlow's operations, tf.function and tf.GradientTape do not work within strategy.run, "
    "whose function JAX compiles. Write keras.ops for tf operations, nothing for tf.function, and "
    "jax.value_and_grad over model.stateless_call for a tape: docs/migration.md has both side by "
    "side."
)


def add_advice(error: Exception) -> None:
    """Adds a note to an error from within TensorFlow, raised while a function was traced."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "tensorflow":
            error.add_note(_OF_TENSORFLOW)
            return
        frame = frame.tb_next


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
