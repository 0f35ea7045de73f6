import math
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import keras_tpu_dist as ktd
from keras_tpu_dist.common.axes import split_ways
from keras_tpu_dist.hardware.chips import CHIPS
from keras_tpu_dist.layout.planner import Planner, device_memory, slot_decision
from keras_tpu_dist.layout.rules import checked

L = keras.layers
MESHES = [(1,), (2,), (3,), (8,), (13,), (1, 8), (2, 4), (4, 2), (3, 5), (7, 2), (2, 3, 2)]
KINDS = ["fsdp", "tensor_parallel", "auto"]


def mesh_of(sizes):
    names = ("data", "model") if len(sizes) < 3 else ("data", "fsdp", "model")
    return AbstractMesh(sizes, names[: len(sizes)])


def data_axes_of(mesh):
    return tuple(n for n in mesh.axis_names if n != "model")


class Experts(L.Layer):
    """A mixture of experts as people write it."""

    def __init__(self, experts, hidden):
        super().__init__()
        self.experts, self.hidden = experts, hidden

    def build(self, shape):
        width = shape[-1]
        self.router = self.add_weight(shape=(width, self.experts), name="router")
        self.up = self.add_weight(shape=(self.experts, width, self.hidden), name="up")
        self.up_bias = self.add_weight(shape=(self.experts, self.hidden), name="up_bias")
        self.down = self.add_weight(shape=(self.experts, self.hidden, width), name="down")

    def call(self, x):
        gate = keras.ops.softmax(keras.ops.matmul(x, self.router))
        hidden = keras.ops.relu(keras.ops.einsum("bd,edf->bef", x, self.up) + self.up_bias)
        return keras.ops.einsum("bef,efd,be->bd", hidden, self.down, gate)


class Bag(L.Layer):
    """Layers without a graph, as in a subclassed model."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts


sizes = st.integers(1, 24)


@st.composite
def layers(draw):
    kind = draw(st.sampled_from(range(11)))
    a, b, c = draw(sizes), draw(sizes), draw(sizes)
    if kind == 0:
        return (lambda: L.Dense(a)), (None, b)
    if kind == 1:
        return (lambda: L.EinsumDense("abc,cde->abde", (None, a, c), bias_axes="de")), (None, 3, b)
    if kind == 2:
        return (lambda: L.Conv2D(a, 3)), (None, 8, 8, b)
    if kind == 3:
        return (lambda: L.Embedding(a, b)), (None, 4)
    if kind == 4:
        return (lambda: L.MultiHeadAttention(a, b)), (None, 4, c)
    if kind == 5:
        groups = draw(st.integers(1, 4))
        return (lambda: L.GroupQueryAttention(b, a * groups, a)), (None, 4, c)
    if kind == 6:
        recurrent = draw(st.sampled_from([L.LSTM, L.GRU, L.SimpleRNN]))
        return (lambda: recurrent(a)), (None, 4, b)
    if kind == 7:
        return (lambda: L.BatchNormalization()), (None, a)
    if kind == 8:
        return (lambda: L.EinsumDense("ebc,ecd->ebd", (None, b), bias_axes="d")), (a, None, c)
    if kind == 9:
        return (lambda: L.Conv2DTranspose(a, 2)), (None, 4, 4, b)
    return (lambda: Experts(a, b)), (None, c)


def build(layer, shape):
    if isinstance(layer, (L.MultiHeadAttention, L.GroupQueryAttention)):
        layer.build(shape, shape)
    else:
        layer.build(shape)


def check_legal(plan, variables, mesh):
    assert len(plan.decisions) == len(variables) > 0
    for variable, (path, shape, decision) in zip(variables, plan.decisions):
        assert path == variable.path
        assert shape == tuple(variable.shape)
        checked(decision, path, shape, mesh)
        names = [n for e in decision.axes if e for n in ((e,) if isinstance(e, str) else e)]
        assert len(names) == len(set(names))
        assert decision.reason
        total = math.prod(shape)
        ways = split_ways(mesh, decision.axes)
        per_device = math.prod(
            size // split_ways(mesh, (entry,))
            for size, entry in zip(shape, (*decision.axes, *(None,) * len(shape)))
        )
        assert per_device * ways == total
        assert per_device <= total
        slot = slot_decision(decision, shape, mesh, data_axes_of(mesh))
        checked(slot, path, shape, mesh)
        assert split_ways(mesh, slot.axes) >= ways


@hypothesis.settings(max_examples=300, derandomize=True)
@hypothesis.given(
    parts=st.lists(layers(), min_size=1, max_size=4),
    mesh=st.sampled_from(MESHES).map(mesh_of),
    kind=st.sampled_from(KINDS),
    min_size=st.sampled_from([1, 64]),
    memory=st.sampled_from([1, 10**4, 10**9]),
)
@pytest.mark.slow
def test_every_plan_is_legal(parts, mesh, kind, min_size, memory):
    with keras.StatelessScope(initialize_variables=False):
        made = [(make(), shape) for make, shape in parts]
        bag = Bag([layer for layer, _ in made])
        for layer, shape in made:
            build(layer, shape)
    model = Model(bag)
    planner = Planner(kind, min_size=min_size, memory_bytes=memory)
    plan = planner.plan(model, mesh, data_axes_of(mesh))
    check_legal(plan, [*model.trainable_variables, *model.non_trainable_variables], mesh)
    for variable in model.trainable_variables:
        decision = planner.before_build(variable.shape, mesh, data_axes_of(mesh))
        checked(decision, variable.path, variable.shape, mesh)
    keras.utils.clear_session(free_memory=False)


class Model(keras.Model):
    def __init__(self, bag):
        super().__init__()
        self.bag = bag


def functional(call, shape=(8,)):
    with keras.StatelessScope(initialize_variables=False):
        x = keras.Input(shape)
        return keras.Model(x, call(x))


COLUMN, ROW = (None, "model"), ("model", None)


def roles(model):
    found = {}
    for layer in model.layers:
        for variable in layer.variables:
            if variable.name == "kernel":
                found[layer.name] = variable
    plan = Planner("tensor_parallel", min_size=10**9).plan(model, mesh_of((2, 2)), ("data",))
    return {name: plan.decision(variable).axes for name, variable in found.items()}


def test_pairs_alternate_along_a_chain():
    model = functional(
        lambda x: L.Dense(8, name="d")(
            L.Dense(16, name="c")(L.ReLU()(L.Dense(8, name="b")(L.Dense(16, name="a")(x))))
        )
    )
    assert roles(model) == {"a": COLUMN, "b": ROW, "c": COLUMN, "d": ROW}


def test_gate_and_value_share_one_row():
    def call(x):
        gate = L.Dense(16, activation="silu", name="gate")(x)
        return L.Dense(8, name="down")(gate * L.Dense(16, name="up")(x))

    assert roles(functional(call)) == {"gate": COLUMN, "up": COLUMN, "down": ROW}


def test_features_that_something_else_needs_whole_are_not_split():
    def residual(x):
        h = L.Dense(8, name="a")(x)
        return L.Add()([x, L.Dense(8, name="b")(h), h])

    assert roles(functional(residual)) == {"a": (), "b": ()}

    def mixed(x):
        return L.Dense(8, name="b")(keras.ops.cumsum(L.Dense(16, name="a")(x), axis=-1))

    assert roles(functional(mixed)) == {"a": (), "b": ()}


def test_a_norm_or_a_softmax_between_a_pair_sums_over_its_devices():
    def norm(x):
        return L.Dense(8, name="b")(L.LayerNormalization()(L.Dense(16, name="a")(x)))

    def softmax(x):
        return L.Dense(8, name="b")(L.Dense(16, activation="softmax", name="a")(x))

    assert roles(functional(norm)) == roles(functional(softmax)) == {"a": COLUMN, "b": ROW}


def test_a_stream_of_residuals_is_split_before_what_is_narrower():
    """In plans of its blocks alone, what enters and leaves a block would be gathered."""

    def block(x, name):
        h = L.Conv2D(4, 1, name=f"{name}_in")(x)
        h = L.Conv2D(4, 3, padding="same", name=f"{name}_mid")(L.ReLU()(h))
        return L.Conv2D(16, 1, name=f"{name}_out")(L.ReLU()(h))

    def call(x):
        x = L.Add()([L.Conv2D(16, 1, name="a_beside")(x), block(x, "a")])
        x = L.ReLU()(L.Add()([x, block(L.ReLU()(x), "b")]))
        return L.Dense(3, name="head")(L.GlobalAveragePooling2D()(x))

    columns = {"a_in", "a_beside", "a_out", "b_out"}
    found = roles(functional(call, (8, 8, 3)))
    split = {name for name, axes in found.items() if axes and axes[-1] == "model"}
    assert split == columns
    assert all(found[name][-2] == "model" for name in ("a_mid", "b_in", "head"))


def test_convolutions_pair_through_batch_normalization():
    def call(x):
        h = L.ReLU()(L.BatchNormalization(name="norm")(L.Conv2D(4, 3, name="a")(x)))
        return L.Conv2D(6, 3, name="b")(L.MaxPooling2D()(h))

    plan = Planner("tensor_parallel", min_size=10**9)
    model = functional(call, (16, 16, 3))
    decisions = plan.plan(model, mesh_of((2, 2)), ("data",)).decisions
    by_path = {path: decision.axes for path, _, decision in decisions}
    assert by_path["a/kernel"] == (None, None, None, "model")
    assert by_path["a/bias"] == ("model",)
    assert by_path["norm/gamma"] == by_path["norm/moving_mean"] == ("model",)
    assert by_path["b/kernel"] == (None, None, "model", None)
    assert by_path["b/bias"] == ()


def test_attention_by_heads():
    with keras.StatelessScope(initialize_variables=False):
        grouped = L.GroupQueryAttention(4, 8, 2)
        grouped.build((None, 4, 16), (None, 4, 16))
        odd = L.MultiHeadAttention(3, 4)
        odd.build((None, 4, 16), (None, 4, 16))
    plan = Planner("tensor_parallel").plan(Model(Bag([grouped, odd])), mesh_of((2, 4)), ("data",))
    by_path = {path: decision for path, _, decision in plan.decisions}

    def axes(layer, name):
        return by_path[f"{layer.name}/{name}"].axes

    assert axes(grouped, "query/kernel") == (None, "model", None)
    assert axes(grouped, "query/bias") == ("model", None)
    assert axes(grouped, "attention_output/kernel") == ("model", None, None)
    key = by_path[f"{grouped.name}/key/kernel"]
    assert key.axes == ()
    assert "2 key-value heads are not divisible by 4" in key.reason
    query = by_path[f"{odd.name}/query/kernel"]
    assert query.axes == ()
    assert "3 heads are not divisible by {'model': 4}" in query.reason


def test_recurrent_by_whole_gates():
    with keras.StatelessScope(initialize_variables=False):
        made = {"lstm": L.LSTM(8), "gru": L.GRU(8), "rnn": L.SimpleRNN(8)}
        for layer in made.values():
            layer.build((None, 4, 8))
    for ways, split in ((2, {"lstm", "rnn"}), (3, {"gru"}), (8, {"rnn"})):
        mesh = mesh_of((1, ways))
        plan = Planner("tensor_parallel").plan(Model(Bag(list(made.values()))), mesh, ("data",))
        for name, layer in made.items():
            axes = [plan.decision(v).axes for v in layer.cell.trainable_variables]
            expected = "model" if name in split else None
            assert [a[-1] if a else None for a in axes] == [expected] * 3, (ways, name)


def test_embedding_by_vocabulary_else_by_width():
    with keras.StatelessScope(initialize_variables=False):
        tables = [L.Embedding(10, 6), L.Embedding(9, 6), L.Embedding(9, 5)]
        for table in tables:
            table.build(None)
    model, mesh = Model(Bag(tables)), mesh_of((2, 2))
    plan = Planner("tensor_parallel", min_size=1).plan(model, mesh, ("data",))
    assert [plan.decision(t.embeddings).axes for t in tables] == [ROW, COLUMN, ()]
    # So few words and features are not worth sending in each step.
    small = Planner("tensor_parallel").plan(model, mesh, ("data",))
    assert [small.decision(t.embeddings).axes for t in tables] == [ROW, (), ()]


def test_experts_by_expert_and_a_router_whole():
    with keras.StatelessScope(initialize_variables=False):
        layer = Experts(4, 6)
        layer.build((None, 8))
    plan = Planner("tensor_parallel").plan(Model(layer), mesh_of((2, 4)), ("data",))
    experts = ("model", None, None)
    assert plan.decision(layer.up).axes == plan.decision(layer.down).axes == experts
    assert plan.decision(layer.up_bias).axes == ROW
    assert plan.decision(layer.router).axes == ()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", "int4", "float8"])
def test_quantized_and_lora_weights_follow_their_base(mode):
    first, second = L.Dense(16), L.Dense(8)
    model = keras.Sequential([keras.Input((8,)), first, second])
    if mode != "float8":
        for layer in (first, second):
            layer.quantize(mode)
            layer.enable_lora(2)
    mesh = mesh_of((2, 2))
    plan = Planner("tensor_parallel").plan(model, mesh, ("data",))
    check_legal(plan, [*model.trainable_variables, *model.non_trainable_variables], mesh)
    found = {path.split("/", 1)[1]: d.axes for path, _, d in plan.decisions}
    names = [layer.name for layer in (first, second)]
    assert found[f"{names[0]}/kernel"] == COLUMN
    assert found[f"{names[1]}/kernel"] == ROW
    if mode == "int4":
        assert found[f"{names[0]}/kernel_scale"] == COLUMN
    if mode == "int8":
        assert found[f"{names[0]}/kernel_scale"] == ("model",)
        assert not any(found[f"{names[1]}/kernel_scale"])
    if mode != "float8":
        assert found[f"{names[0]}/lora_kernel_b"] == COLUMN
        assert not any(found[f"{names[0]}/lora_kernel_a"])
        assert found[f"{names[1]}/lora_kernel_a"] == ROW


def test_auto_uses_every_model_axis_and_fsdp_where_it_must():
    model = functional(lambda x: L.Dense(64)(L.Dense(256)(x)), (64,))
    state = 4 * 4 * sum(math.prod(v.shape) for v in model.variables)
    cases = [
        ((4, 2), 2 * state, "auto, tensor_parallel", False, True),
        ((4, 2), state // 4, "auto, tensor_parallel and fsdp", True, True),
        ((4,), 2 * state, "auto, replicated", False, False),
        ((4,), state // 100, "auto, fsdp", True, False),
        ((1, 8), state, "auto, tensor_parallel", False, True),
    ]
    for sizes_, memory, name, data, tensor in cases:
        mesh = mesh_of(sizes_)
        plan = Planner("auto", memory_bytes=memory).plan(model, mesh, ("data",))
        assert plan.name.startswith(name + " ("), (plan.name, name)
        entries = [entry for _, _, d in plan.decisions for entry in d.axes if entry]
        used = {n for e in entries for n in ((e,) if isinstance(e, str) else e)}
        assert used == ({"data"} if data else set()) | ({"model"} if tensor else set())


def test_auto_counts_eight_bytes_of_a_float64():
    memory = 2 * 4 * 4 * (64 * 64 + 64)  # twice the state in float32
    for dtype, name in (("float32", "auto, replicated"), ("float64", "auto, fsdp")):
        model = functional(lambda x, d=dtype: L.Dense(64, dtype=d)(x), (64,))
        plan = Planner("auto", memory_bytes=memory).plan(model, mesh_of((4,)), ("data",))
        assert plan.name.startswith(name), plan.name


def test_auto_asks_no_device_of_another_process():
    """A device tells its memory to its own process only, and all must choose the same plan."""

    class Device:
        def __init__(self, kind, platform, process_index):
            self.device_kind, self.platform, self.process_index = kind, platform, process_index

        def memory_stats(self):
            assert self.process_index == 0, "only supported for addressable devices"
            return {"bytes_limit": 123}

    def memory(*devices):
        return device_memory(SimpleNamespace(devices=np.array(devices, object)))

    far = Device("TPU v5 lite", "tpu", 1)
    assert memory(far, Device("TPU v5 lite", "tpu", 0)) == CHIPS["v5e"].device_hbm_bytes
    unknown = [Device("H200", "gpu", 1), Device("H200", "gpu", 0)]
    assert memory(*unknown) == 123
    assert memory(unknown[0]) == memory(Device("cpu", "cpu", 0)) > 1e9


def test_auto_on_a_slice_that_is_only_named():
    strategy = ktd.TPUStrategy({"data": 8}, "auto", topology="v5e:2x4")
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    assert "fits on one device" in " ".join(str(strategy.plan(model)).split())
