"""One program for batches of several numbers of rows.

A step is traced twice, for many rows and for fewer. The larger program computes what the smaller
one does, if each of its values begins with that of the smaller one along the dimension in which
their shapes differ. This is shown operation by operation, by the table of dimensions: sums over
rows leave out the further ones, and numbers that differ, such as the divisor of a mean, are data.
Where an operation is not known to keep this, there is no common program.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_tpu_dist.programs.calls import calls
from keras_tpu_dist.programs.dimensions import SHAPES, dimensions
from keras_tpu_dist.programs.graph import Atom, Equation, Graph, Instead, graph_of
from keras_tpu_dist.programs.jaxprs import inner_jaxprs, is_jaxpr, is_key, opened

# What a further row is replaced by, so that it changes no result.
_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_max": lambda dtype: _limit(dtype, -1),
    "reduce_min": lambda dtype: _limit(dtype, 1),
    "reduce_and": lambda dtype: (
        -1 if jnp.issubdtype(dtype, jnp.signedinteger) else _limit(dtype, 1)
    ),
    "reduce_or": lambda dtype: 0,
    "reduce_xor": lambda dtype: 0,
}

# They draw by a key: with the default generator, the first rows of more are those of fewer.
_DRAWS = ("random_bits", "random_split")
# They make rows of nothing: each row is what its number says, or what all rows are.
_MAKE_ROWS = ("broadcast_in_dim", "iota")

# Constants of more bytes are not compared.
_MOST_OF_CONSTANTS = 2**20


@dataclass
class _Change:
    """What an operation of the larger program computes otherwise.

    Attributes:
        numbers: By operand, the number that it is instead.
        masked: By operand, the dimension of its rows, their number and what the others become.
    """

    numbers: dict[int, int] = field(default_factory=dict)
    masked: dict[int, tuple[int, int, Any]] = field(default_factory=dict)


def _run(
    graph: Graph, changes: dict[Equation, _Change], arrays: Sequence[Any], numbers: Sequence[Any]
) -> list:
    """Computes the results of the larger program for the rows that the numbers say."""

    def changed(made: Equation, change: _Change) -> Instead:
        def compute(operands: list) -> list:
            for operand, number in change.numbers.items():
                operands[operand] = numbers[number]
            for operand, (rows, number, neutral) in change.masked.items():
                array = operands[operand]
                place = lax.broadcasted_iota(jnp.int32, array.shape, rows)
                filled = jnp.asarray(neutral, array.dtype)
                operands[operand] = jnp.where(place < numbers[number], array, filled)
            return made.run(operands)

        return Instead(made.operands, compute)

    instead = {made: changed(made, change) for made, change in changes.items()}
    return graph.evaluate(arrays, instead)


class Differs(Exception):
    """A program for fewer rows is not part of the one for more, for this reason."""


@dataclass(frozen=True)
class Shared:
    """A program for many rows that also computes what one for fewer rows does.

    Attributes:
        numbers: The data with which it computes what this one does.
        signature: What the programs of other numbers of rows must have in common with this one.
        outputs: For every result, the dimension of its rows, and their number; or `None`.
        run: The program, from its inputs and the numbers to the results.
    """

    numbers: tuple[np.ndarray, ...]
    signature: Hashable
    outputs: tuple[tuple[int, int] | None, ...]
    run: Callable[[Sequence[Any], Sequence[Any]], list]


def shared(more: Any, fewer: Any) -> Shared:
    """The program that is shared by a step for many rows and one for fewer.

    Args:
        more: The trace for many rows.
        fewer: The trace for fewer rows.

    Raises:
        Differs: If there is none.
    """
    pair = _Pair(graph_of(more), graph_of(fewer))
    pair.compare()
    changes = [
        (place, tuple(change.numbers.items()), tuple((n, *m) for n, m in change.masked.items()))
        for place, made in enumerate(pair.more.operations)
        if (change := pair.changes.get(made)) is not None
    ]
    outputs = []
    for one, other in zip(pair.more.outputs, pair.fewer.outputs, strict=True):
        pair.of_constants(one, other)
        rows = _rows(one, other)
        outputs.append(None if rows is None else (rows, other.shape[rows]))
    run = partial(_run, pair.more, pair.changes)
    return Shared(tuple(pair.numbers), repr(changes), tuple(outputs), run)


class _Pair:
    """A program for many rows, and one for fewer.

    Args:
        more: The one for many.
        fewer: The one for fewer.
        is_inner: Whether operations call these programs, so that they must be right as they are.
    """

    def __init__(self, more: Graph, fewer: Graph, is_inner: bool = False):
        self.more, self.fewer, self._is_inner = more, fewer, is_inner
        self.numbers: list[np.ndarray] = []
        self.changes: dict[Equation, _Change] = {}
        self._same: dict[int, Atom] = {}

    def compare(self) -> None:
        """Shows operation by operation that the larger program begins with the smaller one."""
        graphs = self.more, self.fewer
        if len({(len(g.inputs), len(g.operations), len(g.outputs)) for g in graphs}) > 1:
            raise Differs("it is traced to other operations")
        self._pair(self.more.inputs, self.fewer.inputs)
        for one, other in zip(self.more.operations, self.fewer.operations, strict=True):
            if len({(m.name, len(m.operands), len(m.results)) for m in (one, other)}) > 1:
                raise Differs("it is traced to other operations")
            self._compare(one, other)
            self._pair(one.results, other.results)
        for one, other in zip(self.more.outputs, self.fewer.outputs, strict=True):
            self._check_same(one, other)

    def of_constants(self, one: Atom, other: Atom) -> None:
        """Checks two results that may be constants, which no operation has compared."""
        if one.constant is not None and not _begins_with(one.constant, other.constant):
            raise Differs("a result is another number")

    def _pair(self, atoms: Sequence[Atom], others: Sequence[Atom]) -> None:
        for one, other in zip(atoms, others, strict=True):
            if getattr(one.aval, "dtype", None) != getattr(other.aval, "dtype", None):
                raise Differs("a value has another dtype")
            _rows(one, other)
            self._same[id(one)] = other

    def _check_same(self, one: Atom, other: Atom) -> None:
        if (one.constant is None) != (other.constant is None):
            raise Differs("a value is a constant in one of both")
        if one.constant is None and self._same.get(id(one)) is not other:
            raise Differs("an operation reads other values")

    def _compare(self, one: Equation, other: Equation) -> None:
        change = _Change()
        for n, (mine, its) in enumerate(zip(one.operands, other.operands, strict=True)):
            self._check_same(mine, its)
            _rows(mine, its)
            if mine.constant is not None and not _begins_with(mine.constant, its.constant):
                change.numbers[n] = self._number(one, its)
        if one.equation.effects or other.equation.effects:
            raise Differs(f"{_named(one)} calls into Python")
        _compare_params(one, other)
        rows = {
            n: found
            for n, pair in enumerate(zip(one.operands, other.operands, strict=True))
            if (found := _rows(*pair)) is not None
        }
        results = [_rows(*pair) for pair in zip(one.results, other.results, strict=True)]
        has_rows = bool(rows) or any(found is not None for found in results)
        _compare_inner(one, other)
        if has_rows and dimensions(one.equation) is None:
            _check_called(one)
        elif has_rows:
            for n in self._summed(one, rows, results):
                size = other.operands[n].shape[rows[n]]
                neutral = _NEUTRAL.get(one.name, lambda dtype: 0)(one.operands[n].aval.dtype)
                number = self._number(one, np.asarray(size, np.int32))
                change.masked[n] = rows[n], number, neutral
        if change.numbers or change.masked:
            self.changes[one] = change

    def _number(self, made: Equation, value: Any) -> int:
        """The place of a further number among the data."""
        if self._is_inner:
            raise Differs(f"a loop or a branch has other numbers in {_named(made)}")
        if isinstance(value, Atom):
            value = np.asarray(value.constant, value.aval.dtype)
        self.numbers.append(value)
        return len(self.numbers) - 1

    def _summed(self, made: Equation, rows: dict[int, int], results: list) -> list[int]:
        """The operands whose rows the operation sums up, or reduces in another way.

        Raises:
            Differs: If it is not known to treat the other rows one by one.
        """
        if made.name == "reshape":
            _check_reshape(made, rows, results)
            return []
        if made.name in _DRAWS:
            _check_draw(made, rows, results)
            return []
        if not rows and made.name not in _MAKE_ROWS:
            raise Differs(f"{_named(made)} is not known to make rows one by one")
        table = dimensions(made.equation)
        assert table is not None
        passed = {
            (place.operand, place.dimension, place.result)
            for place in table.mapped
            if results[place.result] == place.to
            and place.parts == made.operands[place.operand].shape[place.dimension]
        }
        moved = {(p.operand, p.dimension) for p in table.mapped} - {p[:2] for p in passed}
        places = list(rows.items())
        if any(place in table.indexed or place in moved for place in places):
            raise Differs(f"{_named(made)} is not known to treat rows one by one")
        _check_special(made, rows)
        if made.name == "optimization_barrier":
            return []
        left = [n for n, d in places if any((n, d, r) not in passed for r in range(len(results)))]
        if left:
            _check_sum(made, rows, left, results, table.together)
        # An index of a row that adds nothing may be any.
        return [n for n in left if not (made.name == "scatter-add" and n == 1)]


def _compare_inner(one: Equation, other: Equation) -> None:
    """Compares the programs that two operations call."""
    programs = [list(inner_jaxprs(made.equation)) for made in (one, other)]
    if len(programs[0]) != len(programs[1]):
        raise Differs(f"{_named(one)} depends on the number of rows")
    for mine, its in zip(*programs, strict=True):
        if opened(mine).constvars and not hasattr(mine, "consts"):
            raise Differs(f"{_named(one)} has arrays of its own")
        _Pair(graph_of(mine), graph_of(its), is_inner=True).compare()


def _check_called(made: Equation) -> None:
    """Checks an operation of which only the programs are known that it calls, if there are any."""
    kinds = {called.kind for called in calls(made.equation)}
    if not kinds or not kinds <= {"call", "loop", "condition", "branch"}:
        raise Differs(f"{_named(made)} is not known to treat rows one by one")
    if made.name == "shard_map":
        raise Differs(f"{_named(made)} computes by device")


def _check_draw(made: Equation, rows: dict[int, int], results: list) -> None:
    """Checks that a draw of fewer rows is the beginning of that of more.

    A number depends on the key and on its place in the flattened array, which further rows change
    if they do not come first.

    References:
        https://docs.jax.dev/en/latest/jax.random.html, `jax_threefry_partitionable`.
    """
    generator = str(made.operands[0].aval.dtype)
    if generator != "key<fry>" or not jax.config.jax_threefry_partitionable:
        raise Differs(f"{_named(made)} draws by a generator ({generator}) that counts otherwise")
    own_keys = rows.get(0) is not None and rows[0] == results[0]
    if not own_keys and (rows or results[0] != len(made.operands[0].shape)):
        raise Differs(f"{_named(made)} draws for all rows together")


def _check_sum(
    made: Equation, rows: dict[int, int], left: list[int], results: list, together: Any
) -> None:
    """Checks an operation that sums over rows."""
    plain = made.name in _NEUTRAL or made.name in ("dot_general", "conv_general_dilated")
    if made.name == "scatter-add":
        # A further row, which adds nothing, has an index too, which another one may have.
        hints = ("indices_are_sorted", "unique_indices")
        plain = left == [1, 2] and not any(made.equation.params[hint] for hint in hints)
    if len(left) != len(rows) or any(found is not None for found in results) or not plain:
        raise Differs(f"{_named(made)} is over all rows")
    if made.name not in _NEUTRAL and (
        len(left) != 2 or tuple((n, rows[n]) for n in left) not in set(together)
    ):
        raise Differs(f"{_named(made)} is over all rows")
    if made.name == "conv_general_dilated":
        params = made.equation.params
        numbers = params["dimension_numbers"]
        features = (rows[0], rows[1]) == (numbers.lhs_spec[1], numbers.rhs_spec[1])
        if not features or params["feature_group_count"] * params["batch_group_count"] != 1:
            raise Differs(f"{_named(made)} is over all rows")


def _check_special(made: Equation, rows: dict[int, int]) -> None:
    """Checks what the table of dimensions does not say."""
    wrong = False
    if made.name == "dynamic_update_slice":
        # Where it writes depends on the size of a dimension that it does not write as a whole.
        wrong = rows.get(0) != rows.get(1)
    if made.name == "conv_general_dilated":
        # Which features are a group's depends on how many there are.
        params = made.equation.params
        of_features = rows.get(1) == params["dimension_numbers"].rhs_spec[0]
        wrong = of_features and params["feature_group_count"] * params["batch_group_count"] != 1
    if wrong:
        raise Differs(f"{_named(made)} is not known to treat rows one by one")


def _check_reshape(made: Equation, rows: dict[int, int], results: list) -> None:
    """The rows of both shapes must come first in blocks of the same number of values."""
    (operand,), (result,) = made.operands[:1], made.results
    before, after = rows.get(0), results[0]
    if before is None or after is None or len(rows) != 1:
        raise Differs(f"{_named(made)} mixes rows")
    if np.prod(operand.shape[:before]) != np.prod(result.shape[:after]):
        raise Differs(f"{_named(made)} mixes rows")


def _rows(one: Atom, other: Atom) -> int | None:
    """The dimension in which the shapes of two values differ, or `None`."""
    if len(one.shape) != len(other.shape):
        raise Differs("a value has another number of dimensions")
    found = [
        d for d, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if len({*sizes}) > 1
    ]
    if len(found) > 1:
        raise Differs("a value has a number for every two rows")
    return found[0] if found else None


def _begins_with(constant: Any, of_fewer: Any) -> bool:
    """Whether a constant begins with that of the smaller program.

    Raises:
        Differs: If it does not, and cannot be data.
    """
    if constant is of_fewer:
        return True
    if any(is_key(c) for c in (constant, of_fewer)):
        raise Differs("a key of random numbers is another one")
    if of_fewer is None or max(getattr(c, "nbytes", 0) for c in (constant, of_fewer)) > (
        _MOST_OF_CONSTANTS
    ):
        raise Differs("a large array is another one")
    if not all(getattr(c, "is_fully_addressable", True) for c in (constant, of_fewer)):
        raise Differs("an array is another one")
    mine, its = np.asarray(constant), np.asarray(of_fewer)
    parts = tuple(map(slice, its.shape))
    if mine.shape != its.shape and not _equal(mine[parts], its):
        raise Differs("an array is another one")
    return _equal(mine[parts], its)


def _compare_params(one: Equation, other: Equation) -> None:
    mine, its = one.equation.params, other.equation.params
    if mine.keys() != its.keys():
        raise Differs(f"{_named(one)} has other parameters")
    # Their rules for gradients, which nobody asks for any more.
    has_rules = one.name.startswith(("custom_jvp_call", "custom_vjp_call"))
    for name, value in mine.items():
        if name == SHAPES.get(one.name) or _is_program(value):
            continue
        if has_rules and not isinstance(value, (int, tuple)):
            continue
        if not _equal(value, its[name]):
            raise Differs(f"{_named(one)} depends on the number of rows")


def _is_program(value: Any) -> bool:
    several = isinstance(value, (tuple, list)) and value and all(map(is_jaxpr, value))
    return is_jaxpr(value) or bool(several)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (np.ndarray, np.generic)) or isinstance(other, (np.ndarray, np.generic)):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.tobytes() == other.tobytes()
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError):
        return False  # what cannot be compared


def _limit(dtype: Any, sign: int) -> Any:
    """The largest value of a dtype, or the smallest."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return sign > 0
    if jnp.issubdtype(dtype, jnp.floating):
        return sign * jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.max if sign > 0 else limits.min


def _named(made: Equation) -> str:
    """An operation and its layer, for messages."""
    scope = "/".join(filter(None, (made.scope, str(made.equation.source_info.name_stack))))
    return f"{made.name} of {scope}" if scope else made.name
