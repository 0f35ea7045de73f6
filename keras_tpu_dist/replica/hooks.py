"""Methods of Keras that behave differently while code runs once per replica.

They are replaced once, and call Keras's own methods outside of replica code.
"""

from keras_tpu_dist import _keras
from keras_tpu_dist.replica.context import running_context, running_recorder


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
    if not optimizer.built:
        optimizer.build(weights)
    state = list(optimizer.variables)
    values = [[v.value for v in variables] for variables in (state, weights)]
    new_weights, new_state = optimizer.stateless_apply(values[0], grads, values[1])
    for variable, value in zip([*weights, *state], [*new_weights, *new_state], strict=True):
        variable.assign(value)


_keras.declare(
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
