"""Figures of packages beside one another: how large modules are, how often they explain themselves.

python docs/figures.py ~/src/optax/optax orbax.checkpoint:~/src/orbax/checkpoint/orbax/checkpoint

This package comes first. A package whose name is not its folder's is given with its name in front.
Tests within a package are left out. No figure is a limit: no test holds one.
"""

import ast
import collections
import dataclasses
import io
import pathlib
import statistics
import sys
import tokenize

import keras_tpu_dist

# Of others, as counted on 2026-11-25: equinox 9336d82, haliax 280f49f, optax 2edbcbe2,
# orbax-checkpoint 3ff7b24a, Keras 3.15.1.
OTHERS = """\
| equinox | 15976 | 72 | 134 | 539 | 1278 | 731 | 428 | 6.1% | 32 | 0 | 1 |
| haliax | 14936 | 46 | 190 | 775 | 2129 | 1002 | 154 | 5.7% | 23 | 0 | 1 |
| optax | 24255 | 76 | 190 | 736 | 2794 | 687 | 736 | 9.2% | 35 | 1 | 0 |
| orbax.checkpoint | 67981 | 251 | 156 | 672 | 2209 | 2646 | 355 | 8.1% | 57 | 11 | 0 |
| keras.src | 188793 | 473 | 194 | 916 | 10033 | 7986 | 441 | 3.4% | 255 | 0 | 4 |"""
TESTS = ("test", "tests", "_test.py", "test_", "testing", "conftest.py")


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is counted of a package."""

    name: str
    lines: int
    modules: int
    median: int
    p90: int
    largest: int
    functions: int
    longest_function: int
    comments: float
    one_importer: int
    splats: int
    circles: int


def of_package(package: str, root: pathlib.Path) -> Figures:
    """The figures of the package at a path.

    Args:
        package: Its dotted name.
        root: Its folder.
    """
    paths = [path for path in sorted(root.rglob("*.py")) if not is_test(path.relative_to(root))]
    if not paths:
        raise SystemExit(f"{root} holds no Python module")
    texts = {path: path.read_text() for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    sizes = sorted(len(text.splitlines()) for text in texts.values() if text.strip())
    functions = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
    ]
    named = {name_of(package, path.relative_to(root)): tree for path, tree in trees.items()}
    inits = [path for path in paths if path.name == "__init__.py"]
    packages = {name_of(package, path.relative_to(root)) for path in inits}
    graph = imports(named, packages)
    importers = collections.Counter(each for known in graph.values() for each in known)
    return Figures(
        name=package,
        lines=sum(sizes),
        modules=len(sizes),
        median=round(statistics.median(sizes)),
        p90=round(statistics.quantiles(sizes, n=10)[-1]),
        largest=sizes[-1],
        functions=len(functions),
        longest_function=max(functions),
        comments=sum(comment_lines(text) for text in texts.values()) / sum(sizes),
        one_importer=sum(importers[module] == 1 for module in graph if module not in packages),
        splats=sum(len(splats(tree)) for tree in trees.values()),
        circles=len(circles(graph)),
    )


def is_test(path: pathlib.Path) -> bool:
    """Whether a path within a package is of its tests.

    Args:
        path: Relative to the package.
    """
    return any(
        part in TESTS or part.startswith("test_") or part.endswith("_test.py")
        for part in path.parts
    )


def name_of(package: str, path: pathlib.Path) -> str:
    """A module's dotted name.

    Args:
        package: The package's.
        path: The module's file, relative to the package.
    """
    parts = path.with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imports(trees: dict[str, ast.Module], packages: set[str]) -> dict[str, set[str]]:
    """From each module to those of the package that it imports when it is itself imported.

    Args:
        trees: The modules by name.
        packages: Which of them are packages.
    """
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        package = name if name in packages else name.rpartition(".")[0]
        for node in at_import(tree.body):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = absolute(node, package)
                # A name of a package is one of its modules, or stands in its `__init__`.
                found = [f"{module}.{alias.name}" for alias in node.names]
                found = [each if each in trees else module for each in found]
            else:
                continue
            graph[name].update(each for each in found if each in trees and each != name)
    return graph


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that an import names, from the top.

    Args:
        node: The import.
        package: The package in which it stands.
    """
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def at_import(body: list[ast.stmt]):
    """The statements of a module that run, or are checked, when it is imported.

    Args:
        body: The module's statements.
    """
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from at_import(getattr(node, name, []))


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import one another, `TYPE_CHECKING` counted.

    Args:
        graph: From each module to those it imports.
    """
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        rest = list(graph[start])
        while rest:
            module = rest.pop()
            if module not in seen:
                seen.add(module)
                rest.extend(graph[module])
        reach[start] = seen
    found: list[set[str]] = []
    for module in graph:
        circle = {each for each in reach[module] if module in reach[each]}
        if circle and circle not in found:
            found.append(circle)
    return found


def comment_lines(text: str) -> int:
    """How many lines hold a comment.

    Args:
        text: A module's source.
    """
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def splats(tree: ast.Module) -> list[int]:
    """The lines on which a literal is unpacked where its items could stand: `*(a, b)`, `**{...}`.

    Args:
        tree: A module.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List, ast.Set)):
            found.append(node.lineno)
        elif isinstance(node, ast.keyword) and not node.arg and isinstance(node.value, ast.Dict):
            found.append(node.value.lineno)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found += [v.lineno for k, v in pairs if k is None and isinstance(v, ast.Dict)]
    return sorted(found)


def table(packages: list[Figures]) -> str:
    """The figures as a table in Markdown.

    Args:
        packages: The figures of each.
    """
    rows = [
        "| package | lines | modules | median | 90 % | largest | functions | longest "
        "| comments | one importer | splats | circles |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in packages:
        rows.append(
            f"| {each.name} | {each.lines} | {each.modules} | {each.median} | {each.p90} "
            f"| {each.largest} | {each.functions} | {each.longest_function} "
            f"| {each.comments:.1%} | {each.one_importer} | {each.splats} | {each.circles} |"
        )
    return "\n".join(rows)


def page() -> str:
    """The table of the page on architecture: this package in round numbers, beside others."""
    own = of_package("keras_tpu_dist", pathlib.Path(keras_tpu_dist.__file__).parent)
    rounded = dataclasses.replace(
        own,
        lines=round(own.lines, -3),
        functions=round(own.functions, -2),
        median=round(own.median, -1),
        p90=round(own.p90, -1),
        one_importer=round(own.one_importer, -1),
        comments=round(own.comments * 500) / 500,
    )
    return f"{table([rounded])}\n{OTHERS}"


def given(text: str) -> tuple[str, pathlib.Path]:
    """A package as the command line names it: its folder, with its name in front if need be.

    Args:
        text: `path` or `name:path`.
    """
    name, _, path = text.rpartition(":")
    root = pathlib.Path(path).expanduser().resolve()
    return name or root.name, root


if __name__ == "__main__":
    own = str(pathlib.Path(keras_tpu_dist.__file__).parent)
    print(table([of_package(*given(path)) for path in (own, *sys.argv[1:])]))
