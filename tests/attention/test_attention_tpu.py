"""Keras transformers compiled by the real TPU compiler, for slices nobody has attached.

`python tests/attention/test_attention_tpu.py --all` compiles the longer list (about 7 CPU minutes).
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

import pytest

HEADS, HEAD_WIDTH, BATCH = 8, 32, 16
# Neither a length nor a padded length of any case: a buffer (.., T, T) is recognised by its sizes.
WIDTH, VOCABULARY = 192, 96
MESHES = {
    "dp": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tp": {"data": 2, "model": 4},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One train step to compile."""

    mesh: str = "dp"
    time: int = 1024
    mask: str = "causal"
    kv_heads: int = HEADS
    dtype: str = "mixed_bfloat16"
    topology: str = "v5e:2x4"
    batch: int = BATCH
    flash: bool = True


# Each mesh, length class, kind of mask, of heads, dtype and chip; `--all` has their pairs.
FEW = (
    Case("dp", 1024, "causal", 8, "mixed_bfloat16"),
    Case("fsdp", 1024, "bias", 2, "float32"),
    Case("tp", 1024, "keys", 1, "float32"),
    Case("tp", 500, "padding", 2, "mixed_bfloat16", topology="v5p:2x2x2", batch=13),
)


def all_cases():
    """Every pair of values of two settings, in 36 of the 360 combinations."""
    masks = ("none", "causal", "padding", "keys", "bias")
    grid = itertools.product(
        MESHES, (1024, 256, 300, 100), masks, (8, 2, 1), ("mixed_bfloat16", "float32")
    )
    grid = random.Random(0).sample(list(grid), k=360)
    chosen, seen = [], set()

    def new(case):
        return set(itertools.combinations(enumerate(case), 3)) - seen

    while len(chosen) < 36:
        case = max(grid, key=lambda c: len(new(c)))
        seen |= new(case)
        topology = ("v5e:2x4", "v5p:2x2x2")[len(chosen) % 3 == 2]
        chosen.append(Case(*case, topology=topology, batch=(16, 13)[len(chosen) % 4 == 3]))
    return chosen


def build(case):
    import keras
    from keras import layers, ops

    class Biased(layers.Layer):
        """Grouped attention with a learned bias, through `keras.ops`."""

        def build(self, shape):
            dense = functools.partial(layers.EinsumDense, "btd,dnh->btnh")
            self.q = dense(output_shape=(None, HEADS, HEAD_WIDTH), name="query")
            self.k = dense(output_shape=(None, case.kv_heads, HEAD_WIDTH), name="key")
            self.v = dense(output_shape=(None, case.kv_heads, HEAD_WIDTH), name="value")
            self.out = layers.EinsumDense(
                "btnh,nhd->btd", output_shape=(None, WIDTH), name="attention_output"
            )
            for layer in (self.q, self.k, self.v):
                layer.build(shape)
            self.out.build((None, None, HEADS, HEAD_WIDTH))
            self.bias = self.add_weight(shape=(HEADS, case.time, case.time), name="bias")

        def call(self, x):
            return self.out(
                ops.dot_product_attention(self.q(x), self.k(x), self.v(x), bias=self.bias)
            )

    def attend(x, valid):
        if case.mask == "bias":
            return Biased()(x)
        options = {"use_causal_mask": case.mask == "causal"}
        if case.mask == "keys":
            options["attention_mask"] = valid
        if case.kv_heads == HEADS:
            return layers.MultiHeadAttention(HEADS, HEAD_WIDTH)(x, x, **options)
        return layers.GroupQueryAttention(HEAD_WIDTH, HEADS, case.kv_heads)(x, x, **options)

    keras.config.set_dtype_policy(case.dtype)
    if not case.flash:
        keras.config.disable_flash_attention()
    tokens = keras.Input((case.time,), dtype="int32")
    valid = ops.expand_dims(ops.not_equal(tokens, 0), 1)
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=case.mask == "padding")(tokens)
    for _ in range(2):
        x = layers.Add()([x, attend(layers.LayerNormalization()(x), valid)])
        h = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(h)])
    model = keras.Model(tokens, layers.Dense(VOCABULARY, dtype="float32")(x))
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True
    )
    model.optimizer.build(model.trainable_variables)
    return model


def layout(case, variable_path, shape):
    """The split of one variable, as its user would write it."""
    from jax.sharding import PartitionSpec as P

    sizes = MESHES[case.mesh]
    if case.mesh == "fsdp":
        dims = [d for d, size in enumerate(shape) if size % sizes["fsdp"] == 0 and len(shape) > 1]
        return P(*[None] * dims[-1], "fsdp") if dims else P()
    if case.mesh == "tp":
        for dim, size in enumerate(shape):
            if re.search("query|key|value|attention_output", variable_path) and size == HEADS:
                return P(*[None] * dim, "model")
    return P()


def compile_case(case):
    import jax
    import numpy as np
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from keras_tpu_dist import TPUStrategy

    model = build(case)
    sizes = MESHES[case.mesh]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    mesh = Mesh(
        mesh_utils.create_device_mesh(
            tuple(sizes.values()), devices, allow_split_physical_axes=True
        ),
        tuple(sizes),
    )
    strategy = TPUStrategy(mesh)

    def abstract(v):
        spec = layout(case, v.path, v.shape)
        return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, spec))

    state = tuple(
        [abstract(v) for v in group]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    rows = NamedSharding(mesh, P(strategy.data_axes))
    padded = -(-case.batch // strategy.num_replicas_in_sync) * strategy.num_replicas_in_sync
    batch = jax.ShapeDtypeStruct((padded, case.time), np.int32, sharding=rows)

    def trim(x):  # a ragged batch, as the strategy hands it to Keras's step
        return jax.lax.with_sharding_constraint(x[: case.batch], rows)

    def step(state, batch):
        return model.train_step(state, jax.tree.map(trim, batch))

    start = time.process_time()
    with strategy.scope():
        lowered = jax.jit(step, donate_argnums=0).lower(state, (batch, batch))
    compiled = lowered.compile(compiler_options={"xla_optimization_level": "EFFORT_O1"})
    text = compiled.as_text()
    return {
        "kernels": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
        "partitions": int(re.search(r"num_partitions=(\d+)", text).group(1)),
        "squares": square_floats(text, case.time),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def square_floats(text, time):
    """Float buffers that hold a `(time, time)` matrix; padded lengths count too."""
    padded = {str(time), str(-(-time // 128) * 128)}
    shapes = set(re.findall(r"\b(?:f32|bf16)\[[\d,]+\]", text))
    return sorted(
        s for s in shapes if sum(d in padded for d in s[:-1].split("[")[1].split(",")) > 1
    )


def compile_apart(cases, timeout):
    """Compiles in a fresh process: an impossible slice aborts, a fork after a compile hangs."""
    from keras_tpu_dist.hardware.libtpu import libtpu_environment

    environment = dict(
        os.environ | libtpu_environment(),
        KERAS_BACKEND="jax",
        PYTHONPATH=str(pathlib.Path(__file__).parents[2]),
    )
    done = subprocess.run(
        [sys.executable, __file__, json.dumps([dataclasses.asdict(c) for c in cases])],
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_train_steps_compile():
    for case, result in zip(FEW, compile_apart(FEW, timeout=900), strict=True):
        assert result["partitions"] == 8, case
        if case.mask == "bias":
            assert result["kernels"] == 0, case
            # A bias split by fsdp does not pull the whole batch onto every device.
            assert result["squares"], case
            for shape in result["squares"]:
                assert str(case.batch) not in re.findall(r"\d+", shape), (case, shape)
            continue
        # forward, dq and dkv of two blocks; shorter ones are XLA's
        assert result["kernels"] == 6 * (case.time >= 256), case
        if case.time == 1024:  # shorter ones are as long as other dimensions are wide
            assert result["squares"] == [], case


def main(arguments):
    everything = arguments == ["--all"]
    cases = all_cases() if everything else [Case(**c) for c in json.loads(arguments[0])]
    for case in cases:
        try:
            result = compile_case(case)
        except Exception as error:
            if not everything:
                raise
            result = {"error": str(error)[:300]}
        print(json.dumps({**dataclasses.asdict(case), **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
