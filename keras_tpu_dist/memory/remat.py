"""remat: layers whose activations are recomputed in the backward pass."""

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.memory.again import computed_again
from keras_tpu_dist.memory.blocks import blocks, chosen_by_patterns, layers_by_path
from keras_tpu_dist.memory.policies import WORDS, Policy, checked_policy
from keras_tpu_dist.programs.answers import Answer, forget, keep

mark = _keras.LayerMark("_keras_tpu_dist_remat", saved=True)


def remat(layer: Any, policy: Any = "full") -> Any:
    """Recomputes a layer's activations in the backward pass, instead of keeping them.

    This trades computation for memory: of every call only the layer's inputs are kept, and what
    `policy` names. The backward pass recomputes the rest. Outputs, gradients, dropout, moving
    statistics, masks, losses and metrics do not change. It pays if a layer computes much between
    its inputs and its outputs. So use it for the repeated blocks of a model, and not for a whole
    model: that would recompute all its activations at once.

    It takes effect in compiled code that is differentiated, with or without a `TPUStrategy`. You
    can call it before or after the layer is built; if the model has already trained, compile it
    again. Clones and saved models keep the policy. Saved models also load without this package,
    then without the policy. If you use this package, create a `TPUStrategy` (or call `remat`)
    before loading, so that the policy is restored.

    Args:
        layer: A layer or model, recomputed as a whole.
        policy: The values to keep. `"full"`: none. `"dots"`: products with weights. `"attention"`:
            all values except those that attention computes from query, key and value. A list of
            names: the outputs of the inner layers with these names, and values named so by
            `jax.ad_checkpoint.checkpoint_name`. `None` removes the policy. You can also give a
            mapping from patterns of paths to any of these, for inner layers: `{"block_*": "full"}`.

    Returns:
        The layer, so that you can write the call inline in a Sequential or functional model.

    Raises:
        ValueError: If `layer` is not a layer, the policy does not exist, or a pattern matches no
            layer.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> def block(width):
    ...     layers = [keras.layers.Dense(4 * width, "gelu"), keras.layers.Dense(width)]
    ...     return ktd.remat(keras.Sequential(layers), "dots")
    >>> model = keras.Sequential([keras.Input((8,)), block(8), block(8), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> model.summary(print_fn=lambda text: None)  # works as for any model
    """
    if not isinstance(layer, keras.Layer):
        raise value_error(
            "Only layers and models can be recomputed.",
            received={"layer": layer},
            fix="Pass a keras.Layer; for a function of arrays, use jax.checkpoint.",
        )
    if isinstance(policy, Mapping):
        checked = _checked_rules(policy)
        found, unused = chosen_by_patterns(layer, checked)
        if unused:
            raise ValueError(_no_such_layer(sorted(unused)[0], layer))
        for _, inner, own in found:
            _write(inner, own)
    else:
        _write(layer, None if policy is None else checked_policy(policy))
    return layer


def policy_of(layer: Any) -> Policy | None:
    """The policy that `remat` gave a layer, or `None`.

    Args:
        layer: A layer or model.
    """
    return mark.of(layer)


class LayerPolicies:
    """The remat policies of a strategy for the layers of its models.

    Args:
        remat: `None`; a policy for the repeated blocks of every model; or a mapping from patterns
            of paths to policies, where `None` means that a layer is not recomputed.
    """

    def __init__(self, remat: Any = None):
        self._rules = _checked_rules(remat) if isinstance(remat, Mapping) else None
        self._of_blocks = None
        if remat is not None and self._rules is None:
            self._of_blocks = checked_policy(remat)
        self._chosen: weakref.WeakKeyDictionary[Any, Policy] = weakref.WeakKeyDictionary()
        self._unused = set(self._rules or ())

    def choose(self, model: Any) -> None:
        """Chooses the policies for the layers of a model, before its step is traced.

        Args:
            model: A built model.
        """
        if self._rules is not None:
            found, unused = chosen_by_patterns(model, self._rules)
            self._unused &= unused
            if self._unused:
                words = _no_such_layer(sorted(self._unused)[0], model)
                if getattr(model, "optimizer", None) is not None:
                    raise ValueError(words)
                log_once(words, logging.WARNING)  # a part of a model, run on its own
        elif self._of_blocks is not None:
            found = [(path, layer, self._of_blocks) for path, layer in blocks(model)]
            log_once(_what_was_found(model, self._of_blocks, [path for path, _, _ in found]))
        else:
            return
        for _, layer, policy in found:
            if policy is not None:
                self._chosen[layer] = policy
                _prepare(layer, policy)

    def of(self, layer: Any) -> Policy | None:
        """The policy for a layer, or `None`.

        Args:
            layer: A layer of a model that `choose` has seen.
        """
        return self._chosen.get(layer)


def _checked_rules(rules: Mapping) -> dict[str, Any]:
    wrong = [pattern for pattern in rules if not isinstance(pattern, str)]
    if wrong or not rules:
        raise value_error(
            "Rules for remat map patterns of layer paths to policies.",
            received={"remat": dict(rules)},
            fix='Write for example {"block_*": "full"}.',
        )
    return {
        pattern: None if policy is None else checked_policy(policy)
        for pattern, policy in rules.items()
    }


def _write(layer: Any, policy: Policy | None) -> None:
    mark.write(layer, policy)
    forget("remat", layer)
    if policy is not None:
        _prepare(layer, policy)


def _prepare(layer: Any, policy: Policy) -> None:
    words = WORDS.get(policy) if isinstance(policy, str) else f"the outputs of {', '.join(policy)}"
    kept = f"recomputed in the backward pass ({policy!r} keeps {words})"
    keep("remat", layer, [Answer("", kept, done=True)])
    _keras.route_calls(type(layer), "remat", _around)
    _keras.install()  # for saved models, and for attention in custom layers


def _around(stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a layer class of which some layers are recomputed."""
    policy = policy_of(layer)
    if policy is None and (strategy := _keras.active_strategy()) is not None:
        policy = strategy.remat.of(layer)
    if policy is None or not _keras.in_compiled_call():
        return stock(*args, **kwargs)
    return computed_again(stock, layer, policy, args, kwargs)


def _no_such_layer(pattern: str, model: Any) -> str:
    kinds = keras.layers.InputLayer
    paths = [path for path, layer in layers_by_path(model) if not isinstance(layer, kinds)]
    segments = pattern.count("/") + 1
    ends = sorted({"/".join(path.split("/")[-segments:]) for path in paths})
    unbuilt = "" if _keras.is_built(model) else " Layers that build() creates are not known yet."
    return message(
        "A pattern of remat must match the path of a layer.",
        received={"pattern": pattern, "model": model.name, "layers": len(paths)},
        fix=f"Use the names of layers, such as {ends[0]!r}, joined by '/'.{unbuilt}",
        name=pattern.replace("*", ""),
        choices=ends,
    )


def _what_was_found(model: Any, policy: Policy, paths: list[str]) -> str:
    if not paths:
        return f"remat={policy!r}: model {model.name!r} has no layer with weights"
    return (
        f"remat={policy!r}: {len(paths)} layer(s) of model {model.name!r} are recomputed, from "
        f"{paths[0]!r} to {paths[-1]!r}; to choose others, give patterns of paths"
    )


@mark.restored_by
def _restored(layer: Any, policy: Any) -> None:
    _write(layer, checked_policy(policy))
