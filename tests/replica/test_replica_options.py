"""Uneven batches and varying lengths: padding that changes nothing, in few programs."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, stepped

import keras_tpu_dist as ktd
from keras_tpu_dist.replica.run_options import RunOptions, refilled

BUCKETS = RunOptions(buckets="power_of_two", axis=1)
DYNAMIC = RunOptions(dynamic_batch=True)


context = ktd.get_replica_context


def compilations():
    """Counts what XLA compiles from here on."""
    counted = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            counted.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counted


def test_an_argument_of_nothing_shifts_no_axis():
    options = RunOptions(buckets="power_of_two", axis=(None, 1, None))
    assert options.axes((None, np.ones((2, 3)), np.ones((2, 3))), [2, 2]) == [1, None]
    assert options.axes((np.ones(2), {"a": np.ones((2, 3))}, 1.0), [1, 2, 0]) == [None, 1, None]


def test_lengths_and_buckets_are_numbers_of_numpy():
    length = np.int64(5)
    assert RunOptions(buckets="power_of_two").bucket(length) == 8
    assert RunOptions(buckets=np.array([4, 6])).bucket(length) == 6


def test_rows_are_not_padded_to_buckets(two):
    value = two.distribute_values_from_function(lambda _: np.ones(3, "float32"))
    whole = two.run(lambda x: x * 2.0, args=(value,))
    options = RunOptions(buckets="power_of_two", axis=0)
    out = two.run(lambda x: jnp.where(context().length_mask, x, 0).sum(), (whole,), options=options)
    assert_close([np.asarray(v) for v in two.local_results(out)], [6.0, 6.0])
    (batch,) = two.distribute_dataset(np.ones((6, 2), "float32"), batch_size=6)
    with pytest.raises(ValueError, match="cannot be padded to buckets"):
        two.run(lambda x: x.sum(), (batch,), options=options)
    with pytest.raises(ValueError, match="cannot be padded to buckets"):
        list(two.distribute_dataset(np.ones((6, 2), "float32"), options, batch_size=6))


@pytest.mark.parametrize("lengths", [(2, 5), (3, 4)])
def test_lengths_that_differ_by_replica_fit_no_bucket(two, lengths):
    """The first replica's was taken for all of them, and what the others have more was lost."""
    value = two.distribute_values_from_function(
        lambda c: np.ones(lengths[c.replica_id_in_sync_group], "float32")
    )
    options = RunOptions(buckets="power_of_two", axis=0)
    with pytest.raises(
        ValueError, match=r"same on all replicas.*lengths=\(\d, \d\).*dynamic_batch"
    ):
        two.run(lambda x: jnp.where(context().length_mask, x, 0).sum(), (value,), options=options)


def test_an_axis_for_a_batch_is_for_the_arrays_that_have_it(two):
    x, y = np.ones((4, 3), "float32"), np.arange(4.0, dtype="float32")
    options = RunOptions(buckets="power_of_two", axis=(1, 1))
    (batch,) = two.distribute_dataset((x, y), batch_size=4)

    def step(batch, mode):
        x, y = batch
        return jnp.where(context().length_mask, x, 0).sum() + y.sum() + len(mode)

    result = two.run(step, (batch, "mode"), options=options)
    assert [float(v) for v in two.local_results(result)] == [11, 15]


@pytest.mark.slow
def test_lengths_1_to_100_compile_at_most_7_programs(two):
    """Equal to the unpadded ones: what is computed along the length, and what is reduced."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 2)).astype("float32")
    traced = []

    def step(x, scale):
        traced.append(x.shape)
        scores = jnp.tanh(x @ weights) * scale[:, None, None]
        mask = context().length_mask[None, :, None]
        mean = jnp.where(mask, scores, 0).sum(1) / context().length
        softmax = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=1)
        running = jnp.cumsum(scores, axis=1)
        return {"mean": mean, "softmax": softmax, "running": running}

    options = RunOptions(buckets="power_of_two", axis=(1, None))
    scale = two.distribute_values_from_function(
        lambda c: np.full(2, c.replica_id_in_sync_group + 1.0, "float32")
    )
    counted = compilations()
    for length in range(1, 101):
        x = rng.normal(size=(4, length, 3)).astype("float32")
        (batch,) = two.distribute_dataset([(x,)], options=RunOptions(buckets="power_of_two"))
        results = two.local_results(two.run(step, (batch[0], scale), options=options))
        for i, result in enumerate(results):
            scores = np.tanh(x[2 * i : 2 * i + 2] @ weights) * (i + 1)
            exp = np.exp(scores)
            expected = {
                "mean": scores.mean(1),
                "softmax": exp / exp.sum(1, keepdims=True),
                "running": np.cumsum(scores, axis=1),
            }
            assert {k: v.shape for k, v in result.items()} == {
                k: v.shape for k, v in expected.items()
            }
            assert_close({k: result[k] for k in expected}, expected)
    (programs,) = [by_name[None] for by_name in two.replica_code._programs.values()]
    assert len(programs) == 7
    assert {shape[1] for shape in traced} == {2, 4, 8, 16, 32, 64, 128, 256}  # 256: shapes only
    # Besides the seven nothing is compiled, whatever the length (cutting happens on the host).
    assert len(counted) <= 7 + 3


def test_buckets_of_arrays_given_whole_and_of_listed_lengths(two):
    def total(x):
        return jnp.where(context().length_mask, x, 0).sum(), x * 2

    options = RunOptions(buckets=(4, 8), axis=0)
    for length in (1, 3, 4, 7, 8):
        x = np.arange(1.0, length + 1)
        for value, doubled in two.local_results(two.run(total, (x,), options=options)):
            assert float(value) == x.sum()
            np.testing.assert_array_equal(doubled, 2 * x)
    with pytest.raises(ValueError, match=r"must not exceed the largest bucket.*length=9"):
        two.run(total, (np.ones(9),), options=options)
    # a per-replica value that is on the devices already
    value = two.run(lambda: jnp.arange(3.0))
    results = two.local_results(two.run(total, (value,), options=options))
    assert [float(r[0]) for r in results] == [3, 3]
    # a cut result can be used further
    doubled = two.run(total, (np.ones(3),), options=options)[1]
    assert two.gather(doubled, 0).tolist() == [2] * 6
    assert two.reduce("sum", doubled).tolist() == [4] * 3
    assert [x.shape for x in two.local_results(two.run(lambda x: x, (doubled,)))] == [(3,)] * 2


def test_padding_that_changes_a_result_or_a_variable_is_an_error(two):
    with two.scope():
        total = keras.Variable(0.0, aggregation="mean")

    def forgets(x):
        return x.mean()

    def spoils(x):
        total.assign_add(x.sum())
        return x

    for step in (forgets, spoils):
        with pytest.raises(ValueError, match=r"Padding must not change.*length_mask.*check_pad"):
            two.run(step, (np.ones(3, "float32"),), options=RunOptions(buckets=(4,), axis=0))
    assert float(total.value) == 0.0
    unchecked = RunOptions(buckets=(4,), axis=0, check_padding=False)
    assert float(two.local_results(two.run(forgets, (np.ones(3),), options=unchecked))[0]) == 0.75


def test_padding_of_sequences_is_checked_by_the_program_that_ran(devices):
    """Time that is split stays so: laid out otherwise, sums of bfloat16 round otherwise."""
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 2}, devices=devices[:4])
    x = np.random.default_rng(0).normal(size=(3, 64, 8)).astype("float32")
    (batch,) = strategy.distribute_dataset(x, batch_size=3)

    def step(x):
        rows = jnp.where(context().batch_mask[:, None, None], x, 0).astype("bfloat16")
        return context().all_reduce("sum", jnp.einsum("btf,btg->fg", rows, rows))

    sums = strategy.local_results(strategy.run(step, (batch,), options=DYNAMIC))
    expected = np.einsum("btf,btg->fg", x, x)
    assert_close(np.asarray(sums[0], "float32") / expected.max(), expected / expected.max(), 1e-2)
    again = refilled(batch)
    assert again.array.sharding == batch.array.sharding
    assert_close(np.asarray(strategy.local_results(again)[0]), x[:2])
    assert (np.asarray(again.array)[3] == 1).all()


def test_bad_options(two):
    with pytest.raises(ValueError, match=r"must have one length.*axis=\(1, None\)"):
        two.run(lambda x, y: x, (np.ones((2, 3)), np.ones((2, 4))), options=BUCKETS)
    with pytest.raises(ValueError, match="prefix of args"):
        two.run(lambda x: x, (np.ones(2),), options=RunOptions(buckets=(4,), axis=(0, 0)))
    with pytest.raises(ValueError, match="at least 1"):
        two.run(lambda x: x, (np.ones((2, 0)),), options=BUCKETS)
    with pytest.raises(ValueError, match=r"must be equal to it.*padded length=4"):
        two.run(lambda x: x[:, ::2], (np.ones((2, 3)),), options=BUCKETS)
    with pytest.raises(ValueError, match=r"(?s)twice as many.*length=4; with 8: TypeError.*-1"):
        two.run(lambda x: x.reshape(2, 4), (np.ones((2, 3)),), options=BUCKETS)


# Uneven batches


def test_uneven_batches_need_dynamic_batch(four):
    x = np.arange(10.0, dtype="float32")
    (batch,) = four.distribute_dataset(x, batch_size=10)
    # tf.distribute gives each replica ceil(10 / 4) rows and the last one the rest
    assert [part.tolist() for part in four.local_results(batch)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
    ]
    with pytest.raises(ValueError, match=r"equally many rows.*\(3, 3, 3, 1\).*dynamic_batch=True"):
        four.run(lambda x: x, (batch,))

    def step(x):
        mask = context().batch_mask
        rows = context().all_reduce("sum", context().batch_size)
        return {
            "rows": context().batch_size,
            "mean": context().all_reduce("sum", jnp.where(mask, x, 0).sum()) / rows,
            "double": 2 * x,
            "pairs": x[:, None] + x[None, :],
        }

    result = four.run(step, (batch,), options=DYNAMIC)
    per_replica = four.local_results(result)
    assert [int(r["rows"]) for r in per_replica] == [3, 3, 3, 1]
    assert [float(r["mean"]) for r in per_replica] == [4.5] * 4
    assert [r["pairs"].shape for r in per_replica] == [(3, 3)] * 3 + [(1, 1)]
    np.testing.assert_array_equal(four.gather(result["double"], 0), 2 * x)
    assert float(four.reduce("mean", result["double"], axis=0)) == 9
    # even batches with the same options and function; fewer rows than replicas
    for rows, sizes in ((8, [2, 2, 2, 2]), (2, [1, 1, 0, 0]), (1, [1, 0, 0, 0])):
        (batch,) = four.distribute_dataset(x[:rows], batch_size=rows)
        result = four.run(step, (batch,), options=DYNAMIC)
        assert [int(r["rows"]) for r in four.local_results(result)] == sizes
        np.testing.assert_array_equal(four.gather(result["double"], 0), 2 * x[:rows])
        assert float(four.reduce("max", result["double"], axis=0)) == 2 * (rows - 1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rows", [5, 6])
def test_a_dynamic_batch_goes_through_two_runs(devices, replicas, rows):
    """The second knows the rows also where all replicas have equally many."""
    strategy = ktd.TPUStrategy(devices=devices[:replicas])
    (batch,) = strategy.distribute_dataset(np.arange(rows), batch_size=rows)

    def total(x):
        return jnp.where(context().batch_mask, x, 0).sum() + 100 * context().batch_size

    doubled = strategy.run(lambda x: 2 * x, (batch,), options=DYNAMIC)
    totals = strategy.run(total, (doubled,), options=DYNAMIC)
    assert int(strategy.reduce("sum", totals)) == rows * (rows - 1) + 100 * rows


def test_a_last_batch_trained_with_dynamic_batch_equals_fit(four):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 3)).astype("float32"), rng.normal(size=(22, 1)).astype("float32")

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    with four.scope():
        model, optimizer = build(), keras.optimizers.SGD(0.1)

    def step(batch):
        x, y = batch
        rows = context().all_reduce("sum", context().batch_size)

        def loss(predictions):
            errors = jnp.where(context().batch_mask, ((predictions - y) ** 2)[:, 0], 0)
            return errors.sum() / rows

        stepped(model, optimizer, x, loss, "sum")

    for batch in four.distribute_dataset((x, y), batch_size=8):
        four.run(step, (batch,), options=DYNAMIC)
    stock = build()
    stock.compile(keras.optimizers.SGD(0.1), "mse")
    stock.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_close(model.get_weights(), stock.get_weights())


def test_forgotten_row_mask_is_an_error(four):
    (batch,) = four.distribute_dataset(np.ones(7, "float32"), batch_size=7)
    with pytest.raises(ValueError, match=r"Padding must not change.*batch_mask"):
        four.run(lambda x: x.mean(), (batch,), options=DYNAMIC)


def test_rows_and_lengths_vary_together(two):
    options = RunOptions(dynamic_batch=True, buckets="power_of_two", axis=1)
    x = np.arange(15.0, dtype="float32").reshape(3, 5)

    def step(x):
        mask = context().batch_mask[:, None] & context().length_mask[None, :]
        return jnp.where(mask, x, 0).sum(), x + 1

    (batch,) = two.distribute_dataset([x], options=options)
    total, more = two.run(step, (batch,), options=options)
    assert float(two.reduce("sum", total)) == x.sum()
    np.testing.assert_array_equal(two.gather(more, 0), x + 1)
