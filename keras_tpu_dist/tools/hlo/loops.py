"""How often each instruction of a compiled program runs."""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from keras_tpu_dist.common.scopes import LAST_OF, RARE_BRANCH, RARE_LOOP
from keras_tpu_dist.tools.hlo import collectives
from keras_tpu_dist.tools.hlo.operations import OperationKind, operation
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program, size_of

logger = logging.getLogger("keras_tpu_dist")

# Operations whose computations run apart from them. What others call, such as a fusion or a
# reduction, is one kernel, or one scalar function.
_CALLS = (OperationKind.CALL, OperationKind.HANDOVER)
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
}
_LAST_OF = re.compile(LAST_OF.format(r"(\d+)"))
_COPIES = {"copy", "bitcast", "convert", "reshape", "optimization-barrier", "copy-start"}


@dataclass(frozen=True, slots=True)
class Execution:
    """An instruction outside of any fusion, and how often it runs in one call of the program.

    Args:
        computation: The computation it is in.
        instruction: The instruction.
        times: How often it runs.
        loop: The outermost loop around it whose trip count is not known, counted as running once.
    """

    computation: Computation
    instruction: Instruction
    times: int
    loop: Instruction | None = None


@dataclass(frozen=True)
class Executions:
    """Everything a program runs.

    Args:
        executions: In program order, loop bodies after the loop.
        unknown_loops: Loops whose trip count the text does not say, counted as running once.
    """

    executions: tuple[Execution, ...]
    unknown_loops: tuple[str, ...]


def executions(program: Program) -> Executions:
    """Lists what runs, and how often: loop bodies times their trip counts.

    A loop for ids that a table's exchange has no room for counts nothing: it seldom runs at all. Of
    the branches of a conditional the one with most instructions counts, as it is not known
    which one runs.

    Args:
        program: The program.
    """
    found: list[Execution] = []
    unknown: list[str] = []

    def visit(computation: Computation, times: int, loop: Instruction | None) -> None:
        for instruction in computation:
            found.append(Execution(computation, instruction, times, loop))
            for callee, count in _callees(program, computation, instruction):
                around = loop
                if count is None:
                    unknown.append(instruction.name)
                    around = loop or instruction
                visit(callee, max(int(times * (1 if count is None else count)), 1), around)

    visit(program.entry, 1, None)
    return Executions(tuple(found), tuple(dict.fromkeys(unknown)))


def _callees(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, float | None]]:
    opcode = instruction.opcode
    # A collective that is passed to a SparseCore is found in the operation that passes it.
    if (
        operation(opcode).kind not in _CALLS
        or collectives.find(program, computation, instruction) is not None
    ):
        return
    called = [program.computations[n] for n in instruction.called if n in program.computations]
    if opcode == "while":
        body = instruction.called_by("body")
        if body in program.computations and RARE_LOOP not in instruction.attributes:
            yield program.computations[body], trip_count(program, computation, instruction)
    elif opcode == "conditional":
        if called and RARE_BRANCH not in instruction.attributes:
            batches = _LAST_OF.search(instruction.attributes)
            share = 1 / int(batches[1]) if batches else 1
            yield max(called, key=lambda c: size_of(program, c)), share
    else:
        for callee in called:
            yield callee, 1


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs.

    Read from the CPU compiler's annotation, or from the comparison in the loop's condition: both
    sides before the loop and after one step give the number of steps until it is false.

    Args:
        program: The program, to look up the loop's condition and body.
        computation: The computation that `loop` is in.
        loop: The `while` instruction.

    Returns:
        The count, or `None` if it depends on data.
    """
    if known := loop.attribute("backend_config"):
        at = known.find('"known_trip_count"')
        if at >= 0:
            return int("".join(c for c in known[at + 18 :].partition("}")[0] if c.isdigit()))
    condition = program.computations.get(loop.called_by("condition") or "")
    body = program.computations.get(loop.called_by("body") or "")
    initial = computation.operands(loop)
    if condition is None or condition.root is None or not initial:
        return None
    if body is None or body.root is None:
        return None
    start = functools.partial(_tuple_element, program, _At(computation, initial[0]))
    after = functools.partial(_tuple_element, program, _At(body, body.root, start))
    sides = [_comparison(program, _At(condition, condition.root, of)) for of in (start, after)]
    return _steps(*sides)


class _At(NamedTuple):
    """An instruction, and what is known where it runs.

    Attributes:
        element: Gives the integer in an element of the tuple that a loop's computation gets.
        arguments: The integers that a fusion or a called computation gets.
    """

    computation: Computation
    instruction: Instruction
    element: Callable[[int], int | None] | None = None
    arguments: tuple[int | None, ...] | None = None

    def operands(self) -> list["_At"]:
        """The instructions that it reads."""
        found = self.computation.operands(self.instruction)
        return [self._replace(instruction=operand) for operand in found]


def _tuple_element(program: Program, made: _At, k: int) -> int | None:
    if made.instruction.opcode != "tuple":
        return None
    elements = made.operands()
    return _integer(program, elements[k]) if k < len(elements) else None


_Sides = tuple[str, int, int] | None


def _steps(before: _Sides, after: _Sides) -> int | None:
    """How many steps until the condition is false, from its two sides before and after one step.

    The distance between the sides changes by the same amount in each step; for a condition such as
    `i > n`, both change sign.
    """
    if before is None or after is None:
        return None
    direction, left, right = before
    distance = left - right
    change = (after[1] - after[2]) - distance
    if direction in ("GT", "GE"):
        distance, change = -distance, -change
    if direction in ("LE", "GE"):
        distance -= 1
    if direction not in ("LT", "LE", "GT", "GE") or change <= 0:
        return None
    return max(0, math.ceil(-distance / change))


def _comparison(program: Program, root: _At) -> _Sides:
    """Direction and integer sides of a comparison."""
    compare = _computing(program, root)
    if compare.instruction.opcode != "compare":
        return None
    sides = [_integer(program, side) for side in compare.operands()]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return compare.instruction.attribute("direction") or "", sides[0], sides[1]


def _computing(program: Program, at: _At) -> _At:
    """The instruction that computes a value, behind copies, fusions and calls."""
    while True:
        opcode, operands = at.instruction.opcode, at.operands()
        if opcode in _COPIES and operands:
            at = operands[0]
        elif opcode in ("fusion", "call"):
            callee = program.computations[at.instruction.called[0]]
            if callee.root is None:
                return at
            at = _At(callee, callee.root, None, tuple(_integer(program, o) for o in operands))
        else:
            return at


def _integer(program: Program, at: _At) -> int | None:
    """The value of a scalar integer instruction, if the text says it."""
    if at not in program.integers:
        value = _read_integer(program, _computing(program, at))
        # The compiler's integers have at most 64 bits.
        program.integers[at] = None if value is None or abs(value) >= 2**64 else value
    return program.integers[at]


def _read_integer(program: Program, at: _At) -> int | None:
    opcode, instruction = at.instruction.opcode, at.instruction
    if opcode == "constant":
        text = instruction.operands.strip()
        return int(text) if text.lstrip("-").isdigit() else None
    if opcode == "parameter" and at.arguments is not None:
        return at.arguments[int(instruction.operands)]
    if opcode == "get-tuple-element" and at.element is not None:
        return at.element((instruction.integers("index") or [0])[0])
    operands = at.operands()
    if opcode in _ARITHMETIC and len(operands) == 2:
        a, b = (_integer(program, operand) for operand in operands)
        return None if a is None or b is None else _ARITHMETIC[opcode](a, b)
    return None
