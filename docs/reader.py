"""Reads the pages as a newcomer does: what calls print, headings, words, promises, links.

    python docs/reader.py                     # lists what is wrong; exit code 1 if anything is
    python docs/reader.py --write input.md   # runs the page's code, and writes what it prints

Below a block that prints stands what it printed, in a block with the title "Output": tests run the
page and compare. A line `...`, or `...` within a line, stands for anything, such as seconds. With
`Output, libtpu 0.0.41` it is compared if this version is installed, with `Output, numbers vary` the
words alone are.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import os
import pathlib
import re
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "keras_tpu_dist"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

# A block of Python or of a shell, what a comment before it says, what it prints, and code in a
# comment that prepares or checks.
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\s*)?"
    r"^```(?P<language>python|console)[^\n]*\n(?P<code>.*?)^```\n?"
    r'(?:\s*^```text title="(?P<title>Output[^"\n]*)"\n(?P<output>.*?)^```)?'
    r"|^<!-- run\n(?P<hidden>.*?)^-->",
    re.DOTALL | re.MULTILINE,
)
# Functions and methods that report: a page shows what they print.
REPORTING = {
    *("explain", "lint", "show", "dry_run", "search", "diff", "restore", "scan_blocks"),
}
SHELL = ("python -m keras_tpu_dist ", "ktd ")

# Words that only this project uses so, and how to write them. They are looked for in pages and
# docstrings, in any case.
PRIVATE_WORDS = {
    r"the house": "the package, or nothing",
    r"rooms": "packages",
    r"floors": "layers",
    r"told": "gets, knows, is given; or turn the sentence round",
    r"said so": "warns",
    r"what lies": "name the thing",
    r"nobody here owns": "you don't have",
    r"lies otherwise": "is laid out differently",
    r"who has none left": "a process that runs out",
    r"nobody has to own|nobody has attached": "you don't have, that is not attached",
    r"only named": "without its chips",
    r"of no such kind": "has the wrong type or value",
    r"where there is none|where there are none": "if there is none",
    r"as it lies": "in its layout",
    r"gives back|given back": "returns, restores, gets back",
    r"(?:do|does|need) not divide(?! the)": "is not divisible by, is not a multiple of",
    r"nobody": "turn the sentence round: is not read, you did not ask",
    r"tak(?:e|es|en|ing)(?: it| them)? apart": "splits, separates, reshapes",
    r"says? so": "warns, reports; or name what you see",
    r"lies? (?:on|in|at|by|whole|there|elsewhere)": "is on, is in; is not split",
    r"(?:stays?|lies?|made|kept|keep|keeps|used) whole": "is not split, is replicated, is gathered",
}
# What promises a line in the log, in a page. The comment that follows in the same line,
# <!-- log: text -->, has a piece of the message: its level in the source is at least WARNING. A
# page that speaks of INFO itself says how to see it.
PROMISE = re.compile(
    r"\bthe logs? (?:say|ha[sv]e|name|warn|show)|\b(?:is|are) logged\b|\blogs (?:a|an|one|the)\b"
    r"|\bin the log\b|\ba log line\b",
    re.IGNORECASE,
)
LOG = re.compile(r"<!-- log: (.+?) -->")
SEE_ALL = "troubleshooting.md#see-every-notice"

# What is left to do, with its reason: (page, rule).
PENDING: dict[tuple[str, str], str] = {}


@dataclasses.dataclass(frozen=True)
class Block:
    """Code in a page.

    Args:
        line: The line of its first line of code.
        code: The code.
        language: `"python"` or `"console"`.
        hidden: Whether readers do not see it.
        reason: Why it is not run, or `None`.
        title: That of the block with what it prints, or `None`.
        output: What stands there, or `None`.
        span: Where `output` begins and ends in the page's text, or where it would.
    """

    line: int
    code: str
    language: str
    hidden: bool
    reason: str | None
    title: str | None
    output: str | None
    span: tuple[int, int]


def blocks(page: pathlib.Path) -> list[Block]:
    """The blocks of code of a page.

    Args:
        page: Its file.
    """
    text, found = page.read_text(), []
    for match in BLOCK.finditer(text):
        group = "code" if match["code"] is not None else "hidden"
        found.append(
            Block(
                line=1 + text[: match.start(group)].count("\n"),
                code=match[group],
                language=match["language"] or "python",
                hidden=group == "hidden",
                reason=match["reason"],
                title=match["title"],
                output=match["output"],
                span=match.span("output") if match["title"] else (match.end(), match.end()),
            )
        )
    return found


def run(page: pathlib.Path, all_of_it: bool = False) -> Iterator[tuple[Block, str]]:
    """Runs the code of a page in one namespace.

    Args:
        page: Its file.
        all_of_it: Whether blocks that tests do not run are run too.

    Yields:
        Each block that is run, and what it printed.
    """
    names = {"__name__": page.stem}
    for block in blocks(page):
        if block.reason and not all_of_it:
            continue
        if block.language == "console":
            yield block, in_shell(block.code)
            continue
        with columns(), contextlib.redirect_stdout(io.StringIO()) as printed:
            # Lines are counted as in the page.
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            exec(code, names)
        yield block, printed.getvalue()


def columns() -> contextlib.AbstractContextManager:
    """A context in which tables are as wide as without a terminal."""
    return unittest.mock.patch.dict(os.environ, COLUMNS="100")


def in_shell(code: str) -> str:
    """Runs the commands of a block, those behind `$`, in this process.

    Args:
        code: The block.

    Returns:
        The commands, each with what it printed.
    """
    import shlex

    from keras_tpu_dist.__main__ import main

    lines = []
    for line in code.splitlines():
        command = line.removeprefix("$ ")
        start = next((start for start in SHELL if command.startswith(start)), None)
        if command == line:
            continue
        assert start is not None, f"cannot be run here: {command}"
        with columns(), contextlib.redirect_stdout(io.StringIO()) as printed:
            main(shlex.split(command.removeprefix(start)))
        lines += [line, *printed.getvalue().splitlines()]
    return "\n".join(lines) + "\n"


def needs(page: pathlib.Path) -> list[str]:
    """The modules that the code of a page imports besides those that every test has.

    Args:
        page: Its file.
    """
    found = re.search(r"^<!-- needs: (.+?) -->", page.read_text(), re.MULTILINE)
    return found[1].split(", ") if found else []


def agrees(written: str, printed: str, title: str = "Output") -> bool:
    """Whether a page shows what was printed.

    Args:
        written: What the page shows.
        printed: What was printed.
        title: The title above it, which may name a libtpu.
    """
    named = re.search(r"libtpu ([\d.]+)", title)
    if named and named[1] != libtpu():
        return True
    if "numbers vary" in title:
        written, printed = (re.sub(r"\d[\d.,]*\d|\d", "#", text) for text in (written, printed))
    pattern = re.escape(tidy(written)).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, tidy(printed), re.DOTALL) is not None


def tidy(text: str) -> str:
    """Text without spaces at the ends of lines, and empty lines at its end.

    Args:
        text: The text.
    """
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


@functools.cache
def libtpu() -> str | None:
    """The version of libtpu that is installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def shown(block: Block) -> str | None:
    """What a page shows of what a block prints, `None` if nothing.

    Args:
        block: The block.
    """
    if block.language == "console":
        lines = block.code.splitlines()
        return block.code if any(not line.startswith("$ ") for line in lines) else None
    return block.output


def write(page: pathlib.Path, all_of_it: bool = False) -> None:
    """Runs a page, and writes below its blocks what they print, if that is shown or has to be.

    Args:
        page: Its file.
        all_of_it: Whether blocks that tests do not run are run too.
    """
    text, new, end = page.read_text(), [], 0
    for block, printed in run(page, all_of_it):
        if block.hidden or (shown(block) is None and not reports(block)):
            continue
        if shown(block) is not None and agrees(shown(block), printed, block.title or "Output"):
            continue
        if block.language == "console":
            start = text.index(block.code, end)
            span, written = (start, start + len(block.code)), tidy(printed) + "\n"
        elif block.title is None:
            span, written = block.span, f'\n```text title="Output"\n{tidy(printed)}\n```\n'
        else:
            span, written = block.span, tidy(printed) + "\n"
        new += [text[end : span[0]], written]
        end = span[1]
    page.write_text("".join([*new, text[end:]]))


def guides() -> list[pathlib.Path]:
    """The pages of the site's navigation before "Coming from", but for the quick start."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("  - Coming from:\n")[0]
    names = re.findall(r": ([\w/]+\.md)$", nav, re.MULTILINE)
    return [DOCS / name for name in names if name != "index.md"]


def reports(block: Block) -> bool:
    """Whether a block prints what a reporting function returns, or prints at all.

    Args:
        block: The block.
    """
    if block.hidden:
        return False
    if block.language == "console":
        return True
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            if name in REPORTING - {"restore", "scan_blocks"}:
                return True
    return False


def prose(page: pathlib.Path) -> list[tuple[int, str]]:
    """The lines of a page that are no code, with their numbers.

    Args:
        page: Its file.
    """
    text = re.sub(
        r"^[ ]*```.*?^[ ]*```|^<!-- run\n.*?^-->|`[^`\n]+`",
        lambda match: re.sub(r"[^\n]", " ", match[0]),
        page.read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
    return list(enumerate(text.splitlines(), 1))


def docstrings() -> Iterator[tuple[str, str]]:
    """Where each docstring of the package stands, and its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    line = getattr(node, "lineno", 1)
                    yield f"{path.relative_to(ROOT)}:{line}", re.sub(r"`[^`\n]+`", " ", text)


def without_output() -> Iterator[tuple[str, str]]:
    """Blocks of guides that print, without what they print."""
    for page in [ROOT / "README.md", DOCS / "index.md", *guides()]:
        for block in blocks(page):
            if not block.reason and shown(block) is None and reports(block):
                yield page.name, f"{page.name}:{block.line}: shows nothing of what it prints"


def without_when_not_to() -> Iterator[tuple[str, str]]:
    """Guides that do not say what they are not for."""
    for page in guides():
        if not re.search(r"^## When not to", page.read_text(), re.MULTILINE):
            yield page.name, f'{page.name}: has no heading "When not to"'


def private_words() -> Iterator[tuple[str, str]]:
    """Words of this project's own in pages and docstrings."""
    words = re.compile("|".join(rf"\b{word}\b" for word in PRIVATE_WORDS), re.IGNORECASE)
    for page in PAGES:
        for line, text in prose(page):
            for found in words.findall(text):
                yield page.name, f"{page.name}:{line}: {found!r}: {advice(found)}"
    for where, text in docstrings():
        for found in words.findall(text):
            yield where, f"{where}: {found!r}: {advice(found)}"


def advice(word: str) -> str:
    """What to write for a private word.

    Args:
        word: The word as it was found.
    """
    return next(new for old, new in PRIVATE_WORDS.items() if re.fullmatch(old, word.lower()))


def promises() -> Iterator[tuple[str, str]]:
    """Promises of a line in the log that nobody sees, since it is at INFO."""
    warned = [text for text, level in messages() if level != "info"]
    for page in PAGES:
        for line, text in passages(page):
            pieces = LOG.findall(text)
            if PROMISE.search(LOG.sub("", text)) and not pieces and SEE_ALL not in text:
                yield page.name, f"{page.name}:{line}: which message? add <!-- log: text -->"
            for piece in pieces:
                if not any(piece in message for message in warned):
                    yield page.name, f"{page.name}:{line}: no WARNING has {piece!r}"


def passages(page: pathlib.Path) -> Iterator[tuple[int, str]]:
    """The paragraphs, items and rows of a page, with the number of the first line.

    Args:
        page: Its file.
    """
    first, lines = 1, []
    for number, line in enumerate([*page.read_text().splitlines(), ""], 1):
        if not line.strip() or line.startswith(("|", "- ", "#")):
            if lines:
                yield first, " ".join(lines)
            first, lines = number, []
        lines += [line] if line.strip() else []


@functools.cache
def messages() -> list[tuple[str, str]]:
    """What the package logs: the constant text of each call, and its level."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("info", "warning", "error", "critical", "exception"):
                found.append((constants(node.args[:1]), name))
            elif name in ("log_once", "_say"):
                level = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
                quiet = not level or ast.unparse(level[0]).endswith("INFO")
                found.append((constants(node.args[:1]), "info" if quiet else "warning"))
            elif name == "Answer":  # of a pass; `programs.answers.keep` logs it
                levels = [k.value for k in node.keywords if k.arg == "level"]
                loud = any(ast.unparse(level).endswith("WARNING") for level in levels)
                found.append((constants(node.args[1:2]), "warning" if loud else "info"))
    return found


def constants(nodes: list[ast.expr]) -> str:
    """The constant text within expressions, in their order.

    Args:
        nodes: The expressions.
    """
    inner = [n for node in nodes for n in ast.walk(node)]
    return "".join(
        n.value for n in inner if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )


def dead_links() -> Iterator[tuple[str, str]]:
    """Links to files or headings that are not there."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists():
                yield page.name, f"{page.name}: {target}: there is no such file"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                yield page.name, f"{page.name}: {target}: there is no such heading"


def torn_tables() -> Iterator[tuple[str, str]]:
    """Rows of tables without a head above them, as an empty line leaves them."""
    for page in PAGES:
        lines = [*prose(page), (0, "")]
        for (_, before), (line, text), (_, after) in zip([(0, ""), *lines], lines, lines[1:]):
            row = text.startswith("|") and not before.startswith("|")
            if row and not re.match(r"\|[ :|-]+$", after):
                yield page.name, f"{page.name}:{line}: a row of a table that has no head"


@functools.cache
def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings.

    Args:
        page: Its file.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", head).lower() for head in heads]
    # Of a name that the site describes, and of its members.
    described = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    if "keras_tpu_dist.TPUStrategy" in described:
        described += [f"keras_tpu_dist.TPUStrategy.{name}" for name in public_members()]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip()) for head in plain} | {
        *described
    }


def public_members() -> list[str]:
    """The strategy's public names."""
    import keras_tpu_dist

    return [name for name in dir(keras_tpu_dist.TPUStrategy) if not name.startswith("_")]


RULES = {
    "output": without_output,
    "when not to": without_when_not_to,
    "words": private_words,
    "promises": promises,
    "links": dead_links,
    "tables": torn_tables,
}


def problems(rule: str) -> list[str]:
    """What is wrong by one rule, but for what is still to do.

    Args:
        rule: One of `RULES`.
    """
    return [text for where, text in RULES[rule]() if (where, rule) not in PENDING]


def done() -> list[tuple[str, str]]:
    """What is in `PENDING` and no longer wrong."""
    if not PENDING:
        return []
    wrong = {(where, rule) for rule, find in RULES.items() for where, _ in find()}
    return [pending for pending in PENDING if pending not in wrong]


def main() -> int:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", nargs="+", metavar="PAGE", help="pages to write the output of")
    parser.add_argument("--all", action="store_true", help="run what tests do not run, too")
    options = parser.parse_args()
    if options.write:
        pages = [next(p for p in PAGES if p.name == name) for name in options.write]
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for page in pages:
                write(page, options.all)
        return 0
    found = [text for rule in RULES for text in problems(rule)]
    found += [f"no longer pending: {left}" for left in done()]
    print("\n".join(found) or "nothing is wrong")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
