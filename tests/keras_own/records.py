"""What becomes of each test, written down at once."""

import json


class Recorder:
    """Writes a line when a test starts and one when it ends."""

    def __init__(self, path, still_active):
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the process)
        self._still_active = still_active
        self._reports = []
        self._active = True

    def pytest_collectreport(self, report):
        """A file that cannot be imported is a failure."""
        if report.failed:
            self._write(id=report.nodeid, outcome="failed", line=_one_line(report))

    def pytest_runtest_logstart(self, nodeid):
        """Before the test."""
        self._reports = []
        self._write(start=nodeid)

    def pytest_runtest_teardown(self):
        """Asked before the next `clear_session`."""
        self._active = self._still_active()

    def pytest_runtest_logreport(self, report):
        """Setup, call, teardown and subtests."""
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid):
        """The worst of a test's reports is its outcome."""
        failed = [report for report in self._reports if report.failed]
        skipped = [report for report in self._reports if report.skipped]
        outcome = "failed" if failed else "skipped" if skipped else "passed"
        self._write(
            id=nodeid,
            outcome=outcome,
            line=_one_line(failed[0]) if failed else "",
            seconds=round(sum(report.duration for report in self._reports), 2),
            active=self._active,
        )

    def pytest_sessionfinish(self):
        """The process has not died."""
        self._write(finished=True)

    def _write(self, **record):
        self._file.write(json.dumps(record) + "\n")


def _one_line(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:200]
