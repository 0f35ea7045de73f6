"""Whether a drawn program gives on a mesh what it gives on one device."""

from collections.abc import Callable
from typing import Any

import numpy as np
from drawing import Program  # first: it adds the folder of `precision`

# isort: split
from precision import in_float64

# Relative to the largest value of each array. Three bits of bfloat16's eight are lost by rounding
# in another order; a lost row or a wrong gradient is far beyond.
TOLERANCES = {"float32": 1e-5, "float64": 1e-6, "mixed_bfloat16": 5e-2}
# What numbers are compared with if they are smaller.
LEAST = 1e-2


def compared(
    program: Program, difference: Callable[[Program], tuple[float, str]]
) -> dict[str, Any]:
    """Whether a program's results are the same, and the difference."""
    off, where = difference(program)
    if off <= TOLERANCES[program.choices["policy"]]:
        return {"right": True, "difference": off, "where": where}
    # Rounding, amplified by training, is gone in float64; a fault is not.
    with in_float64():
        precise, there = difference(Program(program.seed, {**program.choices, "policy": "float64"}))
    where = f"{where} ({precise:.1e} at {there} in float64)"
    return {"right": precise <= TOLERANCES["float64"], "difference": off, "where": where}


def gap(found: Any, expected: Any, least: float = LEAST) -> float:
    """The largest difference, relative to the largest value that was expected."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert found.shape == expected.shape, f"{found.shape} and {expected.shape}"
    assert np.all(np.isfinite(expected)), "the program itself is not finite"
    off = np.max(np.abs(found - expected), initial=0.0)
    off = off / max(np.max(np.abs(expected), initial=0.0), least)
    return float("inf") if np.isnan(off) else float(off)
