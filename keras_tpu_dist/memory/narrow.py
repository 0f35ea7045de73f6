"""Programs that take an input in the dtype to which they would convert it first."""

from typing import Any

import jax.numpy as jnp
from jax.extend import core

from keras_tpu_dist.partitioner.jaxprs import opened

# Calls whose operands are the inputs of the program in the parameter "jaxpr".
_CALLS = {"checkpoint", "remat", "remat2", "jit", "pjit"}


def narrowed(jaxpr: Any, positions: list[int]) -> tuple[Any, dict[int, Any]]:
    """A program that is given some inputs as what it makes of them.

    Under mixed precision a layer converts each weight, and does nothing else with it. Weights that
    are converted before they are stacked take half the bytes, and so do their gradients.

    Args:
        jaxpr: The program, a `ClosedJaxpr` or a `Jaxpr`.
        positions: The inputs that may be narrowed.

    Returns:
        The program, and for each input that it takes in another dtype than before, that dtype.
    """
    inputs = opened(jaxpr).invars
    dtypes = {i: dtype for i in positions if (dtype := _made_of(jaxpr, inputs[i])) is not None}
    return (_with_inputs(jaxpr, dtypes), dtypes) if dtypes else (jaxpr, {})


def _made_of(jaxpr: Any, variable: Any) -> Any:
    """The dtype to which a program converts an input that it uses for nothing else."""
    program, found = opened(jaxpr), set()
    if not _is_float(variable.aval.dtype) or any(v is variable for v in program.outvars):
        return None
    for equation in program.eqns:
        for i, atom in enumerate(equation.invars):
            if atom is variable:
                found.add(_use(equation, i))
    (dtype,) = found if len(found) == 1 else (None,)
    narrower = dtype is not None and dtype.itemsize < variable.aval.dtype.itemsize
    return dtype if narrower and _is_float(dtype) else None


def _use(equation: Any, position: int) -> Any:
    name = equation.primitive.name
    if name == "convert_element_type":
        return equation.params["new_dtype"]
    if name in _CALLS:
        inner = equation.params["jaxpr"]
        return _made_of(inner, opened(inner).invars[position])
    return None


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _with_inputs(jaxpr: Any, dtypes: dict[int, Any]) -> Any:
    program = opened(jaxpr)
    inputs = list(program.invars)
    wide = {inputs[i]: dtype for i, dtype in dtypes.items()}
    renamed: dict[Any, Any] = {}
    for i, dtype in dtypes.items():
        new = core.Var(inputs[i].aval.update(dtype=dtype, weak_type=False))
        renamed[inputs[i]] = inputs[i] = new
    equations = []
    for equation in program.eqns:
        taken = {
            i: wide[atom]
            for i, atom in enumerate(equation.invars)
            if not isinstance(atom, core.Literal) and atom in wide
        }
        atoms = [_renamed(atom, renamed) for atom in equation.invars]
        if taken and equation.primitive.name == "convert_element_type":
            renamed[equation.outvars[0]] = atoms[0]
            continue
        equation = equation.replace(invars=atoms)
        if taken:
            inner = _with_inputs(equation.params["jaxpr"], taken)
            equation = equation.replace(params={**equation.params, "jaxpr": inner})
        equations.append(equation)
    outputs = [_renamed(atom, renamed) for atom in program.outvars]
    edited = program.replace(invars=inputs, outvars=outputs, eqns=equations)
    return edited if isinstance(jaxpr, core.Jaxpr) else jaxpr.replace(jaxpr=edited)


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, core.Literal) else names.get(atom, atom)
