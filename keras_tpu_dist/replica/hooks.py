"""Methods of Keras that behave differently while code runs once per replica.

They are replaced once, and call Keras's own methods outside of replica code.
"""

import contextlib

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.replica.context import left, running_context, running_recorder


def _next_seed(stock, generator, *args, **kwargs):
    """Draws a seed for this replica; the generator's state advances equally on all replicas."""
    seed, context = stock(generator, *args, **kwargs), running_context()
    return seed if context is None else context._own_seed(seed)


def _add(sign: int, stock, variable, value):
    """Passes the added value to the recorder: sums over replicas add up additions, not results."""
    scope = None if running_recorder() is None else _keras.stateless_scope()
    note = getattr(scope, "note_addition", None)
    return stock(variable, value) if note is None else note(variable, value, sign, stock)


def _current_value(stock, scope, variable):
    """A stateless scope in replica code reads values that it does not have from the recorder."""
    value, recorder = stock(scope, variable), running_recorder()
    return recorder.read(variable) if value is None and recorder is not None else value


def _apply_scaled(stock, optimizer, grads, trainable_variables=None):
    """Loss scaling without assignments in branches, whose values would be tracers of the branch."""
    if running_recorder() is None:
        return stock(optimizer, grads, trainable_variables)
    weights = trainable_variables or _keras.weights_of(optimizer)
    _build_optimizer(optimizer, weights)
    state = list(optimizer.variables)
    values = [[v.value for v in variables] for variables in (state, weights)]
    new_weights, new_state = optimizer.stateless_apply(values[0], grads, values[1])
    for variable, value in zip([*weights, *state], [*new_weights, *new_state], strict=True):
        variable.assign(value)


def _apply(stock, optimizer, grads, trainable_variables=None):
    if running_recorder() is not None and trainable_variables is not None and len(grads):
        trainable_variables = list(trainable_variables)
        _build_optimizer(optimizer, trainable_variables)
    return stock(optimizer, grads, trainable_variables)


def _build_optimizer(optimizer, weights) -> None:
    """Builds an optimizer with the true values of its weights, which its slots may begin with.

    In the trace, weights read as zeros or as inputs of the program, and an assignment would be made
    in the first trace alone.
    """
    if not optimizer.built:
        with _outside(optimizer), keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(weights)
        optimizer.built = True


def _maybe_build(stock, layer, *args, **kwargs):
    """Builds a layer with true values, which its `build` may assign."""
    recorder = running_recorder()
    if layer.built or recorder is None or _keras.scope_around_calls() is not recorder:
        return stock(layer, *args, **kwargs)
    with _outside(layer):
        return stock(layer, *args, **kwargs)


@contextlib.contextmanager
def _outside(of):
    building = running_recorder().building(of.name)
    with left(), _keras.outside_of_traces(), building:
        yield


_keras.declare(
    _keras.Replacement(
        "keras.src.layers.layer:Layer",
        "_maybe_build",
        _maybe_build,
        why="a layer that is built in replica code has the values that its `build` assigns",
        hook="a scope that is notified of what is built",
    ),
    *(
        _keras.Replacement(
            owner,
            "apply",
            _apply,
            why="the slots of an optimizer that is built in replica code may begin with weights",
            hook="a scope that is notified of what is built",
            parameters=("grads", "trainable_variables"),
        )
        for owner in (
            "keras.src.optimizers.base_optimizer:BaseOptimizer",
            "keras.optimizers:MultiOptimizer",
        )
    ),
    _keras.Replacement(
        "keras.random:SeedGenerator",
        "next",
        _next_seed,
        why="every replica draws random numbers of its own",
        hook="a scope that supplies seeds",
    ),
    _keras.Replacement(
        "keras:StatelessScope",
        "get_current_value",
        _current_value,
        why="a scope that is opened in replica code reads what the replica wrote",
        hook="stateless scopes that nest",
        parameters=("variable",),
    ),
    _keras.Replacement(
        "keras.optimizers:LossScaleOptimizer",
        "apply",
        _apply_scaled,
        why="Keras assigns variables inside a branch, which JAX cannot do",
        hook="LossScaleOptimizer.apply that works on JAX",
        parameters=("grads", "trainable_variables"),
    ),
)
_keras.serve_additions(_add)
