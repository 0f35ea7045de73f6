"""What the laws hold for: every optimizer, layer, metric, loss and callback that Keras has.

Classes come from Keras by reflection. A class that needs arguments has a row in a table here, a
class that no law can hold for stands in `LEFT_OUT` with the reason, and `unlisted()` names those
that have neither: a test fails if it names one, so that a new Keras is noticed.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import layer_cases
import layers as layer_table
import numpy as np
from keras import layers as kl

import keras_tpu_dist as ktd

from . import classes

ROWS, EVEN_ROWS = 37, 48
BATCH, EVEN_BATCH = 13, 16

LEFT_OUT = {
    "optimizers": {"Optimizer": "abstract"},
    "schedules": {"LearningRateSchedule": "abstract"},
    "losses": {"Loss": "abstract"},
    "metrics": {"Metric": "abstract", "Mean": "the loss of every model is one"},
    "regularizers": {"Regularizer": "abstract"},
    "constraints": {"Constraint": "abstract"},
    "initializers": {
        "Initializer": "abstract",
        "STFT": "of kernels that STFTSpectrogram makes, which is among the layers",
    },
    "layers": layer_table.LEFT_OUT,
}


@dataclass(frozen=True)
class Subject:
    """A model with something of Keras in it, and the data that fits it.

    Attributes:
        name: The kind, the class and the variant.
        model: Builds the model, which is not compiled.
        options: Builds the arguments of `compile`.
        data: Makes inputs and targets of a number of rows.
        even: Whether all batches must have the same number of rows.
        reference: Builds the model that plain Keras trains, if it is another one.
        policy: The dtype policy.
        converts: Whether every model of it is converted before anything else.
        without: The acts that mean something else for it, and why.
    """

    name: str
    model: Callable[[], keras.Model]
    options: Callable[[], dict[str, Any]]
    data: Callable[[int], tuple[Any, Any]]
    even: bool = False
    reference: Callable[[], keras.Model] | None = None
    policy: str = "float32"
    converts: bool = False
    without: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Its catalogue."""
        return self.name.partition("/")[0]


def public(module: Any, base: type) -> dict[str, type]:
    """The public classes of a module of Keras, without aliases: by their own names if these are
    public.
    """
    names: dict[type, str] = {}
    for name, kind in sorted(vars(module).items()):
        if inspect.isclass(kind) and issubclass(kind, base):
            names[kind] = name if name == kind.__name__ else names.get(kind, name)
    return {name: kind for kind, name in names.items()}


CATALOGUES = {
    "optimizers": (keras.optimizers, keras.optimizers.Optimizer),
    "schedules": (keras.optimizers.schedules, keras.optimizers.schedules.LearningRateSchedule),
    "losses": (keras.losses, keras.losses.Loss),
    "metrics": (keras.metrics, keras.metrics.Metric),
    "regularizers": (keras.regularizers, keras.regularizers.Regularizer),
    "constraints": (keras.constraints, keras.constraints.Constraint),
    "initializers": (keras.initializers, keras.initializers.Initializer),
    "layers": (kl, kl.Layer),
}


def classes_of(catalogue: str) -> dict[str, type]:
    """The classes of a catalogue that laws hold for."""
    found = public(*CATALOGUES[catalogue])
    return {name: kind for name, kind in found.items() if name not in LEFT_OUT[catalogue]}


def unlisted() -> list[str]:
    """Public classes of Keras that no subject has, and that are not left out."""
    have = {tuple(name.split("/")[:2]) for name in subjects()}
    return [
        f"{catalogue}/{name}"
        for catalogue in CATALOGUES
        for name in classes_of(catalogue)
        if (catalogue, name) not in have
    ]


@functools.cache
def subjects() -> dict[str, Subject]:
    """All subjects by name."""
    found = [*_optimizers(), *_targets(), *_parts_of_dense(), *_layers(), *_dtypes()]
    assert len({subject.name for subject in found}) == len(found)
    return {subject.name: subject for subject in found}


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _numbers(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = _rng()
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 3)).astype(
        "float32"
    )


def _small_model() -> keras.Model:
    """Layers with names and without."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            kl.Dense(8, activation="tanh", name="first"),
            kl.LayerNormalization(),
            kl.Dense(3),
        ]
    )


def _compiled_with(make: Callable[[], Any], **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"optimizer": make(), "loss": "mse", **options}


# Optimizers and schedules.
O = keras.optimizers  # noqa: E741
SCHEDULES: dict[str, Callable[[], Any]] = {
    "CosineDecay": lambda: O.schedules.CosineDecay(0.02, 5, warmup_target=0.03, warmup_steps=2),
    "CosineDecayRestarts": lambda: O.schedules.CosineDecayRestarts(0.02, 2),
    "ExponentialDecay": lambda: O.schedules.ExponentialDecay(0.02, 3, 0.7),
    "InverseTimeDecay": lambda: O.schedules.InverseTimeDecay(0.02, 2, 0.5),
    "PiecewiseConstantDecay": lambda: O.schedules.PiecewiseConstantDecay(
        [2, 4], [0.03, 0.02, 0.01]
    ),
    "PolynomialDecay": lambda: O.schedules.PolynomialDecay(0.02, 5),
}


def _two_optimizers() -> Any:
    return O.OptimizerMap(O.SGD(0.05, momentum=0.9), {".*first/.*": O.Adam(0.001)})


def _by_path_in_the_model() -> Any:
    return O.OptimizerMap(O.SGD(0.05, momentum=0.9), {r"sequential(_\d+)?/first/.*": O.Adam(0.001)})


def _by_path() -> Callable[[Any], Any]:
    first, rest = O.Adam(0.001), O.SGD(0.05, momentum=0.9)
    return lambda variable: first if "first" in variable.path else rest


OPTIMIZERS: dict[str, dict[str, Callable[[], Any]]] = {
    "Adam": {
        "averaged": lambda: O.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
        "accumulated": lambda: O.Adam(0.01, gradient_accumulation_steps=2),
        "amsgrad": lambda: O.Adam(0.01, amsgrad=True, clipnorm=0.5),
    },
    "AdamW": {"averaged": lambda: O.AdamW(0.01, weight_decay=0.1, use_ema=True)},
    "SGD": {
        "momentum": lambda: O.SGD(0.05, momentum=0.9, nesterov=True, global_clipnorm=1.0),
        "averaged": lambda: O.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.6),
    },
    "RMSprop": {"centered": lambda: O.RMSprop(0.01, momentum=0.5, centered=True)},
    "Muon": {"plain": lambda: O.Muon(0.01, adam_lr_ratio=0.5)},
    "LossScaleOptimizer": {
        "plain": lambda: O.LossScaleOptimizer(
            O.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=2
        ),
        "averaged": lambda: O.LossScaleOptimizer(
            O.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.6), initial_scale=8.0
        ),
    },
    "MultiOptimizer": {
        "plain": lambda: O.MultiOptimizer(_two_optimizers()),
        "callable": lambda: O.MultiOptimizer(_by_path()),
        "whole_path": lambda: O.MultiOptimizer(_by_path_in_the_model()),
        "slots": lambda: O.MultiOptimizer(
            O.OptimizerMap(O.ScheduleFreeAdamW(0.01), {".*first/.*": O.Adam(0.001)})
        ),
        "averaged": lambda: O.MultiOptimizer(
            O.OptimizerMap(
                O.SGD(0.05, use_ema=True, ema_momentum=0.6),
                {".*first/.*": O.Adam(0.002, use_ema=True, ema_momentum=0.8)},
            )
        ),
    },
}
_LOST_BY_KERAS = dict.fromkeys(
    ("saved_as_keras", "pickled", "restored_from_keras_file", "copied"),
    "plain Keras loses the inner state of a MultiOptimizer",
)


def _optimizers() -> Iterator[Subject]:
    for name, kind in classes_of("optimizers").items():
        rows = OPTIMIZERS.get(name, {})
        if name not in ("LossScaleOptimizer", "MultiOptimizer", "Muon"):
            rows = {"plain": functools.partial(kind, 0.01), **rows}
        without = _LOST_BY_KERAS if name == "MultiOptimizer" else {}
        if name == "LossScaleOptimizer":
            without = {"replica_code": "replica code scales its own loss"}
        for variant, make in rows.items():
            own = {}
            if variant in ("callable", "whole_path"):
                own = {"cloned": "Keras makes no lambda again, and its clone has other paths"}
            yield _optimizer(f"optimizers/{name}/{variant}", make, without | own)
    yield _optimizer("optimizers/user/lookahead", classes.Lookahead)
    for name in classes_of("schedules"):
        make = functools.partial(_adam_with, SCHEDULES[name])
        yield _optimizer(f"schedules/{name}/plain", make)


def _adam_with(schedule: Callable[[], Any]) -> Any:
    return O.Adam(schedule())


def _optimizer(name: str, make: Callable, without: dict[str, str] | None = None) -> Subject:
    return Subject(name, _small_model, _compiled_with(make), _numbers, without=without or {})


# Metrics and losses, by what they compare.
@dataclass(frozen=True)
class Target:
    """What a model predicts: its last layer, and targets."""

    units: int
    activation: str
    targets: Callable[[int, np.random.Generator], np.ndarray]

    def model(self) -> keras.Model:
        """A model for it."""
        last = kl.Dense(self.units, activation=self.activation)
        return keras.Sequential([keras.Input((6,)), kl.Dense(8, activation="tanh"), last])

    def data(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets."""
        x, _ = _numbers(rows)
        return x, self.targets(rows, np.random.default_rng(1))


def _one_hot(rows: int, rng: np.random.Generator) -> np.ndarray:
    return np.eye(3, dtype="float32")[rng.integers(0, 3, rows)]


TARGETS = {
    "binary": Target(
        1, "sigmoid", lambda rows, rng: rng.integers(0, 2, (rows, 1)).astype("float32")
    ),
    "classes": Target(3, "softmax", _one_hot),
    "labels": Target(3, "softmax", lambda rows, rng: rng.integers(0, 3, rows)),
    "numbers": Target(3, "linear", lambda rows, rng: rng.normal(size=(rows, 3)).astype("float32")),
    "positive": Target(
        3, "softplus", lambda rows, rng: rng.uniform(0.5, 2, (rows, 3)).astype("float32")
    ),
    "distances": Target(4, "linear", lambda rows, rng: np.arange(rows) // 2 % 3),
}
BY_TARGET: dict[str, dict[str, str]] = {
    "metrics": {
        "binary": "AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU FalseNegatives "
        "FalsePositives Hinge Precision PrecisionAtRecall Recall RecallAtPrecision "
        "SensitivityAtSpecificity SpecificityAtSensitivity SquaredHinge TrueNegatives "
        "TruePositives",
        "classes": "CategoricalAccuracy CategoricalCrossentropy CategoricalHinge F1Score "
        "FBetaScore KLDivergence OneHotIoU OneHotMeanIoU TopKCategoricalAccuracy",
        "labels": "IoU MeanIoU SparseCategoricalAccuracy SparseCategoricalCrossentropy "
        "SparseTopKCategoricalAccuracy",
        "numbers": "ConcordanceCorrelation CosineSimilarity LogCoshError MeanAbsoluteError "
        "MeanMetricWrapper MeanSquaredError PearsonCorrelation R2Score RootMeanSquaredError Sum",
        "positive": "MeanAbsolutePercentageError MeanSquaredLogarithmicError Poisson",
    },
    "losses": {
        "binary": "BinaryCrossentropy BinaryFocalCrossentropy Dice Hinge SquaredHinge Tversky",
        "classes": "CategoricalCrossentropy CategoricalFocalCrossentropy "
        "CategoricalHinge KLDivergence",
        "labels": "CategoricalGeneralizedCrossEntropy SparseCategoricalCrossentropy "
        "SparseCategoricalFocalCrossentropy",
        "numbers": "CosineSimilarity Huber LogCosh MeanAbsoluteError MeanSquaredError",
        "positive": "MeanAbsolutePercentageError MeanSquaredLogarithmicError Poisson",
        "distances": "Circle",
    },
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Circle": {"gamma": 1.0},
    "BinaryIoU": {"target_class_ids": [0, 1], "threshold": 0.5},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2], "sparse_y_pred": False},
    "MeanIoU": {"num_classes": 3, "sparse_y_pred": False},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error, "name": "wrapped"},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}


def _targets() -> Iterator[Subject]:
    for catalogue, by_target in BY_TARGET.items():
        kinds = classes_of(catalogue)
        for target, names in by_target.items():
            for name in names.split():
                if name in kinds:
                    yield _of_target(catalogue, name, kinds[name], TARGETS[target])
    yield Subject(
        "losses/CTC/plain", _ctc_model, _compiled_with(_sgd, loss=keras.losses.CTC()), _ctc
    )


def _sgd() -> Any:
    return O.SGD(0.02, momentum=0.9)


def _of_target(catalogue: str, name: str, kind: type, target: Target) -> Subject:
    make = functools.partial(kind, **ARGUMENTS.get(name, {}))
    if name == "Sum":
        make = classes.SumOfErrors

    trained = "sparse_categorical_crossentropy" if target is TARGETS["labels"] else "mse"

    def options() -> dict[str, Any]:
        if catalogue == "losses":
            return {"optimizer": _sgd(), "loss": make()}
        return {"optimizer": _sgd(), "loss": trained, "metrics": [make()]}

    # The loss of a row that is like none in its batch is NaN.
    even = target is TARGETS["distances"]
    return Subject(f"{catalogue}/{name}/plain", target.model, options, target.data, even=even)


def _ctc_model() -> keras.Model:
    return keras.Sequential([keras.Input((6, 4)), kl.Dense(5)])


def _ctc(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = _rng()
    return rng.normal(size=(rows, 6, 4)).astype("float32"), rng.integers(1, 5, (rows, 2))


# What a Dense is given.
def _parts_of_dense() -> Iterator[Subject]:
    arguments = {"OrthogonalRegularizer": {"factor": 0.01}, "Constant": {"value": 0.1}}
    slots = {
        "regularizers": "kernel_regularizer",
        "constraints": "kernel_constraint",
        "initializers": "kernel_initializer",
    }
    for catalogue, slot in slots.items():
        for name, kind in classes_of(catalogue).items():
            make = functools.partial(kind, **arguments.get(name, {}))
            if "seed" in inspect.signature(kind.__init__).parameters:
                make = functools.partial(make, seed=5)
            model = functools.partial(_dense_with, slot, make)
            options = _compiled_with(_sgd)
            yield Subject(f"{catalogue}/{name}/plain", model, options, _numbers)


def _dense_with(slot: str, make: Callable[[], Any]) -> keras.Model:
    first = kl.Dense(8, activation="tanh", **{slot: make()})
    return keras.Sequential([keras.Input((6,)), first, kl.Dense(3)])


# Layers: the table of the conformance run, and layers that carry states.
def _layers() -> Iterator[Subject]:
    for case in layer_table.CASES:
        name = f"layers/{case.name}"
        yield _layer(name, case, _without(case.name))
    for kind in ("LSTM", "GRU", "SimpleRNN"):
        yield _stateful(kind)
        yield _stateful(kind, bidirectional=True)


# Compiling one takes up to a minute.
SLOW_LAYERS = ("RandAugment", "AugMix", "RandomElasticTransform", "ConvLSTM3D")


def _without(name: str) -> dict[str, str]:
    if name.endswith(("RNN/dropout", "GRU/dropout", "LSTM/dropout")):
        return {"failed": "a prediction draws the numbers of its dropout"}
    if name.startswith("Lambda/"):
        return {"saved_as_keras": "Keras refuses to load a lambda", "pickled": "the same"}
    if name.startswith("RandomShear/"):
        remade = ("saved_as_keras", "pickled", "copied", "cloned", "converted", "converted_twice")
        return dict.fromkeys(remade, "Keras does not load the config that it gives the layer")
    if name.startswith("JaxLayer/"):
        again = ("saved_as_keras", "pickled", "copied", "cloned", "restored_from_keras_file")
        remade = ("converted", "converted_twice")
        return dict.fromkeys(again, "Keras saves no function of JAX") | dict.fromkeys(
            remade, "its config has no parameters, and convert says so"
        )
    return {}


def _layer(name: str, case: Any, without: dict[str, str]) -> Subject:
    return Subject(
        name,
        model=functools.partial(layer_cases.model_of, case, BATCH),
        options=_compiled_with(functools.partial(O.SGD, 0.02)),
        data=functools.partial(layer_cases.data_of, case),
        without=without,
    )


def _stateful(kind: str, bidirectional: bool = False) -> Subject:
    """Plain Keras on JAX loses the states: `convert` makes our layer of its layer, and our layer
    without a strategy is the reference.
    """

    def model(module: Any) -> keras.Model:
        layer = getattr(module, kind)(5, stateful=True)
        if bidirectional:
            layer = module.Bidirectional(layer)
        return keras.Sequential(
            [
                keras.Input((6, 4), batch_size=EVEN_BATCH),
                kl.Dense(4, name="before"),
                layer,
                kl.Dense(5, "tanh"),
                kl.Dropout(0.2, seed=3),
                kl.Dense(2, name="behind"),
            ]
        )

    def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
        rng = _rng()
        return (
            rng.normal(size=(rows, 6, 4)).astype("float32"),
            rng.normal(size=(rows, 2)).astype("float32"),
        )

    variant = "stateful_bidirectional" if bidirectional else "stateful"
    moving = ("evaluated", "moved_and_back", "failed", "frozen_and_thawed")
    without = dict.fromkeys(moving, "a prediction moves the states")
    return Subject(
        f"layers/{kind}/{variant}",
        model=functools.partial(model, kl),
        options=_compiled_with(functools.partial(O.SGD, 0.02)),
        data=data,
        even=True,
        converts=True,
        reference=functools.partial(model, ktd.layers),
        without=without,
    )


# State whose first value has another dtype than its updates.
def _dtypes() -> Iterator[Subject]:
    for policy in ("float32", "mixed_bfloat16", "bfloat16", "mixed_float16"):
        for start in ("int32", "float16", "bfloat16", "float32"):
            yield Subject(
                f"dtypes/{policy}/{start}",
                functools.partial(_moving_mean, start),
                _compiled_with(_sgd),
                _numbers,
                policy=policy,
            )


def _moving_mean(start: str) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), kl.Dense(4), classes.MovingMean(start), kl.Dense(3)]
    )
