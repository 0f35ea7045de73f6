"""The table of dimensions, by the truth: what of a result changes if an operand does."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core

from keras_tpu_dist.programs.calls import calls
from keras_tpu_dist.programs.dimensions import KNOWN, Mapped, dimensions, regrouped

RNG = np.random.default_rng(0)


def changed(function, operands, number, index):
    """For each result, which of its elements differ if one place along a dimension does."""
    other = list(operands)
    other[number] = np.array(other[number])
    other[number][index] += RNG.uniform(3, 9, size=other[number][index].shape)
    both = [jax.tree.leaves(function(*each)) for each in (operands, other)]
    return [np.asarray(a) != np.asarray(b) for a, b in zip(*both, strict=True)]


def equations_of(jaxpr, operands):
    """The equations of a program, and of those it calls once, with values of what they read."""
    values = dict(zip(jaxpr.invars, operands, strict=True))
    for equation in jaxpr.eqns:
        given = [a.val if isinstance(a, core.Literal) else values[a] for a in equation.invars]
        called = [call for call in calls(equation) if call.kind == "call"]
        for call in called:
            yield from equations_of(call.jaxpr, [given[i] for i in call.operands])
        inputs = [core.Var(a.aval) for a in equation.invars]
        alone = jaxpr.replace(
            constvars=[],
            invars=inputs,
            outvars=equation.outvars,
            eqns=[equation.replace(invars=inputs)],
        )
        run = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(alone, [])))
        values.update(zip(equation.outvars, run(*given), strict=True))
        if not called:
            yield equation, run, given


def assert_true(function, *operands, every=True):
    """Steps of equations in the table hold, and `every` one that would hold is there."""
    met = set()
    closed = jax.make_jaxpr(function)(*operands)
    program = closed.jaxpr.replace(
        constvars=[], invars=closed.jaxpr.constvars + closed.jaxpr.invars
    )
    for equation, run, values in equations_of(program, [*closed.consts, *operands]):
        known = dimensions(equation)
        if known is None:
            continue
        met.add(equation.primitive.name)
        for number, operand in enumerate(values):
            if jnp.issubdtype(jnp.result_type(operand), jnp.floating):
                _check_operand(equation, known, run, values, number, every)
    return met


def _check_operand(equation, known, run, given, number, every):
    shape = np.shape(given[number])
    for dimension, size in enumerate(shape):
        if size == 1:
            continue
        places = [(slice(None),) * dimension + (i,) for i in range(size)]
        trials = [changed(run, given, number, place) for place in places]
        for result, variable in enumerate(equation.outvars):
            of_result = [trial[result] for trial in trials]
            for to, length in enumerate(variable.aval.shape):
                steps = [s for s in known.mapped if s[:4] == (number, dimension, result, to)]
                parts = max((s.parts for s in steps), default=1)
                words = f"{equation}: {number, dimension} to {result, to} in {parts} parts"
                assert size % parts == length % parts == 0, words
                assert _in_parts(of_result, to, size, length, parts), words
                alike = every and any(map(np.any, of_result)) and size == length
                if alike and _in_parts(of_result, to, size, length, size):
                    assert parts == size, f"{words}: it is position by position"


def _in_parts(differences, to, size, length, parts):
    """Whether a place changes nothing but its own part of the result."""
    for place, differs in enumerate(differences):
        hit = np.flatnonzero(differs.any(tuple(d for d in range(differs.ndim) if d != to)))
        if set(hit * parts // length) - {place * parts // size}:
            return False
    return True


@st.composite
def reshapes(draw):
    """Two shapes of the same factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5))

    def grouped():
        ends = draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        shape, now = [], 1
        for factor, end in zip(factors, ends, strict=True):
            now *= factor
            if end:
                shape.append(now)
                now = 1
        return [*shape, now] if now > 1 or draw(st.booleans()) else shape

    return tuple(grouped()), tuple(grouped())


@given(reshapes())
@settings(max_examples=30)
def test_reshapes(shapes):
    before, after = shapes
    if math.prod(before) != math.prod(after):
        return
    x = RNG.normal(size=before).astype("float32")
    assert_true(lambda x: lax.reshape(x, after), x)
    groups = list(regrouped(before, after))
    for old, new in groups:
        assert math.prod(before[i] for i in old) == math.prod(after[j] for j in new)
    taken = [i for old, _ in groups for i in old]
    assert taken == list(range(len(taken)))
    assert math.prod(before[i] for i in taken) == math.prod(before)


@pytest.mark.parametrize(
    ("before", "after", "groups", "steps"),
    [
        ((6, 4), (24,), [([0, 1], [0])], [(0, 0, 6), (1, 0, 1)]),
        ((24,), (6, 4), [([0], [0, 1])], [(0, 0, 6), (0, 1, 1)]),
        ((2, 12), (8, 3), [([0, 1], [0, 1])], [(0, 0, 2), (1, 0, 1), (1, 1, 1)]),
        ((4, 6), (6, 4), [([0, 1], [0, 1])], [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]),
        ((1, 6), (1, 6), [([0], [0]), ([1], [1])], [(1, 1, 6)]),
        ((1, 6), (6,), [([0, 1], [0])], [(1, 0, 6)]),
        ((6,), (1, 6), [([0], [0, 1])], [(0, 1, 6)]),
        ((2, 3, 1), (2, 3), [([0], [0]), ([1], [1])], [(0, 0, 2), (1, 1, 3)]),
        ((6, 4), (3, 8), [([0, 1], [0, 1])], [(0, 0, 3), (0, 1, 1), (1, 1, 1)]),
        ((), (1,), [], []),
    ],
)
def test_which_factors_of_a_dimension_go_where(before, after, groups, steps):
    assert [([*old], [*new]) for old, new in regrouped(before, after)] == groups
    # A reshape to the same shape is no equation.
    for equation in jax.make_jaxpr(lambda x: lax.reshape(x, after))(jnp.zeros(before)).eqns:
        assert dimensions(equation).mapped == tuple(Mapped(0, i, 0, j, n) for i, j, n in steps)


@given(st.data())
@settings(max_examples=20)
def test_dimensions_of_products_of_any_ranks(data):
    draw = data.draw
    ranks = [draw(st.integers(1, 3)) for _ in range(2)]
    shared, summed = draw(st.integers(0, min(ranks))), 0
    summed = draw(st.integers(0, min(ranks) - shared))
    places = [draw(st.permutations(range(rank))) for rank in ranks]
    shapes = [[draw(st.integers(2, 3)) for _ in range(rank)] for rank in ranks]
    for left, right in zip(*(p[: shared + summed] for p in places), strict=True):
        shapes[1][right] = shapes[0][left]
    numbers = tuple(tuple(p[shared : shared + summed]) for p in places)
    batch = tuple(tuple(p[:shared]) for p in places)
    operands = [RNG.normal(size=shape).astype("float32") for shape in shapes]
    assert_true(lambda a, b: lax.dot_general(a, b, (numbers, batch)), *operands)


@given(st.data())
@settings(max_examples=6)
def test_dimensions_of_convolutions(data):
    draw = data.draw
    groups = draw(st.sampled_from(["none", "features", "batch"]))
    n = 2 if groups != "none" else 1
    window, stride = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    padding = draw(st.sampled_from([[(0, 0), (0, 0)], [(1, 0), (0, 0)], [(1, 1), (1, 0)]]))
    left = draw(st.permutations("NHWC"))
    image = {"N": 2 * n, "H": 4, "W": 3, "C": 2 * n}
    kernel = {"H": window, "W": 1, "I": image["C"] // (n if groups == "features" else 1), "O": 4}
    right, out = draw(st.permutations("HWIO")), draw(st.permutations("NHWC"))
    assert_true(
        lambda a, b: lax.conv_general_dilated(
            a,
            b,
            (stride, 1),
            padding,
            lhs_dilation=(draw(st.integers(1, 2)), 1),
            dimension_numbers=("".join(left), "".join(right), "".join(out)),
            feature_group_count=n if groups == "features" else 1,
            batch_group_count=n if groups == "batch" else 1,
        ),
        RNG.normal(size=[image[d] for d in left]).astype("float32"),
        RNG.normal(size=[kernel[d] for d in right]).astype("float32"),
        # By chance a window may meet one place only.
        every=False,
    )


X = RNG.normal(size=(4, 6)).astype("float32")
Y = RNG.normal(size=(4, 6)).astype("float32")
V = RNG.normal(size=(2, 4, 6)).astype("float32")
IDS = np.array([[1, 0], [3, 2], [0, 1], [2, 2]], "int32")
IMAGE = RNG.normal(size=(2, 4, 6, 3)).astype("float32")


def _window(x, kind, window, strides, padding="VALID"):
    start = {"add": 0.0, "max": -np.inf}[kind]
    return lax.reduce_window(x, start, getattr(lax, kind), window, strides, padding)


# A program, and what it must contain.
PROGRAMS = {
    "elementwise": (lambda x, y: jnp.tanh(x + y) * 2.0, [X, Y], {"add", "tanh", "mul"}),
    "choice": (lambda x, y: jnp.where(x > 0, x, y).clip(-1, 1), [X, Y], {"select_n"}),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 3, 6), (0, 2)), [X], {"broadcast_in_dim"}),
    "repeated": (lambda x: x[:, :1] + jnp.zeros((4, 6)), [X], {"slice"}),
    "transpose": (lambda x: x.transpose(2, 0, 1), [V], {"transpose"}),
    "reductions": (lambda x: (x.sum(1), x.max(0), x.min(), x.prod(-1)), [V], {"reduce_sum"}),
    "any reduction": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + 2 * b, (1,)),
        [V],
        {"reduce"},
    ),
    "places of the largest": (lambda x: jnp.argmax(x, 1), [X], {"argmax"}),
    "squeeze": (lambda x: lax.squeeze(x[:, None], (1,)), [X], {"squeeze"}),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), [X, Y], {"sort"}),
    "top": (lambda x: lax.top_k(x, 2), [X], {"top_k"}),
    "sums": (lambda x: (lax.cumsum(x, 0), lax.cummax(x, 1)), [X], {"cumsum", "cummax"}),
    "reverse": (lambda x: lax.rev(x, (1,)), [V], {"rev"}),
    "pieces": (lambda x: lax.split(x, (2, 4), 1), [X], {"split"}),
    "joined": (lambda x, y: lax.concatenate((x, y), 1), [X, Y], {"concatenate"}),
    "pad": (lambda x: lax.pad(x, np.float32(0), [(1, -1, 0), (0, 0, 0)]), [X], {"pad"}),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 6), (1, 1)), [X], {"slice"}),
    "slice at": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 6)), [X], {"dynamic_slice"}),
    "write at": (
        lambda x, y: lax.dynamic_update_slice(x, y[:2], (1, 0)),
        [X, Y],
        {"dynamic_update_slice"},
    ),
    "stack": (lambda x, y: jnp.stack([x, y], 1), [X, Y], set()),
    "windows": (
        lambda x: (
            _window(x, "max", (1, 2, 2, 1), (1, 2, 2, 1)),
            _window(x, "add", (1, 3, 1, 1), (1, 1, 1, 1), "SAME"),
        ),
        [IMAGE],
        {"reduce_window_max", "reduce_window_sum"},
    ),
    "gradient of windows": (
        jax.grad(lambda x: _window(x, "max", (1, 2, 2, 1), (1, 2, 2, 1)).sum()),
        [IMAGE],
        {"select_and_scatter_add"},
    ),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), [X, V], {"optimization_barrier"}),
    "rows": (lambda x: x[IDS], [X], {"gather"}),
    "columns": (lambda x: jnp.take(x, IDS, axis=1), [X], {"gather"}),
    "elements": (lambda x: x[IDS[:, 0], IDS[:, 1]], [X], {"gather"}),
    "of each row": (jax.vmap(lambda x, i: x[i]), [X, IDS], {"gather"}),
    "parts": (
        jax.vmap(lambda i: lax.dynamic_slice(jnp.asarray(X), (i, 0), (2, 6))),
        [IDS[:, 0]],
        {"gather"},
    ),
    "rows added": (lambda x, y: x.at[IDS[:, 0]].add(y), [X, Y], {"scatter-add"}),
    "columns written": (lambda x, y: x.at[:, 2].set(y[:, 1]), [X, Y], {"scatter"}),
    "added in each row": (
        jax.vmap(lambda x, i, y: x.at[i].add(y[:2])),
        [X, IDS, Y],
        {"scatter-add"},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operations(name):
    function, operands, primitives = PROGRAMS[name]
    assert primitives <= assert_true(function, *operands)


def test_dimensions_of_stack_and_unstack():
    """As newer versions of JAX write `jnp.stack`."""
    if not {"stack", "unstack"} <= KNOWN or not hasattr(lax, "unstack"):
        pytest.skip("no primitives of their own")
    assert assert_true(lambda x: lax.unstack(lax.stack((x, x), axis=1), axis=2), X)


def test_what_runs_together():
    def pairs(function, *operands):
        *_, equation = jax.make_jaxpr(function)(*operands).eqns
        return set(dimensions(equation).together), set(dimensions(equation).indexed)

    assert pairs(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), V, V.swapaxes(1, 2)) == (
        {((0, 0), (1, 0)), ((0, 2), (1, 1))},
        set(),
    )
    assert pairs(lambda x: x.at[IDS[:, 0]].add(1.0), X)[1] == {(0, 0)}
    assert pairs(jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (1,))), X, IDS[:, 0]) == (
        {((0, 0), (1, 0))},
        {(0, 1)},
    )


def test_what_is_not_in_the_table_is_unknown():
    program = jax.make_jaxpr(lambda x: lax.linalg.cholesky(x, symmetrize_input=False))(jnp.eye(3))
    equation = next(e for e in program.eqns if e.primitive.name == "cholesky")
    assert equation.primitive.name not in KNOWN
    assert dimensions(equation) is None
