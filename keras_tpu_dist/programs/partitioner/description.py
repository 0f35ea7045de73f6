"""What decides which compiled program a call needs, in words."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh, NamedSharding

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def description_of(args: Any, mesh: Mesh, options: Mapping[str, Any]) -> dict[str, str]:
    """The arguments, the mesh, the options and the versions of a program, by name.

    Args:
        args: The arguments.
        mesh: The mesh.
        options: The options of `jax.jit`.
    """
    first = mesh.devices.flat[0]
    leaves = jax.tree_util.tree_leaves_with_path(args)
    arguments = {f"argument {jax.tree_util.keystr(path)}": _type_of(leaf) for path, leaf in leaves}
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    made_for = {
        "the mesh": str(dict(mesh.shape)),
        "the chip": f"{mesh.size} x {first.device_kind}",
        "the number of processes": str(len({device.process_index for device in mesh.devices.flat})),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "the compiler": first.client.platform_version,
    }
    return arguments | made_for | _options(options) | variables


def _type_of(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    layout = f" {tuple(sharding.spec)}" if isinstance(sharding, NamedSharding) else ""
    return f"{jax.numpy.result_type(leaf)}{list(jax.numpy.shape(leaf))}{layout}"


def _options(options: Mapping[str, Any]) -> dict[str, str]:
    """The options by name, those of the compiler one by one."""
    of_compiler = options.get("compiler_options") or {}
    of_jit = {name: str(value) for name, value in options.items() if name != "compiler_options"}
    return of_jit | {f"compiler option {name}": str(value) for name, value in of_compiler.items()}
