"""Saves and resumes custom loops: models, optimizers, metrics, the position in the input."""

import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.base import check_base
from keras_tpu_dist.checkpoint.beside import load_beside
from keras_tpu_dist.checkpoint.compiled import COMPILED, compiled_of, follow_compiled, has_trained
from keras_tpu_dist.checkpoint.keeping import Keep
from keras_tpu_dist.checkpoint.manifest import Manifest, checkpoint_error
from keras_tpu_dist.checkpoint.matching import apart
from keras_tpu_dist.checkpoint.names import (
    METRICS,
    OPTIMIZER,
    SLOTS,
    WEIGHTS,
    Entry,
    Matching,
    automatic_names,
    entries_of_optimizers,
    entry_of,
    match,
    names_of_models,
    numbered,
)
from keras_tpu_dist.checkpoint.optimizers import fitting, kinds_of_optimizers
from keras_tpu_dist.checkpoint.restored import assign_saved
from keras_tpu_dist.checkpoint.slots import build_optimizer
from keras_tpu_dist.checkpoint.snapshot import snapshot
from keras_tpu_dist.checkpoint.store import Store, finish, new_run
from keras_tpu_dist.checkpoint.trained import TRAINED, Base, checked_base
from keras_tpu_dist.common.checks import (
    PositiveInt,
    checked_arguments,
    checked_path,
    one_of,
    require,
    whole,
)
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.forms import DictOf, ListOf, fits
from keras_tpu_dist.input.position import POSITION, own_position
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.preemption import Preemption
from keras_tpu_dist.training.compilation_cache import cache_beside

logger = logging.getLogger("keras_tpu_dist")

_FIX = "Use the same LoopCheckpoint in all processes."
_WHERE = 'Write for example ktd.LoopCheckpoint("run7", model, optimizer, dataset).'
_Plain = (bool, int, float, str)
# Those of this process that are not closed, by directory.
_open: weakref.WeakValueDictionary[str, "LoopCheckpoint"] = weakref.WeakValueDictionary()


def _while_open(method: Callable) -> Callable:
    """A method that uses the directory: one at a time, and not after `close`."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        with self._turn:
            if self._is_closed:
                raise checkpoint_error(
                    "A LoopCheckpoint that was closed saves and restores nothing.",
                    received=f"{method.__name__} for {self._store.directory!r}, {self._is_closed}.",
                    fix="Make a new LoopCheckpoint, and use that one alone.",
                )
            return method(self, *args, **kwargs)

    return guarded


class LoopCheckpoint:
    """Saves and resumes a custom loop over `strategy.run`, in the files of `Checkpoint`.

    Pass everything that changes: models, optimizers, metrics, `keras.Variable`s, seed generators,
    and the dataset that you iterate over. `restore` restores all of it, on any mesh. The next
    iteration over the dataset then continues with the next batch, under the same conditions as for
    the inputs of `fit`. `keras_tpu_dist.restore(model, directory)` loads the model alone. If your
    machine may be preempted, check `preempted` after every step.

    A directory holds the checkpoints of one run. If it has some, call `restore`: then the run goes
    on. If you save without it, another run begins. Once that run has a checkpoint, those of the old
    one are moved to the subdirectory `set_aside`, with a warning, and nothing deletes them.

    Args:
        directory: The directory for the checkpoints; one loop per directory, the same for all
            processes. A `LoopCheckpoint` of this process that was not closed, and not used in a
            `with` block, is closed first.
        *objects: The objects that change. Give the same ones in the same order to `restore`: models
            are matched by their order, and their variables by their names.
        keep: How many of the newest checkpoints to keep; `None` for all.
        asynchronous: Whether the loop continues while a checkpoint is written. If so, use it in a
            `with` block, whose end waits for the last one.
        only: `"trained"` leaves out the weights of models that are frozen, and saves a fingerprint
            of each: see `keras_tpu_dist.callbacks.Checkpoint`. They must have the values by now
            with which the run begins.
        base: With `only="trained"`, where the left-out weights come from. `restore` loads it into
            models that have other values.

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

    @checked_arguments
    def __init__(
        self,
        directory: str | os.PathLike,
        *objects: Any,
        keep: PositiveInt | None = 3,
        asynchronous: bool = False,
        only: Annotated[str, one_of(TRAINED)] | None = None,
        base: str | os.PathLike | None = None,
    ):
        path = checked_path("LoopCheckpoint", _WHERE, directory=directory)
        self._parts = _Parts(objects)
        source = checked_base("LoopCheckpoint", _WHERE, only, base)
        self._base = None if only is None else Base(source)
        if self._base is not None:
            self._base.begin(self._parts.models)
        self._turn, self._is_closed, self._is_entered = threading.RLock(), "", False
        place = path if "://" in path else os.path.realpath(path)
        before = _open.get(place)
        if before is not None and not before._is_entered:
            before._give_way()
        self._store = Store(path, keep=Keep(keep), asynchronous=asynchronous)
        cache_beside(path)
        self._run = ""  # its name, once it has one
        # If it is deleted without `close`, the last checkpoint is still written, and the next one
        # of this process can use the directory.
        self._end = weakref.finalize(self, _end, self._store)
        self._end.atexit = False
        self._preemption: Preemption | None = None
        _open[place] = self

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
            # If this object is deleted without `close`, the signal must not wait for ever.
            weakref.finalize(self, _stop, self._preemption).atexit = False
        return self._preemption.comes()

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, the newest last."""
        return self._store.steps

    @_while_open
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
        require("LoopCheckpoint.save", whole(0), step=step)
        # What NumPy and JAX compute is a number too.
        numbers = {
            name: np.asarray(value).item() if getattr(value, "shape", None) == () else value
            for name, value in numbers.items()
        }
        wrong = {name: value for name, value in numbers.items() if not isinstance(value, _Plain)}
        if wrong:
            raise value_error(
                "Only numbers and texts can be saved besides the objects.",
                received=wrong,
                fix="For arrays, pass a keras.Variable to LoopCheckpoint.",
            )
        self._run = self._run or new_run(_FIX)
        positions = self._parts.positions()
        positions_of_all = agree(f"LoopCheckpoint.save of step {step}", _FIX, positions)
        training = {
            "step": int(step),
            "loop": dict(numbers),
            "loop_positions": positions_of_all,
            "loop_compiled": [compiled.to_dict() for compiled in self._parts.compiled],
            "global_seed": _keras.global_seed(),
            "run": self._run,
            "objects": self._parts.counts(),
        }
        saved = snapshot(self._parts, training, {}, _Parts.state, self._parts.objects, self._base)
        self._store.save(int(step), *saved)

    @_while_open
    def restore(self, step: int | None = None) -> dict[str, Any]:
        """Loads the newest complete checkpoint, if there is one, or that of a step.

        The newest one is the one that was written last. With `step`, the run returns to that
        checkpoint. Newer ones are moved to the subdirectory `set_aside`, with a warning, and
        nothing deletes them.

        Args:
            step: The step to return to; `None` for the newest checkpoint.

        Returns:
            A dict with the "step" and the numbers passed to `save`, empty if there is no
            checkpoint.

        Raises:
            ValueError: If it was saved with other objects, or `step` is not a whole number.
            CheckpointError: If there are checkpoints and none can be read, or none of `step`.
        """
        require("LoopCheckpoint.restore", whole(0), True, step=step)
        finish(self._store.wait)
        noted = self._store.load_newest(self._load, step)
        if noted is None and self._base is not None:
            self._base.begin(self._parts.models)
        if step is not None:
            self._store.set_later_aside(step)
        return noted or {}

    def _load(self, step: int) -> dict[str, Any]:
        store, base = self._store, self._base or Base()
        where = f"checkpoint {step} of {store.directory!r}"
        manifest = store.agreed_manifest(step)
        numbers, positions = _noted(manifest, step, store.directory)
        places = []
        for i, _ in enumerate(self._parts.datasets):
            here = [of_process[i] if i < len(of_process) else None for of_process in positions]
            places.append(own_position(here) if here else None)
        for dataset, place in zip(self._parts.datasets, places, strict=True):
            dataset.check_goes_to(place)
        if manifest.arrays.get(OPTIMIZER):
            self._parts.build_optimizer()
        chosen, among = self._parts.chosen(manifest, step)
        saved, left_out = apart(chosen)
        check_base(self._parts.models, left_out, manifest, where, base.source)
        base.resume(left_out)
        before = [has_trained(optimizer) for optimizer in self._parts.optimizers]
        assign_saved(store, step, saved, any(before))
        self._parts.follow_compiled(before, manifest.training.get("loop_compiled"))
        load_beside(
            self._parts.models,
            manifest,
            lambda wanted: store.load(step, wanted),
            [variable for _, variable in chosen],
            where,
            among=among,
        )
        _keras.set_global_seed(manifest.training.get("global_seed"))
        for dataset, place in zip(self._parts.datasets, places, strict=True):
            dataset.begin_at(place)
        self._run = manifest.run
        return {"step": step, **numbers}

    def close(self) -> None:
        """Waits for the last checkpoint, and lets others write into the directory.

        A SIGTERM that `preempted` has reported ends the process here.

        Raises:
            CheckpointError: If it could not be written.
        """
        with self._turn:
            self._close("which was closed before")

    def _close(self, why: str) -> None:
        self._is_closed = self._is_closed or why
        self._end.detach()
        try:
            self._store.close()
        finally:
            if self._preemption is not None:
                self._preemption.stop()

    def _give_way(self) -> None:
        """Closes it for another one of this process, such as that of a cell that is run again."""
        with self._turn:  # what another thread is saving ends first
            if not self._is_closed:
                logger.warning(
                    "a LoopCheckpoint of %s was not closed, and is closed now for a new one: use "
                    "it in a `with` block",
                    self._store.directory,
                )
                finish(lambda: self._close("for which another LoopCheckpoint was made"))

    def __enter__(self) -> "LoopCheckpoint":
        self._is_entered = True
        return self

    def __exit__(self, *exception: Any) -> None:
        self._is_entered = False
        self.close()


def _end(store: Store) -> None:
    # The collector may run in any thread; the one that writes cannot wait for itself.
    if not store.is_written_here:
        finish(store.close)


def _stop(preemption: Preemption) -> None:
    # The collector may run in any thread; only the main one may set handlers.
    if threading.current_thread() is threading.main_thread():
        preemption.stop()


class _Parts:
    """The objects of a loop, with a model's interface for snapshots."""

    def __init__(self, objects: tuple):
        self.models = [item for item in objects if isinstance(item, keras.Layer)]
        self.optimizers = [item for item in objects if isinstance(item, keras.optimizers.Optimizer)]
        self.datasets = [item for item in objects if hasattr(item, "keep_position")]
        others = (keras.Variable, keras.metrics.Metric, keras.random.SeedGenerator)
        self.others = [item for item in objects if isinstance(item, others)]
        accepted = [*self.models, *self.optimizers, *self.datasets, *self.others]
        wrong = [item for item in objects if not any(item is other for other in accepted)]
        if wrong or not objects:
            raise value_error(
                "LoopCheckpoint takes models, optimizers, metrics, variables, seed generators "
                "and what strategy.distribute_dataset returned.",
                received={"objects": wrong[0] if wrong else ()},
                fix=_WHERE,
            )
        for dataset in self.datasets:
            dataset.keep_position()
        self.objects = objects
        # How the run was compiled: what the loop changes in it is state.
        self.compiled = [compiled_of(optimizer) for optimizer in self.optimizers]
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
        by_object = self._by_object()
        return {kind: list(itertools.chain(*parts)) for kind, parts in by_object.items()}

    def counts(self) -> dict[str, list[list]]:
        """The names of the objects and the numbers of their arrays, by kind, for the manifest."""
        kinds = (self.models, self.optimizers, self.optimizers, self.others)
        return {
            kind: [[str(item.name), len(pairs)] for item, pairs in zip(items, parts, strict=True)]
            for (kind, parts), items in zip(self._by_object().items(), kinds, strict=True)
        }

    def _by_object(self) -> dict[str, list[list[tuple[Entry, Any]]]]:
        """The variables by kind and object; one that several objects share is of the first."""
        of_models = _once(m.variables for m in self.models)
        every = [v for variables in of_models for v in variables]
        nth = {id(v): n for v, (_, n) in zip(every, numbered(v.path for v in every), strict=True)}
        of_optimizers = _once(optimizer.variables for optimizer in self.optimizers)
        owners, slots, rest = entries_of_optimizers(self.optimizers, nth)
        return {
            WEIGHTS: [
                [
                    (replace(entry_of(v), nth=nth[id(v)], optimizer=owners.get(id(v), "")), v)
                    for v in variables
                ]
                for variables in of_models
            ],
            SLOTS: [
                [(slots[id(v)], v) for v in variables if id(v) in slots]
                for variables in of_optimizers
            ],
            OPTIMIZER: [
                [(rest.get(id(v), entry_of(v)), v) for v in variables if id(v) not in slots]
                for variables in of_optimizers
            ],
            METRICS: _numbered(_once(_variables_of(item) for item in self.others)),
        }

    def chosen(self, manifest: Manifest, step: int) -> tuple[list, list[int]]:
        """The saved arrays and the variables they are for, and the models' numbers there."""
        state, automatic = self.state(), automatic_names(self.objects)
        matching = {kind: self._matched(kind, manifest, automatic) for kind in (WEIGHTS, METRICS)}
        saved = manifest.entries(WEIGHTS)
        sources = [(state[WEIGHTS][i][0], saved[j]) for i, j in matching[WEIGHTS].pairs.items()]
        here = {kind: [entry for entry, _ in state[kind]] for kind in (SLOTS, OPTIMIZER)}
        kinds = kinds_of_optimizers(self.objects)
        fits = fitting(here, manifest, kinds, sources, automatic, manifest.automatic)
        matching[OPTIMIZER] = fits.rest
        whole = len(fits.slots) == len(state[SLOTS]) == len(manifest.entries(SLOTS))
        if not whole or not all(of_kind.complete for of_kind in matching.values()):
            raise ValueError(_misfit(step, matching, state, manifest))
        pairs = {kind: of_kind.pairs for kind, of_kind in matching.items()} | {SLOTS: fits.slots}
        chosen = [
            (manifest.arrays[kind][j], state[kind][i][1])
            for kind, those in pairs.items()
            for i, j in those.items()
        ]
        return chosen, self._numbers(matching[WEIGHTS].pairs, manifest)

    def _numbers(self, pairs: Mapping[int, int], manifest: Manifest) -> list[int]:
        """For each model, its number among the saved ones; none if that is unknown."""
        counts = [count for _, count in manifest.objects(WEIGHTS)]
        owners = [number for number, count in enumerate(counts) for _ in range(count)]
        parts = self._side_by_side(WEIGHTS, manifest)
        if len(counts) != len(self.models):
            return []
        return [owners[pairs[i]] if entries else n for n, (i, _, entries, _) in enumerate(parts)]

    def _matched(self, kind: str, manifest: Manifest, automatic: frozenset[str]) -> Matching:
        """Matches the objects in their order, and what is in each of them by name."""
        # Of several models, the names that you gave tell which is which.
        models = names_of_models(self.models) if len(self.models) == 1 else ()
        parts = [
            match(
                entries,
                there,
                automatic=automatic,
                automatic_there=manifest.automatic,
                models=models,
            ).moved(*starts)
            for *starts, entries, there in self._side_by_side(kind, manifest)
        ]
        in_order = Matching.joined(parts)
        if in_order.complete or len(parts) < 2:
            return in_order
        # In another order, only the user's own names tell.
        by_name = match(
            [entry for entry, _ in self.state()[kind]], manifest.entries(kind), automatic=()
        )
        paths = {entry.path for entry in manifest.entries(kind)}
        given = not any(automatic.intersection(path.split("/")) for path in paths)
        # Equal paths would be told apart by their order alone.
        is_clear = given and len(paths) == len(manifest.entries(kind))
        return by_name if by_name.complete and is_clear else in_order

    def _side_by_side(
        self, kind: str, manifest: Manifest
    ) -> list[tuple[int, int, list[Entry], list[Entry]]]:
        """For each object, where its entries begin, here and in the checkpoint, and the entries.

        Everything is one object if another number of objects was saved.
        """
        here = [[entry for entry, _ in pairs] for pairs in self._by_object()[kind]]
        there = manifest.entries(kind)
        counts = [count for _, count in manifest.objects(kind)]
        if len(counts) != len(here):
            here, counts = [[entry for entries in here for entry in entries]], [len(there)]
        starts = [0, *itertools.accumulate(map(len, here))][:-1]
        starts_there = [0, *itertools.accumulate(counts)][:-1]
        return [
            (start, start_there, entries, there[start_there : start_there + count])
            for start, start_there, entries, count in zip(
                starts, starts_there, here, counts, strict=True
            )
        ]

    def follow_compiled(self, trained: list[bool], saved: Any) -> None:
        """Lets optimizers be as they were compiled; see the function of that name."""
        is_saved = fits(saved, [COMPILED] * len(trained))
        runs: list[Any] = saved if is_saved else [None] * len(trained)
        for i, optimizer in enumerate(self.optimizers):
            follow_compiled(optimizer, self.compiled[i], trained[i], runs[i])
            if trained[i] and is_saved:
                self.compiled[i] = replace(self.compiled[i], rate=runs[i]["rate"])

    def build_optimizer(self) -> None:
        """Creates the slots of an optimizer that has not trained yet."""
        unbuilt = [optimizer for optimizer in self.optimizers if not optimizer.built]
        if not unbuilt:
            return
        if len(self.optimizers) > 1 or len(self.models) != 1:
            raise value_error(
                "An optimizer must know its weights before it is loaded.",
                received=f"{len(unbuilt)} optimizers that are not built, and "
                f"{len(self.models)} models.",
                fix="Call optimizer.build(model.trainable_variables) in strategy.scope().",
            )
        build_optimizer(self.models[0], unbuilt[0])


def _once(of_each: Iterable[list]) -> list[list]:
    """The variables of each object, without those that an object before has, too."""
    seen: set[int] = set()
    firsts = []
    for variables in of_each:
        firsts.append([v for v in {id(v): v for v in variables}.values() if id(v) not in seen])
        seen.update(map(id, variables))
    return firsts


def _variables_of(item: Any) -> list:
    if isinstance(item, keras.Variable):
        return [item]
    return [item.state] if isinstance(item, keras.random.SeedGenerator) else item.variables


def _numbered(of_each: list[list]) -> list[list[tuple[Entry, Any]]]:
    numbers = iter([n for _, n in numbered(v.path for variables in of_each for v in variables)])
    return [
        [(replace(entry_of(v), nth=next(numbers)), v) for v in variables] for variables in of_each
    ]


def _noted(manifest: Manifest, step: int, directory: str) -> tuple[dict[str, Any], list[list]]:
    """The numbers and positions of `save`, checked: anybody may have written the file."""
    training = manifest.training
    numbers, positions = training.get("loop"), training.get("loop_positions")
    if fits(numbers, DictOf(_Plain)) and fits(positions, ListOf(ListOf((None, POSITION)))):
        return numbers, positions  # type: ignore[return-value]
    raise checkpoint_error(
        f"Checkpoint {step} of {directory!r} has no position of a loop.",
        received=f"a manifest with {sorted(training)}.",
        fix="Load the weights alone: ktd.restore(model, directory).",
    )


def _misfit(step: int, matching: Mapping, state: Mapping, manifest: Manifest) -> str:
    parts = [text for of_kind in matching.values() for text in of_kind.misfits]
    slots = len(state[SLOTS]), len(manifest.entries(SLOTS))
    parts = parts or [f"{slots[0]} slots of optimizers here, {slots[1]} there"]
    return message(
        f"Checkpoint {step} can only be loaded into the objects it was saved from.",
        received=f"{'; '.join(parts)}.",
        fix="Give LoopCheckpoint the same objects, in the same order, as the program that saved "
        "it; for a model alone use ktd.restore.",
    )
