"""Classes of dimensions that the compiler may split alike, and the mesh axes of each class."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

# For each dimension of an array, the mesh axes that split it.
Axes = Sequence[Iterable[str]]


class Classes:
    """Which dimensions of a program's values are one class, and the mesh axes of each.

    Args:
        mesh: The mesh.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        self.manual: frozenset[str] = frozenset()
        # For each value the class of each dimension, and for each class the one it became part of.
        self._classes: dict[Any, list[int | None]] = {}
        self._parents: list[int] = []
        self._axes: dict[int, set[str]] = {}
        self._asked: dict[int, set[str]] = {}

    def axes(self, atom: Any, dimension: int) -> frozenset[str]:
        """The mesh axes that may split a dimension.

        Args:
            atom: A value of the program; a literal is never split.
            dimension: The number of one of its dimensions.
        """
        return self._known(self._axes, atom, dimension)

    def asked(self, atom: Any, dimension: int) -> frozenset[str]:
        """The mesh axes that the program itself asks to split a dimension over.

        See `axes`.
        """
        return self._known(self._asked, atom, dimension)

    @property
    def open_axes(self) -> frozenset[str]:
        """The mesh axes that the compiler may split over."""
        return frozenset(self.sizes) - self.manual

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Mesh axes in the order of the mesh.

        Args:
            axes: Names of mesh axes; those of size 1 are left out.
        """
        return tuple(name for name in self.sizes if name in axes)

    def product(self, axes: Iterable[str]) -> int:
        """The number of parts that mesh axes make.

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
        """Inside of a `shard_map`, whose own axes split nothing any more."""
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
        """Notes that a value comes, or goes, with a layout.

        Args:
            atom: A value of the program.
            axes: For each of its dimensions, the mesh axes that split it; may end early.
        """
        self._seed(atom, axes, self._axes)

    def ask(self, atom: Any, axes: Axes) -> None:
        """Notes that the program itself asks for a layout.

        See `give`.
        """
        self._seed(atom, axes, self._axes)
        self._seed(atom, axes, self._asked)

    def link(self, one: Any, i: int, other: Any, j: int) -> None:
        """Puts two dimensions into one class, unless one of them is only repeated.

        Args:
            one: A value of the program.
            i: The number of its dimension.
            other: Another value, or the same; where one is a literal, nothing is linked.
            j: The number of the other's dimension.
        """
        if isinstance(one, core.Literal) or isinstance(other, core.Literal):
            return
        before, after = one.aval.shape[i], other.aval.shape[j]
        if before != after and 1 in (before, after):
            return
        ours, theirs = self._of(one), self._of(other)
        mine, yours = ours[i], theirs[j]
        if yours is None:
            theirs[j] = self._class(ours, i)
        elif mine is None:
            ours[i] = yours
        elif mine != yours:
            self._merge(self._root(mine), self._root(yours))

    def merge(self, one: Any, i: int, other: Any, j: int) -> None:
        """Puts two dimensions into one class, whatever their sizes.

        Args:
            one: A value of the program, no literal.
            i: The number of its dimension.
            other: Another value, or the same.
            j: The number of the other's dimension.
        """
        ours, theirs = self._class(self._of(one), i), self._class(self._of(other), j)
        self._merge(self._root(ours), self._root(theirs))

    def link_positions(self, one: Any, other: Any) -> None:
        """Links the dimensions of two values of the same rank, one by one.

        Args:
            one: A value of the program.
            other: Another value; of another rank, or where one is a literal, nothing is linked.
        """
        if isinstance(one, core.Literal) or isinstance(other, core.Literal):
            return
        shape, classes = one.aval.shape, self._classes
        ours, theirs = classes.get(one), classes.get(other)
        if shape != other.aval.shape or (ours is not None and theirs is not None):
            if ours is not theirs and len(shape) == len(other.aval.shape):
                for i in range(len(shape)):
                    self.link(one, i, other, i)
        elif ours is not None:
            classes[other] = ours
        else:
            classes[one] = classes[other] = theirs or [None] * len(shape)

    def link_elementwise(self, equation: Any) -> bool:
        """Links operands and the result of one shape, the most frequent equations, quickly.

        Args:
            equation: An equation without parameters.

        Returns:
            Whether that is done; `False` where it has to be linked in another way.
        """
        result, classes = equation.outvars[0], self._classes
        shape = getattr(result.aval, "shape", None)
        own = None
        for atom in equation.invars:
            if type(atom) is core.Literal:
                continue
            # Tokens have no shape.
            if shape is None or getattr(atom.aval, "shape", None) != shape:
                return False
            theirs = classes.get(atom)
            if own is None:
                own = self._of(atom)
                classes.setdefault(result, own)
            elif theirs is None:
                classes[atom] = own
            elif theirs is not own:
                self.link_positions(atom, result)
        return classes.get(result) is own

    def _of(self, atom: Any) -> list[int | None]:
        classes = self._classes.get(atom)
        if classes is None:
            classes = self._classes[atom] = [None] * rank(atom)
        return classes

    def _class(self, classes: list[int | None], dimension: int) -> int:
        known = classes[dimension]
        if known is None:
            known = classes[dimension] = len(self._parents)
            self._parents.append(known)
        return known

    def _merge(self, one: int, other: int) -> None:
        if one != other:
            self._parents[one] = other
            for known in (self._axes, self._asked):
                if axes := known.pop(one, None):
                    known.setdefault(other, set()).update(axes)

    def _root(self, node: int) -> int:
        parents = self._parents
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def _seed(self, atom: Any, axes: Axes, into: dict[int, set[str]]) -> None:
        for dimension, names in enumerate(axes):
            names = {name for name in names if name in self.sizes}
            if names and not isinstance(atom, core.Literal):
                node = self._root(self._class(self._of(atom), dimension))
                into.setdefault(node, set()).update(names)

    def _known(self, known: dict[int, set[str]], atom: Any, dimension: int) -> frozenset[str]:
        if isinstance(atom, core.Literal):
            return frozenset()
        classes = self._classes.get(atom)
        node = None if classes is None else classes[dimension]
        return frozenset(() if node is None else known.get(self._root(node), ())) - self.manual


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


def rank(atom: Any) -> int:
    """The number of dimensions of a value; none for tokens and references without a shape.

    Args:
        atom: A value of a program, a variable or a literal.
    """
    return len(getattr(atom.aval, "shape", ()))
