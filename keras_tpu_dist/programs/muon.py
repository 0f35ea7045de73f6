"""Train steps in which `keras.optimizers.Muon` orthogonalises whole kernels, each on one device.

Muon multiplies the update of a kernel by itself, fifteen times. As Keras writes it, the devices
that hold a part of the kernel sum each product, and those that hold it whole compute the same.
Here kernels of one shape are stacked, every device receives its share of whole kernels, and sends
the results back.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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

WHOLE = "{} of shape {}: each device orthogonalises {} of them whole; they are exchanged once"
AS_WRITTEN = "{} of shape {}: every device orthogonalises its part: {}"


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

        def together(matrices: list[_keras.Matrix], iterate: Callable) -> list[Any]:
            results: dict[int, Any] = {}
            for group in _groups(matrices, where.mesh):
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
    matrix: _keras.Matrix
    turned: bool

    @property
    def array(self) -> Any:
        """The matrix as the stack has it."""
        return _turned(self.matrix.array, self.turned)


@dataclass(frozen=True)
class _Kind:
    """What the kernels of a stack have in common.

    Attributes:
        shape: Rows and columns, no more rows than columns, as Keras transposes them.
        axes: The mesh axes that split rows, and those that split columns; `None` if unknown.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...] | None
    dtype: Any
    steps: int


@dataclass(frozen=True)
class _Group:
    """Kernels of one kind.

    Attributes:
        free: The mesh axes that split none of them, and over which the stack is split.
    """

    mesh: Mesh
    kind: _Kind
    parts: list[_Part]
    free: tuple[str, ...]

    @property
    def each(self) -> int:
        """How many kernels a device computes."""
        return math.ceil(len(self.parts) / self._ways)

    @property
    def _ways(self) -> int:
        return _size(self.mesh, [*self.free, *itertools.chain(*(self.kind.axes or ()))])

    def trouble(self) -> str | None:
        """Why each device computes its parts."""
        if self.kind.axes is None:
            return "their layout is not one of this mesh"
        if len(self.parts) == 1:
            return "no other kernel has this shape and layout"
        return None

    def answer(self) -> Answer:
        """What is computed."""
        path = self.parts[0].matrix.variable.path
        count = "1 kernel" if len(self.parts) == 1 else f"{len(self.parts)} kernels"
        shape, why = tuple(self.parts[0].matrix.variable.shape), self.trouble()
        if why:
            return Answer(path, AS_WRITTEN.format(count, shape, why))
        return Answer(path, WHOLE.format(count, shape, self.each), done=True)

    def computed(self, iterate: Callable) -> dict[int, Any]:
        """The results by their places."""
        if self.trouble():
            return {
                part.place: iterate(part.matrix.array, self.kind.steps) for part in self.parts
            }
        layouts = [PartitionSpec(*(names or None for names in self.kind.axes or ()))] * len(
            self.parts
        )

        def on_device(*arrays: Any) -> list[Any]:
            return list(self._back(iterate(self._whole(arrays), self.kind.steps)))

        results = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(layouts),
            out_specs=layouts,
            check_vma=False,  # what is gathered is the same on all devices
        )(*[part.array for part in self.parts])
        return {
            part.place: _turned(result, part.turned)
            for part, result in zip(self.parts, results, strict=True)
        }

    def _whole(self, arrays: Sequence[Any]) -> Any:
        """The whole kernels of this device, of the parts of all that it holds."""
        missing = self.each * self._ways - len(arrays)
        stack = jnp.pad(jnp.stack(arrays), ((0, missing), (0, 0), (0, 0)))
        if self.free:
            count = stack.shape[0] // _size(self.mesh, self.free)
            stack = lax.dynamic_slice_in_dim(stack, lax.axis_index(self.free) * count, count)
        for dimension, names in self._split():
            stack = lax.all_to_all(stack, names, 0, dimension, tiled=True)
        return stack

    def _back(self, stack: Any) -> Any:
        """The parts of all kernels that this device holds, of those that it computed."""
        for dimension, names in reversed(list(self._split())):
            stack = lax.all_to_all(stack, names, dimension, 0, tiled=True)
        if self.free:
            stack = lax.all_gather(stack, self.free, tiled=True)
        return stack[: len(self.parts)]

    def _split(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The dimensions of a stack that the mesh splits, and by which axes."""
        return ((d, names) for d, names in enumerate(self.kind.axes or (), 1) if names)


def _groups(matrices: Sequence[_keras.Matrix], mesh: Mesh) -> list[_Group]:
    """Kernels by what they have in common."""
    found: dict[_Kind, list[_Part]] = {}
    for place, matrix in enumerate(matrices):
        shape, axes = tuple(matrix.array.shape), _axes_of(matrix, mesh)
        # A square one is turned like those whose other dimension is split.
        turned = shape[0] > shape[1] or (shape[0] == shape[1] and (axes or ()) > (axes or ())[::-1])
        if turned:
            shape, axes = shape[::-1], axes and axes[::-1]
        kind = _Kind(shape, axes, matrix.array.dtype, matrix.steps)
        found.setdefault(kind, []).append(_Part(place, matrix, turned))
    return [
        _Group(mesh, kind, parts, _free(mesh, kind.axes or (), len(parts)))
        for kind, parts in found.items()
    ]


def _axes_of(matrix: _keras.Matrix, mesh: Mesh) -> tuple[tuple[str, ...], ...] | None:
    layout = _keras.variable_layout(matrix.variable)
    if not isinstance(layout, NamedSharding) or layout.mesh != mesh:
        return None
    entries = (*layout.spec, None, None)[:2]
    return tuple(tuple(n for n in entry_names(e) if mesh.shape[n] > 1) for e in entries)


def _free(mesh: Mesh, axes: Sequence[Sequence[str]], count: int) -> tuple[str, ...]:
    """The fewest of the axes that split no kernel with which a device computes fewest kernels."""
    split = list(itertools.chain(*axes))
    names = [name for name, size in mesh.shape.items() if size > 1 and name not in split]
    choices = [c for n in range(len(names) + 1) for c in itertools.combinations(names, n)]

    def cost(choice: tuple[str, ...]) -> tuple[int, int]:
        ways = _size(mesh, [*split, *choice])
        return math.ceil(count / ways), ways

    return min(choices, key=cost)


def _size(mesh: Mesh, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _turned(array: Any, turned: bool) -> Any:
    return jnp.swapaxes(array, 0, 1) if turned else array
