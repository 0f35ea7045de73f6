"""The optimizers that leave a row as it is, with its slots, if its gradient is zero.

For them, updating only the rows that a step looked up gives what updating every row gives.
`tests/tables/test_declared_optimizers.py` compares both for every optimizer of Keras.
"""

from typing import Any

import keras

_optimizers = keras.optimizers

# From a class, not its subclasses, to the reason.
EXACT: dict[type, str] = {
    _optimizers.SGD: "it subtracts the learning rate times the gradient",
    _optimizers.Adagrad: "its averages add up squares, and it subtracts a multiple of the gradient",
}
# Arguments with which they change other rows too, or read the whole gradient.
_ARGUMENTS = (
    "momentum", "weight_decay", "clipnorm", "global_clipnorm", "use_ema",
    "gradient_accumulation_steps",
)  # fmt: skip


def why_every_row(model: Any, variable: Any) -> str:
    """Why a training step also changes rows of a table that it did not look up, or `""`."""
    optimizer = model.optimizer
    if type(optimizer) not in EXACT:
        names = " and ".join(sorted(kind.__name__ for kind in EXACT))
        return f"{type(optimizer).__name__} also changes other rows; {names} do not"
    given = [name for name in _ARGUMENTS if getattr(optimizer, name, None)]
    if given:
        return f"{type(optimizer).__name__} with {given[0]}= also changes other rows"
    if variable.constraint is not None:
        return "its constraint may also change other rows"
    if getattr(model.train_step, "__func__", None) is not keras.Model.train_step:
        return "its model has a train_step of its own, which may also change other rows"
    return ""
