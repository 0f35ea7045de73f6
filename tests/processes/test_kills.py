"""A training that is killed under `launch --restart` ends as one that nobody killed."""

import pathlib

import pytest
from helpers import loaded

killing = loaded(pathlib.Path(__file__).with_name("kill_restart.py"), "kill_restart")


@pytest.mark.slow
def test_a_training_that_is_killed_ends_as_a_whole_one(tmp_path):
    expected = killing.whole_run(tmp_path / "whole")
    kills = [("SIGKILL", 1.0, 1), ("raise", 1.5, 0), ("SIGTERM", 1.0, 1)]
    planned = ("tensor", 2, kills, [1, 3, 2])
    wrong, made, seconds = killing.killed_run(tmp_path / "killed", expected, planned)
    assert not wrong, wrong
    assert made >= 1
    assert len(seconds) >= 1
