"""Tests matrix products on every device: their precision, and the same bits when repeated."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_tpu_dist.tools.checkup.bench import Bench, Job, odd_ones, rows_of, same_bits, spread
from keras_tpu_dist.tools.checkup.bounds import precision
from keras_tpu_dist.tools.checkup.report import (
    LEAVE_OUT,
    CheckPart,
    Problem,
    corrupts,
    numbered,
)

# Unit roundoffs: half of the relative distance between neighbouring numbers.
_U16, _U32 = 2.0**-8, 2.0**-24
# The relative error from rounding the operands of a float32 product, by platform and precision. A
# TPU computes it by bfloat16 products: "default" rounds both operands once; "high" (three passes)
# preserves 16 bits of an operand in two parts and leaves out the product of the small parts;
# "highest" ("float32", six passes) preserves 24 bits in three parts. Sources: the documentation of
# `jax_default_matmul_precision` and `jax.lax.Precision` ("On TPU ... bfloat16 ... three passes ...
# six passes"); Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
# higher-precision computations", 2019, for the error of splitting into parts.
_LOST = {
    ("tpu", "default"): 2 * _U16 + _U16**2,
    ("tpu", "high"): 4 * _U16**2,
    ("tpu", "highest"): 8 * _U16**3,
}
# The next shorter dtype, and the relative error from rounding an operand to it.
_SHORTER = {"float32": ("bfloat16", _U16), "bfloat16": ("float8_e4m3fn", 2.0**-4)}


@dataclass(frozen=True)
class Kind:
    """A kind of product.

    Args:
        words: Its name in reports.
        dtype: The operands' dtype.
        result: The result's dtype.
        precision: A `jax.lax.Precision`, or `None` for the configured one.
        lost: The relative error from rounding operands; 0 if they are not rounded.
        exact: Whether the result is exact, as for integers.
    """

    words: str
    dtype: str
    result: str
    precision: Any = None
    lost: float = 0.0
    exact: bool = False

    def allowed(self, terms: int) -> float:
        """The largest error of a correct result, relative to the product of absolute values.

        The error of a float32 sum is at most the number of terms times the unit roundoff, in any
        order of summation: Higham, "Accuracy and stability of numerical algorithms", 3.1.

        Args:
            terms: The number of terms of a sum.
        """
        return 0.0 if self.exact else self.lost + (terms + 2) * _U32


def kinds(platform: str) -> list[Kind]:
    """The kinds of products to check.

    Args:
        platform: `"tpu"`, `"cpu"` or `"gpu"`.
    """
    configured = precision()
    lost = _LOST.get((platform, configured), 0.0)
    passes = {"default": "1 bfloat16 pass", "high": "3 passes", "highest": "6 passes"}[configured]
    words = f"float32 ({passes})" if platform == "tpu" else "float32"
    found = [Kind(words, "float32", "float32", None, lost)]
    if platform != "cpu":
        highest = _LOST.get((platform, "highest"), 0.0)
        exact = lax.Precision.HIGHEST
        found.append(Kind("float32 (highest)", "float32", "float32", exact, highest))
    found.append(Kind("bfloat16", "bfloat16", "float32"))
    found.append(Kind("int8", "int8", "int32", exact=True))
    return found


def products(bench: Bench) -> CheckPart:
    """Compares a product in each dtype, on each device, with float64 on the host.

    Args:
        bench: The check's shared state.
    """
    size = 512 if bench.platform == "tpu" else 192
    problems: list[Problem] = []
    figures: dict[str, Any] = {}
    for kind in kinds(bench.platform):
        worst, found = _of_kind(bench, kind, size)
        problems += found
        figures[kind.words] = {"largest error": worst, "allowed": kind.allowed(size)}
    names = ", ".join(figures)
    words = f"{names}: same as float64 within rounding, same bits when repeated and on all devices"
    if problems:
        words = f"{names}, compared with float64, twice on every device"
    return CheckPart("products", words, tuple(problems), figures)


def _of_kind(bench: Bench, kind: Kind, size: int) -> tuple[float, list[Problem]]:
    rng = np.random.default_rng(0)
    a, b = (_drawn(rng, kind.dtype, size) for _ in range(2))
    mesh = bench.row
    arrays = [spread(mesh, lambda _, of=operand: of) for operand in (a, b)]
    program, job = _program(mesh, kind), Job("product", dtype=kind.words)
    first, second = (rows_of(bench.launches.run(job, program, *arrays)) for _ in range(2))
    wide = [np.asarray(operand, np.float64) for operand in (a, b)]
    exact, scale = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
    errors = {number: _error(row[0], exact, scale) for number, row in first.items()}
    marks = {number: zlib.crc32(row.tobytes()) for number, row in first.items()}
    unsteady = [n for n, row in first.items() if not same_bits(row, second[n])]
    errors = bench.by_device(f"errors in {kind.words}", errors)
    marks = bench.by_device(f"bits in {kind.words}", marks)
    unsteady = bench.some(f"repeats in {kind.words}", unsteady)
    return max(errors.values()), list(_problems(kind, kind.allowed(size), errors, marks, unsteady))


def _error(found: np.ndarray, exact: np.ndarray, scale: np.ndarray) -> float:
    off = np.abs(np.asarray(found, np.float64) - exact) / scale
    return float(np.max(off)) if np.all(np.isfinite(off)) else float("inf")


def _drawn(rng: np.random.Generator, dtype: str, size: int) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-127, 128, (size, size)).astype(np.int8)
    return rng.normal(size=(size, size)).astype(jax.numpy.dtype(dtype))


def _program(mesh: Any, kind: Kind) -> Any:
    def product(a, b):
        return lax.dot_general(
            a[0],
            b[0],
            (((1,), (0,)), ((), ())),
            precision=kind.precision,
            preferred_element_type=kind.result,
        )[None]

    spec = PartitionSpec("device")
    return jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(spec, spec), out_specs=spec))


def _problems(
    kind: Kind,
    allowed: float,
    errors: dict[int, float],
    marks: dict[int, int],
    unsteady: list[int],
) -> Iterator[Problem]:
    if unsteady:
        yield corrupts(f"the same product in {kind.words}", unsteady)
    wrong = sorted(n for n, error in errors.items() if error > allowed)
    if wrong:
        worst = max(errors[n] for n in wrong)
        yield _imprecise(kind, allowed, wrong, worst, everywhere=len(wrong) == len(errors))
    odd = [n for n in odd_ones(marks) if n not in wrong and n not in unsteady]
    if odd:
        yield Problem(
            f"{numbered(odd)}: the product in {kind.words} has different bits from the other "
            "devices, all within rounding",
            "The devices do not compute in the same way: the chips or their programs differ. "
            "Replicated weights drift apart.",
            "Leave these devices out, TPUStrategy(devices=[...]), or report them.",
            tuple(odd),
        )


def _imprecise(
    kind: Kind, allowed: float, wrong: list[int], worst: float, everywhere: bool
) -> Problem:
    name, lost = _SHORTER.get(kind.dtype, ("", 0.0))
    lower = worst <= 2 * lost + lost**2
    like = f", as if operands were rounded to {name}" if lower else ""
    off = "is not finite" if worst == float("inf") else f"differs from float64 by {worst:.1e}"
    what = (
        f"{numbered(wrong)}: the product in {kind.words} {off}; rounding explains "
        f"{allowed:.1e}{like}"
    )
    if everywhere:
        return Problem(
            what,
            "All devices are affected: the cause is a setting or the compiler, not a chip."
            + (" Products are computed in a lower precision than configured." if lower else ""),
            "Check XLA_FLAGS, LIBTPU_INIT_ARGS and jax_default_matmul_precision; try another "
            "jaxlib or libtpu.",
            tuple(wrong),
        )
    return Problem(
        what,
        "Its arithmetic is wrong: its results spoil all weights within a step.",
        LEAVE_OUT,
        tuple(wrong),
    )
