"""The loss and the gradients of models in a loop of your own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_tpu_dist.common.errors import value_error


class _Calls(keras.StatelessScope):
    """Calls of models on the values that are differentiated; what they assign is kept for later.

    Variables without a value here are read as before: from the replica, or their own.
    """

    def __init__(self):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, Any] = {}
        self.added: dict[int, Any] = {}
        self._sums: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable; called by Keras."""
        if id(variable) in self.added:
            raise _mixed(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple) -> None:
        """Takes an assignment; called by Keras."""
        variable, _ = update
        if id(variable) in self.added:
            raise _mixed(variable)
        self.assigned[id(variable)] = variable
        super().add_update(update)

    def note_addition(self, variable: Any, value: Any, sign: int, stock: Any) -> Any:
        """Takes what replica code adds to a variable: a sum adds up the additions of replicas."""
        if variable.aggregation != "sum" or variable.synchronization == "on_read":
            return stock(variable, value)
        if id(variable) in self.assigned:
            raise _mixed(variable)
        self.added[id(variable)] = variable
        value = sign * jnp.asarray(value, variable.dtype)
        self._sums[id(variable)] = self._sums.get(id(variable), 0) + value
        return value

    def updates(self) -> tuple[list, list]:
        """New values of assigned variables, and what is added to others."""
        return [self.state_mapping[key] for key in self.assigned], [*self._sums.values()]


def _mixed(variable: Any) -> ValueError:
    return value_error(
        'A variable with aggregation="sum" that loss_and_gradients adds to is not read or assigned '
        "in the same call.",
        received={"variable": variable.path},
        fix="Return what is added from the function, and add it after the call.",
    )


def loss_and_gradients(function: Callable[[], Any], models: Any) -> tuple[Any, Any]:
    """The loss that a function computes with models, and its gradients.

    Call it in the function of `strategy.run` or `strategy.loop`, or anywhere else. The function
    calls models and layers as usual. What they assign, such as the averages of
    `BatchNormalization`, the states of seeds, or metrics, is assigned once, after the gradients are
    computed. Keras's own losses of layers are in `model.losses`; add them if you want them.

    In replica code the gradients are those of this replica's rows: combine them with
    `get_replica_context().all_reduce("mean", gradients)`.

    Args:
        function: A function without arguments that returns the loss, a number; or a tuple whose
            first entry is the loss.
        models: The model whose trainable variables are differentiated, or a list of variables; or a
            tuple or dict of those.

    Returns:
        What the function returned, and the gradients in the structure of `models`. Those of a model
        are a list in the order of its `trainable_variables`.

    Raises:
        ValueError: If a model is not built or has nothing that trains, or the loss is no number.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    >>> model.set_weights([np.ones((3, 1))])
    >>> x = np.array([[1.0, 2.0, 3.0]])
    >>> loss, gradients = ktd.loss_and_gradients(lambda: keras.ops.mean(model(x)), model)
    >>> print(loss, gradients[0].ravel())
    6.0 [1. 2. 3.]
    """
    if not callable(function):
        raise value_error(
            "loss_and_gradients takes a function that computes the loss.",
            received={"function": function},
            fix="Write loss_and_gradients(lambda: loss_fn(y, model(x, training=True)), model).",
        )
    groups = jax.tree.map(_trained, models, is_leaf=_is_group)
    flat, structure = jax.tree.flatten(groups, is_leaf=lambda group: isinstance(group, list))
    variables = {id(variable): variable for group in flat for variable in group}
    if not variables:
        raise _nothing_trains(models)
    calls = _Calls()

    def differentiated(values: list) -> Any:
        calls.state_mapping.update(zip(variables, values, strict=True))
        with calls:
            returned = function()
        loss = returned[0] if isinstance(returned, tuple) else returned
        return _checked(loss), (returned, calls.updates())

    # A list, in the order of the models: sorted by `id`, the programs of processes would differ.
    values = [jnp.asarray(variable.value) for variable in variables.values()]
    compute = jax.value_and_grad(differentiated, has_aux=True)
    (_, (returned, (assigned, added))), gradients = compute(values)
    for variable, value in zip(calls.assigned.values(), assigned, strict=True):
        variable.assign(value)
    for variable, value in zip(calls.added.values(), added, strict=True):
        variable.assign_add(value)
    by_variable = dict(zip(variables, gradients, strict=True))
    lists = [[by_variable[id(variable)] for variable in group] for group in flat]
    return returned, jax.tree.unflatten(structure, lists)


def _is_group(value: Any) -> bool:
    return isinstance(value, list) or hasattr(type(value), "trainable_variables")


def _trained(group: Any) -> list:
    """The variables of a model, or those of a list."""
    if isinstance(group, list):
        variables = group
    elif hasattr(type(group), "trainable_variables"):
        if not group.built:
            raise value_error(
                "A model must have its weights before it is differentiated.",
                received=f"{type(group).__name__} {group.name!r}, which is not built.",
                fix="Give it an Input, or call model.build(shape) first.",
            )
        variables = list(group.trainable_variables)
    else:
        variables = []
    if not variables or not all(isinstance(v, keras.Variable) for v in variables):
        raise _nothing_trains(group)
    return variables


def _nothing_trains(models: Any) -> ValueError:
    return value_error(
        "loss_and_gradients differentiates models, or lists of variables, that train.",
        received={"models": models},
        fix="Pass a model, model.trainable_variables, or a tuple of models.",
    )


def _checked(loss: Any) -> Any:
    array = jnp.asarray(loss)
    if array.shape or not jnp.issubdtype(array.dtype, jnp.floating):
        raise value_error(
            "The loss is one floating-point number.",
            received={"shape": array.shape, "dtype": str(array.dtype)},
            fix="Take its mean: keras.ops.mean(loss).",
        )
    return array
