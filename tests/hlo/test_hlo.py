import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist.attention import kernel
from keras_tpu_dist.common.scopes import RARE_LOOP
from keras_tpu_dist.hardware import libtpu
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.programs.device_groups import replica_groups
from keras_tpu_dist.tools import hlo
from keras_tpu_dist.tools.hlo import collectives, cost, layers, loops
from keras_tpu_dist.tools.hlo.parse import Shape, parse, shapes_of
from keras_tpu_dist.tools.hlo.wire import bandwidth_of, seconds_of, sent_bytes


def _text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def _flops(function, *arguments):
    return hlo.analyze(_text(function, *arguments)).flops


def _spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# --- reading the text ------------------------------------------------------------------------


def test_shapes_know_their_bytes_and_memory():
    tpu = "(bf16[16,256]{1,0:T(8,128)(2,1)S(1)}, f32[2,3]{1,0:T(8,128)}, pred[], s4[10])"
    assert shapes_of(tpu) == (
        Shape("bf16", (16, 256), 1),
        Shape("f32", (2, 3), 0),
        Shape("pred", ()),
        Shape("s4", (10,)),
    )
    assert [s.bytes for s in shapes_of(tpu)] == [8192, 24, 1, 5]
    assert [s.hbm_bytes for s in shapes_of(tpu)] == [0, 8 * 128 * 4, 1, 5]
    assert shapes_of("f8e4m3fn[7]")[0].bytes == 7


def test_a_program_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse("module @jit_f {}")


def test_every_instruction_of_a_program_is_read():
    text = _text(lambda x: jax.lax.scan(lambda c, r: (c @ r, c.sum()), x[0], x), _spec(5, 8, 8))
    program = parse(text)
    assert sum(len(c.instructions) for c in program) == len(re.findall(r"^  .* = ", text, re.M))
    assert all(c.root is not None for c in program)


# --- operations ------------------------------------------------------------------------------


def test_matrix_products():
    assert _flops(lambda a, b: a @ b, _spec(32, 48), _spec(48, 64)) == 2 * 32 * 48 * 64
    batched = _flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), _spec(3, 8, 9), _spec(3, 9, 7))
    assert batched == 2 * 3 * 8 * 9 * 7


@given(
    size=st.integers(1, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    low=st.integers(0, 3),
    high=st.integers(0, 3),
    lhs_dilate=st.integers(1, 3),
    rhs_dilate=st.integers(1, 2),
)
def test_positions_are_those_that_touch_the_input(
    size, kernel, stride, low, high, lhs_dilate, rhs_dilate
):
    reach = (kernel - 1) * rhs_dilate + 1
    out = max(0, ((size - 1) * lhs_dilate + 1 + low + high - reach) // stride + 1)
    brute = 0
    for o in range(out):
        for k in range(kernel):
            at = o * stride + k * rhs_dilate - low
            brute += 0 <= at <= (size - 1) * lhs_dilate and at % lhs_dilate == 0
    assert cost._positions(size, kernel, out, stride, low, lhs_dilate, rhs_dilate) == brute


def _conv(x, w, stride=1, padding="VALID"):
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_a_convolution_and_its_gradients():
    x, w = _spec(2, 20, 20, 8), _spec(3, 3, 8, 16)
    forward = 2 * 2 * 18 * 18 * 16 * 9 * 8
    assert _flops(_conv, x, w) == forward
    assert _flops(jax.grad(lambda x, w: (_conv(x, w) ** 2).sum(), (0, 1)), x, w) == 3 * forward


def test_a_strided_convolutions_gradient_costs_no_more():
    x, w = _spec(2, 21, 21, 8), _spec(3, 3, 8, 16)
    forward = 2 * 2 * 10 * 10 * 16 * 9 * 8

    def loss(x, w):
        return (_conv(x, w, 2) ** 2).sum()

    assert _flops(jax.grad(loss, (0, 1)), x, w) == 3 * forward


# --- loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "times"),
    [
        (lambda x: jax.lax.fori_loop(0, 7, lambda i, x: x @ x, x), 7),
        (lambda x: jax.lax.fori_loop(3, 20, lambda i, x: x @ x, x), 17),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=9)[0], 9),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=9, reverse=True)[0], 9),
        (
            lambda x: jax.lax.fori_loop(
                0, 4, lambda i, x: jax.lax.fori_loop(0, 5, lambda j, x: x @ x, x), x
            ),
            20,
        ),
    ],
)
def test_loop_bodies_count_as_often_as_they_run(loop, times):
    text = _text(loop, _spec(16, 16))
    without_annotation = re.sub(r'"known_trip_count":\{[^}]*\},?', "", text)
    for program in (text, without_annotation):
        assert hlo.analyze(program).flops == times * 2 * 16**3


def test_conditions_in_every_direction():
    def program(init, step, bound, direction):
        return parse(f"""
%body (p: (s32[])) -> (s32[]) {{
  %p = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %c = s32[] constant({step})
  %n = s32[] add(%i, %c)
  ROOT %t = (s32[]) tuple(%n)
}}

%cond (q: (s32[])) -> pred[] {{
  %q = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %b = s32[] constant({bound})
  ROOT %r = pred[] compare(%j, %b), direction={direction}
}}

ENTRY %main (a: s32[]) -> (s32[]) {{
  %a = s32[] parameter(0)
  %z = s32[] constant({init})
  %s = (s32[]) tuple(%z)
  ROOT %w = (s32[]) while(%s), condition=%cond, body=%body
}}
""")

    def count(*arguments):
        p = program(*arguments)
        return loops.trip_count(p, p.entry, p.entry.root)

    assert count(0, 1, 10, "LT") == 10
    assert count(0, 3, 10, "LT") == 4
    assert count(0, 1, 10, "LE") == 11
    assert count(9, -1, 0, "GE") == 10
    assert count(9, -2, 0, "GT") == 5
    assert count(5, 1, 5, "LT") == 0
    assert count(0, -1, 10, "LT") is None  # would never end
    assert count(0, 1, 10, "NE") is None


def test_a_loop_reads_and_writes_slices_not_whole_arrays():
    def moved(steps):
        def body(carry, x):
            carry = jnp.sin(carry + x)
            return carry, carry * 2

        text = _text(lambda x: jax.lax.scan(body, x[0], x), _spec(steps, 1024))
        return hlo.analyze(text).hbm_bytes

    # each step touches a few rows of 4 KiB; whole arrays would make it grow with the square
    assert moved(256) < 10 * moved(32)
    assert moved(256) < 256 * 20 * 4096


def test_a_slice_copied_beside_other_work_moves_only_itself():
    text = """HloModule m
ENTRY %main (p: f32[256,1024]) -> f32[64,1024] {
  %p = f32[256,1024]{1,0:T(8,128)} parameter(0)
  %slice-start = ((f32[256,1024]{1,0:T(8,128)}), f32[64,1024]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) \
slice-start(%p), slice={[0:64], [0:1024]}
  ROOT %slice-done = f32[64,1024]{1,0:T(8,128)S(1)} slice-done(%slice-start)
}
"""
    assert hlo.analyze(text).hbm_bytes == 64 * 1024 * 4


def test_a_loop_that_data_ends_is_said_and_counted_once():
    def until_small(x):
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x @ x, x)

    result = hlo.analyze(_text(until_small, _spec(16, 16)))
    assert result.flops == 2 * 16**3
    assert len(result.unknown_loops) == 1


def test_a_loop_for_ids_that_seldom_come_counts_nothing():
    def rarely(x, times):
        with jax.named_scope(RARE_LOOP):
            return jax.lax.fori_loop(0, times, lambda i, x: x @ x, x)

    result = hlo.analyze(_text(rarely, _spec(16, 16), jax.ShapeDtypeStruct((), "int32")))
    assert result.flops == 0
    assert not result.unknown_loops


# --- layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op_name", "layer", "phase"),
    [
        ("jit(call)/call_exported/jit(train_step)/jvp(mha)/query/dot_general", "mha/query", "f"),
        ("jit(f)/transpose(jvp(lstm))/while/body/closed_call/cell/mul", "lstm/cell", "b"),
        ("jit(f)/transpose(jvp(checkpoint(dense)))/dot", "dense", "b"),
        ("jit(f)/jvp(dropout)/jit(_bernoulli)/jit(_uniform)/add", "dropout", "f"),
        ("jit(f)/adam/sub;jit(f)/adam/mul", "adam", "f"),
        ("jit(f)/jvp(custom)/my_scope/add", "custom", "f"),
        ("args[0][2]", "(other)", "f"),
        # computed again for the gradients, by JAX 0.10 to 0.12
        ("jit(f)/transpose(jvp(mha))/jvp(mha)/checkpoint/query/dot_general", "mha/query", "b"),
        (
            "jit(f)/transpose(jvp(lstm))/mha/jvp(lstm)/mha/checkpoint/rematted_computation/query/dot",
            "lstm/mha/query",
            "b",
        ),
        ("jit(f)/transpose(jvp(mha))/mha/query/dot_general", "mha/mha/query", "b"),
    ],
)
def test_name_stacks_become_layers(op_name, layer, phase):
    known = {"mha", "query", "lstm", "cell", "dense", "dropout", "adam", "custom"}
    assert layers.layers_of(known)(op_name) == layer
    assert layers.phase(op_name)[0] == phase


@pytest.mark.parametrize(
    ("op_name", "layer"),
    [
        ("jit(f)/jvp(cond)/dot_general", "cond"),
        ("jit(f)/transpose(jvp(while))/remat/dot_general", "while/remat"),
        ("jit(f)/jvp(lstm)/while/body/closed_call/cell/dot_general", "lstm/cell"),
        # since JAX 0.12
        ("jit(f)/while/body/eval_jaxpr/jvp(lstm)/cell/dot_general", "lstm/cell"),
        ("jit(f)/jvp(lstm)/while/cond/lt", "lstm"),
        ("jit(f)/jvp(lstm)/cond/branch_2_fun/cell/dot_general", "lstm/cell"),
        ("jit(f)/cond/branch_2_fun/scope/add", "scope"),
    ],
)
def test_layers_may_be_named_as_jax_names_its_own(op_name, layer):
    known = {"while", "cond", "remat", "lstm", "cell"}
    assert layers.layers_of(known)(op_name) == layer


# --- collectives -----------------------------------------------------------------------------


def test_three_spellings_of_groups():
    groups = replica_groups
    assert groups("{{0,1},{2,3}}", 4) == ((0, 1), (2, 3))
    assert groups("[2,4]<=[8]", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups("[2,4]<=[4,2]T(1,0)", 8) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups("mesh['a'=4,'b'=2] {'b'}", 8) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups("mesh['a'=4,'b'=2] {'a'}", 8) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups("mesh['a'=4,'b'=2] {'a','b'}", 8) == (tuple(range(8)),)
    assert groups("mesh['a'=4,'b'=2] {'b','a'}", 8) == ((0, 2, 4, 6, 1, 3, 5, 7),)
    assert groups("mesh['a'=8] {'a':(4)2,'a':(1)2}", 8) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert groups("mesh['a'=8] {'a':(2)2}", 8) == ((0, 2), (1, 3), (4, 6), (5, 7))
    ordered = "mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) "
    assert groups(ordered + "{'b'}", 8) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups(ordered + "{'c'}", 8) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups("{}", 3) == ((0, 1, 2),)


def test_groups_of_a_mesh_whose_devices_are_in_an_order_of_their_own():
    """As libtpu 0.0.41 writes them: what was behind the comma was lost, so the transfer was."""
    groups = "mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'a'}"
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[4,8]) -> f32[4,8] {\n"
        "  %x = f32[4,8]{1,0} parameter(0)\n"
        "  ROOT %y = f32[4,8]{1,0} all-to-all(%x), channel_id=1, "
        f"replica_groups={groups}, dimensions={{0}}\n}}\n"
    )
    (instruction,) = (i for i in parse(text).entry if i.opcode == "all-to-all")
    assert collectives.groups_of(instruction, 8) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert instruction.attribute("dimensions") == "{0}"


@given(st.permutations(["x", "y", "z"]), st.sets(st.sampled_from(["x", "y", "z"]), min_size=1))
@settings(max_examples=25)
def test_groups_name_the_axes_they_cross(order, used):
    sizes = dict(zip(order, (2, 3, 4)))
    names = [n for n in order if n in used]
    text = "mesh[" + ",".join(f"'{n}'={s}" for n, s in sizes.items()) + "] {"
    groups = replica_groups(text + ",".join(f"'{n}'" for n in names) + "}", 24)
    assert collectives.mesh_axes(groups, tuple(sizes.items())) == tuple(names)
    assert sorted(i for g in groups for i in g) == list(range(24))


def test_part_of_an_axis_is_named_as_such():
    assert collectives.mesh_axes(((0, 1), (2, 3)), (("data", 4),)) == ("data (part)",)


@pytest.mark.parametrize("kind", ["dp", "fsdp", "tp"])
def test_collectives_are_those_in_the_text(devices, kind):
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    split = {
        "dp": (PartitionSpec(), PartitionSpec()),
        "fsdp": (PartitionSpec("data"), PartitionSpec("data")),
        "tp": (PartitionSpec(None, "model"), PartitionSpec("model")),
    }[kind]
    shapes = ((64, 128), (128, 32))
    weights = [
        jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, split)
    ]
    x = jax.ShapeDtypeStruct(
        (16, 64), "float32", sharding=NamedSharding(mesh, PartitionSpec("data"))
    )

    def step(weights, x):
        def loss(weights):
            hidden = jnp.tanh(x @ weights[0])
            return jnp.mean((hidden @ weights[1]) ** 2)

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights))]

    out = [w.sharding for w in weights]
    text = jax.jit(step, out_shardings=out).lower(weights, x).compile().as_text()
    found = hlo.analyze(text, wire=hlo.Wire.of(mesh.shape)).collectives
    channels = set(re.findall(r"channel_id=(\d+)", text))
    assert len(found) == len(channels) > 0
    crossed = {axis for c in found for axis in c.axes}
    assert crossed == {"dp": {"data"}, "fsdp": {"data"}, "tp": {"data", "model"}}[kind]
    if kind == "dp":
        gradients = sum(4 * a * b for a, b in shapes)
        assert sum(c.bytes for c in found if c.kind == "all-reduce") == gradients
        assert {c.group_size for c in found} == {4}


def test_collectives_asked_for_by_name_count_each(devices):
    """JAX gives all of them one channel."""
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))

    def local(x):
        y = jax.lax.psum_scatter(x, "data", tiled=True)
        y = jax.lax.psum_scatter(jnp.sin(y), "model", tiled=True)
        z = jax.lax.all_gather(jnp.cos(x), "data", tiled=True)
        return y.sum() + jax.lax.all_gather(z * z, "model", tiled=True).sum()

    spec = PartitionSpec(("data", "model"))
    total = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    text = jax.jit(total).lower(jax.ShapeDtypeStruct((640,), "float32")).compile().as_text()
    found = hlo.analyze(text, wire=hlo.Wire.of(mesh.shape)).collectives
    assert sorted((c.kind, c.axes, c.bytes) for c in found) == [
        ("all-gather", ("data",), 4 * 4 * 80),
        ("all-gather", ("model",), 4 * 8 * 80),
        ("reduce-scatter", ("data",), 4 * 80),
        ("reduce-scatter", ("model",), 4 * 20),
    ]


_COMBINED = """
ENTRY %main (x: f32[8], y: f32[64,64]) -> (f32[8], f32[64,64]) {
  %x = f32[8] parameter(0)
  %y = f32[64,64] parameter(1)
  %a = f32[8] negate(%x), metadata={op_name="jit(f)/jvp(loss)/neg"}
  %b = f32[64,64] negate(%y), metadata={op_name="jit(f)/transpose(jvp(wide))/neg"}
  ROOT %r = (f32[8], f32[64,64]) all-reduce(%a, %b), channel_id=1, \
replica_groups=[1,8]<=[8], to_apply=%add, metadata={op_name="jit(f)/jvp(loss)/reduce_sum"}
}
"""


def test_a_combined_collective_is_named_after_its_largest_part():
    (found,) = hlo.analyze(_COMBINED, wire=hlo.Wire.of({"data": 8})).collectives
    assert (found.layer, found.phase) == ("wide and 1 more", "backward")
    assert found.bytes == 4 * (8 + 64 * 64)
    assert found.axes == ("data",)


# As the TPU compiler writes a gradient's sum in three kernels that overlap with it, of which copies
# lie in different memories, and the last one's, which has nothing left to overlap with.
_OVERLAPPED = """
%start (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64] parameter(0)
  %r.1 = bf16[64,64] all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add, \
metadata={op_name="jit(f)/transpose(jvp(wide))/dot"}
  ROOT %c.1 = bf16[64,64] custom-call(%r.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64] parameter(0)
  ROOT %r.2 = bf16[64,64]{1,0:T(8,128)S(1)} all-reduce(%p), channel_id=1, \
replica_groups=[1,8]<=[8], to_apply=%add, metadata={op_name="jit(f)/transpose(jvp(wide))/dot"}
}

ENTRY %main (x: bf16[64,64]) -> bf16[64,64] {
  %x = bf16[64,64] parameter(0)
  %a = bf16[64,64] fusion(%x), kind=kCustom, calls=%start
  %b = bf16[64,64] fusion(%a), kind=kCustom, calls=%async_collective_fusion.1
  ROOT %last = bf16[64,64] all-reduce(%b), channel_id=2, replica_groups=[1,8]<=[8], \
to_apply=%add, frontend_attributes={async_collective_name="all-reduce-start.3"}, \
metadata={op_name="jit(f)/transpose(jvp(first))/dot"}
}
"""


def test_a_collective_is_overlapped_where_a_kernel_has_it_and_counts_once():
    found = hlo.analyze(_OVERLAPPED, wire=hlo.Wire.of({"data": 8})).collectives
    assert sorted((c.kind, c.times, c.asynchronous) for c in found) == [
        ("all-reduce", 1, False),
        ("all-reduce", 1, True),
    ]


# A product of 150 us stands between the start and the end of the first all-to-all; after the second
# one, nothing does.
_TOKENS_SENT = """
%dot (p: bf16[1024,1024]) -> bf16[1024,1024] {
  ROOT %p = bf16[1024,1024] parameter(0)
}

ENTRY %main (x: bf16[8,4096,1024], w: bf16[1024,1024]) -> bf16[8,4096,1024] {
  %x = bf16[8,4096,1024] parameter(0)
  %w = bf16[1024,1024] parameter(1)
  %s.1 = (bf16[8,4096,1024], bf16[8,4096,1024]) all-to-all-start(%x), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}
  %y = bf16[1024,1024] fusion(%w), kind=kOutput, calls=%dot, \
backend_config={"estimated_cycles":"225000"}
  %d.1 = bf16[8,4096,1024] all-to-all-done(%s.1)
  %s.2 = (bf16[8,4096,1024], bf16[8,4096,1024]) all-to-all-start(%d.1), channel_id=2, \
replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %d.2 = bf16[8,4096,1024] all-to-all-done(%s.2)
}
"""


def test_an_all_to_all_is_overlapped_as_far_as_there_is_work_beside_it():
    v5e = Topology.parse("v5e:2x4")
    cost = hlo.analyze(_TOKENS_SENT, wire=hlo.Wire.of({"data": 8}, v5e.devices(), v5e))
    first, second = cost.collectives
    assert first.asynchronous
    assert second.asynchronous
    assert first.exposed_seconds == pytest.approx(first.total_seconds - 150e-6)
    assert second.exposed_seconds == second.total_seconds > 150e-6
    waiting = first.exposed_seconds + second.exposed_seconds
    assert cost.exposed_link_seconds == pytest.approx(waiting)


def test_times_on_the_links():
    v5e = Topology.parse("v5e:16x16")
    x_by_y = np.array(v5e.devices(), dtype=object).reshape(16, 16).T
    wire = hlo.Wire.of({"data": 16, "model": 16}, x_by_y.flat, v5e)
    groups = replica_groups("[16,16]<=[256]", 256)
    # a ring of 16 closes: two links each way
    assert bandwidth_of(wire, groups) == ("ICI", 2 * 50e9)
    half = tuple(g[:8] for g in groups)
    assert bandwidth_of(wire, half) == ("ICI", 50e9)
    assert bandwidth_of(wire, (tuple(range(256)),)) == ("ICI", 4 * 50e9)
    joined = Topology.parse("2*v5e:2x4")
    wire = hlo.Wire.of({"slice": 2, "data": 8}, joined.devices(), joined)
    across = replica_groups("[8,2]<=[2,8]T(1,0)", 16)
    assert bandwidth_of(wire, across) == ("DCN", joined.dcn_bandwidth)
    assert wire.crossing_axes() == ("slice",)
    assert wire.first_slice == tuple(range(8))
    assert sent_bytes("all-reduce", 800, 4) == 1200
    assert sent_bytes("all-gather", 800, 4) == 600
    assert sent_bytes("collective-permute", 800, 2) == 800
    assert sent_bytes("all-reduce", 800, 1) == 0


def test_between_slices_goes_what_each_slice_lacks():
    """Sums are made within a slice first; what goes from each device to each is its own."""
    joined = Topology.parse("2*v5e:2x4")
    wire = hlo.Wire.of({"data": 16}, joined.devices(), joined)
    everyone, whole = (tuple(range(16)),), 2**30
    one_device = whole / joined.dcn_bandwidth
    for kind, bytes_ in (
        ("all-reduce", 2 * one_device / 2 / 8),
        ("all-gather", one_device / 2 / 8),
        ("reduce-scatter", one_device / 2 / 8),
        ("all-to-all", one_device / 2),
    ):
        network, seconds = seconds_of(wire, kind, whole, everyone)
        assert network == "DCN"
        assert seconds == pytest.approx(bytes_), kind
    pairs = tuple((i, i + 8) for i in range(8))
    assert seconds_of(wire, "collective-permute", whole, pairs) == ("DCN", one_device)


_KERNEL = """
ENTRY %main (x: f32[256,256], y: f32[256,256]) -> f32[256,256] {
  %x = f32[256,256]{1,0:T(8,128)} parameter(0)
  %y = f32[256,256]{1,0:T(8,128)} parameter(1)
  ROOT %k = f32[256,256]{1,0:T(8,128)} custom-call(%x, %y), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/attention/pallas_call"}, \
backend_config={"custom_call_config":{"body":"TUzv"COST,"needs_layout_passes":true}}
}
"""


def test_metadata_that_breaks_lines_does_not_end_the_program():
    attributes = 'frontend_attributes={kernel_metadata={\n "blocks":"{1}"\n}}, metadata='
    text = _KERNEL.replace("COST", "").replace("metadata=", attributes)
    text = text.replace("ROOT %k", "%k").replace(
        "}\n}\n", "}\n  ROOT %n = f32[256,256]{1,0} negate(%k)\n}\n"
    )
    program = parse(text)
    assert [i.name for i in program.entry] == ["x", "y", "k", "n"]
    assert program.entry.by_name["k"].op_name == "jit(f)/attention/pallas_call"
    assert hlo.analyze(text).unestimated_kernels == ("k",)


def test_hand_written_kernels_cost_what_they_state():
    stated = ',"cost_estimate":{"flops":"33554432","bytes_accessed":"786432"}'
    known = hlo.analyze(_KERNEL.replace("COST", stated))
    assert known.flops == known.kernel_flops == 2 * 256**3
    assert known.hbm_bytes == known.kernel_bytes == 786432
    assert known.layers[0].layer == "attention"
    assert known.unestimated_kernels == ()
    near = hlo.analyze(
        _KERNEL.replace("COST", stated).replace(
            "%y = f32[256,256]{1,0:T(8,128)}", "%y = f32[256,256]{1,0:T(8,128)S(1)}"
        )
    )
    assert near.hbm_bytes == 786432 - 4 * 256**2
    silent = hlo.analyze(_KERNEL.replace("COST", ""))
    assert (silent.flops, silent.unestimated_kernels) == (0, ("k",))
    assert silent.hbm_bytes == 3 * 4 * 256**2


def _splash(phase, results, scope=""):
    stack = f"jit(f)/transpose(jvp(mha)){scope}/splash_mha_{phase}_residuals/pallas_call"
    outputs = ", ".join(["bf16[2,4,1024,64]{3,2,1,0}"] * results)
    return f"""
ENTRY %main (b: s8[1,2,2], q: bf16[2,4,1024,64]) -> f32[] {{
  %b = s8[1,2,2]{{2,1,0}} parameter(0)
  %n = s8[1,2,2]{{2,1,0}} parameter(4)
  %q = bf16[2,4,1024,64]{{3,2,1,0}} parameter(1)
  %k = bf16[2,2,512,64]{{3,2,1,0}} parameter(2)
  %v = bf16[2,2,512,32]{{3,2,1,0}} parameter(3)
  ROOT %call = ({outputs}) custom-call(%n, %b, %q, %k, %v), \
custom_call_target="tpu_custom_call", metadata={{op_name="{stack}"}}
}}
"""


@pytest.mark.parametrize(("groups", "number"), [("{}", 0), ("{{0}}", 0), ("{{0,1}}", 1)])
def test_collectives_of_a_program_whose_mesh_is_not_told(groups, number):
    text = f"""
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%sum
}}
"""
    found = hlo.analyze(text).collectives
    assert [(each.kind, each.axes) for each in found] == [("all-reduce", ())] * number


def test_flash_attention_costs_what_its_mask_leaves():
    pairs = 2 * 2 * 4 * 1024 * 512  # two per multiply-add, batch, heads
    products = {
        ("fwd_no", 5): 64 + 32,
        ("fwd_segmented", 5): 64 + 32,
        ("dq_no", 2): 2 * 64 + 32,
        ("dkv_no", 4): 2 * 64 + 2 * 32,
        ("dkv_no", 5): 3 * 64 + 2 * 32,  # fused with dq
    }
    for (phase, results), width in products.items():
        whole = hlo.analyze(_splash(phase, results), layer_names=["mha"])
        assert whole.flops == whole.kernel_flops == pairs * width, phase
        assert dict(whole.flops_by_rate) == {"bfloat16": pairs * width}
        assert (whole.whole_kernels, whole.unestimated_kernels) == (("call",), ())
        assert whole.layers[0].layer == "mha"
        part = hlo.analyze(_splash(phase, results, "/" + kernel.blocks_scope(3, 4)))
        assert part.flops == pairs * width * 3 / 4
        assert part.whole_kernels == ()
    other_layout = _splash("fwd_no", 5).replace("metadata", 'info={"q_layout": 2}, metadata')
    assert hlo.analyze(other_layout).unestimated_kernels == ("call",)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("time", "source"), [(1, 1), (640, 640), (1100, 1100), (2500, 300)])
def test_blocks_computed_are_those_the_kernels_mask_leaves(time, source, is_causal):
    rows, columns = kernel.tiling(time), kernel.tiling(source)
    mask = kernel.static_mask(time, source, is_causal)
    blocks = (
        mask[:, :]
        .reshape(
            rows.padded // rows.block, rows.block, columns.padded // columns.block, columns.block
        )
        .any((1, 3))
    )
    assert kernel.blocks_computed(mask, time, source) == (blocks.sum(), blocks.size)


# --- the TPU compiler ------------------------------------------------------------------------

_COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
arguments = json.loads(sys.argv[1])
device = topologies.get_topology_desc(**arguments).devices[0]
one = jax.sharding.SingleDeviceSharding(device)
def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=one)
def conv(x, w, stride):
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
def train_conv(x, w):
    return jax.grad(lambda x, w: (conv(x, w, 2) ** 2).sum(), (0, 1))(x, w)
def lstm(x, w, u, h, c):
    def cell(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h
    return jax.lax.scan(cell, (h, c), x)[1]
def steps(t):
    return (spec(t, 64, 128), spec(128, 512), spec(128, 512), spec(64, 128), spec(64, 128))
def attention(q, k, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
head = spec(2, 256, 4, 64, dtype="bfloat16")
programs = {
    "matmul": (lambda a, b: a @ b, spec(256, 512), spec(512, 1024)),
    "conv": (train_conv, spec(8, 33, 33, 64), spec(3, 3, 64, 128)),
    "attention": (attention, head, head, head),
    "lstm 1": (lstm, *steps(1)),
    "lstm 64": (lstm, *steps(64)),
}
quick = {"xla_optimization_level": "EFFORT_O1"}
print(json.dumps({name: jax.jit(f).lower(*a).compile(compiler_options=quick).as_text()
    for name, (f, *a) in programs.items()}))
"""


@pytest.fixture(scope="module")
def tpu_programs():
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps(Topology.parse("v5e:2x2").libtpu_arguments())],
        env={**os.environ, **libtpu.libtpu_environment()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {name: hlo.analyze(text) for name, text in json.loads(done.stdout).items()}


@pytest.mark.tpu_compiler
def test_operations_of_tpu_programs(tpu_programs):
    formulas = {
        "matmul": 2 * 256 * 512 * 1024,
        "conv": 3 * 2 * 8 * 16 * 16 * 128 * 9 * 64,
        "attention": 2 * 2 * 2 * 4 * 256 * 256 * 64,
    }
    for name, flops in formulas.items():
        assert tpu_programs[name].flops == pytest.approx(flops, rel=0.03), name


@pytest.mark.tpu_compiler
def test_an_lstm_of_64_steps_costs_64_times_one(tpu_programs):
    one = 2 * 64 * (128 + 128) * 512
    assert tpu_programs["lstm 1"].flops == one
    assert tpu_programs["lstm 64"].flops == 64 * one
    assert tpu_programs["lstm 64"].unknown_loops == ()


@pytest.mark.tpu_compiler
def test_cycles_and_bytes_of_tpu_programs(tpu_programs):
    chip = Topology.parse("v5e:2x2")
    matmul = tpu_programs["matmul"]
    assert matmul.hbm_bytes >= 4 * (256 * 512 + 512 * 1024 + 256 * 1024)
    for name, program in tpu_programs.items():
        # the compiler never promises more than the chip has
        assert program.cycles / chip.chip.clock > program.flops / chip.peak_flops(), name
    assert tpu_programs["lstm 64"].cycles > 20 * tpu_programs["lstm 1"].cycles
    # inputs and weights are read, outputs written; no step reads all of the inputs
    once = 4 * (64 * 64 * 128 * 2 + 2 * 128 * 512)
    assert once <= tpu_programs["lstm 64"].hbm_bytes < 64 * 4 * 64 * 64 * 128


def test_an_lstm_layer_on_the_cpu_compiler():
    layer = keras.layers.LSTM(16, return_sequences=True)
    layer.build((4, 8, 32))

    def run(x, h, c):
        seeds = layer.non_trainable_variables
        weights = layer.trainable_variables
        return layer.stateless_call(weights, seeds, x, initial_state=[h, c])[0]

    state = (_spec(4, 16), _spec(4, 16))
    one = 2 * 4 * (32 + 16) * 64
    for steps in (1, 64):
        assert _flops(run, _spec(4, steps, 32), *state) == steps * one, steps


# What libtpu 0.0.52 makes of an all-reduce on tpu7x; until 0.0.50 it is a `call-start`.
_ON_SPARSECORE = """
HloModule step

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%called (p: f32[128,256]) -> f32[128,256] {
  %p = f32[128,256]{1,0} parameter(0)
  ROOT %all-reduce.9 = f32[128,256]{1,0} all-reduce(%p), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%sum
}, execution_thread="sparsecore"

ENTRY %main (a: f32[128,256]) -> f32[128,256] {
  %a = f32[128,256]{1,0} parameter(0)
  %start = ((), (), (s32[8]{0})) custom-call-start(), async_execution_thread="sparsecore", custom_call_target="TODO", called_computations={%called}
  %update = ((f32[128,256]{1,0}), f32[128,256]{1,0}, (s32[8]{0})) custom-call-update(%start, %a)
  ROOT %done = f32[128,256]{1,0} custom-call-done(%update)
}
"""  # noqa: E501


def test_a_collective_that_a_sparse_core_computes_is_counted():
    (found,) = hlo.analyze(_ON_SPARSECORE, wire=hlo.Wire.of({"data": 8})).collectives
    assert (found.kind, found.axes, found.bytes) == ("all-reduce", ("data",), 4 * 128 * 256)
    assert found.asynchronous


def test_a_collective_that_runs_beside_the_main_core_counts_once():
    begin, _, _ = _ON_SPARSECORE.partition("  %start")
    text = (
        f"{begin}  %start = ((f32[128,256]{{1,0}}), f32[128,256]{{1,0}}) async-start(%a), "
        "calls=%called\n  ROOT %done = f32[128,256]{1,0} async-done(%start)\n}\n"
    )
    (found,) = hlo.analyze(text, wire=hlo.Wire.of({"data": 8})).collectives
    assert (found.kind, found.asynchronous) == ("all-reduce", True)


def test_elements_of_tuples_that_no_instruction_takes_out():
    """As libtpu 0.0.50 writes them."""
    program = parse(
        "ENTRY %main (p: (s32[], f32[8,8])) -> f32[8,8] {\n"
        "  %p = (s32[], f32[8,8]{1,0}) parameter(0)\n"
        "  %a = f32[8,8]{1,0} copy(%p#1)\n"
        "  ROOT %b = f32[8,8]{1,0} add(%a, %p#1)\n"
        "}\n"
    )
    found = {i.name: i for i in program.entry}
    assert list(found) == ["p", "p.element1", "a", "b"]
    taken = found["p.element1"]
    assert (taken.opcode, taken.operand_names) == ("get-tuple-element", ["p"])
    assert taken.attribute("index") == "1"
    assert [shape.dims for shape in taken.shapes] == [(8, 8)]
    assert found["b"].operand_names == ["a", "p.element1"]
