"""Versions of JAX: what is known to be wrong is wrong, and nothing else; what pip may install."""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from packaging.requirements import Requirement

from keras_tpu_dist.hardware import versions

ROOT = Path(__file__).parents[2]


def rows_whose_sums_are_wrong():
    """The program of jax-ml/jax 39103."""

    def sums(x):
        unit = jnp.eye(3, dtype=x.dtype)
        return jax.vmap(lambda row: jnp.sum((unit @ row) ** 2))(x)

    numbers = jnp.arange(32_769, dtype="float32")
    x = jnp.stack((numbers, 0 * numbers, 0 * numbers), axis=1)
    return int((jax.jit(sums)(x) != sums(x)).sum())


def test_this_jax_is_wrong_if_we_say_so_and_right_if_not():
    assert bool(rows_whose_sums_are_wrong()) == (jaxlib.__version__ in versions.KNOWN_WRONG)


def test_a_version_that_is_known_to_be_wrong_is_a_warning_at_import(monkeypatch, caplog):
    monkeypatch.setattr(jaxlib, "__version__", "0.10.2")
    versions.warn_of_wrong_jax()
    versions.warn_of_wrong_jax()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for words in ("jaxlib 0.10.2 is known to give wrong results", "jax-ml/jax 39103", "!=0.10.2"):
        assert words in record.getMessage()
    monkeypatch.setattr(jaxlib, "__version__", "0.10.1")
    versions.warn_of_wrong_jax()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("group", ["core", "tpu", "test"])
def test_pip_installs_no_version_that_is_known_to_be_wrong(group):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["optional-dependencies"].get(group, project["dependencies"])
    (jax_,) = (r for r in map(Requirement, listed) if r.name == "jax")
    for wrong in versions.KNOWN_WRONG:
        assert wrong not in jax_.specifier
    assert "0.10.0" not in jax_.specifier  # its Pallas and shard_map are other ones
    assert {"0.10.1", "0.11.2", "0.12.0.1"} <= {
        v for v in ("0.10.1", "0.11.2", "0.12.0.1") if v in jax_.specifier
    }
