"""A checkpoint that fails in one process has failed in all, and training goes on."""

import json
import pathlib

import pytest
from helpers import loaded

HERE = pathlib.Path(__file__).parent
all_run = loaded(HERE / "test_processes.py", "failing_test_processes").all_run
# What fails, in one process alone, and the checkpoints that are there at the end.
CASES = {
    "mkdir, sync": [2, 6, 8],
    "rename, sync": [2, 6, 8],
    "rename, async": [2, 6, 8],
    "write, sync": [2, 6, 8],
    "write, async": [2, 6, 8],
    # It is whole, and what it replaces could not be deleted.
    "delete, sync": [4, 6, 8],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return all_run(HERE / "failing_job.py", tmp_path_factory.mktemp("failing"), CASES, devices=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_fails_in_one_process_has_failed_in_all(case, folder):
    found = [json.loads((folder / f"{case}.{process}.json").read_text()) for process in range(2)]
    assert found[0]["counts"] == found[1]["counts"]
    assert found[0]["steps"] == CASES[case]
    if case.endswith("sync") and "async" not in case:
        # None counts as saved at the step that failed.
        assert found[0]["counts"] == [None, 2, 2, 2, 2, 6, 6, 8]
        for process in found:
            assert len(process["said"]) == 1, process
            assert "No space left on device" in process["said"][0]
