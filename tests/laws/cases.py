"""One case: a subject, what is done to it, how it trains, and whether that changed nothing.

The reference is plain Keras on one device, which trains an epoch and then another. A law does an
act before the first or between the two, trains in some way, on some mesh, and must end with the
same weights, optimizer, metrics, history and predictions: to 1e-5 in float32, or 1e-6 in float64,
where a difference is not rounding. If plain Keras itself breaks a law by the same acts, those that
it has, ours must give what it gives.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import comparing
import jax
import keras
import numpy as np
from precision import in_float64

import keras_tpu_dist as ktd

from .acts import ACTS
from .catalogue import BATCH, EVEN_BATCH, EVEN_ROWS, ROWS, Subject, subjects

STRATEGIES: dict[str, Callable[[], Any]] = {
    "8": lambda: ktd.TPUStrategy({"data": 8}),
    "4x2": lambda: ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel"),
    "2x2x2": lambda: ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2}, "auto"),
    "fsdp": lambda: ktd.TPUStrategy({"data": 4, "fsdp": 2}, "fsdp"),
    "remat": lambda: ktd.TPUStrategy(remat="full", shard_optimizer=True),
    "one": lambda: ktd.TPUStrategy({"data": 1}, devices=jax.devices()[:1]),
}
TRAINERS = ("fit", "launches", "train_on_batch", "eager", "replica_code")
FROZEN = ("", "first", "middle", "last")
_EVEN_TRAINERS = ("replica_code",)


@dataclass(frozen=True)
class Case:
    """What to compare.

    Attributes:
        subject: A name of the catalogue.
        acts: What is done before the first epoch, and before the second.
        trainers: How each epoch is trained.
        strategies: The one at first, and the other one.
        frozen: Which layer with weights does not train.
    """

    subject: str
    acts: tuple[str, str] = ("nothing", "nothing")
    trainers: tuple[str, str] = ("fit", "fit")
    strategies: tuple[str, str] = ("8", "4x2")
    frozen: str = ""

    def __str__(self):
        words = [self.subject, " then ".join(self.acts), " then ".join(self.trainers)]
        words += [" to ".join(self.strategies), *([f"{self.frozen} frozen"] if self.frozen else [])]
        return " | ".join(words)

    @staticmethod
    def of(job: dict[str, Any]) -> "Case":
        """A case from plain values."""
        pairs = {name: tuple(job[name]) for name in ("acts", "trainers", "strategies")}
        return Case(job["subject"], frozen=job["frozen"], **pairs)

    def to_dict(self) -> dict[str, Any]:
        """The case as plain values."""
        return {**asdict(self), "name": str(self)}

    @property
    def even(self) -> bool:
        """Whether all batches have the same number of rows."""
        return subjects()[self.subject].even or any(t in _EVEN_TRAINERS for t in self.trainers)


def compared(case: Case) -> dict[str, Any]:
    """Whether a case changed nothing, and the difference."""
    policy = subjects()[case.subject].policy
    found = judged(lambda policy: _difference(case, policy), policy)
    theirs = replace(case, acts=tuple(ACTS[name].in_keras for name in case.acts))
    if found["right"] or theirs.acts == ("nothing", "nothing"):
        return found
    stock = judged(lambda policy: _difference_to_stock_acts(case, theirs, policy), policy)
    words = f"{found['where']}; from plain Keras that does the same {stock['difference']:.1e}"
    return {**found, "right": stock["right"], "where": f"{words} at {stock['where']}"}


def judged(difference: Callable[[str], tuple[float, str]], policy: str) -> dict[str, Any]:
    """Whether a difference is no more than rounding: what is left of it in float64 decides."""
    off, where = difference(policy)
    right = off <= comparing.TOLERANCES.get(policy, comparing.TOLERANCES["mixed_bfloat16"])
    if not right and policy == "float32":
        with in_float64():
            precise, there = difference("float64")
        right = precise <= comparing.TOLERANCES["float64"]
        where = f"{where} ({precise:.1e} at {there} in float64)"
    return {"right": right, "difference": off, "where": where}


def _difference(case: Case, policy: str) -> tuple[float, str]:
    expected = _reference(Case(case.subject, frozen=case.frozen), policy, case.even)
    return gap(_result(case, policy), expected)


def _difference_to_stock_acts(case: Case, theirs: Case, policy: str) -> tuple[float, str]:
    with fresh(policy) as folder:
        expected = Run(theirs, folder, stock=True).results()
    return gap(_result(case, policy), expected)


@functools.lru_cache(maxsize=16)
def _reference(case: Case, policy: str, even: bool) -> dict[str, np.ndarray]:
    with fresh(policy) as folder:
        return Run(case, folder, stock=True, even=even).results()


def _result(case: Case, policy: str) -> dict[str, np.ndarray]:
    with fresh(policy) as folder:
        return Run(case, folder).results()


@contextlib.contextmanager
def fresh(policy: str) -> Iterator[Path]:
    """A folder, no strategy, and a dtype policy."""
    keras.distribution.set_distribution(None)
    keras.config.set_dtype_policy(policy)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.distribution.set_distribution(None)


# A trainer on batches has no history, a reference leaves out seeds that draw nothing.
_NOT_IN_BOTH = ("history", "seed")


def gap(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest difference of what both have."""
    lacking = {n for n in found.keys() ^ expected.keys() if not n.startswith(_NOT_IN_BOTH)}
    assert not lacking, f"only one side has {sorted(lacking)}"
    both = found.keys() & expected.keys()
    dtypes = [n for n in both if found[n].dtype != expected[n].dtype]
    assert not dtypes, f"{dtypes[0]} is {found[dtypes[0]].dtype}, not {expected[dtypes[0]].dtype}"
    gaps = {name: comparing.gap(found[name], expected[name]) for name in sorted(both)}
    worst = max(gaps, key=gaps.__getitem__)
    return gaps[worst], worst


class Failing(Exception):
    """What the batches of `Run.fail` end with."""


def _must_fail(call: Callable, data: Any) -> None:
    try:
        call(data, verbose=0)
    except Failing:
        return
    raise AssertionError(f"{call} did not fail")


class Run:
    """A model that is trained for two epochs."""

    def __init__(self, case: Case, folder: Path, stock: bool = False, even: bool | None = None):
        self.case, self.stock, self._folder = case, stock, folder
        self.subject: Subject = subjects()[case.subject]
        self.even = case.even if even is None else even
        self.x, self.y = self.subject.data(EVEN_ROWS if self.even else ROWS)
        self.batch = EVEN_BATCH if self.even else BATCH
        self.resumes = False
        self._strategies = [None, None] if stock else [STRATEGIES[n]() for n in case.strategies]
        self._at = 0
        self._history: dict[str, np.ndarray] = {}
        self._trainer = case.trainers[0]
        self.model: Any = None

    def results(self) -> dict[str, np.ndarray]:
        """Trains, with all acts, and returns what is compared."""
        self.model = self.new_model(seed=1)
        begin = state_of(self.model)
        for epoch, (name, trainer) in enumerate(
            zip(self.case.acts, self.case.trainers, strict=True)
        ):
            self._trainer = trainer
            ACTS[name].apply(self)
            with self.scope():
                self._train(trainer, epoch)
        state = state_of(self.model)
        if self.stock:
            # Keras saves no seeds: one that draws nothing is another in a model that is loaded. A
            # generator's state is its seed and the number of its draws.
            unused = {n for n in state if n.startswith("seed") and state[n][1] == begin[n][1]}
            state = {name: value for name, value in state.items() if name not in unused}
        return {**state, **self._history, "prediction": self._prediction()}

    def path(self, name: str) -> str:
        """A path in the run's folder."""
        return str(self._folder / name)

    def scope(self) -> contextlib.AbstractContextManager:
        """The scope of the strategy at the moment."""
        return scope_of(self._strategies[self._at])

    def move(self) -> None:
        """Goes to the other strategy."""
        self._at = 1 - self._at

    def replace(self, make: Callable[[], Any]) -> None:
        """Another model, made under the other strategy, among others with Keras's names."""
        self.move()
        with self.scope():
            self._crowd()
            self.model = make()

    def new_model(self, seed: int = 7) -> Any:
        """A compiled model with weights drawn from a seed."""
        with self.scope():
            keras.utils.set_random_seed(seed)
            reference = self.stock and self.subject.reference
            self.model = (reference or self.subject.model)()
            self.freeze()
            if self.subject.converts and not reference:
                self.model = ktd.convert(self.model)
            return self.compiled(self.model)

    def compiled(self, model: Any, **options: Any) -> Any:
        """The model after its `compile`."""
        options = {**self.subject.options(), **options}
        if self._trainer == "launches":
            options["steps_per_execution"] = 2
        model.compile(**options, run_eagerly=self._trainer == "eager")
        return model

    def freeze(self) -> None:
        """Freezes the layer that the case names."""
        layers = [layer for layer in self.model.layers if layer.weights]
        chosen = {"first": layers[:1], "middle": layers[1:-1], "last": layers[-1:], "": []}
        for layer in chosen[self.case.frozen]:
            layer.trainable = False

    def restore(self, path: str) -> None:
        """Loads a file of Keras, which plain Keras does by `load_weights`."""
        if self.stock:
            self.model.load_weights(path)
        else:
            ktd.restore(self.model, path)

    def fail(self) -> None:
        """Calls that read batches and end in an error: nothing is lost."""

        def batches(count, targets=True):
            for _ in range(count):
                yield (x, y) if targets else (x,)
            raise Failing("no more batches")

        x, y = self.first_batch()
        with self.scope():
            _must_fail(self.model.evaluate, batches(2))
            _must_fail(self.model.predict, batches(2, targets=False))
            _must_fail(self.model.fit, batches(0))
            if self.model.optimizer.built:
                # It trains, and then all is as it was.
                variables = [*self.model.variables, *self.model.optimizer.variables]
                before = [np.array(variable.value) for variable in variables]
                _must_fail(self.model.fit, batches(3))
                for variable, value in zip(variables, before, strict=True):
                    assert np.array(variable.value).shape == value.shape
                    variable.assign(value)

    def look(self) -> None:
        """Evaluates and predicts, which changes nothing that trains."""
        with self.scope():
            self.model.evaluate(self.x, self.y, batch_size=self.batch, verbose=0)
            self.model.predict(self._first(5), verbose=0)
            self.model.predict_on_batch(self._first(3))

    def first_batch(self) -> tuple[Any, Any]:
        """Inputs and targets of the first step."""
        return next(self._batches())

    def _first(self, rows: int) -> Any:
        return keras.tree.map_structure(lambda a: a[:rows], self.x)

    def _crowd(self) -> None:
        for _ in range(2):
            self.subject.model()

    def _train(self, trainer: str, epoch: int) -> None:
        if trainer in ("launches", "eager") or self.case.trainers[0] != trainer:
            self._train_as(trainer)
        if trainer == "train_on_batch":
            self._on_batches()
        elif trainer == "replica_code" and not self.stock:
            self._in_replicas()
        else:
            self._fit(epoch)

    def _train_as(self, trainer: str) -> None:
        self.model.run_eagerly = trainer == "eager"
        steps = 2 if trainer == "launches" else 1
        if self.model.steps_per_execution != steps:
            self.model.steps_per_execution = steps
            self.model.train_function = None

    def _fit(self, epoch: int) -> None:
        callbacks = []
        if not self.stock and any(ACTS[name].checkpoint for name in self.case.acts):
            callbacks = [ktd.callbacks.Checkpoint(self.path("checkpoints"))]
        first = 0 if self.resumes else epoch
        history = self.model.fit(
            self.x,
            self.y,
            batch_size=self.batch,
            initial_epoch=first,
            epochs=epoch + 1,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        ).history
        if self.stock:
            self._unshare()
        for name, values in history.items():
            self._history[f"history of epoch {epoch}: {name}"] = np.asarray(values[-1])

    def _unshare(self) -> None:
        """Plain Keras's averages and weights are one array after a fit, and the next fit, which
        donates both, fails.
        """
        for variable in self.model.optimizer.variables:
            variable.assign(keras.ops.copy(variable.value))

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, len(keras.tree.flatten(self.x)[0]), self.batch):
            rows = slice(start, start + self.batch)
            yield keras.tree.map_structure(lambda a: a[rows], (self.x, self.y))

    def _on_batches(self) -> None:
        self.model.reset_metrics()
        for x, y in self._batches():
            self.model.train_on_batch(x, y)
        self._finalize()

    def _in_replicas(self) -> None:
        """The step of docs/custom_loops.md."""
        model, optimizer = self.model, self.model.optimizer
        loss = keras.losses.MeanSquaredError()

        def step(batch):
            x, y = batch

            def loss_of(weights):
                return loss(y, model.stateless_call(weights, others, x, training=True)[0])

            others = [v.value for v in model.non_trainable_variables]
            value, gradients = jax.value_and_grad(loss_of)(
                [v.value for v in model.trainable_variables]
            )
            gradients = ktd.get_replica_context().all_reduce("mean", gradients)
            optimizer.apply(gradients, model.trainable_variables)
            return value

        strategy = self._strategies[self._at]
        dataset = strategy.distribute_dataset((self.x, self.y), batch_size=self.batch)
        for _ in strategy.loop(step, dataset, steps_per_launch=2):
            pass
        self._finalize()

    def _finalize(self) -> None:
        """Averages replace weights, as at the end of `fit`."""
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    def _prediction(self) -> np.ndarray:
        with self.scope():
            return np.asarray(self.model.predict(self.x, batch_size=self.batch, verbose=0))


def scope_of(strategy: Any) -> contextlib.AbstractContextManager:
    """The scope of a strategy, if there is one."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def state_of(model: Any) -> dict[str, np.ndarray]:
    """The variables of a model and of its optimizer, by their numbers."""
    groups = {"weight": model.variables, "optimizer": model.optimizer.variables}
    return {
        f"{'seed' if 'seed_generator' in variable.path else group} {number}": np.asarray(
            variable.value
        )
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
    }
