"""The pages: every block of Python runs, every public name is in the reference."""

import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import runpy
import types

import keras
import pytest
from helpers import of_docs

import keras_tpu_dist as ktd

ROOT = pathlib.Path(__file__).parents[1]


reader = of_docs("reader")
PAGES = reader.PAGES
# Blocks that are not run, by page: each has its reason beside it.
NOT_RUN = {
    "README.md": 1,
    "checkpoints.md": 6,
    "coming_from.md": 3,
    "keras_hub.md": 2,
    "migration.md": 1,
    "pods.md": 4,
    "troubleshooting.md": 2,
}
# Run elsewhere: in processes of their own, since the compiler may abort; and commands.
ELSEWHERE = {
    "xla_partitioner.md": "tests/conformance/test_reports.py",
    "shell.md": "tests/shell/test_shell_page.py",
}
# Pages that take more than a second or two.
SLOW = {
    *("attention.md", "checkpoints.md", "coming_from.md", "costs.md", "experts.md", "index.md"),
    *("input.md", "kaggle_colab.md", "keras_hub.md", "layouts.md", "logical_devices.md"),
    *("migration.md", "mixed_precision.md", "recurrent.md", "remat.md"),
    "troubleshooting.md",
}


def with_code():
    for page in PAGES:
        if page.name not in ELSEWHERE and any(not b.reason for b in reader.blocks(page)):
            marks = [pytest.mark.slow] if page.name in SLOW else []
            yield pytest.param(page, id=page.name, marks=marks)


@pytest.mark.parametrize("page", list(with_code()))
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    for name in reader.needs(page):
        pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.chdir(tmp_path)
    policy = keras.config.dtype_policy()
    try:
        for block, printed in reader.run(page):
            shown = reader.shown(block)
            assert shown is None or reader.agrees(shown, printed, block.title or "Output"), (
                f"{page.name}:{block.line} prints otherwise; python docs/reader.py --write "
                f"{page.name}\n{printed}"
            )
    finally:
        keras.config.set_dtype_policy(policy)


def test_what_is_not_run_says_why():
    found = {page.name: [b.reason for b in reader.blocks(page) if b.reason] for page in PAGES}
    assert {name: len(left) for name, left in found.items() if left} == NOT_RUN
    assert all(len(reason) > 5 for left in found.values() for reason in left)


def test_every_block_of_python_is_seen():
    for page in PAGES:
        fences = re.findall(r"^\s*```+ ?(?:python|py)\b", page.read_text(), re.MULTILINE)
        seen = [b for b in reader.blocks(page) if b.language == "python" and not b.hidden]
        assert len(fences) == len(seen)


def test_the_readme_is_short_and_has_pictures():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    assert len(re.findall(r"!\[[^]]+\]\(docs/pictures/", text)) >= 2


def test_the_picture_of_the_first_screen_is_drawn_from_the_table():
    pictures = of_docs("pictures")
    found = pictures.sizes()
    assert pictures.PICTURE.read_text() == pictures.svg(found), "run python docs/pictures.py"
    sizes = list(found.values())
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("rule", reader.RULES)
def test_pages_read_well(rule):
    assert reader.problems(rule) == []


def test_what_is_pending_is_still_wrong():
    assert reader.done() == []


FAULTS = {
    "output": ("```python\nprint(strategy.explain(model))\n```\n", "shows nothing"),
    "when not to": ("# A guide\n", 'no heading "When not to"'),
    "words": ("The strategy is told.\n", "'told'"),
    "promises": ("The log says so.\n", "which message"),
    "promises of info": ("The log says so.<!-- log: simulating -->\n", "no WARNING has"),
    "links": ("[there](nowhere.md)\n", "no such file"),
    "links to headings": ("[there](#nowhere)\n", "no such heading"),
    "tables": ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n", "page.md:5: a row"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_page_is_found(fault, tmp_path, monkeypatch):
    text, words = FAULTS[fault]
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr(reader, "PAGES", [page])
    monkeypatch.setattr(reader, "guides", lambda: [page])
    rule = next(rule for rule in reader.RULES if fault.startswith(rule))
    assert any("page.md" in found and words in found for found in reader.problems(rule))


def test_what_a_page_shows_is_compared():
    assert reader.agrees("a  1\n\n", "a  1   \n")
    assert not reader.agrees("a 1", "a 2")
    assert reader.agrees("a\n...\nz", "a\nb\nc\nz")
    assert reader.agrees("took ... s", "took 1.5 s")
    assert not reader.agrees("a\n...\nz", "a\nb")
    assert reader.agrees("1", "2", "Output, libtpu 0.0.0")
    assert reader.agrees("1.5 ms", "20 ms", "Output, numbers vary")
    assert not reader.agrees("1.5 ms", "20 s", "Output, numbers vary")


def test_outputs_are_written(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    code = "```python\nprint({})\n```\n"
    stale = code.format("3") + '\n```text title="Output"\n4\n```\n'
    page.write_text(f"{code.format('1')}\nwords\n\n{stale}\nend\n")
    reader.write(page)
    assert page.read_text() == (
        '```python\nprint(1)\n```\n\n```text title="Output"\n1\n```\n\nwords\n\n'
        '```python\nprint(3)\n```\n\n```text title="Output"\n3\n```\n\nend\n'
    )


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


wrapping = of_docs("wrapping")


def test_long_names_of_tables_may_break():
    name = "keras.src.trainers.epoch_iterator.EpochIterator.__init__"
    cell = "<table><td><code>{}</code> a/short_name</td></table>"
    assert wrapping.on_page_content(cell.format(name)) == cell.format(
        "keras.<wbr>src.<wbr>trainers.<wbr>epoch<wbr>_iterator.<wbr>EpochIterator.<wbr>__init__"
    )
    short = "<table><td><code>v5e-8</code> takes 1.5 ms</td></table>"
    assert wrapping.on_page_content(short) == (
        '<table><td><code class="whole">v5e-8</code> takes 1.5&nbsp;ms</td></table>'
    )
    outside = f"<p><code>{name}</code></p>"
    assert wrapping.on_page_content(outside) == outside


def test_sentences_of_output_wrap_and_its_tables_do_not():
    block = '<pre><span></span><code><span class="go">{}</span>\n{}</code></pre>'
    sentence, table = "word &amp; " * 20 + "end", "left" + " " * 100 + "right"
    assert wrapping.on_page_content(block.format("short", table)) == block.format("short", table)
    shown = wrapping.on_page_content(block.format(sentence, "x"))
    assert shown == block.format(sentence, "x").replace(
        f'<span class="go">{sentence}</span>',
        f'<span class="sentence"><span class="go">{sentence}</span></span>',
    )
