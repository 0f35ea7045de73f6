"""Operations of JAX that move rows along a dimension, every way they can be called on few rows."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Named = Iterator[tuple[str, Callable]]
_ZERO = np.float32(0)


def pad(rows: int) -> Named:
    for low in (0, 1, 2, 3, 5, 8, 11, 14, 17):
        for high in (0, 1, 2, 4, 7):
            config = [(low, high, 0)]
            yield f"pad{config}", lambda x, config=config: lax.pad(x, _ZERO, config)
    for low in (-1, 0, 2):
        for high in (-1, 0, 1):
            for interior in (0, 1, 2):
                if rows + low + high + (rows - 1) * interior > 0:
                    config = [(low, high, interior)]
                    yield f"pad{config}", lambda x, config=config: lax.pad(x, _ZERO, config)


def slice_(rows: int) -> Named:
    for start in range(0, rows, max(rows // 6, 1)):
        for stop in sorted({start + 1, (start + rows) // 2 + 1, rows - 1, rows}):
            for step in (1, 2, 3, 5):
                if start < stop <= rows:
                    at = slice(start, stop, step)
                    # Each of its own array: XLA refuses some programs with several slices of one,
                    # see docs/xla_partitioner.md.
                    yield (
                        f"[{start}:{stop}:{step}]",
                        lambda x, at=at: lax.optimization_barrier(x)[at],
                    )


def join(rows: int) -> Named:
    for cut in range(1, rows):
        yield f"swap{cut}", lambda x, cut=cut: lax.concatenate([x[cut:], x[:cut]], 0)
        yield f"before{cut}", lambda x, cut=cut: lax.concatenate([x[:cut], x], 0)
        yield f"after{cut}", lambda x, cut=cut: lax.concatenate([x, x[:cut]], 0)
    for shift in range(-rows, rows, 2):
        yield f"roll{shift}", lambda x, shift=shift: jnp.roll(x, shift)
    for times in (1, 2, 3):
        yield f"tile{times}", lambda x, times=times: jnp.tile(x, times)
        yield f"repeat{times}", lambda x, times=times: jnp.repeat(x, times)


def order(rows: int) -> Named:
    yield "rev", lambda x: lax.rev(x, (0,))
    yield "sort", lambda x: jnp.sort(-x)
    yield "median", jnp.median
    for name in ("cumsum", "cummax", "cumlogsumexp"):
        for reverse in (False, True):
            function = getattr(lax, name)
            yield f"{name}{reverse}", lambda x, f=function, r=reverse: f(x, reverse=r)
    for mode in ("reflect", "symmetric", "edge", "wrap"):
        for low in range(min(rows, 4)):
            for high in range(min(rows, 4)):
                width = ((low, high),)
                yield f"{mode}{width}", lambda x, w=width, m=mode: jnp.pad(x, w, mode=m)
    for parts in range(1, rows):
        if rows % parts == 0:
            yield f"reshape{parts}", lambda x, parts=parts: x.reshape(parts, -1)
            yield f"transpose{parts}", lambda x, parts=parts: x.reshape(parts, -1).T.reshape(-1)


def at(rows: int) -> Named:
    for number in (1, 3, 8):
        indices = np.random.default_rng(number).integers(0, rows, number)
        yield f"take{number}", lambda x, i=indices: x[i]
        yield f"add{number}", lambda x, i=indices: x.at[i].add(x[i] * 2)
    for start in (0, 1, rows // 2, rows, rows + 5):
        for size in sorted({1, max(rows // 2, 1), rows}):
            place = lambda x, start=start: (x[0] * 0).astype(int) + start  # noqa: E731
            yield (
                f"dynamic_slice{start},{size}",
                lambda x, p=place, n=size: lax.dynamic_slice(x, [p(x)], [n]),
            )
            yield (
                f"dynamic_update_slice{start},{size}",
                lambda x, p=place, n=size: lax.dynamic_update_slice(x, -x[:n], [p(x)]),
            )


def window(rows: int) -> Named:
    for size in range(1, min(rows, 5) + 1):
        for step in (1, 2, 3):
            for padding in ("VALID", "SAME", ((1, 2),), ((size - 1, 0),)):
                name = f"{size},{step},{padding}"
                args = ((size,), (step,), padding)
                yield f"sum{name}", lambda x, a=args: lax.reduce_window(x, _ZERO, lax.add, *a)
                yield f"max{name}", lambda x, a=args: _finite_max(x, a)
                for dilations in (((1,), (2,)), ((2,), (1,))):
                    yield (
                        f"sum{name},{dilations}",
                        lambda x, a=args, d=dilations: lax.reduce_window(x, _ZERO, lax.add, *a, *d),
                    )


def convolve(rows: int) -> Named:
    numbers = ("NWC", "WIO", "NWC")
    for size in range(1, min(rows, 4) + 1):
        kernel = np.arange(1.0, size + 1, dtype="float32")[:, None, None]
        for step in (1, 2, 3):
            for padding in ("VALID", "SAME", ((1, 2),)):
                for dilations in (((1,), (1,)), ((1,), (2,)), ((2,), (1,))):
                    if dilations[0] == (2,) and isinstance(padding, str):
                        continue
                    args = (kernel, (step,), padding, *dilations, numbers)
                    yield (
                        f"{size},{step},{padding},{dilations}",
                        lambda x, a=args: lax.conv_general_dilated(x[None, :, None], *a)[0, :, 0],
                    )


def _finite_max(x, args):
    # A window that lies in the padding has no maximum.
    found = lax.reduce_window(x, np.float32(-np.inf), lax.max, *args)
    return jnp.where(jnp.isfinite(found), found, 0.0)


FAMILIES = {f.__name__: f for f in (pad, slice_, join, order, at, window, convolve)}
ROWS = (1, 2, 3, 5, 8, 13, 16, 17)


def results(family: str, rows: int, gradient: bool, laid: Callable) -> Callable:
    """All results of a family, or their gradients, of a vector; `laid` lays a result out."""
    functions = dict(FAMILIES[family](rows))

    def differentiated(function):
        return jax.grad(lambda x: jnp.sum(jnp.sin(laid(function(x)).astype("float32"))))

    def everything(x):
        made = {n: differentiated(f) if gradient else f for n, f in functions.items()}
        return {name: function(x) for name, function in made.items()}

    return everything
