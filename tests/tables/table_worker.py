"""Runs programs with tables: a line of JSON in, a line out."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "conformance"), str(HERE)]

import serving  # first: it chooses the devices  # noqa: E402

# isort: split
import numpy as np  # noqa: E402
from precision import in_float64  # noqa: E402
from table_options import TableProgram  # noqa: E402
from table_programs import results_of  # noqa: E402

# Relative to the largest value of each array. Three bits of bfloat16's eight are lost by rounding
# in another order; a lost row or a wrong gradient is far beyond.
TOLERANCES = {"float32": 1e-5, "float64": 1e-6, "mixed_bfloat16": 5e-2}
_LEAST = 1e-2


def compared(program: TableProgram) -> dict[str, Any]:
    """Whether a program gives on its mesh what it gives on one device, and the difference.

    Args:
        program: The program.
    """
    policy = program.choices["policy"]
    difference, where = _difference(program)
    if difference <= TOLERANCES[policy]:
        return {"right": True, "difference": difference, "where": where}
    # Rounding, amplified by training, is gone in float64; a fault is not.
    program = TableProgram(program.seed, {**program.choices, "policy": "float64"})
    with in_float64():
        precise, there = _difference(program)
    where = f"{where} ({precise:.1e} at {there} in float64)"
    right = precise <= TOLERANCES["float64"]
    return {"right": right, "difference": difference, "where": where}


def _difference(program: TableProgram) -> tuple[float, str]:
    expected, found = results_of(program, False), results_of(program, True)
    assert found.keys() == expected.keys(), f"{list(found)} and {list(expected)}"
    used = {path: words for name in found if "uses" in name for path, words in found[name].items()}
    gaps = {n: _gap(found[n], expected[n]) for n in expected if "uses" not in n}
    name = max(gaps, key=gaps.get)
    words = "; ".join(f"{path} {words.split(':')[0]}" for path, words in used.items())
    return gaps[name], f"{name} [{words}]"


def _gap(found: Any, expected: Any) -> float:
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert found.shape == expected.shape, f"{found.shape} and {expected.shape}"
    assert np.all(np.isfinite(expected)), "the program itself is not finite"
    gap = np.max(np.abs(found - expected), initial=0.0)
    gap = gap / max(np.max(np.abs(expected), initial=0.0), _LEAST)
    return float("inf") if np.isnan(gap) else float(gap)


if __name__ == "__main__":
    serving.serve(lambda job: compared(TableProgram(job["seed"], job["choices"])))
