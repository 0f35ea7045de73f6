"""Repairs programs that XLA would partition wrongly."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.programs.dimensions import KNOWN
from keras_tpu_dist.programs.jaxprs import (
    any_equation,
    inner_jaxprs,
    manual_axes,
    opened,
    with_equations,
    with_inner_jaxprs,
)
from keras_tpu_dist.programs.partitioner.spread import Axes, Spread
from keras_tpu_dist.programs.partitioner.table import BY_OPERATION, Fault

# Programs of kernels are not partitioned.
_CLOSED = ("pallas_call",)


def rewritten(
    jaxpr: Any,
    mesh: Mesh,
    inputs: Sequence[Axes],
    outputs: Sequence[Axes] = (),
    met: Callable[[Fault], Any] = lambda fault: None,
) -> Any:
    """A program in which operations that XLA would partition wrongly are repaired.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        mesh: The mesh.
        inputs: For every input, the mesh axes of its dimensions.
        outputs: The same for results with layouts.
        met: Called with the fault of each repair.

    Returns:
        The program; the same object if there is nothing to repair.
    """
    # Most programs have no candidate, and `Spread` analyses the whole program.
    if not _any_candidate(jaxpr, mesh):
        return jaxpr
    return _Rewriter(Spread(jaxpr, inputs, outputs, mesh), met).program(jaxpr)


def _of_interest(equation: Any) -> bool:
    """Whether an equation may need a repair, or calls a program; others are skipped."""
    name = equation.primitive.name
    if name in _CLOSED:
        return False
    return name in BY_OPERATION or bool(equation.params and name not in KNOWN)


def _any_candidate(jaxpr: Any, mesh: Mesh) -> bool:
    """Whether a program has an operation that may be partitioned wrongly; a quick check."""

    def candidate(equation: Any) -> bool:
        faults = BY_OPERATION.get(equation.primitive.name, ())
        return any(fault.candidate(equation, mesh) for fault in faults)

    return any_equation(jaxpr, candidate, _of_interest)


class _Rewriter:
    def __init__(self, spread: Spread, met: Callable[[Fault], Any]):
        self._spread, self._met = spread, met
        self._done: dict[Any, Any] = {}

    def program(self, jaxpr: Any) -> Any:
        key = (id(opened(jaxpr)), self._spread.manual)
        if key not in self._done:
            # Stored with the original: while it is referenced, no other object has its id.
            self._done[key] = (self._edited(jaxpr), jaxpr)
        return self._done[key][0]

    def _edited(self, jaxpr: Any) -> Any:
        equations: list = []
        changed = False
        for equation in opened(jaxpr).eqns:
            if not _of_interest(equation):
                equations.append(equation)
                continue
            new = self._equation(equation)
            changed = changed or new is not equation
            equations.extend(new if isinstance(new, list) else [new])
        return with_equations(jaxpr, equations) if changed else jaxpr

    def _equation(self, equation: Any) -> Any:
        name = equation.primitive.name
        equations = self._repaired(equation, BY_OPERATION.get(name, ()))
        if equations is not None:
            return equations
        if next(inner_jaxprs(equation), None) is None:
            return equation
        manual = manual_axes(equation) if name == "shard_map" else ()
        with self._spread.within(manual):
            return with_inner_jaxprs(equation, self.program)

    def _repaired(self, equation: Any, faults: Sequence[Fault]) -> list | None:
        """The replacements of an equation, or `None`.

        A repair may leave the operation with other operands, to which later faults may apply too.
        """
        for number, fault in enumerate(faults, 1):
            if (equations := fault.repaired(equation, self._spread)) is None:
                continue
            self._met(fault)
            repaired: list = []
            for one in equations:
                is_left = one.primitive is equation.primitive
                again = self._repaired(one, faults[number:]) if is_left else None
                repaired.extend([one] if again is None else again)
            return repaired
        return None
