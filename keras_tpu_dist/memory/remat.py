"""remat: layers whose activations are computed again instead of kept."""

import contextvars
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.memory.again import computed_again
from keras_tpu_dist.memory.blocks import blocks, chosen_by_patterns, layers_by_path
from keras_tpu_dist.memory.policies import Policy, checked_policy
from keras_tpu_dist.partitioner import in_compiled_code

mark = _keras.LayerMark("_keras_tpu_dist_remat", saved=True)
# The layers whose call is being traced, by their ids: a call of the base class's method is theirs.
_tracing: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "tracing", default=frozenset()
)


def remat(layer: Any, policy: Any = "full") -> Any:
    """Computes a layer's activations again for the gradients, instead of keeping them until then.

    Less memory for more computation: of each call only the layer's inputs are kept, and what
    `policy` names, and the backward pass computes the rest anew. Outputs, gradients, dropout,
    moving statistics, masks, losses and metrics are those of the layer without it. It pays where
    much is computed between a layer's inputs and its outputs: for the repeated blocks of a model,
    not for a whole model, of which all activations would be computed again at once.

    It acts in compiled code that is differentiated, with a `TPUStrategy` or without, before and
    after the layer is built; a model that has trained already is to be compiled again. Clones keep
    it, and so do saved models, which load without this package, too; with it, load them after the
    first strategy or `remat` of the process.

    Args:
        layer: A layer or model, computed again as one.
        policy: What is kept: `"full"`, nothing; `"dots"`, products with weights; `"attention"`,
            all but what attention computes of query, key and value; a list of names, the outputs
            of the layers within of that name, and what `jax.ad_checkpoint.checkpoint_name` calls
            so; `None` takes it back. Or a mapping from patterns of paths to any of these, for
            layers within: `{"block_*": "full"}`.

    Returns:
        The layer, so that the call reads inline in a Sequential or functional model.

    Raises:
        ValueError: If `layer` is no layer, there is no such policy, or a pattern matches no layer.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> def block(width):
    ...     layers = [keras.layers.Dense(4 * width, "gelu"), keras.layers.Dense(width)]
    ...     return ktd.remat(keras.Sequential(layers), "dots")
    >>> model = keras.Sequential([keras.Input((8,)), block(8), block(8), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> model.summary(print_fn=lambda text: None)  # as any model
    """
    if not isinstance(layer, keras.Layer):
        raise ValueError(
            message(
                "Only layers and models can be computed again.",
                received={"layer": layer},
                fix="Pass a keras.Layer; for a function of arrays there is jax.checkpoint.",
            )
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
    """What a strategy says of the layers of its models.

    Args:
        remat: `None`; a policy for the blocks of each model; or a mapping from patterns of paths
            to policies, `None` among them for layers that are left alone.

    Raises:
        ValueError: If there is no such policy.
    """

    def __init__(self, remat: Any = None):
        self._rules = _checked_rules(remat) if isinstance(remat, Mapping) else None
        self._of_blocks = None
        if remat is not None and self._rules is None:
            self._of_blocks = checked_policy(remat)
        self._chosen: weakref.WeakKeyDictionary[Any, Policy] = weakref.WeakKeyDictionary()
        self._unused = set(self._rules or ())

    def choose(self, model: Any) -> None:
        """Decides for the layers of a model; before its step is traced.

        Args:
            model: A built model.

        Raises:
            ValueError: If it is one to train, and a pattern matches no layer of it, nor of a model
                before.
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
            layer: A layer of a model that was decided for.
        """
        return self._chosen.get(layer)


def _checked_rules(rules: Mapping) -> dict[str, Any]:
    wrong = [pattern for pattern in rules if not isinstance(pattern, str)]
    if wrong or not rules:
        raise ValueError(
            message(
                "Rules for remat map patterns of layers' paths to policies.",
                received={"remat": dict(rules)},
                fix='Write for example {"block_*": "full"}.',
            )
        )
    return {
        pattern: None if policy is None else checked_policy(policy)
        for pattern, policy in rules.items()
    }


def _write(layer: Any, policy: Policy | None) -> None:
    mark.write(layer, policy)
    if policy is not None:
        _prepare(layer, policy)


def _prepare(layer: Any, policy: Policy) -> None:
    _keras.route_calls(type(layer), _around)
    _keras.install()  # for saved models, and for attention in layers of the user's own


def _around(stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """A call of a layer of a class of which some are computed again."""
    policy = policy_of(layer)
    if policy is None and (strategy := _keras.active_strategy()) is not None:
        policy = strategy.remat.of(layer)
    running = _tracing.get()
    if (
        policy is None
        or id(layer) in running
        # Where Keras asks for shapes there is nothing to keep, and where each operation runs as it
        # is met, values are to be seen.
        or _keras.in_symbolic_scope()
        or not in_compiled_code()
    ):
        return stock(*args, **kwargs)
    with setting(_tracing, running | {id(layer)}):
        return computed_again(stock, layer, policy, args, kwargs)


def _no_such_layer(pattern: str, model: Any) -> str:
    kinds = keras.layers.InputLayer
    paths = [path for path, layer in layers_by_path(model) if not isinstance(layer, kinds)]
    segments = pattern.count("/") + 1
    ends = sorted({"/".join(path.split("/")[-segments:]) for path in paths})
    unbuilt = "" if _keras.is_built(model) else " Layers that build() makes are known after it."
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
        f"remat={policy!r}: {len(paths)} layer(s) of model {model.name!r} are computed again, from "
        f"{paths[0]!r} to {paths[-1]!r}; to choose others, give patterns of paths"
    )


@mark.restored_by
def _restored(layer: Any, policy: Any) -> None:
    _write(layer, checked_policy(policy))
