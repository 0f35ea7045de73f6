"""Programs whose time on TPUs was published, rebuilt as plain Keras models and compiled for them.

    python benchmarks/published.py                  # compiles what benchmarks/published.jsonl lacks
    python benchmarks/published.py "v5e 16B" --again
    python benchmarks/published.py --effort quick
    python benchmarks/published.py --table          # the table and its errors; compiles nothing
    python benchmarks/published.py "v5e 16B" --search   # beside the choice of `ktd.search`

Each row is a whole train step (or one token), with the shapes, batch, slice and parallelism of its
source, mixed_bfloat16, Adam, the blocks as one loop (`ktd.scan_blocks`), compiled by libtpu. What
differs is in the row. No chip is needed, and none was used here: others measured the published
figures, with their programs. A row is added to the file when it is done, so that the command goes
on where it stopped.

Some sources publish operations per second of a chip instead of seconds. Their seconds are the
model's operations by MaxText's formula, attention in full as it counted until 2025.

References:
    https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/tpu
    https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training
"""

import argparse
import functools
import json
import math
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import jax
import keras
from keras import ops

from keras_tpu_dist.hardware.measured import PublishedRatios
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
EFFORTS = ("exact", "quick")
RECORD = Path(__file__).with_name("published.jsonl")
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/tpu/"
RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/"


class Experts(L.Layer):
    """Two of several gated feed-forwards for each token; each takes so many tokens of a row.

    Tokens are sent by products with one-hot places, as in MaxText with `sparse_matmul=False`.
    """

    def __init__(self, count, mlp, capacity=1.25, **kwargs):
        super().__init__(**kwargs)
        self.count, self.mlp, self.capacity = count, mlp, capacity

    def build(self, shape):
        inner, outer = (self.count, shape[-1], self.mlp), (self.count, self.mlp, shape[-1])
        self.router = self.add_weight(shape=(shape[-1], self.count), name="router")
        self.gate = self.add_weight(shape=inner, name="gate")
        self.up = self.add_weight(shape=inner, name="up")
        self.down = self.add_weight(shape=outer, name="down")

    def call(self, x):
        places = int(2 * self.capacity * x.shape[1] / self.count)
        gates = ops.softmax(ops.cast(x @ self.router, "float32"))
        best, which = ops.top_k(gates, 2)
        weights = ops.sum(ops.one_hot(which, self.count) * best[..., None], -2)
        chosen = ops.cast(weights > 0, "float32")
        place = ops.cast(ops.cumsum(chosen, 1) * chosen - 1, "int32")
        sent = ops.cast(ops.one_hot(place, places), x.dtype)
        weighed = sent * ops.cast(weights, x.dtype)[..., None]
        inner = ops.einsum("btec,btd->ebcd", sent, x)
        gate = ops.silu(ops.einsum("ebcd,edf->ebcf", inner, self.gate))
        inner = gate * ops.einsum("ebcd,edf->ebcf", inner, self.up)
        inner = ops.einsum("ebcf,efd->ebcd", inner, self.down)
        return ops.einsum("ebcd,btec->btd", inner, weighed)

    def get_config(self):
        return super().get_config() | {
            "count": self.count,
            "mlp": self.mlp,
            "capacity": self.capacity,
        }


class Block(L.Layer):
    """Norm, causal attention, norm, feed-forward or experts."""

    def __init__(self, head, heads, kv_heads, mlp, gated, experts=0, **kwargs):
        super().__init__(**kwargs)
        self.head, self.heads, self.kv_heads = head, heads, kv_heads
        self.mlp, self.gated, self.experts = mlp, gated, experts

    def build(self, shape):
        self.norm_1, self.norm_2 = L.RMSNormalization(), L.RMSNormalization()
        self.attention = L.GroupQueryAttention(self.head, self.heads, self.kv_heads, use_bias=False)
        self.attention.build(shape, shape)
        layers = [self.norm_1, self.norm_2]
        if self.experts:
            self.mixture = Experts(self.experts, self.mlp)
            layers.append(self.mixture)
        else:
            self.up = L.Dense(self.mlp, None if self.gated else "relu", use_bias=False)
            self.down = L.Dense(shape[-1], use_bias=False)
            self.down.build((*shape[:-1], self.mlp))
            layers.append(self.up)
        if self.gated and not self.experts:
            self.gate = L.Dense(self.mlp, "silu", use_bias=False)
            layers.append(self.gate)
        for layer in layers:
            layer.build(shape)

    def call(self, x):
        h = self.norm_1(x)
        x = x + self.attention(h, h, use_causal_mask=True)
        h = self.norm_2(x)
        if self.experts:
            return x + self.mixture(h)
        hidden = self.gate(h) * self.up(h) if self.gated else self.up(h)
        return x + self.down(hidden)

    def get_config(self):
        names = ("head", "heads", "kv_heads", "mlp", "gated", "experts")
        return super().get_config() | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Decoder:
    """The shapes of a language model."""

    width: int
    heads: int
    kv_heads: int
    mlp: int
    layers: int
    vocabulary: int = 32_000
    time: int = 2048
    head: int = 128
    gated: bool = True
    experts: int = 0

    def build(self):
        """The model, compiled, its blocks as one loop."""
        keras.config.set_dtype_policy("mixed_bfloat16")
        tokens = keras.Input((self.time,), dtype="int32")
        x = L.Embedding(self.vocabulary, self.width)(tokens)
        for i in range(self.layers):
            block = Block(self.head, self.heads, self.kv_heads, self.mlp, self.gated, self.experts)
            block.name = f"block_{i}"
            x = block(x)
        x = L.RMSNormalization()(x)
        logits = L.Dense(self.vocabulary, use_bias=False, name="head")(x)
        model = keras.Model(tokens, logits, name="decoder")
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        ktd.scan_blocks(model)
        return model


@dataclass(frozen=True)
class Bert:
    """BERT-large for pretraining: 76 masked tokens and the next sentence of each row."""

    time: int = 512
    masked: int = 76

    def build(self):
        """The model, compiled."""
        keras.config.set_dtype_policy("mixed_bfloat16")
        tokens = keras.Input((self.time,), dtype="int32", name="tokens")
        segments = keras.Input((self.time,), dtype="int32", name="segments")
        masked = keras.Input((self.masked,), dtype="int32", name="masked")
        places = L.Embedding(self.time, 1024)(ops.zeros_like(tokens) + ops.arange(self.time))
        x = L.Embedding(30_522, 1024)(tokens) + L.Embedding(2, 1024)(segments) + places
        x = L.Dropout(0.1)(L.LayerNormalization()(x))
        for _ in range(24):
            y = L.MultiHeadAttention(16, 64, dropout=0.1)(x, x)
            x = L.LayerNormalization()(x + L.Dropout(0.1)(y))
            y = L.Dense(1024)(L.Dense(4096, "gelu")(x))
            x = L.LayerNormalization()(x + L.Dropout(0.1)(y))
        chosen = ops.take_along_axis(x, ops.expand_dims(masked, -1), 1)
        chosen = L.LayerNormalization()(L.Dense(1024, "gelu")(chosen))
        words = L.Dense(30_522, name="words")(chosen)
        next_one = L.Dense(2, name="next")(L.Dense(1024, "tanh")(x[:, 0]))
        model = keras.Model([tokens, segments, masked], [words, next_one], name="bert")
        losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in range(2)]
        model.compile(keras.optimizers.Lamb(), losses)
        return model


@dataclass(frozen=True)
class ResNet:
    """ResNet-50 v1.5: the second convolution of a block has the stride."""

    def build(self):
        """The model, compiled."""
        keras.config.set_dtype_policy("mixed_bfloat16")
        images = keras.Input((224, 224, 3))
        x = L.MaxPooling2D(3, 2, "same")(self.normed(images, 64, 7, 2))
        for filters, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                strides = stride if number == 0 else 1
                y = self.normed(self.normed(x, filters, 1), filters, 3, strides)
                y = self.normed(y, 4 * filters, 1, relu=False)
                x = x if number else self.normed(x, 4 * filters, 1, stride, relu=False)
                x = L.ReLU()(x + y)
        logits = L.Dense(1000)(L.GlobalAveragePooling2D()(x))
        model = keras.Model(images, logits, name="resnet")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=2e-4), loss)
        return model

    @staticmethod
    def normed(x, filters, size, strides=1, relu=True):
        """A convolution and its normalization."""
        x = L.Conv2D(filters, size, strides, "same", use_bias=False)(x)
        x = L.BatchNormalization()(x)
        return L.ReLU()(x) if relu else x


@dataclass(frozen=True)
class Serving:
    """A KerasHub Llama that generates, in bfloat16.

    A model of all layers would compile for hours, as tokens are not generated by a loop over
    layers. Two models of few layers are compiled: every layer takes the same, so that the time of
    all follows exactly from both.
    """

    layers: int = 80
    few: tuple[int, int] = (2, 4)

    def build(self, layers):
        """A model with so many layers."""
        from keras_hub import models as hub

        keras.config.set_dtype_policy("bfloat16")
        backbone = hub.Llama3Backbone(
            vocabulary_size=128_256,
            num_layers=layers,
            num_query_heads=64,
            num_key_value_heads=8,
            hidden_dim=8192,
            intermediate_dim=28_672,
        )
        model = hub.Llama3CausalLM(backbone)
        model.compile(sampler="greedy")
        return model

    def run(self, row, effort):
        """The dry run of the larger model, with the times of all layers."""
        prompts = jax.ShapeDtypeStruct((row.batch, 2000), "int32")
        runs = [
            ktd.dry_run(
                functools.partial(self.build, layers),
                ktd.TPUStrategy(dict(row.mesh), "tensor_parallel", topology=row.slice),
                x={"token_ids": prompts, "padding_mask": prompts},
                batch_size=row.batch,
                mode="generate",
                effort=effort,
            )
            for layers in self.few
        ]
        one, two = (run.estimate for run in runs)
        more = (self.layers - self.few[0]) / (self.few[1] - self.few[0])
        names = ("step", "low", "high", "exposed_link", "compute", "hbm", "link", "kernels")
        times = {
            name: getattr(one, name) + more * (getattr(two, name) - getattr(one, name))
            for name in names
        }
        return replace(runs[1], estimate=replace(two, **times))


@dataclass(frozen=True)
class Row:
    """A published measurement, and the program that is compiled for it.

    Attributes:
        model: What builds the model.
        slice: The topology's name.
        mesh: The axes.
        rows: Rows of the global batch for each device.
        source: Where it was published, and what.
        seconds: Published seconds of a step or token, or `None`.
        tflops: Published TFLOP/s of a chip, if no seconds were.
        differs: What is not as in the source.
        same_mesh: Whether the source had this mesh; if not, its ratio foretells nothing.
        remat: What is computed again; see `ktd.remat`.
    """

    model: Any
    slice: str
    mesh: Mapping[str, int]
    rows: float
    source: str
    seconds: float | None = None
    tflops: float | None = None
    differs: str = ""
    same_mesh: bool = True
    remat: Any = "full"

    def strategy(self):
        """The strategy, on the slice."""
        plan: Any = "fsdp" if "fsdp" in self.mesh else None
        if "model" in self.mesh:
            # MaxText splits activations between blocks, too.
            plan = ktd.Planner("auto", between_blocks="auto")
        # Their programs computed all logits at once; where they did not, the row says so.
        return ktd.TPUStrategy(
            dict(self.mesh), plan, topology=self.slice, remat=self.remat, head="whole"
        )

    @property
    def batch(self) -> int:
        """Rows of the global batch."""
        return round(self.rows * math.prod(self.mesh.values()))


def scaled(scale: int) -> Decoder:
    """MaxText's model of `global_parameter_scale`: heads and MLP, width, layers double in turn."""
    rounds, rest = divmod(scale.bit_length() - 1, 3)
    wide, deep = 2 ** (rounds + (rest > 1)), 2**rounds
    heads = 2 ** (rounds + (rest > 0))
    return Decoder(2048 * wide, 16 * heads, 16 * heads, 7168 * heads, 16 * deep)


LLAMA_8B = functools.partial(Decoder, 4096, 32, 8, 14_336, 32, 128_256, 8192)
LLAMA_70B = functools.partial(Decoder, 8192, 64, 8, 28_672, 80, 128_256)
LLAMA_405B = functools.partial(Decoder, 16_384, 128, 8, 53_248, 126, 128_256, 8192)
V4 = MAXTEXT + "v4/README.md"
V5E = MAXTEXT + "v5e/README.md"
V5P = MAXTEXT + "v5p/README.md"
MLPERF = (
    "https://github.com/mlcommons/training_results_v0.7/tree/master/Google/results/"
    "tpu-v3-32-TF2.0/{}"
)
SERVING = (
    "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/inference/trillium/vLLM/Llama3.x"
)
SERVED = (
    "vLLM, whose median has the prompts of other users in it; a cache of 2,000 tokens a user, all "
    "of it read; 2 and 4 of 80 layers compiled"
)
OLD = "shapes of 2023 by the published sizes: heads of 256, no gate; 2,048 tokens assumed"
BY_TIME = "they split features of activations between blocks over the tensor axis, here time"
HOST = "they keep queries, keys and values on the host, here they are computed again"
ROWS = {
    "v5e 16B": Row(scaled(16), "v5e:16x16", {"fsdp": 256}, 6, V5E, tflops=120),
    "v5e 32B": Row(
        *(scaled(32), "v5e:16x16", {"fsdp": 256}, 3, V5E),
        tflops=132,
        differs="3 rows a chip instead of 4, for memory",
    ),
    "v5e 64B": Row(scaled(64), "v5e:16x16", {"fsdp": 256}, 2, V5E, tflops=118),
    "v5e 128B": Row(
        *(scaled(128), "v5e:16x16", {"fsdp": 256}, 1, V5E),
        tflops=110,
        differs="fsdp 256 instead of fsdp 16 x tensor 16; no fused kernels",
        same_mesh=False,
    ),
    "v5p 32B": Row(
        *(scaled(32), "v5p:4x4x4", {"fsdp": 16, "model": 4}, 6, V5P),
        tflops=328,
        remat="dots",
        differs=BY_TIME,
    ),
    "v5p 64B": Row(
        *(scaled(64), "v5p:4x4x4", {"fsdp": 16, "model": 4}, 3, V5P),
        tflops=323,
        remat="dots",
        differs=BY_TIME,
    ),
    "v5p 128B": Row(
        *(scaled(128), "v5p:4x4x8", {"fsdp": 16, "model": 8}, 1, V5P),
        tflops=315,
        remat="dots",
        differs=BY_TIME,
    ),
    "v5p 256B": Row(
        *(scaled(256), "v5p:8x8x8", {"fsdp": 64, "model": 8}, 1, V5P),
        tflops=308,
        remat="dots",
        differs=BY_TIME,
    ),
    "v5p 512B": Row(
        *(scaled(512), "v5p:8x8x8", {"fsdp": 64, "model": 8}, 2, V5P), tflops=294, differs=BY_TIME
    ),
    "v5p 1024B": Row(
        *(scaled(1024), "v5p:8x16x16", {"fsdp": 128, "model": 16}, 2, V5P),
        tflops=297,
        differs=BY_TIME,
    ),
    "v4 22B": Row(
        Decoder(6144, 24, 24, 24_576, 48, head=256, gated=False),
        *("v4:4x4x4", {"fsdp": 64}, 13, V4),
        tflops=156,
        differs=OLD,
    ),
    "v4 52B": Row(
        Decoder(12_288, 32, 32, 49_152, 32, head=256, gated=False),
        *("v4:4x4x12", {"fsdp": 192}, 7, V4),
        tflops=154,
        differs=OLD,
    ),
    "v6e Llama-3.1 8B, 8": Row(
        *(LLAMA_8B(), "v6e:2x4", {"fsdp": 8}, 3, RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-8"),
        seconds=3.443,
        differs=HOST,
    ),
    "v6e Llama-3.1 8B, 256": Row(
        *(LLAMA_8B(), "v6e:16x16", {"fsdp": 256}, 4),
        RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-256",
        seconds=4.546,
        differs=HOST,
    ),
    "v6e Mistral 7B, 8": Row(
        Decoder(4096, 32, 8, 14_336, 32, 32_000, 8192),
        *("v6e:2x4", {"fsdp": 8}, 6, RECIPES + "trillium/Mistral-7B-MaxText"),
        seconds=6.320,
        differs=HOST,
    ),
    "v6e Llama-2 70B, 256": Row(
        Decoder(8192, 64, 8, 28_672, 80, 32_000, 4096),
        *("v6e:16x16", {"fsdp": 256}, 3, RECIPES + "trillium/Llama2-70B-MaxText"),
        seconds=9.052,
        differs=HOST,
    ),
    "v6e Llama-3.1 70B, 32": Row(
        *(LLAMA_70B(8192), "v6e:4x8", {"fsdp": 32}, 2),
        RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-32",
        seconds=17.790,
        differs=HOST + "; their weights are bfloat16",
    ),
    "v6e Llama-3.1 70B, 64": Row(
        *(LLAMA_70B(8192), "v6e:8x8", {"fsdp": 64}, 2),
        RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-64",
        seconds=18.688,
        differs=HOST,
    ),
    "v6e Llama-3.1 70B, 256": Row(
        *(LLAMA_70B(8192), "v6e:16x16", {"fsdp": 256}, 5),
        RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-256",
        seconds=42.656,
        differs=HOST,
    ),
    "v6e Llama-3.1 405B, 2 x 256": Row(
        *(LLAMA_405B(), "2*v6e:16x16", {"fsdp": 512}, 1),
        RECIPES + "trillium/Llama3.1-405B-MaxText",
        seconds=54.803,
        differs="they keep the inputs of layers on the host",
    ),
    "v6e GPT-3 175B, 256": Row(
        Decoder(12_288, 96, 96, 49_152, 96, 50_304, gated=False),
        *("v6e:16x16", {"fsdp": 256}, 3, RECIPES + "trillium/GPT3-175B-MaxText/bf16"),
        seconds=17.182,
        differs="no biases, learned positions or tied table",
    ),
    "v5p Llama-3.1 405B, 512": Row(
        *(LLAMA_405B(), "v5p:8x8x8", {"fsdp": 512}, 2, RECIPES + "v5p/Llama3.1-405B-MaxText"),
        seconds=131.474,
        differs="they keep attention and the MLP's products on the host; their logits in 4 parts",
    ),
    "tpu7x Llama-3.1 70B, 64": Row(
        *(LLAMA_70B(8192), "tpu7x:4x4x4", {"fsdp": 128}, 2),
        RECIPES + "ironwood/llama3.1-70b/8k-bf16-tpu7x-4x4x4",
        seconds=12.20,
        remat=["query", "key", "value", "attention_output"],
    ),
    "tpu7x Llama-3.1 405B, 256": Row(
        *(LLAMA_405B(), "tpu7x:4x8x8", {"fsdp": 512}, 3),
        RECIPES + "ironwood/llama3.1-405b/8k-bf16-tpu7x-4x8x8",
        seconds=98.34,
        remat=["key", "value"],
        differs="they keep inputs of layers and the MLP's product on the host; logits in 4 parts",
    ),
    "tpu7x Llama-3.1 70B, 131,072 tokens": Row(
        *(LLAMA_70B(131_072), "tpu7x:4x8x8", {"fsdp": 64, "sequence": 8}, 0.125),
        RECIPES + "ironwood/llama3.1-70b/128k-bf16-tpu7x-4x8x8",
        seconds=34.02,
        remat=["query", "key", "value", "attention_output", "down"],
        differs="logits in 4 parts there",
    ),
}
ROWS |= {
    "tpu7x 8B, 4": Row(
        *(replace(LLAMA_8B(), time=1024), "tpu7x:2x2x1", {"fsdp": 8}, 1),
        "https://github.com/AI-Hypercomputer/maxtext/issues/5060",
        seconds=0.325,
        differs="shapes of Llama-3.1 8B, and remat, assumed",
    ),
    "v6e Mixtral 8x7B, 256": Row(
        Decoder(4096, 32, 8, 14_336, 32, 32_000, 4096, experts=8),
        *("v6e:16x16", {"fsdp": 256}, 12, RECIPES + "trillium/Mixtral-8x7B-MaxText"),
        seconds=13.484,
        differs=HOST,
    ),
    "v6e Mixtral 8x22B, 256": Row(
        Decoder(6144, 48, 8, 16_384, 56, 32_768, 4096, experts=8),
        *("v6e:16x16", {"fsdp": 256}, 8, RECIPES + "trillium/Mixtral-8x22B-MaxText"),
        seconds=24.706,
        differs=HOST + "; fsdp 64 x experts 4 there; their weights are bfloat16",
    ),
    "v3 ResNet-50, 16": Row(
        *(ResNet(), "v3:4x4", {"data": 32}, 128, MLPERF.format("resnet")),
        seconds=157.29 / 1251.1,
        differs="SGD instead of LARS; batch normalization over all rows, not each device's",
        remat=None,
    ),
    "v3 BERT-large, 16": Row(
        *(Bert(), "v3:4x4", {"data": 32}, 14, MLPERF.format("bert")),
        seconds=514.4 / 1117,
        differs="no padding mask; a table of its own for the output",
        remat=None,
    ),
    "v6e Llama-3.3 70B, a token, 64 users": Row(
        *(Serving(), "v6e:2x4", {"model": 8}, 8, SERVING),
        seconds=0.0254,
        differs=SERVED,
        remat=None,
    ),
    "v6e Llama-3.3 70B, a token, 128 users": Row(
        *(Serving(), "v6e:2x4", {"model": 8}, 16, SERVING),
        seconds=0.03543,
        differs=SERVED,
        remat=None,
    ),
}
for chips, shape, rows, published in (
    (16, "4x4", 3, 3.393),
    (32, "4x8", 3, 3.495),
    (64, "8x8", 5, 5.652),
    (128, "8x16", 4, 4.602),
):
    ROWS[f"v6e Llama-3.1 8B, {chips}"] = Row(
        *(LLAMA_8B(), f"v6e:{shape}", {"fsdp": chips}, rows),
        RECIPES + f"trillium/Llama3.1-8B-MaxText/v6e-{chips}",
        seconds=published,
        differs=HOST,
    )
for slices, tflops_16, tflops_128 in ((2, 117, 110), (32, 108, 91)):
    for scale, rows, published in ((16, 6, tflops_16), (128, 1, tflops_128)):
        ROWS[f"{slices} x v5e {scale}B"] = Row(
            *(scaled(scale), f"{slices}*v5e:16x16", {"data": slices, "fsdp": 256}, rows, V5E),
            tflops=published,
            differs=ROWS[f"v5e {scale}B"].differs,
            same_mesh=ROWS[f"v5e {scale}B"].same_mesh,
        )


def recorded() -> dict[tuple[str, str], dict]:
    """What the file has, by row and effort; the newest of each."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {(data["row"], data["effort"]): data for data in map(json.loads, lines)}


def compiled(name: str, row: Row, effort: str) -> dict[str, Any]:
    """The figures of a row's dry run, as plain data."""
    began = time.perf_counter()
    if isinstance(row.model, Serving):
        run = row.model.run(row, effort)
    else:
        run = ktd.dry_run(row.model.build, row.strategy(), batch_size=row.batch, effort=effort)
    return figures(name, row, run, time.perf_counter() - began)


def searched(name: str, row: Row, compilations: int) -> dict[str, Any]:
    """The figures of the first choice of `ktd.search`, for the same model, slice and batch."""
    found = ktd.search(
        row.model.build,
        row.slice,
        batch_size=row.batch,
        compilations=compilations,
        exact=2,
        budget_s=3600.0,
    )
    print(found, file=sys.stderr, flush=True)
    data = figures(f"{name}: search", row, found.best.run, found.seconds)
    return data | {"strategy": str(found.best.candidate)}


def figures(name: str, row: Row, run: Any, seconds: float) -> dict[str, Any]:
    """A line of the file."""
    times, topology = run.estimate, Topology.parse(row.slice)
    published = row.seconds
    if published is None:
        published = run.model_flops / (row.tflops * 1e12 * topology.num_chips)
    return {
        "row": name,
        "chip": topology.chip.name,
        "mode": run.mode,
        "effort": run.effort,
        "parameters": run.parameters,
        "model_flops": run.model_flops,
        "published_s": published,
        "estimate_s": times and times.step,
        "low_s": times and times.low,
        "high_s": times and times.high,
        "exposed_s": times and times.exposed_link,
        "bound": times and times.bound,
        "mfu": run.mfu,
        "fits": run.fits,
        "peak_bytes": run.peak_bytes or run.total_bytes,
        "compile_s": run.compile_seconds,
        "compile_cpu_s": run.compile_cpu_seconds,
        "seconds": seconds,
        "error": (run.error or "")[:300],
    }


def ratios(done: Mapping[Any, Any]) -> list[tuple[str, str, str, str, float, int]]:
    """The lines of `keras_tpu_dist.hardware.measured.RATIOS`, in the order of the rows."""
    return [
        (
            *(data[n] for n in ("chip", "mode", "bound", "effort")),
            round(ratio, 3),
            data["parameters"],
        )
        for effort in EFFORTS
        for data in (done[n, effort] for n in ROWS if (n, effort) in done and ROWS[n].same_mesh)
        if data["estimate_s"]
        for ratio in [data["published_s"] / data["estimate_s"]]
    ]


def print_rows(done: Mapping[Any, Any]) -> None:
    """Prints the table of all rows, and their sources."""
    header = ("program", "slice, mesh", "rows", "published", "measured", "estimated")
    header += ("measured of estimated",)
    header += ("quick: sum", "measured of sum", "waiting", "memory")
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for name, row in ROWS.items():
        found = [done.get((name, effort)) for effort in EFFORTS]
        if not any(found):
            continue
        first = found[0] or found[1]
        mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items())
        mesh += "" if row.same_mesh else " (not theirs)"
        published = "seconds" if row.tflops is None else f"{row.tflops:g} TFLOP/s"
        cells = [name, f"{row.slice}, {mesh}", str(row.batch), published]
        cells.append(duration_text(first["published_s"]))
        for data in found:
            step = data and data["estimate_s"]
            cells.append(duration_text(step) if step else "does not fit" if data else "")
            cells.append(f"{data['published_s'] / step:.2f}" if step else "")
        waiting = first["exposed_s"]
        cells.append(f"{waiting / first['estimate_s']:.1%}" if waiting is not None else "")
        # Of a program that does not fit, the compiler may say only what one array takes.
        memory = size_text(first["peak_bytes"]) if first["peak_bytes"] else ""
        print("| " + " | ".join([*cells, memory]) + " |")
    left = [name for name in ROWS if not any((name, effort) in done for effort in EFFORTS)]
    print(f"\n{len(ROWS) - len(left)} of {len(ROWS)} rows. Not compiled: {', '.join(left)}.\n")
    for name, row in ROWS.items():
        if any((name, effort) in done for effort in EFFORTS):
            print(f"- {name}: [source]({row.source})" + (f"; {row.differs}" if row.differs else ""))


def print_errors(done: Mapping[Any, Any]) -> None:
    """Prints the ratios by kind of program and chip, and how well they foretell each other."""
    header = ("programs", "effort", "chip", "number", "models", "measured of estimated")
    print("\n| " + " | ".join([*header, "leave one out", "most"]) + " |\n|" + " --- |" * 8)
    groups: dict[tuple[str, ...], list[tuple[float, int]]] = {}
    for chip, mode, bound, effort, ratio, parameters in ratios(done):
        for where in (chip, "all"):
            key = f"{mode}, bound by {bound}", effort, where
            groups.setdefault(key, []).append((ratio, parameters))
    for (kind, effort, where), group in sorted(groups.items()):
        models = len({parameters for _, parameters in group})
        rows = tuple(sorted(ratio for ratio, _ in group))
        spread = PublishedRatios(rows, effort, where, kind, models)
        errors = [abs(error) for error in spread.left_out]
        cells = [kind, effort, where, str(len(group)), str(models), spread.span]
        cells += [f"{spread.error:.1%}", f"{max(errors):.1%}"] if errors else ["", ""]
        print("| " + " | ".join(cells) + " |")
    cpu = sum(data["compile_cpu_s"] for data in done.values()) / 60
    print(f"\nThe compiler took {cpu:.0f} minutes of CPU for {len(done)} compilations.")
    for (name, effort), data in done.items():
        row, _, search = name.partition(": ")
        if search:
            of = data["estimate_s"] / data["published_s"]
            print(f"{row}, by search ({effort}): {data['strategy']}, {of:.2f} of what was measured")


def main() -> None:
    """Compiles what is missing, and prints the table."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("rows", nargs="*", default=[*ROWS])
    arguments.add_argument("--effort", choices=EFFORTS, default="exact")
    arguments.add_argument("--again", action="store_true", help="compile recorded rows too")
    arguments.add_argument("--table", action="store_true", help="compile nothing")
    arguments.add_argument("--ratios", action="store_true", help="only the lines of RATIOS")
    arguments.add_argument("--search", action="store_true", help="search instead of compiling")
    arguments.add_argument("--compilations", type=int, default=6, help="of a search")
    asked = arguments.parse_args()
    for name in [] if asked.table or asked.ratios else asked.rows:
        key = f"{name}: search" if asked.search else name
        if (key, asked.effort) in recorded() and not asked.again:
            continue
        try:
            if asked.search:
                data = searched(name, ROWS[name], asked.compilations)
            else:
                data = compiled(name, ROWS[name], asked.effort)
        except Exception:
            # The other rows are worth their hours; this one has no line, and is tried next time.
            traceback.print_exc()
            continue
        with RECORD.open("a") as stream:
            stream.write(json.dumps(data) + "\n")
        print(json.dumps(data), file=sys.stderr, flush=True)
    done = recorded()
    if asked.ratios:
        print("\n".join(f"    {line!r},".replace("'", '"') for line in ratios(done)))
        return
    print_rows(done)
    print_errors(done)


if __name__ == "__main__":
    main()
