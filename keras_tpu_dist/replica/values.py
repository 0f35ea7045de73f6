"""One value per replica: its layout on the mesh, reading it, and creating it from host values."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.common.errors import type_error, value_error
from keras_tpu_dist.common.own_mesh import in_own_mesh, own_mesh
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.input.host_arrays import padded
from keras_tpu_dist.processes.arrays import checksum
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import check_array
from keras_tpu_dist.replica.blocks import from_blocks, own_blocks, own_replicas
from keras_tpu_dist.training.protocol import Strategy


class PerReplica(TensorFlowNames):
    """One array for every replica, from `strategy.run` or a distributed dataset.

    It is not an array itself: pass it to `strategy.run`, read it with `strategy.local_results`, or
    combine it with `strategy.reduce` or `strategy.gather`.

    If several processes run the replicas, every process can read the values of its own replicas:
    those that have a device there. `strategy.reduce` and `strategy.gather` return the same on all
    processes.

    Args:
        array: The values of all replicas in one array, which is split over the strategy's data axes
            along `axis`.
        strategy: The strategy.
        axis: The split dimension.
        stacked: Whether the split dimension only counts replicas and is not part of the values.
        sizes: For padded dimensions of the values, the replicas' true sizes.
        rows: The dimension of the values that holds the rows of the dynamic batch they come from.

    Example:

    >>> import jax, numpy as np, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    >>> value = strategy.distribute_values_from_function(
    ...     lambda context: np.float32([3.0, 2.0])[context.replica_id_in_sync_group])
    >>> value
    PerReplica:{
      0: array(3., dtype=float32),
      1: array(2., dtype=float32)
    }
    >>> float(strategy.reduce("sum", value))
    5.0
    """

    def __init__(
        self,
        array: jax.Array,
        strategy: Strategy,
        *,
        axis: int = 0,
        stacked: bool = False,
        sizes: Mapping[int, tuple[int, ...]] | None = None,
        rows: int | None = None,
    ):
        self.array = array
        self.strategy = strategy
        self.axis = axis
        self.stacked = stacked
        self.sizes = dict(sizes or {})
        self.rows = rows

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.array.dtype

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of one replica's value, padding included."""
        shape = list(self.array.shape)
        if self.stacked:
            return tuple(shape[1:])
        shape[self.axis] //= self.strategy.placer.num_shards
        return tuple(shape)

    @property
    def padded(self) -> bool:
        """Whether a value holds padding."""
        shape = self.padded_shape
        return any(set(true) != {shape[axis]} for axis, true in self.sizes.items())

    @property
    def values(self) -> tuple:
        """One array per replica of this process, without padding.

        Values of varying sizes are `numpy` arrays, others `jax` arrays on their devices. They are
        local arrays: this process can read them and compute with them alone.
        """
        with own_mesh():
            blocks = own_blocks(self.array, self.axis, self.strategy)
            return tuple(self.cut(replica, block) for replica, block in blocks.items())

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """The numbers of the replicas in `values`, in its order."""
        return own_replicas(self.strategy)

    def replaced(self, array: jax.Array, sizes: Mapping[int, tuple[int, ...]]) -> "PerReplica":
        """Another array with the layout of this one.

        Args:
            array: The array.
            sizes: As in the constructor.
        """
        kept = {"axis": self.axis, "stacked": self.stacked, "rows": self.rows}
        return PerReplica(array, self.strategy, sizes=sizes, **kept)

    def block_until_ready(self) -> "PerReplica":
        """Waits for the computation of the values."""
        self.array.block_until_ready()
        return self

    def cut(self, replica: int, block: Any) -> Any:
        """A replica's value, without padding.

        Args:
            replica: The replica's number.
            block: Its part of `array`.
        """
        if not self.sizes:
            return block[0] if self.stacked else block
        # On the host: on a device, every new length would compile a new slice.
        host = np.asarray(block)[0] if self.stacked else np.asarray(block)
        cuts = [slice(None)] * host.ndim
        for axis, true in self.sizes.items():
            cuts[axis] = slice(true[replica])
        return host[tuple(cuts)]

    def __repr__(self):
        own = zip(self.replica_ids, self.values, strict=True)
        rows = [f"  {i}: {np.asarray(value)!r}" for i, value in own]
        return "PerReplica:{\n" + ",\n".join(rows) + "\n}"

    def _refuse(self, *_):
        raise type_error(
            "A PerReplica holds a value for every replica; it is not one array.",
            received={"shape of each": self.padded_shape, "dtype": str(self.dtype)},
            fix="Use strategy.reduce(...), strategy.gather(...) or strategy.local_results(...).",
        )

    def _refuse_numbers(self, other):
        """Refuses to compare with values; with anything else, such as `None`, Python decides."""
        if isinstance(other, (PerReplica, int, float, complex)) or hasattr(other, "__array__"):
            self._refuse()
        return NotImplemented

    def __format__(self, spec):
        return self._refuse() if spec else repr(self)

    # An error for all of these: NumPy would treat it as a scalar of dtype object, and Python would
    # compare objects, so that a guard such as `loss != loss` never fires.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_numbers
    __hash__ = object.__hash__
    __array__ = __float__ = __int__ = __complex__ = __index__ = _refuse
    __bool__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = _refuse
    __rdivmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __pos__ = _refuse
    __abs__ = __round__ = __invert__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __xor__ = __rxor__ = _refuse


def check_owner(value: PerReplica, strategy: Strategy) -> None:
    """Raises a `ValueError` if a value belongs to another strategy.

    Args:
        value: The value.
        strategy: The strategy that is to use it.
    """
    if value.strategy is not strategy:
        raise value_error(
            "Only the strategy that created a per-replica value can use it.",
            received={"its strategy": value.strategy, "used with": strategy},
            fix="Read the values with its local_results, and distribute them again.",
        )


class DescribedValue(NamedTuple):
    """The description of one replica's value that all processes get."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int = 0

    @classmethod
    def of(cls, value: Any, with_checksum: bool = False) -> "DescribedValue":
        """The description of a host value.

        Args:
            value: A number or an array.
            with_checksum: Whether other processes have this replica too.
        """
        array = np.asarray(value)
        number = checksum(array) if with_checksum and array.dtype.kind not in "OSU" else 0
        return cls(type(value).__name__, array.shape, str(array.dtype), number)


@dataclass(frozen=True)
class HostParts:
    """One array of a step on the host, before it goes to the replicas.

    Attributes:
        blocks: The values by the number of their replica, all of one shape, at least for the
            replicas of this process.
    """

    blocks: dict[int, np.ndarray]
    axis: int
    sizes: dict[int, tuple[int, ...]]
    stacked: bool = False

    @property
    def form(self) -> tuple:
        """A key that is equal for steps that can be launched together."""
        shapes = [(i, block.shape, block.dtype) for i, block in self.blocks.items()]
        return shapes, self.axis, self.sizes, self.stacked

    def placed(self, strategy: Strategy) -> PerReplica:
        """The value on the mesh.

        Args:
            strategy: The strategy.
        """
        return self.value(from_blocks(self.blocks, self.axis, strategy), strategy)

    def value(self, array: Any, strategy: Strategy) -> PerReplica:
        """The per-replica value for an array on the mesh.

        Args:
            array: The array.
            strategy: The strategy.
        """
        return PerReplica(array, strategy, axis=self.axis, stacked=self.stacked, sizes=self.sizes)


class Steps:
    """An array for every one of several steps, stacked along a new first dimension.

    Args:
        array: The stack, on the mesh.
        form: Creates the value of one step from its array; `None` if the value is the array itself.
    """

    def __init__(self, array: jax.Array, form: Callable[[Any], PerReplica] | None = None):
        self.array = array
        self._form = form or (lambda array: array)

    @property
    def described(self) -> Any:
        """The value of one step, with a `jax.ShapeDtypeStruct` for its array."""
        return self._form(jax.ShapeDtypeStruct(self.array.shape[1:], self.array.dtype))

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, number: int) -> Any:
        sharding: Any = self.array.sharding
        of_step = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        return self._form(_step_of(self.array, number, of_step))


@in_own_mesh
@functools.partial(jax.jit, static_argnames="sharding")
def _step_of(array, number, sharding):
    found = jax.lax.dynamic_index_in_dim(array, number, keepdims=False)
    return jax.lax.with_sharding_constraint(found, sharding)


def in_single_steps(batches: Any) -> Iterator[Any]:
    """The batches of several steps, one after the other.

    Args:
        batches: The structure of a batch, with `Steps` instead of every array.
    """
    for number in range(len(jax.tree.leaves(batches)[0])):
        yield jax.tree.map(lambda steps, number=number: steps[number], batches)


def place_steps(steps: Sequence[HostParts], strategy: Strategy) -> Steps:
    """Transfers an array of several steps at once.

    Args:
        steps: Its values for every step, all with the same `form`.
        strategy: The strategy.
    """
    first = steps[0]
    blocks = {i: np.stack([step.blocks[i] for step in steps]) for i in first.blocks}
    array = from_blocks(blocks, first.axis + 1, strategy)
    return Steps(array, functools.partial(first.value, strategy=strategy))


def host_parts(own: Mapping[int, Any], every: Sequence[DescribedValue], name: str) -> HostParts:
    """One host value per replica, padded along the first dimension if need be.

    Args:
        own: The values by the number of their replica, at least for the replicas of this process.
        every: The descriptions of all replicas' values.
        name: The function that returned them, for errors.
    """
    _check_fit(every, name)
    lengths = [described.shape[0] for described in every if described.shape]
    sizes, arrays = {}, {replica: np.asarray(value) for replica, value in own.items()}
    if len(set(lengths)) > 1:
        sizes[0] = tuple(lengths)
        arrays = {i: padded(array, 0, max(lengths)) for i, array in arrays.items()}
    blocks = {replica: array[None] for replica, array in arrays.items()}
    return HostParts(blocks, 0, sizes, stacked=True)


def stack_structures(own: Mapping[int, Any], strategy: Strategy, name: str) -> Any:
    """A structure of host values per replica as one structure of `PerReplica`.

    Args:
        own: The structures by the number of their replica, for the replicas of this process.
        strategy: The strategy.
        name: The function that returned them, for errors.
    """
    flat = {replica: jax.tree.flatten(value) for replica, value in own.items()}
    structures, described = _described(flat, strategy, name)
    if len(structures) > 1:
        raise value_error(
            f"{name} must return the same structure for all replicas.",
            received={"structures": sorted(structures)},
            fix="Return the same keys and lengths for every replica.",
        )
    leaves = [
        host_parts({i: leaves[n] for i, (leaves, _) in flat.items()}, column, name).placed(strategy)
        for n, column in enumerate(zip(*described, strict=True))
    ]
    return jax.tree.unflatten(next(iter(flat.values()))[1], leaves)


def _described(flat: Mapping[int, tuple], strategy: Strategy, name: str) -> tuple[set, list]:
    """The different structures of the replicas' values, and every replica's descriptions."""
    several = not strategy.placer.is_local
    mine = [
        [i, str(treedef), [DescribedValue.of(leaf, several) for leaf in leaves]]
        for i, (leaves, treedef) in flat.items()
    ]
    fix = f"Call it in all processes: every process calls {name} for its own replicas."
    what = f"making a value per replica by {name}"
    answers = agree(what, fix, mine) if several else [mine]
    found: dict[int, tuple] = {}
    for process, values in enumerate(answers):
        for replica, structure, plain in values:
            for _, shape, dtype, _ in plain:
                check_array(shape, dtype, where=f"the value of replica {replica}")
            here = (structure, [DescribedValue(k, tuple(s), d, n) for k, s, d, n in plain])
            if found.setdefault(replica, here) != here:
                raise value_error(
                    "Processes that share a replica must give it the same value.",
                    received=f"another value of replica {replica} in process {process}.",
                    fix=f"Let {name} depend on the replica's number, not on the process.",
                )
    return {structure for structure, _ in found.values()}, [
        found[replica][1] for replica in sorted(found)
    ]


def _check_fit(every: Sequence[DescribedValue], name: str) -> None:
    first = every[0]
    if any(np.dtype(described.dtype).kind in "OSU" for described in every):
        raise value_error(
            f"{name} must return numbers.",
            received={"types": [described.kind for described in every]},
            fix="Return an array or a number, or a structure of them.",
        )
    if any(
        described.dtype != first.dtype
        or described.shape[1:] != first.shape[1:]
        or len(described.shape) != len(first.shape)
        for described in every
    ):
        raise value_error(
            f"The values of {name} must have the same dtype on all replicas, and the same "
            "shape apart from the first dimension.",
            received={"values": [f"{described.dtype}{described.shape}" for described in every]},
            fix="Pad or cast the values.",
        )
