"""A layer's call as a function of arrays, and calls of a class of layers handed to a function."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax._src import core

from keras_tpu_dist._keras.structure import (
    AutocastScope,
    flatten_layers,
    keras_mask,
    owner_of_loss,
    with_keras_mask,
)
from keras_tpu_dist._keras.trainer import stateless_scope


class _CallScope(keras.StatelessScope):
    """Keeps which variables are read and updated; reads those it is not given from around it."""

    def __init__(self, given: Iterable[tuple[Any, Any]]):
        # Within the call of a layer of mixed precision Keras would round what the scope is given.
        with AutocastScope(None):
            super().__init__(given, collect_losses=True, initialize_variables=False)
        self._around = stateless_scope()
        self.read: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}
        # What was added, in all, to variables of which each replica adds to one sum.
        self.added: dict[int, Any] = {}
        self._before: dict[int, Any] = {}
        # Whether reads are of this replica's own values, which are not combined yet.
        self._own = False

    def add_update(self, update):
        variable, _ = update
        self.updated[id(variable)] = variable
        self.added.pop(id(variable), None)
        super().add_update(update)

    def note_addition(self, variable, value, sign, stock):
        """`assign_add` or `assign_sub`; after an assignment it is a part of what was assigned."""
        key = id(variable)
        if variable.aggregation != "sum":
            return stock(variable, value)
        before = self.added.get(key, None if key in self.updated else 0)
        self._before.setdefault(key, self.get_current_value(variable))
        self._own = True
        try:
            stock(variable, value)
        finally:
            self._own = False
        if before is not None:
            with AutocastScope(None):
                value = keras.ops.convert_to_tensor(value, dtype=variable.dtype)
            self.added[key] = before + value if sign > 0 else before - value
        return self.get_current_value(variable)

    def combined(self, variable, value):
        """What all replicas make of their values of a variable, where this is a replica's code."""
        combined = getattr(self._around, "combined", None)
        return value if combined is None else combined(variable, value)

    def get_current_value(self, variable):
        self.read[id(variable)] = variable
        # Not what Keras's method gives: within a replica's code that asks the replica, past what
        # a scope in between was given.
        key = id(variable)
        value = self.state_mapping.get(key)
        if value is None and self._around is not None:
            return self._around.get_current_value(variable)
        if self._own or key not in self.updated:
            return value
        added = self.added.get(key)
        if added is None:
            return self.combined(variable, value)
        return self._before[key] + self.combined(variable, added)


_surroundings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = []


def give_to_calls(read: Callable[[], Any], replaced: Callable[[Any], Any]) -> None:
    """Makes inputs of every `PureCall` of arrays that code asks for, and is not handed.

    A transformation may refuse arrays that were computed outside of what it transforms.

    Args:
        read: Gives a structure of the arrays, `None` where there are none.
        replaced: A context manager: within it, the arrays that it is given are there instead.
    """
    _surroundings.append((read, replaced))


@contextlib.contextmanager
def _surrounded(arrays: list) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for (_, replaced), each in zip(_surroundings, arrays):
            stack.enter_context(replaced(each))
        yield


class PureCall:
    """A call of a layer or function whose side effects leave it as results.

    Called with `inputs`, it gives a dict of arrays: the outputs and their masks, the new values of
    the variables that were assigned (moving statistics, seeds, metrics), and the losses that were
    added. `finish` then gives all of that to whom it belongs. So the call can be traced on its
    own, and as often as one likes, by a transformation that knows nothing of Keras.

    Args:
        function: What computes; it may read and assign variables, and add losses.
        layer: The layer whose call it is, or `None`.
        args: Its positional arguments; what is no array in them is not traced.
        kwargs: The others.

    Attributes:
        inputs: The arrays among the arguments, those of their masks, and those of `give_to_calls`.
        read: The variables that a call of this object read.
    """

    def __init__(self, function: Callable[..., Any], layer: Any, args: tuple, kwargs: dict):
        self._function = function
        self._layers = [] if layer is None else flatten_layers(layer)
        self._leaves, self._structure = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(self._leaves) if _is_array(leaf)}
        masks = {i: m for i, leaf in arrays.items() if _is_array(m := keras_mask(leaf))}
        self.inputs = (arrays, masks, [read() for read, _ in _surroundings])
        self.read: tuple[Any, ...] = ()
        self._updated: tuple[Any, ...] = ()
        self._added: set[int] = set()
        self._owners: list = []
        self._outputs: Any = None

    def __call__(self, inputs: tuple, values: Iterable[Any] = ()) -> dict[str, Any]:
        """Computes.

        Args:
            inputs: Arrays as in `inputs`.
            values: Values of the variables in `read`, in that order; the others, or all, are read
                from where the call stands.
        """
        arrays, masks, surroundings = inputs
        for i, mask in masks.items():
            with_keras_mask(arrays[i], mask)
        leaves = [arrays.get(i, leaf) for i, leaf in enumerate(self._leaves)]
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        with _surrounded(surroundings), _CallScope(zip(self.read, values)) as scope:
            outputs = self._function(*args, **kwargs)
        self.read = self.read or tuple(scope.read.values())
        self._updated, self._added = tuple(scope.updated.values()), set(scope.added)
        news = {**scope.state_mapping, **scope.added}
        self._owners = [owner_of_loss(loss, self._layers) for loss in scope.losses]
        leaves, structure = jax.tree.flatten(outputs)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}
        rest = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
        self._outputs = structure, rest
        masks = {i: keras_mask(leaf) for i, leaf in arrays.items()}
        return {
            "out": arrays,
            "masks": {i: mask for i, mask in masks.items() if _is_array(mask)},
            "updates": [news[id(variable)] for variable in self._updated],
            "losses": list(scope.losses),
        }

    def finish(self, results: dict[str, Any]) -> Any:
        """Assigns, adds losses and puts masks on; gives what the function returned.

        Args:
            results: What the call gave, by whichever way it was computed.
        """
        for variable, value in zip(self._updated, results["updates"]):
            added = id(variable) in self._added
            (variable.assign_add if added else variable.assign)(value)
        for owner, loss in zip(self._owners, results["losses"]):
            owner.add_loss(loss)
        for i, mask in results["masks"].items():
            with_keras_mask(results["out"][i], mask)
        structure, rest = self._outputs
        return jax.tree.unflatten(
            structure, [results["out"].get(i, leaf) for i, leaf in enumerate(rest)]
        )


def computed_otherwise(
    stock: Callable[..., Any],
    layer: Any,
    args: tuple,
    kwargs: dict,
    compute: Callable[[Any, list], list],
) -> Any:
    """The call of a layer whose program is computed in another way.

    Args:
        stock: The call.
        layer: The layer.
        args: The call's positional arguments.
        kwargs: The others.
        compute: From the program, a `ClosedJaxpr`, and its inputs to its outputs.

    Returns:
        What the call returns; what it assigns and adds is done.
    """
    call = PureCall(stock, layer, args, kwargs)
    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(call.inputs)
    outputs = compute(jaxpr, jax.tree.leaves(call.inputs))
    return call.finish(jax.tree.unflatten(jax.tree.structure(shapes), outputs))


def traced_program() -> Any:
    """The program that is being traced here, or `None`: that of a branch or a loop within one.

    A gradient or a map is computed in the program around it, and is none of its own. Public
    replacement: none; `jax.core.get_opaque_trace_state` tells those apart too.
    """
    trace = core.trace_ctx.trace
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def route_calls(kind: type, around: Callable[..., Any], *names: str) -> None:
    """Hands methods of a class of layers to a function, each once for each function.

    Args:
        kind: The class; what it inherits is put on it, its base class stays as it is.
        around: Called as `around(stock, layer, args, kwargs)`, where `stock` is the method without
            it, bound to the layer.
        *names: Names of methods; by default those in which a layer computes.
    """
    marker = f"_keras_tpu_dist_{around.__module__}.{around.__name__}"
    for name in names or ("call", "quantized_call"):
        stock = getattr(kind, name, None)
        if stock is None or hasattr(stock, marker):
            continue
        routed = _routed(stock, around)
        setattr(routed, marker, True)
        setattr(kind, name, routed)


def _routed(stock: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self, *args, **kwargs):
        return around(functools.partial(stock, self), self, args, kwargs)

    return call


def route_attention_layers(layer: Any, around: Callable[..., Any]) -> None:
    """Hands what Keras's attention layers compute of query, key and value to a function.

    Args:
        layer: The layer in which attention layers are looked for, itself included.
        around: As for `route_calls`.

    Public replacement: a public method of these layers, or a layer of its own for that part.
    """
    for inner in flatten_layers(layer):
        if isinstance(inner, (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)):
            route_calls(type(inner), around, "_compute_attention")
