"""A layer's call as a function of arrays, and calls of a class of layers handed to a function."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist._keras.structure import (
    flatten_layers,
    keras_mask,
    stateless_scope,
    with_keras_mask,
)


class _Recorder(keras.StatelessScope):
    """Keeps which variables are read and updated; reads those it is not given from around it."""

    def __init__(self, given: Iterable[tuple[Any, Any]]):
        super().__init__(given, collect_losses=True, initialize_variables=False)
        self._around = stateless_scope()
        self.read: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}

    def add_update(self, update):
        self.updated[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable):
        self.read[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None and self._around is not None:
            value = self._around.get_current_value(variable)
        return value


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
        inputs: The arrays among the arguments, and those of their masks.
        read: The variables that a call of this object read.
    """

    def __init__(self, function: Callable[..., Any], layer: Any, args: tuple, kwargs: dict):
        self._function = function
        self._layers = [] if layer is None else flatten_layers(layer)
        self._leaves, self._structure = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(self._leaves) if _is_array(leaf)}
        masks = {i: m for i, leaf in arrays.items() if _is_array(m := keras_mask(leaf))}
        self.inputs = (arrays, masks)
        self.read: tuple[Any, ...] = ()
        self._updated: tuple[Any, ...] = ()
        self._owners: list = []
        self._outputs: Any = None

    def __call__(self, inputs: tuple[dict, dict], values: Iterable[Any] = ()) -> dict[str, Any]:
        """Computes.

        Args:
            inputs: Arrays as in `inputs`.
            values: Values of the variables in `read`, in that order; the others, or all, are read
                from where the call stands.
        """
        arrays, masks = inputs
        for i, mask in masks.items():
            with_keras_mask(arrays[i], mask)
        leaves = [arrays.get(i, leaf) for i, leaf in enumerate(self._leaves)]
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        with _Recorder(zip(self.read, values)) as scope:
            outputs = self._function(*args, **kwargs)
        self.read = self.read or tuple(scope.read.values())
        self._updated = tuple(scope.updated.values())
        self._owners = [_owner(loss, self._layers) for loss in scope.losses]
        leaves, structure = jax.tree.flatten(outputs)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}
        rest = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
        self._outputs = structure, rest
        masks = {i: keras_mask(leaf) for i, leaf in arrays.items()}
        return {
            "out": arrays,
            "masks": {i: mask for i, mask in masks.items() if _is_array(mask)},
            "updates": [scope.get_current_value(variable) for variable in self._updated],
            "losses": list(scope.losses),
        }

    def finish(self, results: dict[str, Any]) -> Any:
        """Assigns, adds losses and puts masks on; gives what the function returned.

        Args:
            results: What the call gave, by whichever way it was computed.
        """
        for variable, value in zip(self._updated, results["updates"]):
            variable.assign(value)
        for owner, loss in zip(self._owners, results["losses"]):
            owner.add_loss(loss)
        for i, mask in results["masks"].items():
            with_keras_mask(results["out"][i], mask)
        structure, rest = self._outputs
        return jax.tree.unflatten(
            structure, [results["out"].get(i, leaf) for i, leaf in enumerate(rest)]
        )


def _owner(loss: Any, layers: list) -> Any:
    """The layer that added a loss, which forgets it: it is told again, of the one that leaves.

    Keras knows a layer's losses by their `id`, which another loss may get when this one is gone.
    Public replacement: a scope that is told who adds a loss.
    """
    owner = next((layer for layer in layers if id(loss) in layer._loss_ids), None)
    if owner is not None:
        owner._loss_ids.discard(id(loss))
    return owner or next(iter(layers), None)


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
