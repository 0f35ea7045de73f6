"""Quantized kernels whose features can be split by heads, with their scales."""

from typing import Any

import keras

from keras_tpu_dist import _keras


def scaled_kernels(layer: Any) -> list[list[Any]]:
    """Quantized kernels in a layer whose last dimension is that of their features.

    Args:
        layer: A built layer.

    Returns:
        For each the kernel, its scales, and its zero points if it has any.
    """
    found = []
    for inner in _keras.flatten_layers(layer):
        kernel = _keras.stored_weight(inner, "kernel")
        mode = getattr(inner, "quantization_mode", None)
        if kernel is None or mode not in ("int8", "int4") or not _makes_last(inner):
            continue
        names = ("kernel_scale", "kernel_zero")
        scales = [_keras.stored_weight(inner, name) for name in names]
        found.append([kernel, *(scale for scale in scales if scale is not None)])
    return found


def _makes_last(layer: Any) -> bool:
    """Whether a layer's kernel is a matrix whose last dimension is the last one of the output."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return isinstance(layer, keras.layers.Dense)
    operands, _, output = layer.equation.replace(" ", "").partition("->")
    names = operands.partition(",")[2]
    return len(names) == 2 and names[-1] == output[-1] and names[0] not in output
