"""Imports the user's code so that its names hide no module of Python or of an installed package.

Python itself puts the folder of a program first: with a `random.py` in it, Keras imports that one.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


class _Beside(MetaPathFinder):
    """Finds modules in the user's folders, for imports in the user's code alone.

    Other code imports what is installed. Only names that exist nowhere else are the same for both:
    the folders are also the last ones in `sys.path`.
    """

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.files: dict[str, ModuleType] = {}
        self.named = ""

    def add(self, folder: str | os.PathLike) -> None:
        """Adds a folder to search, after those that are known."""
        path = os.path.realpath(folder)
        if path not in self.folders:
            self.folders.append(path)
        if path not in sys.path:
            sys.path.append(path)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if path is not None or fullname in sys.stdlib_module_names:
            return None
        if fullname != self.named and not self._is_own(_importing_file()):
            return None
        return PathFinder.find_spec(fullname, self.folders)

    def _is_own(self, file: str) -> bool:
        """Whether a file is the user's; packages may be installed in a folder below the user's."""
        above = [folder for folder in sys.path if folder and file.startswith(f"{folder}{os.sep}")]
        return max(above, key=len, default="") in self.folders


def _importing_file() -> str:
    """The file whose code imports a module."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and file not in (__file__, importlib.__file__):
            return file
        frame = frame.f_back
    return ""


_BESIDE = _Beside()


def imported(module: str) -> ModuleType:
    """Imports a module by its name, from the working directory first.

    Raises:
        ImportError: If it cannot be imported.
    """
    _BESIDE.add(os.getcwd())
    _BESIDE.named = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    finally:
        _BESIDE.named = ""


def loaded(path: Path) -> ModuleType:
    """Runs a Python file as a module, and lets it import files beside it and in this folder.

    Returns:
        The module. Its name is the file's, unless another module has that.
    """
    path = Path(os.path.realpath(path))
    name = _free_name(path)
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    for folder in (path.parent, os.getcwd()):
        _BESIDE.add(folder)
    module = module_from_spec(spec)
    # Pickles and dataclasses of a model look up their module.
    sys.modules[name] = _BESIDE.files[name] = module
    spec.loader.exec_module(module)
    return module


def _free_name(path: Path) -> str:
    """The name of a file's module: its own, unless another module has it."""
    name = path.stem
    if not name.isidentifier():
        return name
    known = sys.modules.get(name)
    if name in sys.stdlib_module_names:
        other = "of Python"
    elif known is None:
        spec = find_spec(name)
        other = None if spec is None else spec.origin
    else:
        other = None if known is _BESIDE.files.get(name) else getattr(known, "__file__", "built in")
    return f"{name}_py" if other is not None and os.path.realpath(other) != str(path) else name
