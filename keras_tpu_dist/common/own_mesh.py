"""Code of the package runs in its own mesh, whatever mesh the user has set with `jax.set_mesh`.

Within a mesh of another shape JAX refuses our arrays, or gives new ones its layouts.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

_NOTHING = contextlib.nullcontext()


def own_mesh(mesh: Mesh | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context without the mesh that the user has set, if there is one: enter it at once.

    Args:
        mesh: The mesh of the code within. If the user has set one with the same axes, it stays
            set, so that layouts without a mesh, such as `PartitionSpec("data")`, have a meaning.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.empty or (mesh is not None and around is mesh.abstract_mesh):
        return _NOTHING
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return _NOTHING  # A program that is being traced keeps the mesh in which it began.
    same = mesh is not None and around.shape == mesh.shape
    return jax.set_mesh(mesh if same else None)


def in_own_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that computes with arrays on our mesh."""

    @functools.wraps(function)
    def within(*args, **kwargs):
        with own_mesh():
            return function(*args, **kwargs)

    return within
