"""What tests, benchmarks, examples and pages' scripts use of the package exists.

Slow tests and benchmarks run seldom, so a name that has changed would be found weeks later.
"""

import ast
import functools
import importlib
import pathlib
import re
import types

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("tests", "benchmarks", "examples", "docs")
# monkeypatch.setattr(module, "name", ...), mock.patch.object(module, "name", ...), getattr.
PATCHES = {"setattr", "delattr", "object", "getattr"}
# `tests/replica/test_advice.py` reads the errors of names that users try.
MISSING_ON_PURPOSE = (".nothing_such", "keras_tpu_dist.distribute", "keras_tpu_dist.serch")


def missing(source):
    """What a program uses of the package's modules and they do not have."""
    tree = ast.parse(source)
    modules, found = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_tpu_dist"):
            for alias in node.names:
                value = member(node.module, alias.name)
                if value is None:
                    found.append(f"{node.module}.{alias.name}")
                modules[alias.asname or alias.name] = value
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("keras_tpu_dist") and alias.asname:
                    modules[alias.asname] = importlib.import_module(alias.name)
    assigned = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    } | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        name, attribute = used(node)
        module = modules.get(name)
        known = isinstance(module, types.ModuleType) and name not in assigned
        if known and not hasattr(module, attribute) and member(module.__name__, attribute) is None:
            found.append(f"{module.__name__}.{attribute}")
    return [name for name in found if not name.endswith(MISSING_ON_PURPOSE)]


def used(node):
    """The names of a module and of its attribute, if an expression uses one."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if called in PATCHES and len(node.args) > 1:
            first, second = node.args[:2]
            if isinstance(first, ast.Name) and isinstance(second, ast.Constant):
                return first.id, second.value
    return None, None


@functools.cache
def member(module, name):
    """A module's attribute or submodule; `None` if there is none."""
    found = getattr(importlib.import_module(module), name, None)
    if found is not None:
        return found
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_used_of_the_package_exists(folder):
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := missing(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (
            "from keras_tpu_dist.programs.tables import step as s\ns._LEAST",
            ["keras_tpu_dist.programs.tables.step._LEAST"],
        ),
        (
            "from keras_tpu_dist.programs.tables.step import _LEAST",
            ["keras_tpu_dist.programs.tables.step._LEAST"],
        ),
        ("import keras_tpu_dist as ktd\nktd.TPUStrategie()", ["keras_tpu_dist.TPUStrategie"]),
        (
            "from keras_tpu_dist.programs.tables import width\n"
            "monkeypatch.setattr(width, '_LEAST', 1)",
            ["keras_tpu_dist.programs.tables.width._LEAST"],
        ),
        ("from keras_tpu_dist.programs.tables import width\nwidth.LEAST_BYTES", []),
        ("from keras_tpu_dist.programs.tables import width\nwidth = 3\nwidth.real_part", []),
    ],
)
def test_the_search_for_missing_names_finds_them(source, names):
    assert missing(source) == names


# HERE / "network.py", HERE.parent / "checkpoint" / "network.py"
OWN_FILE = re.compile(r'\b_?HERE((?:\.parent)*)((?: / "[\w.]+")+)')


def own_files(path):
    """The Python files that a script names beside itself."""
    source = path.read_text()
    if not re.search(r"HERE = (pathlib\.)?Path\(__file__\)\.parent$", source, re.MULTILINE):
        return
    for parents, parts in OWN_FILE.findall(source):
        folder = path.parents[parents.count(".parent")]
        if parts.endswith('.py"'):
            yield folder.joinpath(*re.findall(r'"([\w.]+)"', parts))


@pytest.mark.parametrize("folder", FOLDERS)
def test_scripts_that_are_named_exist(folder):
    named = [file for path in (ROOT / folder).rglob("*.py") for file in own_files(path)]
    assert named or folder != "tests"
    assert [str(file.relative_to(ROOT)) for file in named if not file.exists()] == []
