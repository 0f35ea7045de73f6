"""Finds out which compiler options a compiler refuses, with a small program. Imports no Keras."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MOST_WORDS = 200


def refused_options(
    wanted: Mapping[str, Any], optional: Iterable[str], devices: Sequence[Any]
) -> dict[str, str]:
    """Tries options on a program with one all-reduce, and optional ones one by one.

    Args:
        wanted: The options.
        optional: The names of options that can be left out.
        devices: The devices to compile for; nothing runs.

    Returns:
        The options that must be left out, with the compiler's messages; empty if all compile.

    Raises:
        jax.errors.JaxRuntimeError: If the rest does not compile either.
    """
    import jax

    lowered = _one_all_reduce(devices)
    rest, refused = dict(wanted), dict[str, str]()
    left = [name for name in optional if name in rest]
    try:
        lowered.compile(compiler_options=rest)
        return refused
    except jax.errors.JaxRuntimeError:
        if not left:
            raise
    rest = {name: value for name, value in wanted.items() if name not in left}
    lowered.compile(compiler_options=rest)
    for name in left:  # one by one, so that every option gets its own message
        try:
            lowered.compile(compiler_options={**rest, name: wanted[name]})
            rest[name] = wanted[name]
        except jax.errors.JaxRuntimeError as error:
            refused[name] = str(error)
    return refused


def first_line(words: str) -> str:
    """A compiler's message on one line, its beginning only.

    Args:
        words: The message.
    """
    line = " ".join(words.split())
    return line if len(line) <= _MOST_WORDS else line[:_MOST_WORDS] + " ..."


def _one_all_reduce(devices: Sequence[Any]) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    mesh = jax.sharding.Mesh(grid, ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def laid_out(*axes: str) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    rows = jax.ShapeDtypeStruct((8 * len(devices), 128), jnp.float32, sharding=laid_out("data"))
    weights = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=laid_out())
    gradient = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
    return jax.jit(gradient, out_shardings=laid_out()).lower(weights, rows)
