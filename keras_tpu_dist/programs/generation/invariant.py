"""Computes values that only depend on a loop's weights once, before the loop.

XLA moves cheap operations out of loops, but no collectives, and no results that would take memory
during the loop. Without this, a loop over tokens converts its weights, and changes their layout for
its products, for every token.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_tpu_dist.programs.jaxprs import opened, with_equations

# Smaller arrays are left to XLA, which computes them where they are used.
_LEAST_BYTES = 2**10
# Arrays up to this size may be larger than their operands: a scale of a norm, in float32.
_SMALL_BYTES = 2**16


def weights_before(loop: Any) -> list:
    """Moves equations whose results are the same in all rounds of a loop before the loop.

    No large array is moved that is larger than its operands, because it takes memory until the loop
    ends.

    Args:
        loop: The equation of a `while`.

    Returns:
        The equations that replace it; the last one is the loop.
    """
    body = opened(loop.params["body_jaxpr"])
    conditions, constants = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    operands = dict(zip(body.invars, loop.invars[conditions:], strict=True))
    same = {*body.invars[:constants]}
    carried = zip(body.invars[constants:], body.outvars, strict=True)
    same |= {before for before, after in carried if before is after}
    outside = {variable: operands[variable] for variable in same}
    before, moved = [], []
    for equation in body.eqns:
        if _can_move(equation, outside):
            results = _new_variables(equation.outvars)
            invars = [outside.get(a, a) if isinstance(a, core.Var) else a for a in equation.invars]
            before.append(equation.replace(invars=invars, outvars=results))
            outside.update(zip(equation.outvars, results, strict=True))
            moved.append(equation)
    if not moved:
        return [loop]
    gone = {id(equation) for equation in moved}
    rest = [equation for equation in body.eqns if id(equation) not in gone]
    used = {a for e in rest for a in e.invars if isinstance(a, core.Var)} | {
        a for a in body.outvars if isinstance(a, core.Var)
    }
    given = [v for equation in moved for v in equation.outvars if v in used]
    return [*before, _with_constants(loop, rest, given, [outside[v] for v in given])]


def _can_move(equation: Any, outside: dict) -> bool:
    variables = [atom for atom in equation.invars if isinstance(atom, core.Var)]
    if equation.effects or not variables or any(v not in outside for v in variables):
        return False
    results = _bytes(equation.outvars)
    most = max(_SMALL_BYTES, *(_bytes([v]) for v in variables))
    return _LEAST_BYTES <= results <= most


def _bytes(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.aval.shape) * np.dtype(v.aval.dtype).itemsize for v in variables)


def _new_variables(like: list) -> list:
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in like]
    return list(opened(jax.make_jaxpr(lambda *given: given)(*shapes)).invars)


def _with_constants(loop: Any, equations: list, inside: list, outside: list) -> Any:
    """The loop with other equations and more constant inputs."""
    parameters = dict(loop.params)
    body = opened(parameters["body_jaxpr"])
    constants = parameters["body_nconsts"]
    at = parameters["cond_nconsts"] + constants
    invars = [*body.invars[:constants], *inside, *body.invars[constants:]]
    parameters["body_jaxpr"] = with_equations(parameters["body_jaxpr"], equations, invars=invars)
    parameters["body_nconsts"] = constants + len(inside)
    operands = [*loop.invars[:at], *outside, *loop.invars[at:]]
    return loop.replace(invars=operands, params=parameters)
