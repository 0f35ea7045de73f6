"""Tomorrow's Keras, JAX and libtpu: what works there, and what is new since the table in the docs.

    python tests/versions/newest.py                       # hours on two cores
    python tests/versions/newest.py --short               # minutes; the last stage of .ci/run
    python tests/versions/newest.py --only libtpu --checks verifications comparisons

Beside what is installed, the newest nightly build of Keras, the newest JAX and the newest libtpu
are tried, each alone and then all together: pip puts them into a folder, which comes first in
`PYTHONPATH`. What is installed already is not tried again. Prints one table; docs/versions.md has
the last one, and what changed is said below. The exit code is 0 whatever fails: nothing here is
released yet. `--strict` ends with 1 if a check that was right before fails.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"
# In the page, around the table.
MARK = "<!-- newest -->"
# What pip installs, and whether with what it needs.
NEWEST: dict[str, tuple[tuple[str, ...], bool]] = {
    "keras": (("keras-nightly",), False),
    "jax": (("jax", "jaxlib"), True),
    "libtpu": (("libtpu",), False),
}
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "installed": (),
    "keras": ("keras",),
    "jax": ("jax",),
    "libtpu": ("libtpu",),
    "all": ("keras", "jax", "libtpu"),
}
_CONFORMANCE = ("tests/conformance/run.py", "--compiler", "libtpu", "--seed", "11")
_LIBRARIES = ("keras", "jax", "jaxlib", "libtpu")
_FAILURES_SHOWN = 12


@dataclass(frozen=True)
class Check:
    """One command of an environment.

    Attributes:
        command: What Python runs.
        short: The same in a few minutes; empty if it is left out there.
        timeout_s: After which it counts as hanging.
        counts: Which line of its output has the counts.
        failures: Which lines name what failed.
    """

    command: tuple[str, ...]
    short: tuple[str, ...]
    timeout_s: float
    counts: str
    failures: str


_PYTEST = {"counts": r"\d+ passed|\d+ failed|error", "failures": r"^(FAILED|ERROR) "}
_RUN = {"counts": r"\d+ cases, ", "failures": r"^(wrong|refused|error|abort|hang) "}
CHECKS: dict[str, Check] = {
    "seam": Check(
        ("-m", "pytest", "tests/_keras"),
        ("-m", "pytest", "tests/_keras/test_seam.py", "-n", "0"),
        1800,
        **_PYTEST,
    ),
    "tests": Check(
        ("-m", "pytest", "tests/training", "tests/checkpoint", "tests/callbacks", "tests/input"),
        ("-m", "pytest", "tests/training/test_membership.py", "tests/training/test_equality.py"),
        3600,
        **_PYTEST,
    ),
    "chips": Check(
        ("tests/versions/matrix.py", "--here"),
        ("tests/versions/matrix.py", "--here", "--chips", "v5e", "--cases", "MLP", "LSTM"),
        3600,
        r"\d+ cells, ",
        r"^(v\d|tpu|\?).*, .*: ",
    ),
    "verifications": Check(
        (
            *(*_CONFORMANCE, "--kind", "model", "--only", "2x2x2, even, auto", "--cases", "12"),
            # An image model takes the compiler minutes.
            *("--timeout", "900"),
        ),
        (),
        3600,
        **_RUN,
    ),
    "comparisons": Check(
        (*_CONFORMANCE, "--kind", "operation", "--only", "2x2x2, ragged", "--cases", "200"),
        (*_CONFORMANCE, "--kind", "operation", "--only", "2x2x2, ragged", "--cases", "8"),
        3600,
        **_RUN,
    ),
}


@dataclass(frozen=True)
class Found:
    """What became of a check: a word, the line with its counts, and what failed."""

    word: str
    counts: str = ""
    failures: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.word}: {self.counts}" if self.counts else self.word


def found_of(check: Check, code: int, output: str) -> Found:
    """What a command's exit code and output say."""
    lines = output.splitlines()
    counts = [line.strip(" =\n") for line in lines if re.search(check.counts, line)]
    failures = tuple(line for line in lines if re.search(check.failures, line))
    last = counts[-1] if counts else (lines or ["no output"])[-1]
    # The time of a run is no result.
    last = re.sub(r"( in|,) [\d.]+ ?s\b.*", "", last)[:100].replace("|", "/")
    return Found("ok" if code == 0 else "FAILS", last, failures)


def ran(check: Check, command: tuple[str, ...], python: str, environment: dict[str, str]) -> Found:
    """What becomes of a check in an environment."""
    try:
        done = subprocess.run(
            [python, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=check.timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Found("HANGS", f"longer than {check.timeout_s:.0f} s")
    return found_of(check, done.returncode, done.stdout + done.stderr)


def installed(python: str, environment: dict[str, str]) -> str:
    """The versions of an environment, `""` if they cannot be imported."""
    code = (
        "import importlib, platform; print('Python', platform.python_version(), *["
        f"name + ' ' + importlib.import_module(name).__version__ for name in {_LIBRARIES}])"
    )
    run = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True)
    return run.stdout.strip()


def environment_of(folders: list[Path]) -> dict[str, str]:
    """The variables of a process that finds what is in folders first."""
    paths = [*map(str, folders), str(ROOT), str(ROOT / "tests")]
    return {
        **os.environ,
        "KERAS_BACKEND": "jax",
        # A nightly build has a version that was not tested.
        "KTD_ANY_KERAS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def made(name: str, folder: Path, python: str) -> Path:
    """The folder with the newest of a library, made once.

    Raises:
        RuntimeError: If pip does not install it.
    """
    packages, with_needs = NEWEST[name]
    target = folder / name
    if not target.exists():
        options = ["-q", "--pre", *([] if with_needs else ["--no-deps"]), "--target", str(target)]
        pip = [python, "-m", "pip", "install", *options, *packages]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no words"])[-1]
            raise RuntimeError(f"pip does not install {', '.join(packages)}: {last}")
    return target


def rows(
    names: list[str], checks: dict[str, tuple[str, ...]], python: str, folder: Path
) -> Iterator[tuple[str, str, dict[str, Found]]]:
    """Each environment with its versions and what became of its checks."""
    known: dict[str, str] = {}
    for name in names:
        try:
            environment = environment_of(
                [made(library, folder, python) for library in ENVIRONMENTS[name]]
            )
        except RuntimeError as error:
            yield name, str(error), {}
            continue
        versions = installed(python, environment)
        if not versions or versions in known.values():
            same = [other for other, its in known.items() if its == versions]
            yield name, f"as {same[0]}" if same else "cannot be imported together", {}
            continue
        known[name] = versions
        found = {
            check: ran(CHECKS[check], command, python, environment)
            for check, command in checks.items()
        }
        yield name, versions, found


def line_of(name: str, versions: str, found: Mapping[str, Found], checks: list[str]) -> str:
    """A line of the table."""
    cells = (str(found.get(check, "-")) for check in checks)
    return f"| {name} | {versions} | {' | '.join(cells)} |"


def words_of(text: str) -> dict[tuple[str, str], str]:
    """From an environment and a check to its word in a table."""
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    words = {}
    for row in cells[2:]:
        for check, cell in zip(cells[0][2:], row[2:], strict=True):
            words[row[0], check] = cell.partition(":")[0]
    return words


def news(before: dict[tuple[str, str], str], now: dict[tuple[str, str], str]) -> list[str]:
    """What another table says otherwise, in words."""
    return [
        f"{environment}, {check}: {word}, was {before.get((environment, check), 'not there')}"
        for (environment, check), word in now.items()
        if word not in ("-", before.get((environment, check), "ok"))
    ]


def table_of_page(text: str) -> str:
    """The last table, as the page has it; `""` if it has none."""
    parts = text.split(MARK)
    return parts[1] if len(parts) == 3 else ""


def main() -> None:
    """Prints the table, and what is new."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--short", action="store_true", help="all together, a few minutes")
    options.add_argument("--only", nargs="+", default=[*ENVIRONMENTS], choices=[*ENVIRONMENTS])
    options.add_argument("--checks", nargs="+", default=[*CHECKS], choices=[*CHECKS])
    options.add_argument("--python", default=sys.executable)
    options.add_argument("--folder", type=Path, help="for what pip installs, to use it again")
    options.add_argument("--strict", action="store_true", help="exit code 1 if something is new")
    asked = options.parse_args()
    started = time.perf_counter()
    checks = {
        name: CHECKS[name].short if asked.short else CHECKS[name].command for name in asked.checks
    }
    checks = {name: command for name, command in checks.items() if command}
    names = ["all"] if asked.short else asked.only
    lines = [
        f"| environment | versions | {' | '.join(checks)} |",
        "|---|---|" + "---|" * len(checks),
    ]
    print(*lines, sep="\n")
    failures = []
    with tempfile.TemporaryDirectory(prefix="ktd_newest_") as temporary:
        for name, versions, found in rows(
            names, checks, asked.python, asked.folder or Path(temporary)
        ):
            lines.append(line_of(name, versions, found, list(checks)))
            print(lines[-1], flush=True)
            failures += [
                f"{name}, {check}: {line[:200]}"
                for check, one in found.items()
                for line in one.failures[:_FAILURES_SHOWN]
            ]
    print(*failures, sep="\n")
    new = news(words_of(table_of_page(PAGE.read_text())), words_of("\n".join(lines)))
    seconds = time.perf_counter() - started
    print(f"\n{len(new)} new since the last table, {seconds:.0f} s, {datetime.date.today()}")
    print(*new, sep="\n")
    sys.exit(1 if asked.strict and new else 0)


if __name__ == "__main__":
    main()
