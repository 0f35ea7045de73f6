"""Layouts and the inputs of programs, paired by where they stand in a structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.programs.partitioner.jit import axes_of
from keras_tpu_dist.programs.partitioner.spread import Spread

MESH = {"data": 2, "model": 4}


def named(*spec):
    return jax.NamedSharding(ktd.TPUStrategy(MESH).mesh, P(*spec))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


D, M = named("data"), named(None, "model")
A, B, S = shape(4), shape(4, 8), shape()
OF_D, OF_M = [("data",)], [(), ("model",)]

# Layouts, arrays, and the axes of each array.
STRUCTURES = {
    "leaf": (D, A, [OF_D]),
    "none": (None, A, [()]),
    "none for nothing": (None, None, []),
    "layout for nothing": ((D, M), (None, B), [OF_M]),
    "none beside nothing": ([None, D], [None, A], [OF_D]),
    # An optional input that is there, and one that is not.
    "optional inputs": (
        {"a": None, "length": None, "rows": None, "weights": [D, M]},
        {"a": A, "length": None, "rows": S, "weights": [A, B]},
        [(), (), OF_D, OF_M],
    ),
    "counts agree by chance": (
        {"a": None, "b": None, "c": [M], "d": D},
        {"a": None, "b": [A, A], "c": [B], "d": A},
        [(), (), OF_M, OF_D],
    ),
    "prefix": ({"x": D, "y": M}, {"x": [A, (A, A)], "y": {"z": B}}, [OF_D] * 3 + [OF_M]),
    "none in a prefix": ((None, D), ([A, None, A], A), [(), (), OF_D]),
    "nested": ([[[M], ()], {}, (D,)], [[[B], ()], {}, (A,)], [OF_M, OF_D]),
    "empty": (({}, [], ()), ({}, [], ()), []),
    "layout for an empty one": ((D, M), ([], [B]), [OF_M]),
    "scalar": ([named(), D], [S, A], [[], OF_D]),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_layouts_and_arrays_are_paired_by_structure(case):
    layouts, arrays, expected = STRUCTURES[case]
    found = axes_of(layouts, arrays)
    assert [[*map(tuple, each)] for each in found] == [[*map(tuple, each)] for each in expected]
    assert len(found) == len(jax.tree.leaves(arrays))


def test_layouts_of_a_sparse_array():
    sparse = BCOO.fromdense(np.eye(4, 8, dtype="float32"))
    assert axes_of({"x": None, "y": D}, {"x": sparse, "y": A}) == [(), (), OF_D]


def test_as_many_layouts_as_inputs():
    closed = jax.make_jaxpr(lambda a, b: a + b)(jnp.ones(4), jnp.ones(4))
    mesh = ktd.TPUStrategy(MESH).mesh
    for inputs, outputs in (([OF_D], ()), ([OF_D] * 3, ()), ([OF_D] * 2, [OF_D] * 2)):
        with pytest.raises(ValueError, match="zip"):
            Spread(closed, inputs, outputs, mesh)


def test_a_program_with_optional_inputs_is_right():
    def program(inputs):
        table, ids = inputs["weights"]
        made = jax.lax.reduce_window(table, -jnp.inf, jax.lax.max, (3,), (2,), "VALID")
        made = made.sum() if inputs["scale"] is None else (made * inputs["scale"]).sum()
        return made + jnp.zeros(8).at[ids[:5]].add(1.0)

    layout = {"nothing": None, "scale": None, "weights": [named("model"), named("data")]}
    jitted = Jitted(program, ktd.TPUStrategy(MESH).mesh, lambda _: (layout,))
    table, ids = np.sin(np.arange(16, dtype="float32")), np.arange(8)
    for scale in (None, np.float32(2)):
        given = {"nothing": None, "scale": scale, "weights": [table, ids]}
        placed = {**given, "weights": jax.device_put(given["weights"], layout["weights"])}
        assert_close(np.asarray(jitted(placed)), np.asarray(program(given)))


def linked(function, *arrays, split):
    """The axes that split the first dimension of a program's result."""
    closed = jax.make_jaxpr(function)(*arrays)
    mesh = ktd.TPUStrategy(MESH).mesh
    inputs = [[("model",)] if i == split else () for i in range(len(arrays))]
    spread = Spread(closed, inputs, (), mesh)
    return spread.axes(closed.jaxpr.outvars[0], 0), spread, closed


def test_a_linear_system_and_what_it_is_solved_with():
    matrix, side = jnp.eye(8), jnp.ones(8)
    assert linked(jnp.linalg.solve, matrix, side, split=1)[0] == {"model"}
    _, spread, closed = linked(jnp.linalg.solve, matrix, side, split=0)
    (solve,) = closed.jaxpr.eqns
    system = next(
        e for e in solve.params["jaxpr"].jaxpr.eqns if e.primitive.name == "custom_linear_solve"
    )
    product = system.params["jaxprs"].matvec
    assert spread.axes(product.jaxpr.invars[0], 0) == {"model"}


def test_a_comparison_within_an_operation_is_no_program_of_its_operands():
    def picked(x):
        init, window = np.float32(-np.inf), (2,)
        total, back = jax.vjp(
            lambda x: jax.lax.reduce_window(x, init, jax.lax.max, window, window, "VALID"), x
        )
        return back(total)[0]

    assert linked(picked, jnp.arange(16.0), split=0)[0] == {"model"}
