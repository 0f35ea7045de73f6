"""Runs a traced program, with one loop in place of every run of equal blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.programs.calls import is_recomputed, program_of
from keras_tpu_dist.programs.jaxprs import (
    any_equation,
    constants_of,
    function_of,
    inner_jaxprs,
    opened,
    with_equations,
    with_inner_jaxprs,
)
from keras_tpu_dist.programs.partitioner.places import mesh_here
from keras_tpu_dist.programs.scan.kept import keeps_costly_values
from keras_tpu_dist.programs.scan.runs import Block, Run, is_block


def narrowed(jaxpr: Any, positions: list[int]) -> tuple[Any, dict[int, Any]]:
    """A program that gets some of its inputs already converted.

    With mixed precision, a layer converts its weights and does nothing else with them. If weights
    are converted before they are stacked, they take half the bytes, and so do their gradients.

    Args:
        jaxpr: The program, a `ClosedJaxpr` or a `Jaxpr`.
        positions: The inputs that may be converted.

    Returns:
        The program, and the new dtypes of the inputs whose dtype has changed.
    """
    inputs = opened(jaxpr).invars
    dtypes = {i: dtype for i in positions if (dtype := _made_of(jaxpr, inputs[i])) is not None}
    return (_with_inputs(jaxpr, dtypes), dtypes) if dtypes else (jaxpr, {})


def _made_of(jaxpr: Any, variable: Any) -> Any:
    """The dtype that a program converts an input to, if it uses the input for nothing else."""
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
    if equation.primitive.name == "convert_element_type":
        return equation.params["new_dtype"]
    called = program_of(equation)
    return None if called is None else _made_of(called.jaxpr, called.jaxpr.invars[position])


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
            equation = with_inner_jaxprs(equation, lambda j, taken=taken: _with_inputs(j, taken))
        equations.append(equation)
    outputs = [_renamed(atom, renamed) for atom in program.outvars]
    return with_equations(jaxpr, equations, invars=inputs, outvars=outputs)


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, core.Literal) else names.get(atom, atom)


@dataclass(frozen=True)
class Step:
    """A part of a program."""

    inputs: list[Any]
    outputs: list[Any]
    compute: Callable[[list[Any]], Sequence[Any]]


def read(values: Mapping, atom: Any) -> Any:
    """The value of an input of an equation.

    Args:
        values: Values of variables of the program.
        atom: A variable or a literal.
    """
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def body_of(block: Block, own: list[int]) -> tuple[Callable, dict[int, Any]]:
    """A block as a function of its inputs.

    Args:
        block: The block.
        own: The inputs that differ from block to block.

    Returns:
        The function, and the dtypes of the inputs that it takes in a narrower dtype than the block.
    """
    weights = [i for i in own if i >= block.arguments]
    jaxpr, dtypes = narrowed(block.equation.params["jaxpr"], weights)
    program, constants = opened(jaxpr), constants_of(jaxpr)
    layouts = {program.invars[i]: both for i in weights if (both := _layouts(block, i))}
    parts = [_part(program, equations, layouts) for equations in _parted(program)]

    def body(*inputs):
        values = {**constants, **dict(zip(program.invars, inputs, strict=True))}
        for part in parts:
            values.update(
                zip(part.outputs, part.compute([values[v] for v in part.inputs]), strict=True)
            )
        return [read(values, atom) for atom in program.outvars]

    return body, dtypes


def layout_of(block: Block, position: int) -> Any:
    """The layout of the variable at an input, or `None`.

    Args:
        block: The block.
        position: The position of the input.
    """
    if position < block.arguments or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    layout = _keras.variable_layout(block.variables[position - block.arguments])
    if not isinstance(layout, NamedSharding) or _keras.active_strategy() is None:
        return None
    mesh: Any = layout.mesh
    return NamedSharding(mesh_here(mesh), layout.spec)


def _layouts(block: Block, position: int) -> tuple[NamedSharding, NamedSharding] | None:
    """The layout of a weight, and the one in which a plan uses it: not split by data axes."""
    layout, strategy = layout_of(block, position), _keras.active_strategy()
    if layout is None or not hasattr(strategy.layouts.layout, "plan"):
        return None
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in layout.spec]
    kept = [tuple(axis for axis in e if axis not in strategy.data_axes) or None for e in entries]
    whole = NamedSharding(layout.mesh, PartitionSpec(*kept))
    return None if whole.spec == PartitionSpec(*(e or None for e in entries)) else (layout, whole)


def _whole(value: Any, layouts: tuple[NamedSharding, NamedSharding] | None) -> Any:
    """Gathers a weight here, so that its gradient is reduce-scattered here.

    Otherwise the compiler multiplies part by part within a loop, and waits for every part.
    """
    if layouts is None:
        return value
    split, whole = layouts
    constrain = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def gather(x):
        return constrain(x, whole)

    gather.defvjp(lambda x: (gather(x), None), lambda _, gradient: (constrain(gradient, split),))
    return gather(value)


def _parted(program: Any) -> Iterator[list]:
    """A block's equations in groups; those that are already recomputed are groups of their own."""
    group: list = []
    for equation in program.eqns:
        if not _has_policy(equation):
            group.append(equation)
            continue
        yield from [group] if group else []
        yield [equation]
        group = []
    yield from [group] if group else []


def _has_policy(equation: Any) -> bool:
    if is_recomputed(equation):
        return True
    return any(any_equation(jaxpr, is_recomputed) for jaxpr in inner_jaxprs(equation))


def _part(program: Any, equations: list, layouts: Mapping) -> Step:
    """The equations of a part of a block as one step.

    Its inputs are what they read and do not make, its outputs what others read of it, both in the
    order of the program, which is the same for equal blocks.
    """
    made = [variable for equation in equations for variable in equation.outvars]
    own = set(made)
    inputs = [v for v in dict.fromkeys(_variables(equations)) if v not in own]
    mine = {id(equation) for equation in equations}
    others = [eqn for eqn in program.eqns if id(eqn) not in mine]
    used = {*_variables(others), *(v for v in program.outvars if not isinstance(v, core.Literal))}
    outputs = [variable for variable in made if variable in used]
    again = is_recomputed(equations[0])
    if again:
        call, outputs = _inner(equations[0], inputs), equations[0].outvars
    else:
        call = function_of(program, equations, inputs, outputs)

    def part(*given):
        return call(
            *(_whole(value, layouts.get(v)) for v, value in zip(inputs, given, strict=True))
        )

    if again or not _has_policy(equations[0]):
        policy = equations[0].params["policy"] if again else keeps_costly_values
        # The loop of the gradients is a separate one, so CSE need not be prevented.
        part = jax.checkpoint(part, policy=policy, prevent_cse=False)
    return Step(inputs, outputs, lambda given: part(*given))


def _inner(equation: Any, inputs: list) -> Callable:
    """The function of a call of `jax.checkpoint`, with every input once."""
    function = core.jaxpr_as_fun(core.ClosedJaxpr(opened(equation.params["jaxpr"]), []))

    def call(*given):
        values = dict(zip(inputs, given, strict=True))
        return function(*(read(values, atom) for atom in equation.invars))

    return call


def _variables(equations: list) -> list:
    atoms = [atom for equation in equations for atom in equation.invars]
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def computed(jaxpr: Any, runs: list[Run], inputs: Sequence[Any]) -> list[Any]:
    """Runs a program.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        runs: The equations to compute as loops.
        inputs: The program's inputs.
    """
    program = opened(jaxpr)
    values = constants_of(jaxpr) | dict(zip(program.invars, inputs, strict=False))
    for step in _in_order(program, runs, set(values)):
        given = [read(values, atom) for atom in step.inputs]
        values.update(zip(step.outputs, step.compute(given), strict=True))
    return [read(values, atom) for atom in program.outvars]


def _in_order(program: Any, runs: list[Run], known: set) -> list[Step]:
    """Steps in an order in which all find their inputs: users of a run wait for its last block."""
    last = {run.blocks[-1].position: run for run in runs}
    within = {block.position for run in runs for block in run.blocks}
    used = _uses(program)
    waiting: list[Step] = []
    for position, equation in enumerate(program.eqns):
        if position in last:
            waiting.append(_loop(last[position], used))
        elif position not in within:
            waiting.append(_equation(program, equation))
    ordered = []
    while waiting:
        later = []
        for step in waiting:
            if all(isinstance(a, core.Literal) or a in known for a in step.inputs):
                ordered.append(step)
                known.update(step.outputs)
            else:
                later.append(step)
        if len(later) == len(waiting):
            # Two runs wait for blocks of each other: all except the first are taken apart.
            made = {variable for equation in program.eqns for variable in equation.outvars}
            return _in_order(program, runs[:-1], known - made)
        waiting = later
    return ordered


def _uses(program: Any) -> dict[Any, set[int]]:
    """The equations that use a value; the results of the program count as one more."""
    found: dict[Any, set[int]] = {}
    atoms = [*((i, e.invars) for i, e in enumerate(program.eqns)), (-1, program.outvars)]
    for position, each in atoms:
        for atom in each:
            if not isinstance(atom, core.Literal):
                found.setdefault(atom, set()).add(position)
    return found


def _equation(program: Any, equation: Any) -> Step:
    outputs = list(equation.outvars)
    if is_block(equation):
        within = core.jaxpr_as_fun(equation.params["jaxpr"])
        return Step(list(equation.invars), outputs, lambda given: within(*given))
    atoms = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
    inputs = list(dict.fromkeys(atoms))
    call = function_of(program, [equation], inputs, outputs)
    return Step(inputs, outputs, lambda given: call(*given))


def _loop(run: Run, used: dict[Any, set[int]]) -> Step:
    """A run as one loop over the blocks' separate values, stacked."""
    same, own = run.by_kind()
    blocks, first = run.blocks, run.blocks[0]
    carried = sorted(run.carried)
    inputs = [
        *(first.inputs[i] for i in (*same, *carried)),
        *(block.inputs[i] for i in own for block in blocks),
    ]
    last = blocks[-1].equation.outvars
    ends = {run.carried[i]: n for n, i in enumerate(carried) if last[run.carried[i]] in used}
    kept = _read_outside(run, used, ends)
    outputs = [*(last[j] for j in ends), *(b.equation.outvars[j] for j in kept for b in blocks)]

    def compute(given: list[Any]) -> list[Any]:
        constants, rest = given[: len(same)], given[len(same) :]
        start, rest = rest[: len(carried)], rest[len(carried) :]
        body, dtypes = body_of(first, own)
        each = [rest[n : n + len(blocks)] for n in range(0, len(rest), len(blocks))]
        stacked = [
            _stacked(values, dtypes.get(i), _in_front(first, i))
            for i, values in zip(own, each, strict=True)
        ]

        def one(carry, mine):
            values = dict(zip((*same, *carried, *own), (*constants, *carry, *mine), strict=True))
            results = body(*(values[i] for i in range(len(values))))
            return [results[run.carried[i]] for i in carried], [results[j] for j in kept]

        end, stacks = jax.lax.scan(one, start, stacked, length=len(blocks))
        pieces = [
            jax.lax.index_in_dim(s, n, keepdims=False) for s in stacks for n in range(len(blocks))
        ]
        return [*(end[n] for n in ends.values()), *pieces]

    return Step(inputs, outputs, compute)


def _read_outside(run: Run, used: dict[Any, set[int]], ends: dict[int, int]) -> list[int]:
    """The outputs that are read outside of the next block."""
    positions = {block.position for block in run.blocks}
    found = []
    for j in range(len(run.blocks[0].equation.outvars)):
        readers = [used.get(block.equation.outvars[j], set()) for block in run.blocks]
        if j in ends:
            readers = readers[:-1]
        if any(reader - positions for reader in readers):
            found.append(j)
    return found


def _in_front(block: Block, position: int) -> Any:
    """The layout of a weight with a leading dimension that is not split."""
    layout = layout_of(block, position)
    return layout and NamedSharding(layout.mesh, PartitionSpec(None, *layout.spec))


def _stacked(values: list[Any], dtype: Any, layout: Any) -> Any:
    if dtype is not None:
        values = [value.astype(dtype) for value in values]
    stack = jnp.stack(values)
    return stack if layout is None else jax.lax.with_sharding_constraint(stack, layout)
