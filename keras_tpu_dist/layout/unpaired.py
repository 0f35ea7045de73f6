"""Weights that tensor parallelism could not pair, and the bytes that a step sends for them.

A kernel that is split by its outputs (column) and a following one that is split by its inputs (row)
are a pair: nothing is sent between them, and one sum follows. Everything else costs more: features
that are gathered, weights whose layout in use differs from the stored one, layers that every device
computes in full. The bytes are those of ring algorithms. XLA may combine or omit some of them.
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
    INDIVISIBLE,
    KEYS,
    SHARED,
    UNEQUAL,
    UNTRACED,
    Projection,
    projection_of,
)


@dataclass(frozen=True)
class Unpaired:
    """A weight without a pair.

    Attributes:
        like: A key that is equal for weights that are reported together.
        by_row: Bytes that a device sends in a step per row of its batch; `None` if unknown.
        by_step: Other bytes that it sends in a step; `None` if unknown.
    """

    path: str
    like: tuple
    words: str
    fix: str
    by_row: float | None = 0.0
    by_step: float | None = 0.0


_SIZES = "Choose sizes that are divisible by the model axis, or give rules."
_SMALL = "If it is small, replicate it with ktd.replicate."
_PARTNER = (
    "Let the next kernel sum over these features, without an operation in between that mixes them, "
    "or replicate it with ktd.replicate."
)

_PARTS = (
    "Use one kernel per part. If the parts are joined again, multiply each by its own kernel "
    "instead, and add the outputs."
)


def unpaired(model: Any, placement: Placement, setting: Setting) -> list[Unpaired]:
    """Finds the weights that a plan for tensor parallelism could not pair.

    Returns:
        The weights, in the order of the layers.
    """
    if placement.plan is None:
        return []
    reader = _Reader(model, placement, setting)
    return [found for layer in _keras.flatten_layers(model) for found in reader.of(layer)]


class _Reader:
    """Reads the decisions of a plan."""

    def __init__(self, model: Any, placement: Placement, setting: Setting):
        self._mesh, self._setting = setting.mesh, setting
        self._placement, self._plan = placement, placement.plan
        self._first = _fed_by_inputs(model)

    def of(self, layer: Any) -> Iterator[Unpaired]:
        """The weights of a layer without a pair."""
        projection = projection_of(layer)
        for weight in _keras.own_variables(layer):
            decision = self._by_plan(weight)
            # A bias or a scale is sent, or replicated, with its kernel.
            if decision is None or len(weight.shape) < 2 or _is_beside(layer, projection, weight):
                continue
            own = projection if projection and projection.kernel is weight else None
            for words, fix, by_row, by_step in self._costs(layer, weight, decision, own):
                like = (type(layer), weight.name, tuple(weight.shape), words)
                yield Unpaired(weight.path, like, words, fix, by_row, by_step)
            if UNTRACED in decision.reason:
                words = decision.reason.partition(UNTRACED)[2]
                yield Unpaired(
                    weight.path,
                    (type(layer), weight.name, tuple(weight.shape), "untraced"),
                    f"A kernel that uses its features is not found: the call of {words}",
                    "Pass the layer an input of the shape that it was built for, or give rules.",
                    None,
                    None,
                )

    def _by_plan(self, weight: Any) -> Decision | None:
        """The plan's decision for a weight, unless a rule or an annotation overrides it."""
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
        if decision.view is not None and (ways > 1 or _learns(layer, weight)):
            words = (
                "It computes several projections at once, such as queries, keys and values, and is "
                f"split by heads in use: {_with_gradient(layer, weight)}"
            )
            if scales := _scales(layer):
                moved = (weight, *filter(self._is_split, scales))
                sent = _exchanged(sum(map(bytes_of, moved)), ways)
            else:
                sent = self._taken_apart(layer, weight, item)
            yield words, "Use one kernel per projection; then nothing is sent.", 0.0, sent
        elif decision.used and ways > 1:
            used = self._model_axes(decision.used)
            if any(used):
                sent = _padded(layer, weight, ways)
                words = (
                    "Its heads or units are not divisible by the model axis: it is stored split "
                    f"by width, and padded in use. {_with_gradient(layer, weight).capitalize()}"
                )
            else:
                sent, words = _gathered(size, ways), "Every device uses all of it: it is gathered."
            yield words, _SIZES, 0.0, sent
        if decision.alone and p is not None and ways > 1:
            yield self._alone(layer, p, decision, axes, ways, item)
        elif decision.alone and not decision.used and ways > 1:
            words = "The plan has no rule for its layer: its largest dimension is split."
            yield words, "Give a rule for it, or replicate it with ktd.replicate.", None, None
        elif decision.gathered is not None:
            features = self._elements(layer, decision.gathered.sizes)
            words = "It is split by width: the rows that are looked up are gathered."
            by_row = None if features is None else _gathered(features * item, ways)
            yield words, _SIZES, by_row, 0.0

    def _taken_apart(self, layer, weight, item: int) -> float:
        """Bytes that a step sends for a kernel that is used by heads, and for its bias."""
        sent = 0.0
        for variable in (weight, *_own_biases(layer, weight)):
            decision = self._by_plan(variable)
            if decision is None or decision.view is None:
                continue
            ways = self._ways(decision.used)
            size, learns = math.prod(variable.shape) * item, _learns(layer, variable)
            if self._ways(decision.axes) > 1:
                sent += (2 if learns else 1) * _exchanged(size, ways)
            elif learns:
                # Each device has all of it, and the gradient of its own part.
                sent += _gathered(size, ways)
        return sent

    def _ways(self, axes: Axes) -> int:
        return math.prod(axis_size(self._mesh, entry) for entry in self._model_axes(axes))

    def _is_split(self, weight: Any) -> bool:
        decision = self._placement.decisions.get(id(weight))
        return decision is not None and any(self._model_axes(decision.axes))

    def _whole(self, weight, decision: Decision) -> tuple:
        """The description of a weight that is replicated because of its size."""
        why = decision.reason.rpartition("replicated: ")[2].partition("; fsdp")[0]
        if SHARED not in decision.reason and KEYS not in decision.reason:
            words = f"It is replicated, so every device computes all of it: {why}. Nothing is sent."
            return words, _SIZES, 0.0, 0.0
        words = f"It is replicated ({why}): its gradients are summed."
        return words, _SIZES, None, None

    def _alone(self, layer, p: Projection, decision, axes: Axes, ways: int, item: int) -> tuple:
        """The description of a kernel that neither feeds a split kernel nor is fed by one."""
        output, inputs = self._elements(layer, p.out_sizes), self._elements(layer, p.in_sizes, True)
        if layer in self._first:
            inputs = 0
        column = any(axes[d] for d in p.outs)
        if decision.gathered is not None:
            words, fix = "No kernel uses its features while split: they are gathered", _PARTNER
            shares = (_gathered, _summed)
            if UNEQUAL in decision.reason:
                parts = decision.reason.partition(UNEQUAL)[2].partition(";")[0]
                words = f"Its features are separated into unequal parts of {parts}: they are"
                words, fix = f"{words} gathered", _PARTS
        elif column or decision.used:
            words, fix = "No kernel follows it: its features stay split", _SMALL
            shares = (None, _summed)
        else:
            what = "The bytes of its features, two in each," if p.packed else "Its features"
            words, fix = f"{what} are not divisible: its outputs are summed", _SIZES
            shares = (_summed, _gathered)
        backward = "summed" if shares[1] is _summed else "gathered"
        words += f", and the gradients of its inputs are {backward}." if inputs != 0 else "."
        if output is None or inputs is None:
            return words, fix, None, 0.0
        forward = shares[0](output * item, ways) if shares[0] else 0
        return words, fix, shares[1](inputs * item, ways) + forward, 0.0

    def _model_axes(self, axes: Axes) -> Axes:
        """Axes without those that split the batch, which only affect storage."""
        data = set(self._setting.data_axes)
        return tuple(
            tuple(name for name in entry_names(entry) if name not in data) or None for entry in axes
        )

    def _elements(self, layer: Any, features: tuple, inputs: bool = False) -> int | None:
        """Elements of a layer's output, or input, for one row of the batch; `None` if unknown."""
        shape = _built_for(layer)
        if shape is None:
            return None
        if not inputs and isinstance(layer, keras.layers.Embedding):
            shape = (*shape, *features)
        elif not inputs:
            try:
                shape = layer.compute_output_shape(shape)
            except Exception:  # raised by a user's layer
                return None
        return None if None in shape[1:] else math.prod(shape[1:])


def _is_beside(layer: Any, projection: Projection | None, weight: Any) -> bool:
    is_bias = projection is not None and projection.bias is weight
    return is_bias or any(weight is scale for scale in _scales(layer))


def _scales(layer: Any) -> list[Any]:
    """The scales and zero points of a layer's quantized kernel."""
    found = (_keras.stored_weight(layer, f"kernel_{name}") for name in ("scale", "zero"))
    return [scale for scale in found if scale is not None]


def _own_biases(layer: Any, weight: Any) -> list:
    """The bias of a kernel, or the vectors beside it if its layer is none of Keras's own."""
    p = projection_of(layer)
    if p is not None and p.kernel is weight:
        return [] if p.bias is None else [p.bias]
    return [v for v in _keras.own_variables(layer) if v is not weight and len(v.shape) == 1]


def _factors(layer: Any, weight: Any) -> list:
    """The factors that LoRA adds to a weight."""
    names = (f"lora_{weight.name}_{which}" for which in "ab")
    return [v for name in names if (v := _keras.stored_weight(layer, name)) is not None]


def _learns(layer: Any, weight: Any) -> bool:
    """Whether a step computes the gradient of a weight, for itself or for its factors."""
    # Factors of quantized kernels are multiplied by themselves.
    factors = [] if _scales(layer) else _factors(layer, weight)
    return any(v.trainable for v in (weight, *factors))


def _with_gradient(layer: Any, weight: Any) -> str:
    return "it is sent, and so is its gradient." if _learns(layer, weight) else "it is sent."


def _padded(layer: Any, weight: Any, ways: int) -> float | None:
    """Bytes that a step sends for a weight that is padded in use, and for its bias.

    The bias is stored whole, and each device updates a part of it.
    """
    if _factors(layer, weight):
        return None  # XLA moves the gradient of their product in several ways
    biases = [v for v in _own_biases(layer, weight) if v.trainable]
    sent = (2 if weight.trainable else 1) * _exchanged(bytes_of(weight), ways)
    return sent + sum(_gathered(bytes_of(bias), ways) for bias in biases)


def _built_for(layer: Any) -> tuple | None:
    shape = (layer.get_build_config() or {}).get("input_shape")
    return tuple(shape) if shape and not isinstance(shape[0], (list, tuple)) else None


def _fed_by_inputs(model: Any) -> set:
    """Layers of a graph that only read the model's inputs, whose gradients are not computed."""
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
