"""Train steps in which `keras.optimizers.Muon` orthogonalises whole kernels, each on one device.

Muon multiplies the update of a kernel by itself, fifteen times. As Keras writes it, the devices
that hold parts of the kernel sum or gather in each iteration, and those that hold it whole all
compute the same. Here kernels of one shape and layout are stacked, each device receives its share
of whole kernels, and sends the results back.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import entry_names
from keras_tpu_dist.programs.answers import (
    Answer,
    Level,
    PassContext,
    Rewritten,
    Why,
    WrittenProgram,
)

# What a byte on the links, a collective and an operation on whole kernels cost, in operations on
# parts that take as long. Whole kernels are also stacked, turned and copied. They fit the
# compiler's estimates for v5e (`python benchmarks/muon.py`), where four kernels of (1024, 4096) on
# eight devices take as long whole as split by "fsdp".
_PER_BYTE, _PER_COLLECTIVE, _PER_WHOLE = 1e3, 2e8, 1.6
# The bytes of a stack, and of the whole kernels of a device, unless it is one kernel.
_STACK_BYTES = 256 << 20
# An iteration holds a kernel about this many times; these may take this share of the memory.
_TIMES, _MOST_OF_MEMORY = 4, 0.1

WHOLE = "{} of shape {}: each device orthogonalises {} of them whole; they are exchanged once"
AS_WRITTEN = "{} of shape {}: each device orthogonalises its part of them: {}"


class WholeKernels:
    """The pass that gives each device whole kernels of Muon."""

    name = "muon"
    level = Level.STEP

    def rewritten(self, program: WrittenProgram, where: PassContext) -> Rewritten | Why:
        """The step with Muon's kernels whole, or why each device orthogonalises its parts."""
        muons = _keras.muons_in(getattr(where.model, "optimizer", None))
        if where.kind != "train" or not muons or where.mesh.size == 1:
            return Why()
        answers: list[Answer] = []

        def together(matrices: list[_keras.MuonMatrix], iterate: Callable) -> list[Any]:
            results: dict[int, Any] = {}
            for group in groups_of(matrices, where):
                answers.append(group.answer())
                results |= group.computed(iterate)
            return [results[place] for place in range(len(matrices))]

        with _keras.newton_schulz_by(together):
            results = program.run()
        return Rewritten(results, answers)

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """What is known before a step is traced."""
        if not _keras.muons_in(getattr(model, "optimizer", None)):
            return []
        if strategy.mesh.size == 1:
            return [Answer("", "the mesh has one device")]
        return [Answer("", "kernels may be whole on one device each: the first step decides")]


@dataclass(frozen=True)
class _Part:
    """A kernel in a stack.

    Attributes:
        place: Its position among the matrices of the update.
        turned: Whether the stack has it transposed.
    """

    place: int
    matrix: _keras.MuonMatrix
    turned: bool


@dataclass(frozen=True)
class _Kind:
    """What the kernels of a group have in common.

    Attributes:
        shape: Rows and columns, no more rows than columns, as Keras transposes them.
        axes: The mesh axes that split rows, and those that split columns; `None` if unknown.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...] | None
    dtype: Any
    steps: int

    @property
    def bytes(self) -> int:
        """The bytes of a whole kernel."""
        return math.prod(self.shape) * self.dtype.itemsize

    def operations(self, parts: int) -> float:
        """The operations for one kernel on a device that has one of so many parts of it."""
        rows, columns = self.shape
        return self.steps * 2 * rows * rows * (2 * columns / parts + rows)


@dataclass(frozen=True)
class KernelGroup:
    """Kernels of one kind.

    Attributes:
        memory: The bytes of a device's memory.
    """

    mesh: Mesh
    kind: _Kind
    parts: list[_Part]
    memory: int

    def trouble(self) -> str | None:
        """Why each device computes its parts."""
        if self.kind.axes is None:
            return "their layout is not known"
        if _TIMES * self.kind.bytes > _MOST_OF_MEMORY * self.memory:
            return "a whole one takes too much memory"
        if sum(stack.cost() for stack in self.stacks()) >= self._cost_written():
            return "whole ones would take longer"
        return None

    def stacks(self) -> list["_Stack"]:
        """As few stacks as memory allows, of about equal size."""
        axes = self.kind.axes or ((), ())
        split = _size(self.mesh, itertools.chain(*axes))
        most = min(
            split * _STACK_BYTES // self.kind.bytes,
            self.mesh.size * max(_STACK_BYTES // self.kind.bytes, 1),
        )
        count = math.ceil(len(self.parts) / max(most, 1))
        size = math.ceil(len(self.parts) / count)
        pieces = [self.parts[i : i + size] for i in range(0, len(self.parts), size)]
        return [_Stack(self.mesh, self.kind, axes, piece) for piece in pieces]

    def _cost_written(self) -> float:
        """What parts cost: every iteration sums a square of the rows, or gathers split rows."""
        rows, columns = self.kind.shape
        of_rows, of_columns = self.kind.axes or ((), ())
        sent = rows * columns if of_rows else 0
        sent += rows * rows if of_columns else 0
        sent *= self.kind.steps * self.kind.dtype.itemsize
        collectives = (self.kind.steps + 1) * bool(sent)
        products = self.kind.operations(_size(self.mesh, [*of_rows, *of_columns]))
        return len(self.parts) * (products + _PER_BYTE * sent + _PER_COLLECTIVE * collectives)

    def answer(self) -> Answer:
        """What is computed."""
        variable, why = self.parts[0].matrix.variable, self.trouble()
        count = "1 kernel" if len(self.parts) == 1 else f"{len(self.parts)} kernels"
        shape = tuple(variable.shape)
        if why:
            return Answer(variable.path, AS_WRITTEN.format(count, shape, why))
        each = sum(stack.each for stack in self.stacks())
        return Answer(variable.path, WHOLE.format(count, shape, each), done=True)

    def computed(self, iterate: Callable) -> dict[int, Any]:
        """The results by their places.

        Args:
            iterate: What Keras computes of matrices, also of stacked ones, in so many steps.
        """
        if self.trouble():
            return {p.place: iterate(p.matrix.array, p.matrix.steps) for p in self.parts}
        results: dict[int, Any] = {}
        for stack in self.stacks():
            results |= stack.computed(iterate)
        return results


@dataclass(frozen=True)
class _Stack:
    """Kernels that are exchanged together."""

    mesh: Mesh
    kind: _Kind
    axes: tuple[tuple[str, ...], ...]
    parts: list[_Part]

    @functools.cached_property
    def free(self) -> tuple[str, ...]:
        """The mesh axes beside those of the kernels over which the stack is split."""
        names = [n for n, size in self.mesh.shape.items() if size > 1 and n not in self._split]
        choices = [c for n in range(len(names) + 1) for c in itertools.combinations(names, n)]
        return min(choices, key=self._cost)

    @property
    def each(self) -> int:
        """How many kernels a device computes."""
        return self._each(self.free)

    def cost(self) -> float:
        """How long it takes, in operations of products."""
        return self._cost(self.free)

    @property
    def _split(self) -> list[str]:
        return list(itertools.chain(*self.axes))

    def _each(self, free: Sequence[str]) -> int:
        return math.ceil(len(self.parts) / _size(self.mesh, [*self._split, *free]))

    def _cost(self, free: Sequence[str]) -> float:
        exchanges, ways, each = (
            2 * sum(map(bool, self.axes)),
            _size(self.mesh, free),
            self._each(free),
        )
        # What is split is sent twice; of what is not, every device gets all results.
        sent = each * self.kind.bytes * (exchanges + (ways if free else 0))
        collectives = exchanges + bool(free)
        products = _PER_WHOLE * each * self.kind.operations(1)
        return products + _PER_BYTE * sent + _PER_COLLECTIVE * collectives

    def computed(self, iterate: Callable) -> dict[int, Any]:
        """The results by their places."""
        layout = PartitionSpec(*(names or None for names in self.axes))

        def on_device(*arrays: Any) -> list[Any]:
            return self._back(iterate(self._whole(arrays), self.kind.steps))

        results = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=layout,
            out_specs=layout,
            check_vma=False,  # what is gathered is the same on all devices
        )(*(_turned(part.matrix.array, part.turned) for part in self.parts))
        pairs = zip(self.parts, results, strict=True)
        return {part.place: _turned(result, part.turned) for part, result in pairs}

    def _whole(self, arrays: Sequence[Any]) -> Any:
        """The whole kernels of this device, from its parts of all."""
        ways = _size(self.mesh, [*self._split, *self.free])
        stack = jnp.stack(arrays)
        stack = jnp.pad(stack, ((0, self.each * ways - len(arrays)), (0, 0), (0, 0)))
        if self.free:
            count = stack.shape[0] // _size(self.mesh, self.free)
            stack = lax.dynamic_slice_in_dim(stack, lax.axis_index(self.free) * count, count)
        for dimension, names in enumerate(self.axes, 1):
            if names:
                stack = lax.all_to_all(stack, names, 0, dimension, tiled=True)
        return stack

    def _back(self, stack: Any) -> list[Any]:
        """This device's parts of all kernels, from the whole ones that it computed."""
        for dimension, names in reversed(list(enumerate(self.axes, 1))):
            if names:
                stack = lax.all_to_all(stack, names, dimension, 0, tiled=True)
        if self.free:
            stack = lax.all_gather(stack, self.free, tiled=True)
        return list(stack[: len(self.parts)])


def groups_of(matrices: Sequence[_keras.MuonMatrix], where: PassContext) -> list[KernelGroup]:
    """The matrices of an update by their kinds.

    Args:
        matrices: The matrices.
        where: The devices.
    """
    found: dict[_Kind, list[_Part]] = {}
    for place, matrix in enumerate(matrices):
        shape, axes, turned = tuple(matrix.array.shape), _axes_of(matrix, where.mesh), False
        if axes is not None:
            # A square one is turned like those whose other dimension is split.
            turned = (shape[0], axes) > (shape[1], axes[::-1])
        if turned:
            shape, axes = shape[::-1], axes and axes[::-1]
        kind = _Kind(shape, axes, matrix.array.dtype, matrix.steps)
        found.setdefault(kind, []).append(_Part(place, matrix, turned))
    return [KernelGroup(where.mesh, kind, parts, where.hbm_bytes) for kind, parts in found.items()]


def _axes_of(matrix: _keras.MuonMatrix, mesh: Mesh) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes that split rows and columns; `None` if they are not known."""
    layout, shape = _keras.variable_layout(matrix.momentum), tuple(matrix.variable.shape)
    if not isinstance(layout, NamedSharding) or layout.mesh != mesh:
        return None
    if len(shape) != 2 or tuple(matrix.array.shape) != shape:
        return None
    entries = (*layout.spec, None, None)[:2]
    return tuple(tuple(n for n in entry_names(e) if mesh.shape[n] > 1) for e in entries)


def _size(mesh: Mesh, names: Iterable[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _turned(array: Any, turned: bool) -> Any:
    return jnp.swapaxes(array, 0, 1) if turned else array
