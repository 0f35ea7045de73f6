"""The programs that an equation calls: which operands and results are their inputs and outputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.axes import names_in
from keras_tpu_dist.programs.jaxprs import inner_jaxprs, opened

# They take a program that computes one number from two, and not from one of their operands.
# fmt: off
_OF_NUMBERS = frozenset(
    [
        "reduce", "reduce_window", "scatter", "scatter-add", "scatter-max", "scatter-min",
        "scatter-mul", "scatter-sub", "select_and_scatter", "sort",
    ]
)
# fmt: on


@dataclass(frozen=True)
class Called:
    """A program that an equation calls.

    Attributes:
        jaxpr: The program, a `Jaxpr`.
        kind: "call": it runs once; "loop": the body of a loop; "condition": the program that ends a
            `while`; "branch": one of several, of which one runs; "part": one of several that run in
            any order, as for a linear system; "unknown": its inputs are not the equation's
            operands, as for a kernel.
        operands: For every input, the equation's operand; the operands that a scan slices have
            one dimension more. Empty if unknown.
        results: For every output, the equation's result, likewise. Empty if unknown, and for a
            condition.
        carried: For the first outputs of a loop's body, the operand that they replace in the next
            round.
        rounds: How often it runs, `None` if the program decides.
        devices: If the program is written for one of several devices, their number.
    """

    jaxpr: Any
    kind: str
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    rounds: int | None = 1
    devices: int = 1


def calls(equation: Any) -> list[Called]:
    """The programs that an equation calls, all of one kind but for the condition of a `while`.

    Args:
        equation: The equation.
    """
    name = equation.primitive.name
    if name in _OF_NUMBERS:
        return []
    jaxprs = [opened(jaxpr) for jaxpr in inner_jaxprs(equation)]
    return _RULES.get(name, _of_all)(equation, jaxprs) if jaxprs else []


def program_of(equation: Any) -> Called | None:
    """The program that an equation does nothing but run, once, on all its operands.

    Such a program can be read, and edited, in the place of the equation: the one list of what a
    call is. A program with rules of its own, for gradients or batches, cannot: JAX names these
    calls `custom_...`. Nor can one for a device of several.
    """
    name = equation.primitive.name
    found = calls(equation)
    if len(found) != 1 or name == "shard_map" or name.startswith("custom_"):
        return None
    (program,) = found
    whole = len(program.operands) == len(equation.invars)
    return program if program.kind == "call" and whole else None


def is_recomputed(equation: Any) -> bool:
    """Whether an equation is a call of `jax.checkpoint`."""
    return "prevent_cse" in equation.params


def rank(atom: Any) -> int:
    """The number of dimensions of a value; none for tokens and references without a shape.

    Args:
        atom: A value of a program, a variable or a literal.
    """
    return len(getattr(atom.aval, "shape", ()))


def _of_all(equation: Any, jaxprs: list) -> list[Called]:
    return [_paired(equation, jaxpr, "call") for jaxpr in jaxprs]


def _paired(equation: Any, jaxpr: Any, kind: str) -> Called:
    """A program whose inputs are the last operands: of a branch, all but the one that chooses."""
    operands = range(len(equation.invars))[len(equation.invars) - len(jaxpr.invars) :]
    results = range(len(equation.outvars))
    if len(operands) != len(jaxpr.invars) or len(results) != len(jaxpr.outvars):
        return Called(jaxpr, "unknown")
    pairs = [
        *zip((equation.invars[i] for i in operands), jaxpr.invars, strict=True),
        *zip(equation.outvars, jaxpr.outvars, strict=True),
    ]
    if any(rank(outer) != rank(inner) for outer, inner in pairs):
        return Called(jaxpr, "unknown")
    return Called(jaxpr, kind, tuple(operands), tuple(results))


def _branches(equation: Any, jaxprs: list) -> list[Called]:
    return [_paired(equation, jaxpr, "branch") for jaxpr in jaxprs]


def _shard_map(equation: Any, jaxprs: list) -> list[Called]:
    parameters = equation.params
    used = {axis for spec in parameters["in_specs"] for axis in names_in(spec)}
    devices = math.prod(parameters["mesh"].shape[axis] for axis in used)
    operands, results = range(len(equation.invars)), range(len(equation.outvars))
    return [Called(jaxprs[0], "call", tuple(operands), tuple(results), devices=devices)]


def _scan(equation: Any, jaxprs: list) -> list[Called]:
    """A scan slices operands that have a dimension more outside than inside, and stacks likewise.

    JAX names these numbers differently from version to version.
    """
    (body,) = jaxprs
    outer = [*equation.invars, *equation.outvars]
    pairs = zip(outer, [*body.invars, *body.outvars], strict=True)
    lengths = [a.aval.shape[0] if rank(a) > rank(b) else None for a, b in pairs]
    taken, stacked = lengths[: len(body.invars)], lengths[len(body.invars) :]
    first = taken.count(None) - stacked.count(None)
    return [
        Called(
            body,
            "loop",
            operands=tuple(range(len(taken))),
            results=tuple(range(len(stacked))),
            carried=tuple(range(first, taken.count(None))),
            rounds=next((n for n in lengths if n is not None), equation.params.get("length", 1)),
        )
    ]


def _while(equation: Any, jaxprs: list) -> list[Called]:
    parameters, operands = equation.params, tuple(range(len(equation.invars)))
    of_condition = parameters["cond_nconsts"]
    carried = operands[of_condition + parameters["body_nconsts"] :]
    return [
        Called(
            opened(parameters["cond_jaxpr"]),
            "condition",
            operands=operands[:of_condition] + carried,
            rounds=None,
        ),
        Called(
            opened(parameters["body_jaxpr"]),
            "loop",
            operands=operands[of_condition:],
            results=tuple(range(len(carried))),
            carried=carried,
            rounds=None,
        ),
    ]


def _solve(equation: Any, jaxprs: list) -> list[Called]:
    """A linear system: each of its programs has operands of its own, and the right side."""
    lengths, operands = equation.params["const_lengths"], tuple(range(len(equation.invars)))
    right, at, found = operands[sum(lengths) :], 0, []
    for length, jaxpr in zip(lengths, map(opened, equation.params["jaxprs"]), strict=True):
        own = operands[at : at + length] + right
        at += length
        if jaxpr is not None:
            # Products have no results beside the first ones, which a solver may have.
            results = tuple(range(min(len(jaxpr.outvars), len(equation.outvars))))
            found.append(Called(jaxpr, "part", own, results))
    return found


_RULES: dict[str, Callable[[Any, list], list[Called]]] = {
    "cond": _branches,
    "custom_linear_solve": _solve,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
