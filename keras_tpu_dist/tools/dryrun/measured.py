"""Reads a profile by Keras layer and kind of collective, and compares it with a dry run."""

import json
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.show.colours import BACKWARD, FORWARD
from keras_tpu_dist.show.page import Report, Table, TableCell, bar
from keras_tpu_dist.show.text import duration_text, span_text
from keras_tpu_dist.tools.dryrun.figures import Estimate
from keras_tpu_dist.tools.hlo import ProgramCost
from keras_tpu_dist.tools.hlo.collectives import KINDS, find
from keras_tpu_dist.tools.hlo.layers import layers_of
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program, parse
from keras_tpu_dist.training.profiles import MANIFEST

# The planes and lines of a trace, as XProf documents them: github.com/openxla/xprof, docs/.
_TPU_PLANE = re.compile(r"/device:TPU:(\d+)$")
_TPU_LINE = "XLA Ops"
_HOST_PLANE = "/host:CPU"
_NAME = re.compile(r"%?([\w.\-]+)")
# The instructions within them have their own events.
_CONTAINERS = frozenset(("while", "conditional", "call"))
_NO_TPU = "this was never tried with a trace of a TPU: it follows XProf's documentation"
_SIMULATED = (
    "these are times of simulated devices, which share processors: compare the shares, not the "
    "times"
)


@dataclass(frozen=True)
class _Instruction:
    """An instruction of a compiled program."""

    opcode: str
    op_name: str
    collective: str | None


@dataclass(frozen=True, repr=False)
class MeasuredSteps(Report):
    """The times in a profile: averages for one step on one device.

    Args:
        steps: The first and the last step of every trace.
        platform: `"cpu"` or `"tpu"`.
        device_kind: The chip.
        devices: The number of devices in the traces.
        step_s: Seconds of a step by the clock, including the input and the profiler's own work.
        busy_s: Seconds in which a device computed or waited in a collective.
        layers: The Keras layers and their seconds without collectives, the longest first.
        collectives: The kinds of collectives and their seconds, including waiting for others.
    """

    steps: tuple[tuple[int, int], ...]
    platform: str
    device_kind: str
    devices: int
    step_s: float
    busy_s: float
    layers: tuple[tuple[str, float], ...]
    collectives: tuple[tuple[str, float], ...]

    @property
    def num_steps(self) -> int:
        """The number of steps in the traces."""
        return sum(last - first + 1 for first, last in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The times as plain data."""
        return asdict(self) | {"layers": dict(self.layers), "collectives": dict(self.collectives)}

    def _title(self) -> str:
        steps = ", ".join(f"{first} to {last}" for first, last in self.steps)
        where = f"{self.devices} {self.platform} device{'' if self.devices == 1 else 's'}"
        return f"measured on {where}, steps {steps}: {duration_text(self.step_s)} a step"

    def _tables(self) -> Iterator[Table]:
        times = (("step, by the clock", self.step_s), ("a device was busy", self.busy_s))
        parts = {"times": times, "collectives": self.collectives, "layers": self.layers}
        for title, found in parts.items():
            if found:
                yield Table(title, (), [(name, duration_text(s)) for name, s in found])

    def _lines(self) -> list[str]:
        return [f"note: {_SIMULATED if self.platform == 'cpu' else _NO_TPU}"]


@dataclass(frozen=True)
class Beside:
    """A layer, or a kind of collective, measured and estimated, in seconds of a step.

    Attributes:
        name: The layer, or the kind of collective.
        measured: The measured seconds.
        estimated: The range of the dry run's estimate, or `None` if it has no times.
        operations: The share of the program's operations, if it has no times.
    """

    name: str
    measured: float
    estimated: tuple[float, float] | None
    operations: float = 0.0


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """A profile compared with a dry run.

    Attributes:
        profile: The measured times.
        compiled_for: The dry run's slice, or `"CPU"`.
        effort: The dry run's effort.
        step_range: The range of the dry run's estimate, in seconds of a step, or `None`.
        layers: By Keras layer, the longest first.
        collectives: By kind.
        calibration: The source of the dry run's calibration, or `""`.
    """

    profile: MeasuredSteps
    compiled_for: str
    effort: str
    step_range: tuple[float, float] | None
    layers: tuple[Beside, ...]
    collectives: tuple[Beside, ...]
    calibration: str = ""

    @property
    def ratio(self) -> tuple[float, float] | None:
        """The range of the measured step over the estimated one; `None` without an estimate."""
        if self.step_range is None:
            return None
        low, high = self.step_range
        return self.profile.step_s / high, self.profile.step_s / low

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return asdict(self) | {"profile": self.profile.to_dict(), "ratio": self.ratio}

    def _title(self) -> str:
        title = f"{self.profile._title()}; dry run for {self.compiled_for}"
        if self.step_range is None:
            return f"{title}, without times"
        span = span_text(*self.step_range, duration_text)
        return f"{title}, effort {self.effort}: {span}, estimate"

    def _lines(self) -> list[str]:
        notes = []
        if self.step_range is not None and self.effort == "quick":
            notes.append("with effort quick, the dry run's times are ranges")
        if self.step_range is not None:
            notes.append(
                "ratio: measured over estimated; a collective takes longer than its links need if "
                "it waits for other devices or runs beside a layer"
            )
        if self.profile.platform == "cpu" and self.compiled_for != "CPU":
            notes.append("the dry run and the profile are for different kinds of devices")
        if self.calibration:
            notes.append(f"the dry run is calibrated by {self.calibration}")
        return [*self.profile._lines(), *(f"note: {note}" for note in notes)]

    def _tables(self) -> Iterator[Table]:
        for title, found in (("layers", self.layers), ("collectives", self.collectives)):
            if found:
                yield _table(title, found)


def _shares(found: Iterable[Beside]) -> list[tuple[float, float]]:
    """The shares of the measured total and of the estimated total."""
    found = list(found)
    measured = sum(row.measured for row in found) or 1.0
    most = [row.estimated[1] if row.estimated else 0.0 for row in found]
    return [
        (row.measured / measured, high / sum(most) if sum(most) else row.operations)
        for row, high in zip(found, most, strict=True)
    ]


def _table(title: str, found: tuple[Beside, ...]) -> Table:
    shares = _shares(found)
    largest = max([1e-9, *(max(pair) for pair in shares)])

    def share(part: float, colour: str) -> TableCell:
        text = f"{part:.1%}"
        return TableCell(text, part, text + bar([(part / largest, colour, text)]))

    rows = [
        [
            row.name,
            TableCell(duration_text(row.measured), row.measured),
            share(mine, FORWARD),
            _estimated(row),
            share(other, BACKWARD),
            _ratio(row),
        ]
        for row, (mine, other) in zip(found, shares, strict=True)
    ]
    timed = any(row.estimated is not None for row in found)
    of_estimate = "share" if timed else "operations"
    header = (title.removesuffix("s"), "measured", "share", "estimated", of_estimate, "ratio")
    return Table(title, header, rows)


def _estimated(each: Beside) -> TableCell:
    if each.estimated is None:
        return TableCell("-")
    return TableCell(span_text(*each.estimated, duration_text), each.estimated[1])


def _ratio(each: Beside) -> TableCell:
    low, high = each.estimated or (0.0, 0.0)
    if not low:
        return TableCell("-")
    ends = each.measured / high, each.measured / low
    return TableCell(span_text(*ends, _ratio_text), ends[0])


def _ratio_text(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}"


def read_profile(directory: str | os.PathLike[str]) -> MeasuredSteps:
    """Reads a profile of `callbacks.Profile`: times by Keras layer and kind of collective.

    Args:
        directory: Its directory, or the callback itself.

    Returns:
        A `MeasuredSteps` with all processes that have a folder in the directory.

    Raises:
        ValueError: If there is no profile, or it is incomplete.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> measured = ktd.read_profile("profile")  # doctest: +SKIP
    >>> measured.layers[0]  # doctest: +SKIP
    ('dense', 0.0021)
    """
    given = getattr(directory, "directory", directory)
    if not isinstance(given, (str, os.PathLike)) or not str(given):
        raise value_error(
            "read_profile needs a directory that callbacks.Profile wrote.",
            received={"directory": directory},
            fix='Write for example ktd.read_profile("profile").',
        )
    folders = sorted(path.parent for path in Path(given).glob(f"process_*/*/{MANIFEST}"))
    if not folders:
        raise value_error(
            "read_profile needs a directory that callbacks.Profile wrote.",
            received=f"{os.fspath(given)!r}, which has no profile.",
            fix="Look for a WARNING of Profile in the log: its steps may never have run.",
        )
    return _added([_Traced(folder) for folder in folders])


def compare(
    profile: Any,
    cost: ProgramCost | None,
    estimate: Estimate | None,
    compiled_for: str,
    effort: str,
    calibration: str,
) -> Comparison:
    """Compares a profile with a dry run. See `DryRun.compare`.

    Args:
        profile: A `MeasuredSteps`, the callback, or its directory.
        cost: The dry run's cost.
        estimate: Its estimate, or `None`.
        compiled_for: Its slice, or `"CPU"`.
        effort: Its effort.
        calibration: Its calibration, or `""`.
    """
    measured = profile if isinstance(profile, MeasuredSteps) else read_profile(profile)
    return Comparison(
        profile=measured,
        compiled_for=compiled_for,
        effort=effort,
        step_range=None if estimate is None else estimate.span,
        layers=tuple(_layers_beside(cost, estimate, measured)),
        collectives=tuple(_collectives_beside(cost, estimate, measured)),
        calibration=calibration,
    )


def _layers_beside(
    cost: ProgramCost | None, estimate: Estimate | None, measured: MeasuredSteps
) -> Iterator[Beside]:
    costs = {} if cost is None else {c.layer: c for c in cost.layers}
    cycles = sum(c.cycles for c in costs.values())
    kernels = (0.0, 0.0) if estimate is None else estimate.kernels_span
    flops = sum(c.flops for c in costs.values()) or 1
    found = dict(measured.layers)
    for name in [
        *found,
        *(n for n, c in costs.items() if n not in found and (c.cycles or c.flops)),
    ]:
        cost_of = costs.get(name)
        estimated, operations = None, 0.0
        if estimate is not None and cycles:
            part = cost_of.cycles / cycles if cost_of else 0.0
            estimated = kernels[0] * part, kernels[1] * part
        if cost_of is not None:
            operations = cost_of.flops / flops
        yield Beside(name, found.get(name, 0.0), estimated, operations)


def _collectives_beside(
    cost: ProgramCost | None, estimate: Estimate | None, measured: MeasuredSteps
) -> Iterator[Beside]:
    estimated: dict[str, float] = defaultdict(float)
    moved: dict[str, float] = defaultdict(float)
    for c in () if cost is None else cost.collectives:
        estimated[c.kind] += c.total_seconds
        moved[c.kind] += c.bytes * c.times
    found, everything = dict(measured.collectives), sum(moved.values()) or 1
    for kind in [*found, *(k for k in moved if k not in found)]:
        seconds = estimated.get(kind, 0.0)
        span = None if estimate is None else (seconds, seconds)
        yield Beside(kind, found.get(kind, 0.0), span, moved.get(kind, 0.0) / everything)


class _Traced:
    """One trace of one process."""

    def __init__(self, folder: Path):
        described = _manifest(folder / MANIFEST)
        self.steps = tuple(described["steps"])
        self.seconds = float(described["seconds"])
        self.platform = str(described["platform"])
        self.device_kind = str(described["device_kind"])
        self._layer_of = layers_of(described["layers"])
        self._programs = frozenset(described["programs"].values())
        self._instructions = _instructions(folder)
        self.layers: dict[str, float] = defaultdict(float)
        self.collectives: dict[str, float] = defaultdict(float)
        self.seen: set[int] = set()
        for file in sorted(folder.glob("plugins/profile/*/*.xplane.pb")):
            self._read(_trace(file))

    def _read(self, data: Any) -> None:
        for device, name, stats, seconds in device_events(data):
            # Names of instructions are only unique within a program.
            ours = stats.get("hlo_module") is None or stats["hlo_module"] in self._programs
            known = (self._instructions.get(name) if ours else None) or _named(name)
            if known.opcode in _CONTAINERS:
                continue
            self.seen.add(device)
            if known.collective is not None:
                self.collectives[known.collective] += seconds
                continue
            op_name = str(stats.get("tf_op", "")).rstrip(":") or known.op_name
            self.layers[self._layer_of(op_name)] += seconds


def _trace(file: Path) -> Any:
    """The `jax.profiler.ProfileData` of a file."""
    # JAX creates the types on first use, and newer Pythons warn about it. If warnings are errors,
    # that would end the process.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        data = jax.profiler.ProfileData.from_file(str(file))
        events = (event for plane in data.planes for line in plane.lines for event in line.events)
        next((dict(event.stats) for event in events), None)
    return jax.profiler.ProfileData.from_file(str(file))


def device_events(data: Any) -> Iterator[tuple[int, str, dict[str, Any], float]]:
    """The operations in a trace, with their times without inner operations.

    On a TPU they are in the line "XLA Ops" of the planes "/device:TPU:0" and so on. For CPU devices
    they are the host's events with the statistic "hlo_op".

    Args:
        data: A `jax.profiler.ProfileData`, or an object with its planes, lines and events.

    Yields:
        The device's number, the instruction's name, the event's statistics, seconds.
    """
    for plane in data.planes:
        tpu = _TPU_PLANE.match(plane.name)
        if tpu is None and plane.name != _HOST_PLANE:
            continue
        for line in plane.lines:
            if tpu is not None and line.name != _TPU_LINE:
                continue
            events = []
            for event in line.events:
                stats = dict(event.stats)
                if tpu is None and "hlo_op" not in stats:
                    continue
                device = int(tpu[1]) if tpu is not None else int(stats.get("device_ordinal", 0))
                name = _NAME.match(str(stats.get("hlo_op", event.name)))
                start, took = float(event.start_ns), float(event.duration_ns)
                events.append((start, took, device, name[1] if name else "", stats))
            yield from _own_times(events)


def _own_times(events: list[tuple]) -> Iterator[tuple[int, str, dict[str, Any], float]]:
    """The events of a line, with their times without inner events."""
    open_: list[list] = []
    for start, took, device, name, stats in sorted(events, key=lambda e: (e[0], -e[1])):
        while open_ and open_[-1][0] <= start:
            yield tuple(open_.pop()[1:])  # pyright: ignore
        if open_:
            open_[-1][4] = max(0.0, open_[-1][4] - took * 1e-9)
        open_.append([start + took, device, name, stats, took * 1e-9])
    while open_:
        yield tuple(open_.pop()[1:])  # pyright: ignore


def _named(name: str) -> _Instruction:
    """An instruction from its name alone."""
    opcode = re.sub(r"(\.\d+)+$", "", name).removesuffix("-start").removesuffix("-done")
    return _Instruction(opcode, "", opcode if opcode in KINDS else None)


def _instructions(folder: Path) -> dict[str, _Instruction]:
    """The instructions of the programs that ran, by name."""
    found: dict[str, _Instruction] = {}
    for file in sorted(folder.glob("program_*.txt")):
        program = parse(file.read_text())
        for computation in program:
            for i in computation:
                kind = _collective(program, computation, i)
                found.setdefault(i.name, _Instruction(i.opcode, i.op_name, kind))
    return found


def _collective(program: Program, computation: Computation, i: Instruction) -> str | None:
    """The kind of collective that an instruction runs or waits for, or `None`."""
    ended = i.opcode.removesuffix("-done")
    if ended in KINDS:
        return ended
    inner = find(program, computation, i)
    # A kernel that also runs a collective counts for its layer.
    return None if inner is None or (i.opcode == "fusion" and inner[3]) else inner[2]


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a trace."""
    data: dict[str, Any] = {"platform": "", "device_kind": ""}
    try:
        data |= json.loads(path.read_text())
        first, last = data["steps"]
        whole = first <= last and data["seconds"] > 0 and data["devices"] > 0
        valid = whole and isinstance(data["layers"], list) and isinstance(data["programs"], dict)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        valid = False
    if valid:
        return data
    raise value_error(
        "A profile needs a valid manifest.",
        received=f"{str(path)!r}, which callbacks.Profile did not write in this form.",
        fix="Profile again: the run may have been killed in the middle of a trace.",
    )


def _added(traces: list[_Traced]) -> MeasuredSteps:
    """Averages several traces over their steps and devices."""
    # Every device of every process traced all of its steps.
    weight = sum(len(t.seen) * (t.steps[1] - t.steps[0] + 1) for t in traces) or 1
    layers: dict[str, float] = defaultdict(float)
    collectives: dict[str, float] = defaultdict(float)
    for t in traces:
        for total, part in ((layers, t.layers), (collectives, t.collectives)):
            for name, seconds in part.items():
                total[name] += seconds / weight
    steps = sum(t.steps[1] - t.steps[0] + 1 for t in traces)
    first = traces[0]
    by_steps = {t.steps: t for t in traces}
    return MeasuredSteps(
        steps=tuple(sorted(by_steps)),
        platform=first.platform,
        device_kind=first.device_kind,
        devices=max(1, sum(len(t.seen) for t in traces) // len(by_steps)),
        step_s=sum(t.seconds for t in traces) / steps,
        busy_s=sum(layers.values()) + sum(collectives.values()),
        layers=_longest(layers),
        collectives=_longest(collectives),
    )


def _longest(found: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(found.items(), key=lambda item: (-item[1], item[0])))
