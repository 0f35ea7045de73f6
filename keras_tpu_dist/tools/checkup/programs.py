"""Runs launches of small models on the machine: what its compiler makes of them is right.

`ktd verify` runs such launches on simulated devices, as the TPU's compiler compiles them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import keras
from keras import ops

from keras_tpu_dist import layers as fast
from keras_tpu_dist.hardware.versions import TpuFault, libtpu_version, tpu_faults, version_text
from keras_tpu_dist.tools.checkup.aside import aside, in_float32
from keras_tpu_dist.tools.checkup.batch import NOTHING
from keras_tpu_dist.tools.checkup.bench import Bench
from keras_tpu_dist.tools.checkup.report import CheckPart, Problem
from keras_tpu_dist.tools.checkup.step import compared

_STEPS = 4
_IDS, _CLASSES = 96, 4
layers = keras.layers


def programs(
    bench: Bench, models: Sequence[Callable[[bool], keras.Model]] | None = None
) -> CheckPart:
    """Compares launches of several steps, with uneven batches, with stock Keras on one device.

    Args:
        models: Functions that build the models, for sizes with hand-written kernels or without;
            by default all of `MODELS`.
    """
    problems: list[Problem] = []
    differences: dict[str, float] = {}
    # In full precision, so that no wrong program can hide behind rounding.
    with aside(), in_float32(), jax.default_matmul_precision("highest"):
        random.seed(0)  # all processes draw the same weights
        for build in models or MODELS:
            with bench.strategy.scope():
                model = build(bench.platform == "tpu")
            found = compared(bench, model, NOTHING, steps=_STEPS)
            problems += [replace(p, what=f"{model.name}: {p.what}") for p in found.problems]
            differences[model.name] = found.difference
    words = f"{_STEPS} steps a launch, uneven batches: {', '.join(differences)}"
    if not problems:
        off = max(differences.values())
        words += f": the same as on one device within {off:.0e}, same bits when repeated"
    if bench.platform == "tpu":
        problems += map(_known, (f for f in tpu_faults(libtpu_version()) if not f.passes))
    return CheckPart("programs", words, tuple(problems), differences)


def _known(fault: TpuFault) -> Problem:
    """The problem of a known fault of the TPU's compiler that nothing avoids."""
    return Problem(
        f"libtpu {version_text(libtpu_version())} is known to compute wrongly: {fault.what}",
        f"A fault of the TPU's compiler ({fault.report}) that this package cannot avoid.",
        "Install another, with the jax that belongs to it: pip install --upgrade 'jax[tpu]'.",
    )


def _compiled(inputs: Any, features: Any, name: str) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(_CLASSES)(features), name=name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Updates are large beside rounding, and no sign of a small gradient decides them.
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def _convolutions(kernels: bool) -> keras.Model:
    image = keras.Input((8, 8, 2))
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(image)
    x = layers.DepthwiseConv2D(3)(layers.BatchNormalization()(layers.MaxPooling2D()(x)))
    return _compiled(image, layers.Dropout(0.3, seed=3)(layers.Flatten()(x)), "convolutions")


def _recurrent(kernels: bool) -> keras.Model:
    """With sizes for which a TPU uses this package's kernels."""
    time, width = (16, 128) if kernels else (7, 12)
    rows = keras.Input((time, width))
    x = fast.GRU(width, return_sequences=True)(fast.LSTM(width, return_sequences=True)(rows))
    return _compiled(rows, fast.SimpleRNN(width)(x), "recurrent layers")


def _attention(kernels: bool) -> keras.Model:
    time, width = (512, 64) if kernels else (24, 8)
    ids = keras.Input((time,), dtype="int32")
    x = layers.Embedding(_IDS, 2 * width)(ids)
    x = x + layers.MultiHeadAttention(2, width)(x, x, use_causal_mask=True)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return _compiled(ids, x, "attention")


class _Counts(layers.Layer):
    """How often each id came: a sum of scattered rows that the launch's loop carries."""

    def build(self, input_shape):
        """See `keras.layers.Layer`."""
        self.count = self.add_weight(
            shape=(_IDS,), initializer="zeros", trainable=False, name="count"
        )

    def call(self, ids):
        """See `keras.layers.Layer`."""
        flat = ops.reshape(ids, (-1,))
        ones = ops.ones_like(flat, dtype="float32")
        self.count.assign(self.count + ops.segment_sum(ones, flat, num_segments=_IDS))
        return ids


def _counts(kernels: bool) -> keras.Model:
    """The program of openxla/xla 49143."""
    ids = keras.Input((8,), dtype="int32")
    x = layers.Embedding(_IDS, 32)(_Counts()(ids))
    return _compiled(ids, layers.GlobalMaxPooling1D()(x), "counts of ids")


MODELS = (_convolutions, _recurrent, _attention, _counts)
