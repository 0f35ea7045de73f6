"""What `newest.py` reads from the output of its commands, and what it calls new."""

import newest
import pytest

TABLE = """
| environment | versions | seam | chips |
|---|---|---|---|
| installed | Python 3.13.0 keras 3.15.1 | ok: 90 passed | ok: 70 cells, 0 not as they should be |
| all | Python 3.13.0 keras 3.16.0 | FAILS: 2 failed, 88 passed | - |
"""


def test_every_command_exists():
    for check in newest.CHECKS.values():
        for command in filter(None, (check.command, check.short)):
            files = [word for word in command if word.startswith("tests/")]
            assert files
            assert all((newest.ROOT / file).exists() for file in files)
    assert newest.ENVIRONMENTS["all"] == tuple(newest.NEWEST)


@pytest.mark.parametrize(
    ("check", "code", "output", "text"),
    [
        (
            "seam",
            0,
            "....\n== 98 passed, 2 skipped in 61.20s (0:01:01) ==",
            "ok: 98 passed, 2 skipped",
        ),
        (
            "seam",
            1,
            "FAILED tests/a.py::b - x\n1 failed, 97 passed in 3s",
            "FAILS: 1 failed, 97 passed",
        ),
        (
            "chips",
            0,
            "| v5e | ok |\n\n4 cells, 0 not as they should be, 90 s, 2026-11-29",
            "ok: 4 cells, 0 not as they should be",
        ),
        (
            "comparisons",
            1,
            "wrong  operation x\n8 cases, 8 comparisons, 60 s",
            "FAILS: 8 cases, 8 comparisons",
        ),
        ("tests", 2, "", "FAILS: no output"),
    ],
)
def test_what_a_command_said(check, code, output, text):
    found = newest.found_of(newest.CHECKS[check], code, output)
    assert str(found) == text
    assert len(found.failures) == output.count("FAILED") + output.count("wrong ")


def test_what_is_new():
    before = newest.words_of(TABLE)
    assert before["all", "seam"] == "FAILS"
    assert newest.news(before, before) == []
    worse = newest.words_of(TABLE.replace("ok: 90 passed", "FAILS: 1 failed"))
    assert newest.news(before, worse) == ["installed, seam: FAILS, was ok"]
    mended = newest.words_of(TABLE.replace("FAILS: 2 failed,", "ok:"))
    assert newest.news(before, mended) == ["all, seam: ok, was FAILS"]
    assert newest.news({}, before) == ["all, seam: FAILS, was not there"]


def test_a_library_that_pip_does_not_install_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(newest.NEWEST, "keras", (("no-such-package-of-ours",), False))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    python = newest.sys.executable
    ((name, words, found),) = newest.rows(["keras"], {}, python, tmp_path)
    assert (name, found) == ("keras", {})
    assert words.startswith("pip does not install no-such-package-of-ours: ")


def test_the_page_has_the_last_table():
    assert newest.words_of(newest.table_of_page(newest.PAGE.read_text()))
