"""The programs that equations call, by running them: what goes in, comes out and goes round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.programs.calls import calls

X = jnp.arange(12.0).reshape(3, 4)
W = jnp.ones((4, 4))


def last(function, *operands):
    return jax.make_jaxpr(function)(*operands).eqns[-1]


@jax.custom_vjp
def custom(x):
    return jnp.sin(x)


custom.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def forward(x):
    return jnp.sin(x)


forward.defjvp(lambda x, t: (jnp.sin(x[0]), jnp.cos(x[0]) * t[0]))


@pytest.mark.parametrize(
    "function",
    [jax.jit(jnp.sin), custom, forward, jax.checkpoint(jnp.sin)],
    ids=["jit", "custom_vjp", "custom_jvp", "remat"],
)
def test_a_function_called_once_is_one_call(function):
    (call,) = calls(last(function, X))
    assert (call.kind, call.operands, call.results, call.rounds) == ("call", (0,), (0,), 1)
    (found,) = core.jaxpr_as_fun(core.ClosedJaxpr(call.jaxpr, []))(X)
    np.testing.assert_allclose(found, jnp.sin(X), rtol=1e-6)


def test_a_scan_takes_apart_carries_and_stacks():
    def body(carry, row):
        return (carry[0] + row @ W, carry[1] + 1), carry[0].sum()

    equation = last(lambda c, x, w: lax.scan(body, (c, 0), x), X[0], X, W)
    (call,) = calls(equation)
    assert (call.kind, call.rounds) == ("loop", 3)
    ranks = [len(equation.invars[i].aval.shape) for i in call.operands]
    inner = [len(v.aval.shape) for v in call.jaxpr.invars]
    scanned = [i for i, (a, b) in enumerate(zip(ranks, inner, strict=True)) if a > b]
    assert len(scanned) == 1
    assert len(call.carried) == 2
    assert max(call.carried) < min(scanned)
    assert [a.aval.shape for a in (equation.outvars[i] for i in call.results)] == [(4,), (), (3,)]


def test_a_while_loop_has_constants_of_two_kinds():
    def loop(limit, w, x):
        return lax.while_loop(lambda c: c[1] < limit, lambda c: (c[0] @ w, c[1] + 1), (x, 0))

    equation = last(loop, 3, W, X)
    condition, body = calls(equation)
    assert (condition.kind, body.kind) == ("condition", "loop")
    assert (condition.rounds, body.rounds) == (None, None)
    for call in (condition, body):
        shapes = [equation.invars[i].aval.shape for i in call.operands]
        assert shapes == [v.aval.shape for v in call.jaxpr.invars]
    assert body.carried == condition.operands[-2:] == body.operands[-2:]
    assert body.results == (0, 1)
    assert condition.results == ()


def test_branches_come_after_the_operand_that_chooses():
    called = calls(last(lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x), 1, X))
    assert [(c.kind, c.operands, c.results) for c in called] == [("branch", (1,), (0,))] * 3


def test_devices_share_a_shard_map():
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))
    split = PartitionSpec("data")
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=split, out_specs=split)
    (call,) = calls(last(mapped, jnp.zeros((4, 2))))
    assert (call.kind, call.devices) == ("call", 2)
    assert call.jaxpr.invars[0].aval.shape == (2, 2)


def test_a_linear_system_has_programs_with_constants_of_their_own():
    equation = next(
        e for e in jax.make_jaxpr(lambda a, b: jnp.linalg.solve(a, b))(W, W[0]).eqns if calls(e)
    )
    inner = [e for e in calls(equation)[0].jaxpr.eqns if e.primitive.name == "custom_linear_solve"]
    called = calls(inner[0])
    assert {call.kind for call in called} == {"part"}
    for call in called:
        shapes = [inner[0].invars[i].aval.shape for i in call.operands]
        assert shapes == [v.aval.shape for v in call.jaxpr.invars]


def test_programs_of_numbers_are_not_called_with_operands():
    assert calls(last(lambda x: lax.reduce(x, 0.0, lambda a, b: a * 2 + b, (0,)), X)) == []
    assert calls(last(jnp.sin, X)) == []
