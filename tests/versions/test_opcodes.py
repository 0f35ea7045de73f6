"""The operations that this libtpu writes are in the table: the short form of `opcodes.py`."""

import collections

import opcodes
import pytest

from keras_tpu_dist.tools.hlo import loops, operations, traffic


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("case", "topology"),
    [("dropout", "v6e:2x4"), ("LSTM", "tpu7x:2x2x1"), ("operations", "v5e:2x4")],
)
def test_all_operations_of_a_program_are_in_the_table(case, topology):
    row = {"counts": opcodes.counted(opcodes.text_of(case, topology))}
    lines, missing = opcodes.table({"here": [row]})
    assert missing == []
    assert len(lines) > 40
    handed_over = any(name.startswith(("call-", "custom-call-")) for name in row["counts"])
    assert handed_over == (case == "LSTM") or case == "operations"


def test_the_table_says_what_is_missing():
    counts = collections.Counter({"add": 3, "frob": 1, "custom-call Foo": 2, "mulhi": 1})
    lines, missing = opcodes.table({"A": [{"counts": counts}], "B": [{"error": "no"}]})
    assert missing == ["custom-call Foo", "frob"]
    assert "| frob | NOT IN THE TABLE |  | 1 | - |" in lines
    assert "| mulhi | computes each element by itself | " in lines[-1]


def test_the_readers_own_lists_name_operations_of_the_table():
    lists = [loops._COPIES, loops._ARITHMETIC, traffic._VIEWS]
    assert set().union(*lists) <= operations.OPERATIONS.keys()
