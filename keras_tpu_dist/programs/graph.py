"""A traced program as values and operations; the programs that it calls are inlined."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core

from keras_tpu_dist.programs.calls import Called, calls, is_recomputed, program_of
from keras_tpu_dist.programs.jaxprs import (
    constants_of,
    function_of,
    inner_jaxprs,
    opened,
    with_inputs,
)

# The name of operations that pass a value into a body that is read, or out of it.
ENTER = "enter"
# Operations that pass their operand's values on.
SAME_VALUES = ("convert_element_type", "copy")


@dataclass(eq=False, repr=False)
class Atom:
    """A value of a program.

    Attributes:
        aval: Its shape and dtype.
        operation: The operation that computes it, `None` for an input or a constant.
        devices: If it is one device's part of an array, the number of devices with such parts.
    """

    aval: Any
    operation: "Equation | None" = None
    constant: Any = None
    devices: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(getattr(self.aval, "shape", ()))


@dataclass(eq=False, repr=False)
class Equation:
    """An equation of a program, or of one that it calls.

    Attributes:
        within: The calls of `jax.checkpoint` that it is in, from the outermost one.
        scope: The names of the layers around the calls that were inlined.
        enters: Whether it is no more than a value on its way into the equation's body or out of it.
        body: Of a loop whose body is read, the values that the body computes.
    """

    program: Any
    equation: Any
    operands: list[Atom]
    results: list[Atom] = field(default_factory=list)
    within: tuple["Equation", ...] = ()
    scope: str = ""
    enters: bool = False
    body: list[Atom] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its primitive, or `ENTER`."""
        return ENTER if self.enters else self.equation.primitive.name

    def run(self, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list:
        """Computes its results.

        Args:
            operands: Arrays.
            params: Parameters of the equation to replace.
        """
        inputs = [core.Var(atom.aval) for atom in self.equation.invars]
        given = {**self.equation.params, **(params or {})}
        return self._run(self.equation.replace(invars=inputs, params=given), operands)

    def run_part(self, part: Callable[[], list]) -> list:
        """Computes values as a part of the program that is recomputed as this call is."""
        traced = jax.make_jaxpr(part)()
        held = constants_of(traced)
        inner = opened(with_inputs(traced, list(held)))
        equation = self.equation.replace(
            invars=[core.Var(invar.aval) for invar in inner.invars],
            outvars=[core.Var(outvar.aval) for outvar in inner.outvars],
            params={**self.equation.params, "jaxpr": inner},
            effects=inner.effects,
        )
        return self._run(equation, list(held.values()))

    def _run(self, equation: Any, operands: Sequence[Any]) -> list:
        alone = function_of(self.program, [equation], equation.invars, equation.outvars)
        with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
            return list(alone(*operands))


@dataclass(eq=False, repr=False)
class Graph:
    """A program."""

    inputs: list[Atom]
    operations: list[Equation]
    outputs: list[Atom]

    def evaluate(
        self,
        inputs: Sequence[Any],
        instead: Mapping[Equation, "Instead"],
        run: Callable[[Equation, list], list] = Equation.run,
        after: Callable[[Callable[[Atom], Any]], dict[int, Any]] = lambda value: {},
    ) -> list[Any]:
        """Computes the outputs, and nothing that they do not need.

        Args:
            inputs: Arrays.
            instead: Replacements of operations.
            run: Computes the results of an operation from its operands.
            after: Other values of outputs, by the `id` of their atoms. It gets a function from an
                atom to its array.
        """
        # One dict for all nested parts. Ids are safe as keys: the graph holds every atom. Within
        # `run_part` its new entries are tracers of that part's own trace, which nothing may read
        # afterwards, so all but those of `kept` are deleted below.
        values = dict(zip(map(id, self.inputs), inputs, strict=True))
        operands = {replaced: new.operands for replaced, new in instead.items()}
        operations = self.needed(operands)

        def value(of: Atom) -> Any:
            return values[id(of)] if of.constant is None else of.constant

        def compute(operations: list[Equation], depth: int) -> None:
            for call, part in _by_call(operations, depth):
                if call is None:
                    (operation,) = part
                    replaced = instead.get(operation)
                    given = list(map(value, operands.get(operation, operation.operands)))
                    results = replaced.compute(given) if replaced else run(operation, given)
                    values.update(zip(map(id, operation.results), results, strict=True))
                else:
                    run_as_one_call(call, part, depth + 1)

        def run_as_one_call(call: Equation, part: list[Equation], depth: int) -> None:
            kept = read_outside(part)

            def inner() -> list[Any]:
                compute(part, depth)
                return list(map(value, kept))

            # What the part computes beside these is only known within it.
            before = set(values)
            results = call.run_part(inner)
            for key in set(values) - before:
                del values[key]
            values.update(zip(map(id, kept), results, strict=True))

        def read_outside(part: list[Equation]) -> list[Atom]:
            own = set(part)
            read = {id(output) for output in self.outputs}
            for operation in operations:
                if operation not in own:
                    read |= set(map(id, operands.get(operation, operation.operands)))
            return [result for made in part for result in made.results if id(result) in read]

        compute(operations, 0)
        values.update(after(value))
        return list(map(value, self.outputs))

    def needed(self, instead: Mapping[Equation, Sequence[Atom]]) -> list[Equation]:
        """The operations that the outputs need, in order.

        Args:
            instead: For replaced operations, the values that the replacement reads.
        """
        values, found = {id(output) for output in self.outputs}, []
        for operation in reversed(self.operations):
            kept = bool(operation.equation.effects)
            if kept or any(id(result) in values for result in operation.results):
                found.append(operation)
                values |= {id(atom) for atom in instead.get(operation, operation.operands)}
        return found[::-1]


@dataclass(frozen=True)
class Instead:
    """The replacement of an operation.

    Attributes:
        compute: A function from their arrays to the results.
    """

    operands: list[Atom]
    compute: Callable[[list[Any]], list[Any]]


def root_of(value: Atom) -> Atom:
    """Where a value comes from, apart from its dtype."""
    while value.operation is not None and value.operation.name in SAME_VALUES:
        value = value.operation.operands[0]
    return value


def traced_step(step: Callable, state: Any, data: Any) -> tuple[Graph, list, Any]:
    """The graph of a step, the arrays that it reads, and the shapes of its results."""
    # Of a new function: JAX keeps what it traced, maybe while an update was one operation.
    trace = jax.make_jaxpr(lambda *given: step(*given), return_shape=True)
    jaxpr, shapes = trace(state, data)
    return graph_of(jaxpr, recomputed=False), jax.tree.leaves((state, data)), shapes


def graph_of(jaxpr: Any, recomputed: bool = True, bodies: bool = False) -> Graph:
    """Reads a program.

    Args:
        jaxpr: The program; of a `Jaxpr` constants are not known, so it cannot be evaluated.
        recomputed: Whether to look into calls of `jax.checkpoint`, whose operations are then
            recomputed where the graph is evaluated, too. Otherwise the calls are operations.
        bodies: Whether to look into every program that is called once or a known number of times
            instead: loops, programs for one of several devices, and calls with rules of their own,
            too. Operations with the name `ENTER` pass values in and out. Such a graph is to be
            read; it cannot be evaluated.
    """
    inputs = [Atom(invar.aval) for invar in opened(jaxpr).invars]
    reader = _Reader(recomputed, bodies)
    outputs = reader.read(jaxpr, inputs)
    return Graph(inputs, reader.operations, outputs)


class _Reader:
    """Reads a program and those that it calls. See `graph_of`."""

    def __init__(self, recomputed: bool, bodies: bool):
        self.operations: list[Equation] = []
        self._recomputed, self._bodies = recomputed, bodies

    def read(
        self,
        jaxpr: Any,
        inputs: list[Atom],
        within: tuple[Equation, ...] = (),
        scope: str = "",
        devices: int = 1,
    ) -> list[Atom]:
        """Reads the operations of a program, and returns its results.

        Args:
            devices: The number of devices for each of which the program runs.
        """
        program = opened(jaxpr)
        known = dict(zip(program.invars, inputs, strict=True))
        constants = getattr(jaxpr, "consts", [None] * len(program.constvars))
        for variable, array in zip(program.constvars, constants, strict=True):
            known[variable] = Atom(variable.aval, constant=array)

        def of(atom: Any) -> Atom:
            if isinstance(atom, core.Literal):
                return Atom(atom.aval, constant=atom.val)
            return known[atom]

        for equation in program.eqns:
            operands = list(map(of, equation.invars))
            operation = Equation(program, equation, operands, within=within, scope=scope)
            if self._is_inlined(equation):
                results = self._inlined(operation)
            elif self._bodies and (called := _one_body(equation)):
                results = self._with_body(operation, called, devices)
            else:
                results = self._kept(operation, devices)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(of, program.outvars))

    def _is_inlined(self, equation: Any) -> bool:
        whole = not self._bodies and program_of(equation) is not None
        return whole and (self._recomputed or not is_recomputed(equation))

    def _inlined(self, operation: Equation) -> list[Atom]:
        equation, within, scope = operation.equation, operation.within, operation.scope
        (inner,) = inner_jaxprs(equation)
        if is_recomputed(equation):
            # What is recomputed is a call again, with its names.
            return self.read(inner, operation.operands, (*within, operation))
        names = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        return self.read(inner, operation.operands, within, names)

    def _kept(self, operation: Equation, devices: int) -> list[Atom]:
        outvars = operation.equation.outvars
        operation.results = [Atom(outvar.aval, operation, devices=devices) for outvar in outvars]
        self.operations.append(operation)
        return operation.results

    def _with_body(self, operation: Equation, called: Called, devices: int) -> list[Atom]:
        inner = devices * called.devices
        pairs = zip(called.operands, called.jaxpr.invars, strict=True)
        inputs = [
            self._passed(operation, operation.operands[i], invar.aval, inner) for i, invar in pairs
        ]
        body = self.read(called.jaxpr, inputs, devices=inner)
        if called.kind == "loop":
            # It writes the values that it carries and stacks.
            operation.body = body
            return self._kept(operation, devices)
        made = zip(body, operation.equation.outvars, strict=True)
        return [self._passed(operation, atom, outvar.aval, devices) for atom, outvar in made]

    def _passed(self, operation: Equation, atom: Atom, aval: Any, devices: int) -> Atom:
        """A value on the other side of a body's border."""
        way = replace(operation, operands=[atom], enters=True)
        way.results = [Atom(aval, way, devices=devices)]
        self.operations.append(way)
        return way.results[0]


def _one_body(equation: Any) -> Called | None:
    """The one program that an equation runs, if it is known how often."""
    called = calls(equation)
    return called[0] if len(called) == 1 and called[0].kind in ("call", "loop") else None


def _by_call(
    operations: list[Equation], depth: int
) -> Iterator[tuple[Equation | None, list[Equation]]]:
    """Operations one by one; those in one call at this depth of calls together."""
    for call, part in itertools.groupby(
        operations, lambda each: each.within[depth] if len(each.within) > depth else None
    ):
        if call is None:
            yield from ((None, [operation]) for operation in part)
        else:
            yield call, list(part)
