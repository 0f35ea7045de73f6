"""Compares every operation, layer and model of the tables on every mesh with one device.

    python tests/conformance/run.py [--kind operation ...] [--only PATTERN] [--without-repairs]
        [--cases N] [--threes N] [--spread] [--seed S] [--compiler libtpu] [--log FILE]

Each comparison runs in a process that is given up after a time: an abort of the compiler and a
hang are findings like a wrong value.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from processes import Finding, Worker, work_through

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_WORKER = Path(__file__).with_name("worker.py")
KINDS = (
    *("operation", "move", "assigned", "layer", "model", "pair"),
    *("replica_operation", "replica_layer", "assigned_layer", "assigned_pair"),
)
# Weeks of comparisons: made if they are named, best with --cases.
_LONG = ("assigned_layer", "assigned_pair")
_USUAL = tuple(kind for kind in KINDS if kind not in _LONG)
# Kinds of which one program computes several cases.
_SEVERAL = ("operation", "pair", "replica_operation")


def compare_all(
    jobs: list[dict],
    *,
    processes: int = 2,
    timeout: float = 120.0,
    together: int = 1,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Runs jobs in several processes; those of one case in a row share what one device computes.

    One program computes `together` operations, which is quicker; where not all of them are right
    they are compared one by one.
    """
    found: list[Finding] = []

    def note(finding: Finding) -> None:
        found.append(finding)
        tell(finding)

    def compare(worker: Worker, group: list[list[dict]]) -> None:
        for part in group:
            _compare_part(worker, part, note)

    groups = _groups(jobs, together)
    work_through(groups, compare, _WORKER, processes=processes, timeout=timeout)
    return found


def _groups(jobs: list[dict], together: int) -> list[list[list[dict]]]:
    """Jobs that one process makes in turn, each a list of those that one program computes."""
    by_case: dict[tuple, list[dict]] = {}
    for job in jobs:
        by_case.setdefault((job["kind"], job["rows"], job["case"]), []).append(job)
    groups: dict[tuple, list[list[dict]]] = {}
    for number, ((kind, rows, _), own) in enumerate(by_case.items()):
        step = together if kind in _SEVERAL else 1
        configurations = tuple((job["mesh"], job["plan"]) for job in own)
        parts = groups.setdefault((kind, rows, configurations, number // step), [[] for _ in own])
        for part, job in zip(parts, own):
            part.append(job)
    return list(groups.values())


def _compare_part(worker: Worker, part: list[dict], note: Callable[[Finding], None]) -> None:
    if len(part) > 1:
        together = {**part[0], "case": " + ".join(job["case"] for job in part)}
        finding = worker.compare(together)
        if finding.outcome == "right":
            for job in part:
                note(Finding(job, "right", finding.detail, finding.seconds / len(part)))
            return
    for job in part:
        note(worker.compare(job))


def listed(kinds: tuple[str, ...], only: str = "", repair: bool = True) -> list[dict]:
    """The jobs of some kinds, asked of a worker's own tables."""
    sys.path[:0] = [str(_WORKER.parent), str(_WORKER.parents[1])]
    import jobs

    chosen = jobs.all_jobs(kinds, repair)
    return [job.to_dict() for job in chosen if re.search(only, str(job))]


def threes(count: int, seed: int, repair: bool = True) -> list[dict]:
    """The jobs of so many cases of three operations that follow one another."""
    import jobs

    print(f"{count} of three operations, --seed {seed}", flush=True)
    return [job.to_dict() for job in jobs.jobs_of("pair", jobs.pairs.threes(count, seed), repair)]


def drawn(jobs: list[dict], count: int, seed: int) -> list[dict]:
    """The jobs of so many cases, drawn at random."""
    cases = sorted({job["case"] for job in jobs})
    chosen = set(random.Random(seed).sample(cases, min(count, len(cases))))
    print(f"{len(chosen)} of {len(cases)} cases, --seed {seed}", flush=True)
    return [job for job in jobs if job["case"] in chosen]


def rounds_of(jobs: list[dict], seed: int) -> list[list[dict]]:
    """Jobs in an order that may be stopped at any time: every case once, then again.

    A round has at most one job of a case, and kinds in turn; other meshes come first.
    """
    on_mesh, in_case = Counter(), Counter()

    def times_before(counts: Counter, *place: str) -> int:
        counts[place] += 1
        return counts[place] - 1

    shuffled = random.Random(seed).sample(jobs, len(jobs))
    shuffled.sort(key=lambda job: times_before(on_mesh, job["kind"], job["case"], job["mesh"]))
    rounds: dict[int, list[dict]] = {}
    for job in shuffled:
        rounds.setdefault(times_before(in_case, job["kind"], job["case"]), []).append(job)
    return [_kinds_in_turn(part) for part in rounds.values()]


def _kinds_in_turn(jobs: list[dict]) -> list[dict]:
    numbers: Counter = Counter()

    def number(job: dict) -> int:
        numbers[job["kind"]] += 1
        return numbers[job["kind"]]

    return sorted(jobs, key=number)


def main() -> int:
    """Prints what is not right, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="*", default=_USUAL, choices=KINDS)
    parser.add_argument("--only", default="", help="a regular expression over the jobs")
    parser.add_argument("--cases", type=int, help="so many, drawn at random; default: all")
    parser.add_argument("--threes", type=int, default=0, help="add so many of three operations")
    parser.add_argument(
        "--spread",
        action="store_true",
        help="every case on one mesh, then on others: to be stopped",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what is drawn")
    parser.add_argument(
        "--compiler",
        choices=("cpu", "libtpu"),
        default="cpu",
        help="whose programs are run: with libtpu those for a TPU slice, on simulated devices",
    )
    parser.add_argument("--chip", default="v5e", help="of the slice; default: v5e")
    parser.add_argument("--log", help="a file of findings: what stands in it is not run again")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--together", type=int, default=8, help="operations in one program")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--without-repairs", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()

    os.environ.update(KTD_COMPILER=arguments.compiler, KTD_CHIP=arguments.chip)

    def tell(finding):
        if arguments.log:
            with open(arguments.log, "a") as file:
                file.write(json.dumps(asdict(finding)) + "\n")
        if arguments.verbose or finding.outcome != "right":
            print(finding, flush=True)

    start = time.perf_counter()
    jobs = listed(tuple(arguments.kind), arguments.only, not arguments.without_repairs)
    if arguments.cases is not None:
        jobs = drawn(jobs, arguments.cases, arguments.seed)
    if arguments.threes:
        jobs += threes(arguments.threes, arguments.seed, not arguments.without_repairs)
    before = findings_in(arguments.log)
    done = [finding.job for finding in before]
    jobs = [job for job in jobs if job not in done]
    if arguments.log:
        print(f"{len(before)} were compared before, {len(jobs)} are left", flush=True)
    found = before
    for part in rounds_of(jobs, arguments.seed) if arguments.spread else [jobs]:
        found += compare_all(
            part,
            processes=arguments.processes,
            together=arguments.together,
            timeout=arguments.timeout,
            tell=tell,
        )
    print(table(found, time.perf_counter() - start))
    # What is refused is printed: an operation that the chip alone has, as docs/verify.md says.
    return int(any(finding.outcome not in ("right", "refused") for finding in found))


def findings_in(path: str | None) -> list[Finding]:
    """What a run before has found; an unfinished line at the end is left out."""
    if path is None or not Path(path).exists():
        return []
    lines = Path(path).read_text().split("\n")[:-1]
    return [Finding(**json.loads(line)) for line in lines]


def table(found: list[Finding], seconds: float) -> str:
    """How many comparisons of each kind are right on each mesh."""
    lines = [
        f"{'':24}{'compared':>10}{'right':>8}{'wrong':>8}{'refused':>8}{'error':>8}{'abort':>8}{'hang':>8}"
    ]
    groups: dict[str, Counter] = {}
    for finding in found:
        job = finding.job
        name = f"{job['kind']} {job['mesh']} {job['plan'] if job['plan'] != 'none' else ''}"
        groups.setdefault(name, Counter())[finding.outcome] += 1
    for name, counts in groups.items():
        numbers = [counts[o] for o in ("right", "wrong", "refused", "error", "abort", "hang")]
        row = "".join(f"{n:8}" for n in numbers)
        lines.append(f"{name:24}{sum(numbers):10}{row}")
    cases = {(f.job["kind"], f.job["case"]) for f in found}
    return "\n".join([*lines, f"{len(cases)} cases, {len(found)} comparisons, {seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
