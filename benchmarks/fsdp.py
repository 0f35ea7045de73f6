"""A decoder under "fsdp" beside the same one in plain JAX by hand; nothing runs on a chip.

    python benchmarks/fsdp.py                     # both rows, effort exact
    python benchmarks/fsdp.py 2048 --effort quick

Compiles a train step of each for the same slice under the same options: bfloat16, splash
attention, Adam, 2048 tokens a row, layers one by one without recomputation. By hand: weights and
Adam's means are split over all chips; a layer's weights are gathered in bfloat16, as in MaxText, by
constraints; gradients are reduce-scattered to the same layout; the loss uses logits in float32.
Prints estimates of the TPU compiler: cycles at the clock, and the time that chips wait for
collectives.

Needs libtpu (pip install 'jax[tpu]'); no TPU.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import functools
import os

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext import HEAD, TIME, VOCABULARY, Shape

from keras_tpu_dist.hardware.libtpu import libtpu_environment
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.text import duration_text, size_text
from keras_tpu_dist.tools.dryrun.compile import EFFORTS
from keras_tpu_dist.tools.dryrun.figures import estimate
from keras_tpu_dist.tools.hlo.analysis import analyze
from keras_tpu_dist.tools.hlo.wire import Wire

# Name: slice, shape (with layers and rows a chip).
ROWS = {
    "2048": ("v5e:4x4", Shape(2048, 16, 8192, 4, rows=2, published=0.0)),
    "16B": ("v5e:16x16", Shape(4096, 64, 28_672, 2, rows=2, published=0.0)),
}
AXIS = "fsdp"
RATE, BETA_1, BETA_2, EPSILON = 0.001, 0.9, 0.999, 1e-7
HEADER = ("decoder", "slice", "step", "kernels", "not overlapped", "peak memory")


def ours(shape: Shape, topology: str, effort: str):
    """A dry run of the Keras model under "fsdp"."""

    def build():
        model = maxtext.decoder(shape, shape.layers)
        ktd.scan_blocks(model, False)
        return model

    strategy = ktd.TPUStrategy(None, "fsdp", topology=topology)
    rows = shape.rows * strategy.mesh.size
    return ktd.dry_run(build, strategy, batch_size=rows, effort=effort)


def weights(shape: Shape):
    """Shapes of all weights: the table, of each layer, the last norm, the head."""
    width, inner = shape.width, shape.heads * HEAD
    block = {
        "norm_1": (width,),
        "query": (width, inner),
        "key": (width, inner),
        "value": (width, inner),
        "output": (inner, width),
        "norm_2": (width,),
        "gate": (width, shape.mlp),
        "up": (width, shape.mlp),
        "down": (shape.mlp, width),
    }
    ends = {"table": (VOCABULARY, width), "norm": (width,), "head": (width, VOCABULARY)}
    return {"blocks": [block] * shape.layers, **ends}


def norm(x, scale):
    """RMS normalization, in float32."""
    x = x.astype("float32")
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return (x * scale).astype("bfloat16")


def attention(mesh, query, key, value):
    """Causal splash attention of each device's rows, `(batch, time, heads, width)`."""
    heads = query.shape[2]
    mask = splash.MultiHeadMask([splash.CausalMask((TIME, TIME))] * heads)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes = splash.BlockSizes(**{f"block_{name}": 512 for name in names})
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    def device(*arrays):
        first = [jnp.swapaxes(x, 1, 2) for x in arrays]
        return jnp.swapaxes(jax.vmap(kernel)(*first), 1, 2)

    split = P(AXIS)
    wrapped = jax.shard_map(
        device, mesh=mesh, in_specs=(split,) * 3, out_specs=split, check_vma=False
    )
    return wrapped(query * HEAD**-0.5, key, value)


def loss(mesh, params, tokens, targets):
    """The mean cross-entropy of a batch."""
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))

    def gathered(w):
        return jax.lax.with_sharding_constraint(w.astype("bfloat16"), whole)

    def by_rows(x):
        return jax.lax.with_sharding_constraint(x, rows)

    def block(x, w):
        h = norm(x, w["norm_1"])
        parts = [(h @ gathered(w[n])).reshape(*h.shape[:2], -1, HEAD) for n in QKV]
        mixed = attention(mesh, *parts).reshape(*h.shape[:2], -1)
        x = by_rows(x + mixed @ gathered(w["output"]))
        h = norm(x, w["norm_2"])
        inner = jax.nn.silu(h @ gathered(w["gate"])) * (h @ gathered(w["up"]))
        return by_rows(x + inner @ gathered(w["down"]))

    x = by_rows(gathered(params["table"])[tokens])
    for w in params["blocks"]:
        x = block(x, w)
    logits = norm(x, params["norm"]) @ gathered(params["head"])
    chosen = jax.nn.log_softmax(logits.astype("float32"))
    return -jnp.take_along_axis(chosen, targets[..., None], -1).mean()


QKV = ("query", "key", "value")


def step(mesh, state, tokens, targets):
    """A train step: parameters, Adam's means and the number of steps, all updated."""
    params, first, second, count = state
    value, grads = jax.value_and_grad(functools.partial(loss, mesh))(params, tokens, targets)
    count = count + 1
    rate = RATE * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)
    first = jax.tree.map(lambda m, g: m + (1 - BETA_1) * (g - m), first, grads)
    second = jax.tree.map(lambda v, g: v + (1 - BETA_2) * (g * g - v), second, grads)

    def moved(w, m, v):
        return w - rate * m / (jnp.sqrt(v) + EPSILON)

    return (jax.tree.map(moved, params, first, second), first, second, count), value


def layout(shape):
    """Splits the largest dimension; norms are replicated."""
    if len(shape) == 1:
        return P()
    return P(AXIS, None) if shape[0] > shape[1] else P(None, AXIS)


def by_hand(shape: Shape, topology: Topology, options, effort: str):
    """The compiled step by hand."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(**topology.libtpu_arguments()).devices
    mesh = Mesh(np.array(devices), (AXIS,))

    def spec(shape, split, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))

    def is_shape(x):
        return isinstance(x, tuple)

    params = jax.tree.map(lambda s: spec(s, layout(s)), weights(shape), is_leaf=is_shape)
    state = (params, params, params, spec((), P()))
    tokens = spec((shape.rows * len(devices), TIME), P(AXIS), "int32")
    out = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P())
    jitted = jax.jit(functools.partial(step, mesh), donate_argnums=0, out_shardings=out)
    return jitted.lower(state, tokens, tokens).compile({**EFFORTS[effort], **options})


def main():
    """Prints the table, and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("decoders", nargs="*", default=[*ROWS])
    parser.add_argument("--effort", default="exact", choices=[*EFFORTS])
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for name in asked.decoders:
        topology, shape = Topology.parse(ROWS[name][0]), ROWS[name][1]
        options = ktd.TPUStrategy(None, "fsdp", topology=topology.name).runner.compiler_options
        run = ours(shape, topology.name, asked.effort)
        rows = [("keras_tpu_dist", run.estimate, run.memory["peak"])]
        os.environ.update(libtpu_environment())
        compiled = by_hand(shape, topology, options, asked.effort)
        devices = topology.devices()
        wire = Wire.of({AXIS: len(devices)}, devices, topology)
        times = estimate(analyze(compiled.as_text(), wire=wire), topology, asked.effort)
        rows.append(("by hand", times, compiled.memory_analysis().peak_memory_in_bytes))
        for who, times, peak in rows:
            waits = f"{duration_text(times.exposed_link)}, {times.exposed_link / times.step:.1%}"
            cells = f"{name}, {who}", topology.name, duration_text(times.step)
            cells += duration_text(times.kernels), waits, size_text(peak)
            print("| " + " | ".join(cells) + " |", flush=True)
        (_, a, a_peak), (_, b, b_peak) = rows
        print(f"{name}: {a.step / b.step:.2f} of its step, {a_peak / b_peak:.2f} of its memory")


if __name__ == "__main__":
    main()
