"""Slices and updates in place: bytes and cycles, on short texts and by the compilers."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import updates
from keras_tpu_dist.hardware.chips import CHIPS
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools import hlo
from keras_tpu_dist.tools.hlo import silent, traffic
from keras_tpu_dist.tools.hlo.parse import parse, shapes_of

TILED = "{1,0:T(8,128)}"
TABLE = f"f32[1048576,128]{TILED}"
STACK = "f32[256,1024,128]{2,1,0:T(8,128)}"
PART = "f32[4,1024,128]{2,1,0:T(8,128)}"
WHOLE, SLICE, TILE = 2**29, 4 * 2**19, 8 * 128 * 4
INDICES = 4 * 3072

# As libtpu 0.0.41 writes `x.at[i].add(u)` of 3,072 rows of a table that is donated.
SCATTER = f"""
%region (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%fused (p0: f32[1048576,128], p1: s32[3072], p2: f32[3072,128]) -> f32[1048576,128] {{
  %p0 = {TABLE} parameter(0)
  %p1 = s32[3072]{{0:T(1024)}} parameter(1)
  %r1 = s32[3072]{{0:T(1024)}} reshape(%p1)
  %p2 = f32[3072,128]{TILED} parameter(2)
  %t2 = f32[3072,128]{TILED} transpose(%p2), dimensions={{0,1}}
  ROOT %scatter = {TABLE} scatter(%p0, %r1, %t2), update_window_dims={{1}}, \
inserted_window_dims={{0}}, scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, to_apply=%region
}}

ENTRY %main (x: f32[1048576,128], i: s32[3072], u: f32[3072,128]) -> f32[1048576,128] {{
  %x = {TABLE} parameter(0)
  %i = s32[3072]{{0:T(1024)}} parameter(1)
  %u = f32[3072,128]{TILED} parameter(2)
  ROOT %kernel = {TABLE} fusion(%x, %i, %u), kind=kCustom, calls=%fused, backend_config={{\
"used_scoped_memory_configs":[{{"memory_space":"1","offset":"0","size":"139264"}}],\
"aliasing_operands":{{"lists":[{{"indices":["0","3"]}}]}}}}
}}
"""


def moved(text):
    return hlo.analyze(text).hbm_bytes


def cycles(text, chip="v5e"):
    program = parse(text)
    return silent.cycles(program, program.entry, program.entry.root, CHIPS[chip])


def fused(body, *, arguments, result, aliases=None, root_shape=None):
    """A program of one fusion; `body` are its lines behind the parameters, `aliases` its lists."""
    said = (
        ""
        if aliases is None
        else f', backend_config={{"aliasing_operands":{{"lists":[{aliases}]}}}}'
    )
    inner = "\n".join(f"  %p{k} = {a} parameter({k})" for k, a in enumerate(arguments))
    outer = "\n".join(f"  %a{k} = {a} parameter({k})" for k, a in enumerate(arguments))
    given = ", ".join(f"%a{k}" for k in range(len(arguments)))
    return f"""
%fused (p: f32[]) -> f32[] {{
{inner}
{body}
}}

ENTRY %main (a: f32[]) -> f32[] {{
{outer}
  ROOT %kernel = {root_shape or result} fusion({given}), kind=kLoop, calls=%fused{said}
}}
"""


def alias(*pairs):
    return ",".join(f'{{"indices":["{a}","{b}"]}}' for a, b in pairs)


# --- arrays in tiles --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ("f32[1024,64]{1,0:T(8,128)}", 1024 * 128),
        ("f32[1024,64]{0,1:T(8,128)}", 1024 * 64),
        ("f32[3,5]{1,0:T(4,128)}", 4 * 128),
        ("f32[10]{0:T(128)}", 128),
        ("f32[2,3]{1,0}", 6),
        ("f32[]{:T(128)}", 1),
    ],
)
def test_an_array_takes_whole_tiles_of_hbm(shape, elements):
    (found,) = shapes_of(shape)
    assert found.hbm_bytes == 4 * elements


def test_parts_of_tiles():
    (words,) = shapes_of("f32[64,256]{1,0:T(8,128)}")
    (halves,) = shapes_of("bf16[64,256]{1,0:T(8,128)(2,1)}")
    assert words.window_bytes((1, 256)) == 2 * TILE
    assert words.window_bytes((1, 256), whole_tiles=False) == 2 * 128 * 4
    assert halves.window_bytes((1, 256)) == 2 * 8 * 128 * 2
    # two rows share one word of 32 bits
    assert halves.window_bytes((1, 256), whole_tiles=False) == 2 * 2 * 128 * 2
    assert words.tiles == {1: 128, 0: 8}


# --- scatters ---------------------------------------------------------------------------------


def test_a_fused_scatter_moves_the_tiles_of_its_rows():
    assert moved(SCATTER) == 3072 * (2 * TILE + 128 * 4) + INDICES


def test_a_scatter_that_changes_no_operand_writes_all():
    elsewhere = SCATTER.replace('{"indices":["0","3"]}', "")
    assert moved(elsewhere) == 2 * WHOLE + 3072 * 128 * 4 + INDICES


def test_more_indices_than_tiles_move_the_array_once():
    few_tiles = SCATTER.replace("1048576", "1024")
    assert moved(few_tiles) == 2 * 1024 * 128 * 4 + 3072 * 128 * 4 + INDICES


def test_a_scatter_that_waits_on_the_chip_or_is_in_order_streams_the_array():
    streamed = 2 * WHOLE + 3072 * 128 * 4 + INDICES
    assert moved(SCATTER.replace('"139264"', f'"{WHOLE}"')) == streamed
    in_order = SCATTER.replace("index_vector_dim=1", "index_vector_dim=1, indices_are_sorted=true")
    assert moved(in_order) == streamed
    on_sparse_core = in_order.replace("}\n\nENTRY", '}, execution_thread="sparsecore"\n\nENTRY')
    assert moved(on_sparse_core) == moved(SCATTER)


def test_a_scatter_alone_counts_as_one_in_a_fusion():
    body = SCATTER[SCATTER.index("%fused") : SCATTER.index("ENTRY")]
    alone = SCATTER.replace(body, "")
    start = alone.index("  ROOT %kernel")
    root = body[body.index("  ROOT %scatter") : body.index("}\n\n") - 1]
    root = root.replace("%p0", "%x").replace("%r1", "%i").replace("%t2", "%u")
    assert moved(alone[:start] + root + "\n}\n") == moved(SCATTER)


def test_a_scatter_into_a_fused_constant_writes_all_of_it():
    filled = SCATTER.replace(
        "ROOT %scatter",
        f"%zero = f32[] constant(0)\n  %z = {TABLE} "
        "broadcast(%zero), dimensions={}\n  ROOT %scatter",
    ).replace("scatter(%p0", "scatter(%z")
    assert moved(filled.replace('{"indices":["0","3"]}', "")) == (WHOLE + 3072 * 128 * 4 + INDICES)


def test_gathered_rows_are_read_alone():
    text = fused(
        f"  ROOT %g = f32[3072,128]{TILED} gather(%p0, %p1), offset_dims={{1}}, "
        "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,128}",
        arguments=[TABLE, "s32[3072]{0:T(1024)}"],
        result=f"f32[3072,128]{TILED}",
    )
    assert moved(text) == 2 * 3072 * 128 * 4 + INDICES


# --- slices -----------------------------------------------------------------------------------

UPDATE = (
    f"  %u = {PART} negate(%p1)\n  %zero = s32[] constant(0)\n"
    f"  ROOT %d = {STACK} dynamic-update-slice(%p0, %u, %p2, %zero, %zero)"
)
ARGUMENTS = [STACK, PART, "s32[]{:T(128)S(6)}"]


def test_a_slice_of_whole_tiles_is_written_and_not_read():
    text = fused(UPDATE, arguments=ARGUMENTS, result=STACK, aliases=alias((0, 3)))
    assert moved(text) == 2 * SLICE
    assert moved(fused(UPDATE, arguments=ARGUMENTS, result=STACK)) == 2 * SLICE  # of the CPU's
    whole = fused(UPDATE, arguments=ARGUMENTS, result=STACK, aliases="")
    assert moved(whole) == 2 * 64 * SLICE + SLICE


@pytest.mark.parametrize(
    ("bits", "times"),
    [(2**32 - 1024, 2), (2**32 - 8 - 1020, 2), (2**32 - 1024 + 7, 1), (2**32 - 1024 + 3, 2)],
)
def test_a_slice_from_any_row_is_read_and_written_in_blocks(bits, times):
    """What is known of the start is which bits of it are zero."""
    known = f'"index_known_bits":[{{"zeroes":"{bits}"}},{{"zeroes":"{2**32 - 1}"}}]'
    text = f"""
ENTRY %main (a: f32[]) -> f32[] {{
  %a = {TABLE} parameter(0)
  %u = f32[1024,128]{TILED} parameter(1)
  %k = s32[]{{:T(128)S(6)}} parameter(2)
  %z = s32[]{{:T(128)S(6)}} constant(0)
  ROOT %d = {TABLE} dynamic-update-slice(%a, %u, %k, %z), backend_config={{{known}}}
}}
"""
    rows = {1: 1024, 2: 1024 + 512}[times]
    assert moved(text) == 1024 * 128 * 4 + times * rows * 128 * 4
    one = text.replace("f32[1024,128]", "f32[1,128]")
    assert moved(one) == TILE + {1: TILE, 2: 2 * TILE}[times]


def test_an_update_from_the_chip_is_written_all_the_same():
    near = fused(
        UPDATE,
        arguments=[STACK, PART.replace("T(8,128)", "T(8,128)S(1)"), ARGUMENTS[2]],
        result=STACK,
        aliases=alias((0, 3)),
    )
    assert moved(near) == SLICE


def test_what_an_update_reads_of_its_target_elsewhere_counts():
    used = UPDATE.replace("negate(%p1)", "add(%p1, %m)")
    mean = f"  %s = f32[] reduce(%p0, %p3), dimensions={{0,1,2}}\n  %m = {PART} broadcast(%s)\n"
    text = fused(
        mean + used,
        arguments=[*ARGUMENTS, "f32[]{:T(128)}"],
        result=STACK,
        aliases=alias((0, 4)),
    )
    assert moved(text) == 64 * SLICE + 2 * SLICE + 4
    read_again = UPDATE.replace(
        "negate(%p1)",
        f"add(%p1, %old)\n  %old = {PART} dynamic-slice(%p0, %p2, %p2, %p2)",
    )
    lines = read_again.split("\n")
    lines = [lines[1], lines[0], *lines[2:]]
    text = fused("\n".join(lines), arguments=ARGUMENTS, result=STACK, aliases=alias((0, 3)))
    assert moved(text) == 3 * SLICE


def test_updates_one_after_the_other_and_several_results():
    twice = UPDATE.replace("ROOT %d", "%d") + (
        f"\n  ROOT %e = {STACK} dynamic-update-slice(%d, %p1, %zero, %zero, %zero)"
    )
    text = fused(twice, arguments=ARGUMENTS, result=STACK, aliases=alias((0, 3)))
    assert moved(text) == 3 * SLICE
    both = UPDATE.replace("ROOT %d", "%d") + (
        f"\n  %e = {STACK} dynamic-update-slice(%p3, %p1, %p2, %zero, %zero)"
        f"\n  ROOT %t = ({STACK}, {STACK}) tuple(%d, %e)"
    )
    arguments = [*ARGUMENTS, STACK]
    text = fused(
        both, arguments=arguments, result=f"({STACK}, {STACK})", aliases=alias((0, 4), (3, 5))
    )
    assert moved(text) == 3 * SLICE
    one = fused(both, arguments=arguments, result=f"({STACK}, {STACK})", aliases=alias((0, 4)))
    assert moved(one) == 2 * SLICE + 2 * 64 * SLICE


def test_an_update_of_what_was_computed_writes_all():
    scaled = f"  %h = {STACK} multiply(%p0, %p0)\n" + UPDATE.replace("%p0, %u", "%h, %u")
    text = fused(scaled, arguments=ARGUMENTS, result=STACK, aliases=alias((0, 3)))
    assert moved(text) == 2 * 64 * SLICE + SLICE


def test_a_copy_counts_as_bytes_read_and_written():
    text = f"""
ENTRY %main (a: f32[]) -> f32[] {{
  %a = {TABLE} parameter(0)
  ROOT %c = {TABLE} copy(%a)
}}
"""
    assert moved(text) == 2 * WHOLE


# --- kernels of others ------------------------------------------------------------------------

BY_HAND = f"""
ENTRY %main (a: f32[]) -> f32[] {{
  %k = s32[1]{{0:T(128)S(6)}} parameter(0)
  %u = f32[512,128]{TILED} parameter(1)
  %x = {TABLE} parameter(2)
  ROOT %h = {TABLE} custom-call(%k, %u, %x), custom_call_target="tpu_custom_call", \
output_to_operand_aliasing={{{{}}: (2, {{}})}}, backend_config={{"custom_call_config":{{}}}}
}}
"""


def test_a_hand_written_update_moves_as_much_as_it_is_given():
    block = 512 * 128 * 4
    assert moved(BY_HAND) == pytest.approx(3 * block, rel=1e-2)
    assert moved(BY_HAND.replace("output_to_operand_aliasing", "other")) == block + 2 * WHOLE
    on_chip = BY_HAND.replace(f"f32[512,128]{TILED}", "f32[512,128]{1,0:T(8,128)S(1)}")
    assert moved(on_chip) == pytest.approx(2 * block, rel=1e-2)


# As libtpu 0.0.50 writes it for tpu7x: `call-update` gives the kernel its arrays.
OFFLOADED = (
    SCATTER.replace("}\n\nENTRY", '}, execution_thread="sparsecore"\n\nENTRY')
    .replace("ENTRY %main (x", "%called (x")
    .replace('"3"]}]}}\n}\n', '"3"]}]}}\n}, execution_thread="sparsecore"\n')
    + f"""
ENTRY %main (x: f32[]) -> f32[] {{
  %x = {TABLE} parameter(0)
  %i = s32[3072]{{0:T(1024)}} parameter(1)
  %u = f32[3072,128]{TILED} parameter(2)
  %start = ((), (), (s32[1]{{0:T(128)S(2)}})) call-start(), \
async_execution_thread="sparsecore", to_apply=%called
  %update = (({TABLE}, s32[3072]{{0:T(1024)}}), {TABLE}) call-update(%start, %x, %i, %u)
  ROOT %done = {TABLE} call-done(%update)
}}
"""
)


def test_what_a_sparse_core_updates_counts_once_and_takes_no_cycles_of_the_main_core():
    wire = hlo.Wire.of({"data": 1}, (), Topology.parse("tpu7x:2x2x1"))
    found = hlo.analyze(OFFLOADED, wire=wire)
    assert found.hbm_bytes == moved(SCATTER)
    assert found.cycles == found.silent_cycles == 0


# --- cycles of kernels that the compiler says nothing of --------------------------------------


def test_a_scatter_takes_instructions_for_each_index_or_bytes():
    # v5e, libtpu 0.0.41 and 0.0.50: 173,280 and 175,980 scheduled cycles
    assert cycles(SCATTER) == pytest.approx(175_000, rel=0.1)
    wide = SCATTER.replace("1048576,128", "1048576,2048").replace("3072,128", "3072,2048")
    assert cycles(wide) == round(moved(wide) / (819e9 / 1.5e9))
    assert cycles(SCATTER, "v6e") > cycles(SCATTER)


def test_kernels_with_an_estimate_are_left_to_the_compiler():
    stated = SCATTER.replace("backend_config={", 'backend_config={"estimated_cycles":"1000",')
    assert cycles(stated) == 0
    wire = hlo.Wire.of({"data": 1}, (), Topology.parse("v5e:1x1"))
    assert hlo.analyze(stated, wire=wire).cycles == 1000
    found = hlo.analyze(SCATTER, wire=wire)
    assert found.cycles == found.silent_cycles == cycles(SCATTER)
    assert hlo.analyze(SCATTER).cycles == 0  # of no chip


@pytest.mark.parametrize("opcode", ["copy-start", "all-reduce", "custom-call", "copy-done"])
def test_what_runs_beside_the_core_takes_none_of_its_cycles(opcode):
    text = f"""
%region (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (a: f32[]) -> f32[] {{
  %a = {TABLE} parameter(0)
  ROOT %r = ({TABLE}, {TABLE}) {opcode}(%a), to_apply=%region
}}
"""
    assert cycles(text) == 0


def test_a_sort_takes_the_steps_of_a_bitonic_network():
    text = """
ENTRY %main (a: f32[]) -> f32[] {
  %a = s32[262144]{0:T(1024)S(1)} parameter(0)
  %b = s32[262144]{0:T(1024)S(1)} parameter(1)
  ROOT %s = (s32[262144]{0:T(1024)S(1)}, s32[262144]{0:T(1024)S(1)}) sort(%a, %b), dimensions={0}
}
"""
    assert cycles(text) == pytest.approx(289_539, rel=0.05)  # v5e, libtpu 0.0.41


# --- by the compilers -------------------------------------------------------------------------


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, i, u: x.at[i].add(u), (spec(64, dtype="int32"), spec(64, 128))),
        (
            lambda x, u, k: jax.lax.dynamic_update_slice(x, u * 2, (k, 0)),
            (spec(64, 128), spec(dtype="int32")),
        ),
        (
            lambda x, u: jax.lax.fori_loop(
                0, 64, lambda k, x: jax.lax.dynamic_update_index_in_dim(x, u[k] * 2, k, 0), x
            ),
            (spec(64, 128),),
        ),
    ],
    ids=["scatter", "slice", "loop"],
)
def test_an_update_in_place_by_the_cpu_compiler(function, arguments):
    """Of 128 MiB."""
    jitted = jax.jit(function, donate_argnums=0)
    text = jitted.lower(spec(2**18, 128), *arguments).compile().as_text()
    assert 2 * 64 * 128 * 4 <= moved(text) < 64 * 128 * 4 * 5


def test_a_copy_that_must_be_made_counts_by_the_cpu_compiler():
    def kept(x, u):
        return x.at[7].set(u), jnp.sum(x * x)

    text = jax.jit(kept).lower(spec(2**16, 128), spec(128)).compile().as_text()
    assert moved(text) >= 2 * 2**16 * 128 * 4


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "chip", ["v5e", *(pytest.param(each, marks=pytest.mark.slow) for each in ("v6e", "tpu7x"))]
)
def test_estimates_are_those_of_the_compilers_schedule(chip):
    """Bytes of every kernel, and cycles where the compiler states none."""
    rows = updates.in_processes([chip], kernels=True)[chip]
    assert len({row["case"] for row in rows if updates.pairs(row)}) >= 20
    for row in rows:
        for here, compiled in updates.pairs(row):
            assert compiled / updates.MOST_APART <= here <= compiled * updates.MOST_APART, row


def test_traffic_of_a_program_without_slices_is_its_arrays():
    text = f"""
ENTRY %main (a: f32[]) -> f32[] {{
  %a = {TABLE} parameter(0)
  %b = {TABLE} parameter(1)
  ROOT %c = {TABLE} add(%a, %b)
}}
"""
    program = parse(text)
    assert traffic.hbm_bytes(program, program.entry, program.entry.root) == 3 * WHOLE
