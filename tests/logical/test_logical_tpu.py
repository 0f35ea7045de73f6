"""What the TPU compiler makes of layers that one logical device computes: no chip is needed."""

import keras
import pytest
from compile_only import lower
from helpers import through_conditionals

import keras_tpu_dist as ktd
from keras_tpu_dist.tools import hlo
from keras_tpu_dist.tools.dryrun.compile import compile_lowered
from keras_tpu_dist.tools.hlo.parse import parse

pytestmark = pytest.mark.tpu_compiler
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
    lowered = lower(build, strategy, batch_size=16)
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


def towers(keep=lambda layer: layer):
    """Two towers of a million weights."""
    x = keras.Input((512,))
    parts = []
    for k in range(2):
        inner = [keras.Input((512,)), L.Dense(1024, activation="relu"), L.Dense(512)]
        tower = keras.Sequential(inner, name=f"tower{k}")
        parts.append(keep(ktd.assign(tower, k))(x))
    model = keras.Model(x, L.Dense(1)(L.Add()(parts)))
    model.compile("adam", "mse")
    return model


def lowered_towers(keep=lambda layer: layer):
    strategy = ktd.TPUStrategy({"data": 2, "model": 2}, topology="v5e:2x2")
    return lower(lambda: towers(keep), strategy, batch_size=4096)


@pytest.fixture(scope="module")
def program_of_towers():
    # With effort "quick" the compiler does not begin transfers ahead.
    compiled = compile_lowered(lowered_towers(), effort="exact", timeout=400)
    assert compiled.error is None
    return compiled.text


@pytest.mark.slow
def test_two_towers_run_at_the_same_time(program_of_towers):
    """No device waits for another between the first and the second conditional."""
    program = parse(program_of_towers)
    kinds = ("conditional", "all-reduce", "all-gather", "all-to-all", "collective-permute")
    order = [
        (i.opcode, "transpose(" in i.op_name)
        for i in program.entry
        if i.opcode.removesuffix("-start").removesuffix("-done") in kinds
    ]
    assert {kind.removesuffix("-start").removesuffix("-done") for kind, _ in order} == {
        "conditional",
        "all-reduce",
        "collective-permute",
    }
    forward = [kind for kind, backward in order if not backward]
    backward = [kind for kind, backward in order if backward]
    # All parts are sent before the first tower is computed; those that arrive were sent by then.
    assert forward.count("collective-permute-start") == 4
    first, second = (n for n, kind in enumerate(forward) if kind == "conditional")
    assert "collective-permute-start" not in forward[first:]
    assert set(forward[first + 1 : second]) <= {"collective-permute-done"}
    assert forward[second + 1] == "all-reduce"
    # Parts of gradients are waited for after both towers.
    last = max(n for n, kind in enumerate(backward) if kind == "conditional")
    assert backward.count("conditional") == 2
    assert "collective-permute-done" not in backward[:last]


@pytest.mark.slow
def test_a_device_holds_half_of_the_weights_and_slots(program_of_towers):
    held, whole = lowered_towers().state, lowered_towers(ktd.replicate).state
    assert 0.5 <= held.weights / whole.weights < 0.51
    assert 0.5 <= held.optimizer / whole.optimizer < 0.51
    program = parse(program_of_towers)
    given = sum(
        shape.bytes
        for instruction in program.entry
        if instruction.opcode == "parameter"
        for shape in instruction.shapes
    )
    batch = 4096 // 2 * (512 + 1) * 4
    assert abs(given - batch - held.weights - held.optimizer) < 2**14
    cost = hlo.analyze(program_of_towers, wire=hlo.Wire((("data", 2), ("model", 2))))
    sums = [c for c in cost.collectives if c.kind == "all-reduce" and "model" in c.axes]
    # The outputs of both towers; of gradients that of their input, and of biases.
    assert max(c.bytes for c in sums) == 2048 * 512 * 4
    assert sum(c.bytes for c in sums) < 2048 * 512 * 4 * 1.05
