"""Where in its input a training stood: random numbers before the first batch, and batches since."""

import base64
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

logger = logging.getLogger("keras_tpu_dist")


@dataclass(frozen=True)
class InputPosition:
    """A place in an input that is read from its start again.

    Attributes:
        start: The state of NumPy's and Python's random numbers before the first batch was read:
            Keras shuffles arrays with the one and `PyDataset`s with the other.
        now: Their state when the position was taken.
        made: How many batches of the input were trained on.
        done: How many of these belong to the running epoch.
        state: What the input says of its own place, as plain data; `None` if it says nothing.
    """

    start: dict[str, Any]
    now: dict[str, Any]
    made: int
    done: int
    state: Any = None

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name; plain data."""
        return asdict(self)


def random_numbers() -> dict[str, Any]:
    """The state of NumPy's and Python's global random numbers, as plain data."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    version, words, gauss = random.getstate()
    return {
        "numpy": [
            name,
            _text(keys),
            *rest,
        ],
        "python": [version, _text(np.asarray(words, np.uint32)), gauss],
    }


def set_random_numbers(state: dict[str, Any]) -> None:
    """Gives NumPy's and Python's global random numbers a state.

    Args:
        state: What `random_numbers` returned.
    """
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, _words(keys), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in _words(words)), gauss))


def own_position(positions: Sequence) -> InputPosition | None:
    """Where this process's input stood; in another number of processes, where all of them stood.

    Args:
        positions: What each process that wrote a checkpoint noted, as plain data.
    """
    if len(positions) == jax.process_count():
        own = positions[jax.process_index()]
    else:
        own = positions[0]
        if any(each != own for each in positions):
            logger.warning(
                "%d processes wrote the checkpoint, each with random numbers of its own; of %d, "
                "all go on with those of the first",
                *(len(positions), jax.process_count()),
            )
    return None if own is None else InputPosition(**own)


def state_of(batches: Any) -> Any:
    """What an iterator with `get_state()`, as Grain's are, says of its place; as plain data.

    Args:
        batches: The iterator.

    Returns:
        The state, or `None` where it is no bytes and nothing that JSON has.
    """
    state = batches.get_state()
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return {"json": json.dumps(state)}
    except TypeError:
        return None


def set_state(batches: Any, state: dict[str, str]) -> bool:
    """Sends an iterator to where another one over the same input stood.

    Args:
        batches: The iterator.
        state: What `state_of` returned for the other.

    Returns:
        Whether it went there; it does not if it has no states, or takes none of this kind.
    """
    if not hasattr(batches, "set_state"):
        return False
    plain = base64.b64decode(state["bytes"]) if "bytes" in state else json.loads(state["json"])
    try:
        batches.set_state(plain)
    except Exception as error:
        logger.warning(
            "the input does not take the state that is in the checkpoint (%s: %s): it is read "
            "from its start again",
            *(type(error).__name__, error),
        )
        return False
    return True


def _text(words: np.ndarray) -> str:
    return base64.b64encode(words.astype("<u4").tobytes()).decode()


def _words(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)
