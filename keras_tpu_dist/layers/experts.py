"""Makes layers that compute all experts for every token compute only the chosen ones."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, entry_names
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.layers.place import find
from keras_tpu_dist.layout.flow import NotTraced, traced_call
from keras_tpu_dist.programs.experts.dense import chosen_sums, computed
from keras_tpu_dist.programs.experts.routed import Where
from keras_tpu_dist.programs.graph import graph_of

_mark = _keras.LayerMark("_keras_tpu_dist_experts", saved=True)


def route_experts(model: Any) -> list:
    """Makes the mixtures of experts in a model compute only the experts that tokens have chosen.

    Returns:
        The changed layers. Layers whose call does not show the choice of `top_k` are not changed.
    """
    found: list = []
    for layer in reversed(_keras.flatten_layers(model)):
        inside = _keras.flatten_layers(layer)
        if any(_mark.of(one) for one in inside if one is not layer) or not _banks(layer):
            continue
        try:
            sums = chosen_sums(graph_of(traced_call(layer)))
        except NotTraced:
            continue
        if sums:
            _write(layer, True)
            found.append(layer)
    return found


def is_routed(layer: Any) -> bool:
    """Whether a layer computes only the experts that tokens have chosen."""
    return bool(_mark.of(layer))


def _banks(layer: Any, count: int | None = None) -> list:
    """Weights of a layer and its sublayers that may be kernels of experts, of `count` experts."""
    weights = [w for w in layer.weights if len(w.shape) > 2 and w.shape[0] > 1]
    return [w for w in weights if count is None or w.shape[0] == count]


def _write(layer: Any, value: bool | None) -> None:
    _mark.write(layer, value)
    if value:
        _keras.route_calls(type(layer), _keras.Wrapper.CHOSEN, _around)
        _keras.install()  # for saved models


def _around(stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a layer class of which some layers compute only the chosen experts."""
    if not _mark.of(layer) or not _keras.in_compiled_call():
        return stock(*args, **kwargs)
    chosen = functools.partial(_chosen, layer)
    return _keras.computed_otherwise(stock, layer, args, kwargs, chosen)


def _chosen(layer: Any, jaxpr: Any, inputs: list) -> list | None:
    """Runs a layer's program, but only the chosen experts in it."""
    outputs = computed(jaxpr, inputs, lambda count: _where(layer, count))
    if outputs is None:
        shapes = [jax.numpy.shape(x) for x in inputs]
        log_once(
            f"layer {layer.path!r} computes all experts for every token: the choice of experts "
            f"cannot be seen in a call with arguments of the shapes {shapes}",
            logging.WARNING,
        )
    return outputs


def _where(layer: Any, count: int) -> Where:
    """Which mesh axes split the tokens and the experts of a layer."""
    split = find().split
    if split.mesh is None or split.mesh.size == 1:
        return Where()
    # The current layouts: a plan decides after a variable is created, and may change its layout.
    entries = {_first_axes(_keras.variable_layout(w)) for w in _banks(layer, count)}
    experts = entries.pop() if len(entries) == 1 else ()
    if count % axis_size(split.mesh, experts):
        experts = ()
    return Where(split.mesh, tuple(split.axes), experts)


def _first_axes(layout: Any) -> tuple[str, ...]:
    """The mesh axes that split the first dimension."""
    axes = layout.spec if isinstance(layout, NamedSharding) else getattr(layout, "axes", ())
    return entry_names((*axes, None)[0])


@_mark.restored_by
def _restored(layer: Any, value: Any) -> None:
    _write(layer, bool(value) or None)
