"""Private names for the position of training: counted steps, backups."""

import json
import pathlib
from typing import Any

from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator


def train_steps_counted(optimizer: Any) -> int:
    """How often an optimizer was applied, with every step of gradient accumulation.

    Args:
        optimizer: A Keras optimizer; if it scales the loss, its inner one counts. `None` for a
            model without one.

    Public replacement: none; `Optimizer.iterations` rounds down to whole updates.
    """
    if optimizer is None:
        return 0
    return int(getattr(optimizer, "inner_optimizer", optimizer)._iterations)


def backup_position(backup: Any) -> tuple[int, int]:
    """The epoch, and the batches done in it, of a BackupAndRestore's backup.

    Args:
        backup: The callback; if it has saved nothing, both numbers are 0.

    Public replacement: none; Keras writes the batch and never reads it.
    """
    metadata = _backup_metadata(backup)
    place = metadata.get("epoch", 0), metadata.get("batches_done", 0)
    if not all(type(each) is int and 0 <= each < 2**53 for each in place):
        raise ValueError(f"the backup was made in epoch {place[0]!r} after {place[1]!r} batches")
    return place


def restore_seeds(backup: Any, model: Any) -> None:
    """Restores the states of a model's random layers from a backup.

    Args:
        backup: The callback that saved it; if it has saved nothing, nothing changes.
        model: The model, with its random layers in the same order as the saved one.

    Public replacement: `Model.load_weights`, if `save_weights` saved that state.
    """
    for variable, value in zip(_seeds(model), _backup_metadata(backup).get("seeds", ())):
        variable.assign(value)


def _backup_metadata(backup) -> dict:
    path = pathlib.Path(backup._training_metadata_path)
    metadata = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(metadata, dict) or not isinstance(metadata.get("seeds", []), list):
        raise ValueError(f"{path} has another form than a backup's metadata")
    return metadata


def _seeds(model) -> list:
    saved = {id(variable) for variable in model.weights}
    return [v for v in model.non_trainable_variables if id(v) not in saved]


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
