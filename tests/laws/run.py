"""Runs the laws: all of them, or a sample.

    python tests/laws/run.py [--only PATTERN] [--cases N] [--seed S] [--drawn 1] [--list]
    python tests/laws/run.py --verbose [--after FILE] | tee -a FILE

Each case runs in a process that is given up after a time: an abort and a hang are failures. The
second form goes on after a run that ended early: it leaves out what is right in its output.
"""

import argparse
import itertools
import os
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "conformance"), str(TESTS)]

from processes import Finding, Worker, work_through  # noqa: E402

WORKER = Path(__file__).with_name("worker.py")
# Compiled programs stay in a process, some 20 MB a case.
_CASES_OF_A_PROCESS = 150


def begin() -> None:
    """What a process does before it imports the laws."""
    import serving  # noqa: F401


def run_all(
    jobs, *, processes=2, timeout=180.0, tell=lambda finding: None, worker=WORKER
) -> list[Finding]:
    """Runs jobs in processes; those of one subject run in one process, and share its reference."""
    found: list[Finding] = []

    def compare(process: Worker, group: list[dict]) -> None:
        for job in group:
            finding = process.compare(job)
            found.append(finding)
            tell(finding)
        if process.answered > _CASES_OF_A_PROCESS:
            process.stop()

    worlds: dict[str, dict[str, list[dict]]] = {}
    for job in jobs:
        worlds.setdefault(job["world"], {}).setdefault(job["subject"], []).append(job)
    for world, groups in worlds.items():
        os.environ["KTD_LAWS_WORLD"] = world
        work_through(groups.values(), compare, worker, processes=processes, timeout=timeout)
    return found


def listed(only: str = "", drawn: int = 1, seed: int = 0) -> list[dict]:
    """The jobs whose names match a pattern."""
    from laws import listing

    return [job for job in listing.all_jobs(drawn, seed) if re.search(only, job["name"])]


def main() -> int:
    """Prints what is not right, and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression over the cases")
    parser.add_argument("--cases", type=int, help="so many, drawn at random; default: all")
    parser.add_argument("--drawn", type=int, default=1, help="drawn cases of each subject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180.0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--after", type=Path, help="the output of a run that ended early")
    arguments = parser.parse_args()
    start = time.perf_counter()
    begin()
    jobs = listed(arguments.only, arguments.drawn, arguments.seed)
    if arguments.cases is not None and arguments.cases < len(jobs):
        chosen = set(random.Random(arguments.seed).sample(range(len(jobs)), arguments.cases))
        jobs = [job for number, job in enumerate(jobs) if number in chosen]
    if arguments.after is not None:
        right = _right_in(arguments.after)
        jobs = [job for job in jobs if job["name"] not in right]
    if arguments.list:
        print(*(job["name"] for job in jobs), sep="\n")
        print(len(jobs), "cases")
        return 0

    told = itertools.count(1)

    def tell(finding: Finding) -> None:
        if (number := next(told)) % 100 == 0:
            print(f"{number} of {len(jobs)}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
        if arguments.verbose or finding.outcome != "right":
            print(f"{finding} ({finding.seconds:.0f} s)", flush=True)

    found = run_all(jobs, processes=arguments.processes, timeout=arguments.timeout, tell=tell)
    print(_table(found))
    bad = sum(finding.outcome != "right" for finding in found)
    print(f"{len(found)} cases, {bad} broken; {time.perf_counter() - start:.0f} s, seed", end=" ")
    print(arguments.seed)
    return int(bool(bad))


def _right_in(path: Path) -> set[str]:
    """The names of the cases that were right in a run, from what it printed."""
    lines = path.read_text().splitlines() if path.exists() else []
    said = [line.removeprefix("right  ") for line in lines if line.startswith("right  ")]
    return {line.partition(": ")[0] for line in said}


def _table(found: list[Finding]) -> str:
    counts: dict[str, Counter] = {}
    for finding in found:
        kind = finding.job["subject"].partition("/")[0]
        counts.setdefault(kind, Counter())[finding.outcome] += 1
    lines = []
    for kind, outcomes in counts.items():
        words = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
        lines.append(f"{kind:14} {words}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
