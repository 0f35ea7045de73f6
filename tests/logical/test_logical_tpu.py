"""What the TPU compiler makes of layers that one logical device computes: no chip is needed."""

import importlib.util

import keras
import pytest
from helpers import through_conditionals

import keras_tpu_dist as ktd
from keras_tpu_dist.dryrun.build import lower
from keras_tpu_dist.dryrun.compile import compile_lowered
from keras_tpu_dist.hlo.parse import parse

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu (extra 'tpu') is not installed"
    ),
]
L = keras.layers


def build():
    """Convolution, normalisation, attention, dropout and a dense layer, each on one device."""
    x = keras.Input((128, 3))
    h = ktd.assign(L.Conv1D(64, 3, padding="same", name="conv"), 0)(x)
    h = ktd.assign(L.BatchNormalization(name="norm"), 1)(h)
    h = ktd.assign(L.MultiHeadAttention(2, 32, name="attention"), 0)(h, h)
    h = ktd.assign(L.Dropout(0.3, name="dropout"), 1)(h)
    h = ktd.assign(L.Dense(48, name="dense"), 1)(h)
    model = keras.Model(x, L.Dense(1, name="out")(L.GlobalAveragePooling1D()(h)))
    model.compile("adam", "mse")
    return model


def compiled_for_tpu(build):
    assignment = ktd.DeviceAssignment.build("v5e:2x4", computation_shape=(1, 2))
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (4, 2)
    strategy = ktd.TPUStrategy(assignment)
    nothing = {"x": None, "y": None, "sample_weight": None}
    lowered = lower(build, strategy, **nothing, batch_size=16, mode="train", platform="tpu")
    compiled = compile_lowered(lowered, effort="quick", timeout=400)
    assert compiled.error is None
    assert compiled.compiled_for == "v5e:2x4"
    return parse(compiled.text)


@pytest.mark.slow
def test_four_replicas_of_two_logical_devices():
    program = compiled_for_tpu(build)
    inside = through_conditionals(program)
    of_layers = {name: set() for name in ("conv", "attention", "dense", "out")}
    across = []
    for computation in program:
        for instruction in computation:
            if instruction.opcode in ("dot", "convolution", "custom-call"):
                for name, found in of_layers.items():
                    if f"jvp({name})" in instruction.op_name:
                        found.add(computation.name in inside)
            if instruction.opcode == "all-reduce" and computation.name in inside:
                across.append(instruction.attribute("replica_groups"))
    assert of_layers["conv"] == of_layers["attention"] == of_layers["dense"] == {True}
    assert True not in of_layers["out"]
    # Logical devices 0 and 1 of the replicas: devices that take the same branch.
    assert set(across) == {"[2,4]<=[4,2]T(1,0)"}


def towers():
    x = keras.Input((256,))
    parts = []
    for k in range(2):
        tower = keras.Sequential(
            [keras.Input((256,)), L.Dense(512, activation="relu"), L.Dense(256)], name=f"tower{k}"
        )
        parts.append(ktd.assign(tower, k)(x))
    model = keras.Model(x, L.Dense(1)(L.Concatenate()(parts)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_two_towers_run_at_the_same_time():
    """No device waits for another between the first and the second conditional."""
    program = compiled_for_tpu(towers)
    kinds = ("conditional", "all-reduce", "all-gather", "all-to-all", "collective-permute")
    order = [i.opcode for i in program.entry if i.opcode.removesuffix("-start") in kinds]
    assert order[:3] == ["conditional", "conditional", "all-reduce"]
    assert order.count("conditional") == 4
    assert "conditional,conditional,all-reduce" in ",".join(order[2:])
    assert set(order) == {"conditional", "all-reduce"}
