"""Keras variables inside replica code: read, updated, and combined over the replicas."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.processes.arrays import put, whole
from keras_tpu_dist.replica.context import ReplicaContext
from keras_tpu_dist.training import adoption
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")

# On an "on_read" variable: its combined value, and the replicas' values it was combined from.
_copies = _keras.Mark("_keras_tpu_dist_copies")


class Recorder(keras.StatelessScope):
    """Reads and updates of variables while one replica's function is traced.

    A variable that is not known yet reads as zeros and is added to `unknown`. The function is then
    traced once more with the values of all of them as inputs of the program.

    An update is combined by the variable's `aggregation`, as in `tf.distribute`. `"mean"` and
    `"sum"` are combined at once, so that a later read gets the combined value.
    `"only_first_replica"` and `"none"` are combined only if the replicas' values may differ
    (`combine`). A variable with `synchronization="on_read"` has separate values on the replicas,
    which are combined on exit.

    Args:
        context: The replica's context.
        values: Values of the known variables, by `id`: shared values, and the replica's own.
        combine: The `id`s of variables whose updates differ and must be combined.
    """

    def __init__(self, context: ReplicaContext, values: dict[int, Any], combine: set[int]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._context = context
        # Keras's own dict, from which nested scopes copy.
        self._values = self.state_mapping = dict(values)
        self._combine = combine
        self._program = _keras.traced_program()
        self.unknown: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}
        # The variable of every assignment, in order.
        self.assigned: list[Any] = []

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable at this point of the function; called by Keras.

        See `read`.
        """
        return self.read(variable)

    def read(self, variable: Any) -> Any:
        """The value of a variable at this point of the function.

        Args:
            variable: A `keras.Variable`; one that is not known yet is noted and reads as zeros.
        """
        value = self._values.get(id(variable))
        if value is not None:
            return value
        self.unknown[id(variable)] = variable
        # New zeros at every read, because a read may belong to an inner trace.
        zeros = jnp.zeros(variable.shape, _own_dtype(variable))
        if is_own(variable):
            return zeros + jnp.zeros_like(zeros) * self._context.replica_id_in_sync_group.astype(
                zeros.dtype
            )
        return zeros

    def add_update(self, update: tuple) -> None:
        """Takes an assignment; called by Keras.

        Args:
            update: The variable and the value that this replica assigns.
        """
        variable, value = update
        self._check_place(variable)
        self._set(variable, self.combined(variable, value))

    def note_addition(self, variable: Any, value: Any, sign: int, stock: Any) -> Any:
        """Handles `assign_add` or `assign_sub`: a sum adds up the additions, not the results.

        Args:
            variable: The variable.
            value: What this replica adds or subtracts.
            sign: 1 to add, -1 to subtract.
            stock: Keras's own method, called for a variable whose updates are not summed here.
        """
        if is_own(variable) or variable.aggregation != "sum":
            return stock(variable, value)
        self._check_place(variable)
        value = jnp.asarray(value, _own_dtype(variable))
        total = self.read(variable) + sign * self._context.all_reduce("sum", value)
        if total.shape != variable.shape:
            return stock(variable, value)  # raises the error for this
        self._set(variable, total)
        return self._values[id(variable)]

    def building(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context in which something is built, outside of the trace.

        Variables that the function has assigned have no values there, and raise if they are read.
        """

        def read(variable: Any) -> None:
            raise value_error(
                "What replica code builds begins with values from before the call.",
                received=f"{name!r}, which reads {variable.path!r} in its build(), and an "
                "assignment of it earlier in the same call.",
                fix="Build it before strategy.run: optimizer.build(model.trainable_variables), or "
                "layer.build(shape).",
            )

        return _keras.values_hidden(self.updated.values(), read)

    def finish(self) -> dict[int, Any]:
        """The new values of updated variables, by `id`; for "on_read" ones the replica's own."""
        return {key: self._values[key] for key in self.updated}

    def _check_place(self, variable) -> None:
        if _keras.traced_program() is self._program:
            return
        raise value_error(
            "A replica function assigns variables outside of its branches, loops and compiled "
            "functions.",
            received=f"an assignment of {variable.path!r} within one.",
            fix="Return the new value from there and assign it outside: "
            "variable.assign(jax.lax.cond(condition, lambda: new, lambda: variable.value)).",
        )

    def _set(self, variable, value) -> None:
        if id(variable) not in self._values:
            self.unknown[id(variable)] = variable
        self.updated[id(variable)] = variable
        self.assigned.append(variable)
        self._values[id(variable)] = jnp.asarray(value, _own_dtype(variable))

    def combined(self, variable: Any, value: Any) -> Any:
        """The value of a variable after all replicas have assigned theirs.

        Args:
            variable: The variable.
            value: This replica's.
        """
        how = variable.aggregation
        if is_own(variable):
            return value
        if how == "mean":
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                raise value_error(
                    'A variable with aggregation="mean" must hold floating-point numbers.',
                    received={"variable": variable.path, "dtype": str(value.dtype)},
                    fix='Give it a float dtype, or aggregation="sum" or "only_first_replica", or '
                    "assign it outside of strategy.run.",
                )
            return self._context.all_reduce("mean", value)
        if how == "sum":
            return self._context.all_reduce("sum", value)
        if id(variable) not in self._combine:
            return value
        if how == "only_first_replica":
            return self._context._of_first_replica(value)
        return self._context.all_reduce("mean", value)


def check_assignments(first: list, last: list) -> None:
    """Raises if one trace of a function assigns other variables than the first one did.

    Only what the last trace does is in the program.
    """
    counts = [Counter(map(id, each)) for each in (first, last)]
    for variable in (*first, *last):
        before, after = (count[id(variable)] for count in counts)
        if before != after:
            raise runtime_error(
                "A replica function must assign the same variables every time it is traced.",
                received=f"{before} assignment(s) of {variable.path!r} in the first trace, and "
                f"{after} in the last one, which alone is compiled.",
                fix="Assign what is assigned only in the first call outside, before strategy.run; "
                "there you can also build models, optimizers and metrics.",
            )


def read_combined(
    variable: Any, value: Any, context: ReplicaContext, combine: set[int]
) -> jax.Array:
    """The value of an "on_read" variable for who reads it outside of the replicas.

    Args:
        variable: The variable.
        value: This replica's own.
        context: The replica's context.
        combine: The `id`s of variables whose values differ and must be combined.
    """
    how = variable.aggregation
    if how in ("sum", "mean"):
        return context.all_reduce(how, value).astype(value.dtype)
    if how == "only_first_replica" and id(variable) in combine:
        return context._of_first_replica(value)
    return value


def is_own(variable: Any) -> bool:
    """Whether every replica has its own value of a variable, combined when it is read outside.

    Args:
        variable: A `keras.Variable`.
    """
    return variable.synchronization == "on_read"


def apart(variables: Iterable[Any]) -> tuple[list, list]:
    """Divides variables into shared ones, and those with separate values on the replicas.

    Args:
        variables: The variables.
    """
    shared, own = [], []
    for variable in variables:
        (own if is_own(variable) else shared).append(variable)
    return shared, own


def to_combine(differing: list[Any], already: set[int]) -> set[int]:
    """Decides about variables whose updates differ from replica to replica.

    Args:
        differing: Updated variables with aggregation `"none"` or `"only_first_replica"` whose new
            values may differ.
        already: The `id`s decided before.
    """
    for variable in sorted(differing, key=lambda v: not v.trainable):
        if variable.aggregation == "none":
            _check_can_average(variable)
    for variable in differing:
        if variable.aggregation == "none" and id(variable) not in already:
            logger.info(
                "the replicas update variable %s with different values and it has "
                'aggregation="none": the values are averaged; to silence this, set '
                'aggregation="mean"',
                variable.path,
            )
    return already | {id(variable) for variable in differing}


def adopt_variables(variables: list, strategy: Strategy) -> None:
    """Moves variables that were created outside of the strategy's scope onto its mesh.

    Args:
        variables: The variables; those that are on the mesh already do not move.
        strategy: The strategy.
    """
    # Keras gives slots their weight's layout and does not ask the strategy.
    foreign = [v for v in variables if not strategy.layouts.owns(_keras.variable_layout(v))]
    _keras.move_variables([(v, adoption.choose_layout(v, strategy)) for v in foreign])
    moved = [variable.path for variable in foreign]
    for variable in variables:
        _keras.claim(variable)
        (value,) = _keras.full_values([variable])
        if value.weak_type:
            # keras.Variable(1.0) has a weakly typed array and an update a strongly typed one, for
            # which the program would be traced again.
            _keras.follow_state(([variable],), ([jnp.asarray(value, value.dtype)],))
    if moved:
        logger.info(
            "moved %d variable(s), created outside of the scope, onto the mesh %s (first: %s)",
            len(moved),
            dict(strategy.mesh.shape),
            moved[0],
        )


def copies_of(variables: list, strategy: Strategy) -> list[jax.Array]:
    """The replicas' own values of "on_read" variables, stacked along a new first dimension.

    They are those of the last run, unless the variable was assigned since. In that case, as in
    `tf.distribute`, a `"sum"` is divided evenly (an integer goes to the first replica) and any
    other value is copied to every replica.

    Args:
        variables: The variables.
        strategy: The strategy.
    """
    sharding, stacks = strategy.placer.by_replica, []
    for variable, value in zip(variables, _keras.full_values(variables), strict=True):
        combined, copies = _copies.of(variable, (None, value))
        if not (combined is value and copies.sharding.is_equivalent_to(sharding, copies.ndim)):
            copies = _shared_out(variable, value, strategy)
        stacks.append(copies)
    return stacks


def _shared_out(variable: Any, value: jax.Array, strategy: Strategy) -> jax.Array:
    number = strategy.num_replicas_in_sync
    host = whole(value)
    if variable.aggregation != "sum":
        shared = np.broadcast_to(host, (number, *host.shape))
    elif jnp.issubdtype(value.dtype, jnp.inexact):
        shared = np.broadcast_to(host / host.dtype.type(number), (number, *host.shape))
    else:
        shared = np.zeros((number, *host.shape), host.dtype)
        shared[0] = host
    return put([np.ascontiguousarray(shared, host.dtype)], [strategy.placer.by_replica])[0]


def follow_copies(variables: list, combined: Sequence, copies: Sequence) -> None:
    """Assigns the combined values to "on_read" variables, and stores the replicas' own.

    Args:
        variables: The variables.
        combined: The values for reads outside of replica code.
        copies: The replicas' own values of every variable, `(replicas, ...)`.
    """
    _keras.follow_state((variables,), (combined,))
    for variable, *values in zip(variables, combined, copies, strict=True):
        _copies.write(variable, tuple(values))


def _own_dtype(variable):
    # Inside a layer's call, Variable.dtype would be the dtype that its policy casts to.
    with _keras.AutocastScope(None):
        return variable.dtype


def _check_can_average(variable) -> None:
    received = {
        "variable": variable.path,
        "aggregation": variable.aggregation,
        "synchronization": variable.synchronization,
        "dtype": str(_own_dtype(variable)),
    }
    if variable.trainable:
        raise value_error(
            "All replicas must give a trainable weight the same new value.",
            received=received,
            fix="Reduce the gradients before the optimizer applies them: "
            'gradients = keras_tpu_dist.get_replica_context().all_reduce("mean", gradients), '
            'or "sum" if the loss was divided by the global batch size; or create the '
            'variable with aggregation="mean".',
        )
    averaged = np.issubdtype(np.dtype(_own_dtype(variable)), np.floating) or "bfloat" in str(
        _own_dtype(variable)
    )
    if not averaged or is_own(variable):
        raise value_error(
            "A variable that replicas update with different values needs an aggregation.",
            received=received,
            fix='Create it with aggregation="sum", "mean" or "only_first_replica", or reduce '
            'the new value with get_replica_context().all_reduce("sum", value).',
        )
