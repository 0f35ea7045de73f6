"""A move of rows or of time, then whatever uses what was moved.

XLA may get two operations wrong together that it has right alone. A case is named by what it does,
one after the other: `"roll > set last"`, `"sort > add one > conv"`. Each operation goes along the
first dimension of an array of any rank, and takes whole numbers for places that are known at run
time.
"""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

THEN = " > "
TIMES = 16
Operation = Callable[[jax.Array, jax.Array], jax.Array]


def _ids(x, ids):
    return ids[:8] % x.shape[0]


def _regrouped(x, ids):
    """Rows as a matrix, turned: as pixels that become patches."""
    parts = next(n for n in (4, 3, 2, 1) if x.shape[0] % n == 0)
    return jnp.swapaxes(x.reshape(parts, -1, *x.shape[1:]), 0, 1).reshape(x.shape)


def _grouped(x, ids):
    """Pairs of rows as one, side by side."""
    x = x[: x.shape[0] // 2 * 2]
    return x.reshape(-1, 2, *x.shape[1:]).sum(1)


def _shifted(x, by):
    return x.at[:-by].set(x[by:])


MOVES: dict[str, Operation] = {
    "none": lambda x, ids: x * 1.5,
    "without first": lambda x, ids: x[1:],
    "without last": lambda x, ids: x[:-2],
    "middle": lambda x, ids: x[2:-1],
    "every other": lambda x, ids: x[::2],
    "slice there": lambda x, ids: lax.dynamic_slice_in_dim(x, ids[0] % 4, x.shape[0] - 3),
    "shift": lambda x, ids: _shifted(x, 1),
    "shift far": lambda x, ids: _shifted(x, 5),
    "shift back": lambda x, ids: x.at[1:].set(x[:-1]),
    "shift joined": lambda x, ids: jnp.concatenate([x[1:], x[:1] * 2]),
    "shift padded": lambda x, ids: jnp.pad(x, [(1, 0), *[(0, 0)] * (x.ndim - 1)])[:-1],
    "roll": lambda x, ids: jnp.roll(x, 1, 0),
    "roll back": lambda x, ids: jnp.roll(x, -3, 0),
    "roll there": lambda x, ids: jnp.roll(x, ids[0], 0),
    "twice": lambda x, ids: jnp.concatenate([x, x * 2]),
    "more": lambda x, ids: jnp.concatenate([x[:3], x]),
    "tile": lambda x, ids: jnp.tile(x, (2, *[1] * (x.ndim - 1))),
    "repeat": lambda x, ids: jnp.repeat(x, 2, 0),
    "pad before": lambda x, ids: jnp.pad(x, [(2, 0), *[(0, 0)] * (x.ndim - 1)]),
    "pad after": lambda x, ids: jnp.pad(x, [(0, 3), *[(0, 0)] * (x.ndim - 1)]),
    "reflect": lambda x, ids: jnp.pad(x, [(2, 1), *[(0, 0)] * (x.ndim - 1)], mode="reflect"),
    "reverse": lambda x, ids: x[::-1],
    "gather": lambda x, ids: x[np.random.default_rng(0).permutation(x.shape[0])],
    "gather there": lambda x, ids: x[ids % x.shape[0]],
    "regroup": _regrouped,
    "group": _grouped,
    "sort": lambda x, ids: jnp.sort(x, 0),
    "order": lambda x, ids: x[jnp.argsort(x.reshape(x.shape[0], -1)[:, 0])],
}

WRITES: dict[str, Operation] = {
    "set first": lambda x, ids: x.at[0].set(0.5),
    "set last": lambda x, ids: x.at[-1].set(x[0]),
    "set one": lambda x, ids: x.at[3].set(0.5),
    "set there": lambda x, ids: x.at[ids[1] % x.shape[0]].set(x[1]),
    "set element": lambda x, ids: x.at[4, 1].set(0.5),
    "set some": lambda x, ids: x.at[2:4].set(0.5),
    "set many": lambda x, ids: x.at[:-1].set(x[1:] * 2),
    "set rows": lambda x, ids: x.at[np.array([1, 5, 3])].set(x[:3]),
    "update": lambda x, ids: lax.dynamic_update_slice_in_dim(x, x[:1] * 2, 3, 0),
    "update there": lambda x, ids: lax.dynamic_update_slice_in_dim(x, x[:1], ids[1] % 5, 0),
    "update some": lambda x, ids: lax.dynamic_update_slice_in_dim(x, x[:2] * 2, 2, 0),
    "update some there": lambda x, ids: lax.dynamic_update_slice_in_dim(x, x[:2], ids[1] % 5, 0),
    "add one": lambda x, ids: x.at[2].add(x[0]),
    "add some": lambda x, ids: x.at[1:5].add(x[:4]),
    "add rows": lambda x, ids: x.at[_ids(x, ids)].add(x[_ids(x, ids + 1)]),
    "multiply one": lambda x, ids: x.at[-2].multiply(3.0),
    "multiply rows": lambda x, ids: x.at[np.array([1, 5, 3])].multiply(x[:3], unique_indices=True),
    "multiply row": lambda x, ids: x.at[np.array([5])].multiply(x[:1], unique_indices=True),
    "min one": lambda x, ids: x.at[1].min(x[0]),
    "max one": lambda x, ids: x.at[-1].max(x[2]),
    "max rows": lambda x, ids: x.at[_ids(x, ids)].max(0.9),
    "where": lambda x, ids: jnp.where(_positions(x) == 3, 0.5, x),
}


def _positions(x):
    return lax.broadcasted_iota(jnp.int32, x.shape, 0)


def _windows_of(x, function, size, step=1, padding="SAME"):
    rest = (1,) * (x.ndim - 1)
    start = -np.inf if function is lax.max else 0.0
    return lax.reduce_window(
        x, np.asarray(start, x.dtype), function, (size, *rest), (step, *rest), padding
    )


def _convolved(x, step=1, dilation=1, padding="SAME"):
    channels = x.shape[-1]
    kernel = np.linspace(-1, 1, 3 * channels**2, dtype=x.dtype).reshape(3, channels, channels)
    image = x[None] if x.ndim == 2 else jnp.moveaxis(x, 0, 1)
    found = lax.conv_general_dilated(
        *(image, kernel, (step,), padding),
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    return found[0] if x.ndim == 2 else jnp.moveaxis(found, 1, 0)


WINDOWS: dict[str, Operation] = {
    "cumsum": lambda x, ids: jnp.cumsum(x, 0),
    "cumsum back": lambda x, ids: lax.cumsum(x, 0, reverse=True),
    "cummax": lambda x, ids: lax.cummax(x, 0),
    "cumlogsumexp": lambda x, ids: lax.cumlogsumexp(x, 0),
    "difference": lambda x, ids: jnp.diff(x, axis=0),
    "window sum": lambda x, ids: _windows_of(x, lax.add, 3),
    "window max": lambda x, ids: _windows_of(x, lax.max, 2),
    "max pool": lambda x, ids: _windows_of(x, lax.max, 2, 2, "VALID"),
    "mean pool": lambda x, ids: _windows_of(x, lax.add, 3, 2) / 3,
    "conv": lambda x, ids: _convolved(x),
    "conv step": lambda x, ids: _convolved(x, 2),
    "conv causal": lambda x, ids: _convolved(x, 1, 2, [(4, 0)]),
    "scan": lambda x, ids: lax.scan(lambda c, row: ((c + row) / 2,) * 2, x[0], x)[1],
}
REDUCTIONS: dict[str, Operation] = {
    "sum": lambda x, ids: x.sum(0),
    "mean": lambda x, ids: x - x.mean(0, keepdims=True),
    "max": lambda x, ids: x.max(0),
    "var": lambda x, ids: x.var(0),
    "product": lambda x, ids: x.prod(0),
    "argmax": lambda x, ids: x.argmax(0).astype(x.dtype),
    "logsumexp": lambda x, ids: jax.nn.logsumexp(x, axis=0),
    "softmax": lambda x, ids: jax.nn.softmax(x, axis=0),
    "segment of one": lambda x, ids: jax.ops.segment_sum(x[:1], ids[1:2], 12),
    "segments of three": lambda x, ids: jax.ops.segment_sum(x[:3], ids[1:4], 12),
    "segments": lambda x, ids: jax.ops.segment_sum(x, jnp.arange(x.shape[0]) % 5, 5),
    "product of rows": lambda x, ids: jnp.tensordot(x, x, [[0], [0]]),
    "median": lambda x, ids: jnp.median(x, 0),
}
LOOKUPS: dict[str, Operation] = {
    "first": lambda x, ids: x[0],
    "last": lambda x, ids: x[-1],
    "there": lambda x, ids: x[ids[1] % x.shape[0]],
    "element": lambda x, ids: x[3, 1],
    "slice": lambda x, ids: x[2:5],
    "slice there": lambda x, ids: lax.dynamic_slice_in_dim(x, ids[1] % 4, 3),
    "row there": lambda x, ids: lax.dynamic_slice_in_dim(x, ids[1] % 4, 1),
    "take": lambda x, ids: jnp.take(x, _ids(x, ids), 0),
    "take along": lambda x, ids: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "one of rows": lambda x, ids: jax.nn.one_hot(_ids(x, ids), x.shape[0]) @ x.reshape(len(x), -1),
    "top": lambda x, ids: lax.top_k(x.reshape(x.shape[0], -1).T, 3)[0],
}
_KEEP = {**MOVES, **WRITES, **WINDOWS}
_READ = {**REDUCTIONS, **{f"read {name}": function for name, function in LOOKUPS.items()}}
_ALL = {**_KEEP, **_READ}
_TIME = "time: "

CASES = {
    f"{along}{move}{THEN}{then}": None
    for along in ("", _TIME)
    for move in MOVES
    for then in _ALL
    if then not in MOVES
}


def meshes(case: str) -> tuple[str, ...]:
    """The meshes that split what a case goes along: rows or time."""
    return ("2x2t2",) if case.startswith(_TIME) else ("8", "4x2", "2x2x2")


def threes(count: int, seed: int) -> list[str]:
    """Cases of three operations, drawn at random."""
    rng = random.Random(seed)
    found: set[str] = set()
    while len(found) < count:
        names = rng.choice([*MOVES]), rng.choice([*_KEEP]), rng.choice([*_ALL])
        case = rng.choice(["", _TIME]) + THEN.join(names)
        if _leaves_rows(names[:2]):
            found.add(case)
    return sorted(found)


def _leaves_rows(names: tuple[str, ...]) -> bool:
    """Whether as many rows are left as every operation needs."""
    x, ids = jnp.ones((13, 3)), jnp.zeros(13, jnp.int32)
    for name in names:
        x = _ALL[name](x, ids)
    return x.shape[0] >= 6


def arrays(case: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """What a case is computed of: an array without equal values, and whole numbers."""
    rng = np.random.default_rng(rows)
    shape = (rows, TIMES) if case.startswith(_TIME) else (rows,)
    x = rng.uniform(0.5, 1.5, (*shape, 3)).astype("float32")
    return x, rng.integers(0, 12, shape).astype("int32")


def results(cases: list[str], laid: Callable, gradient: bool) -> Callable:
    """What cases, all along rows or all along time, compute of an array; or its gradients.

    For gradients `laid` gives what an operation makes a layout, as between layers.
    """
    time = cases[0].startswith(_TIME)

    def turned(x):
        return jnp.swapaxes(x, 0, 1) if time and x.ndim > 1 else x

    def made(case, x, ids):
        for name in case.removeprefix(_TIME).split(THEN):
            x = turned(_ALL[name](turned(x), ids[0] if time else ids))
            x = laid(x) if gradient else x
        return x

    def weight(x):
        return jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))

    def differentiated(case, x, ids):
        return jax.grad(lambda x: (jnp.sin(y := made(case, x, ids)) * weight(y)).sum())(x)

    def computed(x, ids):
        # Each of its own array: XLA refuses some programs with several slices of one.
        function = differentiated if gradient else made
        return {case: function(case, lax.optimization_barrier(x), ids) for case in cases}

    return computed
