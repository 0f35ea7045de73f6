"""How near two results must be that are the same but for rounding, by platform and dtype."""

from typing import Any

import jax
import numpy as np

# Relative to the largest value of each array.
#
# cpu: 1e-5, what this package promises of float32 (docs/ragged.md).
# tpu: where operands of products are rounded to bfloat16 (8 bits), each is off by 2**-9 on average,
# and a few layers add up: 2**-8 times 5. Where `jax.default_matmul_precision` is "highest", six
# passes keep 24 bits and sums of float32 are made in another order: 1e-4. Neither was measured on
# a TPU. See `checkup.products` for the sources.
_FLOAT32 = {("cpu", False): 1e-5, ("cpu", True): 1e-5, ("tpu", False): 2e-2, ("tpu", True): 1e-4}
_OTHERS = 2e-2, 1e-4
_BFLOAT16 = 5e-2
_EXACT = ("highest", "float32", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F32_F32_F32")
# What values are compared with if an array has none that is larger.
_LEAST = 1e-2


def is_exact() -> bool:
    """Whether products of float32 are asked for in full precision."""
    return str(jax.config.jax_default_matmul_precision) in _EXACT


def tolerance(platform: str, dtype: str = "float32") -> float:
    """The largest difference that rounding explains, relative to the largest value of an array.

    Args:
        platform: `"tpu"`, `"cpu"` or `"gpu"`.
        dtype: What is computed in.
    """
    if dtype in ("bfloat16", "float16"):
        return _BFLOAT16
    exact = is_exact()
    return _FLOAT32.get((platform, exact), _OTHERS[exact])


def gap(found: Any, expected: Any, scale: float | None = None) -> float:
    """The largest difference of two arrays, relative to the largest value of the expected one.

    Args:
        found: An array.
        expected: What it should be.
        scale: The largest value of the whole, if these are parts of something.
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
    # A flipped bit may make a NaN of which NumPy warns.
    with np.errstate(invalid="ignore"):
        return np.asarray(array, np.float64)
