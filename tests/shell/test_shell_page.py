"""Each command of docs/shell.md prints what stands below it.

KTD_WRITE_PAGES=1 pytest -n 0 -m '' tests/shell/test_shell_page.py      # writes what they print
"""

import importlib.metadata
import os
import pathlib
import re
import shlex

import pytest
from shell.test_shell import ran

from keras_tpu_dist.tools.dryrun.compile import _USUAL, has_libtpu
from keras_tpu_dist.tools.shell.commands import COMMANDS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "shell.md"
COMPILING = {"search", "dry-run", "verify"}
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r'^```python title="(.*?)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
# The compiler that wrote what stands on the page: another may choose and count otherwise.
LIBTPU = re.compile(r"<!-- printed with libtpu (.*?) -->")
# As many letters fit beside the site's sidebars at 1280 pixels.
COLUMNS = 103
# How long it took is no answer.
TIMES = re.compile(r"in [\d.]+ m?s\b")


def commands(page):
    """The words of each command, and what stands below it."""
    for block in BLOCK.findall(page):
        for one in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, printed = one.partition("\n")
            yield line, printed


def printed(line, folder):
    """What a command prints, as a terminal shows it."""
    words = shlex.split(line)
    assert words[0] == "ktd"
    _, out, err = ran(*words[1:], cwd=folder, columns=COLUMNS)
    # Warnings come before the answer.
    return err + out


@pytest.fixture
def folder(tmp_path):
    for name, text in FILE.findall(PAGE.read_text()):
        (tmp_path / name).write_text(text)
    return tmp_path


def comparable(text):
    text = text.replace(_USUAL + "\n", "")  # where a loaded machine takes long
    return re.sub(TIMES, "in a while", text).rstrip()


def cases():
    for line, below in commands(PAGE.read_text()):
        command = shlex.split(line)[1]
        marks = [pytest.mark.slow]
        if command in COMPILING:
            marks.append(pytest.mark.tpu_compiler)
        yield pytest.param(command, line, below, marks=marks, id=line[4:50])


@pytest.mark.parametrize(("command", "line", "below"), list(cases()))
def test_a_command_prints_what_stands_below_it(command, line, below, folder):
    if command in COMPILING and not has_libtpu():
        pytest.skip("needs libtpu: pip install 'jax[tpu]'")
    found = printed(line, folder)
    assert "Traceback" not in found
    page = PAGE.read_text()
    if os.environ.get("KTD_WRITE_PAGES"):
        PAGE.write_text(page.replace(f"$ {line}\n{below}", f"$ {line}\n{found.rstrip()}\n", 1))
        return
    if command in COMPILING and LIBTPU.search(page)[1] != importlib.metadata.version("libtpu"):
        assert found.count("strategy = ktd.") == below.count("strategy = ktd.")
        return
    assert comparable(found) == comparable(below)


def test_every_command_is_on_the_page():
    text = PAGE.read_text()
    for name in COMMANDS:
        assert f"ktd {name}" in text, name
