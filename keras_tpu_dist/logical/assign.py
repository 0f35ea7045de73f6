"""Layers and functions that one logical device of each replica computes for all of them."""

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
from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.layout.annotations import Annotation, annotate, annotation_of, mark
from keras_tpu_dist.layout.rules import LayoutRules
from keras_tpu_dist.partitioner import ONE_DEVICE, in_compiled_code, rows_are_whole

# The logical device whose branch is being traced, and the one that new layers are assigned to.
_tracing: contextvars.ContextVar[int | None] = contextvars.ContextVar("tracing", default=None)
_creating: contextvars.ContextVar[int | None] = contextvars.ContextVar("creating", default=None)


def assign(layer: Any, logical_device: int | None) -> Any:
    """Lets one logical device of each replica compute a layer.

    The others skip it and get the result: one conditional and one sum over the replica's devices
    in the compiled program, and the same for the gradients. Results, gradients, weights, metrics,
    dropout seeds and moving statistics are those of the layer without it. Layers that do not need
    each other's results, on different devices, run at the same time. Those that skip a layer write
    zeros for its output: it pays if the layer computes much for the size of that. It acts in
    compiled code under a `TPUStrategy` whose replicas have several logical devices; everywhere else
    the layer is computed as usual.

    The devices of a replica share the layer's weights and their optimizer slots: each stores a part
    of every weight that is not small, sends it to the one that computes, and gets its part of the
    gradient. `split` and `replicate` on the layer, rules and plans come before that. They are
    saved and loaded as any weights.

    Works before and after the layer is built. On a layer that holds layers all of them run there.
    `keras.models.clone_model` and `from_config` keep it; a saved file does not.

    Args:
        layer: A layer or model.
        logical_device: The logical device, from 0; `None` takes an assignment back.

    Returns:
        The layer, so that the call reads inline in a Sequential or functional model.

    Raises:
        ValueError: If `layer` is no layer, or `logical_device` no number from 0. A number
            too large for the strategy is an error when the layer is first computed under it.

    Example:

    >>> import keras
    >>> first = assign(keras.layers.Dense(16), 0)
    >>> annotation_of(first).logical_device
    0
    """
    if logical_device is not None and not is_count(logical_device, 0):
        raise ValueError(
            message(
                "A logical device is counted from 0 within its replica.",
                received={"logical_device": logical_device},
                fix="Write for example assign(layer, 0).",
            )
        )
    if isinstance(layer, keras.layers.InputLayer):
        raise ValueError(
            message(
                "An input is not computed.",
                received={"layer": layer.name},
                fix="Assign the layers that use it.",
            )
        )
    before = annotation_of(layer) or Annotation(LayoutRules([]))
    device = None if logical_device is None else int(logical_device)
    return _restored(layer, Annotation(before.weights, before.output, device))


@mark.restored_by
def _restored(layer: Any, annotation: Annotation) -> Any:
    """Writes an annotation on a layer, of a class that may not have been assigned before."""
    annotate(layer, annotation)
    _keras.route_calls(type(layer), _around)
    return layer


def on_logical_device(function: Callable[..., Any], logical_device: int) -> Callable[..., Any]:
    """A function that one logical device of each replica computes; see `assign`.

    Args:
        function: A function of arrays. Layers called in it may update their variables, but not
            `add_loss`. On a `keras.KerasTensor` it becomes a `keras.layers.Lambda`.
        logical_device: The logical device.

    Returns:
        The function.
    """

    @functools.wraps(function)
    def assigned(*args, **kwargs):
        if any(isinstance(a, keras.KerasTensor) for a in keras.tree.flatten((args, kwargs))):
            return _as_layer(function, logical_device, args, kwargs)
        return _call(function, logical_device, None, args, kwargs)

    return assigned


def _as_layer(function: Callable, logical_device: int, args: tuple, kwargs: dict) -> Any:
    """The outputs of a function of symbolic tensors, which an assigned layer computes."""
    if len(args) == 1 and not kwargs:
        return assign(keras.layers.Lambda(function), logical_device)(*args)

    # A Lambda has one input, and arguments of its own called mask and training.
    given = keras.tree.flatten((args, kwargs))
    symbolic = [n for n, each in enumerate(given) if isinstance(each, keras.KerasTensor)]

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
    """Assigns the layers created inside, but for models and inputs."""
    with setting(_creating, logical_device):
        yield


@dataclass(frozen=True)
class _Replica:
    """The devices that share a replica where something is about to be computed."""

    mesh: Any
    axes: tuple[str, ...]
    devices: int


def _around(stock: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
    """A call of a layer of a class of which some are assigned."""
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

    # A first look finds the variables that are read. Their values go in as arguments: a value
    # from outside of a shard_map carries another mesh than what is computed inside.
    shapes = jax.eval_shape(functools.partial(compute, []), call.inputs)
    values = [_keras.full_precision(variable) for variable in call.read]
    parts = [_stored_along(variable, replica) for variable in call.read]
    results = _on_one_device(replica, device, compute, shapes, values, parts, call.inputs)
    if results["losses"] and layer is None:
        raise ValueError(
            message(
                "A layer in an assigned function cannot add_loss.",
                received={"function": function},
                fix="Assign the layer that adds the loss instead of the function.",
            )
        )
    return call.finish(results)


def _replica(device: int, what: Any) -> _Replica | None:
    """Where an assigned call is to be split up, or `None` where it is computed as usual."""
    strategy = _keras.active_strategy()
    devices = 1 if strategy is None else strategy.num_logical_devices
    if strategy is None or devices == 1:
        return None
    if device >= devices:
        raise ValueError(
            message(
                "A layer or function must be assigned to a logical device of the replica.",
                received={
                    "assigned": what,
                    "logical device": device,
                    "num_logical_devices": devices,
                    "mesh": dict(strategy.mesh.shape),
                },
                fix=f"Assign it to 0 to {devices - 1}.",
            )
        )
    if _keras.in_symbolic_scope():
        return None
    outer = _tracing.get()
    if outer is not None:
        if outer != device:
            raise ValueError(
                message(
                    "What runs within an assigned layer or function runs on its device.",
                    received={"assigned": what, "to": device, "within one assigned to": outer},
                    fix="Assign both to the same logical device, or only the inner ones.",
                )
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
    """The dimension of which each device of a replica stores its part, if there is one."""
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
    """`compute(values, inputs)`, in `shapes`, by one device; zeros by the others, and the sum.

    For each value `parts` has the dimension of which each device has its part; `None`: all have it.
    """

    def body(index, values, inputs):
        def skip(*_):
            return jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)

        def joined(values, inputs):
            return compute(list(map(_joined, values, parts)), inputs)

        # Parts are joined in the branch, so that the device that computes has the whole alone.
        here = [
            value[0] if dim is None else _sent_to(device, value, replica)
            for value, dim in zip(values, parts, strict=True)
        ]
        mine = jax.tree.map(lambda x: x[0], inputs)
        # Sums over the batch stay in the branch: all devices that take part in one have the same
        # logical number, so they take the same branch. Whatever else the partitioner puts there
        # is found before the program is launched; see `keras_tpu_dist.partitioner.exchanges`.
        with jax.named_scope(ONE_DEVICE):
            own = jax.lax.cond(index[0] == device, joined, skip, here, mine)
        return jax.tree.map(lambda x: x[None], own)

    def copies(x):
        return jax.numpy.broadcast_to(x, (replica.devices, *x.shape))

    # One copy for each device, as they have them already, and the sum of the results, both outside
    # of the shard_map: there the gradient of a copy is a sum that the partitioner makes, and that
    # of the sum a copy. A psum inside would add a second sum to the gradients, and XLA's CPU
    # compiler aborts on one of bfloat16.
    stored = [copies(v) if dim is None else v for v, dim in zip(values, parts, strict=True)]
    first = PartitionSpec(replica.axes)
    stacked = jax.shard_map(
        body,
        mesh=replica.mesh,
        in_specs=(first, [PartitionSpec(*[None] * (d or 0), replica.axes) for d in parts], first),
        out_specs=first,
        # Over all axes each device has all rows, and the partitioner nothing to exchange.
        axis_names=_free_axes(replica) if rows_are_whole() else set(replica.axes),
        # A layer need not say over which axes its loop carries vary.
        check_vma=False,
    )(jax.numpy.arange(replica.devices), stored, jax.tree.map(copies, inputs))
    return jax.tree.map(_only_one, stacked)


def _joined(value: Any, dim: int | None) -> Any:
    return value if dim is None else jax.numpy.concatenate(value, dim)


def _sent_to(device: int, part: jax.Array, replica: _Replica) -> list[jax.Array]:
    """All devices' parts, in order, on the one that computes; on others only their own is true."""
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


_keras.tell_of_layers(_layer_created)
