"""Tests small fits: uneven batches, donation, prefetch, and an error in the middle."""

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.processes.arrays import whole
from keras_tpu_dist.tools.checkup.aside import aside, in_float32, on_one
from keras_tpu_dist.tools.checkup.bench import Bench
from keras_tpu_dist.tools.checkup.bounds import gap, tolerance
from keras_tpu_dist.tools.checkup.report import RIGHT, CheckPart, Problem

_FEATURES, _CLASSES = 12, 4
# Keras declares a string here, but accepts a number.
_SILENT: Any = 0


def training(bench: Bench) -> CheckPart:
    """Compares small fits with stock Keras on one device.

    Args:
        bench: The check's shared state.
    """
    parts = bench.strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3 * parts + 1, _FEATURES)).astype(np.float32)
    y = rng.integers(0, _CLASSES, len(x))
    rows = parts + 1
    with aside(), in_float32(), jax.default_matmul_precision("highest"):
        allowed = tolerance(bench.platform)
        expected = _trained(bench, None, x, y, rows)
        strategy = _like(bench, donate_state=True, prefetch=2)
        mine = max(map(gap, _trained(bench, strategy, x, y, rows), expected))
        off = bench.agreed("a small fit", mine, max)
        problems = [_problem(off, allowed)] if off > allowed else []
        problems += _after_an_error(bench, x, y, rows, expected, allowed)
    words = "fits with donation and prefetch, and after an error"
    if not problems:
        words = (
            f"fits with donation and prefetch: same as on one device within {off:.0e}; an error "
            "loses no weights"
        )
    return CheckPart("training", RIGHT, words, tuple(problems), {"largest difference": off})


def _like(bench: Bench, **options: Any) -> Any:
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
    with on_one(bench.local[0]) if strategy is None else strategy.scope():
        model = _model()
        history = model.fit(x, y, batch_size=rows, shuffle=False, verbose=_SILENT).history
    return [*_weights(model), np.asarray(history["loss"])]


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(whole(value)) for value in _keras.full_values(model.weights)]


def _after_an_error(
    bench: Bench, x: Any, y: Any, rows: int, expected: list, allowed: float
) -> Iterator[Problem]:
    """Runs a fit that fails at its second batch, then the rest; the weights must be the same."""
    if not bench.strategy.placer.is_local:
        return  # with several processes, an error in one of them ends the others
    strategy = _like(bench, donate_state=False)
    with strategy.scope():
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
                "a fit whose second batch has a feature too few ended without an error",
                "The step does not get the batches of its input.",
                "Report it with the output of `ktd --version`.",
            )
        model.fit(x[rows:], y[rows:], batch_size=rows, shuffle=False, verbose=_SILENT)
    off = max(map(gap, _weights(model), expected[:-1]))
    if off > allowed:
        yield Problem(
            f"after an error in a launch, the weights are off by {off:.1e}",
            "A failed launch loses or changes weights.",
            "Save often (callbacks.Checkpoint), and report it with the output of `ktd --version`.",
        )


def _problem(off: float, allowed: float) -> Problem:
    return Problem(
        f"the weights after a small fit differ from one device by {off:.1e}; rounding explains "
        f"{allowed:.0e}",
        "Training on this mesh gives other results than on one device.",
        "Solve the other problems first; if there are none, report it with the output of "
        "`ktd --version`.",
    )
