"""The distribution that is active in this thread, also after `keras.utils.clear_session`."""

import logging
import threading
from typing import Any

import jax
import keras
from keras.src.backend.common import global_state
from keras.src.distribution import distribution_lib

from keras_tpu_dist._keras import seam
from keras_tpu_dist._keras.seam import Replacement
from keras_tpu_dist.common.once import log_once


class _LastSet(threading.local):
    """What this thread set last with `keras.distribution.set_distribution`, or by a scope."""

    distribution: Any = None


_last = _LastSet()


def _set_global_attribute(name: str, value: Any) -> None:
    setattr(global_state.GLOBAL_STATE_TRACKER, name, value)
    if name == distribution_lib.GLOBAL_ATTRIBUTE_NAME:
        _last.distribution = value


def _clear_session(stock, *args, **kwargs):
    before = _last.distribution
    stock(*args, **kwargs)
    _last.distribution = before


seam.declare(
    Replacement(
        "keras.src.backend.common.global_state",
        "set_global_attribute",
        _set_global_attribute,
        why="`clear_session` turns the distribution off without a word: all models would run on "
        "one device",
        hook="a distribution that `clear_session` keeps",
        parameters=("name", "value"),
        whole=True,
    ),
    Replacement(
        "keras.src.backend.common.global_state",
        "clear_session",
        _clear_session,
        why="Keras 3.16 turns the distribution off there as you would do it",
        hook="a distribution that `clear_session` keeps",
        inside=True,
    ),
)


def is_strategy(distribution: Any) -> bool:
    """Whether a distribution is one that the seam serves.

    Args:
        distribution: Any `keras.distribution.Distribution`, or `None`, which is not one.
    """
    return isinstance(distribution, distribution_lib.Distribution) and hasattr(
        distribution, "runner"
    )


def active_distribution() -> Any:
    """The active distribution; a strategy stays active if `clear_session()` turned it off."""
    active = keras.distribution.distribution()
    if active is None and _last.distribution is not None and is_strategy(_last.distribution):
        active = _last.distribution
        keras.distribution.set_distribution(active)
        log_once(
            f"keras.utils.clear_session() had turned distribution off: {active!r} is on again, as "
            "its scope() or set_distribution() says. To turn it off, leave the scope, or call "
            "keras.distribution.set_distribution(None)",
            logging.WARNING,
        )
    return active


def active_strategy() -> Any:
    """The active distribution if it is ours."""
    distribution = active_distribution()
    return distribution if is_strategy(distribution) else None


def active_mesh() -> tuple[Any, tuple[str, ...]]:
    """The mesh of the active distribution, and its axes that split the batch; or `(None, ())`.

    A strategy provides it by `mesh` and `data_axes`, Keras's own distributions by their device mesh
    and batch axis.
    """
    distribution: Any = active_distribution()
    if distribution is None:
        return None, ()
    of_strategy = getattr(distribution, "mesh", None)
    if isinstance(of_strategy, jax.sharding.Mesh):
        return of_strategy, tuple(distribution.data_axes)
    device_mesh = distribution.device_mesh
    axis = distribution.batch_dim_name
    return device_mesh.backend_mesh, (axis,) if axis in device_mesh.axis_names else ()
