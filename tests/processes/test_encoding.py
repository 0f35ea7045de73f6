"""What strangers may write on the host channel becomes our error or plain data, never more."""

import json
import tracemalloc
from collections import OrderedDict, namedtuple

import jax
import numpy as np
import pytest
from coordinator import Store
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keras_tpu_dist.input.own_input import OwnInput, described_structure, structure_of
from keras_tpu_dist.input.shards import input_shards_by
from keras_tpu_dist.processes import encoding, watch
from keras_tpu_dist.processes.channel import Channel, PeerError
from keras_tpu_dist.processes.encoding import check_array, decoded

KEYS = (
    st.sampled_from(["rows", "leaves", "structure", "ended", "batches", "marks", "x"]) | st.text()
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


def outcome(function):
    """What a function returns, and the error that it raises if it is one of ours."""
    try:
        return function(), None
    except (PeerError, ValueError) as error:
        return None, error


def is_ours(error):
    """Whether an error says the rule, what was received, and the fix."""
    return "Received: " in str(error) and len(str(error)) < 1000


@settings(max_examples=300)
@given(PLAIN.map(json.dumps) | st.text())
@example("[" * 100_000)
@example('{"a":' * 5000 + "1" + "}" * 5000)
@example("1" * 10_000)
@example('"\\ud800"')
def test_a_text_is_plain_data_or_our_error(text):
    value, error = outcome(lambda: decoded(text))
    assert is_plain(value) if error is None else is_ours(error)


def is_plain(value):
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize(
    "text", ["[" * 10**6, "[" + "[]," * 10**7 + "[]]", '"' + "a" * 10**8 + '"', "9" * 10**7]
)
def test_a_bomb_takes_no_memory(text):
    tracemalloc.start()
    with pytest.raises(PeerError):
        decoded(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 25 * encoding.MOST_BYTES


ARRAYS = st.integers(0, 9).map(np.float32)
BATCHES = st.recursive(
    ARRAYS | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.lists(st.tuples(st.text(max_size=3), inner), max_size=3).map(OrderedDict)
    ),
    max_leaves=6,
)


@given(BATCHES)
def test_every_structure_comes_back(batch):
    leaves, treedef = jax.tree.flatten(batch)
    again = structure_of(json.loads(json.dumps(described_structure(batch))), iter(leaves))
    assert jax.tree.structure(again) == treedef
    assert jax.tree.leaves(again) == leaves


STRUCTURES = st.recursive(
    st.sampled_from([0, None, 1, "x", True, 0.0]),
    lambda inner: st.lists(
        st.sampled_from(["tuple", "list", "dict", "OrderedDict", "set", 0]) | inner
        | st.tuples(st.sampled_from(["a", "b", 1]), inner).map(list)
    ),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=300)
@given(STRUCTURES | PLAIN, st.integers(0, 3))
@example(["dict", ["a", 0], ["a", 0]], 2)
@example(["dict", ["a", 0], [1, 0]], 2)
def test_a_strange_structure_is_our_error(described, number):
    batch, error = outcome(lambda: structure_of(described, iter(np.zeros(number))))
    assert len(jax.tree.leaves(batch)) == number if error is None else is_ours(error)


def test_a_class_of_ones_own_is_no_structure():
    pair = namedtuple("pair", "a b")(np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match=r"arrays in tuples, lists and dicts.*Received: pair"):
        described_structure((pair, np.zeros(2)))


@settings(max_examples=300)
@given(
    st.lists(st.integers(-(2**70), 2**70), max_size=3),
    st.sampled_from(["float32", "bfloat16", "O", "<U3", "f8,f8", "m8", "float33"]) | st.text(),
    st.integers(-1, 2**70),
)
def test_a_strange_batch_is_our_error(shape, dtype, rows):
    """Nothing is allocated for what no process could bring."""
    shards = input_shards_by(np.repeat([0, 1], 4), [0], this_process=0)
    assert shards is not None
    own = OwnInput(shards, lambda batch: [0])
    leaf = ["x", shape, dtype, None]
    described = {"rows": rows, "leaves": [leaf], "structure": 0}
    found, error = outcome(lambda: own._rows([described, described]))
    if error is None:
        sizes = [float(rows if size == -1 else size) for size in shape]
        assert (found, np.prod(sizes) <= 2**36) == ((rows, rows), True)
    else:
        assert is_ours(error)


def test_numbers_of_every_kind_are_known():
    for dtype in ("bool", "int4", "uint64", "bfloat16", "float8_e4m3fn", "complex64", "object"):
        check_array([3, 4], dtype, where="here")
    with pytest.raises(PeerError, match=r"here with an impossible array: \[\[-1\], 'bool'\]"):
        check_array([-1], "bool", where="here")


def test_a_strangers_value_is_our_error():
    for entry in ('["fit", "7", [[[1], "float32", 7]]]', "[]", "7", '{"fit": 1}', '["fit", 7, 7]'):
        store = Store(**{"agree/1/entries/1": entry})
        with pytest.raises(PeerError, match=r"plain data of a known form|make the same calls"):
            Channel(store, 0, 2).agree("fit", "Do the same.", 7, reduce=sum)
    for verdict in ("[]", "7", '["given", 7]', '["given", [[1], [1, 2]]]', '["invalid", 7]'):
        store = Store(**{"agree/1/verdict/0": verdict})
        with pytest.raises(PeerError, match=r"plain data of a known form"):
            Channel(store, 1, 2).agree("fit", "Do the same.", 7)


def test_a_strangers_entries_are_left_out(caplog):
    strange = {f"gone/{name}": '["failed", "failed"]' for name in ("7", "-1", "x", "01", "1/2")}
    store = Store(**strange, **{"gone/1": '{"failed": 1}', "alive/1": "[[[["})
    looks = watch.Watch(Channel(store, 0, 2), 0, 2, peer_timeout_s=5.0)
    looks._look()
    assert not looks._gone
    # Process 0 reports processes that do not exist.
    ends = {name: ["failed", "a"] for name in ("0", "x", "-1", "9")}
    board = encoding.encoded([1, "in fit", 0, ends])
    store = Store(**{"board/0": board, "board/1": board})
    looks = watch.Watch(Channel(store, 1, 2), 1, 2, peer_timeout_s=5.0)
    looks._board()
    assert looks._reported == {0: ("failed", "a")}
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "entries that no process of this run wrote" in said
    assert "a malformed entry 'alive' of the host channel is ignored" in said


@pytest.mark.parametrize("entry", ["[Infinity, '', 0]", "[1, '', NaN]", "[1]", "7", "{}"])
def test_the_watch_goes_on_after_any_entry(entry):
    store = Store(**{"alive/1": entry.replace("'", '"')})
    assert Channel(store, 0, 2).read_valid("alive", watch._alive) == {}
