"""Traces the calls of layers by themselves, for the cuts through them (`programs.cuts`)."""

import weakref
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.layout.scales import scaled_kernels
from keras_tpu_dist.programs.cuts import Flow, flow_in
from keras_tpu_dist.programs.fused import taken_apart

# Sizes used for dimensions that a layer was built without: for the batch, and for all others.
_ROWS, _LENGTH = 8, 32


class NotTraced(Exception):
    """The call of a layer cannot be traced by itself."""


# The arguments of a call: by position, and by name.
Arguments = tuple[tuple, dict[str, Any]]


def flow_of(layer: Any, variables: list, called: Arguments | None = None) -> Flow:
    """Traces the call of a layer by itself, and analyses it.

    Args:
        layer: A built layer or model.
        variables: Its variables, in the order in which a `Cut` numbers them.
        called: Arguments of its call, with symbolic tensors. Defaults to the shapes it was built
            for.

    Returns:
        The flow. For equal layers, such as a model's blocks, it is computed once.

    Raises:
        NotTraced: If the shapes it was built for are not known, or its call fails.
    """
    try:
        given = _arguments(layer) if called is None else [_abstract_call(called)]
        form = _form(layer, variables, given)
        flow = _known_flows.get(form)
    except Exception as error:  # from custom methods, and from the recorded shapes
        raise NotTraced(_in_a_line(error)) from error
    if flow is None:
        if len(_known_flows) >= _MOST_KNOWN:
            _known_flows.clear()
        flow = _known_flows[form] = _read(layer, variables, given)
    if isinstance(flow, str):
        raise NotTraced(flow)
    return flow


def traced_call(layer: Any) -> Any:
    """Traces the call of a layer by itself, for the shapes it was built for.

    Args:
        layer: A built layer or model.

    Returns:
        The program, a `ClosedJaxpr` of its variables, the trained ones first, and its inputs.

    Raises:
        NotTraced: If the shapes it was built for are not known, or its call fails.
    """
    variables = _keras.variables_of(layer)
    try:
        given = _arguments(layer)
    except Exception as error:  # from the recorded shapes
        raise NotTraced(_in_a_line(error)) from error
    return _traced(layer, variables, given)


_known_flows: dict[Any, Flow | str] = {}
_MOST_KNOWN = 256


def _form(layer: Any, variables: list, given: list[Arguments]) -> Any:
    """A key that is equal for layers that differ only by names and values; of a graph, for itself.

    It does not include arrays and dictionaries on a layer, nor the variables of a closure. If
    layers only differ by these, they may share a flow; that costs speed, but never correctness.
    """
    shapes = tuple((tuple(v.shape), str(v.dtype)) for v in variables)
    inner = _keras.flatten_layers(layer)
    # No attribute has the connections of layers: a model with a graph is only equal to itself.
    if any(_keras.graph(part) is not None for part in inner):
        return (shapes, repr(given), weakref.ref(layer), tuple(map(id, variables)))
    return (shapes, repr(given), tuple((type(part), _attributes(part)) for part in inner))


_NAMES = ("name", "path", "parent_path")
# What calls and `fit` note on a model: a fit that plans again for its slots finds the same flow.
_NOTES = ("called", "eval_epoch_iterator", "initial_epoch", "jax_state_synced", "stop_training")
_FUNCTIONS = ("train_function", "test_function", "predict_function", "generate_function")
_LEFT_OUT = frozenset((*_NAMES, *_NOTES, *_FUNCTIONS))


def _attributes(layer: Any) -> str:
    """A layer's plain values and functions, without its names and what training notes on it.

    A config would take far longer, and a custom layer may have none.
    """
    attributes: dict[str, Any] = {"compute dtype": layer.compute_dtype}
    for name, value in vars(layer).items():
        if name.strip("_") in _LEFT_OUT:
            continue
        if _is_plain(value):
            attributes[name] = value
        elif callable(value) and not isinstance(value, (keras.Layer, keras.Variable)):
            attributes[name] = getattr(value, "__qualname__", type(value).__qualname__)
    return repr(sorted(attributes.items()))  # some are deleted, and set again


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, str))


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _read(layer: Any, variables: list, given: list[Arguments]) -> Flow | str:
    try:
        jaxpr = _traced(layer, variables, given)
    except NotTraced as error:
        return str(error)
    try:
        return _read_program(jaxpr, variables, layer)
    except Exception as error:  # an unknown program of another JAX must not stop a plan
        return _in_a_line(error)


def _read_program(program: Any, variables: list, layer: Any) -> Flow:
    number = {id(variable): n for n, variable in enumerate(variables)}
    quantized = [[number[id(weight)] for weight in group] for group in scaled_kernels(layer)]
    scales = {kernel: beside for kernel, *beside in quantized}
    program, views = taken_apart(program, len(variables), scales)
    flow = flow_in(program, len(variables))
    flow.views = views
    return flow


def _traced(layer: Any, variables: list, given: list[Arguments]) -> Any:
    trained = len(layer.trainable_variables)
    options = {"training": False} if _keras.call_takes(layer, "training") else {}

    def call(values: list, tensors: list) -> Any:
        filled = iter(tensors)
        arguments, named = jax.tree.map(
            lambda leaf: next(filled) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, form
        )
        weights = values[:trained], values[trained:]
        outputs, _ = layer.stateless_call(*weights, *arguments, **(options | named))
        return keras.tree.flatten(outputs)  # JAX does not know Keras's dictionaries

    weights = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
    reasons = ["what it was built for is not known"]
    for form in given:
        tensors = [t for t in jax.tree.leaves(form) if isinstance(t, jax.ShapeDtypeStruct)]
        try:
            # A strategy would constrain outputs of layers, and ask the plan for their layouts.
            # Within another scope, variables without a value do not get one.
            with _keras.without_distribution(), keras.StatelessScope(initialize_variables=False):
                return jax.make_jaxpr(call)(weights, tensors)
        except Exception as error:  # a custom call may raise anything
            reasons.append(_in_a_line(error))
    raise NotTraced(reasons[-1])


def _arguments(layer: Any) -> list[Arguments]:
    """Arguments for a layer's call with the shapes it was built for: floats or, second,
    integers."""
    if _keras.graph(layer) is not None and getattr(layer, "inputs", None):
        return [_abstract_call(((_keras.declared_inputs(layer),), {}))]
    config = layer.get_build_config() or {}
    floats = layer.compute_dtype or keras.config.floatx()
    if "shapes_dict" in config:
        shapes = {k.removesuffix("_shape"): s for k, s in config["shapes_dict"].items() if s}
        return [((), _of_shapes(shapes, dtype)) for dtype in (floats, "int32") if shapes]
    shape = config.get("input_shape")
    return [((_of_shapes(shape, dtype),), {}) for dtype in (floats, "int32") if shape]


def _abstract_call(called: Arguments) -> Arguments:
    return jax.tree.map(
        lambda x: _abstract(x.shape, x.dtype) if isinstance(x, keras.KerasTensor) else x, called
    )


def _of_shapes(shapes: Any, dtype: str) -> Any:
    if isinstance(shapes, dict):
        return {key: _of_shapes(shape, dtype) for key, shape in shapes.items()}
    if any(isinstance(size, (tuple, list)) for size in shapes):
        return [_of_shapes(shape, dtype) for shape in shapes]
    return _abstract(shapes, dtype)


def _abstract(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    unknown = (_ROWS, *(_LENGTH,) * len(shape))
    sizes = (n or m for n, m in zip(shape, unknown, strict=False))
    return jax.ShapeDtypeStruct(tuple(sizes), dtype)
