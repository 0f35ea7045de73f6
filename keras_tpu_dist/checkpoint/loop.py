"""Saves and resumes custom loops: models, optimizers, metrics, the position in the input."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.beside import load_beside
from keras_tpu_dist.checkpoint.local import LocalTier
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest
from keras_tpu_dist.checkpoint.names import (
    METRICS,
    OPTIMIZER,
    SLOTS,
    WEIGHTS,
    Entry,
    entry_of,
    follow,
    match,
    numbered,
    unmatched_text,
)
from keras_tpu_dist.checkpoint.restore import agreed_manifest, agreed_steps, assign_saved
from keras_tpu_dist.checkpoint.snapshot import snapshot
from keras_tpu_dist.checkpoint.store import Store
from keras_tpu_dist.checkpoint.tiers import Tiers, finish, is_on_this_host
from keras_tpu_dist.common.checks import check_counts, check_flags, checked_path
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.input.position import is_position, own_position
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import ANYTHING
from keras_tpu_dist.processes.preemption import Preemption
from keras_tpu_dist.training import membership

logger = logging.getLogger("keras_tpu_dist")

_FIX = "Use the same LoopCheckpoint in all processes."
_WHERE = 'Write for example ktd.LoopCheckpoint("run7", model, optimizer, dataset).'
_WITH_LOCAL = f'{_WHERE[:-2]}, local="/ssd/run7").'
_Plain = (bool, int, float, str)


class LoopCheckpoint:
    """Saves and resumes a custom loop over `strategy.run`, in the files of `Checkpoint`.

    Pass everything that changes: models, optimizers, metrics, `keras.Variable`s, seed generators,
    and the dataset that you iterate over. `restore` restores all of it, on any mesh. The next
    iteration over the dataset then continues with the next batch, under the same conditions as for
    the inputs of `fit`. `keras_tpu_dist.restore(model, directory)` loads the model alone. If your
    machine may be preempted, check `preempted` after every step.

    Args:
        directory: The directory for the checkpoints; one loop per directory, the same for all
            processes.
        *objects: The objects that change.
        keep: How many of the newest checkpoints to keep; `None` for all.
        asynchronous: Whether the loop continues while a checkpoint is written. If so, use it in a
            `with` block, whose end waits for the last one.
        local: A directory for this loop on every host's own disk. `save_local` writes there; it is
            faster than `save`, so you can call it more often.

    Raises:
        ValueError: If an argument has the wrong type or value.
        CheckpointError: If another process writes into the directory.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd, tempfile
    >>> strategy = ktd.TPUStrategy()
    >>> with strategy.scope():
    ...     total = keras.metrics.Sum()
    >>> dataset = strategy.distribute_dataset(np.arange(32.0), batch_size=8)
    >>> def step(x):
    ...     total.update_state(x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ktd.LoopCheckpoint(folder, total, dataset) as saved:
    ...         for done, batch in enumerate(dataset, 1):
    ...             _ = strategy.run(step, (batch,))
    ...             if done == 2:
    ...                 saved.save(done)
    ...                 break
    ...         print(saved.restore(), len(list(dataset)), float(total.result()))
    {'step': 2} 2 120.0
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *objects: Any,
        keep: int | None = 3,
        asynchronous: bool = False,
        local: str | os.PathLike | None = None,
    ):
        path = checked_path("LoopCheckpoint", _WHERE, directory=directory)
        if keep is not None:
            check_counts("LoopCheckpoint", keep=keep)
        check_flags("LoopCheckpoint", asynchronous=asynchronous)
        if local is not None and not is_on_this_host(local):
            raise ValueError(
                message(
                    "local of LoopCheckpoint is a directory on the host's own disk.",
                    received={"local": local},
                    fix=_WITH_LOCAL,
                )
            )
        self._parts = _Parts(objects)
        self._store = Store(path, keep=keep, asynchronous=asynchronous)
        self._tiers = Tiers(self._store, local, asynchronous, _FIX)
        self._preemption: Preemption | None = None

    @property
    def preempted(self) -> bool:
        """Whether to save and leave the loop: SIGTERM came to this process or another one.

        Check it after every step, in all processes: they all see it after the same step. From the
        first check on, the signal waits for `close`, or for the end of the `with` block, which
        passes it on. Before that, the previous handler gets it; with several processes, JAX does,
        and nothing reports it.
        """
        if self._preemption is None:
            self._preemption = Preemption()
            self._preemption.start()
        return self._preemption.comes()

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, the newest last."""
        return self._store.steps

    def save(self, step: int, **numbers: bool | int | float | str) -> None:
        """Saves the current state of everything.

        Args:
            step: The number of steps so far; the checkpoint's name.
            **numbers: Further values for `restore` to return, such as `epoch=3`.

        Raises:
            ValueError: If `step` is not a whole number, or one of `numbers` is not a number or
                text.
            CheckpointError: If it could not be written; if `asynchronous`, from the next call.
        """
        saved = self._snapshot("LoopCheckpoint.save", step, numbers)
        self._store.save(int(step), *saved)

    def save_local(self, step: int, **numbers: bool | int | float | str) -> None:
        """Saves the current state of everything on the hosts' own disks, in the directory `local`.

        Every process writes the parts on its own devices, which is faster than `save`. `restore`
        loads the newest checkpoint for which the processes can read all parts together, otherwise
        that of the last `save`. If a disk is full, an error is logged, and the loop continues. If
        `asynchronous` and a process is still writing the previous checkpoint, this one is skipped.

        Args:
            step: The number of steps so far.
            **numbers: See `save`.

        Raises:
            ValueError: Without `local`; or as in `save`.
        """
        where = "LoopCheckpoint.save_local"
        if self._tiers.local is None:
            raise ValueError(
                message(
                    f"{where} needs a directory on each host's own disk.",
                    received={"local": None},
                    fix=_WITH_LOCAL,
                )
            )
        saved = self._snapshot(where, step, numbers)
        if self._tiers.local.is_busy:
            logger.info("no local checkpoint %d: the one before is being written", step)
        else:
            self._tiers.save_locally(int(step), *saved)

    def _snapshot(
        self, where: str, step: int, numbers: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Callable[[], Manifest]]:
        """The current state of everything, for a checkpoint."""
        check_counts(where, 0, step=step)
        wrong = {name: value for name, value in numbers.items() if not isinstance(value, _Plain)}
        if wrong:
            raise ValueError(
                message(
                    "Only numbers and texts can be saved besides the objects.",
                    received=wrong,
                    fix="Write for example save(step, epoch=3); for arrays, pass a keras.Variable "
                    "to LoopCheckpoint.",
                )
            )
        if not self._tiers.run:
            self._tiers.name_run()
        own = [self._parts.positions(), self._tiers.standing]
        answers = agree(f"{where} of step {step}", _FIX, own, [ANYTHING, str])
        self._tiers.hear([standing for _, standing in answers])
        training = {
            "step": int(step),
            "loop": dict(numbers),
            "loop_positions": [positions for positions, _ in answers],
            "global_seed": _keras.global_seed(),
            "run": self._tiers.run,
        }
        return snapshot(self._parts, training, {}, _Parts.state, self._parts.models)

    def restore(self) -> dict[str, Any]:
        """Loads the newest complete checkpoint, if there is one.

        Returns:
            A dict with the "step" and the numbers passed to `save`, empty if there is no
            checkpoint.

        Raises:
            ValueError: If it was saved with other objects.
            CheckpointError: If there are checkpoints and none can be read.
        """
        finish(self._tiers.wait)
        steps = agreed_steps(self._store)
        self._tiers.look_for_local()
        if noted := self._tiers.load_local(self._load):
            return noted
        errors = []
        for step in reversed(steps):
            try:
                return self._load(self._store, step)
            except CheckpointError as error:
                errors.append(str(error))
                logger.warning("%s Trying the previous checkpoint.", error)
        if errors:
            raise CheckpointError(" ".join(errors))
        return {}

    def _load(self, tier: Store | LocalTier, step: int) -> dict[str, Any]:
        manifest = agreed_manifest(tier, step)
        numbers, positions = _noted(manifest, step, tier.directory)
        places = []
        for i, _ in enumerate(self._parts.datasets):
            here = [own[i] if i < len(own) else None for own in positions]
            places.append(own_position(here) if here else None)
        for dataset, place in zip(self._parts.datasets, places, strict=True):
            dataset.check_goes_to(place)
        if manifest.arrays.get(OPTIMIZER):
            self._parts.build_optimizer()
        chosen = self._parts.chosen(manifest, step)
        assign_saved(tier, step, chosen)
        load_beside(
            self._parts.models,
            manifest,
            lambda wanted: tier.load(step, wanted),
            [variable for _, variable in chosen],
            f"checkpoint {step} of {tier.directory!r}",
        )
        _keras.set_global_seed(manifest.training.get("global_seed"))
        for dataset, place in zip(self._parts.datasets, places, strict=True):
            dataset.begin_at(place)
        run = manifest.training.get("run")
        self._tiers.run = run if isinstance(run, str) else ""
        return {"step": step, **numbers}

    def close(self) -> None:
        """Waits for the last checkpoint, and lets others write into the directory.

        A SIGTERM that `preempted` has reported ends the process here.

        Raises:
            CheckpointError: If it could not be written.
        """
        try:
            self._tiers.close()
        finally:
            if self._preemption is not None:
                self._preemption.stop()

    def __enter__(self) -> "LoopCheckpoint":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class _Parts:
    """The objects of a loop, with a model's interface for snapshots."""

    def __init__(self, objects: tuple):
        self.models = [item for item in objects if isinstance(item, keras.Layer)]
        self.optimizers = [item for item in objects if isinstance(item, keras.optimizers.Optimizer)]
        self.datasets = [item for item in objects if hasattr(item, "keep_position")]
        others = (keras.Variable, keras.metrics.Metric, keras.random.SeedGenerator)
        self.others = [item for item in objects if isinstance(item, others)]
        known = [*self.models, *self.optimizers, *self.datasets, *self.others]
        wrong = [item for item in objects if not any(item is one for one in known)]
        if wrong or not objects:
            raise ValueError(
                message(
                    "LoopCheckpoint takes models, optimizers, metrics, variables, seed generators "
                    "and what strategy.distribute_dataset returned.",
                    received={"objects": wrong[0] if wrong else ()},
                    fix=_WHERE,
                )
            )
        for dataset in self.datasets:
            dataset.keep_position()
        # For the manifest, like those of a model.
        self.name = self.models[0].name if self.models else "loop"
        self.optimizer = self.optimizers[0] if self.optimizers else None

    @property
    def weights(self) -> list:
        return [v for pairs in self.state().values() for _, v in pairs]

    def positions(self) -> list:
        return [dataset.position().to_dict() for dataset in self.datasets]

    def state(self) -> dict[str, list[tuple[Entry, Any]]]:
        """The variables by kind, with their entries. See `names.named_state`."""
        of_models = _once(v for m in self.models for v in m.variables)
        nth = {id(v): n for v, (_, n) in zip(of_models, numbered(v.path for v in of_models))}
        of_optimizers = _once(v for one in self.optimizers for v in one.variables)
        slots = {
            id(slot): (name, weight)
            for one in self.optimizers
            for name, slot, weight in _keras.optimizer_slots(SimpleNamespace(optimizer=one))
        }
        own_slots = [v for v in of_optimizers if id(v) in slots]
        rest = [v for v in of_optimizers if id(v) not in slots]
        others = _once(v for item in self.others for v in _variables_of(item))
        return {
            WEIGHTS: [(replace(entry_of(v), nth=nth[id(v)]), v) for v in of_models],
            SLOTS: [(_of_slot(v, *slots[id(v)], nth), v) for v in own_slots],
            OPTIMIZER: _numbered(rest),
            METRICS: _numbered(others),
        }

    def chosen(self, manifest: Manifest, step: int) -> list:
        """The saved arrays, and the variables they are for; all of them, or an error."""
        state = self.state()
        matching = {
            kind: match([entry for entry, _ in state[kind]], manifest.entries(kind))
            for kind in (WEIGHTS, OPTIMIZER, METRICS)
        }
        saved = manifest.entries(WEIGHTS)
        names = [(entry.path, entry.nth) for entry, _ in state[WEIGHTS]]
        sources = {
            names[i]: (saved[j].path, saved[j].nth) for i, j in matching[WEIGHTS].pairs.items()
        }
        slots = follow([entry for entry, _ in state[SLOTS]], manifest.entries(SLOTS), sources)
        whole = len(slots) == len(state[SLOTS]) == len(manifest.entries(SLOTS))
        if not whole or not all(found.complete for found in matching.values()):
            raise ValueError(_misfit(step, matching, state, manifest))
        pairs = {kind: found.pairs for kind, found in matching.items()} | {SLOTS: slots}
        return [
            (manifest.arrays[kind][j], state[kind][i][1])
            for kind, those in pairs.items()
            for i, j in those.items()
        ]

    def build_optimizer(self) -> None:
        """Creates the slots of an optimizer that has not trained yet."""
        unbuilt = [optimizer for optimizer in self.optimizers if not optimizer.built]
        if not unbuilt:
            return
        if len(self.optimizers) > 1 or len(self.models) != 1:
            raise ValueError(
                message(
                    "An optimizer must know its weights before it is loaded.",
                    received=f"{len(unbuilt)} optimizers that are not built, and "
                    f"{len(self.models)} models.",
                    fix="Call optimizer.build(model.trainable_variables) in strategy.scope().",
                )
            )
        member = membership.of_model(self.models[0])
        with contextlib.nullcontext() if member is None else member.strategy.scope():
            unbuilt[0].build(self.models[0].trainable_variables)


def _once(variables: Any) -> list:
    return list({id(v): v for v in variables}.values())


def _variables_of(item: Any) -> list:
    if isinstance(item, keras.Variable):
        return [item]
    return [item.state] if isinstance(item, keras.random.SeedGenerator) else item.variables


def _numbered(variables: list) -> list[tuple[Entry, Any]]:
    numbers = [n for _, n in numbered(v.path for v in variables)]
    return [(replace(entry_of(v), nth=n), v) for v, n in zip(variables, numbers)]


def _of_slot(slot: Any, name: str, weight: Any, nth: Mapping[int, int]) -> Entry:
    return replace(entry_of(slot), path=weight.path, slot=name, nth=nth.get(id(weight), 0))


def _noted(manifest: Manifest, step: int, directory: str) -> tuple[dict[str, Any], list[list]]:
    """The numbers and positions of `save`, checked: anybody may have written the file."""
    training = manifest.training
    numbers, positions = training.get("loop"), training.get("loop_positions")
    plain = isinstance(numbers, dict) and all(isinstance(v, _Plain) for v in numbers.values())
    placed = isinstance(positions, list) and all(
        isinstance(own, list) and all(position is None or is_position(position) for position in own)
        for own in positions
    )
    if isinstance(numbers, dict) and isinstance(positions, list) and plain and placed:
        return numbers, positions
    raise CheckpointError(
        message(
            f"Checkpoint {step} of {directory!r} has no position of a loop.",
            received=f"a manifest with {sorted(training)}.",
            fix="Load the weights alone: ktd.restore(model, directory).",
        )
    )


def _misfit(step: int, matching: Mapping, state: Mapping, manifest: Manifest) -> str:
    parts = [
        text
        for found in matching.values()
        for text in (*unmatched_text(found.missing, found.unexpected), *found.reshaped)
    ]
    slots = len(state[SLOTS]), len(manifest.entries(SLOTS))
    parts = parts or [f"{slots[0]} slots of optimizers here, {slots[1]} there"]
    return message(
        f"Checkpoint {step} can only be loaded into the objects it was saved from.",
        received=f"{'; '.join(parts)}.",
        fix="Give LoopCheckpoint the same objects as the program that saved it; for a model alone "
        "use ktd.restore.",
    )
