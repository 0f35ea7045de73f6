"""A function that runs once per replica, as one compiled program over all of them."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.processes import watch
from keras_tpu_dist.processes.agreement import compare_variables, first_difference
from keras_tpu_dist.processes.arrays import checksum
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.programs.types import check_types, in_one_loop
from keras_tpu_dist.replica.accumulation import OwnSums
from keras_tpu_dist.replica.advice import add_advice, check_no_graph
from keras_tpu_dist.replica.buffers import ReplicaBuffers
from keras_tpu_dist.replica.call import Call, Leaf, is_key
from keras_tpu_dist.replica.context import ReplicaContext, entered
from keras_tpu_dist.replica.flow import differing, shard_map_body
from keras_tpu_dist.replica.padding import (
    dimensions_that_follow,
    doubled,
    of_one_replica,
    same_numbers,
    shape_of,
    size_at,
    takes_any,
)
from keras_tpu_dist.replica.state import (
    Recorder,
    adopt_variables,
    apart,
    check_assignments,
    copies_of,
    follow_copies,
    read_combined,
    to_combine,
)
from keras_tpu_dist.replica.values import PerReplica
from keras_tpu_dist.training import adoption, membership
from keras_tpu_dist.training.buffers import copies_apart
from keras_tpu_dist.training.guard import states_to_keep
from keras_tpu_dist.training.protocol import Strategy

# A trace may create variables, and read others once these exist.
_MOST_TRACES = 8
# On a variable: whether all processes were found to hold the same values.
_compared = _keras.Mark("_keras_tpu_dist_compared")
_FIX = "Call strategy.run in all processes, with the same function and arguments."


class _Inputs(NamedTuple):
    """What a program takes, or one property of each of these values.

    Attributes:
        replica: The number of a replica.
        rows: How many rows of its part of the batch are not padding, if there is padding.
        length: How much of the padded length is not padding, if there is padding.
        arrays: The arrays among the arguments.
        shared: Values of variables that all replicas share.
        copies: Values of variables with a copy in each replica.
        consumed: Values of shared variables whose arrays are overwritten.
    """

    replica: Any
    rows: Any
    length: Any
    arrays: Any
    shared: Any
    copies: Any
    consumed: Any


class _Outputs(NamedTuple):
    """What a program returns, or one property of each of these values.

    Attributes:
        results: The arrays among the function's results, stacked over the replicas.
        shared: New values of variables that all replicas share.
        copies: New values of variables with a copy in each replica.
        combined: For each of those variables, the one value that you read.
    """

    results: Any
    shared: Any
    copies: Any
    combined: Any


@dataclass
class _Record:
    """The variables and results of one trace of the function."""

    treedef: Any = None
    unknown: dict[int, Any] = field(default_factory=dict)
    updated: dict[int, Any] = field(default_factory=dict)
    assigned: list[Any] = field(default_factory=list)
    sums: OwnSums = field(default_factory=OwnSums)


class _Known:
    """Variables that are inputs: shared by all replicas, or with a copy in each."""

    def __init__(self, variables: list, consumed: set[int]):
        shared, self.own = apart(variables)
        self.consumed = [v for v in shared if id(v) in consumed]
        self.shared = [v for v in shared if id(v) not in consumed]
        self.every = [*self.consumed, *self.shared, *self.own]


@dataclass(frozen=True)
class _Scan:
    """Several steps in one launch.

    Attributes:
        stepped: For every array of the arguments, whether it differs from step to step.
    """

    steps: int
    stepped: tuple[bool, ...]
    every: bool


def _of_steps(layout: NamedSharding | None, stepped: bool) -> NamedSharding | None:
    """The layout of an array for each step, stacked along a new first dimension."""
    if layout is None or not stepped:
        return layout
    return NamedSharding(layout.mesh, PartitionSpec(None, *layout.spec))


class _OtherResults(Exception):
    """A step in a loop has returned results of other dtypes than the loop began with."""

    def __init__(self, results: list[jax.ShapeDtypeStruct]):
        super().__init__()
        self.results = results


def _described(results: list) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]


def _zeros(results: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [jnp.zeros(result.shape, result.dtype) for result in results]


@dataclass
class _Attempt:
    """One way to compile the function: its variables as inputs, and which of them are combined."""

    known: _Known
    combine: set[int]
    record: _Record
    function: Any
    results: list[jax.ShapeDtypeStruct] = field(default_factory=list)


class ReplicaProgram:
    """The compiled form of a function for arguments of given shapes.

    The function is traced once if it uses no Keras variables. Otherwise it is traced at least
    twice: first to find out which variables it reads and updates, then with their values as inputs.
    After that it is not called again.

    Args:
        function: Returns the user's function. Programs are cached as long as the function lives, so
            they must not keep it alive.
        call: The arguments of the first call. Their forms are kept, not their values: later calls
            bring arrays of the same shapes, and the same constants.
        strategy: The strategy, whose mesh and data axes are those of the replicas.
        buffers: Knows which values of variables are outputs of earlier launches. A launch may
            consume these; it copies all others first, which you may hold too.

    Raises:
        ValueError: If the function returns something other than arrays, if an update of a variable
            cannot be combined, or if processes have different arguments or variables.
        PeerError: If not all processes run it.
    """

    def __init__(
        self,
        function: Callable[[], Callable],
        call: Call,
        strategy: Strategy,
        buffers: ReplicaBuffers,
    ):
        self._function = function
        self._strategy = strategy
        self._buffers = buffers
        # A single replica exchanges nothing, and nothing can differ.
        self._axes = tuple(strategy.data_axes) if strategy.num_replicas_in_sync > 1 else ()
        self._checked_padding = False
        self._launched: set[Any] = set()
        self._scans: dict[_Scan, Any] = {}
        name = getattr(function(), "__name__", type(function()).__name__)
        self._name = f"strategy.run of {name!r}"
        _check_call(self._name, call, strategy)
        # The arguments of later calls arrive as arrays alone.
        self._form = Call(call.treedef, [_form(leaf) for leaf in call.leaves])
        self._places = [leaf for leaf in self._form.leaves if not leaf.constant]
        call = call.of_first_step()
        self._attempt = attempt = self._settle(call)
        self._treedef, self._run = attempt.record.treedef, attempt.function
        self._known = attempt.known
        self._layouts = _keras.variable_layouts(self._known.every)
        self._layers = membership.layers_with(self._known.every, strategy)
        self._trains = _keras.trainability(self._known.every, self._layers)
        self._constants = membership.constants.version
        self._shared, self._own = apart(attempt.record.updated.values())
        _check_variables(self._name, attempt.known.every, strategy)
        self._cuts = self._find_cuts(call, attempt)

    def launch(self, call: Call, steps: int = 1, every: bool = False) -> Any:
        """Runs the program and assigns the variables it updated.

        Args:
            call: The arguments, with the same `key` as those of the first call.
            steps: The number of steps.
            every: Whether to return the results of all steps, stacked, or of the last one.
        """
        if call.check_padding and not self._checked_padding and call.padded:
            self._check_padding(call.of_first_step())
            self._checked_padding = True
        run = self._run if steps == 1 else self._scanned(call, _Scan(steps, call.stepped, every))
        with self._buffers.launching(self._known.consumed) as values:
            try:
                outputs = self._outputs(run, self._inputs(call, self._known), values)
            except jax.errors.UnexpectedTracerError as error:  # found when it is compiled
                add_advice(error)
                raise
            del values
            _keras.follow_state((self._shared,), (outputs.shared,))
            if self._known.consumed:
                self._buffers.made(self._shared, outputs.shared)
        if self._own:
            follow_copies(self._own, outputs.combined, outputs.copies)
        if self._shared:
            membership.variables_changed(self._strategy)
        results = self._wrap(outputs.results, call, stacked=every and steps > 1)
        return jax.tree.unflatten(self._treedef, results)

    def with_arguments(self, call: Call, steps: int = 1) -> tuple[Any, tuple[_Inputs, list]]:
        """The program, and its arguments, of which a launch overwrites nothing that is in use.

        Args:
            call: The arguments of the function.
            steps: The number of steps in the launch.
        """
        run = self._run if steps == 1 else self._scanned(call, _Scan(steps, call.stepped, False))
        with self._buffers.lock:
            consumed = copies_apart(_keras.values_of(self._known.consumed))
            return run, (self._inputs(call, self._known), consumed)

    @property
    def names(self) -> _Outputs:
        """What the program returns: for each array the path of a variable, or its place among the
        function's results."""
        numbered = jax.tree.unflatten(self._treedef, range(self._treedef.num_leaves))
        places, _ = jax.tree_util.tree_flatten_with_path(numbered)
        return _Outputs(
            results=[f"result {jax.tree_util.keystr(path)}".strip() for path, _ in places],
            shared=[v.path for v in self._shared],
            copies=[f"{v.path} of all replicas" for v in self._own],
            combined=[v.path for v in self._own],
        )

    def numbers_before(self, arguments: tuple[_Inputs, list]) -> list[int | None]:
        """For each output the number of the argument that is the same variable's value before.

        Args:
            arguments: What `with_arguments` returned; their leaves are numbered.

        Returns:
            A list in the order of the outputs' leaves, `None` for an output that is no variable,
            or that combines several copies.
        """
        leaves, structure = jax.tree.flatten(arguments)
        inputs, consumed = jax.tree.unflatten(structure, range(len(leaves)))
        known = (*self._known.consumed, *self._known.shared, *self._known.own)
        places = (*consumed, *inputs.shared, *inputs.copies)
        numbers = {id(v): place for v, place in zip(known, places, strict=True)}
        return [
            *(None for _ in range(self._treedef.num_leaves)),
            *(numbers[id(v)] for v in (*self._shared, *self._own)),
            *(None for _ in self._own),
        ]

    @property
    def serves(self) -> bool:
        """Whether variables and layers have the layouts and train as when it was traced."""
        trains = _keras.trainability(self._known.every, self._layers)
        return trains == self._trains and not self.outdated

    @property
    def outdated(self) -> bool:
        """Whether a variable has since moved to another strategy or another layout.

        Or a layer has loaded something that is a constant of programs.
        """
        now = _keras.variable_layouts(self._known.every)
        same = all(map(operator.is_, now, self._layouts))
        return not same or self._constants != membership.constants.version

    def _scanned(self, call: Call, scan: _Scan) -> Any:
        """The program that runs several steps."""
        if scan not in self._scans:
            _check_call(f"{self._name} with {scan.steps} steps a launch", call, self._strategy)
            attempt = self._attempt
            self._scans[scan] = self._compiled(_Record(), attempt.known, attempt.combine, scan)
        return self._scans[scan]

    def _outputs(self, run: Any, inputs: _Inputs, consumed: list) -> _Outputs:
        if self._strategy.placer.is_local:
            return run(inputs, consumed)
        # In the first launch, processes compile, some for long, so a late one is not stuck.
        with watch.during(self._name, watch.LAUNCH if run in self._launched else watch.OUTSIDE):
            outputs = run(inputs, consumed)
        self._launched.add(run)
        watch.launched(outputs)
        return outputs

    def _settle(self, call: Call) -> _Attempt:
        """Traces until all variables of the function are inputs, and combined as they must be.

        A fixed point of three sets: the variables that were seen, which become inputs, those whose
        updates differ between replicas, and those whose arrays may be consumed. Each trace can find
        more of them.
        """
        check_no_graph()
        adoption.adopt_all(self._strategy)
        seen: list[Any] = []
        combine: set[int] = set()
        consumed: set[int] = set()
        first: list[Any] | None = None
        for _ in range(_MOST_TRACES):
            record = _Record()
            inputs = _Known(seen, consumed)
            attempt = _Attempt(
                inputs, set(combine), record, self._compiled(record, inputs, combine)
            )
            try:
                values = _keras.values_of(inputs.consumed)
                traced = attempt.function.trace(self._inputs(call, inputs), values)
            except Exception as error:
                add_advice(error)
                raise
            finally:
                # If code leaves a stateless scope outside of a trace, it initializes the variables
                # that were created in it, even after an exception.
                with keras.StatelessScope():
                    pass
            if record.unknown:
                adopt_variables(list(record.unknown.values()), self._strategy)
                seen.extend(record.unknown.values())
            attempt.results = [
                jax.ShapeDtypeStruct(out.shape[1:], out.dtype) for out in traced.out_info.results
            ]
            combine = to_combine(self._differing(traced, attempt, call), combine)
            before, consumed = consumed, self._to_consume(record)
            first = record.assigned if first is None else first
            if not record.unknown and combine == attempt.combine and consumed == before:
                check_assignments(first, record.assigned)
                return attempt
        raise runtime_error(
            "A replica function must use the same variables every time it is traced.",
            received=f"new variables in every one of {_MOST_TRACES} traces.",
            fix="Create models, optimizers and metrics outside of the function.",
        )

    def _to_consume(self, record: _Record) -> set[int]:
        """The `id`s of the variables to update in place: all or none, by the same rule as in
        fit."""
        shared, _ = apart(record.updated.values())
        setting = self._strategy.options.donate_state
        if _keras.stateless_scope() is not None or states_to_keep(setting, shared):
            return set()
        return {id(variable) for variable in shared}

    def _compiled(
        self, record: _Record, known: _Known, combine: set[int], scan: _Scan | None = None
    ) -> Any:
        body = functools.partial(self._body, record, known, set(combine), scan)
        split, whole = PartitionSpec(self._axes), PartitionSpec()
        if self._axes:
            body = jax.shard_map(
                body,
                mesh=self._strategy.mesh,
                in_specs=(self._specs(scan),),
                out_specs=_Outputs(split, shared=whole, copies=split, combined=whole),
                axis_names=set(self._axes),
                check_vma=False,
            )

        def constrained(values, variables):
            return [
                jax.lax.with_sharding_constraint(value, self._layout(variable))
                for value, variable in zip(values, variables, strict=True)
            ]

        def replica_function(inputs, consumed):
            outputs = body(inputs._replace(consumed=consumed))
            shared, own = apart(record.updated.values())
            return outputs._replace(
                shared=constrained(outputs.shared, shared),
                combined=constrained(outputs.combined, own),
            )

        by_replica = self._strategy.placer.sharding(0)
        placed = _Outputs(by_replica, shared=None, copies=by_replica, combined=None)

        def layouts(inputs, consumed):
            arrays = [place.layout for place in self._places]
            if scan:
                arrays = list(map(_of_steps, arrays, scan.stepped))
            shared = [self._layout(v) for v in known.shared]
            others = _Inputs(None, None, None, arrays, shared, copies=None, consumed=None)
            return others, [self._layout(v) for v in known.consumed]

        return Jitted(
            replica_function,
            self._strategy.mesh,
            layouts,
            # A ReplicaProgram has arguments of one form only.
            kind_of=lambda inputs, consumed: None,
            donate_argnums=(1,) if known.consumed else (),
            # What is consumed is overwritten, whether or not it is read.
            keep_unused=bool(known.consumed),
            out_shardings=placed,
            compiler_options=self._strategy.runner.replica_options,
        )

    def _specs(self, scan: _Scan | None) -> _Inputs:
        """Which dimension of the inputs is split over the replicas."""
        split, whole = PartitionSpec(self._axes), PartitionSpec()
        stepped = scan.stepped if scan else (False,) * len(self._places)
        arrays = [
            whole
            if place.split is None
            else PartitionSpec(*[None] * (place.split + of_step), self._axes)
            for place, of_step in zip(self._places, stepped, strict=True)
        ]
        return _Inputs(
            replica=split,
            rows=split,
            length=whole,
            arrays=arrays,
            shared=whole,
            copies=split,
            consumed=whole,
        )

    def _layout(self, variable) -> Any:
        """The layout of a variable's new value; replicated until the variable is on the mesh."""
        layout = _keras.variable_layout(variable)
        return (
            layout if self._strategy.layouts.owns(layout) else self._strategy.placer.sharding(None)
        )

    def _body(
        self,
        record: _Record,
        known: _Known,
        combine: set[int],
        scan: _Scan | None,
        inputs: _Inputs,
    ) -> _Outputs:
        """The program of one replica in a launch."""
        values = {id(v): x for v, x in zip(known.consumed, inputs.consumed, strict=True)}
        values |= {id(v): x for v, x in zip(known.shared, inputs.shared, strict=True)}
        values |= {id(v): x[0] for v, x in zip(known.own, inputs.copies, strict=True)}
        context = self._context(inputs)
        arrays = inputs.arrays
        if scan is None:
            outs, updated = self._step(record, combine, inputs, record.sums.find, arrays, values)
        else:
            sums = self._attempt.record.sums
            step = functools.partial(self._step, record, combine, inputs, sums.add)
            outs, updated = self._steps(step, scan, arrays, sums.begun(context, values))
            updated = sums.ended(context, updated)
            # Launches assign variables in the order of a single step.
            record.updated = self._attempt.record.updated
        shared, own = apart(record.updated.values())
        return _Outputs(
            results=[out[None] for out in outs],
            shared=[updated[id(v)] for v in shared],
            copies=[updated[id(v)][None] for v in own],
            combined=[read_combined(v, updated[id(v)], context, combine) for v in own],
        )

    def _steps(self, step: Callable, scan: _Scan, arrays: list, values: dict) -> tuple[list, dict]:
        """Several steps, one after the other: the results and the new values of variables."""
        # In a list: sorted by `id`, the programs of the processes would differ.
        keys = list(self._attempt.record.updated)

        def one(updated: list, per_step: list) -> tuple[list, list]:
            given = iter(per_step)
            now = [
                next(given) if of_step else array
                for array, of_step in zip(arrays, scan.stepped, strict=True)
            ]
            outs, after = step(now, {**values, **dict(zip(keys, updated, strict=True))})
            return outs, [after[key] for key in keys]

        def looped(updated: list, per_step: list, steps: int) -> tuple[list, list]:
            def body(carried, of_step):
                before, updated = carried
                outs, after = one(updated, of_step)
                check_types(updated, after)
                if scan.every:
                    return ([], after), outs
                if _described(outs) != _described(before):
                    raise _OtherResults(_described(outs))
                return (outs, after), []

            results = [] if scan.every else self._attempt.results
            begin = (_zeros(results), updated)
            try:
                (last, updated), every = jax.lax.scan(body, begin, per_step, length=steps)
            except _OtherResults as other:
                # Those of a step are other than in the first call, as variables are.
                begin = (_zeros(other.results), updated)
                (last, updated), every = jax.lax.scan(body, begin, per_step, length=steps)
            return every if scan.every else last, updated

        per_step = [array for array, of_step in zip(arrays, scan.stepped, strict=True) if of_step]
        outs, updated = in_one_loop(
            one, looped, [values[key] for key in keys], per_step, scan.steps, scan.every
        )
        return outs, dict(zip(keys, updated, strict=True))

    def _step(
        self,
        record: _Record,
        combine: set[int],
        inputs: _Inputs,
        accumulate: Callable,
        arrays: list,
        values: dict,
    ) -> tuple[list, dict]:
        """A replica's step: the results, and the new values of variables by their `id`."""
        arrays = [
            array[0] if place.stacked else array
            for array, place in zip(arrays, self._places, strict=True)
        ]
        context = self._context(
            inputs,
            batch_size=inputs.rows[0] if inputs.rows is not None else None,
            batch_rows=size_at(arrays, self._places, "rows"),
            length=inputs.length,
            bucket=size_at(arrays, self._places, "length"),
        )
        recorder = Recorder(context, values, combine)
        args, kwargs = self._form.rebuild(arrays)
        accumulating = _keras.accumulating(functools.partial(accumulate, context))
        with entered(context, recorder), accumulating:
            results = self._function()(*args, **kwargs)
            leaves, record.treedef = jax.tree.flatten(results)
            outs = [_as_output(leaf) for leaf in leaves]
            updated = recorder.finish()
        record.unknown, record.updated = recorder.unknown, recorder.updated
        record.assigned = recorder.assigned
        return outs, updated

    def _context(self, inputs: _Inputs, **sizes: Any) -> ReplicaContext:
        return ReplicaContext(self._strategy, inputs.replica[0], self._axes, **sizes)

    def _inputs(self, call: Call, known: _Known) -> _Inputs:
        """The inputs of a launch; those that it consumes are an argument of their own."""
        return _Inputs(
            replica=self._strategy.placer.replica_ids,
            rows=None if call.rows is None else np.asarray(call.rows, np.int32),
            length=None if call.length is None else np.int32(call.length),
            arrays=call.arrays,
            shared=_keras.full_values(known.shared, self._buffers),
            copies=copies_of(known.own, self._strategy) if known.own else [],
            consumed=None,
        )

    def _differing(self, traced, attempt: _Attempt, call: Call) -> list:
        """Updated variables without a reduction whose new values may differ over replicas."""
        if not self._axes:
            return []
        body = shard_map_body(traced.jaxpr)
        flags = _Inputs(
            replica=True,
            rows=None if call.rows is None else True,
            length=None if call.length is None else False,
            arrays=[place.split is not None for place in self._places],
            shared=[False] * len(attempt.known.shared),
            copies=[True] * len(attempt.known.own),
            consumed=[False] * len(attempt.known.consumed),
        )
        inputs = jax.tree.leaves(flags)
        # Constants of the function come before its inputs.
        inputs = [False] * (len(body.invars) - len(inputs)) + inputs
        outputs = jax.tree.unflatten(
            jax.tree.structure(traced.out_info), differing(body, inputs, self._axes)
        )
        shared, own = apart(attempt.record.updated.values())
        updated = [*zip(own, outputs.combined, strict=True)]
        updated += zip(shared, outputs.shared, strict=True)
        return [
            variable
            for variable, differs in updated
            if differs and variable.aggregation in ("none", "only_first_replica")
        ]

    def _find_cuts(self, call: Call, attempt: _Attempt) -> list[dict[str, list[int]]]:
        """For every result, its dimensions that are the padded rows, and the padded length.

        These dimensions double in a second trace with twice the rows, or twice the length.
        """
        first = [result.shape for result in attempt.results]
        cuts: list[dict[str, list[int]]] = [{} for _ in first]
        described = jax.tree.map(shape_of, self._inputs(call, attempt.known))
        consumed = jax.tree.map(shape_of, _keras.values_of(attempt.known.consumed))
        for kind in ("rows", "length"):
            size = self._padded_size(call, kind)
            if getattr(call, kind) is None or size is None:
                continue
            arrays = [
                doubled(array, getattr(place, kind))
                for array, place in zip(described.arrays, self._places, strict=True)
            ]
            known, combine = attempt.known, attempt.combine
            again = self._compiled(_Record(), known, combine)
            with takes_any(kind, size):
                traced = again.trace(described._replace(arrays=arrays), consumed)
            second = traced.out_info.results
            for i, (a, b) in enumerate(zip(first, second, strict=True)):
                cuts[i][kind] = dimensions_that_follow(kind, size, a, b.shape[1:])
        return cuts

    def _padded_size(self, call: Call, kind: str) -> int | None:
        number = self._strategy.num_replicas_in_sync
        parts = [
            of_one_replica(a, place, number)
            for a, place in zip(call.arrays, self._places, strict=True)
        ]
        return size_at(parts, self._places, kind)

    def _wrap(self, outs: list, call: Call, stacked: bool = False) -> list[PerReplica]:
        """The results as values; `stacked`: of several steps, along a new first dimension."""
        number = self._strategy.placer.num_shards
        wrapped = []
        for out, cuts in zip(outs, self._cuts, strict=True):
            sizes: dict[int, tuple[int, ...]] = {}
            rows = cuts.get("rows", ())
            if call.rows is not None:
                sizes.update((axis + stacked, call.rows) for axis in rows)
            if call.length is not None:
                lengths = (call.length,) * number
                sizes.update((axis + stacked, lengths) for axis in cuts.get("length", ()))
            at = rows[0] + stacked if rows else None
            value = PerReplica(out, self._strategy, stacked=True, sizes=sizes, rows=at)
            wrapped.append(value)
        return wrapped

    def _once(self, call: Call) -> _Outputs:
        """The outputs for other arguments, without assigning or consuming anything."""
        with self._buffers.lock:
            run, (inputs, copies) = self.with_arguments(call)
            return self._outputs(run, inputs, copies)

    def _check_padding(self, call: Call) -> None:
        outputs = self._once(call)
        again = self._once(call.with_other_padding())
        results, others = self._wrap(outputs.results, call), self._wrap(again.results, call)
        returned = [
            pair
            for one, other in zip(results, others, strict=True)
            for pair in zip(one.values, other.values, strict=False)
        ]
        state = [*zip(outputs.shared, again.shared, strict=True)]
        state += zip(outputs.copies, again.copies, strict=True)
        same = _all_the_same(f"what {self._name} returns", returned, self._strategy)
        if _all_the_same(f"the updates of {self._name}", state, self._strategy) and same:
            return
        raise value_error(
            "Padding must not change what a replica function computes.",
            received="other results, or other updates of variables, with ones as padding than "
            f"with zeros{'' if same else ' in a returned value'}; nothing was assigned.",
            fix="Mask before reducing: jnp.where(mask, x, 0).sum() with mask from "
            "get_replica_context().batch_mask or .length_mask, and divide by .batch_size or "
            ".length; to skip this check, write RunOptions(check_padding=False).",
        )


def _form(leaf: Leaf) -> Leaf:
    return replace(leaf, value=leaf.value if leaf.constant else None, source=None, steps=None)


def _as_output(leaf) -> jax.Array:
    if isinstance(leaf, keras.Variable):
        leaf = leaf.value
    numeric = isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    if is_key(leaf) or not numeric or np.dtype(getattr(leaf, "dtype", np.float32)).kind in "OSU":
        raise value_error(
            "A function run by strategy.run returns arrays, numbers, None, or a structure of "
            "those.",
            received=f"a {type(leaf).__name__}: {leaf!r}.",
            fix="Return only arrays (for a key, jax.random.key_data(key)).",
        )
    return jnp.asarray(leaf)


def _check_call(what: str, call: Call, strategy: Strategy) -> None:
    """Checks that all processes run the same function with the same shared arguments.

    Checked once for every program, since agreeing takes as long as a small step.
    """
    if strategy.placer.is_local:
        return
    texts = [_leaf_text(leaf) for leaf in call.leaves]
    difference = first_difference(texts, agree(what, _FIX, texts))
    if difference is not None:
        process, number, here, there = difference
        raise value_error(
            "All processes must run a function with the same arguments.",
            received=f"{what}: leaf {number} of (args, kwargs) is {here} in process "
            f"{jax.process_index()} and {there} in process {process}.",
            fix="Pass values that differ with strategy.distribute_values_from_function.",
        )


def _check_variables(what: str, variables: list, strategy: Strategy) -> None:
    """Checks, once for every variable, that all processes hold the same values of it."""
    new = [v for v in variables if not _compared.of(v)]
    if strategy.placer.is_local or not new:
        return
    compare_variables(what, new)
    for variable in new:
        _compared.write(variable, True)


def _all_the_same(what: str, pairs: list[tuple[Any, Any]], strategy: Strategy) -> bool:
    """Whether the two arrays of every pair are equal up to rounding, in all processes."""
    same = all(
        same_numbers(*parts) for pair in pairs for parts in zip(*map(_own_parts, pair), strict=True)
    )
    if strategy.placer.is_local:
        return same
    return all(agree(f"the padding of {what}", _FIX, same))


def _own_parts(array: Any) -> list:
    """The parts of an array on this process's devices."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return [array]
    return [shard.data for shard in array.addressable_shards]


def _leaf_text(leaf: Leaf) -> str:
    value = leaf.value
    if leaf.constant:
        plain = isinstance(value, (bool, str, bytes))
        return repr(value) if plain else f"a {type(value).__name__}"
    if leaf.source is not None:
        return f"a PerReplica of {tuple(value.shape)}, {value.dtype}, rows {leaf.source.sizes}"
    if isinstance(value, (int, float, complex)):
        return repr(value)
    readable = not isinstance(value, jax.Array) or value.is_fully_replicated
    text = f"an array of {tuple(value.shape)}, {value.dtype}"
    return f"{text}, values {checksum(np.asarray(value)):08x}" if readable else text
