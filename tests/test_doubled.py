"""What stands twice by mistake: sections and arguments of docstrings, names of modules, changes."""

import ast
import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "keras_tpu_dist").rglob("*.py"))


def doubled(found):
    return [each for each, count in collections.Counter(found).items() if count > 1]


def test_no_docstring_has_a_section_or_an_argument_twice():
    wrong = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                sections = re.split(r"^(\w+):$", text, flags=re.MULTILINE)
                # An error may have several reasons, each with its own entry.
                named = [
                    (section, name)
                    for section, body in zip(sections[1::2], sections[2::2], strict=True)
                    for name in re.findall(r"^    (\*{0,2}\w+): ", body, flags=re.MULTILINE)
                    if section in ("Args", "Attributes")
                ]
                twice = doubled(sections[1::2]) + doubled(named)
                wrong += [(file.name, getattr(node, "name", ""), *each) for each in twice]
    assert not wrong


def test_no_name_of_a_module_is_assigned_twice_to_the_same():
    wrong = []
    for file in FILES:
        body = ast.parse(file.read_text()).body
        wrong += [(file.name, each) for each in doubled(map(ast.dump, body))]
    assert not wrong


def test_no_change_is_listed_twice():
    changes = re.split(r"^- ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    # The same first sentence is the same change, written again.
    firsts = [re.split(r"[.;:] ", " ".join(each.split()))[0] for each in changes[1:]]
    assert not [first for first in doubled(firsts) if len(first) > 40]
