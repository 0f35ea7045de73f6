"""The lower bounds of pyproject.toml: do they resolve together, and do they work?

    python tests/versions/oldest.py                 # all but what TESTS says is too large
    python tests/versions/oldest.py --only grain orbax-checkpoint
    python tests/versions/oldest.py --keep          # the environment stays, below --folder

Makes one environment of the oldest Python with exactly these versions, what they need as pip
chooses it, runs the tests that use them, and removes it. Exit code 1 if pip or a test fails.
"""

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("tpu", "checkpoint", "data", "examples", "test", "test-full")
# What shows that a requirement works; `None` for one that takes gigabytes to install.
TESTS: dict[str, tuple[str, ...] | None] = {
    "keras": ("tests/_keras/test_seam.py",),
    "jax": ("tests/replay/test_rewrite.py", "tests/versions/test_versions.py"),
    "numpy": ("tests/common", "tests/input/test_batches.py"),
    "rich": ("tests/show/test_pictures.py", "tests/show/test_progress.py"),
    "orbax-checkpoint": ("tests/checkpoint/test_contents.py", "tests/checkpoint/test_loop.py"),
    "grain": ("tests/checkpoint/test_grain.py",),
    "scikit-learn": ("tests/callbacks/test_host_metrics.py",),
    "pytest": ("tests/common",),
    "pytest-xdist": ("tests/common",),
    "hypothesis": ("tests/common",),
    "nbclient": ("tests/test_notebooks.py",),
    "ipykernel": ("tests/test_notebooks.py",),
    "tensorflow-cpu": None,
    "torch": None,
}
_SECONDS = 1800


def lower_bounds() -> dict[str, Requirement]:
    """Each requirement of the package and of its extras at its lower bound.

    Raises:
        ValueError: If a requirement has no lower bound, or two of them.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    bounds, found = defaultdict(set), {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            continue
        (bound,) = {s.version for s in requirement.specifier if s.operator == ">="} or {""}
        bounds[requirement.name].add(bound)
        extra = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        if extra or requirement.name not in found:
            found[requirement.name] = Requirement(f"{requirement.name}{extra}=={bound}")
    wrong = {name: of for name, of in bounds.items() if len(of) != 1 or "" in of}
    if wrong:
        raise ValueError(f"A requirement has one lower bound. Received: {wrong}. Set it.")
    return found


def chosen(only: list[str]) -> dict[str, Requirement]:
    """The requirements to install: those named, and always what every test needs."""
    every = {"keras", "jax", "numpy", "rich", "pytest", "pytest-xdist", "hypothesis"}
    wanted = every | set(only) if only else {n for n, of in TESTS.items() if of is not None}
    return {name: one for name, one in lower_bounds().items() if name in wanted}


def main() -> None:
    """Prints the versions and what became of their tests."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", default=[], choices=[*TESTS])
    options.add_argument("--python", default=sys.executable, help="of the oldest version")
    options.add_argument("--folder", type=Path, help="for the environment; by default a new one")
    options.add_argument("--keep", action="store_true", help="use the environment again")
    asked = options.parse_args()
    started = time.perf_counter()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="ktd_oldest_"))
    try:
        wrong = _run(folder, asked.python, chosen(asked.only), asked.only)
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.perf_counter() - started
    print(f"\n{wrong} of the lower bounds do not work, {seconds:.0f} s, {datetime.date.today()}")
    sys.exit(1 if wrong else 0)


def _run(folder: Path, python: str, pinned: dict[str, Requirement], only: list[str]) -> int:
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [own, "-m", "pip", "install", "-q", "--no-warn-conflicts"]
    if subprocess.run([*pip, *map(str, pinned.values())]).returncode:
        print("pip finds no versions that fit together:", *map(str, pinned.values()), sep="\n  ")
        return len(pinned)
    env = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    wrong, known = 0, {}
    print("| requirement | tests | |")
    print("|---|---|---|")
    for name, requirement in pinned.items():
        if only and name not in only:
            continue
        tests = TESTS[name] or ()
        if tests not in known:
            # Of each slow test one case: some libraries have no fast one.
            which = ["-m", "not tpu_compiler", "--sample", "1"]
            command = [own, "-m", "pytest", "-n", "0", "-x", *which, *tests]
            run = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_SECONDS
            )
            known[tests] = run.returncode, (run.stdout.strip().splitlines() or ["no test ran"])[-1]
            if run.returncode:
                print(run.stdout[-3000:], run.stderr[-1000:], file=sys.stderr)
        code, said = known[tests]
        wrong += code != 0
        print(f"| {requirement} | {' '.join(tests)} | {'ok' if code == 0 else said} |", flush=True)
    return wrong


if __name__ == "__main__":
    main()
