"""Public names that a built site has no place for.

python docs/public_names.py build/site
"""

import ast
import pathlib
import sys
import zlib

PACKAGE = pathlib.Path(__file__).parents[1] / "keras_tpu_dist"
# Functions in a module of the same name, which the site would show in their place.
WRITTEN_AS = {"convert": "layers.convert.convert", "restore": "checkpoint.restore.restore"}


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
    return {name for name in found if not name.startswith("_")}


if __name__ == "__main__":
    lacking = missing(pathlib.Path(sys.argv[1]))
    print(f"public names that are not in the reference: {lacking or 'none'}")
    sys.exit(bool(lacking))
