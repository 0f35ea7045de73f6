"""Cycles of a program compiled for TPU, read from the compiler's own final schedule.

One VLIW bundle issues per cycle unless the core waits, so bundles times trip counts is the number
of cycles the compiler scheduled. Two kinds of loops multiply it: `while` loops of the program and
the window loop inside a fusion (`iteration_bounds`). Bundles do not include the time that a kernel
waits for HBM. The compiler's own estimate does, but it is made before arrays are placed in on-chip
memory, and adds some 2000 cycles to every kernel for memory that most no longer use. So there is a
third number: for every kernel the larger of its bundles and the cycles in which HBM can move its
bytes. The compiler has no estimate for hand-written kernels; the third number replaces it. Their
loops are multiplied by the trip count in the loop's exit test.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterable

from keras_tpu_dist.hardware.chips import CHIPS
from keras_tpu_dist.tools.hlo import cost, traffic
from keras_tpu_dist.tools.hlo.kernels import is_kernel
from keras_tpu_dist.tools.hlo.loops import Execution, executions
from keras_tpu_dist.tools.hlo.parse import Instruction, parse

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:((?: >)*) +\{")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test")
_NESTED = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:((?: ?>)*) +\{")
_EMPTY = re.compile(r":\s+\{\}")
_WAIT = re.compile(r"dma\.done\.wait (?:\(%\w+\), )?[^,]+, (\d+) ")
_WAIT_UNSIZED = re.compile(r"dma\.done\.wait (?:\(%\w+\), )?[^(),]+, %")
_TO_SCALARS = re.compile(r"dma\.vmem_to_smem[^;}]*?size_in_granules=\*/(\d+)")
_STAGE = re.compile(r"stage = (\d+)")
_GRANULE = 32  # bytes
_WINDOWS = re.compile(r'"iteration_bounds":\[([^\]]*)\]')
_DUMPED = re.compile(r"\d+-(.*)-\d+-final_bundles")
_COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What the compiler planned for one train step on one core.

    Args:
        scheduled_cycles: Bundles times the trip counts of both kinds of loops.
        bundles: Bundles times the trip counts of the time loop only, whose work it tells; all
            outside of it is counted nearly as nothing.
        estimated_cycles: The compiler's cost model, loops counted; of hand-written kernels, which
            it does not know, the same as in `bound_cycles`.
        bound_cycles: Of every kernel the larger of its scheduled cycles and the time HBM needs.
        hbm_bytes: Bytes read from and written to HBM, loops counted.
        collectives: Collective calls a step.
        collectives_in_loops: Collectives inside a loop.
    """

    scheduled_cycles: int
    bundles: int
    estimated_cycles: int
    bound_cycles: int
    hbm_bytes: int
    collectives: int
    collectives_in_loops: int

    def __str__(self):
        return (
            f"{self.scheduled_cycles / 1e6:.3f} M scheduled cycles, {self.bound_cycles / 1e6:.3f} "
            f"M with HBM, {self.bundles / 1e6:.3f} M bundles, {self.estimated_cycles / 1e6:.3f} M "
            f"estimated cycles, {self.hbm_bytes / 1e6:.1f} MB of HBM, {self.collectives} "
            f"collectives ({self.collectives_in_loops} in loops)"
        )

    def to_dict(self):
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One scheduled kernel.

    Args:
        name: Its name in the program.
        runs: How often a step runs it.
        bundles: Its bundles; of a hand-written kernel with its loop counted.
        scheduled: The same with its window loop counted.
        estimated: The compiler's estimate.
        hbm_bytes: Bytes it moves to and from HBM.
        hbm_cycles: Cycles in which HBM can move them.
        result: Its result's type.
    """

    name: str
    runs: int
    bundles: int
    scheduled: int
    estimated: int
    hbm_bytes: int
    hbm_cycles: int
    result: str

    @property
    def bound(self) -> int:
        """The larger of its bundles and the cycles HBM needs."""
        if not self.bundles:  # a copy that runs beside the kernels
            return 0
        return max(self.scheduled, self.hbm_cycles)

    def __str__(self):
        return (
            f"{self.runs:6} x {self.name:46} {self.scheduled:8} cycles, {self.bound:8} with HBM, "
            f"{self.estimated:8} estimated  {self.result}"
        )


def collectives(program: str) -> tuple[int, int]:
    """Collective calls outside of loops, and collective instructions inside."""
    parsed = parse(program)
    found = [run for run in executions(parsed).executions if _is_collective(run.instruction)]
    outside = sum(run.computation is parsed.entry for run in found)
    return outside, len(found) - outside


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in _COLLECTIVES


def _bundles(path: pathlib.Path) -> tuple[int, int, int]:
    """Bundles outside of the window loop, and inside; how often that is run by its exit test."""
    text = path.read_text()
    found = [m[1] for m in map(_BUNDLE.match, text.splitlines()) if m]
    inside = sum(">" in depth for depth in found)
    exits = [int(n) for n in _EXIT.findall(text)]
    return len(found) - inside, inside, exits[0] if len(exits) == 1 else 1


@dataclasses.dataclass
class _Loop:
    """Bundles of a kernel at one depth, and the loops inside."""

    depth: int
    trips: int | None = None
    # A loop that overlaps its transfers runs so many times more than it has blocks.
    stages: int = 0
    bundles: int = 0
    granules: int = 0
    unsized: bool = False
    inside: list["_Loop"] = dataclasses.field(default_factory=list)

    def cycles(self) -> int:
        return (self.trips or 1) * (self.bundles + sum(loop.cycles() for loop in self.inside))

    def bytes(self) -> int:
        trips = max(1, (self.trips or 1) - self.stages)
        return trips * (_GRANULE * self.granules + sum(loop.bytes() for loop in self.inside))

    def depends_on_data(self) -> bool:
        unknown = self.trips is None and self.granules > 0
        return self.unsized or unknown or any(loop.depends_on_data() for loop in self.inside)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """What the compiler schedules of one kernel, all of its loops counted.

    Args:
        cycles: Bundles, one a cycle.
        bytes: What it transfers between HBM and on-chip memory, and waits for.
        depends_on_data: Whether transfers run as often, or are as large, as data says; they count
            once, or nothing.
    """

    cycles: int
    bytes: int
    depends_on_data: bool


def scheduled(path: pathlib.Path, blocks: int = 0) -> Scheduled:
    """Reads the final bundles of one kernel, loops within loops included.

    Args:
        path: What the compiler dumped.
        blocks: How many blocks it transfers one after the other, if that is known.
    """
    top = _Loop(0, trips=1)
    stack = [top]
    for line in path.read_text().splitlines():
        if bundle := _NESTED.match(line):
            # Empty bundles do not say how deep they are.
            depth = stack[-1].depth if _EMPTY.search(line) else bundle[2].count(">")
            starts = bundle[1] == "LB"
            while stack[-1].depth > depth or (starts and stack[-1].depth == depth):
                stack.pop()
            if starts:
                stages = max(map(int, _STAGE.findall(line)), default=0)
                stack.append(_Loop(depth, stages=stages))
                stack[-2].inside.append(stack[-1])
            stack[-1].bundles += 1
        if "BoundsCheck" in line:
            continue
        stack[-1].unsized |= _WAIT_UNSIZED.search(line) is not None
        stack[-1].granules += sum(map(int, _WAIT.findall(line)))
        stack[-1].granules -= sum(map(int, _TO_SCALARS.findall(line)))
        if test := _EXIT.search(line):
            stack[-1].trips = int(test[1])
    if blocks and len(top.inside) == 1 and top.inside[0].trips is not None:
        top.inside[0].stages = max(top.inside[0].trips - blocks, 0)
    return Scheduled(top.cycles(), top.bytes(), top.depends_on_data())


def scheduled_kernels(runs: Iterable[Execution], dump: pathlib.Path) -> dict[str, Scheduled]:
    """The schedules of kernels that run, by name.

    Args:
        runs: What the program runs.
        dump: The directory given to the compiler as `--xla_jf_dump_to`.
    """
    instructions = [run.instruction for run in runs]
    blocks = {i.name: _blocks(i) for i in instructions}
    dumped = {}
    for path in sorted(dump.glob("*-final_bundles.txt")):
        name = _DUMPED.match(path.name)
        if name and "schedule-analysis" not in path.name:
            dumped[name[1]] = scheduled(path, blocks.get(name[1], 0))
    twins = {_twin(i): dumped[i.name] for i in instructions if i.name in dumped}
    found = {i.name: dumped.get(i.name) or twins.get(_twin(i)) for i in instructions}
    return {name: kernel for name, kernel in found.items() if kernel}


def _blocks(instruction: Instruction) -> int:
    """Runs of the window loop inside a fusion, 0 where the program does not say."""
    windows = _WINDOWS.search(instruction.attributes)
    return math.prod(map(int, re.findall(r"\d+", windows[1]))) if windows else 0


def _twin(instruction: Instruction) -> tuple:
    """Equal for kernels that are compiled once and dumped under the name of only one of them."""
    stem = re.sub(r"[.\d]+(clone)?[.\d]*$", "", instruction.name)
    return stem, instruction.shapes, cost.estimated_cycles(instruction)


def kernels(program: str, dump: pathlib.Path, chip: str = "v5e") -> list[Kernel]:
    """All kernels of a compiled program with their schedules.

    Args:
        program: `compiled.as_text()`.
        dump: The directory given to the compiler as `--xla_jf_dump_to`.
        chip: What it was compiled for.
    """
    parsed = parse(program)
    bytes_per_cycle = CHIPS[chip].hbm_bandwidth / CHIPS[chip].clock
    dumped = {}
    for path in sorted(dump.glob("*-final_bundles.txt")):
        name = _DUMPED.match(path.name)
        if name and "schedule-analysis" not in path.name:
            dumped[name[1]] = _bundles(path)
    runs = executions(parsed).executions
    twins = {
        _twin(run.instruction): dumped[run.instruction.name]
        for run in runs
        if run.instruction.name in dumped
    }
    found = []
    for run in runs:
        instruction = run.instruction
        estimated = cost.estimated_cycles(instruction)
        moved = traffic.hbm_bytes(parsed, run.computation, instruction)
        outside, inside, exit_at = dumped.get(
            instruction.name, twins.get(_twin(instruction), (0, 0, 1)) if estimated else (0, 0, 1)
        )
        if not (estimated or outside or inside or moved):
            continue
        trips = _blocks(instruction) or 1
        by_hand = is_kernel(instruction)
        if by_hand:
            trips = exit_at
        scheduled = outside + inside * trips
        hbm_cycles = math.ceil(moved / bytes_per_cycle)
        found.append(
            Kernel(
                name=instruction.name,
                runs=run.times,
                bundles=scheduled if by_hand else outside + inside,
                scheduled=scheduled,
                estimated=max(scheduled, hbm_cycles) if by_hand else estimated,
                hbm_bytes=moved,
                hbm_cycles=hbm_cycles,
                result=str(instruction).split(" = ")[-1].split(" ")[0],
            )
        )
    return found


def read(program: str, dump: pathlib.Path, chip: str = "v5e") -> Schedule:
    """Adds up a compiled program; arguments as for `kernels`."""
    found = kernels(program, dump, chip)
    outside, inside = collectives(program)
    return Schedule(
        scheduled_cycles=sum(k.runs * k.scheduled for k in found),
        bundles=sum(k.runs * k.bundles for k in found),
        estimated_cycles=sum(k.runs * k.estimated for k in found),
        bound_cycles=sum(k.runs * k.bound for k in found),
        hbm_bytes=sum(k.runs * k.hbm_bytes for k in found),
        collectives=outside + inside,
        collectives_in_loops=inside,
    )
