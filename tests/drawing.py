"""Programs drawn at random, and their runs in processes.

Imports no Keras. What a program can be made of is in `random_models/options.py`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "conformance"))

from processes import Finding, Worker, work_through


@dataclass(frozen=True)
class Program:
    """A choice for every option, drawn from a seed."""

    seed: int
    choices: dict[str, Any] = field(hash=False)

    def __str__(self):
        words = ", ".join(f"{name}={value}" for name, value in self.choices.items())
        return f"seed {self.seed}: {words}"

    def to_dict(self) -> dict[str, Any]:
        """The program as plain values."""
        return asdict(self)


def run_all(
    programs: Sequence[Program],
    script: Path,
    *,
    processes: int = 2,
    timeout: float = 180.0,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Runs programs in processes of their own."""
    found: list[Finding] = []

    def compare(worker: Worker, program: Program) -> None:
        job = {**program.to_dict(), "name": str(program), "timeout": timeout}
        finding = worker.compare(job)
        found.append(finding)
        tell(finding)

    work_through(programs, compare, script, processes=processes, timeout=timeout)
    return found


def option(text: str, options: Mapping[str, Sequence]) -> tuple[str, Any]:
    """An option and its value, from `NAME=VALUE`."""
    name, _, value = text.partition("=")
    for each in options.get(name, ()):
        if str(each) == value:
            return name, each
    known = sorted({str(each) for each in options.get(name, options)})
    raise SystemExit(f"{text}: {name} is one of {known}")


def parser(description: str, programs: int, timeout: float) -> argparse.ArgumentParser:
    """The options of a command that draws programs."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--programs", type=int, default=programs)
    found.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    found.add_argument("--only", type=int, nargs="*", help="these seeds alone")
    found.add_argument("--given", nargs="*", default=[], metavar="OPTION=VALUE")
    found.add_argument("--processes", type=int, default=2)
    found.add_argument("--timeout", type=float, default=timeout)
    found.add_argument("--verbose", action="store_true")
    return found


def seeds(arguments: argparse.Namespace) -> Sequence[int]:
    """The seeds that a command is given."""
    first = arguments.seed
    return arguments.only or range(first, first + arguments.programs)


def run_as_asked(
    programs: Sequence[Program], script: Path, arguments: argparse.Namespace
) -> tuple[str, int]:
    """Runs programs as arguments say and prints what is not right; words and exit code."""

    def tell(finding: Finding) -> None:
        if arguments.verbose or finding.outcome != "right":
            print(f"{finding} ({finding.seconds:.0f} s)", flush=True)

    start = time.perf_counter()
    found = run_all(
        programs,
        script,
        processes=arguments.processes,
        timeout=arguments.timeout,
        tell=tell,
    )
    bad = sum(finding.outcome != "right" for finding in found)
    words = (
        f"{len(found)} programs from seed {programs[0].seed}, {bad} not right; "
        f"{time.perf_counter() - start:.0f} s"
    )
    return words, int(bool(bad))
