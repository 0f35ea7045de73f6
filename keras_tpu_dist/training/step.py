"""The step as compiled: batches trimmed in the program, one or many steps in one launch."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch
from keras_tpu_dist.partitioner import Jitted
from keras_tpu_dist.training.finite import first_bad, watched_step


def step_function(trainer: Any, kind: str) -> Callable:
    """What a train, test or predict step computes, uncompiled: `(state, batch)` to the new.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.

    Returns:
        `(state, batch) -> (outputs, state)`, where the batch is plain arrays.
    """
    user_step = getattr(trainer, f"{kind}_step")
    if kind != "predict":
        return user_step

    def predict_step(state, data):
        outputs, non_trainable = user_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


def jitted_step(
    trainer: Any,
    kind: str,
    placer: BatchPlacer,
    donate: bool,
    scanned: bool = False,
    mask: tuple[bool, ...] | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Jitted:
    """The jitted step alone, `(state, PlacedBatch) -> (outputs, state)`, as dry runs lower it.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Trims batches in the program.
        donate: Whether a train step consumes its input state.
        scanned: Whether the batch is several, stacked, of which each is a step.
        mask: For a train step that watches for values that are not finite, the variables to
            check; see `keras_tpu_dist.training.finite`.
        compiler_options: What the compiler is told; `None` for its defaults.

    Returns:
        A function that is compiled for each shape of batch; a `Jitted`. Of evaluation and
        prediction the new state has `None` for what they only read: see `with_changes`.
    """
    step = step_function(trainer, kind)
    replicated = named_sharding(placer.mesh)
    shardings = _keras.state_shardings(trainer, kind)

    def one_step(state, batch: PlacedBatch):
        outputs, new_state = step(state, placer.trim(batch))
        if kind == "predict" and (batch.ragged or not replicated.is_fully_addressable):
            # Uneven rows cannot leave a program split over devices, and each host reads them all.
            outputs = jax.lax.with_sharding_constraint(outputs, replicated)
        return outputs, tuple(list(group) for group in new_state)

    if mask is not None:
        one_step = watched_step(one_step, mask)
        shardings = (*shardings, [replicated, replicated])

    run = _scanned(one_step, kind, mask is not None) if scanned else one_step

    def layouts(state, batch: PlacedBatch):
        return shardings, placer.shardings(batch, stacked=scanned)

    if kind == "train":
        # The name that JAX's logs and profiles show.
        run.__name__ = "train_steps" if scanned else "train_step"
        outputs = (replicated, shardings)
        donated = (0,) if donate else ()
        return Jitted(
            run,
            placer.mesh,
            layouts,
            outputs=outputs,
            kind_of=_kind_of_batch,
            donate_argnums=donated,
            out_shardings=outputs,
            compiler_options=compiler_options,
        )

    def forward(state, batch: PlacedBatch):
        outputs, new_state = run(state, batch)
        return outputs, jax.tree.map(_if_new, state, new_state, shardings)

    forward.__name__ = f"{kind}_steps" if scanned else f"{kind}_step"
    known = {"kind_of": _kind_of_batch, "compiler_options": compiler_options}
    return Jitted(forward, placer.mesh, layouts, **known)


def _scanned(one_step: Callable, kind: str, watched: bool) -> Callable:
    """Steps on stacked batches, one after the other; the logs are the last one's."""

    def many_steps(state, batches: PlacedBatch):
        def body(state, data):
            outputs, new_state = one_step(state, PlacedBatch(data, batches.slots))
            return jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state), outputs

        state, outputs = jax.lax.scan(body, state, batches.data)
        if kind == "predict":
            return outputs, state
        outputs, *report = outputs if watched else (outputs,)
        outputs = jax.tree.map(lambda each: each[-1], outputs)
        if report:
            outputs = (outputs, first_bad(*report))
        return outputs, state

    return many_steps


def _kind_of_batch(state, batch: PlacedBatch) -> Hashable:
    """What tells step programs apart; the form of the state does not change."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _if_new(old, new, sharding: NamedSharding):
    """Nothing for what a step only reads, as weights: a program copies what it returns."""
    return None if new is old else jax.lax.with_sharding_constraint(new, sharding)


def with_changes(state: Sequence[list], changes: Sequence[list]) -> tuple[list, ...]:
    """A state after a step of evaluation or prediction.

    Args:
        state: The state before it.
        changes: What the step made of it, `None` for each that it left alone.
    """
    return tuple(
        [old if new is None else new for old, new in zip(before, after, strict=True)]
        for before, after in zip(state, changes, strict=True)
    )


def changed(state: Sequence[list], after: Sequence[list]) -> tuple[list, ...]:
    """What a step of evaluation or prediction changed, `None` for each value that it left alone.

    Args:
        state: The state before it.
        after: What the step gave for it, already with `None`, or whole.
    """
    return tuple(
        [None if new is old else new for old, new in zip(before, values, strict=True)]
        for before, values in zip(state, after, strict=True)
    )
