"""split and replicate: layouts that you set on the layers themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, named_sharding
from keras_tpu_dist.common.errors import did_you_mean, value_error
from keras_tpu_dist.layout.activations import Activations
from keras_tpu_dist.layout.rules import LayoutRules
from keras_tpu_dist.programs.partitioner import in_compiled_code

mark = _keras.LayerMark("_keras_tpu_dist_annotation")


@dataclass(frozen=True)
class Annotation:
    """The layout that a user set on a layer.

    Attributes:
        weights: Rules for the weights of the layer and of its sublayers; `None` for `replicate`,
            which applies to all of them.
        output: Axes of the output, a dict or list of axes if the layer returns a structure, or
            `None`.
        logical_device: The logical device that computes the layer, or `None` for all.
    """

    weights: LayoutRules | None
    output: Any = None
    logical_device: int | None = None


def split(layer: Any, output: Any = None, **weights: Sequence | None) -> Any:
    """Sets how a layer's weights and output are split over the mesh.

    You can call it before or after the layer is built. It replaces an earlier `split` or
    `replicate` of the layer. For a layer with sublayers (a nested model, `Bidirectional`,
    `TimeDistributed`, an attention layer) it applies to all weights of that name in them; write
    `**{"query/kernel": axes}` to select some. An annotation on an inner layer takes precedence over
    one on an outer layer, a layout of the variable itself over both, and any annotation over rules
    and plans. `keras.models.clone_model` and `from_config` copy annotations; a saved file does not
    contain them.

    Args:
        layer: A layer or model.
        output: One entry per dimension, as in `LayoutRules`. For a layer that returns a tuple, a
            dict or states: axes for every tensor with enough dimensions (the others are not
            changed), or a list or dict of axes by position or key (`None`: do not change it).
        **weights: The axes of every weight, by its name.

    Returns:
        The layer, so that you can write the call inline in a Sequential or functional model.

    Raises:
        ValueError: If nothing is given, axes are malformed, or a built layer has no such weight.

    Example:

    >>> import keras
    >>> dense = split(keras.layers.Dense(16), kernel=(None, "model"), bias=("model",))
    >>> annotation_of(dense).weights.rules
    (('kernel', (None, 'model')), ('bias', ('model',)))
    """
    if output is None and not weights:
        raise value_error(
            "split needs the layout of a weight or of the output.",
            received={"layer": getattr(layer, "name", layer)},
            fix='Write for example split(layer, kernel=(None, "model")), or replicate(layer).',
        )
    rules = LayoutRules([(name, () if axes is None else axes) for name, axes in weights.items()])
    for axes in layouts_in(output):
        LayoutRules([("output", axes)])
    _check_names(layer, rules)
    return annotate(layer, Annotation(rules, output, _logical_device(layer)))


def replicate(layer: Any) -> Any:
    """Replicates all weights of a layer and of its sublayers on every device.

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
        unknown: `(layer path, weight name)` of annotations whose name matches no weight of the
            layer.
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
        The annotations; inner layers take precedence over outer ones.
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
            assigned |= {id(weight): annotation.logical_device for weight in layer.variables}
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
    """The axes in the annotation of an output, one entry for every tensor.

    Args:
        output: Axes, a list or dict of axes, or `None`.
    """
    if isinstance(output, dict):
        return [axes for inner in output.values() for axes in layouts_in(inner)]
    if isinstance(output, list):
        return [axes for inner in output for axes in layouts_in(inner)]
    return [] if output is None else [output]


def place_output(outputs: Any, layout: Any, mesh: Any) -> Any:
    """Applies an annotation or rule to a layer's outputs, whatever their structure.

    Args:
        outputs: The outputs of the layer.
        layout: A `NamedSharding`, `Activations` or axes for all tensors, or a list or dict of
            those.
        mesh: The strategy's mesh.
    """
    if isinstance(layout, dict) and isinstance(outputs, dict):
        _check_structure(set(layout) <= set(outputs), outputs, layout)
        return {k: place_output(v, layout.get(k), mesh) for k, v in outputs.items()}
    if isinstance(layout, list) and isinstance(outputs, (list, tuple)):
        _check_structure(len(layout) <= len(outputs), outputs, layout)
        padded = [*layout, *[None] * (len(outputs) - len(layout))]
        placed = [place_output(o, e, mesh) for o, e in zip(outputs, padded, strict=True)]
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
    # A nested model's output already has its mask, which Keras stores as an attribute of the array.
    return placed if placed is leaf else _keras.with_keras_mask(placed, _keras.keras_mask(leaf))


def _placed_leaf(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if in_compiled_code():
        # Inside a shard_map there is no global array to constrain.
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return leaf if manual else jax.lax.with_sharding_constraint(leaf, sharding)
    if isinstance(leaf, jax.core.Tracer):
        return leaf  # run_eagerly: the batch is whole, see BatchPlacer.place_eagerly
    mesh: Any = sharding.mesh
    fixed = (None if e is PartitionSpec.UNCONSTRAINED else e for e in sharding.spec)
    sharding = named_sharding(mesh, tuple(fixed))
    # A spec ends with the last dimension that it splits.
    pairs = zip(leaf.shape, sharding.spec, strict=False)
    uneven = any(n % axis_size(mesh, entry) for n, entry in pairs)
    # Only a compiled program can hold an uneven array.
    return leaf if uneven else jax.device_put(leaf, sharding)


def _check_structure(fits: bool, outputs, layout) -> None:
    if not fits:
        raise value_error(
            "A list or dict of output layouts must fit what the layer returns.",
            received={
                "layouts": layout,
                "outputs": keras.tree.map_structure(lambda t: getattr(t, "shape", t), outputs),
            },
            fix="Give one entry per position or key, or one layout for all tensors.",
        )


@mark.restored_by
def annotate(layer: Any, annotation: Annotation) -> Any:
    """Writes an annotation on a layer, replaces an earlier one, and returns the layer.

    Args:
        layer: A layer or model.
        annotation: The whole annotation; nothing of an earlier one is kept.
    """
    if not isinstance(layer, keras.Layer):
        raise value_error(
            "Only layers and models can be annotated.",
            received={"layer": layer},
            fix="Pass a keras.Layer.",
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
            raise value_error(
                "split selects weights by their name.",
                received={"layer": layer.path, "weight": name, "its weights": names},
                fix=f"Use one of: {', '.join(names)}.{did_you_mean(name, names)}",
            )
