"""Private names for the position of training: counted steps, the epoch to begin with."""

from typing import Any

from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator


def counter_of(optimizer: Any) -> Any:
    """The variable that counts how often an optimizer was applied; see `train_steps_counted`."""
    return optimizer._iterations


def train_steps_counted(optimizer: Any) -> int:
    """How often an optimizer was applied, with every step of gradient accumulation.

    Args:
        optimizer: A Keras optimizer; if it scales the loss, its inner one counts. `None` for a
            model without one.

    Public replacement: none; `Optimizer.iterations` rounds down to whole updates.
    """
    if optimizer is None:
        return 0
    return int(counter_of(getattr(optimizer, "inner_optimizer", optimizer)))


def begin_at_epoch(model: Any, epoch: int | None) -> None:
    """Makes the fit that starts begin with an epoch, whatever `initial_epoch` is.

    Args:
        model: The model.
        epoch: The epoch, from 0; `None` returns to `fit(initial_epoch=...)`.
    Public replacement: none; a callback learns of `fit` too late to change `initial_epoch`.
    """
    model._initial_epoch = epoch


def global_seed() -> Any:
    """Keras's own global random state, which operations without a seed draw from, or `None`.

    Public replacement: none; `keras.utils.set_random_seed` resets it.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state.numpy().tolist()


def set_global_seed(state: Any) -> None:
    """Sets Keras's global random state. See `global_seed`.

    Args:
        state: A result of `global_seed`.
    """
    if state is not None:
        global_seed_generator().state.assign(state)
