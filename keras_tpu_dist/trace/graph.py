"""A traced program as values and operations; the programs that it calls are inlined."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from keras_tpu_dist.trace.jaxprs import opened

_CALLS = {"jit", "pjit", "closed_call", "core_call"}


@dataclass(eq=False, repr=False)
class Atom:
    """A value of a program.

    Attributes:
        aval: Its shape and dtype.
        operation: The operation that computes it, `None` for an input or a constant.
        constant: Its array, if it is a constant or a literal.
    """

    aval: Any
    operation: "Equation | None" = None
    constant: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(getattr(self.aval, "shape", ()))


@dataclass(eq=False, repr=False)
class Equation:
    """An equation of a program, or of one that it calls.

    Attributes:
        program: The program that the equation is of.
        equation: The equation.
        operands: What it reads.
        results: What it makes.
    """

    program: Any
    equation: Any
    operands: list[Atom]
    results: list[Atom] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    def run(self, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list:
        """Computes its results.

        Args:
            operands: Arrays.
            params: Parameters of the equation to replace.
        """
        # Evaluated as a program, so that its operations keep the names of layers.
        inputs = [core.Var(atom.aval) for atom in self.equation.invars]
        given = {**self.equation.params, **(params or {})}
        equation = self.equation.replace(invars=inputs, params=given)
        outputs = list(equation.outvars)
        alone = self.program.replace(
            constvars=[], invars=inputs, outvars=outputs, eqns=[equation], effects=equation.effects
        )
        return list(core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*operands))


@dataclass(eq=False, repr=False)
class Graph:
    """A program.

    Attributes:
        inputs: Its inputs.
        operations: Its operations, in order.
        outputs: Its outputs.
    """

    inputs: list[Atom]
    operations: list[Equation]
    outputs: list[Atom]

    def evaluate(
        self,
        inputs: Sequence[Any],
        instead: Mapping[Equation, "Instead"],
        run: Callable[[Equation, list], list] = Equation.run,
    ) -> list[Any]:
        """Computes the outputs, and nothing that they do not need.

        Args:
            inputs: Arrays.
            instead: Replacements of operations.
            run: Computes the results of an operation from its operands.
        """
        values = dict(zip(map(id, self.inputs), inputs, strict=True))

        def value(of: Atom) -> Any:
            return values[id(of)] if of.constant is None else of.constant

        for operation in self.needed({each: new.operands for each, new in instead.items()}):
            replaced = instead.get(operation)
            if replaced is None:
                results = run(operation, list(map(value, operation.operands)))
            else:
                results = replaced.compute(list(map(value, replaced.operands)))
            values.update(zip(map(id, operation.results), results, strict=True))
        return list(map(value, self.outputs))

    def needed(self, instead: Mapping[Equation, Sequence[Atom]]) -> list[Equation]:
        """The operations that the outputs need, in order.

        Args:
            instead: For replaced operations, the values that the replacement reads.
        """
        values, found = {id(each) for each in self.outputs}, []
        for operation in reversed(self.operations):
            kept = bool(operation.equation.effects)
            if kept or any(id(each) in values for each in operation.results):
                found.append(operation)
                values |= {id(each) for each in instead.get(operation, operation.operands)}
        return found[::-1]


@dataclass(frozen=True)
class Instead:
    """The replacement of an operation.

    Attributes:
        operands: The values that it reads.
        compute: A function from their arrays to the results.
    """

    operands: list[Atom]
    compute: Callable[[list[Any]], list[Any]]


def graph_of(jaxpr: Any) -> Graph:
    """Reads a program.

    Args:
        jaxpr: The program; of a `Jaxpr` constants are not known, so it cannot be evaluated.
    """
    inputs = [Atom(each.aval) for each in opened(jaxpr).invars]
    operations: list[Equation] = []
    outputs = _read(jaxpr, inputs, operations)
    return Graph(inputs, operations, outputs)


def _read(jaxpr: Any, inputs: list[Atom], operations: list[Equation]) -> list[Atom]:
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
        if equation.primitive.name in _CALLS:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            results = _read(inner, operands, operations)
        else:
            operation = Equation(program, equation, operands)
            results = [Atom(each.aval, operation) for each in equation.outvars]
            operation.results = results
            operations.append(operation)
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(of, program.outvars))
