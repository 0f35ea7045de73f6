"""strategy.run and the replica context; the numbers of tf.distribute's own examples."""

import collections
import enum
import gc
import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close

import keras_tpu_dist as ktd

Pair = collections.namedtuple("Pair", ["first", "second"])


class ReduceOp(enum.Enum):
    """As tf.distribute.ReduceOp."""

    SUM = "SUM"
    MEAN = "MEAN"


def local(strategy, value):
    return jax.tree.map(np.asarray, strategy.local_results(value))


context = ktd.get_replica_context


# tf.distribute.Strategy.run: its three examples, with two replicas as there.


def test_tf_example_constant_input(two):
    result = two.run(lambda x: x * 2.0, args=(3.0,))
    assert repr(result) == (
        "PerReplica:{\n  0: array(6., dtype=float32),\n  1: array(6., dtype=float32)\n}"
    )


def test_tf_example_distributed_values_input(two):
    values = two.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync)
    assert local(two, two.run(lambda x: x * 2, args=(values,))) == (4, 4)


def test_tf_example_all_reduce_of_replica_ids(two):
    values = two.distribute_values_from_function(lambda c: np.int32(c.replica_id_in_sync_group))
    result = two.run(lambda x: context().all_reduce("sum", x), args=(values,))
    assert local(two, result) == (1, 1)


# tf.distribute.ReplicaContext


def test_tf_example_replica_id(two):
    assert local(two, two.run(lambda: context().replica_id_in_sync_group)) == (0, 1)


def test_tf_examples_all_reduce(two):
    def step():
        nest = [jnp.float32(1), jnp.float32(2)]
        return context().all_reduce(ReduceOp.SUM, jnp.float32(1)), context().all_reduce("SUM", nest)

    # numpy=2.0 on both; [2.0, 4.0] on both
    assert two.local_results(two.run(step)) == ((2.0, [2.0, 4.0]), (2.0, [2.0, 4.0]))


def test_one_replica_reduces_to_the_dtypes_of_several(two, devices):
    def step():
        values = [jnp.asarray(1, kind) for kind in ("int32", "uint8", "bool", "float16")]
        return [context().all_reduce(op, values) for op in ("mean", "sum", "max", "min")]

    one = ktd.TPUStrategy(devices=devices[:1])
    kinds = [[v.dtype for v in jax.tree.leaves(s.run(step))] for s in (one, two)]
    assert kinds[0] == kinds[1]


def test_tf_example_all_reduce_of_a_dict(two):
    given = [{"a": 1.0, "b": np.float32([40, 1])}, {"a": 3.0, "b": np.float32([2, 98])}]
    values = two.distribute_values_from_function(lambda c: given[c.replica_id_in_sync_group])

    def step(value):
        return {op: context().all_reduce(op, value) for op in ("sum", "mean", "max", "min")}

    for result in local(two, two.run(step, (values,))):
        assert_close(result["sum"], {"a": 4.0, "b": [42, 99]}, 0)
        assert_close(result["mean"], {"a": 2.0, "b": [21, 49.5]}, 0)
        assert_close(result["max"], {"a": 3.0, "b": [40, 98]}, 0)
        assert_close(result["min"], {"a": 1.0, "b": [2, 1]}, 0)


def test_tf_examples_all_gather(two):
    def step():
        return context().all_gather([jnp.array([1, 2, 3]), jnp.array([[1, 2], [3, 4]])], axis=0)

    for first, second in local(two, two.run(step)):
        assert first.tolist() == [1, 2, 3, 1, 2, 3]
        assert second.tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]


# tf.distribute.Strategy.reduce


def test_tf_example_reduce_of_replica_ids(two):
    assert two.reduce("SUM", two.run(lambda: context().replica_id_in_sync_group), axis=None) == 1


def test_tf_text_reduce_over_batch_and_replicas(two):
    (batch,) = two.distribute_dataset(np.arange(8.0), batch_size=8)
    result = two.run(lambda x: x, (batch,))
    # "returning [0+4, 1+5, 2+6, 3+7]"; "a scalar 0+1+2+3+4+5+6+7"
    for value in (batch, result):
        assert two.reduce("sum", value, axis=None).tolist() == [4, 6, 8, 10]
        assert float(two.reduce(ReduceOp.SUM, value, axis=0)) == 28
        assert float(two.reduce("mean", value, axis=0)) == 3.5
        assert float(two.reduce("max", value, axis=(0,))) == 7


def test_tf_text_last_partial_batch(two):
    """'if the last batch has size 6 and it is divided into [0, 1, 2, 3] and [4, 5]'."""
    parts = [np.arange(4.0), np.arange(4.0, 6.0)]
    value = two.distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    assert [part.tolist() for part in two.local_results(value)] == [[0, 1, 2, 3], [4, 5]]
    assert float(two.reduce("mean", value, axis=0)) == 15 / 6
    assert float(two.reduce("min", value, axis=-1)) == 0
    assert two.gather(value, axis=0).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"only along the dimension.*usually axis=0"):
        two.reduce("sum", value)


# tf.distribute.Strategy.gather


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int32", "uint8", "bool"])
def test_uneven_values_are_reduced_as_even_ones_are(two, kind):
    """In the same dtype, and no part overflows where the whole does not."""
    many = {"float16": 10000, "bfloat16": 300, "int32": 2**30, "uint8": 200, "bool": True}[kind]
    uneven, even = (np.full(rows, many).astype(kind) for rows in (13, 14))
    (uneven,) = two.distribute_dataset(uneven, batch_size=13)
    (even,) = two.distribute_dataset(even, batch_size=14)
    for op in ("mean", "max", "min"):
        found, expected = two.reduce(op, uneven, axis=0), two.reduce(op, even, axis=0)
        assert found.dtype == expected.dtype
        assert_close(float(found), float(expected), 1e-7 * float(expected))
    assert two.reduce("sum", uneven, axis=0).dtype == two.reduce("sum", even, axis=0).dtype


def test_tf_examples_gather(two, four):
    value = two.distribute_values_from_function(lambda c: np.array([[1], [2]]))
    assert two.gather(value, axis=0).tolist() == [[1], [2], [1], [2]]
    single = np.arange(6).reshape(1, 2, 3)
    value = four.distribute_values_from_function(lambda c: single)
    for axis, shape in enumerate([(4, 2, 3), (1, 8, 3), (1, 2, 12)]):
        joined = np.asarray(four.gather(value, axis=axis))
        assert joined.shape == shape
        np.testing.assert_array_equal(joined, np.concatenate([single] * 4, axis))
    plain = np.ones(3)
    assert two.gather(plain, axis=0) is plain


def test_sequences_that_are_split_come_out_whole(devices):
    """A sequence axis of the mesh splits the time of a replica's rows over its devices."""
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 2}, devices=devices[:4])
    x = np.arange(4 * 6 * 3.0, dtype="float32").reshape(4, 6, 3)
    (batch,) = strategy.distribute_dataset(x, batch_size=4)
    assert_close(local(strategy, batch), (x[:2], x[2:]))
    (ragged,) = strategy.distribute_dataset(x[:3], batch_size=3)
    assert_close(local(strategy, ragged), (x[:2], x[2:3]))

    def total(x):
        return jnp.where(context().length_mask[:, None], x, 0).sum((1, 2))

    options = ktd.RunOptions(buckets=(8,))
    totals = strategy.run(total, (batch,), options=options)
    assert_close(strategy.gather(totals, 0), x.sum((1, 2)))


@pytest.mark.parametrize("in_one_launch", [False, True])
@pytest.mark.parametrize("form", [{"rhs_dilation": (2,)}, {"window_strides": (2,)}])
def test_convolutions_over_split_sequences(devices, form, in_one_launch):
    """XLA sums a gradient over the devices of a further axis too: the axes must be known."""
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 2, "model": 2}, devices=devices)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 12, 6)).astype("float32")
    kernel = rng.normal(size=(2, 6, 8)).astype("float32")

    def gradient(x):
        def loss(kernel):
            names = ("NWC", "WIO", "NWC")
            form_of_keras = {"window_strides": (1,), "padding": "SAME", **form}
            made = jax.lax.conv_general_dilated(x, kernel, dimension_numbers=names, **form_of_keras)
            return jnp.sum(jnp.tanh(made))

        return jax.grad(loss)(kernel)

    def step(x):
        return context().all_reduce("sum", gradient(x))

    dataset = strategy.distribute_dataset(x, batch_size=4)
    if in_one_launch:
        # The last batch is launched by itself.
        *_, (steps, found) = strategy.loop(step, dataset, steps_per_launch=2)
        assert steps == 3
    else:
        found = [strategy.run(step, (batch,)) for batch in dataset][-1]
    expected = np.asarray(gradient(x[8:]))
    for of_replica in strategy.local_results(found):
        assert_close(np.asarray(of_replica), expected)


def test_split_tokens_in_launches_of_several_steps(devices):
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 2, "model": 2}, devices=devices)
    tokens = np.arange(10 * 12, dtype="int32").reshape(10, 12)
    with strategy.scope():
        weight = keras.Variable(1.0)

    def step(tokens):
        total = context().all_reduce("sum", jnp.sum(tokens))
        weight.assign(weight + 1)
        return total

    dataset = strategy.distribute_dataset(tokens[:8], batch_size=4)
    launches = strategy.loop(step, dataset, steps_per_launch=2, outputs="all")
    ((_, totals),) = list(launches)
    assert strategy.local_results(totals)[0].tolist() == [tokens[:4].sum(), tokens[4:8].sum()]
    assert float(weight) == 3


def test_reduce_of_a_value_all_replicas_share(two, devices):
    assert float(two.reduce("mean", np.float32(3), axis=None)) == 3
    assert two.reduce("sum", 0) == 0
    assert float(two.reduce("mean", np.arange(3.0), axis=0)) == 1
    one = ktd.TPUStrategy(devices=devices[:1])
    assert one.reduce("sum", 5.0) == 5.0
    with pytest.raises(ValueError, match=r"needs a value for every replica.*float of shape \(\)"):
        two.reduce("sum", 5.0)


# What goes in and out


def test_nests_in_and_out(four):
    values = four.distribute_values_from_function(lambda c: {"id": c.replica_id_in_sync_group})

    def step(value, pair, training=False, name=None):
        assert training is True
        assert name == "x"
        return {"pair": Pair(value["id"] + pair.first, None), "list": [np.float32(1), (2, True)]}

    result = four.run(step, (values, Pair(10, None)), {"training": True, "name": "x"})
    assert isinstance(result["pair"], Pair)
    assert result["pair"].second is None
    assert [int(r["pair"].first) for r in four.local_results(result)] == [10, 11, 12, 13]
    assert local(four, result)[3]["list"][1] == (2, True)
    assert four.run(lambda: None) is None
    assert four.local_results("text") == ("text",)


def test_keys_of_jax_random(two):
    key = jax.random.key(3)

    def draw(key, data):
        own = jax.random.fold_in(key, context().replica_id_in_sync_group)
        return jax.random.uniform(own), jax.random.uniform(jax.random.wrap_key_data(data))

    for one in (key, jax.random.key(4), jax.random.key(3, impl="rbg")):
        drawn = local(two, two.run(draw, (one, jax.random.key_data(key))))
        expected = [jax.random.uniform(jax.random.fold_in(one, i)) for i in range(2)]
        assert_close([first for first, _ in drawn], expected)
        assert_close([second for _, second in drawn], [jax.random.uniform(key)] * 2)
    with pytest.raises(ValueError, match=r"(?s)returns arrays, numbers.*key_data"):
        two.run(lambda: key)


def test_arrays_of_the_same_devices_in_another_order(two, devices):
    other = ktd.TPUStrategy(devices=devices[1::-1])
    shared = two.reduce("mean", two.run(lambda: jnp.arange(3.0)))
    assert_close(local(other, other.run(lambda x: x * 2, (shared,))), (np.arange(3.0) * 2,) * 2)


def test_results_of_one_run_go_into_the_next(four):
    first = four.run(lambda: context().replica_id_in_sync_group * jnp.ones((2, 3)))
    again = four.run(lambda x: x + 1, (first,))
    assert [float(x[0, 0]) for x in four.local_results(again)] == [1, 2, 3, 4]
    # one replica's result is a plain array and goes to all replicas whole
    shared = four.run(lambda x: x.sum(), (four.local_results(again)[3],))
    assert [float(x) for x in four.local_results(shared)] == [24] * 4


@pytest.mark.parametrize(
    ("mesh", "options", "replicas"),
    [
        ({"data": 8}, {}, 8),
        ({"data": 2, "model": 4}, {}, 2),
        ({"data": 2, "fsdp": 2, "model": 2}, {}, 4),
        ({"model": 8}, {}, 1),
        ({"data": 1, "model": 8}, {}, 1),
        ({"a": 4, "b": 2}, {"data_axes": ("b", "a")}, 8),
    ],
)
def test_every_mesh(mesh, options, replicas):
    strategy = ktd.TPUStrategy(mesh, **options)
    assert strategy.num_replicas_in_sync == replicas
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    (batch,) = strategy.distribute_dataset(x, batch_size=16)

    def step(x):
        c = context()
        assert c.num_replicas_in_sync == replicas
        assert c.strategy is strategy
        return {
            "id": c.replica_id_in_sync_group,
            "sum": c.all_reduce("sum", x.sum()),
            "any": c.all_reduce("max", c.replica_id_in_sync_group == 0),
            "rows": c.all_gather(x, 0),
            "x": x,
        }

    result = strategy.run(step, (batch,))
    per_replica = local(strategy, result)
    assert [int(r["id"]) for r in per_replica] == list(range(replicas))
    for i, r in enumerate(per_replica):
        np.testing.assert_array_equal(r["rows"], x)
        np.testing.assert_array_equal(r["x"], np.split(x, replicas)[i])
        assert bool(r["any"]) is True
        assert_close(r["sum"], x.sum())
    np.testing.assert_array_equal(strategy.gather(result["x"], 0), x)
    assert_close(strategy.reduce("sum", result["x"], axis=0), x.sum(0))


def test_the_gradient_of_an_all_reduced_sum_is_the_all_reduced_sum(two):
    """As tf.distribute documents for ReplicaContext.all_reduce."""

    def step():
        i = context().replica_id_in_sync_group.astype("float32")
        return jax.grad(lambda x: (i + 1) * context().all_reduce("sum", x))(1.0)

    assert local(two, two.run(step)) == (3.0, 3.0)


# Tracing, caching


def test_a_function_is_traced_once_for_each_shape(two):
    calls = []

    def step(x, flag=True):
        calls.append(x.shape)
        return x + 1

    for _ in range(3):
        two.run(step, (np.zeros(2, "float32"),))
    assert len(calls) == 1
    two.run(step, (np.zeros(3, "float32"),))
    two.run(step, (np.zeros(3, "float32"),), {"flag": False})
    assert len(calls) == 3
    two.run(step, (1,)), two.run(step, (2,))
    assert len(calls) == 4


def test_methods_partials_and_jitted_functions(two):
    class Loop:
        traced = 0

        def step(self, x):
            self.traced += 1
            return x * 2

    loop = Loop()
    assert [float(local(two, two.run(loop.step, (i,)))[1]) for i in range(3)] == [0, 2, 4]
    assert loop.traced == 1
    assert local(two, two.run(jax.jit(lambda x: x + 1), (1,))) == (2, 2)


def test_programs_live_as_long_as_their_function(two):
    def step(x):
        return x

    two.run(step, (1,))
    assert len(two.replica_code._programs) == 1
    del step
    gc.collect()
    assert len(two.replica_code._programs) == 0


def test_a_lambda_in_the_loop_is_warned_of_once(two, caplog):
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        for _ in range(5):
            two.run(lambda: 1)
    (record,) = [r for r in caplog.records if "different objects" in r.message]
    assert "define the function once, outside of the loop" in record.message


# Errors


class Own(Exception):
    """Raised by a user's function."""


def test_an_exception_in_the_function_comes_out_unchanged_and_nothing_is_assigned(two):
    with two.scope():
        v = keras.Variable(1.0, aggregation="mean")
    mistaken = [Own("mine")]

    def step():
        v.assign(5.0)
        if mistaken:
            raise mistaken[0]

    with pytest.raises(Own) as caught:
        two.run(step)
    assert caught.value is mistaken[0]
    assert float(v.value) == 1.0
    with pytest.raises(RuntimeError, match="only inside"):
        ktd.get_replica_context()
    mistaken.clear()
    two.run(step)
    assert float(v.value) == 5.0


@pytest.mark.parametrize("result", ["text", object(), {"a": [lambda: 0]}, np.array(["x"])])
def test_a_function_that_returns_no_arrays(two, result):
    with pytest.raises(ValueError, match=r"returns arrays, numbers, None.*Return only arrays"):
        two.run(lambda: result)


def test_bad_calls(two, devices):
    one = ktd.TPUStrategy(devices=devices[:1])
    value = one.run(lambda: jnp.float32(1))
    for use in (
        lambda: two.run(lambda x: x, (value,)),
        lambda: two.reduce("sum", value),
        lambda: two.gather(value, 0),
        lambda: two.local_results({"a": value}),
    ):
        with pytest.raises(ValueError, match=r"Only the strategy that created.*local_results"):
            use()
    with pytest.raises(RuntimeError, match=r"only inside a function.*strategy\.reduce"):
        ktd.get_replica_context()
    with pytest.raises(RuntimeError, match=r"strategy\.run is for code outside.*the function dir"):
        two.run(lambda: two.run(lambda: 1))
    with pytest.raises(RuntimeError, match=r"get_replica_context\(\)\.all_reduce"):
        two.run(lambda: two.reduce("sum", 1))
    with pytest.raises(ValueError, match=r'one of "sum".*Did you mean \'mean\''):
        two.run(lambda: context().all_reduce("meen", 1))
    with pytest.raises(ValueError, match="along a dimension"):
        two.run(lambda: context().all_gather(1.0, 0))
    with pytest.raises(RuntimeError, match=r"length_mask.*buckets"):
        two.run(lambda: context().length_mask)
    with pytest.raises(TypeError, match="can be hashed"):
        two.run(lambda x: 1, ({1, 2},))
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        jax.jit(lambda x: two.run(lambda y: y, (x,)))(1.0)
    with pytest.raises(TypeError, match="be numeric"):
        two.run(lambda x: 1, (np.array(["a"]),))
    with pytest.raises(ValueError, match=r"gather.*scalar needs"):
        two.gather(two.run(lambda: 1), axis=0)
    with pytest.raises(RuntimeError, match="without its chips"):
        ktd.TPUStrategy(topology="v5e:2x2").run(lambda: 1)
