"""Random models with tables on meshes, by rows and by width, against one device.

    python tests/tables/drawn.py [--programs 100] [--seed N] [--only SEED ...] [--processes 2]
    python tests/tables/drawn.py --programs 20 --given tables=width model=tied

Each program runs in a process that is given up after a time; an abort and a hang are failures. A
seed that fails is named, and runs again by `--only SEED`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "conformance"), str(HERE)]

from processes import Finding, Worker, work_through  # noqa: E402
from table_options import OPTIONS, TableProgram, drawn  # noqa: E402


def run_all(
    programs: Sequence[TableProgram],
    *,
    processes: int = 1,
    timeout: float = 240.0,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Runs programs in processes of their own.

    Args:
        programs: The programs.
        processes: How many at a time.
        timeout: Seconds after which a program counts as a hang.
        tell: Called with each `Finding` as it comes.

    Returns:
        The findings, in no order.
    """
    found: list[Finding] = []

    def compare(worker: Worker, program: TableProgram) -> None:
        job = {"seed": program.seed, "choices": program.choices, "name": str(program)}
        finding = worker.compare(job)
        found.append(finding)
        tell(finding)

    work_through(programs, compare, HERE / "table_worker.py", processes=processes, timeout=timeout)
    return found


def _option(text: str) -> tuple[str, object]:
    """An option and its value, from text."""
    name, _, value = text.partition("=")
    for each in OPTIONS.get(name, ()):
        if str(each) == value:
            return name, each
    known = sorted({str(each) for each in OPTIONS.get(name, OPTIONS)})
    raise SystemExit(f"{text}: {name} is one of {known}")


def main() -> int:
    """Prints what is not right, and how many programs ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="the first; default: the time")
    parser.add_argument("--only", type=int, nargs="*", help="these seeds alone")
    parser.add_argument("--given", nargs="*", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    first = int(time.time()) if arguments.seed is None else arguments.seed
    seeds = arguments.only or range(first, first + arguments.programs)
    given = dict(map(_option, arguments.given))
    programs = [drawn(seed, given) for seed in seeds]

    def tell(finding: Finding) -> None:
        if arguments.verbose or finding.outcome != "right":
            print(f"{finding} ({finding.seconds:.0f} s)", flush=True)

    start = time.perf_counter()
    found = run_all(programs, processes=arguments.processes, timeout=arguments.timeout, tell=tell)
    bad = sum(finding.outcome != "right" for finding in found)
    seconds = time.perf_counter() - start
    print(f"{len(found)} programs from seed {programs[0].seed}, {bad} not right; {seconds:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
