"""Finds the cases of the fast tests that take most of their time, and has them marked slow.

    python tests/slow_cases.py [--seconds 240] [--cores 2]

Runs the fast tests, and prints the CPU seconds of the slowest. Those that must go for the rest to
take no longer are added to `slow_cases.txt`, which `conftest.py` reads. CI runs slow tests too.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import pytest

HERE = pathlib.Path(__file__).parent
LIST = HERE / "slow_cases.txt"
FOLDER = "KTD_CASES_SECONDS"


def cpu_seconds():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Notes the CPU seconds of a case: this file is pytest's plugin in the run below."""
    began = cpu_seconds()
    result = yield
    with open(pathlib.Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps([cpu_seconds() - began, item.nodeid]) + "\n")
    return result


def measured():
    """CPU seconds of each fast case, most first; and those of everything else, such as imports."""
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {FOLDER: folder, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "pytest", "-p", "slow_cases"]
        before = cpu_seconds()
        subprocess.run(command, cwd=HERE.parent, env=environment, check=False)
        lines = [line for file in pathlib.Path(folder).iterdir() for line in file.open()]
    cases = sorted(map(json.loads, lines), reverse=True)
    return cases, cpu_seconds() - before - sum(seconds for seconds, _ in cases)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    cases, beside = measured()
    left, slow = beside + sum(seconds for seconds, _ in cases), []
    print(f"{len(cases)} cases take {left:.0f} CPU seconds, {beside:.0f} of them beside the cases")
    for seconds, name in cases:
        if left <= options.seconds * options.cores:
            break
        print(f"{seconds:7.1f} {name}")
        left -= seconds
        slow.append(name)
    LIST.write_text("".join(f"{n}\n" for n in sorted({*LIST.read_text().splitlines(), *slow})))
    print(f"{len(slow)} cases are slow from now on; {left:.0f} CPU seconds are left")


if __name__ == "__main__":
    main()
