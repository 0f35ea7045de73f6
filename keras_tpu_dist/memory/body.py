"""One block as the body of a loop: what it keeps for gradients, and weights made whole in it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.memory.narrow import narrowed
from keras_tpu_dist.memory.policies import keeps_what_is_dear
from keras_tpu_dist.memory.runs import Block
from keras_tpu_dist.partitioner.jaxprs import any_equation, inner_jaxprs, opened
from keras_tpu_dist.partitioner.places import mesh_here


@dataclass(frozen=True)
class Step:
    """A part of a program.

    Attributes:
        inputs: What it reads.
        outputs: What it gives.
        compute: From the values of the one to those of the other.
    """

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
        The function, and the dtypes of the inputs that it takes narrower than the block does.
    """
    weights = [i for i in own if i >= block.arguments]
    jaxpr, dtypes = narrowed(block.equation.params["jaxpr"], weights)
    program, constants = opened(jaxpr), dict(zip(opened(jaxpr).constvars, jaxpr.consts))
    layouts = {program.invars[i]: both for i in weights if (both := _layouts(block, i))}
    parts = [_part(program, equations, layouts) for equations in _parted(program)]

    def body(*inputs):
        values = {**constants, **dict(zip(program.invars, inputs))}
        for part in parts:
            values.update(zip(part.outputs, part.compute([values[v] for v in part.inputs])))
        return [read(values, atom) for atom in program.outvars]

    return body, dtypes


def layout_of(block: Block, position: int) -> Any:
    """The layout of the variable that an input is, or `None`.

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
    """The layout of a weight, and that in which a plan has it used: not split as the batch is."""
    layout, strategy = layout_of(block, position), _keras.active_strategy()
    if layout is None or not hasattr(strategy.layouts.layout, "plan"):
        return None
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in layout.spec]
    kept = [tuple(axis for axis in e if axis not in strategy.data_axes) or None for e in entries]
    whole = NamedSharding(layout.mesh, PartitionSpec(*kept))
    return None if whole.spec == PartitionSpec(*(e or None for e in entries)) else (layout, whole)


def _whole(value: Any, layouts: tuple[NamedSharding, NamedSharding] | None) -> Any:
    """A weight, gathered here, so that its gradient is summed into parts here.

    Left to itself the compiler multiplies part by part within a loop, and waits for each.
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
    """A block's equations in groups: each that is computed again already is one of its own."""
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
    return _is_again(equation) or any(any_equation(j, _is_again) for j in inner_jaxprs(equation))


def _is_again(equation: Any) -> bool:
    return "prevent_cse" in equation.params


def _part(program: Any, equations: list, layouts: Mapping) -> Step:
    made = [variable for each in equations for variable in each.outvars]
    own = set(made)
    inputs = [v for v in dict.fromkeys(_variables(equations)) if v not in own]
    mine = {id(each) for each in equations}
    others = [each for each in program.eqns if id(each) not in mine]
    used = {*_variables(others), *(v for v in program.outvars if not isinstance(v, core.Literal))}
    outputs = [variable for variable in made if variable in used]
    again = _is_again(equations[0])
    if again:
        call, outputs = _inner(equations[0], inputs), equations[0].outvars
    else:
        alone = program.replace(constvars=[], invars=inputs, outvars=outputs, eqns=equations)
        call = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))

    def part(*given):
        return call(*(_whole(each, layouts.get(v)) for v, each in zip(inputs, given)))

    if again or not _has_policy(equations[0]):
        policy = equations[0].params["policy"] if again else keeps_what_is_dear
        # The loop of the gradients is another one, so there is nothing to be kept apart.
        part = jax.checkpoint(part, policy=policy, prevent_cse=False)
    return Step(inputs, outputs, lambda given: part(*given))


def _inner(equation: Any, inputs: list) -> Callable:
    """What a call of `jax.checkpoint` computes, of its inputs each once."""
    function = core.jaxpr_as_fun(core.ClosedJaxpr(opened(equation.params["jaxpr"]), []))

    def call(*given):
        values = dict(zip(inputs, given))
        return function(*(read(values, atom) for atom in equation.invars))

    return call


def _variables(equations: list) -> list:
    atoms = [atom for each in equations for atom in each.invars]
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]
