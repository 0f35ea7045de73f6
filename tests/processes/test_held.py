"""Arrays that a layer keeps, with parts on devices of other processes."""

import pathlib

import jax
import numpy as np
import pytest
from helpers import loaded

import keras_tpu_dist as ktd

HERE = pathlib.Path(__file__).parent
all_run = loaded(HERE / "test_processes.py", "held_test_processes").all_run
held = loaded(HERE / "held.py", "held_models")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return all_run(HERE / "held.py", tmp_path_factory.mktemp("held"), held.CASES, devices=4)


def on_one_device(**options):
    return ktd.TPUStrategy(devices=jax.devices()[:1], **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", held.CASES)
def test_arrays_of_layers_are_used_by_all_processes(case, folder):
    with np.load(folder / f"{case}.npz") as file:
        found = [file[name] for name in file.files]
    for here, one in zip(found, held.results(case, on_one_device), strict=True):
        np.testing.assert_allclose(here, one, rtol=1e-5, atol=1e-5)
