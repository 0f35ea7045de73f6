"""A traced program, run with one loop in the place of each run of equal blocks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.memory.body import Step, body_of, layout_of, read
from keras_tpu_dist.memory.runs import Block, Run, is_block
from keras_tpu_dist.partitioner.jaxprs import opened


def computed(jaxpr: Any, runs: list[Run], inputs: Sequence[Any]) -> list[Any]:
    """What a program computes.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        runs: The equations to compute as loops.
        inputs: The program's inputs.

    Returns:
        Its outputs.
    """
    program = opened(jaxpr)
    values = dict(zip(program.constvars, jaxpr.consts)) | dict(zip(program.invars, inputs))
    for step in _in_order(program, runs, set(values)):
        given = [read(values, atom) for atom in step.inputs]
        values.update(zip(step.outputs, step.compute(given)))
    return [read(values, atom) for atom in program.outvars]


def _in_order(program: Any, runs: list[Run], known: set) -> list[Step]:
    """Steps that each find their inputs: what needs a run's results waits for its last block."""
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
            # Two runs wait for one another's blocks: all but the first are taken apart.
            return _in_order(program, runs[:-1], known - _made(program))
        waiting = later
    return ordered


def _made(program: Any) -> set:
    return {variable for equation in program.eqns for variable in equation.outvars}


def _uses(program: Any) -> dict[Any, set[int]]:
    """The equations in which each value is used; the results of the program are one more."""
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
    alone = program.replace(constvars=[], invars=inputs, outvars=outputs, eqns=[equation])
    call = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))
    return Step(inputs, outputs, lambda given: call(*given))


def _loop(run: Run, used: dict[Any, set[int]]) -> Step:
    """A run as one loop over its blocks' own values, stacked."""
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
            _stacked(values, dtypes.get(i), _in_front(first, i)) for i, values in zip(own, each)
        ]

        def one(carry, mine):
            values = dict(zip((*same, *carried, *own), (*constants, *carry, *mine)))
            results = body(*(values[i] for i in range(len(values))))
            return [results[run.carried[i]] for i in carried], [results[j] for j in kept]

        end, stacks = jax.lax.scan(one, start, stacked, length=len(blocks))
        pieces = [jax.lax.index_in_dim(s, n, keepdims=False) for s in stacks for n in _range(run)]
        return [*(end[n] for n in ends.values()), *pieces]

    return Step(inputs, outputs, compute)


def _range(run: Run) -> range:
    return range(len(run.blocks))


def _read_outside(run: Run, used: dict[Any, set[int]], ends: dict[int, int]) -> list[int]:
    """The outputs that are read elsewhere than in the block that follows."""
    positions = {block.position for block in run.blocks}
    found = []
    for j in range(len(run.blocks[0].equation.outvars)):
        readers = [used.get(block.equation.outvars[j], set()) for block in run.blocks]
        if j in ends:
            readers = readers[:-1]
        if any(each - positions for each in readers):
            found.append(j)
    return found


def _in_front(block: Block, position: int) -> Any:
    """The layout of a weight with a dimension in front that is not split."""
    layout = layout_of(block, position)
    return layout and NamedSharding(layout.mesh, PartitionSpec(None, *layout.spec))


def _stacked(values: list[Any], dtype: Any, layout: Any) -> Any:
    if dtype is not None:
        values = [value.astype(dtype) for value in values]
    stack = jnp.stack(values)
    return stack if layout is None else jax.lax.with_sharding_constraint(stack, layout)
