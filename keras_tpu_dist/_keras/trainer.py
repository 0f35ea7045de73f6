"""The seam to Keras's trainer: its replaced methods, and its step functions."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy
from keras.src.backend.common import global_state
from keras.src.saving import saving_lib

from keras_tpu_dist._keras import callback_list, seam
from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.generation import generates
from keras_tpu_dist._keras.seam import Replacement
from keras_tpu_dist._keras.state import (
    GROUPS,
    OfThread,
    StateGroup,
    group_of,
    state_groups,
    state_variables,
    stateless_scope,
)
from keras_tpu_dist._keras.variables import claim
from keras_tpu_dist.common import phases

_MODULE = "keras.src.backend.jax.trainer"
_TRAINER = f"{_MODULE}:JAXTrainer"
_BASE = "keras.src.trainers.trainer:Trainer"

# Keras's entry points, and the kind of their steps.
_ENTRY_POINTS = {
    "fit": "train",
    "evaluate": "test",
    "predict": "predict",
    "train_on_batch": "train",
    "test_on_batch": "test",
    "predict_on_batch": "predict",
}


# The input of the running fit: its own data adapter, once Keras has created it.
input_of_fit: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "input of fit", default=None
)

# The kind of steps of the running call, until it asks for the state.
_not_asked_for: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "not asked for", default=None
)


def serve(
    find_strategy: Callable[[Any], Any],
    created: Callable[[Any], None],
    compiling: Callable[[Any], Any],
    reading: Callable[[list, Callable[[], Any]], Any],
    assigning: Callable[[Callable[[], Any]], Any],
    writing: Callable[..., Any],
) -> None:
    """Declares the replacements of the trainer's methods.

    Args:
        find_strategy: Returns the strategy to run a model under, or `None` for stock Keras.
        created: Called with every new model, and every one that is compiled.
        compiling: Returns the context in which a model is compiled.
        reading: Called as `reading(variables, read)`; calls `read()`, which reads them together.
        assigning: Called as `assigning(assign)`; calls `assign()`, which assigns variables.
        writing: Called as `writing(stock, model, filepath, ...)` to write a file, where `stock` is
            Keras's own function.
    """
    seam.declare(
        *_running(find_strategy),
        *_creating(created, compiling),
        *_data(),
        *_bookkeeping(),
        *_variables(reading, assigning),
        *_saving(reading, writing),
        *_records(),
    )


def _running(find_strategy) -> list[Replacement]:
    run = [
        Replacement(
            _TRAINER,
            name,
            functools.partial(_entry_point, find_strategy, name),
            why="a model runs under the strategy that it was made in, also outside of its scope",
            hook="a model that carries its distribution",
        )
        for name in _ENTRY_POINTS
    ]
    make = Replacement(
        _TRAINER,
        "_make_function",
        _make_function,
        why="the step is compiled with the state's layouts, batches trimmed, N in one scan; an "
        "exception loses the weights, which Keras's donates",
        hook="a distribution that makes step functions",
        parameters=("step_function", "concatenate_outputs"),
    )
    return [*run, make]


def _creating(created, compiling) -> list[Replacement]:
    on_new_layer(lambda layer: _model_created(created, layer))
    return [
        # Keras checks whether a model's compile is the base class's own, so it is replaced there.
        Replacement(
            _BASE,
            "compile",
            functools.partial(_compile, created, compiling),
            why="a model that is compiled in a scope belongs to its strategy",
            hook="a distribution that is notified of compiled models",
        ),
        # Keras reads the signature of `Layer.__init__` for its configs; this is called before it.
        Replacement(
            "keras.src.backend.jax.layer:JaxLayer",
            "__init__",
            _layer_created,
            why="a model that is made in a scope belongs to its strategy, a layer that is made "
            "within `strategy.logical_device` to that device",
            hook="a scope that is notified of new layers",
        ),
    ]


def _records() -> list[Replacement]:
    return [
        Replacement(
            _TRAINER,
            "_jax_state_synced",
            OfThread("_jax_state_synced", True),
            why="`predict` can run in another thread during `fit`; both would use one flag",
            hook="a flag of the call, not of the model",
            whole=True,
            on_instances=True,
        )
    ]


# Methods that assign several variables one by one.
_ASSIGNING = (
    ("keras:Layer", "set_weights"),
    ("keras.optimizers:Optimizer", "finalize_variable_values"),
    ("keras.optimizers:MultiOptimizer", "finalize_variable_values"),
    ("keras.callbacks:SwapEMAWeights", "_swap_variables"),
)


def _variables(reading, assigning) -> list[Replacement]:
    together = [
        Replacement(
            owner,
            name,
            functools.partial(_assigning, assigning),
            why="a prediction in another thread sees no mixture of weights",
            hook="a lock of the training state",
        )
        for owner, name in _ASSIGNING
    ]
    return [
        *together,
        Replacement(
            "keras:Variable",
            "_initialize_layout",
            _placed,
            why="variables that span several processes can be read and assigned; Keras asks the "
            "distribution about none that is made with a layout, such as an optimizer's slot",
            hook="a distribution that is notified of every variable",
        ),
        Replacement(
            "keras:Layer",
            "get_weights",
            functools.partial(_reading, reading),
            why="weights that are read during a fit all belong to the same step",
            hook="a lock of the training state",
        ),
    ]


# The functions that write files; `keras.saving` has its own names for the functions that call them.
_WRITERS = (
    ("keras.src.saving.saving_lib", "save_model"),
    ("keras.src.saving.saving_lib", "save_weights_only"),
    ("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5"),
)


def _saving(reading, writing) -> list[Replacement]:
    return [
        Replacement(
            module,
            name,
            functools.partial(_save, reading, writing),
            why="only one process writes the file; weights that are saved during a fit all belong "
            "to the same step",
            hook="a distribution that chooses the process that writes",
            parameters=("model", "filepath"),
        )
        for module, name in _WRITERS
    ]


def _data() -> list[Replacement]:
    return [
        Replacement(
            _MODULE,
            "_distribute_data",
            _distribute_data,
            why="`*_on_batch` takes any number of rows; Keras refuses one that is not a multiple",
            hook="Distribution.distribute_data",
            parameters=("data", "layouts"),
        ),
        Replacement(
            "keras.src.distribution.distribution_lib",
            "distribute_tensor",
            _distribute_output,
            why="a layer may return a structure, or rows that are not split evenly",
            hook="Distribution.distribute_tensor",
            parameters=("tensor", "layout"),
        ),
    ]


def _bookkeeping() -> list[Replacement]:
    return [
        Replacement(
            _TRAINER,
            "_get_state_sharding_spec",
            _state_layouts,
            why="Keras reads all values, also of variables that another thread creates now, and "
            "warns that those are on one device",
            hook="layouts of a state from its variables' layouts",
        ),
        callback_list.replacement(),
        Replacement(
            _TRAINER,
            "_get_jax_state",
            _get_jax_state,
            why="variables keep their values during fit, so an exception loses nothing",
            hook="a setting that keeps the variables' values",
            parameters=("purge_model_variables",),
        ),
        Replacement(
            _TRAINER,
            "jax_state_sync",
            _synced,
            why="variables follow every launch; at the end of an epoch, what a user's step "
            "returned is cast to their dtypes, as Keras does by assigning it",
            hook="a setting that keeps the variables' values",
        ),
        Replacement(
            _BASE,
            "get_metrics_result",
            _get_metrics_result,
            why="Keras launches a few operations on scalars, each on every device: ten times as "
            "long for a loss and an accuracy on 8 simulated ones (benchmarks/metric_results.py)",
            hook="a distribution that computes results",
        ),
    ]


def _entry_point(find_strategy, name, stock, model, *args, **kwargs):
    strategy = find_strategy(model)
    try:
        arguments = signature(stock).bind(model, *args, **kwargs).arguments
    except TypeError:
        return stock(model, *args, **kwargs)  # which raises the right error
    arguments = {**arguments, "callbacks": _callbacks(arguments.get("callbacks"))}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_counted(strategy, model, name))
        if name == "fit":
            stack.enter_context(_fit_begins(arguments))
        if strategy is not None:
            stack.enter_context(strategy.runner.running(strategy, model, name, arguments))
        stack.enter_context(_begun(_ENTRY_POINTS[name]))
        return stock(model, *args, **kwargs)


def _counted(strategy: Any, model: Any, name: str) -> contextlib.AbstractContextManager[None]:
    """The context in which recorders of time know what the time is spent on."""
    if not phases.is_counted():
        return contextlib.nullcontext()
    if name == "train_on_batch":
        return phases.phase(phases.TRAIN)
    control = None if strategy is None or name == "fit" else strategy.runner.control(model)
    if control is not None:
        # Training steps that still run do not count as validation.
        jax.block_until_ready(control.outputs)
    return phases.phase(phases.OTHER)


@contextlib.contextmanager
def _fit_begins(arguments):
    """Passes callbacks the arguments of fit before it begins, and calls them at its end.

    They are also called if fit fails. Public replacement: none; `set_params` only gets the number
    of epochs and steps, and `on_train_end` is not called if fit fails.
    """
    for callback in arguments["callbacks"]:
        if hasattr(callback, "before_fit"):
            callback.before_fit(arguments)
    token = input_of_fit.set({})
    with contextlib.ExitStack() as at_end:  # if one raises, the others are called too
        at_end.callback(input_of_fit.reset, token)
        for callback in reversed(arguments["callbacks"]):
            if hasattr(callback, "after_fit"):
                at_end.callback(callback.after_fit)
        yield


signature = functools.lru_cache(inspect.signature)


def _callbacks(given: Any) -> list:
    if isinstance(given, keras.callbacks.CallbackList):
        callback_list.convert_list(given)  # it may be older than the seam
        given = given.callbacks
    return keras.tree.flatten(given)


_for_layers: list[Callable[[Any], None]] = []
_for_compiled: list[Callable[[Any, Any], None]] = []


def on_new_layer(created: Callable[[Any], None]) -> None:
    """Calls `created(layer)` at the start of every `Layer.__init__`, also for models.

    Args:
        created: Called with every new layer, which has no name and no weights yet.
    """
    _for_layers.append(created)


def on_compile(begins: Callable[[Any, Any], None]) -> None:
    """Calls `begins(model, jit_compile)` before a model is compiled.

    Args:
        begins: Called with the model, and what its `compile` is given as `jit_compile`.
    """
    _for_compiled.append(begins)


def _layer_created(stock, layer, *args, **kwargs):
    stock(layer, *args, **kwargs)
    for created in _for_layers:
        created(layer)


def _model_created(created, layer) -> None:
    if isinstance(layer, seam.at(_TRAINER)):
        created(layer)


def _make_function(stock, model, step_function, *args, **options):
    # Keras 3.16 passes the layouts of the state, too.
    strategy = active_strategy()
    kind = _kind_of(model, step_function, options.get("concatenate_outputs", False))
    if strategy is None or kind is None:
        return stock(model, step_function, *args, **options)
    return strategy.runner.make_function(strategy, model, kind)


def _kind_of(model: Any, step_function: Any, concatenates: bool) -> str | None:
    """The kind of steps that a function of a model runs; `None` for a custom function."""
    if concatenates:
        # Keras's own function is created within its `make_predict_function`.
        return "predict" if step_function.__module__ == _MODULE else None
    while step_function is not None:
        for kind in ("train", "test"):
            if step_function == getattr(model, f"{kind}_step"):
                return kind
        step_function = getattr(step_function, "__wrapped__", None)
    return None


@contextlib.contextmanager
def _begun(kind: str) -> Iterator[None]:
    token = _not_asked_for.set({kind})
    try:
        yield
    finally:
        _not_asked_for.reset(token)


def _make_stale_anew(strategy: Any, model: Any, kind: str) -> None:
    """Recreates a step function if layers were frozen since, the optimizer was replaced, and so on.

    Keras only creates one if there is none. The request for the state is the first thing that needs
    the function, once the model is built. It comes once in every epoch, and the whole epoch uses
    one function.
    """
    pending = _not_asked_for.get() or set()
    loop = _loop_in(getattr(model, f"{kind}_function"))
    if kind not in pending or loop is None:
        return
    pending.remove(kind)
    if loop.is_stale or (strategy is not None and not strategy.runner.serves(loop)):
        # Not by `force=True`: a custom `make_train_function` need not accept it.
        setattr(model, f"{kind}_function", None)
        getattr(model, f"make_{kind}_function")()


def _loop_in(function: Any, depth: int = 4) -> Any:
    """Our step function inside another function, or `None`: Keras and user classes wrap it."""
    if hasattr(function, "is_stale"):
        return function
    for cell in (getattr(function, "__closure__", None) or ()) if depth else ():
        try:
            loop = _loop_in(cell.cell_contents, depth - 1)
        except ValueError:
            continue  # a variable that is not assigned yet
        if loop is not None:
            return loop
    return None


def _compile(created, compiling, stock, model, *args, **kwargs):
    with compiling(model):
        given = signature(stock).bind_partial(model, *args, **kwargs).arguments
        for begins in _for_compiled:
            begins(model, given.get("jit_compile", "auto"))
        stock(model, *args, **kwargs)
        created(model)


def _get_jax_state(stock, model, purge_model_variables=False, **groups):
    strategy = active_strategy()
    names = tuple(group.removesuffix("_variables") for group, wanted in groups.items() if wanted)
    for kind in (kind for kind, of_kind in GROUPS.items() if of_kind == names):
        _make_stale_anew(strategy, model, kind)
    if strategy is None:
        return stock(model, purge_model_variables=purge_model_variables, **groups)
    # A state from an earlier epoch is older than the variables.
    model._jax_state = None
    # Stock Keras empties the variables here, so after an exception they would have no values.
    return strategy.runner.read_state(model, tuple(list(group_of(model, name)) for name in names))


def _state_layouts(stock, model):
    if active_strategy() is None:
        return stock(model)
    return tuple([v._layout or v.value.sharding for v in group] for group in state_groups(model))


def _placed(stock, variable):
    strategy = active_strategy()  # before Keras looks: `clear_session` may have turned it off
    stock(variable)
    layout = variable._layout
    spans = isinstance(layout, jax.sharding.Sharding) and not layout.is_fully_addressable
    if spans or strategy is not None:
        claim(variable)


def _reading(reading, stock, layer, *args, **kwargs):
    variables = state_variables(layer) if isinstance(layer, keras.Model) else layer.weights
    read = functools.partial(stock, layer, *args, **kwargs)
    return read() if stateless_scope() is not None else reading(variables, read)


def _assigning(assigning, stock, *args, **kwargs):
    assign = functools.partial(stock, *args, **kwargs)
    return assign() if stateless_scope() is not None else assigning(assign)


def _save(reading, writing, stock, model, *args, **kwargs):
    # Keras creates an optimizer to find the attributes that all have, which fails within a scope.
    # So it is created earlier, and stored under the name by which Keras 3.15 looks it up.
    common = saving_lib.get_attr_skipset("Optimizer")
    global_state.set_global_attribute("saving_attr_skiplist_Optimizer", common)
    with phases.phase(phases.OTHER):
        return _reading(reading, functools.partial(writing, stock), model, *args, **kwargs)


def _distribute_data(stock, data, *args, **kwargs):
    # Keras 3.16 asks for batches of several steps here; our device iterator provides those.
    strategy = active_strategy()
    return stock(data, *args, **kwargs) if strategy is None else strategy.runner.host_batch(data)


def _distribute_output(stock, tensor, layout):
    # Layer.__call__ uses this name; the stock function only knows tensors, no tuples, dicts or
    # states.
    strategy = active_strategy()
    return (
        stock(tensor, layout) if strategy is None else strategy.runner.place_output(tensor, layout)
    )


def _synced(stock, model):
    if not model._jax_state_synced:
        for group in (getattr(model, "_jax_state", None) or {}).values():
            if isinstance(group, StateGroup):
                group.cast()
    stock(model)


def _get_metrics_result(stock, model):
    # Outside of a step, these few operations on scalars would be launched on every device.
    # Public replacement: none.
    variables = model.metrics_variables
    values = [v.value for v in variables]
    if active_strategy() is None or not all(map(_is_whole_everywhere, values)):
        return stock(model)
    local = [jax.numpy.asarray(numpy.asarray(value)) for value in values]
    scope = keras.StatelessScope(state_mapping=list(zip(variables, local, strict=True)))
    before = [scope.get_current_value(v) for v in variables]
    with scope:
        result = stock(model)
    for variable, value in zip(variables, before, strict=True):
        if scope.get_current_value(variable) is not value:
            variable.assign(scope.get_current_value(variable))
    return result


def _is_whole_everywhere(value: Any) -> bool:
    concrete = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return concrete and len(value.sharding.device_set) > 1 and value.is_fully_replicated


def forget_functions(model: Any) -> None:
    """Makes the trainer rebuild its step functions. See `forget_state`.

    A call in another thread continues with its own function.
    """
    for attribute in ("train_function", "test_function", "predict_function"):
        loop = _loop_in(getattr(model, attribute))
        if loop is not None:
            loop.is_stale = True
        else:
            setattr(model, attribute, None)
    if generates(model):
        model.generate_function = None
