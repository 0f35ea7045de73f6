"""Writes caches of keys and values in place, instead of restacking them for every token.

Each layer of a decoder slices its part out of the cache and writes one position; then the parts are
stacked to the next cache. This copies the whole cache for every token. Here every write goes into
the cache itself, and attention reads a slice of it. So the loop needs no second cache.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core

from keras_tpu_dist.programs.answers import (
    Answer,
    Level,
    PassContext,
    Rewritten,
    Why,
    WrittenProgram,
)
from keras_tpu_dist.programs.generation.heads import with_grouped_heads
from keras_tpu_dist.programs.generation.invariant import weights_before
from keras_tpu_dist.programs.jaxprs import inserted, opened, with_equations, with_inner_jaxprs


@dataclass(frozen=True)
class _Part:
    """A part of a cache.

    Attributes:
        begins: The start in each dimension of the cache.
        dims: The dimensions of the cache that the part has, in order. In the others it is one
            element.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "_Part":
        return cls((0,) * len(shape), tuple(shape), tuple(range(len(shape))))

    def element(self, axis: int, place: int) -> "_Part":
        """One element of the part along one of its dimensions, without this dimension."""
        dimension = self.dims[axis]
        begins, ends = list(self.begins), list(self.ends)
        begins[dimension] += place
        ends[dimension] = begins[dimension] + 1
        dims = tuple(d for d in self.dims if d != dimension)
        return _Part(tuple(begins), tuple(ends), dims)

    def has_whole_dimensions(self, shape: tuple[int, ...]) -> bool:
        """Whether the part's dimensions have the full sizes of the cache's."""
        return all((self.begins[d], self.ends[d]) == (0, shape[d]) for d in self.dims)


@dataclass
class _Plan:
    """The replacement of one cache in a loop.

    Attributes:
        writes: From the result of a write to the part of the cache that it replaces.
        stacks: The results of operations that stack parts.
    """

    cache: Any
    result: Any
    writes: dict[Any, _Part] = field(default_factory=dict)
    stacks: set[Any] = field(default_factory=set)


IN_PLACE = "caches are written in place, a position at a time"
AS_WRITTEN = "caches are stacked for every token: no loop stacks what it took out of them"


class CachesInPlace:
    """The pass that writes the caches of `generate` in place."""

    name = "generation"
    level = Level.LAUNCH

    def rewritten(self, program: WrittenProgram, where: PassContext) -> Rewritten | Why:
        """The loop over tokens with its caches in place."""
        if where.kind != "generate":
            return Why()
        results, done = in_place(program.function, program.args)
        words = IN_PLACE if done else AS_WRITTEN
        return Rewritten(results, [Answer(where.model.name, words, done)])

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """Nothing: most models never generate."""
        return []


def in_place(function: Callable, args: Sequence[Any]) -> tuple[Any, bool]:
    """The results of a function whose loops write caches in place, and whether any does.

    Args:
        function: A function of arrays, in any structure.
        args: Its arguments.
    """
    leaves, structure = jax.tree.flatten(args)

    def flat(*leaves):
        return function(*jax.tree.unflatten(structure, leaves))

    traced = jax.jit(flat).trace(*leaves)
    program = _with_loops_in_place(traced.jaxpr)
    results = core.jaxpr_as_fun(program)(*leaves)
    structure_of_results = jax.tree.structure(traced.out_info)
    return jax.tree.unflatten(structure_of_results, results), program is not traced.jaxpr


def _with_loops_in_place(jaxpr: Any) -> Any:
    """A program whose loops, and those of its inner programs, write caches in place."""
    before = opened(jaxpr).eqns
    equations = []
    for equation in before:
        equation = with_inner_jaxprs(equation, _with_loops_in_place)
        if equation.primitive.name == "while":
            parameters = equation.params
            body = _loop_in_place(parameters["body_jaxpr"], parameters["body_nconsts"])
            if body is not parameters["body_jaxpr"]:
                equation = equation.replace(params={**parameters, "body_jaxpr": body})
                equations += weights_before(equation)
                continue
        equations.append(equation)
    same = len(equations) == len(before) and all(map(operator.is_, equations, before))
    return jaxpr if same else with_equations(jaxpr, equations)


def _loop_in_place(body: Any, constants: int) -> Any:
    original, inner = body, opened(body)
    makers = {variable: equation for equation in inner.eqns for variable in equation.outvars}
    for cache, result in zip(inner.invars[constants:], inner.outvars, strict=True):
        plan = _Plan(cache, result)
        of_parts = _is_updated(result, _Part.whole(cache.aval.shape), plan, makers)
        if of_parts and plan.writes and plan.stacks:
            body = _with_writes(body, plan)
    return body if body is original else with_grouped_heads(body)


def _is_updated(atom: Any, part: _Part, plan: _Plan, makers: dict) -> bool:
    """Whether a value is a part of the cache, except for writes, which are added to the plan."""
    if _part_of(atom, plan.cache, makers) == part:
        return True
    equation = makers.get(atom) if isinstance(atom, core.Var) else None
    if equation is None or atom in plan.writes:
        return False
    if equation.primitive.name == "stack":
        plan.stacks.add(atom)
        axis = equation.params["axis"]
        return all(
            _is_updated(operand, part.element(axis, place), plan, makers)
            for place, operand in enumerate(equation.invars)
        )
    if equation.primitive.name == "dynamic_update_slice":
        plan.writes[atom] = part
        # A position beyond the end is clamped to the last one where the update fits.
        whole = part.has_whole_dimensions(plan.cache.aval.shape)
        return whole and _part_of(equation.invars[0], plan.cache, makers) == part
    return False


def _part_of(atom: Any, cache: Any, makers: dict) -> _Part | None:
    """The part of the cache that a value is, or `None` if it is not a slice of the cache."""
    if atom is cache:
        return _Part.whole(cache.aval.shape)
    equation = makers.get(atom) if isinstance(atom, core.Var) else None
    if equation is None or equation.primitive.name not in ("slice", "squeeze"):
        return None
    of = _part_of(equation.invars[0], cache, makers)
    if of is None:
        return None
    if equation.primitive.name == "squeeze":
        gone = {of.dims[d] for d in equation.params["dimensions"]}
        return _Part(of.begins, of.ends, tuple(d for d in of.dims if d not in gone))
    if any(stride != 1 for stride in equation.params["strides"] or ()):
        return None
    begins, ends = list(of.begins), list(of.ends)
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    for d, start, limit in zip(of.dims, starts, limits, strict=True):
        begins[d], ends[d] = of.begins[d] + start, of.begins[d] + limit
    return _Part(tuple(begins), tuple(ends), of.dims)


def _with_writes(body: Any, plan: _Plan) -> Any:
    """The body, with the plan's writes into the cache itself."""
    inner = opened(body)
    newest, unread = plan.cache, {}
    equations: list[Any] = []

    def read(atoms: list, beside: Any) -> None:
        for variable in [v for v in dict.fromkeys(_variables(atoms)) if v in unread]:
            slices, _ = inserted(beside, _reader(unread.pop(variable)), [newest], [variable])
            equations.extend(slices)

    equation = None
    for equation in _without_stacks(inner, plan):
        # As late as possible: a slice that is read before another write is a copy.
        read(equation.invars, equation)
        variable = equation.outvars[0]
        if variable not in plan.writes:
            equations.append(equation)
            continue
        unread[variable] = plan.writes[variable]
        operands = [newest, *equation.invars[1:]]
        write, (newest,) = inserted(equation, _writer(plan.writes[variable]), operands)
        equations.extend(write)
    outputs = [newest if v is plan.result else v for v in inner.outvars]
    read(outputs, equation)
    return with_equations(body, equations, outvars=outputs)


def _without_stacks(inner: Any, plan: _Plan) -> list:
    """The equations without stacks of parts that no other equation uses."""
    needed = {v for v in _variables(inner.outvars) if v is not plan.result}
    found = []
    for equation in reversed(inner.eqns):
        if equation.outvars[0] in plan.stacks and equation.outvars[0] not in needed:
            continue
        needed.update(_variables(equation.invars))
        found.append(equation)
    return found[::-1]


def _variables(atoms: list) -> list:
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _writer(part: _Part) -> Callable:
    def write(cache: Any, update: Any, *places: Any) -> Any:
        starts: list[Any] = list(part.begins)
        for dimension, place in zip(part.dims, places, strict=True):
            starts[dimension] = place
        gone = [d for d in range(cache.ndim) if d not in part.dims]
        return jax.lax.dynamic_update_slice(cache, jax.lax.expand_dims(update, gone), starts)

    return write


def _reader(part: _Part) -> Callable:
    def read(cache: Any) -> Any:
        gone = [d for d in range(cache.ndim) if d not in part.dims]
        return jax.lax.squeeze(jax.lax.slice(cache, part.begins, part.ends), gone)

    return read
