"""The pages: every block of Python runs, every public name is in the reference."""

import functools
import importlib
import inspect
import pathlib
import re
import runpy
import types

import keras
import pytest

import keras_tpu_dist as ktd

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block of Python, what a comment before it says, and code in a comment that prepares or checks.
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\s*)?^```python[^\n]*\n(?P<code>.*?)^```"
    r"|^<!-- run\n(?P<hidden>.*?)^-->",
    re.DOTALL | re.MULTILINE,
)
# Blocks that are not run, by page: each has its reason beside it.
NOT_RUN = {
    "README.md": 1,
    "checkpoints.md": 4,
    "costs.md": 3,
    "experts.md": 1,
    "from_pytorch_xla.md": 1,
    "from_tpuestimator.md": 2,
    "index.md": 1,
    "migration.md": 1,
    "pods.md": 3,
    "remat.md": 1,
    "troubleshooting.md": 2,
}
# Run elsewhere: in processes of their own, since the compiler may abort.
ELSEWHERE = {"xla_partitioner.md": "tests/conformance/test_reports.py"}
# Pages that take more than a second or two.
SLOW = {
    *("attention.md", "checkpoints.md", "costs.md", "device_loop.md", "from_tpuestimator.md"),
    *("experts.md", "index.md", "layouts.md", "logical_devices.md", "ragged.md", "recurrent.md"),
    *("migration.md", "sequences.md", "troubleshooting.md"),
}


def blocks(page):
    """`(line, code, reason)` of each block; `reason` says why one is not run."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        group = "code" if found["code"] is not None else "hidden"
        yield 1 + text[: found.start(group)].count("\n"), found[group], found["reason"]


def with_code():
    for page in PAGES:
        if page.name not in ELSEWHERE and any(not reason for _, _, reason in blocks(page)):
            marks = [pytest.mark.slow] if page.name in SLOW else []
            yield pytest.param(page, id=page.name, marks=marks)


@pytest.mark.parametrize("page", list(with_code()))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for line, code, reason in blocks(page):
        if not reason:
            # Lines are counted as in the page.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def test_what_is_not_run_says_why():
    found = {page.name: [b for b in blocks(page) if b[2]] for page in PAGES}
    assert {name: len(left) for name, left in found.items() if left} == NOT_RUN
    assert all(len(reason) > 5 for left in found.values() for _, _, reason in left)


def test_every_block_of_python_is_seen():
    for page in PAGES:
        fences = re.findall(r"^\s*```+ ?(?:python|py)\b", page.read_text(), re.MULTILINE)
        assert len(fences) == len([b for b in BLOCK.finditer(page.read_text()) if b["code"]])


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@functools.cache
def site():
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "public_names.py")))


def referenced():
    """What the pages of the reference describe: every `::: name`."""
    names = {path: name for name, path in site().WRITTEN_AS.items()}
    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    found = re.findall(r"^::: keras_tpu_dist\.([\w.]+)$", text, re.MULTILINE)
    return [names.get(path, path) for path in found]


def exported(module):
    """The names of a module that are no modules."""
    public = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {name for name, value in public.items() if not inspect.ismodule(value)}


def test_every_public_name_is_in_the_reference():
    inner = [f"{m}.{name}" for m in ("layers", "callbacks") for name in exported(getattr(ktd, m))]
    public = exported(ktd) | {name for name in inner if ktd.convert is not named(name)}
    assert len(public) > 30
    described = referenced()
    assert len(described) == len(set(described))
    assert public - set(described) == set(), "add it to a page of docs/reference"
    shorthand = {n for n in described if "." not in n or n.startswith(("layers.", "callbacks."))}
    assert shorthand == public
    assert set(site().public_names()) == public


def named(dotted):
    found = ktd
    for part in dotted.split("."):
        if not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        else:
            found = getattr(found, part)
    return found


def test_what_the_reference_describes_exists():
    for name in referenced():
        assert named(name).__doc__, name


def test_what_is_returned_is_no_type():
    """The site takes what stands before a colon for a type."""
    members = [m for name in referenced() for m in [named(name), *vars(type(named(name))).values()]]
    members += [m for name in referenced() for m in getattr(named(name), "__dict__", {}).values()]
    for member in members:
        words = inspect.getdoc(member) or "" if callable(member) else ""
        for part in re.findall(r"^(?:Returns|Yields):\n((?:    .*\n?)+)", words, re.MULTILINE):
            assert not re.search(r":\s", part), (member, part)


def test_every_method_of_the_strategy_has_words_of_its_own():
    ours = [name for name in dir(ktd.TPUStrategy) if not name.startswith("_")]
    stock = {name for name in dir(keras.distribution.ModelParallel) if not name.startswith("_")}
    assert len(ours) > 30
    for name in ours:
        member = inspect.getattr_static(ktd.TPUStrategy, name)
        defined = any(
            name in vars(c) for c in ktd.TPUStrategy.__mro__ if "keras_tpu" in c.__module__
        )
        assert defined or name in stock, name
        assert not defined or member.__doc__, name


def test_what_troubleshooting_quotes_is_in_the_source():
    """Every quoted message, of which "…" stands for what is filled in."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = "".join(p.read_text() for p in (ROOT / "keras_tpu_dist").rglob("*.py"))
    # Strings that are written in several pieces.
    source = re.sub(r'"\s*f?"', "", source)
    quotes = re.findall(r"^> (.+)$", text, re.MULTILINE)
    assert len(quotes) > 5
    for quote in quotes:
        for piece in quote.split("…"):
            assert piece.strip(" :") in source, piece
