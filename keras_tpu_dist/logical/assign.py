"""Layers and functions that one logical device of every replica computes for the others."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
from jax.sharding import PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import names_in
from keras_tpu_dist.common.checks import NaturalInt, checked_arguments
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.layout.annotations import Annotation, annotate, annotation_of, mark
from keras_tpu_dist.layout.rules import LayoutRules
from keras_tpu_dist.programs.partitioner import ONE_DEVICE, in_compiled_code, rows_are_whole

# The logical device whose branch is being traced, and the one that new layers are assigned to.
_tracing: contextvars.ContextVar[int | None] = contextvars.ContextVar("tracing", default=None)
_creating: contextvars.ContextVar[int | None] = contextvars.ContextVar("creating", default=None)


@checked_arguments
def assign(layer: Any, logical_device: NaturalInt | None) -> Any:
    """Lets one logical device of every replica compute a layer.

    The other devices skip the layer and get the result. In the compiled program this is one
    conditional and one sum over the replica's devices, and the same for the gradients. Results,
    gradients, weights, metrics, dropout seeds and moving statistics do not change. Layers on
    different devices run at the same time if they do not need each other's results. Devices that
    skip a layer contribute zeros for its output, so this pays if the layer computes much for the
    size of its output. It only takes effect in compiled code under a `TPUStrategy` whose replicas
    have several logical devices; otherwise the layer is computed as usual.

    The devices of a replica share the layer's weights and their optimizer slots: every device
    stores a part of every large weight, sends it to the device that computes, and gets its part of
    the gradient. `split` and `replicate` on the layer, rules and plans take precedence over that.
    Weights are saved and loaded as usual.

    You can call it before or after the layer is built. If the layer has sublayers, all of them run
    on the device. `keras.models.clone_model` and `from_config` copy the assignment; a saved file
    does not contain it.

    Args:
        layer: A layer or model.
        logical_device: The logical device, from 0; `None` removes an assignment.

    Returns:
        The layer, so that you can write the call inline in a Sequential or functional model.

    Raises:
        ValueError: If `layer` is not a layer, or `logical_device` is not a number from 0. If the
            number is too large for the strategy, the error comes when the layer is first computed
            under it.

    Example:

    >>> import keras
    >>> first = assign(keras.layers.Dense(16), 0)
    >>> annotation_of(first).logical_device
    0
    """
    if isinstance(layer, keras.layers.InputLayer):
        raise value_error(
            "An Input computes nothing, so it cannot be assigned.",
            received={"layer": layer.name},
            fix="Assign the layers that use it.",
        )
    before = annotation_of(layer) or Annotation(LayoutRules([]))
    device = None if logical_device is None else int(logical_device)
    return _restored(layer, Annotation(before.weights, before.output, device))


@mark.restored_by
def _restored(layer: Any, annotation: Annotation) -> Any:
    """Restores an annotation on a layer whose class may not have been assigned before."""
    annotate(layer, annotation)
    _keras.route_calls(type(layer), "assign", _around)
    return layer


def on_logical_device(function: Callable[..., Any], logical_device: int) -> Callable[..., Any]:
    """A function that one logical device of every replica computes; see `assign`.

    Args:
        function: A function of arrays. Layers called in it may update their variables, but must not
            call `add_loss`. For a `keras.KerasTensor` it becomes a `keras.layers.Lambda`.
        logical_device: The logical device.
    """

    @functools.wraps(function)
    def assigned(*args, **kwargs):
        if any(isinstance(a, keras.KerasTensor) for a in keras.tree.flatten((args, kwargs))):
            return _as_layer(function, logical_device, args, kwargs)
        return _call(function, logical_device, None, args, kwargs)

    return assigned


def _as_layer(function: Callable, logical_device: int, args: tuple, kwargs: dict) -> Any:
    """The outputs of a function of symbolic tensors, computed by an assigned layer."""
    if len(args) == 1 and not kwargs:
        return assign(keras.layers.Lambda(function), logical_device)(*args)

    # A Lambda has one input, and its own arguments named mask and training.
    given = keras.tree.flatten((args, kwargs))
    symbolic = [n for n, leaf in enumerate(given) if isinstance(leaf, keras.KerasTensor)]

    @functools.wraps(function)
    def of_tensors(tensors):
        leaves = list(given)
        for n, tensor in zip(symbolic, tensors, strict=True):
            leaves[n] = tensor
        args_now, kwargs_now = keras.tree.pack_sequence_as((args, kwargs), leaves)
        return function(*args_now, **kwargs_now)

    layer = assign(keras.layers.Lambda(of_tensors), logical_device)
    return layer([given[n] for n in symbolic])


@contextlib.contextmanager
def assigning(logical_device: int) -> Iterator[None]:
    """Assigns the layers created inside, except models and inputs."""
    with setting(_creating, logical_device):
        yield


@dataclass(frozen=True)
class _Replica:
    """The devices that share a replica at the place of a computation."""

    mesh: Any
    axes: tuple[str, ...]
    devices: int


def _around(stock: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a layer class of which some layers are assigned."""
    annotation = annotation_of(layer)
    if annotation is None or annotation.logical_device is None:
        return stock(*args, **kwargs)
    return _call(stock, annotation.logical_device, layer, args, kwargs)


def _call(function, device: int, layer: Any, args: tuple, kwargs: dict) -> Any:
    replica = _replica(device, getattr(layer, "name", None) or function)
    if replica is None:
        return function(*args, **kwargs)
    call = _keras.PureCall(function, layer, args, kwargs)

    def compute(values: list, inputs: Any) -> dict[str, Any]:
        with setting(_tracing, device):
            return call(inputs, values)

    # A first trace finds the variables that are read. Their values become arguments, because a
    # value from outside of a shard_map has another mesh than the values inside.
    shapes = jax.eval_shape(functools.partial(compute, []), call.inputs)
    values = [_keras.full_precision(variable) for variable in call.read]
    parts = [_stored_along(variable, replica) for variable in call.read]
    results = _on_one_device(replica, device, compute, shapes, values, parts, call.inputs)
    if results["losses"] and layer is None:
        raise value_error(
            "A layer in an assigned function cannot call add_loss.",
            received={"function": function},
            fix="Assign the layer that adds the loss instead of the function.",
        )
    return call.finish(results)


def _replica(device: int, what: Any) -> _Replica | None:
    """The replica for an assigned call, or `None` if the layer is computed as usual."""
    strategy = _keras.active_strategy()
    devices = 1 if strategy is None else strategy.num_logical_devices
    if strategy is None or devices == 1:
        return None
    if device >= devices:
        raise value_error(
            "A layer or function must be assigned to a logical device of the replica.",
            received={"assigned": what, "logical device": device, "num_logical_devices": devices},
            fix=f"Assign it to 0 to {devices - 1}.",
        )
    if _keras.in_symbolic_scope():
        return None
    outer = _tracing.get()
    if outer is not None:
        if outer != device:
            raise value_error(
                "A layer or function within an assigned one runs on the same device.",
                received={"assigned": what, "to": device, "within one assigned to": outer},
                fix="Assign both to the same logical device, or only the inner ones.",
            )
        return None
    if not in_compiled_code():
        log_once(
            "assigned layers are computed by all logical devices while code is not compiled "
            "(run_eagerly, or a direct call); the results are the same"
        )
        return None
    around = jax.sharding.get_abstract_mesh()
    axes = tuple(strategy.logical_axes)
    taken = set(around.manual_axes)
    if taken & set(axes):
        log_once("assigned layers are computed as usual in a shard_map over their replica")
        return None
    return _Replica(around if taken else strategy.mesh, axes, devices)


def _stored_along(variable: Any, replica: _Replica) -> int | None:
    """The dimension along which the devices of a replica store their parts, if there is one."""
    layout = _keras.variable_layout(variable)
    axes = tuple(name for name in replica.axes if replica.mesh.shape[name] > 1)
    entries = [names_in((entry,)) for entry in getattr(layout, "spec", ())]
    split = [dim for dim, names in enumerate(entries) if set(names) & set(axes)]
    return split[0] if len(split) == 1 and tuple(entries[split[0]]) == axes else None


def _on_one_device(
    replica: _Replica,
    device: int,
    compute: Callable,
    shapes: Any,
    values: list,
    parts: list,
    inputs: Any,
) -> Any:
    """Runs `compute(values, inputs)` on one device, zeros on the others, and returns the sum.

    `parts` has, for every value, the dimension along which the devices hold parts; `None`: all have
    the whole value. `shapes` are those of the results.
    """

    def body(index, values, inputs):
        def skip(*_):
            return jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)

        def joined(values, inputs):
            return compute(list(map(_joined, values, parts)), inputs)

        # Parts are joined inside the branch, so that only the device that computes holds the whole.
        here = [
            value[0] if dim is None else _sent_to(device, value, replica)
            for value, dim in zip(values, parts, strict=True)
        ]
        mine = jax.tree.map(lambda x: x[0], inputs)
        # Sums over the batch stay in the branch: all devices that take part in one have the same
        # logical number, so they take the same branch. Anything else that the partitioner puts
        # there is found before the program is launched; see `programs.partitioner.exchanges`.
        with jax.named_scope(ONE_DEVICE):
            own = jax.lax.cond(index[0] == device, joined, skip, here, mine)
        return jax.tree.map(lambda x: x[None], own)

    def copies(x):
        return jax.numpy.broadcast_to(x, (replica.devices, *x.shape))

    # The copies for the devices, which they already have, and the sum of the results are both
    # outside of the shard_map. There the gradient of a copy is a sum by the partitioner, and that
    # of the sum is a copy. A psum inside would add a second sum to the gradients, and XLA's CPU
    # compiler aborts on one of bfloat16.
    stored = [copies(v) if dim is None else v for v, dim in zip(values, parts, strict=True)]
    first = PartitionSpec(replica.axes)
    stacked = jax.shard_map(
        body,
        mesh=replica.mesh,
        in_specs=(first, [PartitionSpec(*[None] * (d or 0), replica.axes) for d in parts], first),
        out_specs=first,
        # With all axes every device has all rows, and the partitioner has nothing to exchange.
        axis_names=_free_axes(replica) if rows_are_whole() else set(replica.axes),
        # A layer need not declare over which axes its loop carries vary.
        check_vma=False,
    )(jax.numpy.arange(replica.devices), stored, jax.tree.map(copies, inputs))
    return jax.tree.map(_only_one, stacked)


def _joined(value: Any, dim: int | None) -> Any:
    return value if dim is None else jax.numpy.concatenate(value, dim)


def _sent_to(device: int, part: jax.Array, replica: _Replica) -> list[jax.Array]:
    """The parts of all devices, in order, on the one that computes; elsewhere only its own is
    valid."""
    return [
        part if other == device else jax.lax.ppermute(part, replica.axes, [(other, device)])
        for other in range(replica.devices)
    ]


def _free_axes(replica: _Replica) -> set[str]:
    return set(replica.mesh.axis_names) - set(getattr(replica.mesh, "manual_axes", ()))


def _only_one(stacked: jax.Array) -> jax.Array:
    if stacked.dtype == jax.numpy.bool_:
        return stacked.any(axis=0)
    return stacked.sum(axis=0, dtype=stacked.dtype)


def _layer_created(layer: Any) -> None:
    device = _creating.get()
    whole = isinstance(layer, (keras.Model, keras.layers.InputLayer))
    if device is not None and not whole and not getattr(layer, "says_where", False):
        assign(layer, device)


_keras.on_new_layer(_layer_created)
