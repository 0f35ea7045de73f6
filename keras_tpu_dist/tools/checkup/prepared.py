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
from keras_tpu_dist.tools.checkup.batch import Given, values
from keras_tpu_dist.tools.checkup.bench import Bench
from keras_tpu_dist.tools.dryrun.build import described
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


def is_half(model: keras.Model) -> bool:
    """Whether layers of a model compute in half precision.

    Args:
        model: The model.
    """
    dtypes = {layer.compute_dtype for layer in _keras.flatten_layers(model)}
    return not dtypes.isdisjoint(("bfloat16", "float16"))


def nudged(state: State, batch: Any, half: bool, seed: int) -> tuple[State, Any]:
    """Weights and inputs, changed by rounding: what that does to results is a model's own error.

    Args:
        state: The values before a step.
        batch: `(x, y, sample_weight)`, or shorter.
        half: Whether the model computes in half precision.
        seed: Draws the changes.
    """
    rng = np.random.default_rng(seed)
    size = 2.0**-10 if half else 2.0**-22

    def nudge(leaf: np.ndarray) -> np.ndarray:
        if not jax.numpy.issubdtype(leaf.dtype, np.floating):
            return leaf
        wide = np.asarray(leaf, np.float64)
        return (wide * (1 + size * rng.choice([-1.0, 1.0], wide.shape))).astype(leaf.dtype)

    weights = [nudge(leaf) for leaf in state[0]]
    changed = [weights, *state[1:]]
    if not isinstance(batch, tuple):
        return changed, jax.tree.map(nudge, batch)
    x, *rest = batch
    return changed, (jax.tree.map(nudge, x), *rest)
