"""A layer's call as a function of arrays, and functions that wrap calls of a layer class."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax._src import core
from keras.src.backend.common import global_state

from keras_tpu_dist._keras.state import stateless_scope
from keras_tpu_dist._keras.structure import (
    AutocastScope,
    flatten_layers,
    in_symbolic_scope,
    keras_mask,
    owner_of_loss,
    with_keras_mask,
)
from keras_tpu_dist.common.setting import setting


class _CallScope(keras.StatelessScope):
    """Records which variables are read and updated; reads the others from outside."""

    def __init__(self, given: Iterable[tuple[Any, Any]]):
        # Within a layer with mixed precision, Keras would round the values that the scope gets.
        with AutocastScope(None):
            super().__init__(given, collect_losses=True, initialize_variables=False)
        # The scope outside, which has the values of variables that this one was not given.
        self._around = stateless_scope()
        # What this call did.
        self.read: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}
        # The sum of all additions to variables that replicas add to, apart from their values, so
        # that the additions of several calls add up and do not overwrite one another.
        self.added: dict[int, Any] = {}
        # What those variables had before the first addition.
        self._before: dict[int, Any] = {}
        # Whether reads are of this replica's own values, which are not combined yet.
        self._own = False

    def add_update(self, update):
        variable, _ = update
        self.updated[id(variable)] = variable
        self.added.pop(id(variable), None)
        super().add_update(update)

    def note_addition(self, variable, value, sign, stock):
        """`assign_add` or `assign_sub`; after an assignment it is part of the assigned value."""
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
        """The value of a variable combined over replicas, in replica code."""
        combined = getattr(self._around, "combined", None)
        return value if combined is None else combined(variable, value)

    def get_current_value(self, variable):
        self.read[id(variable)] = variable
        # Not the result of Keras's method: in replica code that asks the replica, and ignores the
        # values of a scope in between.
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
    """Makes further arrays, which code reads from its context, inputs of every `PureCall`.

    A transformation may refuse arrays that were computed outside of it.

    Args:
        read: Returns a structure of the arrays, `None` if there are none.
        replaced: A context manager that replaces the arrays by the ones it gets.
    """
    _surroundings.append((read, replaced))


@contextlib.contextmanager
def _surrounded(arrays: list) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for (_, replaced), array in zip(_surroundings, arrays, strict=True):
            stack.enter_context(replaced(array))
        yield


class PureCall:
    """A call of a layer or function that returns its side effects as results.

    Called with `inputs`, it returns a dict of arrays: the outputs and their masks, the new values
    of assigned variables (moving statistics, seeds, metrics), and the added losses. `finish` then
    applies these. So a transformation that knows nothing about Keras can trace the call by itself,
    and as often as it likes.

    Args:
        function: The function; it may read and assign variables, and add losses.
        layer: The layer that is called, or `None`.
        args: Its positional arguments; those that are not arrays are not traced.
        kwargs: Its keyword arguments.

    Attributes:
        inputs: The arrays among the arguments, their masks, and the arrays of `give_to_calls`.
        read: The variables that a call of this object has read.
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
        """Runs the function.

        Args:
            inputs: Arrays as in `inputs`.
            values: Values of the variables in `read`, in that order; the others, or all, are read
                as usual.
        """
        arrays, masks, surroundings = inputs
        for i, mask in masks.items():
            with_keras_mask(arrays[i], mask)
        leaves = [arrays.get(i, leaf) for i, leaf in enumerate(self._leaves)]
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        known = zip(self.read, values, strict=False)  # there may be none
        with _surrounded(surroundings), _CallScope(known) as scope:
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
        """Assigns variables, adds losses and sets masks; returns the function's result.

        Args:
            results: The results of the call, however they were computed.
        """
        for variable, value in zip(self._updated, results["updates"], strict=True):
            added = id(variable) in self._added
            (variable.assign_add if added else variable.assign)(value)
        for owner, loss in zip(self._owners, results["losses"], strict=True):
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
    compute: Callable[[Any, list], list | None],
) -> Any:
    """Runs a layer's call, with its program computed in another way.

    Args:
        stock: The call.
        layer: The layer.
        args: The call's positional arguments.
        kwargs: Its keyword arguments.
        compute: A function of the program, a `ClosedJaxpr`, and its inputs, which returns the
            outputs, or `None` to compute them as the program does.

    Returns:
        The result of the call; its assignments and losses are applied.
    """
    call = PureCall(stock, layer, args, kwargs)
    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(call.inputs)
    inputs = jax.tree.leaves(call.inputs)
    outputs = compute(jaxpr, inputs)
    if outputs is None:
        outputs = core.jaxpr_as_fun(jaxpr)(*inputs)
    return call.finish(jax.tree.unflatten(jax.tree.structure(shapes), outputs))


def traced_program() -> Any:
    """The program that is being traced, or `None`; inside a branch or a loop, that of the branch.

    A gradient or a map belongs to the program around it. Public replacement: none;
    `jax.core.get_opaque_trace_state` distinguishes these too.
    """
    trace = core.trace_ctx.trace
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def is_of_inner_trace(value: Any) -> bool:
    """Whether an array was computed in the innermost trace, after which it has no value.

    Public replacement: none; `jax.checking_leaks` raises at the end of a trace.
    """
    return isinstance(value, core.Tracer) and value._trace is core.trace_ctx.trace


def recomputes(program: Any) -> bool:
    """Whether a program that is being traced is one that `jax.checkpoint` computes again."""
    return program is not None and "remat" in program.frame.debug_info.traced_for


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """A context in which operations run at once, on true values, in the middle of a trace.

    Public replacement: none; `jax.ensure_compile_time_eval` keeps the axes of the trace.
    """
    context, scope = core.trace_ctx, stateless_scope()
    trace, axes = context.trace, context.axis_env
    nowhere = jax.sharding.AbstractMesh((), ())
    context.reset()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with jax.sharding.use_abstract_mesh(nowhere):
            # On leaving it, Keras initializes the variables that were made within the trace.
            with keras.StatelessScope():
                pass
            yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)
        context.set_trace(trace)
        context.set_axis_env(axes)


def scope_around_calls() -> Any:
    """The `keras.StatelessScope` that is entered, or around the calls of layers; or `None`."""
    scope = stateless_scope()
    while isinstance(scope, _CallScope):
        scope = scope._around
    return scope


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


# What may wrap layers' calls, and how far in: `order_calls` sets it.
_places: dict[str, int] = {}


def order_calls(names: Iterable[str]) -> None:
    """Sets the order of what wraps layers' calls, in whichever order features were asked for.

    Args:
        names: The names, the outermost first.
    """
    _places.clear()
    _places.update({name: place for place, name in enumerate(names)})


_ROUTED = "_keras_tpu_dist_routed"
# The methods of layers that run: a method of the base class that one calls belongs to it.
_running: contextvars.ContextVar[frozenset[tuple[int, str]]] = contextvars.ContextVar(
    "running", default=frozenset()
)


def route_calls(kind: type, name: str, around: Callable[..., Any], *methods: str) -> None:
    """Wraps methods of a layer class in a function, once for every name.

    Args:
        kind: The class; inherited methods are wrapped on it, and its base class does not change.
        name: What wraps them: a name of `order_calls`.
        around: Called as `around(stock, layer, args, kwargs)`, where `stock` is the method with
            the wrappers further in, bound to the layer.
        *methods: Names of methods; by default those in which a layer computes.
    """
    place = _places[name]
    for method_name in methods or ("call", "quantized_call"):
        method = getattr(kind, method_name, None)
        stock, wrappers = getattr(method, _ROUTED, (method, {}))
        if stock is not None and place not in wrappers:
            setattr(kind, method_name, _routed(stock, method_name, {**wrappers, place: around}))


def _routed(stock: Callable[..., Any], name: str, wrappers: dict[int, Callable]) -> Callable:
    @functools.wraps(stock)
    def call(self, *args, **kwargs):
        running, method = _running.get(), functools.partial(stock, self)
        if (id(self), name) in running:
            return method(*args, **kwargs)
        for place in sorted(wrappers, reverse=True):
            method = functools.partial(_wrapped, wrappers[place], method, self)
        with setting(_running, running | {(id(self), name)}):
            return method(*args, **kwargs)

    setattr(call, _ROUTED, (stock, wrappers))
    return call


def _wrapped(around: Callable, stock: Callable, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    return around(stock, layer, args, kwargs)


def in_compiled_call() -> bool:
    """Whether a layer's call becomes part of a program.

    If Keras computes shapes, nothing runs; in eager code, operations run at once.
    """
    # You cannot see it from an existing value; see `programs.partitioner.places.in_compiled_code`.
    return not in_symbolic_scope() and isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def route_attention_layers(layer: Any, around: Callable[..., Any]) -> None:
    """Wraps the part of Keras's attention layers that computes from query, key and value.

    Public replacement: a public method of these layers, or a layer of its own for that part.

    Args:
        layer: The layer, which is searched for attention layers, itself included.
        around: See `route_calls`.
    """
    for inner in flatten_layers(layer):
        if isinstance(inner, (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)):
            route_calls(type(inner), "remat", around, "_compute_attention")
