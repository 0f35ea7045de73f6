"""A sample of the comparisons; `python tests/conformance/run.py` makes all of them."""

import random

import layers
import models
import operations
import pytest
import run

# What XLA gets wrong without repairs, one or two of each kind, and what it has always got right.
_SAMPLE = (
    r"operation (take/table|take_along_axis/rows|segment_max/own_rows|sort/axis0|det/batched|"
    r"depthwise_conv/2d|separable_conv/2d|correlate/same|slice_update/clamped_rows|"
    r"einsum/across|pad/reflect_both|cumsum/axis0) on (4x2|8), ragged",
    r"move (at|slice_) on 2x4, .*",
    r"layer (Embedding|DepthwiseConv2D|BatchNormalization|MultiHeadAttention)/\w+ on 2x2x2, ragged",
    r"model (ranking|moe_like) on (4x2, ragged, tensor_parallel|2x2x2, ragged, fsdp)",
    r"assigned \w+ on 4x2, .*",
    r"assigned in_turn on 4x2, (7|10) rows",
    r"assigned_layer (Dense/plain|BatchNormalization/plain|GRU/plain) on \d on 4x2, 10 rows",
    r"assigned_pair (BatchNorm|LayerNorm|MultiHead)\w+/\w+ on 0 > BatchNorm\w+/\w+ on 1 on .*",
    r"replica_operation (take/table|take_along_axis/rows|cumsum/axis0) on (4x2|2x4), 4 rows, first",
    r"replica_layer (Embedding/one|DepthwiseConv2D/plain) on 4x2, 4 rows, tensor_parallel",
    r"pair (shift|sort|cumsum|roll) > (set|add) (one|last|rows) on (8|2x2x2), .*",
    r"pair time: (shift|reverse) > (set there|update|conv|take along) on .*",
)


_MOST = 12


@pytest.mark.slow
@pytest.mark.parametrize("pattern", _SAMPLE, ids=lambda pattern: pattern.split()[0])
def test_a_sample_of_each_kind_equals_one_device(pattern):
    chosen = run.listed(run.KINDS, f"^{pattern}")
    assert chosen
    if len(chosen) > _MOST:
        chosen = random.Random(0).sample(chosen, _MOST)
    found = run.compare_all(chosen, processes=1, together=6)
    assert not [str(finding) for finding in found if finding.outcome != "right"]


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "pattern",
    # libtpu alone joins rows wrongly: see the last section of docs/xla_partitioner.md.
    [
        "operation pad/reflect_both on (8|4x2), ",
        "layer Embedding/one on 2x2x2, ragged",
        "layer StackedRNNCells/step on 4x2, ragged, tensor_parallel",
    ],
    ids=lambda pattern: pattern.split()[1],
)
def test_programs_of_the_tpu_equal_one_device(pattern, monkeypatch):
    monkeypatch.setenv("KTD_COMPILER", "libtpu")
    found = run.compare_all(run.listed(run.KINDS, f"^{pattern}"), processes=1)
    assert found
    assert not [str(finding) for finding in found if finding.outcome != "right"]


@pytest.mark.parametrize("table", [operations, layers], ids=lambda table: table.__name__)
def test_every_public_name_has_a_case_or_a_reason(table):
    compared = {case.name.split("/")[0] for case in table.CASES}
    assert sorted(compared | set(table.LEFT_OUT)) == sorted(table.all_names())
    assert all(table.LEFT_OUT.values())


def test_names_of_cases_are_unique():
    for table in (operations, layers, models):
        names = [case.name for case in table.CASES]
        assert len(set(names)) == len(names)


@pytest.mark.slow
def test_an_abort_a_hang_and_an_error_are_findings():
    job = run.listed(("operation",), "^operation sin/batch on 8, even")[0]
    probe = {**job, "kind": "probe"}
    other = run.listed(("operation",), "^operation cos/batch on 8, even")[0]
    found = run.compare_all(
        [
            *({**job, "case": "none"}, {**probe, "case": "abort"}, {**probe, "case": "hang"}),
            *(job, other),
        ],
        processes=1,
        timeout=45,  # the start of a process is within it
        together=3,
    )
    outcomes = {finding.job["case"]: finding.outcome for finding in found}
    right = {"sin/batch": "right", "cos/batch": "right"}
    assert outcomes == {"none": "error", "abort": "abort", "hang": "hang", **right}
    assert any(str(finding).startswith("hang") for finding in found)
    assert run.table(found, 9.0).endswith("5 cases, 5 comparisons, 9 s")
