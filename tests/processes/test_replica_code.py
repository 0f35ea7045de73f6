"""Replica code over several processes gives what it gives in one."""

import itertools
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import loaded

from keras_tpu_dist.replica.datasets import check_attached

HERE = pathlib.Path(__file__).parent


replica_code = loaded(HERE / "replica_code.py", "process_replica_code")
several = loaded(HERE / "test_processes.py", "process_test_processes")
FEEDS = several.FEEDS


def compared(folder, cases, processes, devices):
    several.all_run(HERE / "replica_code.py", folder, [json.dumps(cases)], devices, processes)
    for case in cases:
        name = "-".join(map(str, case))
        found = [dict(np.load(path)) for path in sorted(folder.glob(f"{name}-?.npz"))]
        assert len(found) == processes
        if "mistakes" in case:
            continue
        counts = {int(each.pop("count", 0)) for each in found}
        replica_code.own_rows.fed.count = counts.pop()
        expected = replica_code.run(folder, *case)
        # Every replica's own values are read by a process, all others by each of them.
        assert set().union(*found) == set(expected)
        shared = {key for key in expected if "of replica" not in key}
        for number, each in enumerate(found):
            assert shared <= set(each)
            for key, value in each.items():
                several.assert_equal(value, expected[key], f"{name}, process {number}: {key}")


# Some cases; the table, 2 x 144, by `python tests/processes/run.py replica`.
TWO = [
    ("tensor", "variables"),
    ("data", "sizes"),
    ("fsdp", "training", "function"),
    ("data", "own", "arrays", "uneven"),
    ("data", "mistakes"),
]
FOUR = [("tensor", "values"), ("tensor", "own", "function", "none")]


def table(plan):
    """Every case on a mesh."""
    yield from ((plan, what) for what in replica_code.CASES)
    yield from ((plan, "training", feed) for feed in (*FEEDS, "function"))
    splits = replica_code.own_rows.SPLITS
    yield from ((plan, "own", *how) for how in itertools.product((*FEEDS, "function"), splits))


def test_a_mesh_of_some_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    some: Any = SimpleNamespace(topology=None, num_hosts=2)
    with pytest.raises(
        NotImplementedError, match=r"run on a mesh of 2 of 4 processes\..*local_dev"
    ):
        check_attached(some, "run")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "cases"), [(2, 4, TWO), (4, 2, FOUR)])
def test_replica_code_of_several_processes(tmp_path, processes, devices, cases):
    compared(tmp_path, cases, processes, devices)
