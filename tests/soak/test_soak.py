"""A short soak; `python tests/soak/run.py` is the long one."""

from pathlib import Path

import pytest
from helpers import loaded, python

RUN = Path(__file__).with_name("run.py")


@pytest.mark.slow
def test_nothing_grows_and_all_equals_stock():
    done = python(RUN, "--minutes", "0.25", "--rows", "5", "--seed", "343", timeout=400)
    assert "level" in done.stdout


@pytest.mark.slow
def test_growth_is_seen():
    soak = loaded(RUN, "soak_run")
    before = soak.Usage(resident_mib=100.0, arrays_bytes=10, descriptors=6, threads=1)
    after = soak.Usage(resident_mib=200.0, arrays_bytes=14, descriptors=7, threads=3)
    assert soak.grown(before, before) == []
    assert soak.grown(before, after) == [
        "memory by 100 MiB",
        "arrays by 4 bytes",
        "descriptors by 1",
        "threads by 2",
    ]
