"""What a compiled program exchanges in a branch that not all devices take."""

import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.partitioner.exchanges import ONE_DEVICE, exchanged_in_branches

SIZES = {"data": 4, "model": 2}
PROGRAM = """HloModule jit_train_step

%taken (p: f32[2]) -> f32[2] {{
  %p = f32[2]{{0}} parameter(0)
  ROOT %f = f32[2]{{0}} call(%p), to_apply=%inner
}}

%inner (q: f32[2]) -> f32[2] {{
  %q = f32[2]{{0}} parameter(0)
  ROOT %x = f32[2]{{0}} {exchange}
}}

%skipped (r: f32[2]) -> f32[2] {{
  ROOT %r = f32[2]{{0}} parameter(0)
}}

ENTRY %main (a: f32[2], i: s32[]) -> f32[2] {{
  %a = f32[2]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %sum = f32[2]{{0}} all-reduce(%a), replica_groups={{}}, to_apply=%add
  ROOT %c = f32[2]{{0}} conditional(%i, %sum, %sum), branch_computations={{%skipped, %taken}}, \
metadata={{op_name="jit(train_step)/jvp(dense)/shard_map/{scope}/cond"}}
}}
"""
ALIKE = [
    "replica_groups=[2,4]<=[4,2]T(1,0)",
    "replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}",
    "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
]
MIXED = [
    "replica_groups=[4,2]<=[8]",
    "replica_groups={}",
    "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
    "replica_groups=of a form that nobody has seen",
]


def found(exchange: str, scope: str = "on_one_device") -> list[str]:
    text = PROGRAM.format(exchange=exchange, scope=scope)
    return exchanged_in_branches(text, SIZES, frozenset({"model"}))


@pytest.mark.parametrize("groups", ALIKE)
def test_devices_that_take_one_branch_may_sum(groups):
    assert not found(f"all-reduce(%q), {groups}, to_apply=%add")


@pytest.mark.parametrize("groups", MIXED)
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather-start", "all-to-all"])
def test_devices_of_two_branches_may_not(groups, kind):
    assert found(f"{kind}(%q), {groups}") == [f"ROOT %x = f32[2]{{0}} {kind}(%q), {groups}"]


def test_nothing_is_permuted():
    assert found("collective-permute(%q), source_target_pairs={{0,2},{2,0}}")


def test_other_conditionals_may_do_what_they_like():
    assert not found("collective-permute(%q), source_target_pairs={{0,1}}", "other")


def test_what_would_hang_is_refused_before_it_is_launched(monkeypatch):
    strategy = ktd.TPUStrategy(SIZES)
    with strategy.scope():
        layer = ktd.assign(keras.layers.Dense(2), 1)
        layer.build((None, 3))
        model = keras.Sequential([keras.Input((3,)), layer])
    ours = "keras_tpu_dist.programs.partitioner.exchanges.exchanged_in_branches"
    read: list[str] = []

    def seen(text, sizes, taken):
        read.append(text)
        assert (dict(sizes), taken) == (SIZES, frozenset({"model"}))
        return ["%p = f32[2]{0} collective-permute(%q)"] if len(read) < 2 else again

    monkeypatch.setattr(ours, seen)
    again: list[str] = ["%p = f32[2]{0} collective-permute(%q)"]
    with pytest.raises(
        ValueError, match=r"(?s)must not exchange data.*collective-permute.*assign\(layer"
    ):
        model.predict(np.ones((8, 3)), verbose=0)
    assert len(read) == 2
    assert ONE_DEVICE in read[0]

    # With whole rows nothing is exchanged: the second program is the one that is launched.
    read.clear()
    again = []
    got = model.predict(np.ones((8, 3)), verbose=0)
    assert len(read) == 2
    kernel, bias = layer.get_weights()
    np.testing.assert_allclose(got, np.ones((8, 3)) @ kernel + bias, rtol=1e-5, atol=1e-6)
