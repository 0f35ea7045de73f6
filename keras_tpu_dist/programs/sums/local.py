"""Sums over the rows of a batch, as one part for each device, which are added up later.

The gradient of a weight is such a sum, of which each device has the rows of its part of the batch.
The compiler adds the parts up over the devices at once. Here a gradient is an array with one more
dimension, the first one, split over the devices: each has the sum of its own rows, and what is
linear in the sum is computed of the parts.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist.common.axes import axis_size, entry_names
from keras_tpu_dist.programs.graph import Atom, Equation, Graph, Instead
from keras_tpu_dist.programs.partitioner import mesh_here
from keras_tpu_dist.programs.partitioner.places import padded_at_the_end
from keras_tpu_dist.programs.partitioner.spread import Spread

# Linear in their first operand.
_LINEAR = frozenset(
    [
        "broadcast_in_dim", "convert_element_type", "copy", "div", "name", "neg", "real",
        "reduce_sum", "reshape", "rev", "sharding_constraint", "slice", "squeeze", "transpose",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Rest:
    """A summand of a gradient that is not a sum over rows, such as that of a regularizer.

    Attributes:
        path: The linear operations between it and the gradient, in order, and the operand of each
            that comes from the value.
    """

    value: Atom
    path: tuple[tuple[Equation, int], ...]

    @property
    def operands(self) -> list[Atom]:
        """The values that the operations of the path read, and the value itself."""
        others = [other for step in self.path for other in _others(*step)]
        return [self.value, *others]

    def compute(self, arrays: list) -> Any:
        """The summand."""
        value, *others = arrays
        for operation, side in self.path:
            given = [others.pop(0) for _ in _others(operation, side)]
            given.insert(side, value)
            (value,) = operation.run(given)
        return value


@dataclass
class LocalSum:
    """A gradient as parts."""

    rest: list[Rest] = field(default_factory=list)
    instead: dict[Equation, Instead] = field(default_factory=dict)


class LocalSums:
    """Finds gradients that can be computed as parts.

    Args:
        spread: Which mesh axes may split which dimension of the step's values.
        rows: The numbers of rows of the batch's arrays.
    """

    def __init__(self, graph: Graph, spread: Spread, axes: Sequence[str], rows: Sequence[int]):
        self._spread, self._axes = spread, tuple(a for a in axes if a in spread.sizes)
        self._ways = axis_size(spread.mesh, self._axes)
        self._rows = sorted(set(rows), reverse=True)
        needed = graph.needed({})
        self._uses = Counter(id(atom) for made in needed for atom in made.operands)
        self._uses.update(map(id, graph.outputs))

    def of(self, gradient: Atom) -> LocalSum | None:
        """A gradient as parts, or `None` if it is no sum over rows, or is used otherwise too."""
        found = LocalSum()
        return found if self._add(gradient, (), found) else None

    def _add(self, value: Atom, path: tuple, found: LocalSum) -> bool:
        """Adds the replacements for a value to those found, if it is such a sum."""
        made = value.operation
        if made is None or self._uses[id(value)] != 1:
            return False
        if (own := self._summed(made)) is not None:
            found.instead[made] = own
            return True
        if made.name in ("add", "add_any"):
            return self._add_both(made, path, found)
        for side in _linear_in(made):
            if self._add(made.operands[side], ((made, side), *path), found):
                found.instead[made] = Instead(made.operands, _by_parts(made, side))
                return True
        return False

    def _add_both(self, made: Equation, path: tuple, found: LocalSum) -> bool:
        if any(operand.shape != made.results[0].shape for operand in made.operands):
            return False
        sides = [self._add(operand, path, found) for operand in made.operands]
        if all(sides):
            found.instead[made] = Instead(made.operands, lambda arrays: [jnp.add(*arrays)])
        elif any(sides):
            own, other = made.operands if sides[0] else made.operands[::-1]
            found.rest.append(Rest(other, path))
            found.instead[made] = Instead([own], list)
        return any(sides)

    def _summed(self, made: Equation) -> Instead | None:
        """A sum over rows, as the sums of the devices' own rows."""
        params, name = made.equation.params, made.name
        if name == "dot_general":
            pairs = [((0, i), (1, j)) for i, j in zip(*params["dimension_numbers"][0], strict=True)]
        elif name == "reduce_sum":
            pairs = [((0, d),) for d in params["axes"]]
        elif name == "conv_general_dilated":
            numbers = params["dimension_numbers"]
            pairs = [((0, numbers.lhs_spec[1]), (1, numbers.rhs_spec[1]))]
            if params["feature_group_count"] > 1:
                return None
        elif name == "scatter-add" and _is_zero(made.operands[0]):
            pairs = list(_rows_of_scatter(made))
        else:
            return None
        for places in pairs:
            if all(self._splits(made, *place) for place in places):
                return Instead(made.operands, self._of_own_rows(made, dict(places)))
        return None

    def _splits(self, made: Equation, operand: int, dimension: int) -> bool:
        atom = made.equation.invars[operand]
        split = set(self._axes) <= self._spread.axes(atom, dimension)
        return split and self._inner(atom.aval.shape[dimension]) is not None

    def _inner(self, size: int) -> int | None:
        """How many numbers of a dimension are one row's; `None` if it has no whole rows."""
        return next((size // rows for rows in self._rows if rows and size % rows == 0), None)

    def _of_own_rows(self, made: Equation, places: dict[int, int]) -> Callable:
        def compute(arrays: list) -> list:
            arrays = [
                self._padded(array, places[n], made, n) if n in places else array
                for n, array in enumerate(arrays)
            ]
            specs = [
                PartitionSpec(*[None] * places[n], self._axes) if n in places else PartitionSpec()
                for n in range(len(arrays))
            ]
            parts = jax.shard_map(
                lambda *own: made.run(own)[0][None],
                mesh=mesh_here(self._spread.mesh),
                in_specs=tuple(specs),
                out_specs=PartitionSpec(self._axes),
                axis_names=set(self._axes),
                check_vma=False,
            )(*arrays)
            return [parts]

        return compute

    def _padded(self, array: Any, dimension: int, made: Equation, operand: int) -> Any:
        """An operand with rows added that add nothing to the sum."""
        size = array.shape[dimension]
        inner = self._inner(size)
        short = -(size // inner) % self._ways
        # An index beyond the end writes nowhere.
        beyond = made.name == "scatter-add" and operand == 1
        value = jnp.iinfo(array.dtype).max if beyond else 0
        return padded_at_the_end(array, {dimension: short * inner}, value)


def _others(operation: Equation, side: int) -> list[Atom]:
    return [operand for n, operand in enumerate(operation.operands) if n != side]


def _linear_in(made: Equation) -> tuple[int, ...]:
    """The operands in which an operation is linear."""
    if made.name == "mul":
        return (0, 1)
    linear = made.name in _LINEAR or (made.name == "pad" and _is_zero(made.operands[1]))
    return (0,) if linear else ()


def _is_zero(value: Atom) -> bool:
    while value.constant is None and value.operation is not None:
        if value.operation.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        value = value.operation.operands[0]
    return value.constant is not None and not jnp.ndim(value.constant) and not value.constant


def _by_parts(made: Equation, side: int) -> Callable:
    def compute(arrays: list) -> list:
        if made.name == "sharding_constraint":
            # It splits the dimensions of the sum as the sum is stored.
            return arrays
        axes = [0 if n == side else None for n in range(len(arrays))]
        return [jax.vmap(lambda *own: made.run(own)[0], in_axes=axes)(*arrays)]

    return compute


def _rows_of_scatter(made: Equation) -> Any:
    numbers = made.equation.params["dimension_numbers"]
    updates = made.operands[2].shape
    free = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    return (((1, i), (2, d)) for i, d in enumerate(free))


@dataclass(frozen=True)
class Total:
    """The sum of parts over the devices.

    Attributes:
        scope: The layer whose gradient it is, for profiles.
    """

    scope: str
    shape: tuple[int, ...]
    layout: NamedSharding

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return cast(Mesh, self.layout.mesh)

    def scattered(self, axes: Sequence[str]) -> dict[int, tuple[str, ...]]:
        """The dimensions that the layout splits evenly over axes of the batch, over no other."""
        found = {}
        for dimension, names in enumerate(map(entry_names, self.layout.spec)):
            even = not names or self.shape[dimension] % axis_size(self.mesh, names) == 0
            if names and even and set(names) <= set(axes):
                found[dimension] = names
        return found


def added_up(
    parts: Sequence[Any], totals: Sequence[Total], axes: Sequence[str], mesh: Mesh
) -> list:
    """Parts added up over the devices.

    What is split over the axes of the batch is only sent to the devices that need it.
    """
    scattered = [total.scattered(axes) for total in totals]

    def added(*own: Any) -> tuple:
        results = []
        for (part,), total, dimensions in zip(own, totals, scattered, strict=True):
            left = [axis for axis in axes if axis not in itertools.chain(*dimensions.values())]
            with jax.named_scope(total.scope):
                for dimension, names in dimensions.items():
                    part = lax.psum_scatter(part, names, scatter_dimension=dimension, tiled=True)
                results.append(lax.psum(part, left) if left else part)
        return tuple(results)

    results = jax.shard_map(
        added,
        mesh=mesh_here(mesh),
        in_specs=PartitionSpec(tuple(axes)),
        out_specs=tuple(
            PartitionSpec(*map(dimensions.get, range(len(total.shape))))
            for total, dimensions in zip(totals, scattered, strict=True)
        ),
        axis_names=set(axes),
        check_vma=False,
    )(*parts)
    pairs = zip(results, totals, strict=True)
    return [lax.with_sharding_constraint(result, total.layout) for result, total in pairs]
