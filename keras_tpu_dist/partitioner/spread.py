"""Which mesh axes may split which dimension of which value of a program.

A dimension that the compiler may split like another one is in one class with it, in whichever
direction it looks. The classes err on the large side: a dimension may be said to be split that is
not. A dimension of one row that is reshaped is the exception: whether it stands for rows is told by
what was known when it was met.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist.partitioner.jaxprs import inner_jaxprs, opened, scan_parts

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


class Spread(Classes):
    """The classes of a program's dimensions, and the mesh axes of each.

    Args:
        jaxpr: The program.
        inputs: For each input, the axes of each dimension.
        outputs: The same for each output; empty where none is given a layout.
        mesh: The mesh.

    Raises:
        ValueError: If they are not as many as the program's inputs, or outputs.
    """

    def __init__(self, jaxpr: Any, inputs: Sequence[Axes], outputs: Sequence[Axes], mesh: Mesh):
        super().__init__(mesh)
        self._linked: set[int] = set()
        for atom, axes in zip(opened(jaxpr).invars, inputs, strict=True):
            self.give(atom, axes)
        for atom, axes in zip(opened(jaxpr).outvars, outputs, strict=True) if outputs else ():
            self.give(atom, axes)
        self._link_program(opened(jaxpr))

    def _link_program(self, jaxpr: Any) -> None:
        if id(jaxpr) in self._linked:
            return
        self._linked.add(id(jaxpr))
        for equation in jaxpr.eqns:
            rule = _RULES.get(equation.primitive.name)
            if rule is not None:
                rule(self, equation)
                continue
            if not equation.params and self.link_elementwise(equation):
                continue
            inner = [opened(each) for each in inner_jaxprs(equation)]
            if not inner:
                _unknown(self, equation)
                continue
            _INNER.get(equation.primitive.name, _call)(self, equation, inner)
            for each in inner:
                self._link_program(each)


def _call(classes: Classes, equation: Any, inner: list) -> None:
    """A program called once: its inputs are the last operands, its outputs the results.

    Operands of a scan over time have a dimension more outside than inside; those of a conditional
    come after its index. Where that does not hold (a kernel writes to what it is given, a
    comparison is called for each pair of numbers), the program is not looked into.
    """
    pairs: list[tuple] = []
    for jaxpr in inner:
        paired = _paired(equation, jaxpr)
        if paired is None:
            _unknown(classes, equation)
            return
        pairs += paired
    for outer, own in pairs:
        shift = rank(outer) - rank(own)
        if not shift:
            classes.link_positions(outer, own)
            continue
        for dimension in range(rank(own)):
            classes.link(outer, dimension + shift, own, dimension)


def _paired(equation: Any, jaxpr: Any) -> list[tuple] | None:
    """Values of an equation with those of the program it calls, or `None` where they do not fit."""
    before = len(equation.invars) - len(jaxpr.invars)
    if before < 0 or len(jaxpr.outvars) != len(equation.outvars):
        return None
    pairs = [
        *zip(equation.invars[before:], jaxpr.invars, strict=True),
        *zip(equation.outvars, jaxpr.outvars, strict=True),
    ]
    most = 1 if equation.primitive.name == "scan" else 0
    return pairs if all(0 <= rank(a) - rank(b) <= most for a, b in pairs) else None


def _scan(classes: Classes, equation: Any, inner: list) -> None:
    _call(classes, equation, inner)
    body, constants, carries = scan_parts(equation)
    carried = body.invars[constants : constants + carries]
    for own, result in zip(carried, body.outvars[:carries], strict=True):
        classes.link_positions(own, result)


def _while(classes: Classes, equation: Any, inner: list) -> None:
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
    carry = equation.invars[of_cond + of_body :]
    for outer, own in [
        *zip([*equation.invars[:of_cond], *carry], cond.invars, strict=True),
        *zip(equation.invars[of_cond:], body.invars, strict=True),
        *zip(carry, body.outvars, strict=True),
        *zip(carry, equation.outvars, strict=True),
    ]:
        classes.link_positions(outer, own)


def _solve(classes: Classes, equation: Any, inner: list) -> None:
    """A linear system: each of its programs has operands of its own, and the right side."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    right = equation.invars[sum(lengths) :]
    at = 0
    for length, jaxpr in zip(lengths, jaxprs, strict=True):
        operands = [*equation.invars[at : at + length], *right]
        at += length
        if jaxpr is None:
            continue
        for outer, own in zip(operands, opened(jaxpr).invars, strict=True):
            classes.link_positions(outer, own)
        # Products have no results beside the first ones, which a solver may have.
        for outer, own in zip(equation.outvars, opened(jaxpr).outvars, strict=False):
            classes.link_positions(outer, own)
    for outer, result in zip(right, equation.outvars, strict=False):
        classes.link_positions(outer, result)


def _positions(classes: Classes, equation: Any) -> None:
    first = equation.outvars[0]
    for atom in [*equation.invars, *equation.outvars[1:]]:
        classes.link_positions(atom, first)


def _unknown(classes: Classes, equation: Any) -> None:
    """Links what has the same rank and sizes, ones repeated, else everything with everything."""
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


def _nothing(classes: Classes, equation: Any) -> None:
    """Results that depend on no operand's dimensions."""


def _broadcast(classes: Classes, equation: Any) -> None:
    for i, j in enumerate(equation.params["broadcast_dimensions"]):
        classes.link(equation.invars[0], i, equation.outvars[0], int(j))


def _transpose(classes: Classes, equation: Any) -> None:
    for j, i in enumerate(equation.params["permutation"]):
        classes.link(equation.invars[0], int(i), equation.outvars[0], j)


def _removed(parameter: str) -> Callable:
    def rule(classes: Classes, equation: Any) -> None:
        gone = {int(i) for i in equation.params[parameter]}
        ndim = rank(equation.invars[0])
        kept = [i for i in range(ndim) if i not in gone and i - ndim not in gone]
        for operand in equation.invars:
            for result in equation.outvars:
                if rank(operand) == ndim and rank(result) == len(kept):
                    for j, i in enumerate(kept):
                        classes.link(operand, i, result, j)

    return rule


def _reshape(classes: Classes, equation: Any) -> None:
    """Dimensions that are merged or taken apart are one class."""
    operand, result = equation.invars[0], equation.outvars[0]
    before, after = list(operand.aval.shape), list(result.aval.shape)
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        a, b = before[i], after[j]
        while a != b:
            if a < b and i + 1 < len(before):
                i += 1
                left.append(i)
                a *= before[i]
            elif b < a and j + 1 < len(after):
                j += 1
                right.append(j)
                b *= after[j]
            else:
                break
        group = [*((operand, n) for n in left), *((result, n) for n in right)]
        # One row is split, too, where rows are; else a dimension of 1 stands for nothing.
        merged = [(a, n) for a, n in group if a.aval.shape[n] > 1 or classes.axes(a, n)]
        for one, other in itertools.pairwise(merged):
            classes.merge(*one, *other)
        i, j = i + 1, j + 1


def _dot(classes: Classes, equation: Any) -> None:
    (contract, batch) = equation.params["dimension_numbers"]
    left, right = equation.invars[:2]
    result = equation.outvars[0]
    for i, j in [*zip(*contract, strict=True), *zip(*batch, strict=True)]:
        classes.link(left, int(i), right, int(j))
    free = [
        [n for n in range(rank(atom)) if n not in contract[side] and n not in batch[side]]
        for side, atom in enumerate((left, right))
    ]
    for j, i in enumerate([*batch[0], *free[0]]):
        classes.link(left, int(i), result, j)
    for j, i in enumerate(free[1], len(batch[0]) + len(free[0])):
        classes.link(right, i, result, j)


def _convolution(classes: Classes, equation: Any) -> None:
    numbers = equation.params["dimension_numbers"]
    left, right = equation.invars
    result = equation.outvars[0]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    classes.link(left, lhs[0], result, out[0])
    classes.link(left, lhs[1], right, rhs[1])
    classes.link(right, rhs[0], result, out[1])
    for i, k, j in zip(lhs[2:], rhs[2:], out[2:], strict=True):
        classes.link(left, i, result, j)
        classes.link(left, i, right, k)
    if equation.params["feature_group_count"] > 1:
        classes.link(left, lhs[1], result, out[1])
    if equation.params["batch_group_count"] > 1:
        classes.link(left, lhs[0], result, out[1])


def _gather(classes: Classes, equation: Any) -> None:
    numbers = equation.params["dimension_numbers"]
    gone = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    shared = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    operand, indices = equation.invars[:2]
    slices = equation.outvars[0], numbers.offset_dims
    _link_slices(classes, operand, indices, slices, gone, shared)


def _scatter(classes: Classes, equation: Any) -> None:
    numbers = equation.params["dimension_numbers"]
    gone = numbers.inserted_window_dims, numbers.operand_batching_dims
    shared = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    operand, indices, updates = equation.invars[:3]
    classes.link_positions(operand, equation.outvars[0])
    _link_slices(classes, operand, indices, (updates, numbers.update_window_dims), gone, shared)


def _link_slices(
    classes: Classes, operand: Any, indices: Any, slices: tuple, gone: tuple, shared: tuple
) -> None:
    """Links an operand, indices into it, and the slices that they stand for."""
    slices, windows = slices
    missing = {*gone[0], *gone[1]}
    kept = [i for i in range(rank(operand)) if i not in missing]
    for i, j in zip(kept, windows, strict=True):
        classes.link(operand, i, slices, j)
    batch = [j for j in range(rank(slices)) if j not in windows]
    for i, j in zip(range(rank(indices) - 1), batch, strict=True):
        classes.link(indices, i, slices, j)
    for i, j in zip(*shared, strict=True):
        classes.link(operand, i, indices, j)


def _constraint(classes: Classes, equation: Any) -> None:
    classes.link_positions(equation.invars[0], equation.outvars[0])
    classes.ask(equation.outvars[0], spec_axes(equation.params["sharding"]))


def _dynamic_slice(classes: Classes, equation: Any) -> None:
    classes.link_positions(equation.invars[0], equation.outvars[0])
    if equation.primitive.name == "dynamic_update_slice":
        classes.link_positions(equation.invars[1], equation.outvars[0])


# fmt: off
_OF_POSITIONS = (
    "pad", "slice", "concatenate", "rev", "sort", "split", "top_k", "select_n", "clamp",
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
    "select_and_scatter", "select_and_scatter_add", "select_and_gather_add",
    "approx_top_k",
)
_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "argmax", "argmin",
)
# fmt: on
_RULES: dict[str, Callable[[Classes, Any], None]] = {
    **dict.fromkeys(_OF_POSITIONS, _positions),
    **dict.fromkeys(["iota", "random_bits", "random_seed", "random_wrap", "axis_index"], _nothing),
    **dict.fromkeys(_REDUCTIONS, _removed("axes")),
    "squeeze": _removed("dimensions"),
    "reduce": _removed("dimensions"),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"],
        _scatter,
    ),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_slice,
    "sharding_constraint": _constraint,
}

# Equations that run programs otherwise than once, from operands to results.
_INNER: dict[str, Callable[[Classes, Any, list], None]] = {
    "scan": _scan,
    "while": _while,
    "custom_linear_solve": _solve,
}

# Primitives with a rule of their own call no program.
CALL_NOTHING = frozenset(_RULES)
