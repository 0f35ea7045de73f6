"""Programs of the TPU compiler, written so that XLA's CPU client runs them."""

import pathlib
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_tpu_dist._keras.replicas import compiled_replicas, run_replicas
from keras_tpu_dist.tools.hlo import operations
from keras_tpu_dist.tools.hlo.operations import Replayed
from keras_tpu_dist.tools.hlo.parse import parse
from keras_tpu_dist.tools.replay import CannotRun, Row, rewrite, spelling
from keras_tpu_dist.tools.replay.passes import first_wrong
from keras_tpu_dist.tools.replay.rewrite import runnable

ROOT = pathlib.Path(__file__).parents[2]


def ran(text, arguments, number=1, **options):
    """The results of a program on the first devices; arguments are one array for each device."""
    devices = jax.devices()[:number]
    executable = compiled_replicas(runnable(parse(text), range(number), **options), devices)
    mesh = jax.sharding.Mesh(
        np.array(devices), ("replica",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    own = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = []
    for parts in arguments:
        arrays = [jax.device_put(part, device) for part, device in zip(parts, devices)]
        placed.append(jax.make_array_from_single_device_arrays(arrays[0].shape, own, arrays))
    return [[np.asarray(part) for part in parts] for parts in run_replicas(executable, placed)]


def program(parameters, *lines, before=""):
    """An entry computation with parameters of these types."""
    own = "".join(f"  %p{n} = {kind} parameter({n})\n" for n, kind in enumerate(parameters))
    body = "".join(f"  {line}\n" for line in lines)
    head = "HloModule m, is_scheduled=true\n\n"
    return f"{head}{before}ENTRY %e (p: f32[]) -> f32[] {{\n{own}{body}}}\n"


def test_a_bitcast_means_the_bytes_of_its_layout():
    text = program(
        ["f32[2,3]{0,1:T(2,128)}"],
        "ROOT %b = f32[3,2]{1,0:T(2,128)} bitcast(%p0)",
    )
    x = np.arange(6, dtype="float32").reshape(2, 3)
    np.testing.assert_array_equal(ran(text, [[x]])[0][0], x.T)


def test_a_bitcast_sees_tiles():
    """As libtpu flattens indices. Read without tiles, it looks like a fault of libtpu."""
    text = program(
        ["s32[2,256]{1,0:T(2,128)}"],
        "%b = s32[1,2,2,128]{3,2,1,0:T(2,128)} bitcast(%p0)",
        "%c = s32[1,2,2,128]{3,1,2,0:T(2,128)} copy(%b)",
        "ROOT %d = s32[512]{0:T(512)} bitcast(%c)",
    )
    x = np.arange(512, dtype="int32").reshape(2, 256)
    np.testing.assert_array_equal(ran(text, [[x]])[0][0], x.ravel())


def test_rows_of_a_buffer_are_written_one_further_in_it():
    """XLA's CPU compiler reads what it has just written, if rows are cut out of tiles before."""
    tiled, flat = "f32[4,2,8]{2,1,0:T(2,128)}", "f32[8,8]{1,0:T(8,128)}"
    text = program(
        [tiled],
        "%one = f32[] constant(1)",
        f"%ones = {tiled} broadcast(%one), dimensions={{}}",
        f"%y = {tiled} add(%p0, %ones)",
        f"%whole = {flat} bitcast(%y)",
        "%rows = f32[7,8]{1,0:T(8,128)} bitcast(%y)",
        "%at = s32[] constant(1)",
        "%zero = s32[] constant(0)",
        f"ROOT %moved = {flat} dynamic-update-slice(%whole, %rows, %at, %zero)",
    )
    x = np.arange(64, dtype="float32").reshape(4, 2, 8)
    rows = x.reshape(8, 8) + 1
    np.testing.assert_array_equal(ran(text, [[x]])[0][0], np.concatenate([rows[:1], rows[:-1]]))


def in_bytes(array, order, tiles):
    """An array's elements in the order of its bytes, with zeros between them."""
    array = np.transpose(array, order)
    for tile in tiles:
        array = array.reshape([*[1] * (len(tile) - array.ndim), *array.shape])
        rest = array.ndim - len(tile)
        grown = [(0, 0)] * rest + [
            (0, -size % step) for size, step in zip(array.shape[rest:], tile)
        ]
        array = np.pad(array, grown)
        cut = [*array.shape[:rest]]
        for size, step in zip(array.shape[rest:], tile):
            cut += [size // step, step]
        places = [*range(rest), *range(rest, len(cut), 2), *range(rest + 1, len(cut), 2)]
        array = array.reshape(cut).transpose(places)
    return array.ravel()


def spelled(dims, order, tiles):
    fastest_first = ",".join(map(str, order[::-1]))
    cut = "".join(f"({','.join(map(str, tile))})" for tile in tiles)
    return f"s32[{','.join(map(str, dims))}]{{{fastest_first}{':T' + cut if cut else ''}}}"


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([(), ((4,),), ((2, 4),), ((2, 4), (2, 1)), ((8, 128),)]),
    st.sampled_from([(), ((4,),), ((2, 4),), ((4, 2),), ((2, 4), (2, 1))]),
)
@settings(max_examples=60, derandomize=True)
def test_bitcasts_between_random_layouts_have_the_same_bytes(dims, random, tiles, others):
    """If both have as many bytes, they are equal; elements between others are zeros."""
    order = list(range(len(dims)))
    random.shuffle(order)
    x = np.arange(1, np.prod(dims) + 1, dtype="int32").reshape(dims)
    source = in_bytes(x, order, tiles)
    result_dims = list(dims)
    random.shuffle(result_dims)
    result_order = list(range(len(result_dims)))
    random.shuffle(result_order)
    places = np.zeros(result_dims, "int32")
    if in_bytes(places, result_order, others).size != source.size:
        return
    text = program(
        [spelled(dims, order, tiles)],
        f"ROOT %b = {spelled(result_dims, result_order, others)} bitcast(%p0)",
    )
    found = ran(text, [[x]])[0][0]
    numbered = np.arange(1, found.size + 1, dtype="int32").reshape(result_dims)
    at = in_bytes(numbered, result_order, others)
    for value, place in zip(source, at):
        if place:
            assert found.ravel()[place - 1] == value


def narrowed(carried="%part"):
    """A loop that passes on a part of an array, in the bytes of the whole."""
    narrow, wide = "f32[8,16]{1,0:T(8,128)}", "f32[8,24]{1,0:T(8,128)}"
    return f"""HloModule narrowed

%body (s: (s32[], {narrow})) -> (s32[], {narrow}) {{
  %s = (s32[], {narrow}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %part = {narrow} get-tuple-element(%s), index=1
  %other = {narrow} add(%part, %part)
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  ROOT %out = (s32[], {narrow}) tuple(%next, {carried})
}}

%condition (c: (s32[], {narrow})) -> pred[] {{
  %c = (s32[], {narrow}) parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant(3)
  ROOT %goes_on = pred[] compare(%at, %end), direction=LT
}}

ENTRY %main (x: f32[8,24]) -> f32[8,24] {{
  %x = {wide} parameter(0)
  %narrow = {narrow} bitcast(%x)
  %zero = s32[] constant(0)
  %start = (s32[], {narrow}) tuple(%zero, %narrow)
  %loop = (s32[], {narrow}) while(%start), condition=%condition, body=%body
  %after = {narrow} get-tuple-element(%loop), index=1
  ROOT %whole = {wide} bitcast(%after)
}}
"""


def test_a_part_in_the_bytes_of_a_whole_is_the_whole_again():
    """A slice of a recurrent kernel is a bitcast; after the loop another has all of it."""
    x = np.arange(8 * 24, dtype="float32").reshape(8, 24)
    np.testing.assert_array_equal(ran(narrowed(), [[x]])[0][0], x)
    with pytest.raises(CannotRun, match="it does not have the bytes of its operand"):
        runnable(parse(narrowed("%other")), [0])


def test_packed_truth_values_are_words():
    text = program(
        ["pred[13]{0:T(512)(128)(4,1)}"],
        "%b = u32[1,1,128]{2,1,0:T(1,128)} bitcast(%p0)",
        "ROOT %c = pred[13]{0:T(512)(128)(4,1)} bitcast(%b)",
    )
    x = np.arange(13) % 3 == 0
    assert "u8" in runnable(parse(text), [0])
    # Back from the words, elements are where they were.
    np.testing.assert_array_equal(ran(text, [[x]])[0][0], x)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", [1, 1, 5, 5]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [2, 4, 2, 4]),
        ("{}", [6, 6, 6, 6]),
    ],
)
def test_sums_of_groups(groups, expected):
    before = (
        "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n}\n\n"
    )
    text = program(
        ["f32[]"],
        f"ROOT %r = f32[] all-reduce(%p0), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=%add",
        before=before,
    )
    numbers = [np.float32(n) for n in range(4)]
    (found,) = ran(text, [numbers], 4)
    assert [float(value) for value in found] == expected


def test_a_reduction_by_a_computation_of_its_own():
    """XLA's CPU client has no such all-reduce."""
    before = (
        "%norm (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  %b = f32[] parameter(1)\n  %c = f32[] multiply(%a, %a)\n"
        "  %d = f32[] multiply(%b, %b)\n  %s = f32[] add(%c, %d)\n  ROOT %r = f32[] sqrt(%s)\n}\n\n"
    )
    text = program(
        ["f32[2]"],
        "ROOT %r = (f32[2], f32[2]) all-reduce(%p0, %p0), replica_groups={{0,1},{2,3}}, "
        "to_apply=%norm",
        before=before,
    )
    parts = [np.array([n, 1], "float32") for n in (3, 4, 5, 12)]
    found, again = ran(text, [parts], 4)
    np.testing.assert_array_equal(found, again)
    np.testing.assert_allclose(found[0], [5, 2**0.5], rtol=1e-6)
    np.testing.assert_allclose(found[3], [13, 2**0.5], rtol=1e-6)


def test_what_is_started_apart_is_computed_where_it_starts():
    text = program(
        ["f32[4]{0:T(128)}"],
        "%c = (f32[4]{0:T(128)S(1)}, f32[4]{0:T(128)}, u32[]{:S(2)}) copy-start(%p0)",
        "%d = f32[4]{0:T(128)S(1)} copy-done(%c)",
        "%g = (f32[4], f32[8], u32[]) all-gather-start(%d), replica_groups={{0,1}}, dimensions={0}",
        "ROOT %h = f32[8] all-gather-done(%g)",
    )
    parts = [np.arange(4, dtype="float32"), np.arange(4, 8, dtype="float32")]
    for found in ran(text, [parts], 2)[0]:
        np.testing.assert_array_equal(found, np.arange(8))


@pytest.mark.parametrize("started", [False, True])
def test_rows_are_exchanged_that_are_padded_and_transposed(started):
    """XLA's CPU compiler refuses it where it sees what is exchanged."""
    kind, whole = "f32[1,3,4]{2,1,0}", "f32[4,3,4]{2,1,0}"
    options = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
    lines = [f"ROOT %a = {whole} all-to-all(%pad), {options}"]
    if started:
        lines = [
            f"%s = ({whole}, {whole}) all-to-all-start(%pad), {options}",
            f"ROOT %a = {whole} all-to-all-done(%s)",
        ]
    text = program(
        ["f32[4,3,1]{2,1,0}"],
        f"%t = {kind} transpose(%p0), dimensions={{2,1,0}}",
        "%zero = f32[] constant(0)",
        f"%pad = {whole} pad(%t, %zero), padding=0_3x0_0x0_0",
        *lines,
    )
    x = [np.arange(12, dtype="float32").reshape(4, 3, 1) + 100 * n for n in range(4)]
    (found,) = ran(text, [x], 4)
    # The first device gets the first rows of all, the others get padding.
    np.testing.assert_array_equal(found[0], np.stack([part[..., 0].T for part in x]))
    assert not any(np.any(part) for part in found[1:])


def test_dtypes_that_differ_are_converted():
    text = program(
        ["bf16[3]", "f32[3]", "pred[3]"],
        "%a = f32[3] add(%p0, %p1)",
        "%s = bf16[3] select(%p2, %a, %p0)",
        "%l = pred[3] compare(%s, %p1), direction=LT",
        "ROOT %t = (f32[3], bf16[3], pred[3]) tuple(%a, %s, %l)",
    )
    x = jax.numpy.array([1, 2, 3], "bfloat16")
    y, where = np.array([0.5, 4, 1], "float32"), np.array([True, False, True])
    total, chosen, less = (parts[0] for parts in ran(text, [[x], [y], [where]]))
    np.testing.assert_array_equal(total, [1.5, 6, 4])
    np.testing.assert_array_equal(chosen.astype("float32"), [1.5, 2, 4])
    np.testing.assert_array_equal(less, [False, True, False])


def test_moves_convert_what_they_move():
    text = program(
        ["bf16[3]", "s32[]"],
        "%b = f32[3,2] broadcast(%p0), dimensions={0}",
        "%t = bf16[2,3] transpose(%b), dimensions={1,0}",
        "%s = f32[1,2] dynamic-slice(%t, %p1, %p1), dynamic_slice_sizes={1,2}",
        "ROOT %r = (f32[3,2], bf16[2,3], f32[1,2]) tuple(%b, %t, %s)",
    )
    x = jax.numpy.array([1, 2, 3], "bfloat16")
    wide, turned, cut = (parts[0] for parts in ran(text, [[x], [np.int32(1)]]))
    np.testing.assert_array_equal(wide, [[1, 1], [2, 2], [3, 3]])
    np.testing.assert_array_equal(turned.astype("float32"), [[1, 2, 3], [1, 2, 3]])
    np.testing.assert_array_equal(cut, [[2, 3]])


@pytest.mark.parametrize(("precision", "rounded"), [("", True), ("highest,highest", False)])
def test_products_as_the_chip_rounds_them(precision, rounded):
    asked = f", operand_precision={{{precision}}}" if precision else ""
    text = program(
        ["f32[1,2]", "f32[2,1]"],
        "ROOT %d = f32[1,1] dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        + asked,
    )
    x, y = np.array([[1 + 2**-10, 1]], "float32"), np.array([[1], [1]], "float32")
    exact = 2 + 2**-10
    assert float(ran(text, [[x], [y]])[0][0][0, 0]) == exact
    found = float(ran(text, [[x], [y]], as_on_chip=True)[0][0][0, 0])
    assert found == (2 if rounded else exact)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "%x = f32[4] frobnicate(%p0)",
            "the operation is not known, to XLA's CPU compiler neither; the table of operations "
            "was compared with libtpu 0.0.41",
        ),
        (
            '%x = f32[4] custom-call(%p0), custom_call_target="Foo"',
            "custom call 'Foo' is not known",
        ),
        (
            '%x = f32[4] custom-call(%p0), custom_call_target="tpu_custom_call", '
            'metadata={op_name="jit(f)/mine/pallas_call"}',
            "it is a hand-written kernel",
        ),
        ("%x = f32[4] constant({...})", "the values of the constant are left out of the text"),
        ("%x = f32[3]{0:T(128)} bitcast(%q)", "it does not have the bytes of its operand"),
        ("%x = f32[4] add(%p0, %i)", "its dtypes are f32, s32"),
    ],
)
def test_what_is_unknown_is_an_error_that_names_it(line, why):
    text = program(
        ["f32[4]{0:T(128)}", "s32[4]"],
        "%q = bf16[3]{0:T(256)(128)(2,1)} constant({1, 2, 3})",
        "%i = s32[4] copy(%p1)",
        line,
        "ROOT %r = f32[4] copy(%p0)",
    )
    if "bitcast" in line:  # 256 elements of 2 bytes are 128 of 4: they can be read as those
        line = line.replace("T(128)", "T(512)")
        text = text.replace("%x = f32[3]{0:T(128)}", "%x = f32[3]{0:T(512)}")
    with pytest.raises(CannotRun) as error:
        runnable(parse(text), [0])
    said = str(error.value)
    assert why in said
    assert "must have a counterpart on simulated devices" in said
    assert "%x = " in said
    assert "to verify the rest" in said


FUSED = """%fused (p: f32[2,3]) -> f32[2,3] {
  %p = f32[2,3]{1,0} parameter(0)
  ROOT %n = f32[2,3]{1,0} negate(%p)
}

"""


def fused(reverse, kind="f32[2,3]{1,0}"):
    config = f'{{"flag_configs":[],"window_config":{{"is_mask":false,{reverse}}}}}'
    line = f"ROOT %f = {kind} fusion(%p0), kind=kLoop, calls=%fused, backend_config={config}"
    return program(["f32[2,3]{1,0}"], line, before=FUSED)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [('"0"', np.s_[::-1]), ('"1"', np.s_[:, ::-1]), ('"0","1"', np.s_[::-1, ::-1]), ("", np.s_[:])],
)
def test_a_fusion_may_write_in_reverse(dims, expected):
    """libtpu 0.0.52 says it in the configuration of the fusion alone."""
    text = fused(f'"output_reverse_dimensions":[{dims}]')
    x = np.arange(6, dtype="float32").reshape(2, 3)
    np.testing.assert_array_equal(ran(text, [[x]])[0][0], -x[expected])


@pytest.mark.parametrize(
    ("reverse", "kind", "name"),
    [
        ('"input_reverse_dimensions":["1"]', "f32[2,3]{1,0}", "input_reverse_dimensions"),
        (
            '"output_reverse_dimensions":["1"]',
            "(f32[2,3]{1,0}, f32[2,3]{1,0})",
            "output_reverse_dimensions",
        ),
    ],
)
def test_another_reverse_is_refused(reverse, kind, name):
    with pytest.raises(CannotRun, match=f"its configuration has '{name}', which is not known here"):
        runnable(parse(fused(reverse, kind)), range(1))


def test_attributes_are_read_whole():
    text = program(
        ["f32[4]"],
        'ROOT %x = f32[4] copy(%p0), metadata={op_name="a=\\"b, c={\\"" source_line=3}, '
        'frontend_attributes={a={b={c}}}, backend_config={"x":[1,2]}, slice={[0:1], [2:3]}',
    )
    found = spelling.attributes_of(parse(text).entry.root)
    assert found["slice"] == "{[0:1], [2:3]}"
    assert found["frontend_attributes"] == "{a={b={c}}}"
    assert set(found) == {"metadata", "frontend_attributes", "backend_config", "slice"}


def test_every_way_of_the_table_is_written():
    every = [*operations.OPERATIONS.values(), *operations.TARGETS.values()]
    used = {one.replayed for one in every} - {Replayed.TARGET, Replayed.REFUSED}
    assert used == set(rewrite._WRITERS)


@pytest.mark.parametrize(("dtype", "low"), [("uint32", 0), ("int32", -(2**31)), ("uint16", 0)])
def test_the_upper_half_of_a_product(dtype, low):
    """As libtpu 0.0.52 writes random numbers."""
    kind = {"uint32": "u32", "int32": "s32", "uint16": "u16"}[dtype]
    line = f"ROOT %m = {kind}[64]{{0:T(128)}} mulhi(%p0, %p1)"
    text = program([f"{kind}[64]{{0:T(128)}}"] * 2, line)
    rng, bits = np.random.default_rng(0), 8 * np.dtype(dtype).itemsize
    x, y = rng.integers(low, low + 2**bits, (2, 64)).astype(dtype)
    expected = [(int(a) * int(b)) >> bits for a, b in zip(x, y)]
    np.testing.assert_array_equal(ran(text, [[x], [y]])[0][0], np.array(expected).astype(dtype))


CALLED = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%called (p: f32[4]) -> f32[4] {
  %p = f32[4]{0:T(128)} parameter(0)TOKEN
  ROOT %r = f32[4]{0:T(128)} all-reduce(%p), channel_id=2, replica_groups=[1,2]<=[2], to_apply=%sum
}, execution_thread="sparsecore"

"""
STATE = "(s32[8192]{0:T(1024)}, s32[47]{0:T(1)S(11)}, /*index=2*/s32[0]{0:T(1)L(128)S(12)})"
GIVEN = (
    "%u = ((f32[4]{{0:T(128)}}), f32[4]{{0:T(128)}}, {state}) {name}-update(%s, %p0), "
    "output_to_operand_aliasing={{{{2,0}}: (0, {{2,0}})}}"
)
THREAD = 'async_execution_thread="sparsecore"'
# How each libtpu writes what it hands to a SparseCore.
HANDED = {
    "0.0.41": [
        '%w = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"',
        '%t = token[] custom-call(%w), custom_call_target="PrepareAsyncCallDone"',
        f"%s = ((f32[4]{{0:T(128)}}, token[]), f32[4]{{0:T(128)}}) call-start(%p0, %t), {THREAD}, "
        "to_apply=%called",
        "ROOT %d = f32[4]{0:T(128)} call-done(%s)",
    ],
    "0.0.50.1": [
        f"%s = ((), (), {STATE}) call-start(), {THREAD}, to_apply=%called",
        GIVEN.format(state=STATE, name="call"),
        "ROOT %d = f32[4]{0:T(128)} call-done(%u)",
    ],
    "0.0.52": [
        f"%s = ((), (), {STATE}) custom-call-start(), {THREAD}, "
        'custom_call_target="TODO(b/522284627)", called_computations={%called}',
        GIVEN.format(state=STATE, name="custom-call"),
        "ROOT %d = f32[4]{0:T(128)} custom-call-done(%u)",
    ],
}


@pytest.mark.parametrize("libtpu", HANDED)
def test_what_is_handed_to_a_sparse_core_is_computed(libtpu):
    token = "\n  %t = token[] parameter(1)" if libtpu == "0.0.41" else ""
    before = CALLED.replace("TOKEN", token)
    text = program(["f32[4]{0:T(128)}"], *HANDED[libtpu], before=before)
    x = np.arange(4, dtype="float32")
    for found in ran(text, [[x, 10 * x]], 2)[0]:
        np.testing.assert_array_equal(found, 11 * x)


def test_parts_of_bytes_are_joined():
    """As libtpu fetches a table on tpu7x."""
    bytes_, tiles = "s8[65536]{0:T(1024)(128)(4,1)}", "f32[256,128]{1,0:T(8,128)}"
    half = "s8[65536]{0:T(1024)(128)(4,1)S(1)}"
    text = program(
        [tiles],
        "%b = s8[131072]{0:T(1024)(128)(4,1)} bitcast(%p0)",
        f"%one = {bytes_} slice(%b), slice={{[0:65536]}}",
        f"%two = {half} slice(%b), slice={{[65536:131072]}}",
        f'ROOT %c = {tiles} custom-call(%one, %two), custom_call_target="ConcatBitcast"',
    )
    x = np.random.default_rng(0).normal(size=(256, 128)).astype("float32")
    np.testing.assert_array_equal(ran(text, [[x]])[0][0], x)


PARTS = [(0, 8), (8, 24), (24, 32), (32, 40)]


def joined(order):
    """A program that fetches rows of its argument part by part, in an order, and joins them."""
    whole = "f32[40,128]{1,0:T(8,128)}"
    lines, ends = [], []
    for n in order:
        start, stop = PARTS[n]
        part = f"f32[{stop - start},128]{{1,0:T(8,128)S(1)}}"
        cut = f"slice={{[{start}:{stop}], [0:128]}}"
        lines.append(f"%start{n} = (({whole}), {part}, s32[]{{:S(2)}}) slice-start(%p0), {cut}")
        ends.append(f"%part{n} = {part} slice-done(%start{n})")
    given = ", ".join(f"%part{n}" for n in order)
    end = f'ROOT %c = {whole} custom-call({given}), custom_call_target="ConcatBitcast"'
    return program([whole], *lines, *ends, end)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 2, 3, 0), (3, 1, 0, 2)])
def test_parts_are_joined_by_their_places_and_not_by_their_starts(order):
    """A ConvNeXt's kernels are fetched so; XLA's `SlicedCopyAllocation` sorts parts by start."""
    x = np.random.default_rng(0).normal(size=(40, 128)).astype("float32")
    np.testing.assert_array_equal(ran(joined(order), [[x]])[0][0], x)


@pytest.mark.parametrize("given", [(0, 1, 2), (0, 2, 3), (0, 1, 1, 3)])
def test_parts_with_a_gap_are_refused(given):
    with pytest.raises(CannotRun, match="its parts do not lie side by side"):
        runnable(parse(joined(given)), range(1))


def test_a_part_that_is_no_slice_is_refused():
    text = joined((0, 1, 2, 3)).replace("slice-done(%start3)", "copy(%p0)")
    with pytest.raises(CannotRun, match="its part %part3 is no slice"):
        runnable(parse(text), range(1))


def test_arrays_that_are_given_twice_are_refused():
    text = program(
        ["f32[4]"],
        "%s = ((f32[4]), f32[4], ()) call-start(%p0), to_apply=%called",
        "%u = ((f32[4]), f32[4], ()) call-update(%s, %p0)",
        "ROOT %d = f32[4] call-done(%u)",
        before=CALLED.replace("TOKEN", ""),
    )
    with pytest.raises(CannotRun, match="gives arrays to what has some already"):
        runnable(parse(text), [0, 1])


def test_an_elementwise_operation_of_no_table_runs_as_it_stands(monkeypatch):
    monkeypatch.delitem(operations.OPERATIONS, "tan")
    text = program(["f32[4]{0:T(128)}"], "ROOT %t = f32[4]{0:T(128)S(1)} tan(%p0)")
    x = np.linspace(-1, 1, 4, dtype="float32")
    np.testing.assert_allclose(ran(text, [[x]])[0][0], np.tan(x), rtol=1e-5)
    assert operations.unlisted(parse(text)) == ("tan",)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("%x = f32[2] halve(%p0)", "the operation is not known; the table"),
        ("%x = f32[4] all-frob(%p0)", "the operation is not known; the table"),
        ("%x = f32[4] frob(%p0), calls=%p", "the operation is not known; the table"),
        ("%x = f32[4] collective-broadcast(%p0)", "CPU client has no such collective"),
    ],
)
def test_what_is_not_elementwise_is_refused(line, why):
    text = program(["f32[4]"], line, "ROOT %r = f32[4] copy(%p0)")
    with pytest.raises(CannotRun, match=why):
        runnable(parse(text), [0])


def test_the_page_lists_what_is_refused():
    page = (ROOT / "docs" / "verify.md").read_text().partition("## What is refused")[2]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.*?) \|$", page.partition("\n## ")[0], re.M)
    refused = [(one.name, one.why, one.since) for one in operations.refused()]
    assert sorted(rows) == sorted(refused)


class Passes:
    """Twenty passes, the fourth of them the partitioner; the programs are their numbers."""

    def __init__(self, wrong_from, broken):
        self.wrong_from, self.broken, self.ran = wrong_from, broken, []

    def dumped(self, folder):
        for n in range(20):
            name = "spmd-partitioning" if n == 3 else f"pass-{n}"
            file = f"module_0001.step.{n:04}.all.after_{name}.before_the-next.txt"
            pathlib.Path(folder, file).write_text(str(n))

    def run(self, text):
        self.ran.append(int(text))
        if int(text) in self.broken:
            raise CannotRun("not known")
        return [Row("x", (), "float32", float(int(text) >= self.wrong_from), 0.5)]


@pytest.mark.parametrize(
    ("wrong_from", "broken", "found"),
    [
        (13, (), ("pass-13", "pass-12", "pass-13")),
        (13, (11, 12), ("pass-11 or pass-12 or pass-13", "pass-10", "pass-13")),
        (19, range(4, 19), (" or ".join(f"pass-{n}" for n in range(4, 20)), "spmd-partitioning")),
        (0, (3, 4), ("", "pass-5", "")),
        (13, range(20), None),
    ],
)
def test_a_pass_is_found_by_halves(wrong_from, broken, found):
    passes = Passes(wrong_from, broken)
    wrong = first_wrong(passes)
    assert len(passes.ran) == len(set(passes.ran))
    if found is None:
        assert wrong is None
        return
    assert (wrong.name, wrong.right_after, wrong.wrong_after)[: len(found)] == found
    assert wrong.tried == len(passes.ran)
