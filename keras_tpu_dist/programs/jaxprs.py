"""Jaxprs read and written: the one way to look into equations, for every JAX."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core


def opened(jaxpr: Any) -> Any:
    """The `Jaxpr` within a `ClosedJaxpr`; newer versions of JAX have only one of the two.

    Args:
        jaxpr: Either of the two.
    """
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a program.

    Args:
        value: The value of the parameter.
    """
    return isinstance(value, (core.ClosedJaxpr, core.Jaxpr))


def is_key(array: Any) -> bool:
    """Whether an array has keys of random numbers, which NumPy cannot read."""
    return jnp.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.extended)


def with_equations(jaxpr: Any, equations: list, **others: Any) -> Any:
    """The program with other equations.

    Args:
        jaxpr: The program, a `ClosedJaxpr` or a `Jaxpr`, as the result is.
        equations: Its new equations, all of them, in order.
        **others: Other parts of a `Jaxpr`, such as `outvars`; by default they stay the same.
    """
    edited = opened(jaxpr).replace(eqns=equations, **others)
    if isinstance(jaxpr, core.Jaxpr):
        return edited
    return jaxpr.replace(jaxpr=edited)


def function_of(
    program: Any, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., list]:
    """Some equations of a program as a function, whose operations keep the names of layers.

    Args:
        program: The program, a `Jaxpr`.
    """
    alone = program.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        effects=set().union(*(equation.effects for equation in equations)),
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))


def with_constants(
    jaxpr: Any, constants: Mapping[Any, Any], inputs: Sequence[Any] | None = None
) -> Any:
    """The program with other constants.

    Args:
        jaxpr: The program; a `ClosedJaxpr`.
        constants: The value of each variable.
        inputs: The variables of its inputs. Defaults to those that it has.
    """
    program, values = opened(jaxpr), list(constants.values())
    inputs = list(program.invars if inputs is None else inputs)
    variables: dict[str, Any] = {"constvars": list(constants), "invars": inputs}
    if isinstance(jaxpr, core.Jaxpr):
        return program.replace(consts=values, **variables)
    return jaxpr.replace(jaxpr=program.replace(**variables), consts=values)


def constants_of(jaxpr: Any) -> dict[Any, Any]:
    """The constants of a program by their variables.

    Args:
        jaxpr: The program; a `ClosedJaxpr`.
    """
    return dict(zip(opened(jaxpr).constvars, jaxpr.consts, strict=True))


def with_inputs(jaxpr: Any, variables: Sequence[Any]) -> Any:
    """The program with some of its constants as further inputs, the last ones.

    Args:
        jaxpr: The program; a `ClosedJaxpr`.
        variables: The variables of the constants.
    """
    chosen = set(variables)
    others = {
        variable: value for variable, value in constants_of(jaxpr).items() if variable not in chosen
    }
    return with_constants(jaxpr, others, [*opened(jaxpr).invars, *variables])


def manual_axes(equation: Any) -> frozenset[str]:
    """The mesh axes over which a `shard_map` runs its program once for each device.

    Args:
        equation: The `shard_map`.
    """
    parameters = equation.params
    # jax 0.10.1 calls them by the second name
    names = ("newly_manual_axes", "manual_axes")
    return frozenset(next(parameters[name] for name in names if name in parameters))


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The programs that an equation calls.

    Args:
        equation: The equation.
    """
    for value in equation.params.values():
        if isinstance(value, (tuple, list)):
            yield from (entry for entry in value if is_jaxpr(entry))
        elif is_jaxpr(value):
            yield value


def with_inner_jaxprs(equation: Any, edit: Callable[[Any], Any]) -> Any:
    """The equation with `edit` applied to each program that it calls; itself if none changes.

    Args:
        equation: The equation.
        edit: From a program to another one, or to the same object where nothing changes.
    """
    changed = {}
    for name, value in equation.params.items():
        if is_jaxpr(value):
            new = edit(value)
        elif isinstance(value, (tuple, list)) and any(map(is_jaxpr, value)):
            entries = [edit(entry) if is_jaxpr(entry) else entry for entry in value]
            named = hasattr(value, "_fields")
            new = type(value)(*entries) if named else type(value)(entries)
            new = value if all(a is b for a, b in zip(new, value, strict=True)) else new
        else:
            continue
        if new is not value:
            changed[name] = new
    return equation.replace(params={**equation.params, **changed}) if changed else equation


def any_equation(
    jaxpr: Any,
    holds: Callable[[Any], bool],
    of_interest: Callable[[Any], bool] = lambda equation: True,
) -> bool:
    """Whether an equation of a program, or of one that it calls, has a property.

    Equations that are not of interest are passed by, and what they call.

    Args:
        jaxpr: The program.
        holds: Whether an equation has the property.
        of_interest: Whether an equation is of interest. Defaults to all.
    """
    seen: set[int] = set()

    def found(jaxpr: Any) -> bool:
        if id(opened(jaxpr)) in seen:
            return False
        seen.add(id(opened(jaxpr)))
        for equation in opened(jaxpr).eqns:
            if not of_interest(equation):
                continue
            if holds(equation):
                return True
            if equation.params and any(map(found, inner_jaxprs(equation))):
                return True
        return False

    return found(jaxpr)


def replacement(equation: Any, function: Callable) -> list:
    """Equations that compute an equation's results by another function.

    Args:
        equation: The equation.
        function: From its operands to its result, or to a list of them. It must not use arrays
            of its own.

    Returns:
        The equations, with the places in the source code and the layers of the one replaced.
    """
    inner = _traced(equation, function, equation.invars)
    return _inlined(inner, equation, equation.invars, equation.outvars)


def inserted(
    equation: Any, function: Callable, operands: list, results: list | None = None
) -> tuple[list, list]:
    """Equations to stand beside an equation, with its place in the source code and its layer.

    Args:
        equation: The equation.
        function: From the operands to a list of results. It must not use arrays of its own.
        operands: What the function takes, of the equation's program.
        results: The variables of its results; `None` for new ones.
    """
    inner = _traced(equation, function, operands)
    results = list(inner.outvars) if results is None else results
    return _inlined(inner, equation, operands, results), results


def surrounded(equation: Any, before: Callable, after: Callable) -> list:
    """An equation whose operands and results pass through functions.

    Args:
        equation: The equation.
        before: From its operands to as many of the same shapes.
        after: From its results to as many of the same shapes.
    """
    first = _traced(equation, before, equation.invars)
    last = _traced(equation, after, equation.outvars)
    names = dict(zip(first.invars, equation.invars, strict=True))
    operands = [names.get(atom, atom) for atom in first.outvars]
    after_it = [*zip(last.outvars, equation.outvars, strict=True)]
    passed = {v: w for v, w in after_it if v in set(last.invars)}
    own = equation.replace(invars=operands, outvars=[passed.get(v, v) for v in last.invars])
    results = [(v, w) for v, w in after_it if v not in passed]
    return [
        *_inlined(first, equation, equation.invars, first.outvars),
        own,
        *_inlined(last, equation, own.outvars, [w for _, w in results], [v for v, _ in results]),
    ]


def _traced(equation: Any, function: Callable, atoms: list) -> Any:
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in atoms]
    with equation.ctx.manager:
        traced = jax.make_jaxpr(lambda *operands: function(*operands))(*avals)
    assert not traced.consts, "a replacement uses arrays of its own"
    return opened(traced)


def _inlined(inner: Any, equation: Any, operands: list, results: list, own: Any = None) -> list:
    """The equations of a program with its inputs and outputs renamed."""
    names = dict(zip(inner.invars, operands, strict=True))
    own = inner.outvars if own is None else own
    assert len(set(own)) == len(own), "a replacement returns one value twice"
    outputs = dict(zip(own, results, strict=True))
    made = []
    for eqn in inner.eqns:
        eqn = eqn.replace(
            invars=[a if isinstance(a, core.Literal) else names.get(a, a) for a in eqn.invars],
            outvars=[outputs.get(v, v) for v in eqn.outvars],
            source_info=equation.source_info,
        )
        made.append(eqn)
        names.update((v, w) for v, w in outputs.items() if w in eqn.outvars)
    return made
