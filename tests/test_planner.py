import math

import hypothesis
import hypothesis.strategies as st
import keras
from jax.sharding import AbstractMesh

from keras_tpu_dist.layout import checked, split_ways
from keras_tpu_dist.planner import Planner, slot_decision

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


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    parts=st.lists(layers(), min_size=1, max_size=4),
    mesh=st.sampled_from(MESHES).map(mesh_of),
    kind=st.sampled_from(KINDS),
    min_size=st.sampled_from([1, 64]),
    memory=st.sampled_from([1, 10**4, 10**9]),
)
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
