"""A loop over `strategy.run` that is saved by several processes ends as one that never stopped."""

import pathlib

import numpy as np
import pytest
from helpers import loaded

from keras_tpu_dist.processes.preemption import EXIT_TERMINATED

HERE = pathlib.Path(__file__).parent
loop = loaded(HERE / "loop.py", "process_loop")
launched = loaded(HERE / "test_processes.py", "process_test_processes").launched


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise", "SIGKILL", "SIGTERM"])
def test_a_loop_of_two_processes_goes_on_where_it_was_saved(end, tmp_path):
    first, steps = cut_and_resumed(end, tmp_path)
    if end == "SIGTERM":
        assert first > 3
    else:  # of 18 steps every fourth is saved
        assert (first, steps) == (9, [8, 12, 16])


def cut_and_resumed(end, tmp_path):
    """Cuts a loop, resumes it on another mesh, and compares; its first step, and what is saved."""

    def run(mesh, layout, end, after):
        words = (HERE / "loop.py", tmp_path, mesh, layout, end, after)
        return launched(*words, processes=2, devices=4)

    # JAX tells of a signal some steps later, by its clock.
    ended = run("4x2", "tensor_parallel", end, 2 if end == "SIGTERM" else 10)
    assert ended.returncode != 0, ended.stdout[-3000:]
    assert not (tmp_path / "state.npz").exists()
    if end == "SIGTERM":
        assert ended.returncode == EXIT_TERMINATED
    again = run("2x2x2", "fsdp", "none", 0)
    assert again.returncode == 0, again.stdout[-6000:] + again.stderr[-3000:]
    found = dict(np.load(tmp_path / "state.npz"))
    first, steps = found.pop("first"), list(found.pop("steps"))
    whole = loop.test_loop.Loop().run()
    for number, value in enumerate(whole.state()):
        # A running sum is of hundreds, and JAX's clock decides from which step another mesh adds.
        np.testing.assert_allclose(found[str(number)], value, rtol=1e-5, atol=1e-5)
    return first, steps
