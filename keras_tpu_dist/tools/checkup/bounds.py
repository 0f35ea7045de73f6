"""Tolerances: how far equal results may differ by rounding, by platform and dtype."""

from typing import Any

import jax
import numpy as np

# Relative to the largest value of the array.
#
# cpu: 1e-5, the promise of this package for float32 (docs/ragged.md).
# tpu: if products round their operands to bfloat16 (8 bits), the average error of an operand is
# 2**-9, and a few layers add up: 2**-8 times 5. With `jax.default_matmul_precision("highest")`, six
# passes preserve 24 bits, and only the order of float32 sums differs: 1e-4. Neither was measured on
# a TPU. See `tools.checkup.products` for the sources.
_FLOAT32 = {("cpu", False): 1e-5, ("cpu", True): 1e-5, ("tpu", False): 2e-2, ("tpu", True): 1e-4}
_OTHERS = 2e-2, 1e-4
_BFLOAT16 = 5e-2
_EXACT = ("highest", "float32", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F32_F32_F32")
# Differences are relative to this value if all values of an array are smaller.
_LEAST = 1e-2


def is_exact() -> bool:
    """Whether JAX is configured to compute products of float32 in full precision."""
    return str(jax.config.jax_default_matmul_precision) in _EXACT


def tolerance(platform: str, dtype: str = "float32") -> float:
    """The largest difference that rounding explains, relative to the largest value of an array.

    Args:
        platform: `"tpu"`, `"cpu"` or `"gpu"`.
        dtype: The dtype of the computation.
    """
    if dtype in ("bfloat16", "float16"):
        return _BFLOAT16
    exact = is_exact()
    return _FLOAT32.get((platform, exact), _OTHERS[exact])


def gap(found: Any, expected: Any, scale: float | None = None) -> float:
    """The largest difference of two arrays, relative to the largest expected value.

    Args:
        found: An array.
        expected: The expected array.
        scale: The largest value of the whole array, if these are parts of it.
    """
    found, expected = _wide(found), _wide(expected)
    if found.shape != expected.shape:
        return float("inf")
    scale = largest(expected) if scale is None else scale
    with np.errstate(invalid="ignore"):
        off = np.max(np.abs(found - expected), initial=0.0)
    return float("inf") if np.isnan(off) else float(off / max(scale, _LEAST))


def largest(array: Any) -> float:
    """The largest absolute value of an array.

    Args:
        array: The array.
    """
    return float(np.max(np.abs(_wide(array)), initial=0.0))


def _wide(array: Any) -> np.ndarray:
    # A flipped bit may produce a NaN, and NumPy would warn.
    with np.errstate(invalid="ignore"):
        return np.asarray(array, np.float64)
