"""Models that Keras does not compile: layers for which JAX can, and the reasons that remain.

Keras compiles no step of a model if one of its layers says that it cannot be compiled
(`layer.supports_jit`). Each operation then is a program of its own.
"""

from typing import Any, NamedTuple

import keras

from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.marks import Mark
from keras_tpu_dist._keras.structure import flatten_layers
from keras_tpu_dist._keras.trainer import on_compile

# Keras says that they cannot be compiled because TensorFlow's operation that transforms images
# (ImageProjectiveTransformV3) is none of XLA's. JAX's is compiled.
_COMPILED_BY_JAX = (
    keras.layers.RandomPerspective,
    keras.layers.RandomRotation,
    keras.layers.RandomShear,
    keras.layers.RandomTranslation,
    keras.layers.RandomZoom,
)
_IN_INPUT = "Apply it in the input: dataset.map(lambda x, y: (layer(x, training=True), y))."
_ON_HOST = "It computes on the host, with TensorFlow."
# Layers that stay out of a compiled program: why, and what to write.
_NOT_COMPILED: dict[type, tuple[str, str]] = {
    keras.layers.AugMix: (
        "It draws the order of its layers from Python's random numbers, which a compiled program "
        "would draw once for all steps.",
        f"Use RandAugment. {_IN_INPUT}",
    ),
    keras.layers.RandomCrop: (
        "It slices images at places that are drawn; a compiled program slices at fixed places.",
        f"{_IN_INPUT} Or use RandomTranslation and CenterCrop.",
    ),
    keras.layers.Hashing: (_ON_HOST, _IN_INPUT),
    keras.layers.HashedCrossing: (_ON_HOST, _IN_INPUT),
    keras.layers.StringLookup: (_ON_HOST, _IN_INPUT),
    keras.layers.TextVectorization: (_ON_HOST, _IN_INPUT),
}


# On a model: `False` if `compile` was given jit_compile=False. Keras keeps what it made of it.
_may_compile = Mark("_keras_tpu_dist_jit_compile")


class Eager(NamedTuple):
    """Why Keras does not compile a model.

    Attributes:
        path: The layer's path, or the model's name.
        words: The reason.
        fix: What to write.
    """

    path: str
    words: str
    fix: str


def compile_what_jax_can(model: Any) -> None:
    """Lets Keras compile a model whose layers JAX can compile, although Keras says that it cannot.

    Public replacement: layers of Keras that say for each backend whether they can be compiled.
    """
    # Now, as the layers that are about to change tell it of some models.
    _may_compile.write(model, not _was_asked_not_to(model))
    holders = _in_augmix(model)
    for layer in flatten_layers(model):
        if not layer.supports_jit and _can_be_compiled(layer) and id(layer) not in holders:
            layer.supports_jit = True
    if model._jit_compile is False and not why_eager(model):
        # Keras decided in `compile`, which may have run without a strategy.
        model._jit_compile = None


def why_eager(model: Any) -> list[Eager]:
    """Why Keras does not compile the steps of a model under a strategy; nothing if it does."""
    if model.run_eagerly:
        words = "It was compiled with run_eagerly=True, or model.run_eagerly was set."
        return [Eager(model.name, words, "Leave run_eagerly out.")]
    holders = _in_augmix(model)
    layers = [
        holders.get(id(layer), layer) for layer in flatten_layers(model) if not layer.supports_jit
    ]
    reasons = [_reason(layer) for layer in layers if not _can_be_compiled(layer)]
    if reasons or not _was_asked_not_to(model):
        return list(dict.fromkeys(reasons))
    words = "It was compiled with jit_compile=False."
    return [Eager(model.name, words, "Leave jit_compile out.")]


def _was_asked_not_to(model: Any) -> bool:
    """Whether `compile` was given jit_compile=False."""
    may = _may_compile.of(model)
    if may is not None or model._jit_compile is not False:
        return may is False
    # Compiled before Keras was changed: if not for a layer, Keras was asked.
    return all(layer.supports_jit for layer in flatten_layers(model))


def _can_be_compiled(layer: Any) -> bool:
    # Not for classes derived of these: what they add is not known. `_keras.lookups` has the other.
    return type(layer) in _COMPILED_BY_JAX or isinstance(layer, keras.layers.IntegerLookup)


def _in_augmix(model: Any) -> dict[int, Any]:
    """By the `id` of a layer, the AugMix that chooses it or not: neither is compiled."""
    return {
        id(part): layer
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.AugMix)
        for part in flatten_layers(layer)
    }


def why_uncompiled(layer: Any) -> Eager | None:
    """Why a layer cannot be compiled, `None` if it says that it can be, or JAX compiles it."""
    stays_out = isinstance(layer, keras.Layer) and not layer.supports_jit
    return _reason(layer) if stays_out and not _can_be_compiled(layer) else None


def _reason(layer: Any) -> Eager:
    path = layer.path or layer.name
    kind = next((kind for kind in _NOT_COMPILED if isinstance(layer, kind)), None)
    if kind is not None:
        return Eager(path, *_NOT_COMPILED[kind])
    return Eager(
        path,
        f"Its class, {type(layer).__name__}, sets supports_jit = False.",
        "If JAX can trace its call, write layer.supports_jit = True before compile; else apply it "
        "in the input.",
    )


def _begins(model: Any, jit_compile: Any) -> None:
    _may_compile.write(model, jit_compile is not False)
    if active_strategy() is not None:
        compile_what_jax_can(model)


on_compile(_begins)
