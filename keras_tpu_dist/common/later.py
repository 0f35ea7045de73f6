"""Names of a package that are loaded when they are asked for first."""

import importlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


def loaded_later(
    package: str, names: MutableMapping[str, Any], later: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package some of whose names are loaded later (PEP 562).

    Args:
        package: The package's name.
        names: Its `globals()`, which get each name once it is loaded.
        later: From a name to the package's module that has it; a module of that name is the name
            itself.

    Returns:
        The two functions.
    """

    def load(name: str) -> Any:
        if name not in later:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{later[name]}")
        names[name] = module if name == later[name] else getattr(module, name)
        return names[name]

    def listed() -> list[str]:
        own = {name for name in names if name not in ("TYPE_CHECKING", "loaded_later")}
        return sorted(own | set(later))

    return load, listed
