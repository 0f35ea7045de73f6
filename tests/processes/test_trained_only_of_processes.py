"""Checkpoints of what trains, by two processes: what they leave out, and what resumes from them."""

import pathlib

import numpy as np
import pytest
from helpers import loaded

HERE = pathlib.Path(__file__).parent
job = loaded(HERE / "trained_only.py", "process_trained_only_job")
launched = loaded(HERE / "test_processes.py", "process_test_processes").launched
of_one = job.of_one


def run(folder, mesh, epochs, seed=0):
    words = (HERE / "trained_only.py", folder, mesh, epochs, seed)
    return launched(*words, processes=2, devices=4)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with one epoch of two processes."""
    folder = tmp_path_factory.mktemp("begun")
    ended = run(folder, "4x2", 1)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_two_processes_go_on_exactly_on_another_mesh(begun):
    assert of_one.left_out(begun / "run", 2) == ["base/kernel"]
    again = run(begun, "2x2x2", 3)
    assert again.returncode == 0, again.stdout[-6000:] + again.stderr[-3000:]
    found = dict(np.load(begun / "state.npz"))
    whole = of_one.built()
    losses = of_one.fit(whole, None, 3).history["loss"]
    assert list(found["ran"]) == [1, 2]
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    for number, value in enumerate(of_one.values_of(whole)):
        np.testing.assert_allclose(found[str(number)], value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_another_base_is_one_error_in_every_process(begun):
    ended = run(begun, "4x2", 3, seed=1)
    assert ended.returncode != 0
    for process in range(2):
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"[{process}]")]
        assert any("base/kernel" in line for line in lines), ended.stdout[-6000:]
