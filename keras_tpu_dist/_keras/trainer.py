"""The seam to Keras's trainer: replaces methods, and reads and writes the training state."""

import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy
from jax.sharding import NamedSharding
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope
from keras.src.saving import saving_lib

from keras_tpu_dist._keras import seam
from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.generation import generates
from keras_tpu_dist._keras.seam import Replacement
from keras_tpu_dist._keras.structure import weights_by_training
from keras_tpu_dist._keras.variables import OWNER, claim
from keras_tpu_dist.common import phases
from keras_tpu_dist.common.errors import runtime_error

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

# Variables move together, up to so many bytes: a state that fills the memory cannot exist twice.
_MOVED_AT_ONCE_BYTES = 64 * 2**20

# From so many equal arrays on, a program for so many at once is worth its compilation.
_FEWEST_FOR_A_PROGRAM, _MOVED_BY_A_PROGRAM = 512, 64

# The input of the running fit: its own data adapter, once Keras has created it.
input_of_fit: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "input of fit", default=None
)

# The kind of steps of the running call, until it asks for the state.
_not_asked_for: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "not asked for", default=None
)

# The groups of variables that a step function reads and returns, in Keras's order.
_GROUPS = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


# Where threads record on a model whether they have read its state.
_RECORDS = "_keras_tpu_dist_records"


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
            _OfThread("_jax_state_synced", True),
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
        Replacement(
            "keras.callbacks:CallbackList",
            "__init__",
            _callback_list,
            why="callbacks see a resumed run as one that never stopped; no thread waits for logs "
            "that are not read; only one process prints a progress bar",
            hook="a distribution that makes the CallbackList",
        ),
        Replacement(
            _TRAINER,
            "_get_jax_state",
            _get_jax_state,
            why="variables keep their values during fit, so an exception loses nothing",
            hook="a setting that keeps the variables' values",
            parameters=("purge_model_variables",),
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
    if name == "fit":
        return phases.fitting()
    if name == "train_on_batch":
        return phases.phase(phases.TRAIN)
    control = None if strategy is None else strategy.runner.control(model)
    if control is not None:
        # Training steps that still run do not count as validation.
        jax.block_until_ready(control.outputs)
    return phases.phase(phases.VALIDATE)


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


def _check_seen(callbacks: list) -> None:
    """Raises a `RuntimeError` for a fit that began before the seam was installed.

    In `model.fit(x, callbacks=[Checkpoint(...)])`, if the callback is the first object of ours,
    Python looks up `model.fit`, which is the stock one, before it creates the callback, which
    installs the seam: callbacks do not get the arguments of `fit`, nor notice that it fails.
    """
    stock = inspect.unwrap(seam.stock(_TRAINER, "fit")).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not stock:
        frame = frame.f_back
    ours = [callback for callback in callbacks if hasattr(callback, "before_fit")]
    if ours and frame is not None:
        name = type(ours[0]).__name__
        raise runtime_error(
            "A callback of keras_tpu_dist must exist before fit is called.",
            received=f"{name}(...) within the call of fit, as the first object of this package.",
            fix=f"Write callback = {name}(...) on a line before, and fit(callbacks=[callback]).",
        )


signature = functools.lru_cache(inspect.signature)


def _callbacks(given: Any) -> list:
    if isinstance(given, keras.callbacks.CallbackList):
        _convert(given)  # it may be older than the seam
        given = given.callbacks
    return keras.tree.flatten(given)


_for_layers: list[Callable[[Any], None]] = []
_for_compiled: list[Callable[[Any], None]] = []


def on_new_layer(created: Callable[[Any], None]) -> None:
    """Calls `created(layer)` at the start of every `Layer.__init__`, also for models.

    Args:
        created: Called with every new layer, which has no name and no weights yet.
    """
    _for_layers.append(created)


def on_compile(begins: Callable[[Any], None]) -> None:
    """Calls `begins(model)` before a model is compiled in a strategy's scope."""
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
            found = _loop_in(cell.cell_contents, depth - 1)
        except ValueError:
            continue  # a variable that is not assigned yet
        if found is not None:
            return found
    return None


def _compile(created, compiling, stock, model, *args, **kwargs):
    with compiling(model):
        for begins in _for_compiled if active_strategy() is not None else ():
            begins(model)
        stock(model, *args, **kwargs)
        created(model)


def _get_jax_state(stock, model, purge_model_variables=False, **groups):
    strategy = active_strategy()
    names = tuple(group.removesuffix("_variables") for group, wanted in groups.items() if wanted)
    for kind in (kind for kind, of_kind in _GROUPS.items() if of_kind == names):
        _make_stale_anew(strategy, model, kind)
    if strategy is None:
        return stock(model, purge_model_variables=purge_model_variables, **groups)
    # A state from an earlier epoch is older than the variables.
    model._jax_state = None
    # Stock Keras empties the variables here, so after an exception they would have no values.
    return strategy.runner.read_state(model, tuple(list(_group(model, name)) for name in names))


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
    with phases.phase(phases.SAVE):
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


def _callback_list(stock, callbacks, /, *args, **kwargs):
    stock(callbacks, *args, **kwargs)
    _convert(callbacks)


def _convert(callbacks: Any) -> None:
    """Converts a callback list to one of class `_CallbackList`."""
    stock = keras.callbacks.CallbackList
    callbacks.__class__ = seam.in_front_of(stock, _CallbackList, type(callbacks))


class _CallbackList(keras.callbacks.CallbackList):
    """Keras's callback list with the requests of the callbacks to the strategy's loop.

    It calls `before_<moment>` or `after_<moment>` of callbacks around all `on_<moment>`. Keras
    calls callbacks in the order in which the user passed them.
    """

    # The requests of callbacks to the running fit, under a strategy.
    _fit_control: Any = None

    def on_train_begin(self, logs=None):
        if input_of_fit.get() is None:
            _check_seen(self.callbacks)
        strategy = active_strategy()
        self._fit_control = None if strategy is None else strategy.runner.control(self._model)
        if strategy is not None:
            strategy.runner.training_begins(self._model)
        with self._around("train_begin", logs):
            super().on_train_begin(logs)

    def on_train_end(self, logs=None):
        with self._around("train_end", logs):
            super().on_train_end(logs)

    def on_epoch_begin(self, epoch, logs=None):
        with self._around("epoch_begin", epoch, logs):
            super().on_epoch_begin(epoch, logs)
        phases.turn(phases.TRAIN)

    def on_epoch_end(self, epoch, logs=None):
        if phases.is_counted():
            jax.block_until_ready(logs)
            phases.turn(phases.OTHER)
        with self._around("epoch_end", epoch, logs):
            super().on_epoch_end(epoch, logs)
        strategy = active_strategy()
        if strategy is not None:
            strategy.runner.epoch_ended()

    def on_train_batch_begin(self, batch, logs=None):
        skips = self._fit_control is not None and self._fit_control.batches_to_skip
        if not skips or not active_strategy().runner.begins_again(self._model):
            super().on_train_batch_begin(batch, logs)

    # Keras passes the logs of every step to a thread that waits for them and converts them to
    # floats, even if no callback reads them.

    def on_train_batch_end(self, batch, logs=None):
        fit = self._fit_control
        if fit is None or (not fit.made_before and listens(self.callbacks, "train")):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        if active_strategy() is None or listens(self.callbacks, "test"):
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_end(self, batch, logs=None):
        if active_strategy() is None or listens(self.callbacks, "predict"):
            super().on_predict_batch_end(batch, logs)

    def _async_dispatch(self, fn, *args):
        # Keras's flag is per thread, and a bar runs in another one.
        if keras.config.is_interactive_logging_enabled():
            super()._async_dispatch(fn, *args)
        else:
            super()._async_dispatch(_without_logging, fn, *args)

    @contextlib.contextmanager
    def _around(self, moment: str, *args):
        self._call(f"before_{moment}", *args)
        yield
        self._call(f"after_{moment}", *args)

    def _call(self, name: str, *args) -> None:
        for callback in self.callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                method(*args)


def _without_logging(function: Callable, *args) -> None:
    keras.config.disable_interactive_logging()
    function(*args)


class _OfThread:
    """An attribute of a model that has a value per thread while a strategy is active."""

    def __init__(self, name: str, rest: Any):
        self._name, self._rest = name, rest

    def __get__(self, model, owner=None):
        if model is None:
            return self
        known = model.__dict__.get(self._name, self._rest)
        return model.__dict__.get(_RECORDS, {}).get(threading.get_ident(), known)

    def __set__(self, model, value):
        model.__dict__.get(_RECORDS, {}).pop(threading.get_ident(), None)
        if active_strategy() is None:
            model.__dict__[self._name] = value
            return
        # The value that a failed call without a strategy left.
        model.__dict__.pop(self._name, None)
        if value is not self._rest:
            model.__dict__.setdefault(_RECORDS, {})[threading.get_ident()] = value


class StateGroup:
    """One list of a training state, as Keras's loop passes it from one launch to the next.

    Keras sets the state on the model after every launch, and searches lists for layers and
    variables; this class avoids that. It looks empty, so `jax_state_sync` assigns nothing: the
    variables follow every launch, and assignments of callbacks must not be overwritten.
    """

    __slots__ = ("values",)

    def __init__(self, values: list):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)

    def __bool__(self):
        return False


def _get_metrics_result(stock, model):
    # Outside of a step, these few operations on scalars would be launched on every device.
    # Public replacement: none.
    variables = model.metrics_variables
    values = [v.value for v in variables]
    if active_strategy() is None or not all(map(_is_whole_everywhere, values)):
        return stock(model)
    local = [jax.numpy.asarray(numpy.asarray(value)) for value in values]
    scope = keras.StatelessScope(state_mapping=list(zip(variables, local)))
    before = [scope.get_current_value(v) for v in variables]
    with scope:
        result = stock(model)
    for variable, value in zip(variables, before):
        if scope.get_current_value(variable) is not value:
            variable.assign(scope.get_current_value(variable))
    return result


def _is_whole_everywhere(value: Any) -> bool:
    concrete = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return concrete and len(value.sharding.device_set) > 1 and value.is_fully_replicated


def listens(callbacks: list, kind: str) -> bool:
    """Whether a callback handles the end of every "train", "test" or "predict" batch.

    Args:
        callbacks: The `keras.callbacks.Callback` objects; the strategy's loop calls those with a
            true `sees_launches` itself.
    """
    names = [f"on_{kind}_batch_end", *(["on_batch_end"] if kind == "train" else [])]
    return any(
        not getattr(getattr(callback, name), "_is_default", False)
        for callback in callbacks
        if not getattr(callback, "sees_launches", False)
        for name in names
    )


def state_variables(model: Any) -> list:
    """All variables a training step reads or writes. See `state_shardings`."""
    return [variable for group in state_groups(model) for variable in group]


def state_shardings(model: Any, kind: str) -> tuple[list, ...]:
    """The layouts of the state of a step function, in Keras's order.

    Args:
        kind: The step function's: `"train"`, `"test"` or `"predict"`.
    """
    return tuple([v._layout for v in _group(model, name)] for name in _GROUPS[kind])


def state_groups(model: Any, kind: str = "train") -> tuple[list, ...]:
    """The variables of a step function's state, in Keras's order."""
    others = [list(_group(model, name)) for name in _GROUPS[kind][2:]]
    return (*weights_by_training(model), *others)


def values_of(variables: list) -> list:
    """The values of variables, without calling their owner. See `set_owner`.

    Args:
        variables: Variables that have a value or an initializer. In a stateless scope, their values
            are constrained to their layouts, which they need not have yet.
    """
    if global_state.get_global_attribute("stateless_scope") is None:
        return [v.value if v._value is None else v._value for v in variables]
    values = [v.value for v in variables]
    layouts = [v._layout or value.sharding for v, value in zip(variables, values)]
    return jax.device_put(values, layouts)


def full_values(variables: list, reader: Any = None) -> list:
    """The values of variables, in their own dtypes; calls their owners.

    Args:
        variables: The variables. See `set_owner` and `full_precision`.
        reader: An owner that is not called, because it reads for itself.
    """
    values = [None] * len(variables)
    if global_state.get_global_attribute("stateless_scope") is None:
        owners = [v.__dict__.get(OWNER) for v in variables]
        values = [
            v._value if owner is None or owner is reader else None
            for v, owner in zip(variables, owners)
        ]
    asked = [i for i, value in enumerate(values) if value is None]
    if asked:
        with AutocastScope(None):
            for i in asked:
                values[i] = variables[i].value
    return values


def holds(variable: Any, value: Any) -> bool:
    """Whether a value is the array of a variable itself, and not a copy or cast of it."""
    return variable._value is value


def follow_changes(groups: tuple[list, ...], changes: tuple) -> None:
    """Assigns the values that a step changed, in the stateless scope if there is one.

    Args:
        changes: A list of values for every group; `None` for unchanged ones.
    """
    scope = stateless_scope()
    for variables, values in zip(groups, changes):
        for variable, value in zip(variables, values):
            if value is None:
                continue
            if scope is None:
                variable._value = value
            else:
                scope.add_update((variable, value))


def follow_state(groups: tuple[list, ...], state: tuple) -> None:
    """Assigns a training state to the variables of `state_groups`.

    Called after every launch, so it does not check: the values have the layouts that the step was
    compiled for.

    Args:
        state: A list of values for every group, in its order; further values are ignored.
    """
    for variables, values in zip(groups, state):
        for variable, value in zip(variables, values):
            variable._value = value


def is_value_of(value: Any, variable: Any) -> bool:
    """Whether a value is the array of a variable, or its first one. See `move_variables`."""
    held = getattr(variable, "_value", None)
    return held is None or value is held


def forget_state(model: Any) -> None:
    """Tells the trainer that the variables, not its own record, hold the state."""
    model._jax_state = None
    model._jax_state_synced = True


def keep_metrics(model: Any, values: list | None) -> None:
    """Lets an epoch without data report the metrics of the one before, as Keras does by accident.

    Keras clears the variables for the first step of the epoch, which never runs, and then restores
    its record of the epoch before. After a validation it has none, and fails.

    Args:
        values: The values of the metrics' variables after the last step, or `None` without one.
    """
    if values is not None and model._jax_state is None:
        follow_state((model.metrics_variables,), (values,))


def has_state(model: Any) -> bool:
    """Whether a trainer may hold state that its variables do not. See `forget_state`."""
    return getattr(model, "_jax_state", None) is not None or not model._jax_state_synced


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


def variable_layout(variable: Any) -> Any:
    """The layout of a variable, or `None`. See `move_variables`."""
    return variable._layout


def variable_layouts(variables: list) -> list:
    """The layouts of variables. See `variable_layout`."""
    return [v._layout for v in variables]


def trainability(variables: list, layers: list) -> list[bool]:
    """Whether variables and layers train. A program is traced for that.

    Args:
        layers: The layers; a `BatchNormalization` that does not train computes something else.
    """
    return [*[v._trainable for v in variables], *[layer._trainable for layer in layers]]


def move_variables(moves: Sequence[tuple[Any, Any]]) -> None:
    """Sets the layouts of variables and moves their values; uninitialized ones only get the layout.

    Args:
        moves: Pairs of a `keras.Variable` and a `jax.sharding.Sharding`, or `None` to leave the
            value in place.
    """
    together: list[tuple[Any, Any]] = []
    size = 0
    for variable, layout in moves:
        claim(variable)
        value = variable._value
        if isinstance(value, jax.Array) and _is_here(value.sharding) and _is_here(layout):
            together.append((variable, layout))
            size += value.nbytes
            if size >= _MOVED_AT_ONCE_BYTES:
                _move_together(together)
                together, size = [], 0
            continue
        variable._layout = layout
        if value is not None:
            variable._direct_assign(value)
    _move_together(together)


def _is_here(layout: Any) -> bool:
    """Whether a layout is on the devices of this process alone."""
    return isinstance(layout, NamedSharding) and layout.is_fully_addressable


def _move_together(moves: list[tuple[Any, Any]]) -> None:
    """Moves values in one transfer: Keras's `assign` of thousands of them takes seconds."""
    alike: dict[Any, list[tuple[Any, Any]]] = {}
    for variable, layout in moves:
        value = variable._value
        key = value.shape, value.dtype, value.sharding, layout
        alike.setdefault(key, []).append((variable, layout))
    rest: list[tuple[Any, Any]] = []
    for (_, _, before, layout), those in alike.items():
        by_program = 0
        if len(those) >= _FEWEST_FOR_A_PROGRAM and _same_devices(before, layout):
            by_program = len(those) // _MOVED_BY_A_PROGRAM * _MOVED_BY_A_PROGRAM
            _move_by_program([variable for variable, _ in those[:by_program]], layout)
        rest += those[by_program:]
    values = [variable._value for variable, _ in rest]
    # JAX sends a value that is whole on every device through the host, too, after a long search.
    values = [
        numpy.asarray(value)
        if value.is_fully_replicated and not layout.is_fully_replicated
        else value
        for value, (_, layout) in zip(values, rest, strict=True)
    ]
    placed = jax.device_put(values, [layout for _, layout in rest])
    for (variable, layout), value in zip(rest, placed, strict=True):
        variable._layout, variable._value = layout, value


def _same_devices(before: Any, layout: Any) -> bool:
    """Whether one program can take arrays of one layout and return them in the other."""
    if not isinstance(before, NamedSharding) or before.memory_kind != layout.memory_kind:
        return False
    meshes: list[Any] = [before.mesh, layout.mesh]
    here, there = (list(used.devices.flat) for used in meshes)
    return here == there


def _move_by_program(variables: list, layout: Any) -> None:
    """Moves equal variables: for each array, JAX's transfer takes three times as long."""
    many = _MOVED_BY_A_PROGRAM
    move = jax.jit(lambda *values: values, out_shardings=(layout,) * many)
    for start in range(0, len(variables), many):
        group = variables[start : start + many]
        for variable, value in zip(group, move(*[v._value for v in group]), strict=True):
            variable._layout, variable._value = layout, value


def stateless_scope() -> Any:
    """The `keras.StatelessScope` that is entered, or `None`; public replacement: none."""
    return global_state.get_global_attribute("stateless_scope")


def _group(model, name: str) -> list:
    if name == "optimizer":
        # An uncompiled model, which can predict, has no such attribute.
        optimizer = getattr(model, "optimizer", None)
        return [] if optimizer is None else optimizer.variables
    return getattr(model, f"{name}_variables")
