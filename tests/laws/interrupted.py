"""A run that is cut, and goes on with other objects, ends as one that was not.

Plain Keras trains four epochs on one device. Under a strategy the same fit is stopped within or
after an epoch, and goes on from `Checkpoint`: in a new model with new callbacks, on another mesh,
maybe with the callbacks in another order. Weights, optimizer, history, and what callbacks know or
wrote must be the same.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from precision import in_float64

import keras_tpu_dist as ktd

from . import cases, classes
from .catalogue import BATCH, EVEN_BATCH, EVEN_ROWS, ROWS, public, subjects

K = keras.callbacks
EPOCHS = 4
MESHES = ("8", "4x2")


@dataclass(frozen=True)
class Row:
    """Callbacks of one kind, and what they know or wrote.

    Attributes:
        make: Builds them, given a folder.
        look: What is compared of them.
        turns: Whether they may stand in another order: none reads what another one writes.
        of_strategies: Whether they need a strategy: plain Keras trains without them.
    """

    make: Callable[[Path], list[Any]]
    look: Callable[[list[Any], Path], dict[str, Any]] = lambda callbacks, folder: {}
    turns: bool = True
    of_strategies: bool = False


def _known(*names: str) -> Callable[[list[Any], Path], dict[str, Any]]:
    """Attributes of those callbacks that have them, by class and what they monitor."""

    def look(callbacks, folder):
        return {
            f"{type(c).__name__} of {getattr(c, 'monitor', '')}: {name}": getattr(c, name)
            for c in callbacks
            for name in names
            if hasattr(c, name)
        }

    return look


_best = _known("best", "wait", "best_epoch", "stopped_epoch", "cooldown_counter")


def _best_file(callbacks, folder):
    model = keras.saving.load_model(folder / "best.keras")
    return {**_best(callbacks, folder), "file": model.get_weights()}


def _logged(callbacks, folder):
    lines = (folder / "log.csv").read_text().split()
    return {"log": [[float(value) for value in line.split(",")] for line in lines[1:]]}


def _files(callbacks, folder):
    names = sorted(path.name.split(".")[0] for path in folder.glob("epoch*"))
    return {"files": [int(number) for name in names for number in name.split("_")[1:]]}


def _worst(y, p):
    return np.abs(y - p).max()


def _metric(kind: Callable[[float], Any]) -> Callable[[Path], list[Any]]:
    """A callback that computes what others monitor, as JAX or NumPy has it."""

    def make(folder):
        return [
            classes.Score(kind),
            K.EarlyStopping("val_score", mode="min", patience=2),
            K.ReduceLROnPlateau("val_score", mode="min", factor=0.5, patience=1),
            K.ModelCheckpoint(folder / "best.keras", "val_score", mode="max", save_best_only=True),
        ]

    return make


def _stopping(monitor: str, **options: Any) -> Any:
    return K.EarlyStopping(monitor, restore_best_weights=True, **options)


CALLBACKS: dict[str, Row] = {
    "BackupAndRestore": Row(lambda f: [K.BackupAndRestore(f / "theirs")]),
    "BackupAndRestore/batches": Row(lambda f: [K.BackupAndRestore(f / "theirs", save_freq=4)]),
    "CSVLogger": Row(lambda f: [K.CSVLogger(f / "log.csv", append=True)], _logged, turns=False),
    "EarlyStopping": Row(lambda f: [_stopping("val_loss", patience=1, min_delta=0.05)], _best),
    "EarlyStopping/start_from_epoch": Row(
        lambda f: [_stopping("loss", patience=2, min_delta=9.0, start_from_epoch=1)], _best
    ),
    "EarlyStopping/two": Row(
        lambda f: [K.EarlyStopping("loss", patience=9), K.EarlyStopping("val_loss", patience=9)],
        _best,
    ),
    "History": Row(lambda f: [K.History()]),
    "LambdaCallback": Row(lambda f: [K.LambdaCallback(on_epoch_end=lambda epoch, logs: None)]),
    "LearningRateScheduler": Row(lambda f: [K.LearningRateScheduler(lambda e, rate: rate * 0.7)]),
    "ModelCheckpoint": Row(
        lambda f: [K.ModelCheckpoint(f / "best.keras", "val_mae", save_best_only=True)], _best_file
    ),
    "ModelCheckpoint/batches": Row(
        lambda f: [
            K.ModelCheckpoint(
                f / "epoch_{epoch}_{batch}.weights.h5", save_freq=2, save_weights_only=True
            )
        ],
        _files,
    ),
    "OrbaxCheckpoint": Row(lambda f: [K.OrbaxCheckpoint(f / "orbax", save_on_background=False)]),
    "ProgbarLogger": Row(lambda f: [K.ProgbarLogger()]),
    "ReduceLROnPlateau": Row(
        lambda f: [K.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=9.0, cooldown=1)],
        _best,
    ),
    "ReduceLROnPlateau/two": Row(
        lambda f: [
            K.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=9.0),
            K.ReduceLROnPlateau("val_mae", patience=99),
        ],
        _best,
    ),
    "SwapEMAWeights": Row(lambda f: [K.SwapEMAWeights()]),
    "SwapEMAWeights/epochs": Row(lambda f: [K.SwapEMAWeights(swap_on_epoch=True)]),
    "TerminateOnNaN": Row(lambda f: [K.TerminateOnNaN()]),
    "values of JAX": Row(_metric(keras.ops.convert_to_tensor), _best_file, turns=False),
    "values of NumPy": Row(_metric(np.asarray), _best_file, turns=False),
    "state of a user": Row(
        lambda f: [classes.Counts(), classes.Remembers()], _known("seen", "memory")
    ),
    "ours/Rates": Row(lambda f: [ktd.callbacks.Rates()], of_strategies=True),
    "ours/HostMetrics": Row(
        lambda f: [
            ktd.callbacks.HostMetrics({"worst": _worst}),
            K.EarlyStopping("val_worst", mode="min"),
        ],
        _best,
        turns=False,
    ),
    "ours/NameNaN": Row(lambda f: [ktd.callbacks.NameNaN()], of_strategies=True),
    "ours/StopAtStep": Row(lambda f: [ktd.callbacks.StopAtStep(12)], of_strategies=True),
    "ours/Checkpoint": Row(
        lambda f: [ktd.callbacks.Checkpoint(f / "second", every_steps=4)], of_strategies=True
    ),
}
# Those that need what not every machine has installed.
CALLBACKS |= {
    name: row
    for module, name, row in (
        ("requests", "RemoteMonitor", Row(lambda f: [K.RemoteMonitor("http://127.0.0.1:9")])),
        (
            "tensorboard",
            "TensorBoard",
            Row(lambda f: [K.TensorBoard(f / "board", write_graph=False)]),
        ),
    )
    if importlib.util.find_spec(module)
}
LEFT_OUT = {
    "Callback": "abstract",
    "CallbackList": "holds the callbacks of a fit",
    "RemoteMonitor": "needs requests",
    "TensorBoard": "needs tensorboard, and TensorFlow to write with",
    "ours/Profile": "writes the trace of a profiler, and knows nothing from step to step",
}


def unlisted() -> list[str]:
    """Callbacks of Keras and ours that have no row and are not left out."""
    ours = vars(ktd.callbacks).values()
    names = [*public(K, K.Callback)]
    names += [
        f"ours/{kind.__name__}"
        for kind in ours
        if inspect.isclass(kind) and issubclass(kind, K.Callback)
    ]
    have = {*CALLBACKS, *(name.partition("/")[0] for name in CALLBACKS)} | LEFT_OUT.keys()
    return sorted(name for name in names if name not in have)


@dataclass(frozen=True)
class Interrupted:
    """What to compare.

    Attributes:
        subject: A name of the catalogue.
        callbacks: Names of `CALLBACKS`, in the order in which they stand.
        cuts: After how many batches of a process each run but the last is stopped.
        every_steps: How often `Checkpoint` saves; 0 for ends of epochs.
        first: Whether `Checkpoint` stands before the others.
        turned: Whether the last run has the callbacks in the other order.
        steps: Steps of a launch.
        elsewhere: Whether all runs but the last are made in another process.
    """

    subject: str = "optimizers/SGD/averaged"
    callbacks: tuple[str, ...] = ()
    cuts: tuple[int, ...] = (4,)
    every_steps: int = 2
    first: bool = False
    turned: bool = False
    steps: int = 1
    elsewhere: bool = False

    def __str__(self):
        saved = f"every {self.every_steps} steps" if self.every_steps else "at ends of epochs"
        words = [self.subject, " + ".join(self.callbacks) or "no callbacks", f"cut at {self.cuts}"]
        words += [f"saved {saved}", *(["Checkpoint first"] if self.first else [])]
        words += [*(["turned"] if self.turned else []), f"{self.steps} steps a launch"]
        words += ["elsewhere"] if self.elsewhere else []
        return "interrupted " + " | ".join(words)

    @staticmethod
    def of(job: dict[str, Any]) -> "Interrupted":
        """A case from plain values."""
        names = inspect.signature(Interrupted).parameters
        found = {name: job[name] for name in names}
        return Interrupted(**found | {n: tuple(job[n]) for n in ("callbacks", "cuts")})

    def to_dict(self) -> dict[str, Any]:
        """The case as plain values."""
        return {**asdict(self), "name": str(self), "law": "interrupted"}


def compared(case: Interrupted) -> dict[str, Any]:
    """Whether the run that was cut ended as the whole one, and the difference."""
    return cases.judged(lambda policy: _difference(case, policy), subjects()[case.subject].policy)


def _difference(case: Interrupted, policy: str) -> tuple[float, str]:
    expected = dict(_whole(case.subject, case.callbacks, case.steps, policy))
    if case.turned:
        # Each that may reduce the rate writes into the logs what it is when its turn comes.
        expected.pop("history: learning_rate", None)
    with cases.fresh(policy) as folder:
        found = None
        for number, cut in enumerate(case.cuts):
            if case.elsewhere:
                _in_another_process(case, folder, number, policy)
            else:
                found = _fit(case, folder, number, cut)
            if found is not None:  # a callback ended it before the cut
                return cases.gap(found, expected)
        return cases.gap(_fit(case, folder, len(case.cuts), None), expected)


def _in_another_process(case: Interrupted, folder: Path, number: int, policy: str) -> None:
    part = {"case": case.to_dict(), "folder": str(folder), "number": number, "policy": policy}
    script = Path(__file__).with_name("worker.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(part)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-1500:]


def run_part(part: dict[str, Any]) -> None:
    """Makes one run that is cut, as another process is asked to."""
    case = Interrupted.of(part["case"])
    double = in_float64() if part["policy"] == "float64" else contextlib.nullcontext()
    with double, cases.fresh(part["policy"]):
        found = _fit(case, Path(part["folder"]), part["number"], case.cuts[part["number"]])
    assert found is None, "the run ended before it was cut"


@functools.lru_cache(maxsize=4)
def _whole(
    subject: str, callbacks: tuple[str, ...], steps: int, policy: str
) -> dict[str, np.ndarray]:
    with cases.fresh(policy) as folder:
        found = _fit(Interrupted(subject, callbacks, steps=steps), folder, None, None)
    assert found is not None
    return found


class Cut(K.Callback):
    """Stops a run after so many batches."""

    def __init__(self, after: int):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def _fit(case: Interrupted, folder: Path, number: int | None, cut: int | None) -> Any:
    """The results of a fit, of plain Keras if it has no number; None if it was cut."""
    subject = subjects()[case.subject]
    strategy = None if number is None else cases.STRATEGIES[MESHES[number % 2]]()
    with cases.scope_of(strategy):
        keras.utils.set_random_seed(1 if not number else 5 + number)
        model = ((number is None and subject.reference) or subject.model)()
        if subject.converts and number is not None:
            model = ktd.convert(model)
        # Targets of a loss may have another shape than what is predicted.
        metrics = {} if subject.kind == "losses" else {"metrics": ["mae"]}
        options = {**metrics, **subject.options()}
        model.compile(**options, steps_per_execution=case.steps)
    batch = EVEN_BATCH if subject.even else BATCH
    x, y = subject.data(EVEN_ROWS if subject.even else ROWS)
    rows = [CALLBACKS[name] for name in case.callbacks]
    groups = [[] if number is None and row.of_strategies else row.make(folder) for row in rows]
    made = [callback for group in groups for callback in group]
    standing = made
    if case.turned and number is not None and cut is None:
        standing = made[::-1]
    if number is not None:
        when = {"every_steps": case.every_steps} if case.every_steps else {}
        saved = ktd.callbacks.Checkpoint(folder / "checkpoints", **when)
        standing = [saved, *standing] if case.first else [*standing, saved]
    standing = [*standing, *([Cut(cut)] if cut else [])]
    part = keras.tree.map_structure(lambda a: a[:batch], (x, y))
    try:
        history = model.fit(
            x,
            y,
            batch_size=batch,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            validation_data=part,
            validation_batch_size=batch,
            callbacks=standing,
        ).history
    except KeyboardInterrupt:
        return None
    found = {f"history: {name}": np.asarray(values, float) for name, values in history.items()}
    for row, group in zip(rows, groups, strict=True):
        for name, value in row.look(group, folder).items():
            for place, leaf in enumerate(keras.tree.flatten(value)):
                found[f"{name} {place}"] = np.asarray(leaf, float)
    return {**cases.state_of(model), **found}
