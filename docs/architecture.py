"""Draws what pages of docs/ show of the code: the packages and the table of the seam.

python docs/architecture.py          # writes the generated parts of these pages
"""

import ast
import pathlib

import keras_tpu_dist
from keras_tpu_dist import _keras

PACKAGE = pathlib.Path(keras_tpu_dist.__file__).parent
PAGE = pathlib.Path(__file__).with_suffix(".md")
CHANGES = PAGE.with_name("keras_changes.md")


def imports() -> dict[str, set[str]]:
    """From each package, or module beside the packages, to those it imports."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        known = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_tpu_"):
                parts = node.module.split(".")
                names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
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
            module = PACKAGE / package / "__init__.py"
            module = module if module.exists() else PACKAGE / f"{package}.py"
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


PARTS = {
    PAGE: {"picture": picture, "packages": packages},
    CHANGES: {"replaced": replaced, "read": read},
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
