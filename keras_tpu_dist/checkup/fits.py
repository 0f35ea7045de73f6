"""Small fits: rows that do not divide, donation, prefetch, and errors in the middle."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkup.bench import Bench
from keras_tpu_dist.checkup.bounds import gap, tolerance
from keras_tpu_dist.checkup.report import RIGHT, CheckPart, Problem
from keras_tpu_dist.input.position import random_numbers, set_random_numbers
from keras_tpu_dist.processes.arrays import whole

_FEATURES, _CLASSES = 12, 4
# Keras declares a text and takes a number.
_SILENT: Any = 0


def training(bench: Bench) -> CheckPart:
    """Compares small fits with stock Keras on one device.

    Args:
        bench: What parts share.
    """
    parts = bench.strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3 * parts + 1, _FEATURES)).astype(np.float32)
    y = rng.integers(0, _CLASSES, len(x))
    problems: list[Problem] = []
    worst = 0.0
    with _aside(), jax.default_matmul_precision("highest"):
        allowed = tolerance(bench.platform)
        expected = _trained(bench, None, x, y, parts + 1)
        for name, options in _WAYS.items():
            strategy = _like(bench, options)
            off = max(map(gap, _trained(bench, strategy, x, y, parts + 1), expected))
            worst = max(worst, off)
            every = bench.agreed(f"fit with {name}", off, max)
            if every > allowed:
                problems.append(_problem(name, every, allowed))
        problems += _after_an_error(bench, x, y, parts + 1, expected, allowed)
    words = ", ".join(_WAYS)
    words = f"fits with {words}: as on one device within {worst:.0e}; an error loses no weight"
    if problems:
        words = f"fits with {', '.join(_WAYS)}, and after an error"
    return CheckPart("training", RIGHT, words, tuple(problems), {"largest difference": worst})


# The fit after an error donates nothing.
_WAYS: dict[str, dict[str, Any]] = {
    "donation and prefetch": {"donate_state": True, "prefetch": 2},
}


def _like(bench: Bench, options: dict[str, Any]) -> Any:
    """A strategy on the same mesh with other options."""
    strategy: Any = bench.strategy
    return type(strategy)(bench.mesh, data_axes=strategy.data_axes, **options)


def _model() -> keras.Model:
    layers = [
        keras.layers.Dense(16, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2, seed=3),
        keras.layers.Dense(_CLASSES),
    ]
    model = keras.Sequential([keras.Input((_FEATURES,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss)
    rng = np.random.default_rng(1)
    weights = [0.3 * rng.normal(size=v.shape) for v in model.trainable_variables]
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        variable.assign(value)
    return model


def _trained(bench: Bench, strategy: Any, x: Any, y: Any, rows: int) -> list[np.ndarray]:
    """Weights and loss after an epoch of three batches, the last of them smaller."""
    with _on(bench, strategy):
        model = _model()
        history = model.fit(x, y, batch_size=rows, shuffle=False, verbose=_SILENT).history
    return [*_weights(model), np.asarray(history["loss"])]


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(whole(value)) for value in _keras.full_values(model.weights)]


@contextmanager
def _on(bench: Bench, strategy: Any) -> Iterator[None]:
    if strategy is not None:
        with strategy.scope():
            yield
        return
    own = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        with jax.default_device(bench.local[0]):
            yield
    finally:
        keras.distribution.set_distribution(own)


def _after_an_error(
    bench: Bench, x: Any, y: Any, rows: int, expected: list, allowed: float
) -> Iterator[Problem]:
    """A fit whose second batch cannot be computed; then the rest, as if nothing had been."""
    if not bench.strategy.placer.is_local:
        return  # an error of one process ends the others, which is tested there
    strategy = _like(bench, {"donate_state": False})
    with _on(bench, strategy):
        model = _model()

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            yield x[:rows], y[:rows]
            yield x[rows : 2 * rows, :-1], y[rows : 2 * rows]

        try:
            model.fit(batches(), steps_per_epoch=2, shuffle=False, verbose=_SILENT)
        except Exception:
            pass
        else:
            yield Problem(
                "a fit whose second batch lacks a feature ended without an error",
                "Batches are not what the step is given.",
                "Report it with the output of `ktd --version`.",
            )
        model.fit(x[rows:], y[rows:], batch_size=rows, shuffle=False, verbose=_SILENT)
    off = max(map(gap, _weights(model), expected[:-1]))
    if off > allowed:
        yield Problem(
            f"after an error in a launch, weights are {off:.1e} off",
            "A failed launch loses or changes weights.",
            "Save often (callbacks.Checkpoint), and report it with the output of `ktd --version`.",
        )


def _problem(name: str, off: float, allowed: float) -> Problem:
    return Problem(
        f"weights after a small fit with {name} are {off:.1e} off those of one device, where "
        f"rounding explains {allowed:.0e}",
        "Training on this mesh is not what it is on one device.",
        "Look at the other problems first; without any, report it with the output of "
        "`ktd --version`.",
    )


@contextmanager
def _aside() -> Iterator[None]:
    """Models made within leave neither names nor random numbers of the program changed."""
    numbers, logger = random_numbers(), logging.getLogger("keras_tpu_dist")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _keras.fresh_names():
            yield
    finally:
        logger.setLevel(level)
        set_random_numbers(numbers)
