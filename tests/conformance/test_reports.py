"""The programs of docs/xla_partitioner.md: XLA still gets them wrong, as the page says."""

import re
from pathlib import Path

import fault_programs
import jax
import numpy as np
import pytest
from helpers import python

from keras_tpu_dist.programs.partitioner.table import FAULTS

_PAGE = (Path(__file__).parents[2] / "docs" / "xla_partitioner.md").read_text()
_SECTIONS = re.split(r"^## ", _PAGE, flags=re.MULTILINE)
_BLOCK = re.compile(r"```python\n(.*?)```\n+```\n(.*?)```", flags=re.DOTALL)
_START = re.search(r"```python\n(.*?)```", _SECTIONS[0], flags=re.DOTALL)[1]
# XLA gives up a rendezvous after this many seconds; the default is 40.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=5"


def _reports() -> list:
    faults = {fault.name: fault for fault in FAULTS}
    return [
        pytest.param(
            program,
            printed.strip(),
            faults[section.splitlines()[0]].present,
            id=f"{section.splitlines()[0]} {i}",
        )
        for section in _SECTIONS[1:]
        for i, (program, printed) in enumerate(_BLOCK.findall(section))
    ]


def test_every_fault_has_a_report():
    *of_faults, last = _SECTIONS[1:]
    assert [fault.name for fault in FAULTS] == [s.splitlines()[0] for s in of_faults]
    assert all(_BLOCK.search(section) for section in of_faults)
    assert last.startswith("On TPU\n")


def test_every_fault_has_a_program():
    assert [fault.name for fault in FAULTS] == list(fault_programs.CASES)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_repaired_programs_are_right(fault):
    ready = fault_programs.ready(fault.name)
    with jax.default_matmul_precision("highest"):
        (found,) = ready.repaired(*ready.arrays)
    np.testing.assert_allclose(np.asarray(found), ready.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "printed", "present"), _reports())
def test_xla_still_gets_it_wrong(program, printed, present):
    start = _START.replace("device_count=8", f"device_count=8 {_PATIENCE}")
    done = python("-c", start + program, code=None)
    fine = f"XLA gets this right now: its repair can go, for this XLA.\n{done.stdout}"
    if printed.startswith(("aborts", "hangs")):
        assert done.returncode < 0, fine
        said = printed.split(": ")[-1].lower()
        assert said in re.sub(r"[-_]", " ", done.stderr.lower()) or said in done.stderr.lower()
        return
    if printed.startswith("raises"):
        assert done.returncode == 1, fine
        assert printed.split(": ")[-1] in done.stderr
        return
    lines = dict(re.findall(r"(expected|actual) +(.*)", done.stdout))
    assert lines, done.stderr
    if not present:
        assert lines["expected"] == lines["actual"], "XLA gets this wrong again"
        return
    assert lines["expected"] != lines["actual"], fine
    documented = dict(re.findall(r"(expected|actual) +(.*)", printed))
    assert lines == documented
