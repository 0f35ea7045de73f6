"""What mkdocs fills in when it builds the site: the list of every error, from the source.

python docs/hooks.py errors                 # prints the list
python docs/hooks.py missing build/site     # public names that a built site does not have
"""

import ast
import functools
import pathlib
import re
import runpy
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

PACKAGE = pathlib.Path(__file__).parents[1] / "keras_tpu_dist"
_ids = runpy.run_path(str(PACKAGE / "common" / "error_ids.py"))
_MARK = "<!-- errors -->"
# Functions in a module of the same name, which the site would show in their place.
WRITTEN_AS = {"convert": "layers.convert.convert", "restore": "checkpoint.restore.restore"}


@dataclass(frozen=True)
class Error:
    """One call of `message(...)`.

    Attributes:
        folder: The folder, or the module beside the folders, that has it.
        kind: The exception, where it is raised on the spot.
        rule: The rule that was broken; what is filled in stands as "…".
        fix: What to write instead, likewise.
    """

    folder: str
    kind: str
    rule: str
    fix: str


@functools.cache
def errors(package: pathlib.Path = PACKAGE) -> tuple[Error, ...]:
    """Every error of the package whose words `message(...)` builds, by folder.

    Args:
        package: The folder of the sources.
    """
    found = []
    for path in sorted(package.rglob("*.py")):
        folder = path.relative_to(package).parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        kinds = dict(_raised(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "message":
                fix = next((k.value for k in node.keywords if k.arg == "fix"), None)
                kind = kinds.get(node, "error")
                found.append(Error(folder, kind, _ids["rule_of"](node), _ids["text"](fix)))
    return tuple(each for each in found if each.rule)


def _raised(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Calls of `message` within `raise Kind(message(...))`, and the kind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = getattr(node.exc.func, "id", "error")
            yield from ((a, kind) for a in node.exc.args if isinstance(a, ast.Call))


def page_of_errors() -> str:
    """The list as Markdown, the folders in alphabetical order."""
    found, lines, seen = list(dict.fromkeys(errors())), [], set()
    for folder in sorted({error.folder for error in found}):
        lines += ["", f"### {folder.strip('_')}", ""]
        for error in (each for each in found if each.folder == folder):
            name = _ids["identifier"](error.rule)
            anchor = "" if name in seen else f'<a id="{name}"></a>'
            seen.add(name)
            fix = [] if error.fix == "…" else ["<br>", _plain(error.fix)]
            lines += [f"{anchor}**{_plain(error.rule)}** ({error.kind}, `{name}`)", *fix, ""]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text.replace("\n", " "))


def public_names(package: pathlib.Path = PACKAGE) -> list[str]:
    """Names that the package, its layers and its callbacks export, read from `X as X` lines.

    Args:
        package: The folder of the sources.
    """
    names = []
    for prefix in ("", "layers.", "callbacks."):
        tree = ast.parse((package / prefix.rstrip(".") / "__init__.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                exported = [a.asname for a in node.names if a.asname and a.asname == a.name]
                names += [prefix + name for name in exported if not name.startswith("_")]
    return sorted({*names} - {"layers", "callbacks", "layers.convert"})


def missing(site: pathlib.Path) -> list[str]:
    """Public names without a place in a built site.

    Args:
        site: The folder that mkdocs wrote.
    """
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    wanted = [*public_names(), *(f"TPUStrategy.{name}" for name in methods_of("TPUStrategy"))]
    written = ((name, WRITTEN_AS.get(name, name)) for name in wanted)
    return [name for name, path in written if f"keras_tpu_dist.{path}" not in known]


def methods_of(name: str, package: pathlib.Path = PACKAGE) -> set[str]:
    """Public methods and properties of a class, and of its bases in the package.

    Args:
        name: The class.
        package: The folder of the sources.
    """
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
    classes = {n.name: n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)}
    found, left = set(), [name]
    while left:
        one = classes.get(left.pop())
        if one is not None:
            found |= {n.name for n in one.body if isinstance(n, ast.FunctionDef)}
            left += [base.id for base in one.bases if isinstance(base, ast.Name)]
    return {each for each in found if not each.startswith("_")}


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Called by mkdocs for each page."""
    return markdown.replace(_MARK, page_of_errors()) if _MARK in markdown else markdown


if __name__ == "__main__":
    if sys.argv[1:2] == ["missing"]:
        lacking = missing(pathlib.Path(sys.argv[2]))
        print(f"public names that are not in the reference: {lacking or 'none'}")
        sys.exit(bool(lacking))
    print(page_of_errors())
