"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import keras_tpu_dist as ktd

MODULES = [
    m.name
    for m in pkgutil.walk_packages(ktd.__path__, "keras_tpu_dist.")
    if not m.name.endswith("__main__")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("name", [n for n in dir(ktd) if not n.startswith("_")])
def test_public_names_are_documented(name):
    public = getattr(ktd, name)
    assert public.__doc__, name
    if callable(public):
        assert "Example:" in public.__doc__, f"{name} has no example"
