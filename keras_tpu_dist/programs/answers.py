"""What a pass gets, and what it answers: see `programs.passes`.

Answers are stored with their reasons: on the model whose step or launch was traced, or on the layer
whose call was.
"""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.once import log_once

_answers = _keras.Mark("_keras_tpu_dist_answers")


class Level(enum.Enum):
    """Which programs a pass gets."""

    LAUNCH = "several steps, or the loop of `generate`, as one program"
    STEP = "a train, test or predict step, from state and data to outputs and the new state"
    LAYER = "a layer's call, traced by itself"


@dataclass(frozen=True)
class LaunchSteps:
    """What a launch of several steps consists of.

    Attributes:
        one: A step, `(state, batch) -> (outputs, state)`.
        layouts: The layouts of the state, and of the arrays of one batch.
        rows: The rows of each array of a batch.
        is_watched: Whether each step looks for values that are not finite.
    """

    one: Callable[..., Any]
    layouts: tuple[Any, Any]
    rows: list[int]
    is_watched: bool = False


class WrittenProgram(NamedTuple):
    """A program to rewrite: a function and the arrays that it is traced with.

    Attributes:
        args: For a step, its state and the data of a batch; for a launch, the state and stacked
            batches; for a layer's call, the inputs of the jaxpr.
        jaxpr: For a layer's call, the traced program, a `ClosedJaxpr`.
        steps: For a launch of several steps, what it consists of.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    jaxpr: Any = None
    steps: LaunchSteps | None = None

    def run(self) -> Any:
        """Its results, computed as it is written."""
        return self.function(*self.args)


@dataclass(frozen=True)
class PassContext:
    """The model whose program it is, and the devices that run it.

    Attributes:
        kind: Keras's name for the step, `"train"`, `"test"` or `"predict"`; or `"generate"`.
        data_axes: The axes of the mesh that split the batch.
        hbm_bytes: The memory of a device.
    """

    model: Any
    kind: str
    mesh: Mesh
    data_axes: tuple[str, ...]
    hbm_bytes: int


@dataclass(frozen=True)
class CallContext:
    """The layer whose call it is, and the devices that run it.

    Attributes:
        mesh: The mesh, or `None` for one device, also within code for each device.
        data_axes: The axes of the mesh that split the batch.
    """

    layer: Any
    mesh: Mesh | None
    data_axes: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What is computed otherwise, or why it is not.

    Attributes:
        path: The path of the variable or layer that the answer is about, or the model's name. `""`
            stands for the layer that the answer is stored on, or, in `waits`, for the whole model.
        words: What is computed otherwise, or what stays as it is and why.
        done: Whether it is computed otherwise: `explain` prints "otherwise", else "as written".
        level: The level at which it is logged, of `logging`; by default it is not logged.
        first_only: Whether it is stored only if there is no answer for its path yet.
    """

    path: str
    words: str
    done: bool = False
    level: int = logging.NOTSET
    first_only: bool = False


@dataclass(frozen=True)
class Why:
    """A program stays as it is; the answers say why.

    Without answers, the pass has nothing to do in this program, and `explain` prints no new line.
    """

    answers: Sequence[Answer] = ()


@dataclass(frozen=True)
class Rewritten:
    """The results of a program that is computed otherwise.

    Attributes:
        results: They have the structure of those of `WrittenProgram.run`.
    """

    results: Any
    answers: Sequence[Answer] = ()


def keep(name: str, target: Any, answers: Sequence[Answer], kind: str = "") -> None:
    """Stores the answers of a pass on a model, or on the layer whose call it is, and logs them.

    Args:
        name: The name of the pass.
        target: The model or layer.
        answers: The answers. Each replaces the last one for its path. In a test or predict step, an
            answer is stored only if its path has none.
        kind: The kind of the step; `""` for a layer's call.
    """
    for answer in answers:
        known = kept(target, name)
        further = kind in ("test", "predict") or answer.first_only
        if answer.path not in known or not further:
            every = _answers.of(target) or {}
            _answers.write(target, {**every, name: {**known, answer.path: answer}})
        if answer.level:
            of_model = f"model {target.name!r}"
            subject = of_model if answer.path == target.name else f"{answer.path} of {of_model}"
            log_once(f"{name}: {subject if kind else answer.path}: {answer.words}", answer.level)


def forget(name: str, target: Any) -> None:
    """Forgets the answers of a pass for a model or layer."""
    every = dict(_answers.of(target) or {})
    if every.pop(name, None):
        _answers.write(target, every)


def kept(target: Any, name: str) -> dict[str, Answer]:
    """The stored answers of a pass for a model or a layer, by their paths."""
    return (_answers.of(target) or {}).get(name, {})


def words_of(model: Any, name: str) -> dict[str, str]:
    """The words of the stored answers of a pass for a model, by their paths."""
    return {path: answer.words for path, answer in kept(model, name).items()}
