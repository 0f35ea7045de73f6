"""Random programs on meshes against one device, until every pair of options has met.

    python tests/random_models/run.py [--programs 200] [--seed N] [--only SEED] [--processes 2]
    python tests/random_models/run.py --programs 20 --given trainer=replica model=deep

Each program runs in a process that is given up after a time; an abort and a hang are failures. A
seed that fails is named, and runs again by `--only SEED`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "conformance"), str(Path(__file__).parent)]

from options import (  # noqa: E402
    DETAILS,
    OPTIONS,
    Program,
    all_pairs,
    covering,
    drawn,
    is_legal,  # noqa: F401
    pairs_of,
)
from processes import Finding, Worker, work_through  # noqa: E402

_WORKER = Path(__file__).with_name("worker.py")


def run_all(
    programs: list[Program],
    *,
    processes: int = 2,
    timeout: float = 180.0,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Runs programs in several processes.

    Args:
        programs: The programs.
        processes: How many at a time.
        timeout: Seconds after which a program counts as a hang.
        tell: Called with each `Finding` as it comes.

    Returns:
        The findings, in no order.
    """
    found: list[Finding] = []

    def compare(worker: Worker, program: Program) -> None:
        job = {**program.to_dict(), "name": str(program), "timeout": timeout}
        finding = worker.compare(job)
        found.append(finding)
        tell(finding)

    work_through(programs, compare, _WORKER, processes=processes, timeout=timeout)
    return found


def _option(text: str) -> tuple[str, Any]:
    """An option and its value, from text."""
    name, _, value = text.partition("=")
    values = OPTIONS.get(name) or next((d[name] for d in DETAILS.values() if name in d), ())
    for each in values:
        if str(each) == value:
            return name, each
    raise SystemExit(f"{text}: {name} is one of {sorted({str(each) for each in values})}")


def main() -> int:
    """Prints what is not right, how many programs ran and how many pairs of options met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="the first; default: the time")
    parser.add_argument("--pairs-of-these", action="store_true", help="add none for the pairs")
    parser.add_argument("--only", type=int, nargs="*", help="these seeds alone")
    parser.add_argument(
        "--given", nargs="*", default=[], metavar="OPTION=VALUE", help="such as trainer=replica"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180.0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    fixed = [_option(text) for text in arguments.given]
    first = int(time.time()) if arguments.seed is None else arguments.seed
    if arguments.only:
        programs = [drawn(seed, fixed) for seed in arguments.only]
    else:
        base = [drawn(first + number, fixed) for number in range(arguments.programs)]
        more = not arguments.pairs_of_these and not fixed
        programs = covering(base, first + arguments.programs) if more else base

    def tell(finding: Finding) -> None:
        if arguments.verbose or finding.outcome != "right":
            print(finding, flush=True)

    start = time.perf_counter()
    found = run_all(programs, processes=arguments.processes, timeout=arguments.timeout, tell=tell)
    bad = [finding for finding in found if finding.outcome != "right"]
    pairs = set().union(*map(pairs_of, programs)) & all_pairs()
    print(
        f"{len(found)} programs from seed {programs[0].seed}, {len(bad)} not right; "
        f"{len(pairs)} of {len(all_pairs())} pairs of options; "
        f"{time.perf_counter() - start:.0f} s"
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
