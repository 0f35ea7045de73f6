"""Runs Keras's own tests with a distribution active in every test, in processes of their own.

A test that hangs or that ends the process is a failure like any other: the process is started
anew with the tests that are left.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parent.parent
PACKAGES = (
    "trainers",
    "callbacks",
    "models",
    "saving",
    "optimizers",
    "metrics",
    "losses",
    "layers",
    "ops",
)
# So many files share a process: importing takes seconds, and programs once compiled stay.
_FILES_TOGETHER = 30
# Seconds for importing Keras, TensorFlow and the test files, on a busy machine.
_STARTUP = 240.0


@dataclass(frozen=True)
class Outcome:
    """What became of a test: "passed", "failed", "skipped", "hang" or "abort", with its last line.

    `active` is whether the distribution was still the active one at the test's end.
    """

    id: str
    outcome: str
    line: str = ""
    seconds: float = 0.0
    active: bool = True

    @property
    def failed(self) -> bool:
        """Whether it failed in any way."""
        return self.outcome in ("failed", "hang", "abort")

    def __str__(self):
        return f"{self.outcome:7} {self.id}: {self.line}"


def keras_source() -> Path:
    """Where the installed Keras keeps its sources and tests, found without importing it."""
    return Path(find_spec("keras").submodule_search_locations[0]) / "src"


def files_of(package: str, matching: str = "") -> list[str]:
    """The test files of a package below `keras/src`, those with `matching` in their path."""
    root = keras_source()
    found = sorted(str(path.relative_to(root)) for path in (root / package).rglob("*_test.py"))
    return [path for path in found if matching in path]


def run_files(
    files: list[str],
    distribution: str,
    *,
    timeout: float = 120.0,
    only: frozenset[str] | None = None,
    expression: str = "",
) -> list[Outcome]:
    """Runs test files."""
    outcomes: list[Outcome] = []
    for first in range(0, len(files), _FILES_TOGETHER):
        part = files[first : first + _FILES_TOGETHER]
        with tempfile.TemporaryDirectory(prefix="keras_own") as folder:
            batch = _Batch(Path(folder), part, distribution, timeout, expression)
            outcomes += batch.run(only)
    return outcomes


class _Batch:
    """Some files, run by one process after another until each test has an outcome."""

    def __init__(self, folder, files, distribution, timeout, expression):
        self._folder = folder
        self._files = files
        self._distribution = distribution
        self._timeout = timeout
        self._expression = expression

    def run(self, only: frozenset[str] | None) -> list[Outcome]:
        """All outcomes."""
        outcomes: dict[str, Outcome] = {}
        if only is not None:
            (self._folder / "only").write_text("\n".join(only))
        while True:
            (self._folder / "skip").write_text("\n".join(outcomes))
            new, finished = self._run_one_process(listed=only is not None)
            outcomes |= {outcome.id: outcome for outcome in new}
            if finished:
                return list(outcomes.values())
            if not new:
                name = f"{self._files[0]} and {len(self._files) - 1} more files"
                words = self._last_words()
                return [*outcomes.values(), Outcome(name, "abort", f"did not start: {words}")]

    def _run_one_process(self, listed: bool) -> tuple[list[Outcome], bool]:
        results, log = self._folder / "results", self._folder / "log"
        results.write_text("")
        with log.open("w") as stream:
            process = subprocess.Popen(
                self._command(results, listed),
                cwd=self._folder,
                env=_environment(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            hung = _watch(process, results, self._timeout)
        records = [json.loads(line) for line in results.read_text().splitlines()]
        return self._read(records, hung)

    def _read(self, records: list[dict], hung: bool) -> tuple[list[Outcome], bool]:
        outcomes = [Outcome(**record) for record in records if "id" in record]
        last = records[-1] if records else {}
        if "start" in last:
            words = f"{self._timeout:.0f} s without an end" if hung else self._last_words()
            outcomes.append(Outcome(last["start"], "hang" if hung else "abort", words))
        return outcomes, "finished" in last

    def _last_words(self) -> str:
        text = (self._folder / "log").read_text(errors="replace")
        # Python's and XLA's; pytest's dots may stand before them.
        words = re.findall(r"Fatal Python error.*|\b[FE]\d{4} \d\d:.*|^ERROR.*", text, re.M)
        return " ".join(words or text.splitlines()[-1:])[:200]

    def _command(self, results: Path, listed: bool) -> list[str]:
        root = keras_source()
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(root)]
        # The repository's own configuration and plugins do not apply to Keras's tests.
        command += ["-p", "plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
        command += ["--continue-on-collection-errors", "-W", "ignore"]
        command += ["--distribution", self._distribution, "--results", str(results)]
        command += ["--skip-listed", str(self._folder / "skip")]
        command += ["--only-listed", str(self._folder / "only")] if listed else []
        command += ["-k", self._expression] if self._expression else []
        return command + [str(root / file) for file in self._files]


def _environment() -> dict[str, str]:
    """The child's: plugin and package are found, pytest's own variables are not handed on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # An outer test run has set flags of its own; the plugin sets them anew.
    kept.pop("XLA_FLAGS", None)
    path = [str(_HERE), str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def _watch(process: subprocess.Popen, results: Path, timeout: float) -> bool:
    """Waits; ends the process and says `True` if no test ended or started for too long."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        now = results.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > (timeout if size else max(timeout, _STARTUP)):
            process.kill()
            process.wait()
            return True
    return False
