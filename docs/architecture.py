"""Draws what pages of docs/ show of the code: the packages, the table of the seam, the API.

python docs/architecture.py          # writes the generated parts of these pages
"""

import ast
import importlib
import inspect
import pathlib
import re
import sys

import keras_tpu_dist
from keras_tpu_dist import _keras

sys.path.append(str(pathlib.Path(__file__).parent))
import figures

PACKAGE = pathlib.Path(keras_tpu_dist.__file__).parent
PAGE = pathlib.Path(__file__).with_suffix(".md")
CHANGES = PAGE.with_name("keras_changes.md")
API = PAGE.with_name("api.md")
REFERENCE = PAGE.with_name("reference")
# The pages of the reference in the order of the API's page.
GROUPS = ("strategy", "layouts", "dry_run", "callbacks", "replica", "layers", "hardware")


# Packages that hold packages, and the modules in them that know these.
WINGS = ("programs", "tools")
ABOVE = ("programs.passes",)


def package_named(parts: tuple[str, ...] | list[str]) -> str:
    """The package of a module: in a wing, the one within it.

    Args:
        parts: The module's name below this package.
    """
    inner = len(parts) > 1 and parts[0] in WINGS and (PACKAGE / parts[0] / parts[1]).is_dir()
    inner = inner or ".".join(parts[:2]) in ABOVE
    return ".".join(parts[:2]) if inner else parts[0]


def imports() -> dict[str, set[str]]:
    """From each package, or module beside the packages, to those it imports."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        package = package_named(path.relative_to(PACKAGE).with_suffix("").parts)
        if package == "__init__":
            continue
        known = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_tpu_"):
                parts = node.module.split(".")[1:]
                if not parts or parts[-1] in WINGS:
                    names = [package_named([*parts, alias.name]) for alias in node.names]
                else:
                    names = [package_named(parts)]
                known.update(name for name in names if name != package)
    return found


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """The packages by level: each imports from levels below it only."""
    placed: dict[str, int] = {}
    while len(placed) < len(graph):
        ready = [
            package
            for package in graph
            if package not in placed and graph[package] <= placed.keys()
        ]
        assert ready, f"a circle within {sorted(graph.keys() - placed.keys())}"
        placed |= {
            package: 1 + max((placed[below] for below in graph[package]), default=-1)
            for package in ready
        }
    return [sorted(r for r in placed if placed[r] == n) for n in range(max(placed.values()) + 1)]


def picture() -> str:
    """The levels, the highest first, as text."""
    rows = []
    for number, packages in reversed(list(enumerate(levels(imports())))):
        rows.append(f"level {number}   " + "   ".join(f"[ {package} ]" for package in packages))
    return "```\n" + "\n".join(rows) + "\n```"


def packages() -> str:
    """What each package says of itself, and what it knows."""
    graph = imports()
    rows = ["| package | what it is | knows |", "|---|---|---|"]
    for level in levels(graph):
        for package in level:
            folder = PACKAGE / package.replace(".", "/")
            module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            text = ast.get_docstring(ast.parse(module.read_text())) or ""
            knows = ", ".join(f"`{name}`" for name in sorted(graph[package])) or "nothing"
            rows.append(f"| `{package}` | {text.splitlines()[0]} | {knows} |")
    return "\n".join(rows)


def replaced() -> str:
    """The table of the seam."""
    rows = ["| replaced | why | the hook that would do |", "|---|---|---|"]
    rows += [f"| `{each}` | {each.why} | {each.hook} |" for each in _keras.table()]
    return "\n".join(rows)


def read() -> str:
    """The second table of the seam: names of one place, reason and hook are one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in _keras.names():
        rows.setdefault((each.owner.replace(":", "."), each.why, each.hook), []).append(each.name)
    head = ["| of | read or written | why | the hook that would do |", "|---|---|---|---|"]
    return "\n".join(
        [
            *head,
            *(
                f"| `{owner}` | {', '.join(f'`{n}`' for n in names)} | {why} | {hook} |"
                for (owner, why, hook), names in rows.items()
            ),
        ]
    )


def api() -> str:
    """Every public name, what it is, and the page that describes it."""
    parts = []
    for group in GROUPS:
        text = (REFERENCE / f"{group}.md").read_text()
        title = re.match(r"# (.+)\n", text)
        assert title is not None
        parts += [
            f"## [{title[1]}](reference/{group}.md)",
            "",
            "| name | what it does |",
            "|---|---|",
        ]
        public, _, returned = text.partition("## What they return")
        for path in described(public):
            parts.append(row(group, path))
            if path == "TPUStrategy":
                parts += [row(group, f"{path}.{name}") for name in members()]
        if returned:
            names = (link(group, path, False) for path in described(returned))
            parts += ["", f"What they return: {', '.join(names)}."]
        parts.append("")
    return "\n".join(parts).rstrip()


def described(text: str) -> list[str]:
    """The names that a part of the reference describes.

    Args:
        text: The part.
    """
    return re.findall(r"^::: keras_tpu_dist\.([\w.]+)$", text, re.MULTILINE)


def members() -> list[str]:
    """The strategy's own methods and properties with words, but for aliases."""
    kind = keras_tpu_dist.TPUStrategy
    ours = [c for c in kind.__mro__ if "keras_tpu_dist" in c.__module__]
    names = dict.fromkeys(name for c in ours for name in vars(c) if not name.startswith("_"))
    aliases = [name for name in names if name.startswith("experimental_")]
    return [n for n in names if n not in aliases and inspect.getdoc(getattr(kind, n))]


def row(group: str, path: str) -> str:
    """A row of the API's table.

    Args:
        group: The page of the reference.
        path: The name, from the package on.
    """
    words = inspect.getdoc(found(path)) or ""
    first = " ".join(words.split("\n\n")[0].split())
    return f"| {link(group, path)} | {first.replace('|', chr(92) + '|')} |"


def link(group: str, path: str, public: bool = True) -> str:
    """A name that leads to its place in the reference.

    Args:
        group: The page of the reference.
        path: The name, from the package on.
        public: Whether users write it.
    """
    parts = path.split(".")
    shown = parts[-1]
    if parts[0] == "TPUStrategy" and len(parts) == 2:
        shown = f"strategy.{shown}"
    elif public:
        inner = parts[0] in ("callbacks", "layers") and len(parts) == 2
        shown = f"ktd.{path if inner else shown}"
    return f"[`{shown}`](reference/{group}.md#keras_tpu_dist.{path})"


def found(path: str) -> object:
    """What a dotted name of the package names.

    Args:
        path: The name, from the package on.
    """
    module, _, name = f"{keras_tpu_dist.__name__}.{path}".rpartition(".")
    if path.startswith("TPUStrategy."):
        return getattr(keras_tpu_dist.TPUStrategy, name)
    return getattr(importlib.import_module(module), name)


PARTS = {
    PAGE: {"picture": picture, "packages": packages, "figures": figures.page},
    CHANGES: {"replaced": replaced, "read": read},
    API: {"names": api},
}


def written(path: pathlib.Path) -> str:
    """A page with its generated parts as the code now is.

    Args:
        path: One of `PARTS`.
    """
    page = path.read_text()
    for name, part in PARTS[path].items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = f"{before}{start}\n\n{part()}\n\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    for path in PARTS:
        path.write_text(written(path))
