"""What a trace holds, of which dimensions, and for how long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.tools.searches.activations import BATCH, HeldArray, buffers_of, peak_bytes

ROWS, WIDTH, HIDDEN = 16, 256, 1024
KERNEL = jnp.zeros((WIDTH, HIDDEN))
BACK = jnp.zeros((HIDDEN, WIDTH))
X = jnp.zeros((ROWS, WIDTH))


def held(f, *arguments, weights=1):
    trace = jax.make_jaxpr(f)(*arguments)
    return buffers_of(trace, weights, ROWS)


def shapes(buffers):
    return [b.shape for b in buffers]


def whole(origins):
    return 1


def test_a_product_is_held_and_what_is_computed_of_it_is_not():
    (product,) = held(lambda w, x: jnp.tanh(x @ w + 1.0), KERNEL, X)
    assert product.shape == (ROWS, HIDDEN)
    assert product.origins == (frozenset([BATCH]), frozenset([(0, 1)]))


def test_a_result_that_is_only_converted_is_held_converted():
    (product,) = held(lambda w, x: (x @ w).astype("bfloat16"), KERNEL, X)
    assert product.itemsize == 2


def test_a_sum_is_held_where_it_is_smaller_than_what_it_is_made_of():
    def residual(w, v, x):
        for _ in range(3):
            x = x + jnp.sin(x @ w) @ v
        return x.sum(axis=1)

    def alive_at_end(buffers):
        last = max(b.born for b in buffers)
        return [b for b in buffers if b.dies >= last and b.shape == (ROWS, WIDTH)]

    found = held(residual, KERNEL, BACK, X, weights=2)
    # The reduction needs one array of that shape, or the last two summands, not all of them.
    assert len(alive_at_end(found)) <= 2


def test_gradients_last_and_are_scattered_when_they_are_there():
    gradients = jax.grad(lambda w, x: (jnp.sin(x @ w) ** 2).sum())
    found = held(gradients, KERNEL, X)
    (gradient,) = [b for b in found if b.gradient is not None]
    assert (gradient.gradient, gradient.once_whole) == (0, True)
    assert gradient.shape == (HIDDEN, WIDTH)  # as the product makes it, transposed
    assert gradient.origins[0] == frozenset([(0, 1)])
    assert gradient.dies == max(b.dies for b in found)


def test_remat_holds_less():
    def peak(wrapped):
        def model(w, v, x):
            for _ in range(4):
                x = wrapped(lambda x: jnp.sin(jnp.sin(x @ w) @ v))(x)
            return x.sum()

        found = held(jax.grad(model, argnums=(0, 1)), KERNEL, BACK, X, weights=2)
        activations = [b for b in found if any(BATCH in o for o in b.origins)]
        return peak_bytes(activations, whole, whole)

    assert peak(jax.checkpoint) < 0.75 * peak(lambda f: f)


def test_a_loop_stacks_activations_and_weights_where_they_lie():
    stack = jnp.zeros((6, WIDTH, WIDTH))

    def loss(w, x):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0].sum()

    found = held(jax.grad(loss), stack, X)
    activations = [b for b in found if b.shape == (6, ROWS, WIDTH)]
    assert activations
    assert all(BATCH in b.origins[1] for b in activations)
    (gradient,) = [b for b in found if b.shape == stack.shape and b.gradient == 0]
    assert not gradient.once_whole  # each layer's is scattered before it is stacked
    assert peak_bytes([gradient], whole, lambda weight: 8) == stack.nbytes / 8


def test_within_a_shard_map_arrays_are_counted_whole_and_weights_are_whole():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, every = PartitionSpec("data"), PartitionSpec()

    @jax.shard_map(mesh=mesh, in_specs=(every, rows), out_specs=rows)
    def inside(w, x):
        return jnp.cos(x @ w) @ w.T

    found = held(inside, KERNEL, X)
    assert shapes(found) == [(ROWS, HIDDEN), (ROWS, WIDTH)]
    assert all(b.origins == (frozenset([BATCH]), frozenset()) for b in found)


def test_one_row_a_device():
    """The dimension of the batch is of size one there, and taken off."""
    devices = len(jax.devices())
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = PartitionSpec("data")

    @jax.shard_map(mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)
    def inside(w, x):
        return (x[0] @ w)[None]

    trace = jax.make_jaxpr(inside)(jnp.zeros((32, 256)), jnp.zeros((devices, 256, 32)))
    (product,) = buffers_of(trace, 1, devices)
    each = peak_bytes([product], lambda o: devices if BATCH in o else 1, whole)
    assert each == 4 * 256 * 256


def test_dimensions_of_the_same_size_are_told_apart():
    kernel = jnp.zeros((8, 64, 64))
    found = held(lambda w, x: jnp.sort(w[None].repeat(2, 0), axis=0), kernel, X)
    assert [set(o) for o in found[-1].origins] == [set(), {(0, 0)}, {(0, 1)}, {(0, 2)}]


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda w, x: (x @ w).reshape(ROWS, 4, HIDDEN // 4).sum(2), [{BATCH}, {(0, 1)}]),
        (lambda w, x: (x @ w).T.reshape(HIDDEN * ROWS).cumsum(), [{BATCH, (0, 1)}]),
        (lambda w, x: jnp.sort((x @ w).T[:, None], axis=0), [{(0, 1)}, set(), {BATCH}]),
        (lambda w, x: w[x[:, :3].astype(int)].sum(1), [{BATCH}, {(0, 1)}]),
        (lambda w, x: jnp.cumsum(jnp.broadcast_to(x, (5, ROWS, WIDTH))), [{BATCH}]),
        (lambda w, x: (w**2).max(1), [{(0, 0)}]),
    ],
    ids=["heads", "joined", "sorted", "look-up", "flat", "reduced"],
)
def test_what_dimensions_are(f, expected):
    assert [set(o) for o in held(f, KERNEL, X)[-1].origins] == expected


def test_a_convolution():
    image, kernel = jnp.zeros((ROWS, 8, 8, 3)), jnp.zeros((3, 3, 3, 32))

    def convolve(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    (found,) = held(convolve, kernel, image)
    assert [set(o) for o in found.origins] == [{BATCH}, set(), set(), {(0, 3)}]


def test_peak_bytes_are_of_arrays_held_at_one_time():
    none = (frozenset(),)
    early = HeldArray((1024,), 4, none, born=0, dies=2)
    late = HeldArray((2048,), 4, none, born=2, dies=3)
    alone = HeldArray((2560,), 4, none, born=4, dies=4)
    assert peak_bytes([], whole, whole) == 0
    assert peak_bytes([early, late, alone], whole, whole) == 4 * 3072
    assert peak_bytes([early, alone], whole, whole) == 4 * 2560


def test_the_batch_is_split_and_tiles_are_filled():
    rows = frozenset([BATCH])
    buffer = HeldArray((64, 3), 4, (rows, frozenset()), born=0, dies=0)
    # In tiles of 8 times 128: three columns take eight, 64 rows take 128.
    assert peak_bytes([buffer], whole, whole) == 4 * 8 * 128
    assert peak_bytes([buffer], lambda o: 8 if o else 1, whole) == 4 * 8 * 128
    wide = HeldArray((64, 256), 4, (rows, frozenset()), born=0, dies=0)
    assert peak_bytes([wide], lambda o: 8 if o else 1, whole) == 4 * 8 * 256


def test_calls_and_branches():
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

    def g(w, x):
        y = jax.jit(lambda x: f(x, w))(x)
        return jax.lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y)

    found = held(g, KERNEL, X)
    assert shapes(found) == [(ROWS, HIDDEN), (ROWS, HIDDEN)]
    assert all(BATCH in b.origins[0] for b in found)


def test_what_experts_make_is_split_as_their_weights_are():
    """Whatever the router, which is whole, has to do with the same dimension."""

    def f(gate, up, x):
        chosen = jax.nn.one_hot(jnp.argmax(x @ gate, -1), 4) * jax.nn.softmax(x @ gate)
        sent = jnp.einsum("bte,btd->ebtd", chosen, x)
        return jnp.einsum("ebtd,edf->ebtf", sent, up)

    arguments = jnp.zeros((32, 4)), jnp.zeros((4, 32, 64)), jnp.zeros((ROWS, 8, 32))
    made = held(f, *arguments, weights=2)[-1]
    place = made.shape.index(4)
    assert made.origins[place] == frozenset([(1, 0)])
    assert {BATCH} in [set(o) for o in made.origins]


def test_what_comes_from_nowhere_is_split_as_what_is_made_of_it():
    def f(w, ids, x):
        chosen = (ids[:, None] == jnp.arange(4)).cumsum(1).astype("float32")
        return jnp.einsum("be,bd,edf->bef", chosen, x, w)

    found = held(f, jnp.zeros((4, 32, 64)), jnp.zeros(ROWS, "int32"), jnp.zeros((ROWS, 32)))
    (counted,) = [b for b in found if b.shape == (ROWS, 4)]
    assert (0, 0) in counted.origins[1]
