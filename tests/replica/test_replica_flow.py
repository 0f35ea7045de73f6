"""Which values are proven to be the same on all replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from keras_tpu_dist.replica.flow import differing, shard_map_body


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))


def total(x):
    return jax.lax.psum(x, ("data", "fsdp"))


def index(axis):
    return jax.lax.axis_index(axis)


# From (same on all, different) to one value, and whether it differs.
CASES = {
    "same": (lambda s, d: s * 2, False),
    "different": (lambda s, d: s + d, True),
    "constant": (lambda s, d: jnp.ones(()), False),
    "number of the replica": (lambda s, d: s + jax.lax.axis_index("fsdp"), True),
    "number on another axis": (lambda s, d: s + jax.lax.axis_index("model"), False),
    "sum": (lambda s, d: total(d) * s, False),
    "mean, max, min, gather": (
        lambda s, d: (
            jax.lax.pmean(d, ("data", "fsdp"))
            + jax.lax.pmax(d, ("data", "fsdp"))
            + jax.lax.pmin(d, ("data", "fsdp"))
            + jax.lax.all_gather(d, ("data", "fsdp")).sum()
        ),
        False,
    ),
    "sum over one of two axes": (lambda s, d: jax.lax.psum(d, "data"), True),
    "sum of both axes in turn": (lambda s, d: jax.lax.psum(jax.lax.psum(d, "data"), "fsdp"), False),
    "sum over one axis of a part": (lambda s, d: jax.lax.psum(s + index("data"), "data"), False),
    "sum of another axis": (lambda s, d: jax.lax.psum(s + index("fsdp"), "data"), True),
    "a part of what is the same": (
        lambda s, d: jax.lax.psum_scatter(jnp.stack([s, s]), "data"),
        True,
    ),
    "parts, gathered": (
        lambda s, d: jax.lax.all_gather(jax.lax.psum_scatter(jnp.stack([s, s]), "data"), "data")[0],
        False,
    ),
    "handed on to some": (lambda s, d: jax.lax.ppermute(s, "data", [(0, 1)]), True),
    "exchanged parts": (
        lambda s, d: jax.lax.all_to_all(jnp.stack([s, 2 * s]), "data", 0, 0)[0],
        True,
    ),
    "sum within jit": (lambda s, d: jax.jit(total)(d), False),
    "jit of both": (lambda s, d: jax.jit(lambda a, b: (a, total(b)))(s, d)[1], False),
    "jit that passes on": (lambda s, d: jax.jit(lambda a, b: (a, b))(s, d)[1], True),
    "gradient reduced": (lambda s, d: total(jax.grad(lambda w: cubed(w * d))(s)), False),
    "gradient": (lambda s, d: jax.grad(lambda w: cubed(w * d))(s), True),
    "checkpoint": (lambda s, d: jax.checkpoint(lambda x: total(jnp.sin(x)))(d), False),
    "scan of sums": (
        lambda s, d: jax.lax.scan(lambda c, x: (c + total(d), x), s, jnp.arange(3.0))[0],
        False,
    ),
    "scan that mixes in later": (
        lambda s, d: jax.lax.scan(lambda c, x: ((c[1], d), x), (s, s), jnp.arange(3.0))[0][0],
        True,
    ),
    "scan outputs": (lambda s, d: jax.lax.scan(lambda c, x: (c, x + d), s, s[None])[1][0], True),
    "while": (
        lambda s, d: jax.lax.while_loop(lambda c: c < 3, lambda c: c + total(d) ** 2 + 1, s),
        False,
    ),
    "while as long as it differs": (
        lambda s, d: jax.lax.while_loop(lambda c: c[0] < d, lambda c: (c[0] + 1, c[1] + 1), (s, s))[
            1
        ],
        True,
    ),
    "cond": (lambda s, d: jax.lax.cond(s > 0, lambda: total(d), lambda: s), False),
    "cond with a differing branch": (lambda s, d: jax.lax.cond(s > 0, lambda: d, lambda: s), True),
    "cond that differs": (lambda s, d: jax.lax.cond(d > 0, lambda: s, lambda: 2 * s), True),
}


def test_which_values_differ_between_replicas(devices):
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2, 2), ("data", "fsdp", "model"))

    def all_cases(same, different):
        return [case(same, different[0, 0]) for case, _ in CASES.values()]

    mapped = jax.shard_map(
        all_cases,
        mesh=mesh,
        in_specs=(P(), P("data", "fsdp")),
        out_specs=[P()] * len(CASES),
        check_vma=False,
    )
    body = shard_map_body(jax.make_jaxpr(mapped)(jnp.float32(1), jnp.ones((2, 2))))
    inputs = [False] * (len(body.invars) - 1) + [True]
    found = differing(body, inputs, ("data", "fsdp"))
    expected = {name: differs for name, (_, differs) in CASES.items()}
    assert dict(zip(CASES, found)) == expected
    with pytest.raises(AttributeError):
        differing(None, [], ())
