"""Keras's own tests under the strategy: what Keras promises must hold on a mesh.

    python tests/keras_own/run.py [--distribution ours ours-2d stock none]
        [--package trainers callbacks models saving optimizers metrics losses layers ops]
        [--file PART_OF_A_PATH] [-k EXPRESSION] [--timeout S] [--every-failure]

The installed Keras's test files run in processes of their own, with the distribution active in
every test: `ours` is `TPUStrategy()` on 8 simulated devices, `ours-2d` the same on a mesh of 4
by 2, `stock` Keras's `DataParallel`, `none` no distribution. A test that takes longer than the
timeout, or that ends its process, has failed. Failures that are not on the list (`exceptions.py`)
run once more without a distribution: those that fail there too are Keras's own. The exit code is
1 if a failure under `ours` or `ours-2d` is neither.
"""

import argparse
import sys
import time

import suite
import verdict

DISTRIBUTIONS = ("ours", "ours-2d", "stock", "none")


def check(files, distribution, *, name="", timeout=120.0, expression="") -> verdict.Verdict:
    """Runs test files under a distribution and judges what failed."""
    start = time.perf_counter()
    outcomes = suite.run_files(files, distribution, timeout=timeout, expression=expression)
    without = outcomes if distribution == "none" else ()
    doubtful = verdict.unexplained(outcomes)
    if distribution in verdict.OURS and doubtful:
        again = [file for file in files if any(test.startswith(file) for test in doubtful)]
        without = suite.run_files(again, "none", timeout=timeout, only=doubtful)
    seconds = time.perf_counter() - start
    return verdict.judge(name, distribution, outcomes, without, seconds)


def main() -> int:
    """Prints each package's failures as they come, and the table."""
    arguments = _arguments()
    verdicts = []
    for package in arguments.package:
        files = suite.files_of(package, arguments.file)
        for distribution in arguments.distribution if files else ():
            found = check(
                files,
                distribution,
                name=package,
                timeout=arguments.timeout,
                expression=arguments.k,
            )
            verdicts.append(found)
            _tell(found, arguments.every_failure)
    print(verdict.table(verdicts))
    return int(any(v.distribution in verdict.OURS and not v.good for v in verdicts))


def _tell(found: verdict.Verdict, every_failure: bool) -> None:
    # Hundreds fail under stock Keras; they are counted unless asked for.
    if found.distribution != "stock" or every_failure:
        print(str(found) or f"{found.package} under {found.distribution}: as expected", flush=True)
    if every_failure:
        print(*(f"  expected {outcome}" for outcome in found.expected), sep="\n", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--distribution", nargs="+", default=["ours"], choices=DISTRIBUTIONS)
    parser.add_argument("--package", nargs="+", default=suite.PACKAGES, choices=suite.PACKAGES)
    parser.add_argument("--file", default="", help="only files with this in their path")
    parser.add_argument("-k", default="", help="pytest's -k: only tests that match")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a test may take")
    parser.add_argument("--every-failure", action="store_true", help="the expected ones too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
