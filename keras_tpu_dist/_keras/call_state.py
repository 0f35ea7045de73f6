"""What `call` reads and assigns of variables that Keras's step does not give it.

A step gives `call` the variables of layers. Those of metrics and of the optimizer are empty
meanwhile in stock Keras, so that a `call` that reads them fails. Under a strategy variables keep
their values, so the step gives `call` these too, and passes on what it assigns to metrics.
"""

import contextvars
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.calls import is_of_inner_trace, recomputes, traced_program
from keras_tpu_dist._keras.seam import Replacement, declare
from keras_tpu_dist._keras.state import GROUPS, group_of, stateless_scope
from keras_tpu_dist._keras.structure import flatten_layers
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.setting import setting

_OTHER_GROUPS = ("metrics", "optimizer")


class _Call:
    """A call of a model in a step, and what it reads and assigns beside the model's weights.

    Args:
        model: The model.
        kind: The step's; `""` in a step of the user's, as in replica code.
        values: The values of `_OTHER_GROUPS` in the step's state.
        carried: The values of the metrics' variables that the step goes on with, updated when
            `call` has returned; `None` if the step goes on with others.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        values: dict[str, Sequence[Any]],
        carried: list | None = None,
    ):
        self.model, self.kind, self.values, self.carried = model, kind, values, carried
        self.assigned: dict[int, Any] = {}

    def enters(self, scope: keras.StatelessScope) -> None:
        """Gives the values to the scope in which `call` runs."""
        pairs = [
            pair
            for name, values in self.values.items()
            for pair in zip(group_of(self.model, name), values, strict=True)
        ]
        for variable in self._of("metrics"):
            # Within a layer of mixed precision, Keras would count in bfloat16, in which 256 + 1
            # is 256.
            variable._autocast = False
        # Keras's own mapping has the weights.
        mapping = keras.StatelessScope(pairs).state_mapping | scope.state_mapping
        scope.state_mapping = _Mapping(mapping, self._kept())
        scope.__dict__[_CALL] = self

    def _kept(self) -> dict[int, Any]:
        """Variables whose values a program keeps from when it was traced."""
        if not self.kind:
            return {}
        others = [v for name in _OTHER_GROUPS if name not in self.values for v in self._of(name)]
        return {id(variable): variable for variable in others}

    def _of(self, name: str) -> list:
        return list(group_of(self.model, name))

    def check(self, variable: Any) -> None:
        """Raises an error if `call` assigns a variable that the step cannot pass on."""
        if "optimizer" in self.values and _is_in(variable, self._of("optimizer")):
            raise value_error(
                "A step takes the optimizer's variables from the step before; `call` may read "
                "them, and assigns none.",
                received=f"an assignment of {variable.path!r} in the call of a layer of model "
                f"{self.model.name!r}.",
                fix="Give the layer a variable of its own, or assign this one in a callback.",
            )
        counts = "metrics" in self.values and self.carried is None
        if counts and _is_in(variable, self._of("metrics")):
            raise value_error(
                "compute_loss_and_updates of keras.Model passes on what `call` assigns to metrics.",
                received=f"an update of {_owner(variable, self.model)} in call, and a step of "
                f"{type(self.model).__name__!r} that calls stateless_call itself.",
                fix="Call super().compute_loss_and_updates(...) there, and go on with the metrics' "
                "variables that it returns; or update the metric in compute_metrics.",
            )

    def ends(self, scope: keras.StatelessScope) -> None:
        """Passes on what `call` assigned to metrics, and says what is lost."""
        known = list(self.model.variables)
        if self.carried is not None:
            metrics = self._of("metrics")
            self.carried[:] = [scope.state_mapping[id(variable)] for variable in metrics]
            known += metrics
        elif self.kind == "predict":
            known += self._of("metrics")  # a prediction counts in no metric
        passed_on = set(map(id, known))
        for variable in self.assigned.values():
            if id(variable) not in passed_on:
                log_once(
                    f"model {self.model.name!r}: what call assigns to "
                    f"{_owner(variable, self.model)} is lost, as it is without a strategy: "
                    f"{_WHY_LOST if self.kind else _WHY_LOST_IN_LOOP}",
                    logging.WARNING,
                )


_WHY_LOST = (
    "a step passes on the variables of the model's layers, and those of model.metrics, which has "
    "no metrics of models within the model. Give the metric to a layer, and track every variable "
    "as an attribute of one"
)
_WHY_LOST_IN_LOOP = (
    "stateless_call returns the variables of layers alone. Return from call what the metric "
    "needs, and update it outside"
)


class _Mapping(dict):
    """The mapping of a scope, which notes if a variable is read whose value a program keeps."""

    def __init__(self, mapping: dict, kept: dict[int, Any]):
        super().__init__(mapping)
        self._kept = kept
        self.read: dict[int, Any] = {}

    def get(self, key, default=None):
        if key in self._kept and key not in self:
            self.read[key] = self._kept[key]
        return super().get(key, default)


# The call of a stateless scope.
_CALL = "_keras_tpu_dist_call"
# The program that was traced when a scope was entered.
_PROGRAM = "_keras_tpu_dist_program"

# The model whose step runs in this thread.
_step: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("step", default=None)
# The call whose scope is entered next.
_begins: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("begins", default=None)
# By model and kind of step: variables that a program has as constants, and their values.
_constants: "weakref.WeakKeyDictionary[Any, dict[str, list]]" = weakref.WeakKeyDictionary()


def step_of_keras(model: Any, kind: str) -> Callable[[Any, Any], Any]:
    """A step of Keras, or of the user's class, `(state, data) -> (outputs, state)`.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    step = getattr(model, f"{kind}_step")

    def stepped(state: Any, data: Any) -> Any:
        values = dict(zip(GROUPS[kind], state, strict=False))
        others = {name: values[name] for name in _OTHER_GROUPS if name in values}
        with setting(_step, _Call(model, kind, others)):
            return step(state, data)

    return stepped


def constants_changed(model: Any, kind: str) -> bool:
    """Whether a variable was assigned that a program of a model has as a constant.

    Args:
        model: The model.
        kind: The step's.
    """
    constants = _constants.get(model, {}).get(kind, [])
    changed = any(variable._value is not value for variable, value in constants)
    if changed:
        constants.clear()
    return changed


def _owner(variable: Any, model: Any) -> str:
    """A variable in words, a metric's by its metric and layer."""
    for layer in flatten_layers(model):
        for metric in layer._metrics:
            if _is_in(variable, metric.variables):
                of = "model" if isinstance(layer, keras.Model) else "layer"
                return f"metric {metric.name!r} of {of} {layer.name!r}"
    if _is_in(variable, model.variables):
        return f"variable {variable.path!r}"
    return f"variable {variable.path!r}, which the model does not track,"


def _is_in(variable: Any, variables: Sequence[Any]) -> bool:
    return any(variable is other for other in variables)


def _compute_loss_and_updates(
    stock, model, trainable_variables, non_trainable_variables, metrics_variables, *args, **kwargs
):
    # Keras computes the loss with this list when `call` has returned.
    carried = list(metrics_variables)
    step = _step.get()
    run = (stock, model, trainable_variables, non_trainable_variables, carried)
    if step is None or step.model is not model:
        if stateless_scope() is None:
            return stock(*run[1:], *args, **kwargs)
        step = _Call(model, "", {})  # in replica code
    call = _Call(model, step.kind, step.values | {"metrics": list(metrics_variables)}, carried)
    with setting(_step, call):
        return stock(*run[1:], *args, **kwargs)


def _stateless_call(stock, model, *args, **kwargs):
    step = _step.get()
    if step is None or step.model is not model:
        if stateless_scope() is None:
            return stock(model, *args, **kwargs)
        step = _Call(model, "", {})
    call = _Call(model, step.kind, step.values, step.carried)
    with setting(_begins, call):
        return stock(model, *args, **kwargs)


def _entered(stock, scope):
    scope.__dict__[_PROGRAM] = traced_program()
    call = _begins.get()
    if call is not None:
        _begins.set(None)
        call.enters(scope)
    return stock(scope)


def _left(stock, scope, kind=None, *error):
    stock(scope, kind, *error)
    call = scope.__dict__.get(_CALL)
    if call is not None and kind is None:
        call.ends(scope)
        read = [(variable, variable._value) for variable in scope.state_mapping.read.values()]
        if read:
            _constants.setdefault(call.model, {}).setdefault(call.kind, []).extend(read)


def _updated(stock, scope, update):
    call, (variable, value) = scope.__dict__.get(_CALL), update
    if not variable.trainable and is_of_inner_trace(value):
        _check_place(scope, call, variable)
    if call is not None:
        call.check(variable)
        call.assigned[id(variable)] = variable
    stock(scope, update)


def _check_place(scope: Any, call: _Call | None, variable: Any) -> None:
    """Raises an error if a variable gets a value that is gone when the scope is left."""
    program, step = traced_program(), call or _step.get()
    # Keras computes shapes in a trace of its own, and drops what is assigned there.
    drops = call is None and not recomputes(program)
    if drops or program is scope.__dict__[_PROGRAM] or active_strategy() is None:
        return
    what = f"variable {variable.path!r}" if step is None else _owner(variable, step.model)
    raise value_error(
        "`call` assigns variables outside of branches, loops and functions that JAX compiles or "
        "computes again.",
        received=f"an assignment to {what} within one.",
        fix="Write keras_tpu_dist.remat(layer) or TPUStrategy(remat=...) for keras.RematScope and "
        "jax.checkpoint; return the new value from a branch or a loop, and assign it outside.",
    )


_SCOPE = "keras:StatelessScope"
_HOOK = "a step that gives `call` all variables of a model"

declare(
    Replacement(
        "keras.src.backend.jax.trainer:JAXTrainer",
        "compute_loss_and_updates",
        _compute_loss_and_updates,
        why="what `call` assigns to a metric counts; Keras drops it",
        hook=_HOOK,
        parameters=("trainable_variables", "non_trainable_variables", "metrics_variables"),
    ),
    Replacement(
        "keras:Layer",
        "stateless_call",
        _stateless_call,
        why="`call` reads metrics and the optimizer, as they are in the step",
        hook=_HOOK,
    ),
    *(
        Replacement(_SCOPE, name, by, why="a scope knows what `call` assigns in it", hook=_HOOK)
        for name, by in (("__enter__", _entered), ("__exit__", _left), ("add_update", _updated))
    ),
)
