"""Compares every plan with every input and number of steps, over processes, with one process.

python tests/processes/run.py [global] [per_process] [loaders] [replica] [--steps 1 4]
python tests/processes/run.py global per_process --plans data fsdp tensor model --splits uneven
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


def tables(inputs, steps, splits):
    """The cases of each mode of input, with what compares them."""
    import test_own_rows
    import test_replica_code
    from own_rows import LOADERS
    from test_processes import FEEDS, PLANS, compared

    if "global" in inputs:
        for plan in PLANS:
            yield f"global {plan}", list(itertools.product([plan], FEEDS, steps)), compared
    if "per_process" in inputs:
        for plan in PLANS:
            cases = list(itertools.product([plan], FEEDS, steps, splits))
            yield f"per_process {plan}", cases, test_own_rows.compared
    if "loaders" in inputs:
        for plan in PLANS:
            cases = list(itertools.product([plan], sorted({*LOADERS} - {*FEEDS}), steps, splits))
            yield f"loaders {plan}", cases, test_own_rows.compared
    if "replica" in inputs:
        for plan in PLANS:
            yield f"replica {plan}", list(test_replica_code.table(plan)), test_replica_code.compared


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = ("global", "per_process", "loaders", "replica")
    parser.add_argument("inputs", nargs="*", choices=[*modes, []])
    parser.add_argument("--plans", nargs="*", help="the meshes, by default all")
    parser.add_argument("--sizes", nargs="*", default=["2x4", "4x2"], help="processes x devices")
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 4])
    splits = ("even", "uneven", "none")
    parser.add_argument("--splits", nargs="*", default=splits, help="rows that each process brings")
    arguments = parser.parse_args()
    started, right = time.monotonic(), 0
    for processes, devices in (map(int, size.split("x")) for size in arguments.sizes):
        for name, cases, compare in tables(
            arguments.inputs or modes, arguments.steps, arguments.splits
        ):
            if arguments.plans and name.split()[1] not in arguments.plans:
                continue
            with tempfile.TemporaryDirectory() as folder:
                compare(Path(folder), cases, processes, devices)
            right += len(cases)
            print(f"{processes} x {devices} {name}: {len(cases)} cases equal", flush=True)
    print(f"{right} equal, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    import keras_tpu_dist as ktd

    ktd.simulate(8)
    main()
