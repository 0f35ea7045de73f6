"""Rows looked up, summed and updated where they lie, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.programs.tables import exchange
from keras_tpu_dist.programs.tables.exchange import NOBODY, Lookups, TableSplit, Updates, unique

ROWS, WIDTH, IDS = 64, 8, 48
# Mesh, and the axes of rows, columns and ids.
SPLITS = {
    "data8": ((8,), ("data",), ("data",), (), ("data",)),
    "other axes": ((4, 2), ("data", "model"), ("model",), (), ("data",)),
    "an axis more": ((4, 2), ("data", "model"), ("data", "model"), (), ("data",)),
    "a part": ((2, 2, 2), ("data", "fsdp", "model"), ("fsdp",), (), ("data", "fsdp")),
    "turned": ((2, 2, 2), ("data", "fsdp", "model"), ("model", "fsdp"), (), ("data", "fsdp")),
    "columns": ((2, 2, 2), ("data", "fsdp", "model"), ("data",), ("fsdp",), ("data", "fsdp")),
    "columns left": ((4, 2), ("data", "model"), ("data",), ("model",), ("data",)),
    "columns alone": ((4, 2), ("data", "model"), (), ("model", "data"), ("data",)),
}
PATTERNS = {
    "equal": lambda rng: np.full(IDS, 5),
    "random": lambda rng: rng.integers(0, ROWS, IDS),
    "of one owner": lambda rng: rng.integers(0, ROWS // 8, IDS),
    "all": lambda rng: np.arange(IDS),
    "of two": lambda rng: np.where(np.arange(IDS) < IDS // 2, rng.integers(0, 8, IDS), 63),
    "some of nobody": lambda rng: np.where(np.arange(IDS) % 3, rng.integers(0, ROWS, IDS), NOBODY),
    "of nobody": lambda rng: np.full(IDS, NOBODY),
}


def split_of(name):
    shape, names, rows, columns, batch = SPLITS[name]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), names)
    return TableSplit(mesh, rows, columns, batch, (ROWS, WIDTH))


def narrow(count, parts):
    """Fewer places than ids at random need."""
    return max(1, count // (2 * parts))


@functools.cache
def program(name, bound):
    """Rows of two lookups, and an update by both."""
    split = split_of(name)
    batch = PartitionSpec(split.batch)
    rows = PartitionSpec(split.batch, split.left or None)

    def adagrad(state, gradients, numbers):
        table, sums = state
        gradient = sum(gradients)
        sums = sums + gradient**2
        return [table - numbers[0] * gradient / jnp.sqrt(sums + 1e-7), sums]

    def step(table, sums, ids, gradients, rate):
        lookups = [Lookups(split, each.size) for each in ids]
        found = [each.look_up(table, these) for each, these in zip(lookups, ids)]
        routes = [route for _, route in found]
        updated = Updates(lookups, adagrad)([table, sums], ids, routes, gradients, [rate])
        return [each for each, _ in found], updated

    mapped = jax.shard_map(
        step,
        mesh=split.mesh,
        in_specs=(split.layout, split.layout, batch, rows, PartitionSpec()),
        out_specs=(rows, split.layout),
        check_vma=False,
    )
    return jax.jit(mapped)


def check(name, first, second, seed=0, bound=None):
    rng = np.random.default_rng(seed)
    table, sums = rng.normal(size=(2, ROWS, WIDTH)).astype("float32")
    sums = np.abs(sums)
    ids = [np.asarray(each, "int32") for each in (first, second)]
    gradients = [rng.normal(size=(len(each), WIDTH)).astype("float32") for each in ids]
    found, updated = program(name, bound)(table, sums, ids, gradients, np.float32(0.1))
    wanted, total = [], []
    for each, gradient in zip(ids, gradients):
        valid = each < ROWS
        wanted.append(np.where(valid[:, None], table[np.where(valid, each, 0)], 0))
        total.append(np.zeros((ROWS, WIDTH)))
        np.add.at(total[-1], each[valid], gradient[valid])
    after = sums + sum(total) ** 2
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(one, other)
    step = 0.1 * sum(total) / np.sqrt(after + 1e-7)
    np.testing.assert_allclose(updated[0], table - step, atol=1e-5)
    np.testing.assert_allclose(updated[1], after, rtol=1e-5, atol=1e-5)
    untouched = ~np.isin(np.arange(ROWS), np.concatenate(ids))
    np.testing.assert_array_equal(np.asarray(updated[0])[untouched], table[untouched])


@pytest.mark.parametrize("bound", ["wide", "narrow"])
@pytest.mark.parametrize("name", SPLITS)
def test_every_pattern_of_ids_on_every_split(name, bound, monkeypatch):
    if bound == "narrow":
        monkeypatch.setattr(exchange, "_bound", narrow)
    rng = np.random.default_rng(1)
    made = {pattern: make(rng) for pattern, make in PATTERNS.items()}
    for first in made:
        for second in ("random", "of one owner", "of nobody"):
            check(name, made[first], made[second], bound=bound)


IDS_OF_A_STEP = st.lists(
    st.one_of(st.integers(0, ROWS - 1), st.integers(0, 3), st.just(NOBODY)),
    min_size=IDS,
    max_size=IDS,
)


@settings(max_examples=60)
@given(
    name=st.sampled_from(["data8", "turned", "columns"]), first=IDS_OF_A_STEP, second=IDS_OF_A_STEP
)
def test_an_exchange_of_any_ids_in_a_narrow_bound(name, first, second):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_bound", narrow)
        check(name, first, second, bound="narrow")


@given(own=st.lists(st.integers(0, 10), min_size=2, max_size=20), bound=st.integers(1, 12))
@settings(max_examples=50)
def test_rows_without_repetitions(own, bound):
    found = unique(jnp.asarray(own, "int32"), 10, bound)
    rows = sorted({row for row in own if row < 10})
    assert bool(found.fits) == (len(rows) <= bound)
    if found.fits:
        assert list(found.rows[: len(rows)]) == rows
        assert all(row == 10 for row in found.rows[len(rows) :])
        for row, place in zip(own, found.group):
            assert (rows[place] == row) if row < 10 else place >= bound
        for row, first in zip(rows, found.first):
            assert own[first] == row


def test_a_program_of_enough_places_has_no_rounds():
    split = split_of("data8")
    assert not Lookups(split, 6).may_need_rounds
    lookups = Lookups(split, 16384)
    assert lookups.may_need_rounds
    assert 16384 / 8 < lookups.capacity < 1.2 * 16384 / 8


def test_ids_of_one_hash_prefix_get_enough_rounds():
    """Level of a device whose ids share the first bits of their hashes."""
    split = split_of("data8")
    lookups = Lookups(split, 4)
    lookups.capacity = 1
    inverse = pow(int(exchange._MULTIPLIER), -1, 2**32)
    hashes = [0b1010 << 28, (0b1010 << 28) + 1]
    rows = [h * inverse % 2**32 for h in hashes]
    ids = exchange.Sorted(
        None, None, None, None, jnp.array([0, 0, 8, 8]), jnp.array([*hashes, 0, 0], "uint32")
    )
    assert rows[0] != rows[1]
    assert int(lookups.halvings(ids)) == 32
