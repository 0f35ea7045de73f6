"""What Keras does differently while code runs once per replica.

Some public methods of Keras are replaced, once, and act only there; a hook in Keras for each
would replace the replacing.
"""

import functools

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.replica.context import running_context, running_recorder


def install() -> None:
    """Replaces the methods; a second call does nothing."""
    if getattr(keras.random.SeedGenerator, "_keras_tpu_dist_installed", False):
        return
    keras.random.SeedGenerator._keras_tpu_dist_installed = True  # pyright: ignore
    _keras.replace_method(keras.random.SeedGenerator, "next", _next_seed)
    _keras.replace_method(keras.Variable, "assign_add", functools.partial(_add, 1))
    _keras.replace_method(keras.Variable, "assign_sub", functools.partial(_add, -1))
    _keras.replace_method(keras.StatelessScope, "get_current_value", _current_value)
    _keras.replace_method(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)


def _next_seed(stock, generator, *args, **kwargs):
    """The state advances alike on all replicas; the seed that is drawn is the replica's own."""
    seed, context = stock(generator, *args, **kwargs), running_context()
    return seed if context is None else context._own_seed(seed)


def _add(sign: int, stock, variable, value):
    """Tells the recorder what was added, which an assignment alone does not show."""
    recorder = running_recorder()
    if recorder is None or _keras.stateless_scope() is not recorder:
        return stock(variable, value)
    return recorder.add(variable, value, sign, stock)


def _current_value(stock, scope, variable):
    """A scope inside of the replica's code that has no value asks the recorder, not Keras."""
    value, recorder = stock(scope, variable), running_recorder()
    return recorder.read(variable) if value is None and recorder is not None else value


def _apply_scaled(stock, optimizer, grads, trainable_variables=None):
    """Loss scaling without assignments in branches, whose values would not come out of them."""
    if running_recorder() is None:
        return stock(optimizer, grads, trainable_variables)
    weights = trainable_variables or optimizer._trainable_variables
    if not optimizer.built:
        optimizer.build(weights)
    state = list(optimizer.variables)
    values = [[v.value for v in variables] for variables in (state, weights)]
    new_weights, new_state = optimizer.stateless_apply(values[0], grads, values[1])
    for variable, value in zip([*weights, *state], [*new_weights, *new_state]):
        variable.assign(value)
