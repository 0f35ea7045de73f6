"""How often each instruction of a compiled program runs."""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keras_tpu_dist.common.scopes import LAST_OF, RARE_BRANCH, RARE_LOOP
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program, size_of

logger = logging.getLogger("keras_tpu_dist")

# Computations called by these run as part of the caller: one kernel, or one scalar function.
_INLINED = {"fusion", "reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"}
_COLLECTIVES = ("all-reduce", "reduce-scatter")
_EVERY_COLLECTIVE = (*_COLLECTIVES, "all-gather", "all-to-all", "collective", "ragged-all-to-all")
_OFFLOADED = ("call-start", "custom-call-start")
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
        unknown_loops: Loops whose trip count the text does not say, counted as running once.
    """

    executions: tuple[Execution, ...]
    unknown_loops: tuple[str, ...]


def executions(program: Program) -> Executions:
    """Lists what runs, and how often: loop bodies times their trip counts.

    A loop for ids that a table's exchange has no room for counts nothing: it seldom runs at all. Of
    the branches of a conditional the one with most instructions counts, as it is not known
    which one runs.
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
    if opcode in _INLINED or opcode.startswith(_COLLECTIVES) or opcode.endswith("-done"):
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
    elif opcode in ("call", "async-start"):
        for callee in called:
            yield callee, 1
    elif opcode in _OFFLOADED:
        # What a SparseCore computes; the collectives that it carries out are found from here.
        for callee in called:
            if not _communicates(program, callee):
                yield callee, 1


def _communicates(program: Program, computation: Computation) -> bool:
    """Whether a computation that runs beside the main one has a collective in it."""
    return any(
        i.opcode.startswith(_EVERY_COLLECTIVE)
        or (
            i.opcode in ("fusion", "call", *_OFFLOADED)
            and any(_communicates(program, program.computations[n]) for n in i.called)
        )
        for i in computation
    )


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs.

    Read from the CPU compiler's annotation, or from the comparison in the loop's condition: both
    sides before the loop and after one step give the number of steps until it is false.

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
    if condition is None or body is None or not initial or body.root is None:
        return None
    at_start = functools.partial(_tuple_element, program, computation, initial[0], None)
    after_step = functools.partial(_tuple_element, program, body, body.root, at_start)
    return _steps(program, condition, at_start, after_step)


# gives the integer in element k of a loop's tuple, or None
_Element = Callable[[int], int | None]


def _tuple_element(
    program: Program, computation: Computation, made: Instruction, outer: _Element | None, k: int
) -> int | None:
    if made.opcode != "tuple":
        return None
    elements = computation.operands(made)
    return _integer(program, computation, elements[k], outer, None) if k < len(elements) else None


def _steps(
    program: Program, condition: Computation, start: _Element, after: _Element
) -> int | None:
    """How many steps until the condition is false, from its two sides before and after one step.

    The distance between the sides changes by the same amount in each step; for a condition such as
    `i > n`, both change sign.
    """
    sides = _comparison(program, condition, condition.root, start)
    next_sides = _comparison(program, condition, condition.root, after)
    if sides is None or next_sides is None:
        return None
    direction, left, right = sides
    distance = left - right
    change = (next_sides[1] - next_sides[2]) - distance
    if direction in ("GT", "GE"):
        distance, change = -distance, -change
    if direction in ("LE", "GE"):
        distance -= 1
    if direction not in ("LT", "LE", "GT", "GE") or change <= 0:
        return None
    return max(0, math.ceil(-distance / change))


def _comparison(
    program: Program,
    computation: Computation,
    root: Instruction | None,
    element: _Element | None,
    arguments: list[int | None] | None = None,
) -> tuple[str, int, int] | None:
    """Direction and integer sides of the comparison that `root` is."""
    if root is None:
        return None
    if root.opcode in ("fusion", "call"):
        callee = program.computations[root.called[0]]
        values = [
            _integer(program, computation, o, element, arguments)
            for o in computation.operands(root)
        ]
        return _comparison(program, callee, callee.root, None, values)
    if root.opcode in _COPIES:
        inner = computation.operands(root)[0]
        return _comparison(program, computation, inner, element, arguments)
    if root.opcode != "compare":
        return None
    sides = [
        _integer(program, computation, o, element, arguments) for o in computation.operands(root)
    ]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return root.attribute("direction") or "", sides[0], sides[1]


def _integer(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    element: _Element | None,
    arguments: list[int | None] | None,
) -> int | None:
    """The value of a scalar integer instruction, if the text says it."""
    known = None if arguments is None else tuple(arguments)
    key = (computation.name, instruction.name, element, known)
    if key not in program.integers:
        value = _read_integer(program, computation, instruction, element, arguments)
        # The compiler's integers have at most 64 bits.
        program.integers[key] = None if value is None or abs(value) >= 2**64 else value
    return program.integers[key]


def _read_integer(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    element: _Element | None,
    arguments: list[int | None] | None,
) -> int | None:
    opcode = instruction.opcode
    operands = computation.operands(instruction)
    if opcode == "constant":
        text = instruction.operands.strip()
        return int(text) if text.lstrip("-").isdigit() else None
    if opcode == "parameter" and arguments is not None:
        return arguments[int(instruction.operands)]
    if opcode == "get-tuple-element" and element is not None:
        return element((instruction.integers("index") or [0])[0])
    if opcode in _COPIES and operands:
        return _integer(program, computation, operands[0], element, arguments)
    if opcode in ("fusion", "call"):
        callee = program.computations[instruction.called[0]]
        values = [_integer(program, computation, o, element, arguments) for o in operands]
        root = callee.root
        return None if root is None else _integer(program, callee, root, None, values)
    if opcode in _ARITHMETIC and len(operands) == 2:
        a, b = (_integer(program, computation, o, element, arguments) for o in operands)
        return None if a is None or b is None else _ARITHMETIC[opcode](a, b)
    return None
