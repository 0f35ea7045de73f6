"""What several slices exchange, as the TPU's program has it, on simulated devices."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun.compile import cpu_environment
from keras_tpu_dist.tools.hlo.parse import parse
from keras_tpu_dist.tools.replay import CannotRun
from keras_tpu_dist.tools.replay.rewrite import runnable

SCRIPT = pathlib.Path(__file__).with_name("between_slices.py")


def differences(*arguments):
    """The largest difference of each collective, from a process of its own."""
    ran = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **cpu_environment(8)},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.tpu_compiler
def test_collectives_between_slices():
    """Of a mesh that mixes slices, as {"model": 2, "data": 4} of two."""
    found = differences("2*v5e:2x2", "2x2x2:1,2,0", "sum", "columns of slices")
    assert found == {"sum": 0, "columns of slices": 0}


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "parts"),
    [
        ("2*v5e:2x2", "2x1x4"),
        ("2*v5e:2x2", "2x2x2"),
        ("2*v5e:2x2", "2x2x2:1,2,0"),
        ("4*v5e:1x1", "2x2x1"),
        ("2*v4:2x2x1", "2x2x2"),
    ],
)
def test_all_collectives_between_slices(topology, parts):
    """Four slices also exchange in pairs."""
    found = differences(topology, parts)
    assert len(found) == 14
    assert not any(found.values()), found


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(8),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"], steps_per_execution=2)
    return model


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ({"data": 2, "fsdp": 4}, "fsdp"),
        ({"data": 4, "model": 2}, "tensor_parallel"),
        ({"fsdp": 8}, "fsdp"),
    ],
)
@pytest.mark.parametrize("rows", [13, 16])
def test_a_step_of_two_slices_is_equal(mesh, layout, rows):
    strategy = ktd.TPUStrategy(mesh, layout, topology="2*v5e:2x2")
    verified = ktd.verify(build, strategy, batch_size=rows)
    assert verified.equal, str(verified)


TRANSFER = (
    'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{key}",'
    '_xla_megascale_reduce_operation="{joins}",_xla_megascale_target="{target}",'
    '_xla_megascale_transfer_type="{kind}"}}'
)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "SCAN"}, "the exchange SCAN of (8, 128) is not known"),
        ({"joins": "MEDIAN"}, "its reduction between slices is not known"),
        ({"target": "{1,3}x{0:0}"}, "no device has the id 300000"),
        ({"target": "some"}, "the groups of some are not known"),
        ({"received": "f32[8,64]"}, "the exchange ALL_REDUCE of (8, 128) is not known"),
        ({"other": "y"}, "0 operations beside it send with its key"),
    ],
)
def test_an_exchange_that_is_not_known_is_an_error(changes, why):
    known = {"kind": "ALL_REDUCE", "joins": "SUM", "target": "{1,2}x{0:0}", "key": "x"}
    known |= {"received": "f32[8,128]", "other": "x", **changes}
    received, sent = known["received"], TRANSFER.format(**known | {"key": known["other"]})
    text = f"""HloModule m, num_partitions=1

ENTRY %e (p: f32[8,128]) -> {received} {{
  %p = f32[8,128]{{1,0}} parameter(0)
  %t = token[] after-all()
  %s = (f32[8,128]{{1,0}}, u32[], token[]) send(%p, %t), channel_id=1, {sent}
  %r = ({received}{{1,0}}, u32[], token[]) recv(%t), channel_id=2, {TRANSFER.format(**known)}
  %d = ({received}{{1,0}}, token[]) recv-done(%r), channel_id=2, is_host_transfer=true
  ROOT %g = {received}{{1,0}} get-tuple-element(%d), index=0
}}
"""
    with pytest.raises(CannotRun) as error:
        runnable(parse(text), [100000, 200000])
    assert why in str(error.value)
    assert "must have a counterpart on simulated devices" in str(error.value)
