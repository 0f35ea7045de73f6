"""The error of a program that cannot be run on simulated devices."""

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.tools.hlo.parse import Instruction


class CannotRun(ValueError):
    """A program has something that cannot be run on simulated devices."""


def cannot_run(instruction: Instruction, why: str) -> CannotRun:
    """An error that names an operation."""
    return CannotRun(
        message(
            "Every operation of the TPU's program must have a counterpart on simulated devices.",
            received=f"{instruction!r}"[:400]
            + f": {why}"
            + (f" (from {instruction.op_name})" if instruction.op_name else ""),
            fix="Leave the layer that it comes from out of the model to verify the rest.",
        )
    )
