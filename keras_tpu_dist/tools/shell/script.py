"""Checks that `launch` has a program, before it starts processes that would all fail."""

import glob
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from keras_tpu_dist.common.errors import message, value_error

_MAIN = "__main__"


def check_script(script: str, as_module: bool) -> None:
    """Raises an error if Python cannot find a program.

    Args:
        script: A file, a folder with a `__main__.py`, or the name of a module.
        as_module: Whether it is the name of a module, as in `python -m`.
    """
    if as_module:
        _check_module(script)
    else:
        _check_file(Path(script))


def _check_file(path: Path) -> None:
    if path.is_file() or (path / f"{_MAIN}.py").is_file():
        return
    what, nearest = "which does not exist", _programs(path.parent)
    if path.is_dir():
        what, nearest = f"which is a folder without {_MAIN}.py", []
    inside = _programs(path)
    raise value_error(
        "launch needs a Python file.",
        received=f"script={str(path)!r}, {what}.",
        fix=f"Name a file, such as {inside[0]}." if inside else "Check the path.",
        name=str(path),
        choices=nearest,
    )


def _programs(folder: Path) -> list[str]:
    """The paths of the Python files in a folder, and of the folders that Python can run."""
    if not folder.is_dir():
        return []
    return sorted(
        str(path)
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / f"{_MAIN}.py").is_file()
    )


def _check_module(name: str) -> None:
    """Looks for a module as `python -m` does, but imports none of its packages."""
    if name.endswith(".py") and Path(name).is_file():
        raise value_error(
            "-m needs the name of a module, not a file.",
            received={"module": name},
            fix="Leave out -m, or the ending .py.",
        )
    top, *rest = name.split(".")
    folders = _folders_of(top)
    if folders is None:
        raise _not_found(name, f"{top!r} does not exist", _names([Path.cwd()]))
    package = top
    for word in rest:
        if _unknown(folders):
            return
        within, folders = folders, _folders_within(folders, word)
        if folders is None:
            what = f"{package!r} contains no {word!r}"
            raise _not_found(name, what, _names(within, f"{package}."))
        package = f"{package}.{word}"
    if folders and not _unknown(folders) and _folders_within(folders, _MAIN) is None:
        raise _not_found(name, f"the package has no {_MAIN}.py", _names(folders, f"{package}."))


def _not_found(name: str, what: str, choices: Iterable[str]) -> ValueError:
    return ValueError(
        message(
            "launch -m needs a module that Python can run.",
            received=f"module={name!r}; {what}.",
            fix="Check the name and the folder that you are in.",
            name=name,
            choices=choices,
        )
    )


def _folders_of(top: str) -> list[Path] | None:
    """The folders of a package; `[]` of another module, and `None` of one that is not found."""
    try:
        # As `python -m` does: the current folder first, and nothing that is imported here already.
        spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
        spec = spec or importlib.util.find_spec(top)  # which also finds modules of Python itself
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return [Path(place) for place in spec.submodule_search_locations or ()]


def _folders_within(folders: Sequence[Path], name: str) -> list[Path] | None:
    """The same for a module in the folders of its package."""
    for folder in folders:
        if (folder / name / "__init__.py").is_file():
            return [folder / name]
        if any(folder.glob(f"{glob.escape(name)}.*")):
            return []
    return [place / name for place in folders if (place / name).is_dir()] or None


def _unknown(folders: Sequence[Path]) -> bool:
    """Whether a package chooses its folders when it is imported, or has some in a zip file."""
    starts = [folder / "__init__.py" for folder in folders]
    chosen = any(b"__path__" in start.read_bytes() for start in starts if start.is_file())
    # Python remembers folders that are gone: those are in no file.
    return chosen or any(any(map(Path.is_file, folder.parents)) for folder in folders)


def _names(folders: Iterable[Path], prefix: str = "") -> list[str]:
    return [module.name for module in pkgutil.iter_modules(map(str, folders), prefix)]
