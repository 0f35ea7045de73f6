"""Cycles of a program compiled for TPU, read from the compiler's own final schedule.

One VLIW bundle issues per cycle unless the core stalls, so bundles times trip counts is the number
of cycles the compiler scheduled. Two kinds of loops multiply it: `while` loops of the program
(trip count in the condition) and the window loop inside a fusion (`iteration_bounds`).
"""

import dataclasses
import math
import pathlib
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) \(.*\{$")
_OP = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_WHILE = re.compile(r"\bwhile\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")
_CONSTANT = re.compile(r"s32\[\][^=]*constant\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BOUNDS = re.compile(r'"iteration_bounds":\[([^\]]*)\]')
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:((?: >)*) +\{")
_COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What the compiler planned for one train step on one core.

    Args:
        scheduled_cycles: Bundles times the trip counts of both kinds of loops.
        bundles: Bundles times the trip counts of `while` loops only: what the time loop costs,
            with all work outside of it counted nearly as nothing.
        estimated_cycles: The compiler's cost model, loops counted.
        collectives: Collective calls a step.
        collectives_in_loops: Those that lie inside a loop.
    """

    scheduled_cycles: int
    bundles: int
    estimated_cycles: int
    collectives: int
    collectives_in_loops: int

    def __str__(self):
        return (
            f"{self.scheduled_cycles / 1e6:.3f} M scheduled cycles, {self.bundles / 1e6:.3f} M "
            f"bundles, {self.estimated_cycles / 1e6:.3f} M "
            f"estimated cycles, {self.collectives} collectives ({self.collectives_in_loops} in "
            "loops)"
        )

    def to_dict(self):
        return dataclasses.asdict(self)


def _computations(text):
    found, lines, entry = {}, None, None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            lines = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif lines is not None:
            lines.append(line)
    return found, entry


def _weights(computations, entry):
    """How often each computation that is scheduled op by op runs."""
    runs, todo = {entry: 1}, [entry]
    while todo:
        name = todo.pop()
        for line in computations[name]:
            loop = _WHILE.search(line)
            if loop:
                constants = _CONSTANT.findall("\n".join(computations[loop[1]]))
                trips = max(map(int, constants), default=1)
                runs[loop[2]] = runs.get(loop[2], 0) + runs[name] * trips
                todo.append(loop[2])
    return runs


def _bundles(path, iterations):
    total = 0
    for line in path.read_text().splitlines():
        bundle = _BUNDLE.match(line)
        if bundle:
            total += iterations if ">" in bundle[1] else 1
    return total


def collectives(program: str) -> tuple[int, int]:
    """Collective calls outside of loops, and collective instructions inside."""
    computations, entry = _computations(program)
    runs = _weights(computations, entry)
    calls = {name: sum(bool(_COLLECTIVE.search(op)) for op in computations[name]) for name in runs}
    return calls[entry], sum(calls.values()) - calls[entry]


def read(program: str, dump: pathlib.Path) -> Schedule:
    """Adds up a compiled program.

    Args:
        program: `compiled.as_text()`.
        dump: The directory given to the compiler as `--xla_jf_dump_to`.
    """
    files = {}
    for path in sorted(dump.glob("*-final_bundles.txt")):
        name = re.match(r"\d+-(.*)-\d+-final_bundles", path.name)
        if name and "schedule-analysis" not in path.name:
            files[name[1]] = path
    computations, entry = _computations(program)
    scheduled = bundles = estimated = collectives = inside = 0
    for computation, runs in _weights(computations, entry).items():
        for line in computations[computation]:
            op = _OP.match(line)
            if not op:
                continue
            cycles, bounds = _CYCLES.search(line), _BOUNDS.search(line)
            iterations = math.prod(int(b) for b in re.findall(r"\d+", bounds[1])) if bounds else 1
            estimated += runs * int(cycles[1]) if cycles else 0
            if op[1] in files:
                scheduled += runs * _bundles(files[op[1]], iterations)
                bundles += runs * _bundles(files[op[1]], 1)
            if _COLLECTIVE.search(op[2]):
                collectives += runs
                inside += runs if computation != entry else 0
    return Schedule(scheduled, bundles, estimated, collectives, inside)
