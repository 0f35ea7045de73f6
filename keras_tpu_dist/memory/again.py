"""A layer's call whose activations are recomputed in the backward pass."""

import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import keras
from jax.ad_checkpoint import checkpoint_name

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.memory.policies import Policy, jax_policy
from keras_tpu_dist.programs.jaxprs import any_equation


@dataclass(frozen=True)
class _Around:
    """The layers around a layer that is being traced.

    Attributes:
        attention: Whether only attention is recomputed.
    """

    names: tuple[str, ...] = ()
    met: set[str] = field(default_factory=set)
    attention: bool = False


_NOTHING = _Around()
_around: contextvars.ContextVar[_Around] = contextvars.ContextVar("around", default=_NOTHING)


def computed_again(
    function: Callable[..., Any], layer: Any, policy: Policy, args: tuple, kwargs: dict
) -> Any:
    """`function(*args, **kwargs)`; the backward pass recomputes all values that are not kept.

    Args:
        function: A layer's method, bound to it.
        layer: The layer.
        policy: The values to keep.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    if policy == "attention":
        _keras.route_attention_layers(layer, _attention_again)
        with setting(_around, replace(_around.get(), attention=True)):
            return function(*args, **kwargs)
    names = () if isinstance(policy, str) else policy
    met: set[str] = set()
    for inner in _keras.flatten_layers(layer) if names else ():
        if inner.name in names and inner is not layer:
            _keras.route_calls(type(inner), "names", _named)
    call = _keras.PureCall(function, layer, args, kwargs)

    def block(inputs):
        # Attention in a layer that is recomputed as a whole need not be recomputed separately.
        outer = _around.get()
        inner = _Around(names, met) if names else replace(outer, attention=False)
        with setting(_around, inner):
            return call(inputs)

    results = jax.checkpoint(block, policy=jax_policy(policy))(call.inputs)
    _check_names(set(names) - met, layer, block, call.inputs)
    return call.finish(results)


def attention_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Attention as a function of arrays, recomputed if a layer around it asks for that.

    Args:
        function: A function of arrays that returns an array.
    """
    return jax.checkpoint(function) if _around.get().attention else function


def _attention_again(stock, layer, args, kwargs):
    """The core of an attention layer (from query, key and value), including its dropout."""
    if not _around.get().attention:
        return stock(*args, **kwargs)
    return computed_again(stock, layer, "full", args, kwargs)


def _named(stock, layer, args, kwargs):
    """The outputs of a layer whose name is kept, marked with that name."""
    outputs = stock(*args, **kwargs)
    around = _around.get()
    if layer.name not in around.names:
        return outputs
    around.met.add(layer.name)
    return jax.tree.map(functools.partial(_name, layer.name), outputs)


def _name(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return _keras.with_keras_mask(checkpoint_name(leaf, name), _keras.keras_mask(leaf))


def _check_names(missing: set[str], layer: Any, block: Callable, inputs: Any) -> None:
    """Raises a `ValueError` if a name is neither a layer's nor `checkpoint_name`'s in the code."""
    if not missing:
        return
    found: set[str] = set()

    def note(equation: Any) -> bool:
        if equation.primitive.name == "name":
            found.add(equation.params["name"])
        return False

    any_equation(jax.make_jaxpr(block)(inputs), note)
    wrong = sorted(missing - found)
    if not wrong:
        return
    inner = [sublayer for sublayer in _keras.flatten_layers(layer) if sublayer is not layer]
    layers = {one.name for one in inner if not isinstance(one, keras.layers.InputLayer)}
    choices = sorted(layers | found)
    raise value_error(
        "The names in a remat policy are names of inner layers, or are given by "
        "jax.ad_checkpoint.checkpoint_name.",
        received={"layer": layer.path or layer.name, "name": wrong[0]},
        fix=f"Use names among: {', '.join(choices)}.",
        name=wrong[0],
        choices=choices,
    )
