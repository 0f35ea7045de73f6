"""Prepares a training step of the user's model for the mesh, without changing the model."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.processes.arrays import put, whole
from keras_tpu_dist.tools.checkup.aside import on_one
from keras_tpu_dist.tools.checkup.batch import Given, values
from keras_tpu_dist.tools.checkup.bench import Bench
from keras_tpu_dist.tools.checkup.bounds import State
from keras_tpu_dist.tools.dryrun.build import Subject, described
from keras_tpu_dist.training.step import jitted_step


@dataclass(frozen=True)
class Prepared:
    """A launch that is ready to run: `program(placed_state, placed_batch)`.

    Args:
        program: The compiled launch; it does not donate its arguments.
        state: The values before it, on the host: weights, other variables of the model, optimizer,
            metrics.
        batches: The batch of every step on the host, `(x, y, sample_weight)` or shorter.
        placed_state: `state` on the mesh.
        placed_batch: `batches` on the mesh; stacked if there are several.
    """

    program: Callable[..., Any]
    state: State
    batches: list[Any]
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
    bench: Bench,
    model: keras.Model,
    given: Given,
    optimizer: Any = None,
    steps: int = 1,
) -> Iterator[Prepared]:
    """Prepares a launch of a model's training on the mesh.

    Args:
        bench: The check's shared state.
        model: A model for which `why_not` returns `""`.
        given: Its batch.
        optimizer: A built optimizer to use in the step. By default the model's own, or a copy of
            it if it is not built.
        steps: The number of steps in the launch.
    """
    strategy, own = bench.strategy, model.optimizer
    if optimizer is None and not own.built:
        optimizer = _keras.fresh_optimizer(own)
        optimizer.build(model.trainable_variables)
    model.optimizer = own if optimizer is None else optimizer
    try:
        rows = given.rows(strategy)
        with described(Subject(model, strategy, rows, given), []) as (_, shapes):
            batches = [values(model, shapes, given, strategy.placer, n) for n in range(steps)]
            groups = _keras.state_groups(model)
            state = [[np.array(whole(v)) for v in _keras.full_values(group)] for group in groups]
            layouts = _keras.state_shardings(model, "train")
            placed = tuple(put(group, of) for group, of in zip(state, layouts, strict=True))
            program = jitted_step(
                model,
                "train",
                strategy.placer,
                donate=False,
                scanned=steps > 1,
                compiler_options=strategy.runner.compiler_options,
            )
            placer = strategy.placer
            batch: Any = placer.place(batches[0]) if steps == 1 else placer.place_many(batches)
            yield Prepared(program, state, batches, placed, batch)
    finally:
        model.optimizer = own


def on_one_device(
    model: keras.Model, kind: str, device: Any
) -> Callable[[State, list], tuple[list, Any]]:
    """Steps of stock Keras on one device, one after the other.

    Returns:
        A function from a state and the batch of every step to the steps' outputs, and the state
        after the last.
    """
    step = jax.jit(getattr(model, f"{kind}_step"))

    def run(state: State, batches: list) -> tuple[list, Any]:
        after: Any = tuple(state)
        outputs: list[Any] = []
        with on_one(device):
            for batch in batches:
                found, after = step(after, batch)
                if kind == "predict":
                    after = (state[0], after)
                outputs.append(found)
        return outputs, after

    return run
