"""Prepares a training step of the user's model for the mesh, without changing the model."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkup.batch import Given, values
from keras_tpu_dist.checkup.bench import Bench
from keras_tpu_dist.dryrun.build import described
from keras_tpu_dist.processes.arrays import put, whole
from keras_tpu_dist.training.step import jitted_step

State = list[list[np.ndarray]]


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to run: `program(placed_state, placed_batch)`.

    Args:
        program: The compiled step; it does not donate its arguments.
        state: The values before the step, on the host: weights, other variables of the model,
            optimizer, metrics.
        batch: `(x, y, sample_weight)` on the host, or shorter.
        placed_state: `state` on the mesh.
        placed_batch: `batch` on the mesh.
    """

    program: Callable[..., Any]
    state: State
    batch: Any
    placed_state: tuple[list, ...]
    placed_batch: Any


def why_not(model: keras.Model) -> str:
    """Why a model's step cannot be checked, or `""`.

    Args:
        model: The model.
    """
    if not model.compiled or getattr(model, "optimizer", None) is None:
        return "the model is not compiled"
    if not _keras.is_built(model):
        return "the model is not built: call it on data first"
    if model.run_eagerly:
        return "with run_eagerly=True there is no compiled step"
    return ""


@contextlib.contextmanager
def prepared(
    bench: Bench, model: keras.Model, given: Given, optimizer: Any = None
) -> Iterator[Prepared]:
    """Prepares a step of a model on the mesh.

    Args:
        bench: The check's shared state.
        model: A model for which `why_not` returns `""`.
        given: Its batch.
        optimizer: A built optimizer to use in the step; by default the model's own.
    """
    strategy, own = bench.strategy, model.optimizer
    model.optimizer = own if optimizer is None else optimizer
    try:
        rows = given.rows(strategy)
        with described(model, strategy, given.by_name(), rows, "train", []) as (_, shapes):
            batch = values(model, shapes, given, strategy.placer)
            groups = _keras.state_groups(model)
            state = [[np.array(whole(v)) for v in _keras.full_values(group)] for group in groups]
            layouts = _keras.state_shardings(model, "train")
            placed = tuple(put(group, of) for group, of in zip(state, layouts, strict=True))
            program = jitted_step(
                model,
                "train",
                strategy.placer,
                donate=False,
                compiler_options=strategy.runner.compiler_options,
            )
            yield Prepared(program, state, batch, placed, strategy.placer.place(batch))
    finally:
        model.optimizer = own
