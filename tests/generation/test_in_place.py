"""Loops whose caches are written in place, against the loops as they were written."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as some

from keras_tpu_dist.programs.generation.in_place import in_place

ROUNDS = 4


def caches_in_place(function):
    return lambda *args: in_place(function, args)[0]


def loops_of(function, *args):
    program = jax.make_jaxpr(function)(*args)
    return [equation for equation in program.jaxpr.eqns if equation.primitive.name == "while"]


def assert_same(function, *args):
    want, got = jax.jit(function)(*args), jax.jit(caches_in_place(function))(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def is_in_place(function, *args):
    """Whether no loop stacks, and each writes into an array of the cache's shape."""
    (loop,) = loops_of(caches_in_place(function), *args)
    names = [equation.primitive.name for equation in loop.params["body_jaxpr"].eqns]
    writes = [
        equation.outvars[0].aval.ndim
        for equation in loop.params["body_jaxpr"].eqns
        if equation.primitive.name == "dynamic_update_slice"
    ]
    return "stack" not in names and bool(writes) and min(writes) == 4


def decoder(layers, order=(0, 1), late=False, twice=False, whole=True, shift=0):
    """A loop over positions of a cache `(layers, 2, time, size)`, and what it takes."""

    def program(cache, x, kernels):
        def body(state):
            at, cache, x = state
            parts = []
            for layer in range(layers):
                of = cache[layer] if whole else cache[layer, :, :-1]
                made = [None, None]
                for which in order:
                    update = jnp.tanh(x @ kernels[layer, which])[None]
                    made[which] = jax.lax.dynamic_update_slice(of[which], update, (at + shift, 0))
                    if twice:
                        made[which] = jax.lax.dynamic_update_slice(
                            made[which], update + 1, (at + shift, 0)
                        )
                keys, values = made
                read = keys if not late else of[0]
                x = x + jax.nn.softmax(read @ x) @ values
                parts.append(jnp.stack(made))
            stacked = jnp.stack(parts)
            cache = stacked if whole else jnp.concatenate([stacked, cache[:, :, -1:]], axis=2)
            return at + 1, cache, x

        return jax.lax.while_loop(lambda s: s[0] < ROUNDS, body, (jnp.int32(0), cache, x))

    numbers = np.random.default_rng(0)
    cache = numbers.normal(size=(layers, 2, 6, 8)).astype("float32")
    x = numbers.normal(size=(8,)).astype("float32")
    kernels = numbers.normal(size=(layers, 2, 8, 8)).astype("float32") / 3
    return program, (cache, x, kernels)


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    layers=some.integers(1, 3),
    order=some.permutations([0, 1]),
    late=some.booleans(),
    twice=some.booleans(),
    whole=some.booleans(),
    shift=some.sampled_from([0, 1, 5, -1]),
)
def test_any_loop_over_a_cache_gives_the_same(**how):
    program, args = decoder(**how)
    assert_same(program, *args)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("late", [False, True])
def test_a_stacked_cache_is_written_in_place(order, late):
    program, args = decoder(2, order, late)
    assert is_in_place(program, *args)


def test_a_cache_that_is_more_than_writes_is_left_alone():
    program, args = decoder(2, whole=False)
    assert not is_in_place(program, *args)
    program, args = decoder(2, twice=True)
    assert not is_in_place(program, *args)


def test_a_stack_that_something_else_takes_is_made_too():
    def program(cache):
        def body(state):
            at, cache, total = state
            parts = [
                jax.lax.dynamic_update_slice(cache[i], cache[i, at][None] + 1, (at, 0))
                for i in range(2)
            ]
            stacked = jnp.stack(parts)
            return at + 1, stacked, total + stacked.sum()

        start = (jnp.int32(0), cache, jnp.float32(0))
        return jax.lax.while_loop(lambda s: s[0] < ROUNDS, body, start)

    assert_same(program, np.arange(48, dtype="float32").reshape(2, 6, 4))


def test_two_caches_of_one_loop():
    def program(a, b):
        def body(state):
            at, a, b = state
            made = [
                jnp.stack(
                    [
                        jax.lax.dynamic_update_slice(c[i], c[i, at][None] * 2, (at, 0))
                        for i in (0, 1)
                    ]
                )
                for c in (a, b)
            ]
            return at + 1, made[1], made[0]

        return jax.lax.while_loop(lambda s: s[0] < ROUNDS, body, (jnp.int32(0), a, b))

    shape = np.arange(48, dtype="float32").reshape(2, 6, 4)
    assert_same(program, shape, shape + 1)


GROUPS = [
    # The keys' and the queries' dimensions, and those of the product.
    ("bskd", "btkd", "bkts"),
    ("bskd", "btkd", "bkst"),
    ("bksd", "bktd", "bkts"),
    ("sbkd", "btkd", "kbts"),
]


@pytest.mark.parametrize(("keys", "queries", "result"), GROUPS)
@pytest.mark.parametrize("groups", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_heads_that_share_keys(keys, queries, result, groups, first):
    sizes = {"b": 2, "s": 128, "k": 2, "d": 4, "t": 1}
    numbers = np.random.default_rng(0)
    cache = numbers.normal(size=(2, 2, *(sizes[c] for c in keys))).astype("float32")
    of_queries = [sizes[c] * (groups if c == "k" else 1) for c in queries]
    query = numbers.normal(size=of_queries).astype("float32")
    time, axis = keys.index("s"), keys.index("k")

    def program(cache, query):
        def body(state):
            at, cache, total = state
            starts = [at if d == time else 0 for d in range(4)]
            update = jax.lax.slice_in_dim(cache[0, 0], 0, 1, axis=time) + 1
            made = [jax.lax.dynamic_update_slice(cache[0, j], update, starts) for j in (0, 1)]
            other = [cache[1, 0], jax.lax.dynamic_update_slice(cache[1, 1], update, starts)]
            repeated = jnp.repeat(made[0], groups, axis=axis)
            both = (f"{keys},{queries}", repeated, query)
            if not first:
                both = (f"{queries},{keys}", query, repeated)
            scores = jnp.einsum(f"{both[0]}->{result}", *both[1:])
            return at + 1, jnp.stack([jnp.stack(made), jnp.stack(other)]), total + jnp.tanh(scores)

        shape = [sizes[c] * (groups if c == "k" else 1) for c in result]
        start = (jnp.int32(0), cache, jnp.zeros(shape))
        return jax.lax.while_loop(lambda s: s[0] < ROUNDS, body, start)

    assert_same(program, cache, query)
    (loop,) = loops_of(caches_in_place(program), cache, query)
    (product,) = [e for e in loop.params["body_jaxpr"].eqns if e.primitive.name == "dot_general"]
    # Keys as they are stored, and queries by groups: padded to rows of a matrix unit if alone.
    assert tuple(sizes[c] for c in keys) in [v.aval.shape for v in product.invars]
    rows = {1: 8, 2: 2, 3: 3}[groups]
    assert any(rows in v.aval.shape and v.aval.ndim == 5 for v in product.invars)


@pytest.mark.parametrize(("time", "rows"), [(256, 8), (16, 1)])
def test_values_are_multiplied_by_rows_of_a_matrix_unit(time, rows):
    numbers = np.random.default_rng(0)
    cache = numbers.normal(size=(2, 2, time, 2, 32)).astype("float32")
    scores = numbers.normal(size=(2, 2, 1, time)).astype("float32")

    def program(cache, scores):
        def body(state):
            at, cache, total = state
            made = [
                jax.lax.dynamic_update_slice(c, c[:, :1] + 1, (0, at, 0, 0))
                for c in (cache[0], cache[1])
            ]
            found = jnp.einsum("bkts,bskd->btkd", scores, made[1])
            return at + 1, jnp.stack(made), total + jnp.tanh(found)

        start = (jnp.int32(0), cache, jnp.zeros((2, 1, 2, 32)))
        return jax.lax.while_loop(lambda s: s[0] < ROUNDS, body, start)

    assert_same(program, cache, scores)
    (loop,) = loops_of(caches_in_place(program), cache, scores)
    (product,) = [e for e in loop.params["body_jaxpr"].eqns if e.primitive.name == "dot_general"]
    found = [v.aval.size // (2 * 2 * time) for v in product.invars]
    assert sorted(found) == sorted([rows, 32])


def test_the_scale_of_a_norm_is_cast_once():
    def program(cache, scale):
        def body(state):
            at, cache, scale = state
            update = (cache[0, :1] * scale.astype("float32")).sum() * jnp.ones((1, 4))
            made = [jax.lax.dynamic_update_slice(cache[i], update[0], (at,)) for i in (0, 1)]
            return at + 1, jnp.stack(made), scale

        return jax.lax.while_loop(lambda s: s[0] < ROUNDS, body, (jnp.int32(0), cache, scale))

    cache, scale = np.ones((2, 1024), "float32"), jnp.full(1024, 2.0**-12, "bfloat16")
    assert_same(program, cache, scale)
    (loop,) = loops_of(caches_in_place(program), cache, scale)
    made = [v.aval for e in loop.params["body_jaxpr"].eqns for v in e.invars if hasattr(v, "aval")]
    assert not any(aval.dtype == "bfloat16" for aval in made)


@pytest.mark.parametrize("large", [True, False])
def test_weights_are_cast_once(large):
    size = 256 if large else 4

    def program(cache, weight):
        def body(state):
            at, cache, weight = state
            cast = weight.astype("bfloat16")
            update = (cast @ cast).astype("float32").sum() * jnp.ones((1, 4))
            made = [jax.lax.dynamic_update_slice(cache[i], update, (at, 0)) for i in (0, 1)]
            return at + 1, jnp.stack(made), weight

        return jax.lax.while_loop(lambda s: s[0] < ROUNDS, body, (jnp.int32(0), cache, weight))

    cache, weight = np.zeros((2, 6, 4), "float32"), np.ones((size, size), "float32") / size
    assert_same(program, cache, weight)
    (loop,) = loops_of(caches_in_place(program), cache, weight)
    names = [e.primitive.name for e in loop.params["body_jaxpr"].eqns]
    assert ("dot_general" in names) is not large


def test_a_program_without_such_loops_is_itself():
    def program(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x)

    before, after = (jax.make_jaxpr(f)(1.0) for f in (program, caches_in_place(program)))
    assert str(before.jaxpr.eqns[-1]) == str(after.jaxpr.eqns[-1])
