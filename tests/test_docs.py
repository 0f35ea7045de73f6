"""The examples in docstrings run."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest
from helpers import of_docs

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


def test_drawn_pages_are_as_the_code_is():
    page = of_docs("architecture")
    for path in page.PARTS:
        assert page.written(path) == path.read_text(), "run `python docs/architecture.py`"


def test_what_the_architecture_page_names_exists():
    text = of_docs("architecture").PAGE.read_text()
    names = set(re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_.]+)`", text)) - {"strategy.runner"}
    names = {name for name in names if not name.startswith(("keras", "model.", "strategy."))}
    assert len(names) > 20
    for name in names:
        found = ktd
        for part in name.split("."):
            inner = f"{getattr(found, '__name__', '')}.{part}"
            if not hasattr(found, part) or inspect.isfunction(found):
                found = importlib.import_module(inner)
            else:
                found = getattr(found, part)
