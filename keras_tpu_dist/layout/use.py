"""Weights that are used in another layout than they are stored in.

If a vocabulary is not divisible, its table is stored split by width. To compute logits from it in
this layout, all devices would have to add up whole logits, or gather the whole table. Instead, a
program begins by splitting the table by vocabulary, in parts of unequal sizes, which XLA pads. The
devices exchange their parts once per step in each direction.

A fused kernel of queries, keys and values is stored split along its input dimension. A layer that
separates the features gets the kernel split by heads. See `keras_tpu_dist.programs.fused`.

A table for positions or types is stored split by width and gathered for use. If a larger table is
split by width, the looked-up rows are gathered. So is the output of a kernel without a partner, if
other kernels follow. Such features are added to whole features. Otherwise everything after them
would be computed in parts, and every norm and kernel would gather its inputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, axis_size, entry_names, named_sharding, names_in
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.layout.rules import View
from keras_tpu_dist.layout.scales import scaled_kernels
from keras_tpu_dist.programs.answers import Answer, keep
from keras_tpu_dist.programs.between import sums as between
from keras_tpu_dist.programs.fused import fused_in
from keras_tpu_dist.programs.graph import Atom, graph_of
from keras_tpu_dist.programs.partitioner import constrained, in_compiled_code, mesh_here

# On a weight that a layer takes apart: the shape and the axes. On the layer: that it does so.
_apart = _keras.Mark("_keras_tpu_dist_apart")
# On a layer that computes features in parts and gathers them: their sizes.
_gathered = _keras.Mark("_keras_tpu_dist_gathered")

BY_HEADS = "a kernel of several kinds of features is used split by heads"
_AS_STORED = "a kernel of several kinds of features is used as it is stored"
GATHERED = "features that are computed in parts are gathered"


def note_uses(model: Any, placement: Placement) -> None:
    """Marks a model's layers, so that their calls use weights in the layouts that they need.

    Args:
        model: A model.
        placement: Its placement.
    """
    layers: set[str] = set()
    features: dict[str, tuple[int, ...]] = {}
    for variable in model.weights:
        decision = placement.decisions[id(variable)]
        _keras.set_use(variable, () if decision.view else decision.used)
        if decision.view or _apart.of(variable):
            _apart.write(variable, decision.view and (decision.view, decision.used))
        if decision.view:
            layers.add(decision.view.layer)
        if decision.gathered:
            features[decision.gathered.layer] = decision.gathered.sizes
    for layer in _keras.flatten_layers(model):
        if layer.path in layers:
            _apart.write(layer, True)
            _keras.route_calls(type(layer), "fused", _around)
        if layer.path in features or _gathered.of(layer):
            _gathered.write(layer, features.get(layer.path))
            _keras.route_calls(type(layer), "gather", _whole)
        _note_between(layer, placement)


def _note_between(layer: Any, placement: Placement) -> None:
    """Marks a layer that multiplies by weights, and its weights with their split dimensions."""
    matrices = [weight for weight in _keras.own_variables(layer) if len(weight.shape) > 1]
    noted = placement.between if matrices else None
    if noted is None and between.mark.of(layer) is None:
        return
    between.mark.write(layer, noted)
    for weight in matrices:
        decision = placement.decisions.get(id(weight))
        axes = () if noted is None or decision is None else decision.used or decision.axes
        names = set() if noted is None or decision is None or decision.view else set(noted.axes)
        dims = tuple(dim for dim, entry in enumerate(axes) if names & set(entry_names(entry)))
        between.split_dims.write(weight, dims)


def _pinned(variable: Any) -> None:
    """Constrains the gradient of a variable to its stored layout; otherwise its slots would be
    sent."""
    strategy, layout = _keras.active_strategy(), _keras.variable_layout(variable)
    # A copy of a variable may have no layout yet.
    if strategy is None or not isinstance(layout, NamedSharding):
        return
    if _keras.in_symbolic_scope() or _keras.in_update():
        return
    axes = tuple(layout.spec)

    def stored(value: Any) -> Any:
        traced = isinstance(value, jax.core.Tracer) and in_compiled_code()
        return _constrained(value, axes, strategy) if traced else value

    _keras.replace_in_scope(variable, stored)


def _laid(value: Any, axes: Axes) -> Any:
    """A weight's value as compiled code uses it; updates happen in the stored layout."""
    strategy = _keras.active_strategy()
    traced = isinstance(value, jax.core.Tracer) and in_compiled_code()
    if strategy is None or not traced or _keras.in_symbolic_scope() or _keras.in_update():
        return value
    return _constrained(value, axes, strategy)


def _constrained(value: Any, axes: Axes, strategy: Any) -> Any:
    mesh = mesh_here(strategy.mesh)
    # If one device computes a layer, its inputs are whole.
    manual, names = set(getattr(mesh, "manual_axes", ())), set(names_in(axes))
    if manual and not (names and names <= set(mesh.axis_names) - manual):
        return value
    return jax.lax.with_sharding_constraint(value, named_sharding(mesh, axes))


def _whole(stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a layer class of which some layers compute features in parts."""
    outputs = stock(*args, **kwargs)
    strategy, sizes = _keras.active_strategy(), _gathered.of(layer)
    if strategy is None or not sizes or not _keras.in_compiled_call():
        return outputs
    # If a table is called in reverse, its output is logits.
    if not isinstance(outputs, jax.core.Tracer) or outputs.shape[-len(sizes) :] != sizes:
        return outputs
    if getattr(mesh_here(strategy.mesh), "manual_axes", ()):
        return outputs
    keep("gather", layer, [Answer(layer.path, GATHERED, done=True)])
    features = range(outputs.ndim - len(sizes), outputs.ndim)
    return constrained(outputs, strategy.mesh, dict.fromkeys(features, ()))


def _around(stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a layer class of which some layers take weights apart."""
    strategy = _keras.active_strategy()
    if strategy is None or not _apart.of(layer) or not _keras.in_compiled_call():
        return stock(*args, **kwargs)
    by_heads = functools.partial(_by_heads, layer, strategy)
    return _keras.computed_otherwise(stock, layer, args, kwargs, by_heads)


def _by_heads(layer: Any, strategy: Any, jaxpr: Any, inputs: list) -> list | None:
    """Runs a layer's program with its weights reshaped."""
    weights = [v for v in layer.weights if _apart.of(v) is not None]
    # A reference is held, so that no other array gets their ids.
    arrays = [_keras.full_precision(variable) for variable in weights]
    uses: dict[int, tuple[Any, View, Axes]] = {
        id(array): (variable, *_apart.of(variable))
        for variable, array in zip(weights, arrays, strict=True)
    }

    def laid(weight: Atom, array: Any) -> Any:
        variable, view, axes = uses[id(weight.constant)]
        if view.shape != array.shape:
            return array
        # First in its stored layout, for the gradient: otherwise XLA 0.12 gathers more than it
        # must.
        stored = _keras.variable_layout(variable).spec[:1] if len(variable.shape) > 1 else ()
        return _constrained(_constrained(array, tuple(stored), strategy), axes, strategy)

    number = {id(variable): id(array) for variable, array in zip(weights, arrays, strict=True)}
    scales = {
        number[id(kernel)]: {number[id(scale)] for scale in beside}
        for kernel, *beside in scaled_kernels(layer)
        if all(id(member) in number for member in (kernel, *beside))
    }
    graph = graph_of(jaxpr)
    instead: dict[Any, Any] = {}
    for product in fused_in(graph, uses, scales):
        if product.bias is None or id(product.bias.constant) in uses:
            _, _, axes = uses[id(product.kernel.constant)]
            instead |= product.replaced(laid, axis_size(strategy.mesh, axes[-1]))
    words = BY_HEADS if instead else f"{_AS_STORED}: its call does not separate their features"
    keep("fused", layer, [Answer(layer.path, words, done=bool(instead))])
    return graph.evaluate(inputs, instead) if instead else None


_keras.serve_uses(_pinned, _laid)
