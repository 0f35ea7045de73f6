"""The training state of a model: its variables in Keras's order, their values and layouts."""

import functools
import threading
from typing import Any

import jax
import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope

from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.structure import weights_by_training
from keras_tpu_dist._keras.variables import OWNER

# The groups of variables that a step function reads and returns, in Keras's order.
GROUPS = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


class StateGroup:
    """One list of a training state, as Keras's loop passes it from one launch to the next.

    Keras sets the state on the model after every launch, and searches lists for layers and
    variables; this class avoids that. It looks empty, so `jax_state_sync` assigns nothing: the
    variables follow every launch, and assignments of callbacks must not be overwritten.
    """

    __slots__ = ("_variables", "values")

    def __init__(self, values: list, variables: list):
        self.values, self._variables = values, variables

    def cast(self) -> None:
        """Casts values to the dtypes of their variables, as Keras does by assigning them."""
        for variable in self._variables:
            value = variable._value
            if _name_of(value.dtype) != variable._dtype:
                variable.assign(value)

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)

    def __bool__(self):
        return False


_name_of = functools.cache(keras.backend.standardize_dtype)


# Where threads record on a model whether they have read its state.
_RECORDS = "_keras_tpu_dist_records"


class OfThread:
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


def state_variables(model: Any) -> list:
    """All variables a training step reads or writes. See `state_shardings`."""
    return [variable for group in state_groups(model) for variable in group]


def state_shardings(model: Any, kind: str) -> tuple[list, ...]:
    """The layouts of the state of a step function, in Keras's order.

    Args:
        model: The model, which is built.
        kind: The step function's: `"train"`, `"test"` or `"predict"`.
    """
    return tuple([v._layout for v in group_of(model, name)] for name in GROUPS[kind])


def state_groups(model: Any, kind: str = "train") -> tuple[list, ...]:
    """The variables of a step function's state, in Keras's order.

    Args:
        model: The model.
        kind: The step function's: `"train"`, `"test"` or `"predict"`.
    """
    others = [list(group_of(model, name)) for name in GROUPS[kind][2:]]
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
    layouts = [v._layout or value.sharding for v, value in zip(variables, values, strict=True)]
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
            for v, owner in zip(variables, owners, strict=True)
        ]
    asked = [i for i, value in enumerate(values) if value is None]
    if asked:
        with AutocastScope(None):
            for i in asked:
                values[i] = variables[i].value
    return values


def holds(variable: Any, value: Any) -> bool:
    """Whether a value is the array of a variable itself, and not a copy or cast of it.

    Args:
        variable: A `keras.Variable`.
        value: A value that was read from it.
    """
    return variable._value is value


def follow_changes(groups: tuple[list, ...], changes: tuple) -> None:
    """Assigns the values that a step changed, in the stateless scope if there is one.

    Args:
        groups: Lists of variables.
        changes: A list of values for every group; `None` for unchanged ones.
    """
    scope = stateless_scope()
    for variables, values in zip(groups, changes, strict=True):
        for variable, value in zip(variables, values, strict=True):
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
        groups: Lists of variables.
        state: A list of values for every group, in its order; further values are ignored.
    """
    for variables, values in zip(groups, state, strict=False):
        for variable, value in zip(variables, values, strict=True):
            variable._value = value


def is_value_of(value: Any, variable: Any) -> bool:
    """Whether a value is the array of a variable, or its first one. See `move_variables`.

    Args:
        value: An array.
        variable: A `keras.Variable`.
    """
    held = getattr(variable, "_value", None)
    return held is None or value is held


def forget_state(model: Any) -> None:
    """Tells the trainer that the variables, not its own record, hold the state.

    Args:
        model: The model, which in Keras is the trainer.
    """
    model._jax_state = None
    model._jax_state_synced = True


def keep_metrics(model: Any, values: list | None) -> None:
    """Lets an epoch without data report the metrics of the one before, as Keras does by accident.

    Keras clears the variables for the first step of the epoch, which never runs, and then restores
    its record of the epoch before. After a validation it has none, and fails.

    Args:
        model: The model.
        values: The values of the metrics' variables after the last step, or `None` without one.
    """
    if values is not None and model._jax_state is None:
        follow_state((model.metrics_variables,), (values,))


def has_state(model: Any) -> bool:
    """Whether a trainer may hold state that its variables do not. See `forget_state`."""
    return getattr(model, "_jax_state", None) is not None or not model._jax_state_synced


def variable_layout(variable: Any) -> Any:
    """The layout of a variable, or `None`. See `move_variables`."""
    return variable._layout


def variable_layouts(variables: list) -> list:
    """The layouts of variables. See `variable_layout`.

    Args:
        variables: The variables.
    """
    return [v._layout for v in variables]


def trainability(variables: list, layers: list) -> list[bool]:
    """Whether variables and layers train. A program is traced for that.

    Args:
        layers: The layers; a `BatchNormalization` that does not train computes something else.
    """
    return [*[v._trainable for v in variables], *[layer._trainable for layer in layers]]


def stateless_scope() -> Any:
    """The `keras.StatelessScope` that is entered, or `None`; public replacement: none."""
    return global_state.get_global_attribute("stateless_scope")


def group_of(model, name: str) -> list:
    if name == "optimizer":
        # An uncompiled model, which can predict, has no such attribute.
        optimizer = getattr(model, "optimizer", None)
        return [] if optimizer is None else optimizer.variables
    return getattr(model, f"{name}_variables")
