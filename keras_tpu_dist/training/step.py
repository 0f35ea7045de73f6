"""Keras's steps as programs, which cut the padding off; a launch has one or many steps."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch, kind_of
from keras_tpu_dist.layout.planner import device_memory
from keras_tpu_dist.programs.answers import Answer, LaunchSteps, Level, PassContext, forget, keep
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.programs.passes import rewritten
from keras_tpu_dist.programs.sums.launch import SumsOnDevices, one_batch
from keras_tpu_dist.programs.types import check_types, in_one_loop
from keras_tpu_dist.training.finite import first_bad, watched_step


class _Step:
    """One of Keras's steps, and its programs."""

    kind: str

    def __init__(self, trainer: Any, placer: BatchPlacer):
        self._trainer, self._placer = trainer, placer
        mesh, axes = placer.mesh, tuple(placer.data_axes)
        self._where = PassContext(trainer, self.kind, mesh, axes, device_memory(mesh))
        step = _keras.step_of_keras(trainer, self.kind)
        self._of_user = rewritten(Level.STEP, step, self._where)
        self._replicated = named_sharding(placer.mesh)

    def on_arrays(self, state: Any, data: Any) -> tuple[Any, Any]:
        """The outputs and the new state, for a batch of plain arrays."""
        return self._of_user(state, data)

    def one(self, state: Any, batch: PlacedBatch) -> tuple[Any, Any]:
        """The step on a placed batch."""
        outputs, state = self.on_arrays(state, self._placer.trim(batch))
        return outputs, tuple(list(group) for group in state)

    def many(self, state: Any, batches: PlacedBatch) -> tuple[Any, Any]:
        """Several steps on stacked batches, one after the other."""

        def one(state, data):
            return self.one(state, PlacedBatch(data, batches.slots))

        def looped(state, data, steps):
            return self.launch(state, PlacedBatch(data, batches.slots))

        steps = jax.tree.leaves(batches.data)[0].shape[0]
        outputs, state = in_one_loop(one, looped, state, batches.data, steps, every=True)
        return self.of_launch(outputs), state

    def launch(self, state: Any, batches: PlacedBatch) -> tuple[Any, Any]:
        """Several steps that keep the types of their state; returns the outputs of all."""
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        layouts = self.shardings(), self._placer.shardings(first)
        steps = LaunchSteps(self.one, layouts, first.rows, self.is_watched)
        return rewritten(Level.LAUNCH, self.looped, self._where, steps)(state, batches)

    def looped(self, state: Any, batches: PlacedBatch) -> tuple[Any, Any]:
        """These steps as one loop."""

        def body(state, batch):
            outputs, new_state = self.one(state, batch)
            check_types(state, new_state)
            return new_state, outputs

        state, outputs = jax.lax.scan(body, state, batches)
        return outputs, state

    @property
    def is_watched(self) -> bool:
        """Whether it looks for values that are not finite."""
        return False

    def of_launch(self, outputs: Any) -> Any:
        """The outputs of several steps, stacked, as those of one launch: the last step's."""
        return jax.tree.map(lambda of_steps: of_steps[-1], outputs)

    def shardings(self) -> tuple:
        """The layouts of the state."""
        return _keras.state_shardings(self._trainer, self.kind)

    def program(self, scanned: bool, compiler_options: dict[str, Any] | None) -> Jitted:
        """The step, or several on stacked batches, compiled. See `jitted_step`."""
        run, shardings = self.many if scanned else self.one, self.shardings()

        def forward(state, batch: PlacedBatch):
            outputs, new_state = run(state, batch)
            return outputs, jax.tree.map(_if_new, state, new_state, shardings)

        return self.compiled(forward, scanned, compiler_options)

    def compiled(
        self, function: Any, scanned: bool, compiler_options: dict[str, Any] | None
    ) -> Jitted:
        """A function of a state and a batch, and other arguments, compiled like the step."""
        shardings = self.shardings()

        def layouts(state, batch: PlacedBatch, *others: Any):
            batches = self._placer.shardings(batch, stacked=scanned)
            return shardings, batches, *[None] * len(others)

        # JAX's logs and profiles show this name.
        function.__name__ = f"{self.kind}_steps" if scanned else f"{self.kind}_step"
        return Jitted(
            function,
            self._placer.mesh,
            layouts,
            kind_of=kind_of,
            keep=functools.partial(keep, "faults", self._trainer, kind=self.kind),
            compiler_options=compiler_options,
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """Further options of the program."""
        return {}


class _TestStep(_Step):
    kind = "test"


class _PredictStep(_Step):
    kind = "predict"

    def on_arrays(self, state, data):
        outputs, non_trainable = super().on_arrays(state, data)
        return outputs, (state[0], non_trainable)

    def one(self, state, batch):
        outputs, state = super().one(state, batch)
        if batch.ragged or not self._replicated.is_fully_addressable:
            # JAX has no uneven arrays outside of a program, and every host reads all rows.
            outputs = jax.lax.with_sharding_constraint(outputs, self._replicated)
        return outputs, state

    def of_launch(self, outputs):
        return outputs


class _TrainStep(_Step):
    kind = "train"

    def __init__(self, trainer, placer, donate: bool, mask: tuple[bool, ...] | None):
        super().__init__(trainer, placer)
        self._donate, self._mask = donate, mask

    def one(self, state, batch):
        if self._mask is None:
            return super().one(state, batch)
        return watched_step(super().one, self._mask)(state, batch)

    @property
    def is_watched(self):
        return self._mask is not None

    def of_launch(self, outputs):
        if self._mask is None:
            return super().of_launch(outputs)
        outputs, report = outputs
        return super().of_launch(outputs), first_bad(report)

    def shardings(self):
        health = [] if self._mask is None else [self._replicated]
        return (*super().shardings(), *health)

    def program(self, scanned, compiler_options):
        run = self.many if scanned else self.one
        if self.is_watched:
            words = "a step with NaN or infinity, and all behind it, leave the state as it was"
            keep("finite", self._trainer, [Answer(self._trainer.name, words, True)], self.kind)
        else:
            forget("finite", self._trainer)
        if self._placer.mesh.size > 1:
            keep(SumsOnDevices.name, self._trainer, one_batch(self._trainer), self.kind)

        def train(state, batch: PlacedBatch):
            return run(state, batch)

        return self.compiled(train, scanned, compiler_options)

    def options(self):
        outputs = (self._replicated, self.shardings())
        options = {"outputs": outputs, "out_shardings": outputs}
        if self._donate:
            # Without `keep_unused` an array that no step reads, as a slot that is only written, is
            # no argument, and stays in memory beside its new value.
            options |= {"donate_argnums": (0,), "keep_unused": True}
        return options


def step_of(
    trainer: Any,
    kind: str,
    placer: BatchPlacer,
    donate: bool = False,
    mask: tuple[bool, ...] | None = None,
) -> _Step:
    """A step of a model, to be called uncompiled or as a program.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Trims batches in the program.
        donate: Whether a train step consumes its input state.
        mask: For a train step that watches for values that are not finite, the variables to
            check; see `keras_tpu_dist.training.finite`.
    """
    if kind == "train":
        return _TrainStep(trainer, placer, donate, mask)
    return {"test": _TestStep, "predict": _PredictStep}[kind](trainer, placer)


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
        kind: Keras's name of the step. `"train"` takes and returns all four groups of the state
            (trainable, other, optimizer's and metrics' variables), `"test"` has no optimizer's,
            and `"predict"` neither these nor the metrics'. Only `"train"` donates and watches.
        placer: Trims batches in the program.
        donate: Whether a train step consumes its input state.
        scanned: Whether the batch is a stack, with one batch for every step.
        mask: See `step_of`.
        compiler_options: Options for XLA; `None` for its defaults.

    Returns:
        A function that is compiled for every shape of batch; a `Jitted`. After evaluation and
        prediction the new state has `None` for values that they only read; see `with_changes`.
    """
    return step_of(trainer, kind, placer, donate, mask).program(scanned, compiler_options)


def _if_new(old, new, sharding: NamedSharding):
    """`None` for a value that the step only reads: a program copies every array it returns."""
    return None if new is old else jax.lax.with_sharding_constraint(new, sharding)


def with_changes(state: Sequence[list], changes: Sequence[list]) -> tuple[list, ...]:
    """A state after a step of evaluation or prediction.

    Args:
        state: The state before it.
        changes: The new values, `None` for unchanged ones.
    """
    return tuple(
        [old if new is None else new for old, new in zip(before, after, strict=True)]
        for before, after in zip(state, changes, strict=True)
    )


def changed(state: Sequence[list], after: Sequence[list]) -> tuple[list, ...]:
    """The values that evaluation or prediction changed, `None` for the others.

    Args:
        state: The state before the step.
        after: The state that the step returned, with or without `None`.
    """
    return tuple(
        [None if new is old else new for old, new in zip(before, values, strict=True)]
        for before, values in zip(state, after, strict=True)
    )
