"""Which mesh axes may split which dimension of which value of a program.

If the compiler may split a dimension like another one, in whichever direction it propagates, the
two are in the same class. The classes are on the large side: a dimension may count as split
although it is not. A dimension of one row that is reshaped is an exception: whether it stands for
rows depends on what was known when it was visited.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist.programs.calls import Called, calls, rank
from keras_tpu_dist.programs.dimensions import Dimensions, dimensions, regrouped
from keras_tpu_dist.programs.jaxprs import opened

# For every dimension of an array, the mesh axes that split it.
Axes = Sequence[Iterable[str]]


class Classes:
    """Classes of dimensions of a program's values, and the mesh axes of every class.

    Args:
        mesh: The mesh.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        self.manual: frozenset[str] = frozenset()
        # The class of every dimension, and for every class the one it was merged into.
        self._nodes: dict[tuple[Any, int], int] = {}
        self._parents: list[int] = []
        self._axes: dict[int, set[str]] = {}
        self._asked: dict[int, set[str]] = {}
        self._layouts: dict[int, set[tuple[str, ...]]] = {}

    def axes(self, atom: Any, dimension: int) -> frozenset[str]:
        """The mesh axes that may split a dimension.

        Args:
            atom: A value of the program; a literal is never split.
            dimension: The number of one of its dimensions.
        """
        return self._known(self._axes, atom, dimension)

    def asked(self, atom: Any, dimension: int) -> frozenset[str]:
        """The mesh axes that the program itself requests for a dimension.

        See `axes`.
        """
        return self._known(self._asked, atom, dimension)

    def layouts(self, atom: Any, dimension: int) -> set[tuple[str, ...]]:
        """The axes, in their order, that are given or requested for a dimension or one like it.

        See `axes`.
        """
        node = self._nodes.get((atom, dimension)) if not isinstance(atom, core.Literal) else None
        known = set() if node is None else self._layouts.get(self._root(node), set())
        return {tuple(name for name in axes if name not in self.manual) for axes in known} - {()}

    @property
    def open_axes(self) -> frozenset[str]:
        """The mesh axes that the compiler may split over."""
        return frozenset(self.sizes) - self.manual

    @property
    def splits_two_ways(self) -> bool:
        """Whether the compiler may split two dimensions separately.

        It does so over two axes, or over factors of one if a reshape takes rows apart.
        """
        ways = self.product(self.open_axes)
        return any(ways % factor == 0 for factor in range(2, math.isqrt(ways) + 1))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Mesh axes in the order of the mesh.

        Args:
            axes: Names of mesh axes; those of size 1 are left out.
        """
        return tuple(name for name in self.sizes if name in axes)

    def product(self, axes: Iterable[str]) -> int:
        """The number of parts for mesh axes.

        Args:
            axes: Names of mesh axes, each of them larger than 1.
        """
        return math.prod(self.sizes[name] for name in axes)

    def parts(self, atom: Any, dimension: int) -> int:
        """The most parts that a dimension may be split into.

        See `axes`.
        """
        return self.product(self.axes(atom, dimension))

    @contextlib.contextmanager
    def within(self, axes: Iterable[str]) -> Iterator[None]:
        """A context for the inside of a `shard_map`, whose own axes no longer split anything."""
        outer, self.manual = self.manual, self.manual | frozenset(axes)
        try:
            yield
        finally:
            self.manual = outer

    def uneven(self, atom: Any, dimension: int) -> bool:
        """Whether a dimension may be split into parts of different sizes.

        See `axes`.
        """
        return bool(atom.aval.shape[dimension] % self.parts(atom, dimension))

    def give(self, atom: Any, axes: Axes) -> None:
        """Records that a value has a given layout.

        Args:
            atom: A value of the program.
            axes: For each of its dimensions, the mesh axes that split it; may end early.
        """
        self._seed(atom, axes, self._axes)

    def ask(self, atom: Any, axes: Axes) -> None:
        """Records that the program itself requests a layout.

        See `give`.
        """
        self._seed(atom, axes, self._axes)
        self._seed(atom, axes, self._asked)

    def link(self, one: Any, i: int, other: Any, j: int, repeats: bool = True) -> None:
        """Puts two dimensions into one class, unless one of them is only repeated.

        Args:
            one: A value of the program.
            i: The number of its dimension.
            other: Another value, or the same; if one is a literal, nothing is linked.
            j: The number of the other's dimension.
            repeats: Whether a dimension of one row that becomes one of several is repeated. A
                slice, in contrast, takes one of several rows, which is then split as they are.
        """
        if isinstance(one, core.Literal) or isinstance(other, core.Literal):
            return
        before, after = one.aval.shape[i], other.aval.shape[j]
        if repeats and before != after and 1 in (before, after):
            return
        self.merge(one, i, other, j)

    def merge(self, one: Any, i: int, other: Any, j: int) -> None:
        """Puts two dimensions into one class, whatever their sizes.

        Args:
            one: A value of the program, not a literal.
            i: The number of its dimension.
            other: Another value, or the same.
            j: The number of the other's dimension.
        """
        mine, yours = self._root(self._node(one, i)), self._root(self._node(other, j))
        if mine != yours:
            self._parents[mine] = yours
            for known in (self._axes, self._asked, self._layouts):
                _move(known, mine, yours)

    def link_positions(self, one: Any, other: Any) -> None:
        """Links the dimensions of two values of the same rank, one by one.

        Args:
            one: A value of the program.
            other: Another value; if it has another rank, or one is a literal, nothing is linked.
        """
        if rank(one) == rank(other):
            for i in range(rank(one)):
                self.link(one, i, other, i)

    def _node(self, atom: Any, dimension: int) -> int:
        place = atom, dimension
        if place not in self._nodes:
            self._nodes[place] = len(self._parents)
            self._parents.append(len(self._parents))
        return self._nodes[place]

    def _root(self, node: int) -> int:
        parents = self._parents
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def _seed(self, atom: Any, axes: Axes, into: dict[int, set[str]]) -> None:
        for dimension, names in enumerate(axes):
            names = tuple(name for name in names if name in self.sizes)
            if names and not isinstance(atom, core.Literal):
                node = self._root(self._node(atom, dimension))
                into.setdefault(node, set()).update(names)
                self._layouts.setdefault(node, set()).add(names)

    def _known(self, known: dict[int, set[str]], atom: Any, dimension: int) -> frozenset[str]:
        if isinstance(atom, core.Literal):
            return frozenset()
        node = self._nodes.get((atom, dimension))
        return frozenset(() if node is None else known.get(self._root(node), ())) - self.manual


def _move(known: dict[int, set[Any]], mine: int, yours: int) -> None:
    """Gives what is known of one class to another."""
    if found := known.pop(mine, None):
        known.setdefault(yours, set()).update(found)


def spec_axes(sharding: Any) -> Axes:
    """The mesh axes of each dimension in a `NamedSharding`; none for other shardings.

    Args:
        sharding: The sharding of an array, or `None`.
    """
    if not isinstance(sharding, NamedSharding):
        return ()
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    return [
        () if entry is None or entry is free else (entry,) if isinstance(entry, str) else entry
        for entry in sharding.spec
    ]


class Spread(Classes):
    """The classes of a program's dimensions, and the mesh axes of every class.

    Args:
        jaxpr: The program.
        inputs: For every input, the axes of its dimensions.
        outputs: The same for every output; empty if none has a layout.
        mesh: The mesh.
    """

    def __init__(self, jaxpr: Any, inputs: Sequence[Axes], outputs: Sequence[Axes], mesh: Mesh):
        super().__init__(mesh)
        self._linked: set[int] = set()
        # Where a value comes from: the equation, and the values of other programs that it is, each
        # with the number of dimensions that it has more.
        self._made: dict[Any, Any] = {}
        self._is: dict[Any, list[tuple[Any, int]]] = {}
        for atom, axes in zip(opened(jaxpr).invars, inputs, strict=True):
            self.give(atom, axes)
        for atom, axes in zip(opened(jaxpr).outvars, outputs, strict=True) if outputs else ():
            self.give(atom, axes)
        self._link_program(opened(jaxpr))

    def parts_of_one(self, atom: Any, i: int, j: int) -> tuple[bool, set[tuple]]:
        """Whether two dimensions of a value were one, of which a reshape made two.

        Args:
            atom: A value of the program.
            i: The number of a dimension.
            j: The number of another one.

        Returns:
            Whether they were, and the axes of the two that the program asks for on the way.
        """
        parts, asked, seen = False, set(), set()
        waiting = [(atom, i, j)]
        while waiting:
            place = atom, i, j = waiting.pop()
            # What a loop carries comes from itself, too.
            if isinstance(atom, core.Literal) or place in seen:
                continue
            seen.add(place)
            sources, is_one = self._sources(atom, i, j)
            parts = parts or is_one
            # A dimension that a loop stacks is none of the stacked values.
            if not is_one and (not sources or min(i, j) < 0):
                return False, asked
            asked |= self._asked_there(atom, i, j)
            waiting += sources
        return parts, asked

    def _sources(self, atom: Any, i: int, j: int) -> tuple[list[tuple[Any, int, int]], bool]:
        """Where both dimensions of a value come from; whether that is one dimension."""
        if (values := self._is.get(atom)) is not None:
            return [(value, i + more, j + more) for value, more in values], False
        equation = self._made.get(atom)
        if equation is None:
            return [], False
        if equation.primitive.name != "reshape":
            return _with_both(equation, equation.outvars.index(atom), i, j), False
        operand, before = equation.invars[0], {}
        for old, new in regrouped(operand.aval.shape, atom.aval.shape):
            large = [d for d in old if operand.aval.shape[d] > 1]
            before.update((d, large) for d in new)
        one, other = before.get(i, []), before.get(j, [])
        if len(one) != 1 or len(other) != 1:
            return [], False
        return ([], True) if one == other else ([(operand, *one, *other)], False)

    def _asked_there(self, atom: Any, i: int, j: int) -> set[tuple]:
        """The axes of two dimensions that the program asks for, if a value is such a request."""
        equation = self._made.get(atom)
        if equation is None or equation.primitive.name != "sharding_constraint":
            return set()
        axes = [*spec_axes(equation.params["sharding"]), *[()] * rank(atom)]
        return {(tuple(axes[i]), tuple(axes[j]))} if axes[i] or axes[j] else set()

    def _link_program(self, jaxpr: Any) -> None:
        if id(jaxpr) in self._linked:
            return
        self._linked.add(id(jaxpr))
        for equation in jaxpr.eqns:
            self._made.update(dict.fromkeys(equation.outvars, equation))
            if self._link_simple(equation):
                continue
            called = calls(equation)
            # A kernel is never partitioned: every device runs it on its own part.
            is_kernel = equation.primitive.name == "pallas_call"
            if not is_kernel and (not called or any(call.kind == "unknown" for call in called)):
                _unknown(self, equation)
            for call in called:
                self._link_call(equation, call)
                self._link_program(call.jaxpr)
            if equation.primitive.name == "custom_linear_solve":
                sides = equation.invars[sum(equation.params["const_lengths"]) :]
                for side, result in zip(sides, equation.outvars, strict=False):
                    self.link_positions(side, result)

    def _link_simple(self, equation: Any) -> bool:
        """Links the inputs and outputs of an equation without inner programs, if it is known."""
        known, name = dimensions(equation), equation.primitive.name
        if known is None:
            return False
        if name == "reshape":
            self._link_reshaped(equation)
        else:
            self._link_known(equation, known)
        if name == "sharding_constraint":
            self.ask(equation.outvars[0], spec_axes(equation.params["sharding"]))
        return True

    def _link_known(self, equation: Any, known: Dimensions) -> None:
        operands, results = equation.invars, equation.outvars
        repeats = equation.primitive.name == "broadcast_in_dim"
        for step in known.mapped:
            one, other = operands[step.operand], results[step.result]
            self.link(one, step.dimension, other, step.to, repeats)
        for (one, i), (other, j) in known.together:
            self.link(operands[one], i, operands[other], j)

    def _link_reshaped(self, equation: Any) -> None:
        """Dimensions that are merged or split are one class."""
        operand, result = equation.invars[0], equation.outvars[0]
        for old, new in regrouped(operand.aval.shape, result.aval.shape):
            places = [(operand, d) for d in old] + [(result, d) for d in new]
            # A single row counts as split, too, if rows are; otherwise a dimension of 1 is ignored.
            merged = [(a, d) for a, d in places if a.aval.shape[d] > 1 or self.axes(a, d)]
            for one, other in itertools.pairwise(merged):
                self.merge(*one, *other)

    def _link_call(self, equation: Any, call: Called) -> None:
        """Links the values of an equation with those of a program that it calls."""
        inputs, outputs = call.jaxpr.invars, call.jaxpr.outvars
        of_operand = dict(zip(call.operands, inputs, strict=False))
        pairs = [
            *((own, equation.invars[i]) for i, own in of_operand.items()),
            *((equation.outvars[i], own) for i, own in zip(call.results, outputs, strict=False)),
            *((of_operand[i], own) for i, own in zip(call.carried, outputs, strict=False)),
        ]
        for value, source in pairs:
            # Values that a loop slices or stacks have one more dimension outside.
            more = rank(source) - rank(value)
            self._is.setdefault(value, []).append((source, more))
            if not more:
                self.link_positions(value, source)
            for dimension in range(min(rank(source), rank(value))) if more else ():
                self.link(value, dimension + max(-more, 0), source, dimension + max(more, 0))


def _with_both(equation: Any, number: int, i: int, j: int) -> list[tuple[Any, int, int]]:
    """The operands of which both dimensions of a result are dimensions, with their numbers."""
    known = dimensions(equation)
    places: dict[tuple[int, int], int] = {}
    for step in known.mapped if known is not None else ():
        if step.result == number:
            places[step.operand, step.to] = step.dimension
    return [
        (operand, places[at, i], places[at, j])
        for at, operand in enumerate(equation.invars)
        if (at, i) in places and (at, j) in places
    ]


def _unknown(classes: Classes, equation: Any) -> None:
    """Links dimensions of values with the same rank and sizes, ones repeated; else all with all."""
    atoms = [a for a in equation.invars if type(a) is not core.Literal and rank(a)]
    atoms += [a for a in equation.outvars if rank(a)]
    if not atoms:
        return
    largest = max(atoms, key=lambda a: math.prod(a.aval.shape))
    if all(_repeats(a.aval.shape, largest.aval.shape) for a in atoms):
        for atom in atoms:
            if atom is not largest:
                classes.link_positions(largest, atom)
        return
    dimensions = [(a, i) for a in atoms for i in range(rank(a))]
    for one, other in itertools.pairwise(dimensions):
        classes.link(*one, *other)


def _repeats(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether values of a shape are repeated to another one."""
    return len(shape) == len(whole) and all(a in (b, 1) for a, b in zip(shape, whole, strict=True))
