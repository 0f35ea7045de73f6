"""Weights that libtpu fetches part by part are joined as they lie."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from keras_tpu_dist.tools.dryrun.compile import cpu_environment

SCRIPT = pathlib.Path(__file__).with_name("fetched_parts.py")


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_stacks_of_blocks():
    """v5e's fast memory is the smallest: others fetch kernels of this size as a whole."""
    ran = subprocess.run(
        [sys.executable, SCRIPT, "6"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **cpu_environment(1)},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    stacks = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(stacks) == 6
    assert sum(moved for *_, moved in stacks) > 0
    for stack, gap, *_ in stacks:
        # Of an update: twenty blocks round it; a part in another's place is off by all of it.
        assert gap < 3e-4, stack
