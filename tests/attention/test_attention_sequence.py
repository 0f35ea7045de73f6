"""Which queries each device of a sequence axis computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from keras_tpu_dist import attention
from keras_tpu_dist.attention import sequence
from keras_tpu_dist.attention.kernel import LANES, blocks_computed, tiling
from keras_tpu_dist.attention.sequence import Pieces

PIECES = st.builds(
    lambda devices, size, balanced: Pieces(devices, 2 * devices * size, balanced),
    st.integers(1, 8),
    st.integers(1, 300),
    st.booleans(),
)


@given(PIECES)
def test_each_query_is_computed_once(pieces):
    every = np.concatenate([pieces.positions(i) for i in range(pieces.devices)])
    np.testing.assert_array_equal(np.sort(every), np.arange(pieces.time))
    assert all(len(pieces.positions(i)) == pieces.rows for i in range(pieces.devices))


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_pieces_are_brought_and_returned(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
    pieces = Pieces(devices, 12 * devices, balanced=True)
    x = jnp.arange(12.0 * devices)[None, :, None]

    def moved(x):
        there = pieces.brought(x, "sequence")
        return there, pieces.returned(there, "sequence")

    spec = P(None, "sequence")
    there, back = jax.jit(jax.shard_map(moved, mesh=mesh, in_specs=spec, out_specs=(spec, spec)))(x)
    want = np.concatenate([pieces.positions(i) for i in range(devices)])
    np.testing.assert_array_equal(np.ravel(there), want)
    np.testing.assert_array_equal(back, x)


@given(PIECES, st.integers(1, 1200))
def test_the_mask_is_that_of_the_queries_of_each_device(pieces, source):
    mask = sequence.causal_mask(pieces, source)
    whole = mask[:, :]
    padded = tiling(pieces.rows).padded
    for device in range(pieces.devices):
        rows = whole[device * padded :][: pieces.rows]
        want = pieces.positions(device)[:, None] >= np.arange(mask.shape[1])
        want &= np.arange(mask.shape[1]) < source
        np.testing.assert_array_equal(rows, want)
    # What is padded sees a key, or its softmax would divide by zero.
    assert whole.any(axis=1).all()


@given(PIECES, st.integers(1, 1200))
def test_blocks_are_counted_as_the_kernel_skips_them(pieces, source):
    mask = sequence.causal_mask(pieces, source)
    rows, columns = tiling(pieces.rows), tiling(source)
    down, across = rows.padded // rows.block, columns.padded // columns.block
    blocks = mask[:, :].reshape(pieces.devices, down, rows.block, across, columns.block)
    busy = blocks.any(axis=(2, 4)).sum(axis=(1, 2))
    counted = blocks_computed(mask, pieces.rows, source, pieces.devices)
    assert counted == (busy.max(), down * across)


def test_an_early_and_a_late_piece_are_as_much_work_for_each():
    balanced, plain = (Pieces(8, 131_072, balanced=b) for b in (True, False))
    assert Pieces.of(8, 131_072) == balanced
    (most, every), (unbalanced, _) = (
        blocks_computed(sequence.causal_mask(p, 131_072), p.rows, 131_072, 8)
        for p in (balanced, plain)
    )
    assert most / every < 0.51
    assert unbalanced / every > 0.93
    assert not Pieces.of(8, 16 * (LANES - 1)).balanced
    assert not Pieces.of(4, 4 * 301).balanced


def test_equal_masks_are_one():
    """The kernel caches by mask, and a head's mask is compared with the next one's."""
    a, b = (sequence.causal_mask(Pieces(2, 512, True), 512) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != sequence.causal_mask(Pieces(2, 512, False), 512)


def test_queries_that_do_not_divide_are_whole():
    """Attention runs as without the axis."""
    mesh = Mesh(np.array(jax.devices()), ("sequence",))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 2, 8)), "float32")
    where = {"mesh": mesh, "data_axes": (), "platform": "tpu", "flash_attention": True}
    options = {"interpret": True, "is_causal": True}
    attend = jax.jit(
        lambda x, axis: attention.dot_product_attention(
            x, x, x, time_axis=axis, **where, **options
        ),
        static_argnums=1,
    )
    np.testing.assert_array_equal(attend(x, "sequence"), attend(x, None))
