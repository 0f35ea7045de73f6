"""Private names for building models without values, for dry runs."""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax.export
import keras
from jax._src import xla_bridge
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from keras.src.utils.tracking import DotNotTrackScope

from keras_tpu_dist._keras.variables import abstract as _abstract


def jax_backend_started() -> bool:
    """Whether JAX has already created its devices, after which they cannot be changed.

    Public replacement: none; `jax.config` refuses some updates after start-up, not all.
    """
    return xla_bridge.backends_are_initialized()


@contextlib.contextmanager
def abstract_variables() -> Iterator[None]:
    """A context in which this thread's new Keras variables have shape, dtype and layout, but no
    value.

    You can build models of any size this way without memory. Assigning to such a variable does
    nothing. Reading it while layers are built or traced returns its initializer's value, as Keras
    does for any variable that is not initialized yet.

    Public replacement: none; `keras.StatelessScope(initialize_variables=False)` is similar, but no
    optimizer can be constructed in it, and the variables remain in a global list that the next
    scope initializes.
    """
    token = _abstract.set(True)
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    _methods.take()
    try:
        yield
    finally:
        _methods.give_back()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, seeds)
        _abstract.reset(token)


def _initialize_with_initializer(variable, initializer):
    variable._initialize_layout()
    variable._initializer = initializer
    variable._value = None


def _deferred_initialize(variable):
    variable._initialize_layout()


def _initialize(variable, value):
    # scalars such as an optimizer's step count: they are in memory already, and read while
    # compiling
    variable._shape = variable._validate_shape(value.shape)
    variable._initialize_layout()
    variable._value = value


def _direct_assign(variable, value):
    if variable._value is not None:
        variable._value = value


class _Methods:
    """Methods of `keras.Variable` that are replaced while a thread builds without values."""

    _ABSTRACT: ClassVar = {
        "_initialize_with_initializer": _initialize_with_initializer,
        "_deferred_initialize": _deferred_initialize,
        "_initialize": _initialize,
        "_direct_assign": _direct_assign,
    }

    def __init__(self):
        self._lock = threading.Lock()
        self._users = 0
        self._own: dict[str, Any] = {}

    def take(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for name, abstract in self._ABSTRACT.items():
                self._own[name] = vars(keras.Variable).get(name)
                chosen = _by_thread(getattr(keras.Variable, name), abstract)
                setattr(keras.Variable, name, chosen)

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for name, own in self._own.items():
                if own is None:
                    delattr(keras.Variable, name)
                else:
                    setattr(keras.Variable, name, own)


def _by_thread(stock: Callable, abstract: Callable) -> Callable:
    @functools.wraps(stock)
    def chosen(variable, *args):
        return (abstract if _abstract.get() else stock)(variable, *args)

    return chosen


_methods = _Methods()


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Counts automatic layer names from the start, as in a program that only builds this model.

    Public replacement: `keras.utils.clear_session`, which would drop the user's state as well.
    """
    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", before)


def symbolic_build(model: keras.Model, batch: tuple, mode: str) -> None:
    """Builds model, metrics, loss and optimizer from a batch of `keras.KerasTensor`, as fit does.

    Public replacement: none; `model.build` builds neither metrics nor the optimizer.

    Args:
        model: The model.
        batch: `(x, y, sample_weight)`.
        mode: `"predict"` builds only the layers.
    """
    if mode != "predict":
        model._symbolic_build(data_batch=batch)
    elif not is_built(model):
        output_spec(model, batch[0])


def output_spec(model: keras.Model, x: object) -> Any:
    """The outputs of a model as `keras.KerasTensor`; layers without weights get them.

    Public replacement: calling the model, which leaves a node in its graph.

    Args:
        model: The model.
        x: Its input, of `keras.KerasTensor`.
    """
    return keras.src.backend.compute_output_spec(model, x, training=False)


def layer_names(model: keras.Model) -> set[str]:
    """Names of all layers of a model, at any depth, and of its optimizer.

    Public replacement: none; `model.layers` leaves out layers inside of custom layers.

    Args:
        model: A model that has an attribute `optimizer`, as `compile` sets it; it may be `None`.
    """
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    # An uncompiled model, which can predict, has no such attribute.
    optimizer = getattr(model, "optimizer", None)
    return names | ({optimizer.name} if optimizer is not None else set())


def is_built(model: keras.Model) -> bool:
    """Whether all weights that a model uses exist; a layer that it never calls gets none.

    Public replacement: none; `model.built` can be true before its layers are.

    Args:
        model: The model.
    """
    if all(layer.built for layer in model._flatten_layers()):
        return True
    # within a call, layers that are not built may be built later
    called = model._called and global_state.get_global_attribute("current_call_ctx") is None
    return model.built and (called or isinstance(model, Functional))


@contextlib.contextmanager
def attributes_restored(variables: list, *names: str) -> Iterator[None]:
    """Restores the layouts, and other attributes, that variables had before.

    Public replacement: none; `keras.Variable(layout=...)` sets a layout only at construction.
    """
    names = ("_layout", *names)
    before = [{n: vars(v)[n] for n in names if n in vars(v)} for v in variables]
    try:
        yield
    finally:
        for variable, attributes in zip(variables, before, strict=True):
            for name in names:
                vars(variable).pop(name, None)
            vars(variable).update(attributes)


@contextlib.contextmanager
def compiled_anew(model: keras.Model) -> Iterator[None]:
    """A context in which losses and metrics may see a batch, and are reset afterwards.

    Keras decides once, by the first batch, what `"accuracy"` means and how losses pair with
    outputs.

    Args:
        model: The model; losses and metrics that have already seen a batch are not reset.

    Public replacement: `compile`, which makes a new state of training as well.
    """
    own = {name: getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics")}
    unseen = {name: value for name, value in own.items() if value is not None and not value.built}
    try:
        _set_untracked(model, {name: _made_again(value) for name, value in unseen.items()})
        yield
    finally:
        _set_untracked(model, unseen)


def _made_again(each: CompileLoss | CompileMetrics) -> CompileLoss | CompileMetrics:
    names: dict[str, Any] = {"output_names": each.output_names}
    if isinstance(each, CompileLoss):
        return CompileLoss(each._user_loss, each._user_loss_weights, each.reduction, **names)
    return CompileMetrics(each._user_metrics, each._user_weighted_metrics, **names)


def _set_untracked(model: keras.Model, attributes: dict[str, Any]) -> None:
    with DotNotTrackScope():
        for name, value in attributes.items():
            setattr(model, name, value)


def set_layout(variable: keras.Variable, layout: object) -> None:
    """Sets a variable's layout and leaves its value where it is.

    Public replacement: none; see `attributes_restored`.

    Args:
        variable: The variable, also one without a value.
        layout: The layout for Keras to find, such as a `jax.sharding.NamedSharding`.
    """
    variable._layout = layout


def without_vjp(exported: jax.export.Exported) -> jax.export.Exported:
    """An exported program without the closure of its gradient, so that it can be pickled.

    Public replacement: `Exported.serialize`, which needs the package flatbuffers.

    Args:
        exported: The result of `jax.export`, which does not change.
    """
    return dataclasses.replace(exported, _get_vjp=None)
