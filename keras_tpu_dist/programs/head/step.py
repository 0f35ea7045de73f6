"""Train and test steps whose logits are computed in pieces of the vocabulary."""

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, entry_names
from keras_tpu_dist.programs.answers import (
    Answer,
    Level,
    PassContext,
    Rewritten,
    Why,
    WrittenProgram,
    words_of,
)
from keras_tpu_dist.programs.dimensions import ELEMENTWISE
from keras_tpu_dist.programs.graph import Equation, Graph, Instead, traced_step
from keras_tpu_dist.programs.head.pieces import HeadSplit, InPieces, pieces_of
from keras_tpu_dist.programs.head.reading import Head, StaysWhole, heads_of, read

# Smaller vocabularies are computed as a whole.
LEAST_WORDS = 4096
# The share of the memory that weights, slots and gradients leave which logits may take as a whole.
MOST_OF_ROOM = 0.4
# The bytes of logits and their gradient in a training step, relative to those of the logits: 1.1
# to 1.4 with the TPU compiler (`python benchmarks/head.py --layers 0`).
GRADIENT_TIMES = 1.5
# One pass finds the sum of exponentials, and one the loss and its gradients. Each further one
# computes the logits once more: only if that is asked for.
_MOST_PASSES = 2
_MOST_PASSES_ASKED = 8

IN_PIECES = "head in pieces: logits of {} of {} words at a time, computed {} times"
WHOLE = "head as a whole"
_ASK = 'head="pieces"'
SMALL = f"{WHOLE}: its logits are no larger than a piece"
_WAITS = {
    "whole": f'{WHOLE}: head="whole"',
    "pieces": "in pieces, if a layer computes logits of a vocabulary: the first step decides",
    "auto": f"{WHOLE}, if the logits fit into the memory that is left: a step decides",
}


class HeadInPieces:
    """The pass that computes logits and their loss in pieces, if `head=` asks for it."""

    name = "head"
    level = Level.STEP

    def rewritten(self, program: WrittenProgram, where: PassContext) -> Rewritten | Why:
        """The step with its heads in pieces, or why it computes them as a whole."""
        strategy, model, kind = _keras.active_strategy(), where.model, where.kind
        option = "whole" if strategy is None else strategy.options.head
        if option == "whole" or kind == "predict":
            return Why()
        least_bytes = None
        if option == "auto":
            least_bytes = max(MOST_OF_ROOM * (where.hbm_bytes - _state_bytes(model, kind)), 0)
            words = max((max(v.shape, default=0) for v in model.weights), default=0)
            ways = axis_size(where.mesh, where.data_axes or None)
            _, data = program.args
            if 4 * GRADIENT_TIMES * _labels(data) * words / ways < least_bytes:
                return Why()
        return _Step(where, least_bytes).rewritten(program)

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """What is known before a step is traced."""
        return [Answer("", _WAITS[strategy.options.head])]


def described(model: Any) -> dict[str, str]:
    """How the last step of a model computed its heads: from the path of their weights to words.

    Args:
        model: The model.
    """
    return words_of(model, HeadInPieces.name)


def can_be_in_pieces(words: str) -> bool:
    """Whether a head that was computed as `described` says would take less memory in pieces."""
    return _ASK in words


def _labels(data: Any) -> int:
    """The largest number of integers in an array of the batch: at least that of its labels."""
    leaves = [leaf for leaf in jax.tree.leaves(data) if jnp.issubdtype(leaf.dtype, jnp.integer)]
    return max((leaf.size for leaf in leaves), default=0)


def _state_bytes(model: Any, kind: str) -> int:
    """The bytes of a step's state on one device, and of its gradients."""
    variables = [v for group in _keras.state_groups(model, kind) for v in group]
    if kind == "train":
        variables += model.trainable_variables
    return sum(_bytes_per_device(variable) for variable in variables)


def _bytes_per_device(variable: Any) -> int:
    layout, shape = _keras.variable_layout(variable), tuple(variable.shape)
    part = layout.shard_shape(shape) if isinstance(layout, NamedSharding) else shape
    return math.prod(part) * jnp.dtype(variable.dtype).itemsize


class _Step:
    """A step that is analysed once and computed with its heads in pieces."""

    def __init__(self, where: PassContext, least: float | None):
        self._model, self._kind = where.model, where.kind
        # Smaller heads stay whole; none does if pieces are asked for.
        self._mesh, self._least_bytes = where.mesh, least
        self._batch = tuple(axis for axis in where.data_axes if where.mesh.shape[axis] > 1)
        self._variables = [
            v for group in _keras.state_groups(self._model, self._kind) for v in group
        ]
        self._answers: list[Answer] = []

    def rewritten(self, program: WrittenProgram) -> Rewritten:
        """Its results."""
        graph, inputs, shapes = traced_step(program.function, *program.args)
        heads = heads_of(graph, graph.inputs[len(self._variables) :], LEAST_WORDS)
        if not heads and self._least_bytes is None:
            self._note(self._model.name, f"{WHOLE}: no layer computes logits of a vocabulary")
        instead: dict[Equation, Instead] = {}
        for head in heads:
            if head.product not in graph.needed({}):
                continue  # computed with another one, as the logits that it is compared with
            graph, pieces = self._in_pieces(graph, head)
            instead |= pieces
        results = graph.evaluate(inputs, instead)
        return Rewritten(jax.tree.unflatten(jax.tree.structure(shapes), results), self._answers)

    def _in_pieces(self, graph: Graph, head: Head) -> tuple[Graph, dict[Equation, Instead]]:
        """The step with a head in pieces, and what computes them; itself if it cannot be."""
        path, words, features = self._stored(graph, head)
        split = HeadSplit(self._mesh, self._batch, self._splitting(head, words, features), features)
        size = head.tokens * head.words * head.logits.aval.dtype.itemsize
        size *= GRADIENT_TIMES if self._kind == "train" else 1
        if size / split.ways((*split.rows, *split.summed)) < (self._least_bytes or 0):
            return graph, {}
        try:
            if _keras.active_strategy().sequence_axis is not None:
                raise StaysWhole("the mesh splits time")
            read(graph, head, _MOST_PASSES_ASKED if self._least_bytes is None else _MOST_PASSES)
        except StaysWhole as why:
            self._note(path, f"{WHOLE}: {why}")
            return graph, {}
        pieces = pieces_of(head, split)
        if pieces.count == 1:
            self._note(path, SMALL)
            return graph, {}
        width = min(pieces.width * split.ways(split.words), head.words)
        self._note(path, IN_PIECES.format(width, head.words, len(head.passes)))
        return InPieces(head, split, pieces, path.rpartition("/")[0] or "head").rewritten(graph)

    def _stored(self, graph: Graph, head: Head) -> tuple[str, tuple, tuple]:
        """The variable of a head's weights.

        Returns:
            Its path, the mesh axes that split its words, and those that split its other dimension.
        """
        side, atom = head.product.operands.index(head.weights), head.weights
        (summed, _) = head.product.equation.params["dimension_numbers"]
        (words,) = set(range(len(atom.shape))) - set(summed[side])
        while (made := atom.operation) is not None:
            if made.name == "transpose":
                words = made.equation.params["permutation"][words]
                atom = made.operands[0]
                continue
            # The first one: an adapter's product is added to its kernel.
            same = [operand for operand in made.operands if operand.shape == atom.shape]
            if made.name not in ELEMENTWISE or not same:
                break
            atom = same[0]
        places = {id(atom): place for place, atom in enumerate(graph.inputs)}
        place = places.get(id(atom), len(self._variables))
        if place >= len(self._variables):
            return self._model.name, (), ()
        variable = self._variables[place]
        layout = _keras.variable_layout(variable)
        if not isinstance(layout, NamedSharding) or layout.mesh != self._mesh:
            return variable.path, (), ()
        entries = (*layout.spec, *[None] * len(atom.shape))[: len(atom.shape)]
        axes = [
            tuple(name for name in entry_names(entry) if self._mesh.shape[name] > 1)
            for entry in entries
        ]
        others = [names for d, names in enumerate(axes) if d != words]
        return variable.path, axes[words], others[0] if len(others) == 1 else ()

    def _splitting(self, head: Head, stored: tuple, features: tuple) -> tuple[str, ...]:
        """The mesh axes that split the words: those of the weights, or else those left over."""
        if stored:
            return stored
        free = [
            name
            for name, size in self._mesh.shape.items()
            if size > 1 and name not in (*self._batch, *features)
        ]
        even = head.words % axis_size(self._mesh, tuple(free) or None) == 0
        return tuple(free) if even else ()

    def _note(self, path: str, words: str) -> None:
        done = not words.startswith(WHOLE)
        refused = not done and words != SMALL and self._least_bytes is None
        level = logging.WARNING if refused else logging.INFO
        # Another batch, as the last one of an epoch, does not say how the head is computed.
        self._answers.append(Answer(path, words, done, level, first_only=words == SMALL))
