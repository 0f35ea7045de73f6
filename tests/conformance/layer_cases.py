"""Every built-in layer of Keras in a small model.

A model is `Scale` on every float input (its gradient is that of the layer's input), the layer,
`Join` of all its outputs, then Dense(2). Outputs are divided by the root of their number and the
last kernel is of standard deviation 1, so that SGD(0.1) on the mean squared error is stable.

Weights are drawn from Keras's global generator: call `keras.utils.set_random_seed` before
`model_of`. Layers with randomness of their own have a fixed seed, `SEED`.

Keras does not compile models with some random image layers (`supports_jit = False`), which hold
for TensorFlow: those that JAX compiles have a variant "jit" too.
"""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import keras
import numpy as np
from keras import layers as kl
from keras import ops

SEED = 3
SEQ, WIDE, IMAGE, VOLUME, RGB = (6, 4), (6, 8), (8, 8, 4), (4, 4, 4, 2), (8, 8, 3)


@dataclass(frozen=True)
class LayerCase:
    """A layer, its inputs, and how to apply it."""

    name: str
    build: Callable[[], keras.Layer]
    inputs: Callable[[int, np.random.Generator], tuple[np.ndarray, ...]]
    call: Callable | None = None


@keras.saving.register_keras_serializable("conformance")
class Scale(keras.Layer):
    """The input times a trainable weight of the same shape, near 1."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, shape):
        near = keras.initializers.RandomUniform(0.8, 1.2)
        self.scale = self.add_weight(shape=shape[1:], initializer=near, name="scale")

    def call(self, x):
        return x * self.scale


@keras.saving.register_keras_serializable("conformance")
class Join(keras.Layer):
    """All tensors as float32, flattened, side by side, over the root of the width; no mask."""

    def call(self, tensors):
        widths = [int(np.prod(t.shape[1:])) for t in tensors]
        flat = [ops.reshape(ops.cast(t, "float32"), (-1, n)) for t, n in zip(tensors, widths)]
        return ops.concatenate(flat, axis=-1) * sum(widths) ** -0.5

    def compute_mask(self, inputs, mask=None):
        return None


@keras.saving.register_keras_serializable("conformance")
class SeededAugMix(kl.AugMix):
    """AugMix chooses its chains from Python's own generator while it is traced."""

    def get_random_transformation(self, *args, **kwargs):
        before = random.getstate()
        random.seed(SEED)
        try:
            return super().get_random_transformation(*args, **kwargs)
        finally:
            random.setstate(before)


def model_of(case, rows):
    """The model of a case, not compiled; `rows` only for the shapes of a sample."""
    sample = case.inputs(rows, np.random.default_rng(0))
    inputs = [keras.Input(a.shape[1:], dtype=a.dtype.name) for a in sample]
    tensors = [Scale()(t) if "float" in t.dtype else t for t in inputs]
    layer = case.build()
    outputs = case.call(layer, *tensors) if case.call else layer(*tensors)
    kernel = keras.initializers.RandomNormal(stddev=1.0)
    y = kl.Dense(2, kernel_initializer=kernel, name="head")(Join()(keras.tree.flatten(outputs)))
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], y)


def data_of(case, rows, seed=0):
    """Inputs, an array or a tuple, and targets (rows, 2)."""
    rng = np.random.default_rng(seed)
    x = case.inputs(rows, rng)
    return (x if len(x) > 1 else x[0]), rng.normal(size=(rows, 2)).astype("float32")


def all_names():
    """All classes in keras.layers."""
    return [k for k in dir(kl) if inspect.isclass(getattr(kl, k))]


# Inputs.
def floats(*shapes):
    """Normal inputs, one for each shape without rows."""
    return lambda n, rng: tuple(rng.normal(size=(n, *s)).astype("float32") for s in shapes)


def images(rows, rng):
    """Pixels that stay in [0, 1] after `Scale`."""
    return (rng.uniform(0.1, 0.8, (rows, *RGB)).astype("float32"),)


def ids(high, *shape, low=0):
    return lambda rows, rng: (rng.integers(low, high, (rows, *shape)).astype("int32"),)


def lengths(rows, rng, steps):
    """A padding mask: ones, then zeros, at least one 1."""
    return np.arange(steps) < rng.integers(1, steps + 1, (rows, 1))


def padded(rows, rng):
    """Steps of zeros after a number of steps that differs from row to row."""
    mask = lengths(rows, rng, SEQ[0])[..., None]
    return ((rng.normal(size=(rows, *SEQ)) * mask).astype("float32"),)


def padded_ids(rows, rng):
    return ((rng.integers(1, 32, (rows, 6)) * lengths(rows, rng, 6)).astype("int32"),)


def both(*makers):
    return lambda rows, rng: sum((make(rows, rng) for make in makers), ())


def mask_of(*shape):
    """Zeros and ones, with a one on every diagonal so that no row is all zeros."""
    eye = np.eye(*shape[-2:], dtype="int32") if len(shape) > 1 else np.arange(*shape) == 0
    return lambda rows, rng: (np.maximum(rng.integers(0, 2, (rows, *shape)), eye).astype("int32"),)


# Ways to apply.
def listed(layer, *tensors):
    return layer(list(tensors))


def masked(layer, x):
    return layer(kl.Masking()(x))


def embedded(layer, x):
    x = kl.Embedding(32, 8, mask_zero=True)(x)
    return layer(x, x) if isinstance(layer, kl.MultiHeadAttention) else layer(x)


def unpadded(layer, x):
    """Attention to all ids but 0; Keras's GroupQueryAttention warns of a mask it is not given."""
    mask = ops.repeat(ops.expand_dims(ops.not_equal(x, 0), 1), 6, axis=1)
    return self_attention(layer, kl.Embedding(32, 8)(x), mask)


def self_attention(layer, x, mask=None, **kwargs):
    mask = {} if mask is None else {"attention_mask": ops.cast(mask, "bool")}
    return layer(x, x, **mask, **kwargs)


causal = partial(self_attention, use_causal_mask=True)


def keyed(layer, q, v, mq, mv):
    """Attention with one mask for queries and one for values."""
    return layer([q, v], mask=[ops.cast(mq, "bool"), ops.cast(mv, "bool")])


def adapted(layer):
    layer.adapt(np.random.default_rng(SEED).normal(0.5, 2.0, (64, *SEQ)).astype("float32"))
    return layer


@keras.saving.register_keras_serializable("conformance")
def swish_of_sum(x):
    return ops.silu(x) + ops.mean(x, axis=1, keepdims=True)


def jax_dense(params, inputs):
    return jnp.tanh(inputs @ params["kernel"] + params["bias"])


def jax_weights():
    kernel = np.random.default_rng(SEED).normal(size=(4, 8)).astype("float32")
    return {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(8)}


def jax_centred(params, state, inputs, training):
    mean = 0.9 * state["mean"] + 0.1 * inputs.mean((0, 1)) if training else state["mean"]
    return jax_dense(params, inputs - mean), {"mean": mean}


def set_jit(jit, cls, *args, **kwargs):
    """A layer that says of itself that it compiles, or does not."""
    layer = cls(*args, **kwargs)
    for part in layer._flatten_layers():
        part.supports_jit = jit
    return layer


FOUND: list[LayerCase] = []


def add(kind, inputs, *args, call=None, **variants):
    """A case for every variant; `args` and a variant's dictionary go to the layer's class.

    A variant may be a dictionary of arguments, or a function that builds the layer; the keys
    "inputs" and "call" in a dictionary replace those of all variants. None given: one, "plain".
    """
    cls = getattr(kl, kind)
    for variant, given in (variants or {"plain": {}}).items():
        own, build = {"inputs": inputs, "call": call}, given
        if isinstance(given, dict):
            build = partial(cls, *args, **{k: v for k, v in given.items() if k not in own})
            own |= {k: v for k, v in given.items() if k in own}
        FOUND.append(LayerCase(f"{kind}/{variant}", build, **own))


def each(kinds, inputs, *args, **kwargs):
    for kind in kinds.split():
        add(kind, inputs, *args, **kwargs)
