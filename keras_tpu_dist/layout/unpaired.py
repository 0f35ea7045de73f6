"""What a plan could not pair, and what a step sends for it over the axes that split weights.

A kernel that opens a split of features and one that closes it are a pair: between them nothing is
sent, and behind them one sum. All else costs more: features that are gathered, weights that are
used in another layout than they are stored in, layers that every device computes whole. The bytes
are those of the usual rings; whatever XLA joins or leaves out besides is not in them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, axis_size, entry_names
from keras_tpu_dist.layout.placement import Placement, Setting, bytes_of
from keras_tpu_dist.layout.rules import Decision
from keras_tpu_dist.layout.tensor import (
    GUESSED,
    INDIVISIBLE,
    KEYS,
    SHARED,
    Projection,
    projection_of,
)


@dataclass(frozen=True)
class Unpaired:
    """A weight, or a layer, without a pair.

    Attributes:
        path: The path of the weight or the layer.
        like: What is equal for those that are mentioned together.
        words: What is done instead.
        fix: What helps.
        by_row: Bytes that a device sends in a step for each row of its batch; `None` if unknown.
        by_step: Bytes that it sends in a step besides; `None` if unknown.
    """

    path: str
    like: tuple
    words: str
    fix: str
    by_row: float | None = 0.0
    by_step: float | None = 0.0


_SIZES = "Choose sizes that divide by the model axis, or give rules."
_SMALL = "If it is small, keep it whole with ktd.replicate."
_PARTNER = (
    "Have the next kernel sum over its features as they come, without an operation that mixes "
    "them, or keep it whole with ktd.replicate."
)


def unpaired(model: Any, placement: Placement, setting: Setting) -> list[Unpaired]:
    """Finds what a plan for tensor parallelism could not pair.

    Args:
        model: A built model.
        placement: Its placement.
        setting: The strategy's mesh and layout.

    Returns:
        What it found, in the order of the layers.
    """
    if placement.plan is None:
        return []
    reader = _Reader(model, placement, setting)
    return [found for layer in _keras.flatten_layers(model) for found in reader.of(layer)]


class _Reader:
    """Reads the decisions of a plan.

    Args:
        model: The model.
        placement: Its placement.
        setting: The strategy's mesh and layout.
    """

    def __init__(self, model: Any, placement: Placement, setting: Setting):
        self._mesh, self._setting = setting.mesh, setting
        self._placement, self._plan = placement, placement.plan
        self._first = _fed_by_inputs(model)

    def of(self, layer: Any) -> Iterator[Unpaired]:
        """What a layer has without a pair.

        Args:
            layer: The layer.
        """
        projection = projection_of(layer)
        for weight in _keras.own_variables(layer):
            decision = self._by_plan(weight)
            # A bias is sent with its kernel, or lies whole with it.
            if decision is None or len(weight.shape) < 2 or _is_bias(projection, weight):
                continue
            own = projection if projection and projection.kernel is weight else None
            for words, fix, by_row, by_step in self._costs(layer, weight, decision, own):
                like = (type(layer), weight.name, tuple(weight.shape), words)
                yield Unpaired(weight.path, like, words, fix, by_row, by_step)
            if GUESSED in decision.reason:
                words = decision.reason.partition(GUESSED)[2]
                yield Unpaired(
                    weight.path,
                    (type(layer), weight.name, tuple(weight.shape), "guessed"),
                    f"Its partner is guessed from the order of layers{words}; if the guess is "
                    "wrong, what lies between is gathered.",
                    "Have the call take what build was given, or give rules.",
                    None,
                    None,
                )

    def _by_plan(self, weight: Any) -> Decision | None:
        """The plan's decision for a weight, if it is the one that counts."""
        assert self._plan is not None
        planned = self._plan.decision(weight)
        decided = self._placement.decisions.get(id(weight))
        same = planned is not None and decided is not None and planned.reason == decided.reason
        return decided if same else None

    def _costs(self, layer, weight, decision: Decision, p: Projection | None) -> Iterator[tuple]:
        axes = self._model_axes(p.axes(decision.axes) if p else decision.axes)
        ways = math.prod(axis_size(self._mesh, entry) for entry in axes)
        size = bytes_of(weight)
        if not any(axes) and any(why in decision.reason for why in (SHARED, INDIVISIBLE)):
            yield self._whole(weight, decision)
        item = jax.numpy.dtype(layer.compute_dtype or "float32").itemsize
        if decision.view is not None:
            sent = 2 * _exchanged(math.prod(weight.shape) * item, ways)
            words = (
                "It makes features of several kinds in a row, and is used by heads: it is sent, "
                "and so is its gradient."
            )
            yield words, "Use one kernel for each kind to send nothing.", 0.0, sent
        elif decision.used and ways > 1:
            used = self._model_axes(decision.used)
            if any(used):
                sent = 2 * _exchanged(size, ways)
                words = (
                    "It is stored by its width and used by what does not divide, padded: it is "
                    "sent, and so is its gradient."
                )
            else:
                sent, words = _gathered(size, ways), "It is used whole, and gathered."
            yield words, _SIZES, 0.0, sent
        if decision.alone and p is not None and ways > 1:
            yield self._alone(layer, p, decision, axes, ways, item)
        elif decision.alone and not decision.used and ways > 1:
            words = "No rule knows its layer: it is split along its largest dimension."
            yield words, "Give a rule for it, or ktd.replicate its layer.", None, None
        elif decision.gathered is not None:
            features = self._elements(layer, decision.gathered.sizes)
            words = "What is looked up in it by its width is gathered."
            by_row = None if features is None else _gathered(features * item, ways)
            yield words, _SIZES, by_row, 0.0

    def _whole(self, weight, decision: Decision) -> tuple:
        """What would be split, but for its size."""
        why = decision.reason.rpartition("replicated: ")[2].partition("; fsdp")[0]
        if SHARED not in decision.reason and KEYS not in decision.reason:
            words = f"It lies whole, and every device computes all of it: {why}. Nothing is sent."
            return words, _SIZES, 0.0, 0.0
        words = f"It lies whole ({why}): its gradients are summed."
        return words, _SIZES, None, None

    def _alone(self, layer, p: Projection, decision, axes: Axes, ways: int, item: int) -> tuple:
        """A kernel that feeds no kernel that is cut as it is, nor is fed by one."""
        made, taken = self._elements(layer, p.out_sizes), self._elements(layer, p.in_sizes, True)
        if layer in self._first:
            taken = 0
        column = any(axes[d] for d in p.outs)
        if decision.gathered is not None:
            words, fix = "No kernel takes its features as they lie: they are gathered", _PARTNER
            shares = (_gathered, _summed)
        elif column or decision.used:
            words, fix = "No kernel follows it: its features stay in parts", _SMALL
            shares = (None, _summed)
        else:
            words, fix = "Its features do not divide: what it makes is summed", _SIZES
            shares = (_summed, _gathered)
        backward = "summed" if shares[1] is _summed else "gathered"
        words += f", and gradients of its inputs are {backward}." if taken != 0 else "."
        if made is None or taken is None:
            return words, fix, None, 0.0
        by_row = shares[1](taken * item, ways) + (shares[0](made * item, ways) if shares[0] else 0)
        return words, fix, by_row, 0.0

    def _model_axes(self, axes: Axes) -> Axes:
        """Without the axes that split the batch, over which every plan stores alike."""
        data = set(self._setting.data_axes)
        return tuple(
            tuple(name for name in entry_names(entry) if name not in data) or None for entry in axes
        )

    def _elements(self, layer: Any, features: tuple, taken: bool = False) -> int | None:
        """Elements that a layer makes, or takes, for one row of the batch; `None` if unknown."""
        shape = _built_for(layer)
        if shape is None:
            return None
        if not taken and isinstance(layer, keras.layers.Embedding):
            shape = (*shape, *features)
        elif not taken:
            try:
                shape = layer.compute_output_shape(shape)
            except Exception:  # of a user's layer
                return None
        return None if None in shape[1:] else math.prod(shape[1:])


def _is_bias(projection: Projection | None, weight: Any) -> bool:
    return projection is not None and projection.bias is weight


def _built_for(layer: Any) -> tuple | None:
    shape = (layer.get_build_config() or {}).get("input_shape")
    return tuple(shape) if shape and not isinstance(shape[0], (list, tuple)) else None


def _fed_by_inputs(model: Any) -> set:
    """Layers of a graph that take nothing but the model's inputs, of which no gradient is made."""
    calls = _keras.graph(model) or ()
    inputs = {
        id(node) for node, operation, _ in calls if isinstance(operation, keras.layers.InputLayer)
    }
    return {
        operation
        for _, operation, parents in calls
        if parents and all(id(parent) in inputs for parent in parents)
    }


def _summed(size: float, ways: int) -> float:
    return 2 * size * (ways - 1) / ways


def _gathered(size: float, ways: int) -> float:
    return size * (ways - 1) / ways


def _exchanged(size: float, ways: int) -> float:
    return size * (ways - 1) / ways**2
