"""Programs inlined, and evaluated again: what is recomputed stays so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from keras_tpu_dist.programs.graph import ENTER, Instead, graph_of
from keras_tpu_dist.programs.jaxprs import any_equation

X = jnp.arange(12.0).reshape(3, 4) / 10


def recomputed(x, scale):
    def inner(y):
        return jnp.cos(jnp.exp(y) * scale)

    def block(y):
        kept = checkpoint_name(jnp.tanh(y), "kept")
        return jax.checkpoint(inner)(kept) + y, kept.sum()

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    out, total = jax.checkpoint(block, policy=policy)(x)
    return jax.jit(jnp.sin)(out) * total


def names(jaxpr):
    found = []
    any_equation(jaxpr, lambda each: bool(found.append(each.primitive.name)))
    return found


def evaluated(x, scale, instead=lambda graph: {}):
    jaxpr = jax.make_jaxpr(recomputed)(x, scale)
    graph = graph_of(jaxpr)
    return graph.evaluate([x, scale], instead(graph))[0]


def test_every_call_is_inlined_and_what_is_recomputed_knows_by_what():
    graph = graph_of(jax.make_jaxpr(recomputed)(X, 2.0))
    depths = {each.name: len(each.within) for each in graph.operations}
    assert [depths[name] for name in ("sin", "tanh", "exp", "cos")] == [0, 1, 2, 2]
    left = graph_of(jax.make_jaxpr(recomputed)(X, 2.0), recomputed=False)
    assert "tanh" not in {each.name for each in left.operations}


def test_bodies_are_read_where_they_run():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, every = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    @jax.custom_jvp
    def doubled(x):
        return 2 * x

    doubled.defjvps(lambda tangent, _, x: 2 * tangent)

    @jax.shard_map(mesh=mesh, in_specs=(rows, every), out_specs=rows)
    def step(x, scale):
        return jax.lax.scan(lambda carry, row: (doubled(carry) * row, carry), x, scale)[0]

    graph = graph_of(
        jax.make_jaxpr(jax.jit(step))(jnp.ones((16, 4)), jnp.ones((3, 4))), bodies=True
    )
    (loop,) = (each for each in graph.operations if each.name == "scan")
    inner = graph.operations[: graph.operations.index(loop)]
    products = [each for each in inner if each.name == "mul"]
    assert [each.results[0].devices for each in products] == [8, 8]
    assert [each.results[0].shape for each in products] == [(2, 4), (2, 4)]
    # A loop takes rows; a call takes values whole.
    entered = [each for each in inner if each.name == ENTER]
    lost = [len(each.operands[0].shape) - len(each.results[0].shape) for each in entered]
    assert sorted(lost)[-2:] == [0, 1]
    assert loop.body[0] is products[1].results[0]
    assert graph.outputs[0].operation.name == ENTER
    assert graph.outputs[0].devices == 1


@pytest.mark.parametrize("jitted", [False, True])
def test_values_gradients_and_what_is_kept_are_those_of_the_program(jitted):
    def loss(function):
        grad = jax.value_and_grad(lambda x, s: function(x, s).sum(), (0, 1))
        return jax.jit(grad) if jitted else grad

    np.testing.assert_allclose(*(loss(f)(X, 2.0)[0] for f in (evaluated, recomputed)), rtol=1e-6)
    for a, b in zip(*(loss(f)(X, 2.0)[1] for f in (evaluated, recomputed)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    programs = [names(jax.make_jaxpr(loss(f))(X, 2.0)) for f in (evaluated, recomputed)]
    one, other = (sorted(n for n in each if n not in ("jit", "pjit")) for each in programs)
    assert one == other


def test_an_operation_is_replaced_within_what_is_recomputed():
    def instead(graph):
        (exp,) = (each for each in graph.operations if each.name == "exp")
        (outer,) = (each for each in graph.operations if each.name == "tanh")
        return {exp: Instead([*exp.operands, *outer.operands], lambda a: [a[0] * 0 + a[1]])}

    def expected(x, scale):
        kept = jnp.tanh(x)
        return jnp.sin(jnp.cos(x * scale) + x) * kept.sum()

    def found(x, scale):
        return evaluated(x, scale, instead)

    np.testing.assert_allclose(found(X, 2.0), expected(X, 2.0), rtol=1e-6)
    grads = [jax.jit(jax.grad(lambda x, f=f: f(x, 2.0).sum()))(X) for f in (found, expected)]
    np.testing.assert_allclose(*grads, rtol=1e-5)
    assert "exp" not in names(jax.make_jaxpr(found)(X, 2.0))


def test_a_program_with_rules_of_its_own_is_an_operation():
    @jax.custom_vjp
    def ours(x):
        return jnp.sin(x)

    ours.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 3,))
    graph = graph_of(jax.make_jaxpr(lambda x: jax.checkpoint(ours)(x))(X))
    (operation,) = graph.operations
    assert operation.name.startswith("custom_vjp_call")
    assert len(operation.within) == 1
    grad = jax.grad(lambda x: graph.evaluate([x], {})[0].sum())(X)
    np.testing.assert_allclose(grad, np.full((3, 4), 3.0))
    assert isinstance(operation.equation.primitive, core.Primitive)
