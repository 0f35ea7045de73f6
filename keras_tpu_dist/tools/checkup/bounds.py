"""Tolerances: how far equal results may differ by rounding, by platform, dtype and model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras

State = list[list[np.ndarray]]

# Relative to the largest value of the array.
#
# cpu: 1e-5, the promise of this package for float32 (docs/input.md).
# tpu: if products round their operands to bfloat16 (8 bits), the average error of an operand is
# 2**-9, and a few layers add up: 2**-8 times 5. With `jax.default_matmul_precision("highest")`, six
# passes preserve 24 bits, and only the order of float32 sums differs: 1e-4. Neither was measured on
# a TPU. See `tools.checkup.products` for the sources.
_ON_CPU, _ROUNDED, _EXACT = 1e-5, 2e-2, 1e-4
_BFLOAT16 = 5e-2
# Names that `jax.default_matmul_precision` takes; all others mean one pass.
_PRECISIONS = {
    "tensorfloat32": "high",
    "high": "high",
    "BF16_BF16_F32_X3": "high",
    "TF32_TF32_F32": "high",
    "highest": "highest",
    "float32": "highest",
    "BF16_BF16_F32_X6": "highest",
    "BF16_BF16_F32_X9": "highest",
    "F32_F32_F32": "highest",
}
# The model's own rounding error: how much its results change if weights and inputs change by an ulp
# or two, in this many draws. The mesh may be off by this many times that. In half precision, a mesh
# also rounds the sum of every device before adding them up, and one device does not: among 200
# random models, the gradients of two biases were off by 10 and 12 times.
_DRAWS, _TIMES, _TIMES_OF_HALF = 2, 8.0, 16.0
# Differences are relative to this value if all values of an array are smaller.
LEAST = 1e-2
# If a launch changes a variable by less, it may be rounding alone: a bias before a normalization
# has no gradient.
_LEAST_CHANGE = 1e-6


def precision() -> str:
    """How JAX is configured to compute products of float32: `"default"`, `"high"`, `"highest"`."""
    return _PRECISIONS.get(str(jax.config.jax_default_matmul_precision), "default")


def tolerance(platform: str, dtype: str = "float32") -> float:
    """The largest difference that rounding explains, relative to the largest value of an array.

    Args:
        platform: `"tpu"`, `"cpu"` or `"gpu"`.
        dtype: The dtype of the computation.
    """
    if dtype in ("bfloat16", "float16"):
        return _BFLOAT16
    if platform == "cpu":
        return _ON_CPU
    return _EXACT if precision() == "highest" else _ROUNDED


def is_half(model: keras.Model) -> bool:
    """Whether layers of a model compute in half precision."""
    dtypes = {layer.compute_dtype for layer in _keras.flatten_layers(model)}
    return not dtypes.isdisjoint(("bfloat16", "float16"))


def allowed(
    run: Callable[[State, list], Sequence[np.ndarray]],
    state: State,
    batches: list,
    expected: Sequence[np.ndarray],
    platform: str,
    half: bool,
    *,
    least: float = LEAST,
    before: Sequence[int | None] = (),
    steps: int = 1,
) -> list[float]:
    """How far each result of some steps may be off, relative to its largest value.

    Args:
        run: The steps on one device: a function from a state and batches to results.
        batches: The batch of every step: `(x, y, sample_weight)`, or shorter.
        least: What they are relative to if all values of a result are smaller.
        before: For each result that is the new value of a variable, the number of its value in the
            state; `None` for another. Of a variable, what the steps changed is judged, except in
            half precision: a small learning rate cannot hide a wrong gradient behind a large value.
        steps: How often a variable is assigned.
    """
    nudged = [_nudged(state, batches, half, seed) for seed in range(_DRAWS)]
    moved = [(_flat(of[0]), run(*of)) for of in nudged]
    relative = tolerance(platform, "bfloat16" if half else "float32")
    times = _TIMES_OF_HALF if half else _TIMES
    limits = [
        max(relative, *(times * gap(other[n], one, least=least) for _, other in moved))
        for n, one in enumerate(expected)
    ]
    values = _flat(state)
    # In half precision, rounding may turn the sign of a small gradient, and an optimizer such as
    # Adam then moves a weight by a whole step the other way.
    for n, number in enumerate(() if half else before):
        one = expected[n]
        if number is None or not jax.numpy.issubdtype(one.dtype, np.floating):
            continue
        change = _wide(one) - _wide(values[number])
        changes = [_wide(other[n]) - _wide(was[number]) for was, other in moved]
        limit = max(
            relative * max(largest(change), _LEAST_CHANGE),
            times * max(gap(other, change, 1.0) for other in changes),
            # A step may add twice, an update and a decay, and both sides round the sum.
            2 * steps * float(jax.numpy.finfo(one.dtype).eps) * largest(one),
        )
        limits[n] = min(limits[n], limit / max(largest(one), least))
    return limits


def _flat(state: State) -> list[np.ndarray]:
    return [value for group in state for value in group]


def _nudged(state: State, batches: list, half: bool, seed: int) -> tuple[State, list]:
    """Weights and inputs, changed by rounding."""
    rng = np.random.default_rng(seed)
    size = 2.0**-10 if half else 2.0**-22

    def nudge(leaf: np.ndarray) -> np.ndarray:
        if not jax.numpy.issubdtype(leaf.dtype, np.floating):
            return leaf
        wide = np.asarray(leaf, np.float64)
        return (wide * (1 + size * rng.choice([-1.0, 1.0], wide.shape))).astype(leaf.dtype)

    def of_input(batch: Any) -> Any:
        if not isinstance(batch, tuple):
            return jax.tree.map(nudge, batch)
        x, *rest = batch
        return (jax.tree.map(nudge, x), *rest)

    weights = [nudge(leaf) for leaf in state[0]]
    return [weights, *state[1:]], [of_input(batch) for batch in batches]


def gap(found: Any, expected: Any, scale: float | None = None, least: float = LEAST) -> float:
    """The largest difference of two arrays, relative to the largest expected value.

    A NaN or an infinity in the same place of both is no difference.

    Args:
        found: An array.
        expected: The expected array.
        scale: The largest value of the whole array, if these are parts of it.
        least: What the difference is relative to if this value is smaller.
    """
    found, expected = _wide(found), _wide(expected)
    if found.shape != expected.shape:
        return float("inf")
    scale = largest(expected) if scale is None else scale
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        off = np.max(np.abs(found - expected), initial=0.0, where=~same)
    return float("inf") if np.isnan(off) else float(off / max(scale, least))


def largest(array: Any) -> float:
    """The largest absolute value of an array, of those that are finite.

    Args:
        array: The array.
    """
    wide = _wide(array)
    return float(np.max(np.abs(wide), initial=0.0, where=np.isfinite(wide)))


def _wide(array: Any) -> np.ndarray:
    # A flipped bit may produce a NaN, and NumPy would warn.
    with np.errstate(invalid="ignore"):
        return np.asarray(array, np.float64)
