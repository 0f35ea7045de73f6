"""Lower bounds: one for each requirement, and each with tests that `oldest.py` runs."""

import tomllib

import oldest
import pytest
from packaging.requirements import Requirement


def test_every_requirement_has_one_lower_bound_and_tests():
    bounds = oldest.lower_bounds()
    assert set(bounds) == set(oldest.TESTS)
    assert str(bounds["jax"]) == "jax[tpu]==0.10.1"
    for tests in filter(None, oldest.TESTS.values()):
        assert all((oldest.ROOT / path).exists() for path in tests)
    assert {"tensorflow-cpu", "torch"}.isdisjoint(oldest.chosen([]))
    assert "grain" in oldest.chosen(["grain"])
    assert "scikit-learn" not in oldest.chosen(["grain"])


def test_two_bounds_of_one_requirement_are_an_error(tmp_path, monkeypatch):
    text = (oldest.ROOT / "pyproject.toml").read_text()
    data = tomllib.loads(text)["project"]["optional-dependencies"]["data"][0]
    assert Requirement(data).name == "grain"
    other = text.replace(f'"{data}"', '"grain>=0.3"', 1)
    (tmp_path / "pyproject.toml").write_text(other)
    monkeypatch.setattr(oldest, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"one lower bound.*grain.*0\.[23].*0\.[23]"):
        oldest.lower_bounds()
