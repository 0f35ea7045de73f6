"""Private names for the structure of a model: layers, weights, the graph, masks, scopes."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src.backend.common import global_state, masking
from keras.src.backend.common.variables import AutocastScope

# Public replacement: none; `keras.Model` is what its constructor returns for functional models too.
from keras.src.models.functional import Functional as Functional

# Public replacement: none; a name that Keras made cannot be told from the user's.
from keras.src.utils.naming import to_snake_case as to_snake_case

from keras_tpu_dist._keras.active import active_distribution
from keras_tpu_dist._keras.seam import Replacement, declare


def flatten_layers(model: Any) -> list:
    """A model and all layers in it, parents first, every one once.

    Public replacement: a recursive `Model.layers` that also enters layers.

    Args:
        model: The model, or a layer. Metrics within it do not count as layers.
    """
    found = {id(layer): layer for layer in model._flatten_layers(include_self=True)}
    return [layer for layer in found.values() if not isinstance(layer, keras.metrics.Metric)]


def sublayers(layer: Any) -> list:
    """The layers a layer holds directly, in the order they were assigned.

    Public replacement: `Layer.layers`, which only models have.

    Args:
        layer: The layer, or a model.
    """
    return [inner for inner in layer._layers if isinstance(inner, keras.Layer)]


def own_variables(layer: Any) -> list:
    """The variables of a layer itself, without those of its sublayers.

    Public replacement: none; `Layer.variables` includes those of inner layers.

    Args:
        layer: The layer, or a model; before it is built, some may not exist yet.
    """
    found = [*layer._trainable_variables, *layer._non_trainable_variables]
    return [variable for variable in found if isinstance(variable, keras.Variable)]


def created_to_train(layer: Any) -> list:
    """A layer's own variables that were created to train, whether they do now or not.

    Public replacement: none; `Variable.trainable` says what they do now.

    Args:
        layer: The layer, or a model.
    """
    return [v for v in layer._trainable_variables if isinstance(v, keras.Variable)]


def weights_by_training(layer: Any) -> tuple[list, list]:
    """The trainable and the non-trainable variables of a layer, in one walk through its layers.

    Keras walks through all of them for each of the two properties.
    """
    kind = type(layer)
    if (
        kind.trainable_variables is not keras.Layer.trainable_variables
        or kind.non_trainable_variables is not keras.Layer.non_trainable_variables
    ):
        return list(layer.trainable_variables), list(layer.non_trainable_variables)
    variables = layer.variables
    if not layer.trainable:
        return [], variables
    return [v for v in variables if v.trainable], [v for v in variables if not v.trainable]


def variables_of(layer: Any) -> list:
    """The variables of a layer in the order of `stateless_call`: the trainable ones first."""
    trainable, others = weights_by_training(layer)
    return trainable + others


_TAKES = {"mask": "_call_has_mask_arg", "training": "_call_has_training_arg"}


def call_takes(layer: Any, argument: str) -> bool:
    """Whether a layer's call has an argument `"mask"` or `"training"`.

    Public replacement: none; if a layer is wrapped, the signature of `call` is hidden.

    Args:
        layer: The layer.
        argument: `"mask"` or `"training"`.
    """
    return getattr(layer, _TAKES[argument])


def stored_weight(layer: Any, name: str) -> Any:
    """A layer's weight as stored: the public `kernel` of a LoRA layer is a computed sum.

    Args:
        layer: The layer.
        name: The weight's public name, such as `"kernel"`.

    Returns:
        The variable, or `None` if the layer has none of that name.

    Public replacement: none.
    """
    for attribute in (f"_{name}", name):
        value = vars(layer).get(attribute)
        if isinstance(value, keras.Variable):
            return value
    return None


def declared_inputs(model: Any) -> Any:
    """The symbolic inputs of a model, in the structure that its call takes.

    Args:
        model: A functional model, or a Sequential one whose input is known.

    Returns:
        A `keras.KerasTensor` or a structure of them; a list with one tensor is returned as that
        tensor.

    Public replacement: none; `Model.inputs` is flat.
    """
    return _only(getattr(model, "_inputs_struct", model.inputs))


def declared_outputs(model: Any) -> Any:
    """The symbolic outputs of a model in their structure; public replacement: none, as for inputs.

    See `declared_inputs`.
    """
    return _only(getattr(model, "_outputs_struct", model.outputs))


def _only(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors


def producer(tensor: Any) -> Any:
    """The operation that returned a symbolic tensor, or `None`; public replacement: none.

    Args:
        tensor: A `keras.KerasTensor` that an operation or `keras.Input` made.
    """
    history = getattr(tensor, "_keras_history", None)
    return None if history is None else history.operation


def graph(model: Any) -> list[tuple[Any, Any, list]] | None:
    """A functional model's calls in order: `(node, operation, parent nodes)`; else `None`.

    Public replacement: none; `Functional.operations` gives no edges.

    Args:
        model: Any model or layer; a Sequential model counts as functional once it is built.
    """
    functional = getattr(model, "_functional", None) or model
    by_depth = getattr(functional, "_nodes_by_depth", None)
    if by_depth is None:
        return None
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [(node, node.operation, list(node.parent_nodes)) for node in nodes]


def call_arguments(node: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call in the graph, with symbolic tensors; public replacement: none.

    Args:
        node: A node from `graph`.
    """
    return node.arguments.args, node.arguments.kwargs


def route_attention(replacement: Callable[..., object]) -> None:
    """Routes every dot-product attention of Keras's JAX backend through `replacement`.

    `keras.ops.dot_product_attention` looks the function up in the backend's `nn` module at each
    call, so replacing it there reaches the op, its symbolic form, MultiHeadAttention,
    GroupedQueryAttention and libraries built on them.

    Args:
        replacement: Called as `replacement(stock, query, key, value, ...)`, where `stock` is
            Keras's own function, with all of its arguments.
    """
    declare(
        Replacement(
            "keras.src.backend.jax.nn",
            "dot_product_attention",
            replacement,
            why="on TPUs, Keras's kernel ignores the bias and the scale, and is not partitioned",
            hook="a way to register an attention implementation",
            parameters=("query", "key", "value", *ATTENTION_OPTIONS),
        )
    )


def route_grouped_attention(replacement: Callable[..., object]) -> None:
    """Routes the core of `GroupQueryAttention` (from query, key and value) through `replacement`.

    Args:
        replacement: Called as `replacement(stock, layer, ...)` with the method's own arguments, in
            which keys and values are repeated for every query head.
    """
    declare(
        Replacement(
            "keras.layers:GroupQueryAttention",
            "_compute_attention",
            replacement,
            why="Keras copies keys and values for every query head; flash kernels need no copies",
            hook="`ops.dot_product_attention` on grouped heads",
            parameters=("query", "key", "value"),
        )
    )


ATTENTION_OPTIONS = (
    "bias",
    "mask",
    "scale",
    "is_causal",
    "flash_attention",
    "attn_logits_soft_cap",
)


def full_precision(variable):
    """A variable's value in its own dtype, also inside a layer whose policy casts it.

    Gradients accumulated in float32 should not be rounded to bfloat16 on their way to a float32
    variable. Public replacement: none; `Variable.value` always casts inside a layer call.

    Args:
        variable: The variable.
    """
    with AutocastScope(None):
        return variable.value


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """A context without a distribution in this thread, so that Keras places and splits nothing."""
    active = active_distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(active)


def in_symbolic_scope() -> bool:
    """Whether Keras is computing shapes, with arbitrary batch sizes.

    Public replacement: a query beside `keras.SymbolicScope`.
    """
    return global_state.get_global_attribute("symbolic_scope") is not None


def in_update() -> bool:
    """Whether an optimizer updates weights.

    Public replacement: none; for a variable, a traced step looks the same.
    """
    entered = global_state.get_global_attribute("name_scope_stack") or ()
    return any(isinstance(scope.caller, keras.optimizers.Optimizer) for scope in entered)


def keras_mask(tensor: Any) -> Any:
    """The mask that a layer set on a tensor, or `None`; public replacement: none.

    Args:
        tensor: An array or a `keras.KerasTensor`.
    """
    return masking.get_keras_mask(tensor)


def with_keras_mask(tensor: Any, mask: Any) -> Any:
    """A tensor with a mask on it, if there is one; public replacement: none.

    Args:
        tensor: An array or a `keras.KerasTensor`; it is changed and returned.
        mask: The mask, or `None` to change nothing.
    """
    if mask is not None:
        masking.set_keras_mask(tensor, mask)
    return tensor


def owner_of_loss(loss: Any, layers: list) -> Any:
    """Returns the layer that added a loss, and makes it forget the loss, which will be added again.

    Keras identifies a layer's losses by their `id`, which another loss may get when this one is
    gone.

    Args:
        loss: The loss, in a scope that collects losses.
        layers: The layers that may have added it.

    Returns:
        The layer; the first of them if it is none of them, or `None` if there are none.

    Public replacement: a scope that learns which layer adds a loss.
    """
    owner = next((layer for layer in layers if id(loss) in layer._loss_ids), None)
    if owner is not None:
        owner._loss_ids.discard(id(loss))
    return owner or next(iter(layers), None)


def compile_arguments(model: Any) -> dict[str, Any]:
    """The arguments of a model's `compile`, by name; public replacement: none.

    `Model.get_compile_config` returns configs, from which custom functions cannot be restored.

    Args:
        model: A compiled model.
    """
    return dict(model._compile_config.config)


def optimizers_in(optimizer: Any) -> dict[str, Any]:
    """An optimizer and all those in it, by their places: `""`, and for example `"0"`, `"0/1"`.

    `LossScaleOptimizer` has one in it, a `MultiOptimizer` several, and one of your own may have any
    as attributes, also in lists and dicts. Those that hold others come before these.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def enter(one: Any, place: str) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        found[place] = one
        held = [inner for value in vars(one).values() for inner in _items(value)]
        held = [inner for inner in held if isinstance(inner, keras.optimizers.Optimizer)]
        for i, inner in enumerate({id(inner): inner for inner in held}.values()):
            enter(inner, f"{place}/{i}".lstrip("/"))

    if isinstance(optimizer, keras.optimizers.Optimizer):
        enter(optimizer, "")
    return found


def _items(value: Any) -> list:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def variables_of_optimizer(optimizer: Any) -> list:
    """The variables of an optimizer without those of optimizers in it; public replacement: none."""
    return list(optimizer._variables)


def optimizer_slots(model: Any) -> list[tuple[str, Any, Any]]:
    """The slots of a model's optimizer: name, variable, and the weight each belongs to.

    Optimizers store slots as lists in the order of their trainable variables. Public replacement:
    none; `add_variable_from_reference` knows the pair and does not store it.

    Args:
        model: The model; if it has no optimizer that is built, there are none.
    """
    # A MultiOptimizer has no slots; its optimizers have those of their own weights.
    every = optimizers_in(getattr(model, "optimizer", None)).values()
    return [slot for one in every for slot in slots_of_optimizer(one)]


def slots_of_optimizer(optimizer: Any) -> list[tuple[str, Any, Any]]:
    """The slots of one optimizer. See `optimizer_slots`."""
    weights = weights_of(optimizer)
    found = []
    for name, slots in vars(optimizer).items():
        # `_variables` lists all, the step count and the learning rate first.
        if name in ("_trainable_variables", "_variables") or not isinstance(slots, (list, tuple)):
            continue
        if len(slots) == len(weights):
            found.extend(
                (name.strip("_"), slot, weight) for slot, weight in zip(slots, weights, strict=True)
            )
    return [entry for entry in found if isinstance(entry[1], keras.Variable)]


def begun_anew(optimizer: Any) -> list[tuple[Any, Any]]:
    """The variables that an optimizer's `build` made, and what they would hold if it ran now.

    The optimizer itself does not change. Public replacement: none; `build` runs once.

    Raises:
        ValueError: If `build` makes other variables now.
    """
    fresh = fresh_optimizer(optimizer)
    for one in optimizers_in(fresh).values():
        one.built = False
    known = len(fresh._variables)
    fresh.build(list(weights_of(optimizer)))
    values = fresh._variables[known:]
    variables = optimizer._variables[len(optimizer._variables) - len(values) :]
    now, before = ([(v.shape, str(v.dtype)) for v in own] for own in (values, variables))
    if now != before:
        raise ValueError(f"{optimizer.name}.build makes {len(values)} variables of other shapes")
    return list(zip(variables, [value.value for value in values], strict=True))


def fresh_optimizer(optimizer: Any) -> Any:
    """A copy to build, whatever arguments its class takes: only lists and variables are copied.

    Args:
        optimizer: The optimizer.
    """
    # Not from its config: a custom optimizer may have none, or take other arguments.
    copied = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(v): copy.copy(v) for v in optimizer.variables}
    every = optimizers_in(optimizer).values()
    memo |= {id(weight): weight for one in every for weight in weights_of(one)}
    memo[id(optimizer)] = copied
    for value in vars(optimizer).values():
        if isinstance(value, keras.optimizers.Optimizer):
            memo[id(value)] = fresh_optimizer(value)
        elif isinstance(value, keras.Layer):
            memo[id(value)] = value
    vars(copied).update(copy.deepcopy(vars(optimizer), memo))
    return copied


def weights_of(optimizer: Any) -> list:
    """The weights that an optimizer was built for; public replacement: none.

    Args:
        optimizer: A Keras optimizer; before it is built it has none.
    """
    return getattr(optimizer, "_trainable_variables", None) or []
