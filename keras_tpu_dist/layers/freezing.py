"""Freezes weights by patterns of their paths."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import check_model
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.common.patterns import check_matched, matches, patterns_of

logger = logging.getLogger("keras_tpu_dist")

# On a weight: whether `freeze` froze it. On a layer: the paths of its weights that were not
# trainable before.
_frozen = _keras.Mark("_keras_tpu_dist_frozen")


def freeze(
    model: Any, patterns: str | Iterable[str], exclude: str | Iterable[str] = ()
) -> list[str]:
    """Freezes the weights that match the patterns, and lets all others train that can.

    It sets `trainable = False` by path, at any depth. If all weights of a layer match, the layer
    itself is frozen, so that a frozen `BatchNormalization` keeps its averages too; otherwise only
    the weights are. Each call replaces the previous one: `ktd.freeze(model, [])` unfreezes all.
    Weights that do not train for another reason stay as they are, such as a kernel under LoRA.

    As in Keras, compile the model afterwards, with a new optimizer if it has trained before. Until
    then, `fit` asks you to compile first.

    Args:
        model: A built model or layer.
        patterns: Patterns of paths (`fnmatch`), such as `"encoder/*"`, `"*/bias"` or `"*"`. They
            match weights, or layers with all their weights. You may leave out the model's own name
            in front.
        exclude: Patterns of weights that train although `patterns` match them, such as `"*lora*"`.

    Returns:
        The paths of the weights that are frozen. Those that train are in
        `model.trainable_weights`.

    Raises:
        ValueError: If a pattern matches nothing, or the model is not built.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> model = keras.Sequential(
    ...     [
    ...         keras.Input((8,)),
    ...         keras.layers.Dense(4, name="encoder"),
    ...         keras.layers.Dense(2, name="head"),
    ...     ],
    ...     name="classifier",
    ... )
    >>> ktd.freeze(model, "encoder")
    ['classifier/encoder/kernel', 'classifier/encoder/bias']
    >>> [weight.path for weight in model.trainable_weights]
    ['classifier/head/kernel', 'classifier/head/bias']
    """
    check_model(model, "freeze")
    _check_built(model)
    patterns, exclude = patterns_of(patterns), patterns_of(exclude)
    names = {id(weight): _names(weight.path, model.name) for weight in model.weights}
    check_matched(
        (*patterns, *exclude),
        [name for of_weight in names.values() for name in of_weight],
        "Every pattern must match weights or layers of the model.",
    )
    if hasattr(model, "jax_state_sync"):
        # Within a fit, the variables need its newest state before their order changes.
        model.jax_state_sync()
    before = _trained(model)
    _thaw(model)
    named = {
        key
        for key, paths in names.items()
        if any(matches(path, patterns) for path in paths)
        and not any(matches(path, exclude) for path in paths)
    }
    _freeze(model, named)
    if _trained(model) != before and isinstance(model, keras.Model):
        _keras.forget_functions(model)
    if not _fits(getattr(model, "optimizer", None), model):
        logger.info(
            "the trainable weights of model %r are not those that its optimizer was built for: "
            "compile it again, with a new optimizer",
            model.name,
        )
        # Otherwise Keras's next fit would fail within its step and lose the weights.
        model.compiled = False
        model.train_function = _refusing(model)
    return [weight.path for weight in model.weights if _frozen.of(weight)]


def repeat_frozen(pairs: _keras.Pairs) -> None:
    """Marks in a copy of a model what `freeze` froze, so that the next `freeze` can unfreeze it."""
    for before, after in (*pairs.layers, *pairs.variables):
        if _frozen.of(before) is not None:
            _frozen.write(after, _frozen.of(before))


def _refusing(model: Any) -> Callable:
    """A train function that raises, for a fit that runs while you freeze; `compile` removes it."""

    def refuse(state, iterator):
        # Keras has emptied the variables by now, and its own record has the old order of the
        # weights.
        _keras.follow_state(_keras.state_groups(model), state)
        _keras.forget_state(model)
        raise runtime_error(
            "Freeze weights between two fits.",
            received=f"freeze({model.name!r}) within a fit, whose optimizer was built for "
            "other weights.",
            fix="End this fit, freeze, compile the model with a new optimizer, and fit again.",
        )

    return refuse


def _names(path: str, model: str) -> list[str]:
    """The paths of a weight and of all layers around it, with and without the model's name."""
    names = []
    for spelling in dict.fromkeys((path, path.removeprefix(f"{model}/"))):
        parts = spelling.split("/")
        names += ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return names


def _thaw(model: Any) -> None:
    for layer in _innermost(model):
        before = _frozen.of(layer)
        if before is not None:
            layer.trainable = True
            _frozen.write(layer, None)
            for weight in layer.weights:
                weight.trainable = weight.trainable and weight.path not in before
    paths = {weight.path for weight in model.weights}
    for layer in _keras.flatten_layers(model):
        for weight in filter(_frozen.of, _keras.own_variables(layer)):
            # A layer that you froze yourself in the meantime does not train, nor does a kernel
            # under LoRA.
            layer_path, _, name = weight.path.rpartition("/")
            under_lora = f"{layer_path}/lora_{name}_a" in paths
            weight.trainable = layer.trainable and not under_lora
            _frozen.write(weight, False)


def _freeze(model: Any, named: set[int]) -> None:
    weights = [weight for weight in model.weights if id(weight) in named and weight.trainable]
    for layer in _innermost(model):
        of_layer = layer.weights
        if of_layer and layer.trainable and all(id(weight) in named for weight in of_layer):
            # If Keras sets the layer's `trainable` to true again, these would train too.
            others = frozenset(weight.path for weight in of_layer if not weight.trainable)
            _frozen.write(layer, others)
            layer.trainable = False
    for weight in weights:
        weight.trainable = False
        _frozen.write(weight, True)


def _innermost(model: Any) -> list:
    """Layers without sublayers: setting `trainable` of others would set it for all sublayers."""
    layers = _keras.flatten_layers(model)
    return [layer for layer in layers if len(_keras.flatten_layers(layer)) == 1]


def _trained(model: Any) -> list[int]:
    return [id(weight) for weight in model.trainable_weights]


def _fits(optimizer: Any, model: Any) -> bool:
    """Whether the optimizer was built for the weights that are trainable now, or not yet."""
    trained = _keras.weights_of(getattr(optimizer, "inner_optimizer", optimizer))
    return not trained or {id(weight) for weight in trained} == set(_trained(model))


def _check_built(model: Any) -> None:
    if not _keras.is_built(model):
        raise value_error(
            "The weights must exist before you freeze them.",
            received=f"{model.name!r}, which is not built.",
            fix="Give it a keras.Input, or call model.build(input_shape).",
        )
