"""The result of running the TPU compiler's program beside one device."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.show.page import Page, TableCell, definitions, document, table_of_cells
from keras_tpu_dist.show.text import duration_text, text_table

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Row:
    """One array that a launch computes.

    Args:
        name: The path of a variable, or the name of a result such as the loss.
        shape: Its shape.
        dtype: Its dtype.
        difference: The largest difference from one device, relative to the largest value of the
            array; the larger of that and the difference between devices that hold the same part.
        allowed: How much rounding explains.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: float
    allowed: float

    @property
    def equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.allowed

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return {**asdict(self), "shape": list(self.shape), "equal": self.equal}


@dataclass(frozen=True, repr=False)
class WrongPass(Printed):
    """The first pass of the compiler after which a program computes something else.

    Args:
        name: The pass; several if programs between them cannot be run; `""` if the program is
            wrong as soon as it is partitioned.
        right_after: The last pass after which it is right, or the partitioner.
        wrong_after: The first one after which it is not.
        tried: How many programs were run to find it.
        known: The upstream report and what it makes wrong, or `""` for a new fault.
    """

    name: str
    right_after: str
    wrong_after: str
    tried: int
    known: str

    def __str__(self) -> str:
        if not self.name:
            return f"wrong as soon as it is partitioned (after {self.right_after})"
        known = f"; a known fault, {self.known}" if self.known else "; not a fault that we know"
        return f"wrong from the pass {self.name} on{known}"


@dataclass(frozen=True, repr=False)
class Verification(Page):
    """The result of `keras_tpu_dist.verify` and `TPUStrategy.verify_run`.

    Args:
        rows: Every array, in the program's order: results, then variables.
        mode: `"train"`, `"evaluate"` or `"predict"`; `"run"` for a function of
            `strategy.verify_run`, which is compared with as many simulated devices.
        model: The name of the model, or of the function.
        topology: The slice, such as `"v5e:2x4"`.
        mesh: Mesh axes and their sizes.
        batch_size: Rows of all devices together; 0 if a function has no batch.
        steps: Steps of a launch.
        launches: How many launches ran.
        libtpu: The version of the compiler.
        as_on_chip: Whether products rounded their operands as the chip does.
        kernels: The names of hand-written kernels that ran in interpreted form.
        unlisted: Elementwise operations that this version has in no table, and so ran as XLA's CPU
            compiler has them.
        instructions: The number of instructions of the program.
        first_wrong_pass: The pass that makes the program wrong, if it is wrong and one is found.
        seconds: How long it took.

    Example:

    >>> verified = ktd.verify(build, strategy, batch_size=13)  # doctest: +SKIP
    >>> verified.equal, verified.largest_difference  # doctest: +SKIP
    (True, 1.2e-07)
    >>> [row.name for row in verified.wrong]  # doctest: +SKIP
    []
    """

    rows: tuple[Row, ...]
    mode: str
    model: str
    topology: str
    mesh: dict[str, int]
    batch_size: int
    steps: int
    launches: int
    libtpu: str
    as_on_chip: bool = False
    kernels: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    instructions: int = 0
    first_wrong_pass: WrongPass | None = None
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether every array is equal, but for rounding.

        With `as_on_chip`, whether results such as the loss do, within a few times the precision of
        bfloat16.
        """
        return all(row.equal for row in self.rows)

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The arrays that differ, the worst first."""
        wrong = [row for row in self.rows if not row.equal]
        return tuple(sorted(wrong, key=lambda row: -row.difference))

    @property
    def largest_difference(self) -> float:
        """The largest difference of an array."""
        return max((row.difference for row in self.rows), default=0.0)

    @property
    def upstream_report(self) -> str:
        """A text to report a new fault of the compiler with, or `""`."""
        found = self.first_wrong_pass
        if self.equal or found is None or found.known:
            return ""
        worst = self.wrong[0]
        return (
            f"libtpu {self.libtpu} computes a different result from the pass {found.name!r} on "
            f"(right after {found.right_after!r}). Program: {self._what()}, "
            f"{self.steps} step(s) a launch, mesh {self.mesh} on "
            f"{self.topology}. Array {worst.name} {worst.dtype}{list(worst.shape)} is off by "
            f"{worst.difference:.1e} of its largest value. Found by running the compiled HLO on "
            "simulated CPU devices; the program after each pass: compiler options xla_dump_to, "
            "xla_dump_hlo_pass_re=.*"
        )

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name, as plain data."""
        plain = {**vars(self), "rows": [row.to_dict() for row in self.rows]}
        plain["kernels"] = list(self.kernels)
        plain["unlisted"] = list(self.unlisted)
        plain["first_wrong_pass"] = self.first_wrong_pass and asdict(self.first_wrong_pass)
        return {
            **plain,
            "equal": self.equal,
            "largest_difference": self.largest_difference,
            "upstream_report": self.upstream_report,
        }

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self._facts()]
        shown = self.wrong[:_MOST_SHOWN]
        if shown:
            cells = [_cells(row) for row in shown]
            lines += ["", text_table(_HEADER, cells)]
            rest = len(self.wrong) - len(shown)
            lines += [f"and {rest} more"] if rest else []
        if self.upstream_report:
            lines += ["", f"to report: {self.upstream_report}"]
        return "\n".join([self._verdict(), *lines])

    def _what(self) -> str:
        if self.mode == "run":
            return f"strategy.run of {self.model}"
        return f"{self.model}, {self.mode}, {self.batch_size} rows"

    def _beside(self) -> str:
        return "simulated devices" if self.mode == "run" else "one device"

    def _verdict(self) -> str:
        what = "what the TPU compiler makes of it"
        if self.as_on_chip:
            results = [row.difference for row in self.rows if math.isfinite(row.allowed)]
            return (
                f"rounded as on the chip, results differ from float32 on {self._beside()} by "
                f"{max(results, default=0.0):.0e}, variables by up to "
                f"{self.largest_difference:.0e} of their largest value"
            )
        if self.equal:
            # Rounded up, and not below the tolerance of float32: the last bits differ from one
            # machine to another.
            digits = math.ceil(math.log10(max(self.largest_difference, 1e-5)))
            return f"equal: {what} computes the same as {self._beside()}, within {10.0**digits:.0e}"
        return f"NOT equal: {what} differs in {len(self.wrong)} of {len(self.rows)} arrays"

    def _facts(self) -> Iterable[tuple[str, str]]:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        yield "function" if self.mode == "run" else "model", self._what()
        yield "slice", f"{self.topology}, mesh {mesh}, libtpu {self.libtpu}"
        launches = f"{self.launches} launch" + ("es" if self.launches > 1 else "")
        yield (
            "ran",
            f"{launches} of {self.steps} step" + ("s" if self.steps > 1 else "") + ", "
            f"{self.instructions} instructions, in {duration_text(self.seconds)}",
        )
        if self.kernels:
            yield "interpreted", "kernels " + ", ".join(self.kernels)
        if self.unlisted:
            yield (
                "not in the table",
                f"{', '.join(self.unlisted)}: ran as XLA's CPU compiler has them, which may differ "
                "from the chip",
            )
        rounding = "as the chip rounds them" if self.as_on_chip else "in full precision"
        yield "products", f"{rounding}"
        if self.first_wrong_pass is not None:
            yield "found", str(self.first_wrong_pass)

    def _title(self) -> str:
        return f"{self.model} on {self.topology}"

    def _blocks(self) -> Iterable[str]:
        yield definitions([("verdict", self._verdict()), *self._facts()])
        yield table_of_cells(
            _HEADER, [[TableCell(text) for text in _cells(row)] for row in self.rows]
        )
        if self.upstream_report:
            yield definitions([("to report", self.upstream_report)])

    def _page(self) -> str:
        return document(self._title(), self._blocks())


_HEADER = ("array", "shape", "dtype", "difference", "rounding")


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        str(row.shape),
        row.dtype,
        f"{row.difference:.1e}",
        f"{row.allowed:.0e}" if math.isfinite(row.allowed) else "",
    ]
