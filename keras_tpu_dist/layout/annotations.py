"""split and replicate: layouts written on the layers themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, named_sharding
from keras_tpu_dist.common.errors import did_you_mean, message
from keras_tpu_dist.layout.activations import Activations
from keras_tpu_dist.layout.rules import LayoutRules
from keras_tpu_dist.partitioner import in_compiled_code

mark = _keras.LayerMark("_keras_tpu_dist_annotation")


@dataclass(frozen=True)
class Annotation:
    """What a user wrote on a layer.

    Attributes:
        weights: Rules for the weights of the layer and of the layers in it; `None` for
            `replicate`, which holds for all of them.
        output: Axes of the output, a dict or list of such for a layer that returns a structure,
            or `None`.
        logical_device: The logical device that computes the layer, or `None` for all.
    """

    weights: LayoutRules | None
    output: Any = None
    logical_device: int | None = None


def split(layer: Any, output: Any = None, **weights: Sequence | None) -> Any:
    """Says how a layer's weights and output are split over the mesh.

    Works before and after the layer is built; it replaces an earlier `split` or `replicate` of the
    layer. On a layer that holds layers (a nested model, `Bidirectional`,
    `TimeDistributed`, an attention layer) it speaks of all weights of that name in it;
    `**{"query/kernel": axes}` speaks of some. An annotation on an inner layer wins over one around
    it, a layout given to the variable over both, and an annotation over rules and plans.
    `keras.models.clone_model` and `from_config` keep it; a saved file does not.

    Args:
        layer: A layer or model.
        output: One entry per dimension, as in `LayoutRules`. For a layer that returns a tuple, a
            dict or states: such axes for each tensor with enough dimensions (the others are left
            alone), or a list or dict of axes for each one by position or key (`None`: leave it).
        **weights: From the name of a weight to its axes.

    Returns:
        The layer, so that the call reads inline in a Sequential or functional model.

    Raises:
        ValueError: If nothing is given, axes are malformed, or a built layer has no such weight.

    Example:

    >>> import keras
    >>> dense = split(keras.layers.Dense(16), kernel=(None, "model"), bias=("model",))
    >>> annotation_of(dense).weights.rules
    (('kernel', (None, 'model')), ('bias', ('model',)))
    """
    if output is None and not weights:
        raise ValueError(
            message(
                "split needs the layout of a weight or of the output.",
                received={"layer": getattr(layer, "name", layer)},
                fix='Write for example split(layer, kernel=(None, "model")), or replicate(layer).',
            )
        )
    rules = LayoutRules([(name, () if axes is None else axes) for name, axes in weights.items()])
    for axes in layouts_in(output):
        LayoutRules([("output", axes)])
    _check_names(layer, rules)
    return annotate(layer, Annotation(rules, output, _logical_device(layer)))


def replicate(layer: Any) -> Any:
    """Says that all weights of a layer, and of the layers in it, are whole on every device.

    Args:
        layer: A layer or model.

    Returns:
        The layer.

    Example:

    >>> import keras
    >>> router = replicate(keras.layers.Dense(8))
    >>> annotation_of(router)
    Annotation(weights=None, output=None, logical_device=None)
    """
    return annotate(layer, Annotation(None, None, _logical_device(layer)))


def annotation_of(layer: Any) -> Annotation | None:
    """The annotation of a layer, or `None`.

    Args:
        layer: A layer or model.
    """
    return mark.of(layer)


@dataclass(frozen=True)
class Annotated:
    """All annotations of one model.

    Attributes:
        weights: From the id of a variable to `(axes, reason)`.
        outputs: From a layer's path to the layout of its output.
        unknown: `(layer path, weight name)` of what no weight of the built layer is called.
        logical_devices: From a layer's path to the logical device that computes it.
        assigned: From the id of a variable to the logical device that computes its layer.
    """

    weights: dict[int, tuple[tuple, str]]
    outputs: dict[str, Any]
    unknown: tuple[tuple[str, str], ...]
    logical_devices: dict[str, int]
    assigned: dict[int, int]


def annotated(model: Any) -> Annotated:
    """Collects the annotations in a model.

    Args:
        model: A model, built or not.

    Returns:
        What they say; inner layers win over those around them.
    """
    weights: dict[int, tuple[tuple, str]] = {}
    outputs: dict[str, Any] = {}
    unknown = []
    devices: dict[str, int] = {}
    assigned: dict[int, int] = {}
    for layer in _keras.flatten_layers(model):  # parents first
        annotation = annotation_of(layer)
        if annotation is None:
            continue
        if annotation.output is not None and layer.path:
            outputs[layer.path] = annotation.output
        path = layer.path or layer.name
        within = any(path.startswith(f"{outer}/") for outer in devices)
        if annotation.logical_device is not None and not within:
            devices[path] = annotation.logical_device
            assigned |= {id(each): annotation.logical_device for each in layer.variables}
        used: set[int] = set()
        for variable in layer.variables:
            if annotation.weights is None:
                weights[id(variable)] = ((), f"replicate() on layer {layer.path!r}")
                continue
            index = annotation.weights.match(variable.path)
            if index is not None:
                used.add(index)
                name, axes = annotation.weights.rules[index]
                weights[id(variable)] = (axes, f"split({name}=...) on layer {layer.path!r}")
        if layer.built and annotation.weights is not None:
            names = [name for name, _ in annotation.weights.rules]
            unknown += [(layer.path, n) for i, n in enumerate(names) if i not in used]
    return Annotated(weights, outputs, tuple(unknown), devices, assigned)


def layouts_in(output: Any) -> list:
    """The axes in what an annotation says of an output, each for one tensor.

    Args:
        output: Axes, a list or dict of such, or `None`.
    """
    if isinstance(output, dict):
        return [axes for inner in output.values() for axes in layouts_in(inner)]
    if isinstance(output, list):
        return [axes for inner in output for axes in layouts_in(inner)]
    return [] if output is None else [output]


def place_output(outputs: Any, layout: Any, mesh: Any) -> Any:
    """Lays a layer's outputs, whatever their structure, as an annotation or rule says.

    Args:
        outputs: What the layer returned.
        layout: A `NamedSharding`, `Activations` or axes for each tensor, or a list or dict of
            those.
        mesh: The strategy's mesh.

    Returns:
        The outputs, laid out.

    Raises:
        ValueError: If a list or dict of layouts does not fit what the layer returned.
    """
    if isinstance(layout, dict) and isinstance(outputs, dict):
        _check_structure(set(layout) <= set(outputs), outputs, layout)
        return {k: place_output(v, layout.get(k), mesh) for k, v in outputs.items()}
    if isinstance(layout, list) and isinstance(outputs, (list, tuple)):
        _check_structure(len(layout) <= len(outputs), outputs, layout)
        padded = [*layout, *[None] * (len(outputs) - len(layout))]
        placed = [place_output(o, e, mesh) for o, e in zip(outputs, padded)]
        return type(outputs)(*placed) if hasattr(outputs, "_fields") else type(outputs)(placed)
    _check_structure(not isinstance(layout, (dict, list)), outputs, layout)
    if layout is None:
        return outputs
    if isinstance(layout, Activations):
        return keras.tree.map_structure(
            lambda leaf: _place_activations(leaf, layout, mesh), outputs
        )
    if not isinstance(layout, NamedSharding):
        layout = named_sharding(mesh, tuple(layout))
    sharding: NamedSharding = layout
    return keras.tree.map_structure(lambda leaf: _place_leaf(leaf, sharding), outputs)


def _place_activations(leaf, layout: Activations, mesh):
    if not isinstance(leaf, jax.Array) or not leaf.ndim:
        return leaf
    return _place_leaf(leaf, layout.sharding(leaf.shape, mesh))


def _place_leaf(leaf, sharding: NamedSharding):
    if not isinstance(leaf, jax.Array) or leaf.ndim < len(sharding.spec):
        return leaf
    placed = _placed_leaf(leaf, sharding)
    # A nested model's output has its mask already, which Keras keeps as the array's attribute.
    return placed if placed is leaf else _keras.with_keras_mask(placed, _keras.keras_mask(leaf))


def _placed_leaf(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if in_compiled_code():
        # Inside shard_map there is no whole array left to lay out.
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return leaf if manual else jax.lax.with_sharding_constraint(leaf, sharding)
    if isinstance(leaf, jax.core.Tracer):
        return leaf  # run_eagerly: the batch is whole, see BatchPlacer.place_eagerly
    mesh: Any = sharding.mesh
    fixed = (None if e is PartitionSpec.UNCONSTRAINED else e for e in sharding.spec)
    sharding = named_sharding(mesh, tuple(fixed))
    uneven = any(n % axis_size(mesh, entry) for n, entry in zip(leaf.shape, sharding.spec))
    # Only a compiled program can hold an uneven array.
    return leaf if uneven else jax.device_put(leaf, sharding)


def _check_structure(fits: bool, outputs, layout) -> None:
    if not fits:
        raise ValueError(
            message(
                "A list or dict of output layouts must fit what the layer returns.",
                received={
                    "layouts": layout,
                    "outputs": keras.tree.map_structure(lambda t: getattr(t, "shape", t), outputs),
                },
                fix="Give one entry per position or key, or one layout for all tensors.",
            )
        )


@mark.restored_by
def annotate(layer: Any, annotation: Annotation) -> Any:
    """Writes an annotation on a layer, in the place of the one it has; returns the layer.

    Args:
        layer: A layer or model.
        annotation: The whole annotation; nothing of an earlier one stays.

    Raises:
        ValueError: If `layer` is no Keras layer.
    """
    if not isinstance(layer, keras.Layer):
        raise ValueError(
            message(
                "Only layers and models can be annotated.",
                received={"layer": layer},
                fix="Pass a keras.Layer.",
            )
        )
    mark.write(layer, annotation)
    return layer


def _logical_device(layer: Any) -> int | None:
    before = annotation_of(layer)
    return None if before is None else before.logical_device


def _check_names(layer, rules: LayoutRules) -> None:
    if not getattr(layer, "built", False) or not layer.variables:
        return
    paths = [variable.path for variable in layer.variables]
    for index, (name, _) in enumerate(rules.rules):
        if not any(index in rules.matches(path) for path in paths):
            names = sorted({variable.name for variable in layer.variables})
            raise ValueError(
                message(
                    "split speaks of weights by their name.",
                    received={"layer": layer.path, "weight": name, "its weights": names},
                    fix=f"Use one of: {', '.join(names)}.{did_you_mean(name, names)}",
                )
            )
