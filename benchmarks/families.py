"""KerasHub's families: the bytes that plans leave on a device, and what one block sends.

    python benchmarks/families.py [--families llama2 whisper ...] [--no-check]

Bytes are those of the named preset in bfloat16, in total and on each of eight devices; the model is
built without values. Collectives are counted in compiled training steps of narrow models of the
same class with one and two blocks, on eight simulated CPU devices as {"data": 2, "model": 4}; the
difference is one block's. The predictions of the narrow models, and their weights after a step of
SGD with 13 rows, are compared with one device, and their layouts with those of the preset.

This needs KerasHub: `pip install --no-deps --target DIR keras-hub regex tokenizers sentencepiece`,
and DIR on PYTHONPATH. tensorflow-text and the files of presets are not needed.
"""

import argparse
import dataclasses
import importlib
import math
import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras_tpu_dist as ktd

ktd.simulate(8)

import jax
import keras
import numpy as np

from keras_tpu_dist.common.axes import names_in
from keras_tpu_dist.layout.planner import Planner

sys.path += [str(pathlib.Path(__file__).parents[1] / "tests" / each) for each in ("", "layout")]

from helpers import built
from programs import program, sent

try:
    keras_hub = importlib.import_module("keras_hub")
except ImportError as error:
    sys.exit(
        f"benchmarks/families.py needs KerasHub, which cannot be imported: {error}. Run `pip "
        "install --no-deps --target DIR keras-hub regex tokenizers sentencepiece`, and put DIR on "
        "PYTHONPATH."
    )
hub = keras_hub.models

WIDTH, HEADS, HEAD, LENGTH, ROWS, WORDS = 32, 8, 4, 32, 13, 64
# Kernels of narrow models have more elements, their biases and scales fewer.
MIN_SIZE = 4 * WIDTH * 2
MESHES = {"tensor_parallel": {"data": 2, "model": 4}, "fsdp": {"data": 8}}
MESHES["auto"] = MESHES["tensor_parallel"]
IN_A_ROW = "one kernel in a row, which is sent itself"
TWO_STREAMS = (
    f"{IN_A_ROW}; sums of both streams are joined; modulation (6 widths a row) is gathered"
)
TOLERANCE = 1e-5
CHIP_BYTES = 16 * 2**30  # of a v5e


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of KerasHub.

    Attributes:
        preset: The preset whose bytes are measured.
        params: The number of parameters that KerasHub states for it, if any.
        whole: Builds the preset's model.
        narrow: Builds a narrow model with a number of blocks.
        sums: Megatron's all-reduces of a block in the forward pass; the backward pass has as many.
        why: The reason for a difference.
    """

    preset: str
    params: int | None
    whole: Callable[[], Any]
    narrow: Callable[[int], Any]
    sums: int = 2
    why: str = ""


def of(kind, preset, params, *, sums=2, why="", small=None, depth=("num_layers",), **config):
    """A family of a class that takes its sizes by name."""
    make = getattr(hub, kind)
    narrow = {name: size for name, size in NARROW.items() if name in config} | (small or {})
    for words in ("vocabulary_size", "vocab_size"):
        if config.get(words, 0) % 4:
            narrow[words] = WORDS - 3
    return Family(
        preset,
        params,
        lambda: make(**config),
        lambda blocks: make(**(config | narrow | dict.fromkeys(depth, blocks))),
        sums,
        why,
    )


# The sizes of narrow models.
NARROW = {
    "vocabulary_size": WORDS,
    "vocab_size": WORDS,
    "num_query_heads": HEADS,
    "num_heads": HEADS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "head_dim": HEAD,
    "key_value_dim": HEAD,
    "hidden_dim": WIDTH,
    "embedding_dim": WIDTH,
    "intermediate_dim": 4 * WIDTH,
    "moe_intermediate_dim": WIDTH,
    "mlp_dim": 4 * WIDTH,
    "num_experts": 8,
    "max_sequence_length": LENGTH,
    "image_shape": (16, 16, 3),
    "patch_size": 4,
}


def decoder(words, layers, width, heads, kv, hidden):
    """Sizes of a decoder of few key-value heads."""
    return {
        "vocabulary_size": words,
        "num_layers": layers,
        "hidden_dim": width,
        "num_query_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_dim": hidden,
    }


def encoder(words, layers, width, heads, hidden, length=512):
    """Sizes of an encoder, or of a decoder of its kind."""
    return {
        "vocabulary_size": words,
        "num_layers": layers,
        "hidden_dim": width,
        "num_heads": heads,
        "intermediate_dim": hidden,
        "max_sequence_length": length,
        "dropout": 0,
    }


def vision(layers, width, heads, patch, size):
    """Sizes of an encoder of images."""
    return {
        "num_layers": layers,
        "hidden_dim": width,
        "num_heads": heads,
        "patch_size": patch,
        "image_shape": (size, size, 3),
    }


def towers(kind, preset, params, image, text, why="", **more):
    """A family of an encoder of images and one of text, each of which has blocks of its own."""

    def make(image, text):
        both = [
            getattr(hub, kind.replace("Backbone", f"{what}Encoder"))(name=what, **sizes)
            for what, sizes in (("Vision", image), ("Text", text))
        ]
        return getattr(hub, kind)(*both, **more)

    def narrow(blocks):
        """The encoders alone: what is made of both in the end is no block's."""
        small = [
            {k: NARROW.get(k, size) for k, size in sizes.items()} | {"num_layers": blocks}
            for sizes in (image, text)
        ]
        model = make(*small)
        both = model.vision_encoder, model.text_encoder
        return keras.Model([e.input for e in both], [e.output for e in both])

    return Family(preset, params, lambda: make(image, text), narrow, 4, why)


def sam(layers, width, heads, whole_at):
    """The encoder of images has the blocks."""
    encode = {
        "hidden_size": width,
        "num_layers": layers,
        "intermediate_dim": 4 * width,
        "num_heads": heads,
        "global_attention_layer_indices": whole_at,
        "image_shape": (1024, 1024, 3),
    }
    decode = {"num_layers": 2, "hidden_size": 256, "intermediate_dim": 2048, "num_heads": 8}
    small = {
        "hidden_size": WIDTH,
        "intermediate_dim": 4 * WIDTH,
        "num_heads": HEADS,
        "image_shape": (16, 16, 3),
        "patch_size": 4,
        "window_size": 3,
        "num_output_channels": 16,
    }

    def whole():
        images = hub.ViTDetBackbone(**encode)
        prompts = keras_hub.layers.SAMPromptEncoder()
        masks = keras_hub.layers.SAMMaskDecoder(**decode)
        return hub.SAMBackbone(images, prompts, masks)

    return Family(
        "sam_huge_sa1b",
        637032524,  # and 4058340 of the decoder of masks, which no layer here builds
        whole,
        lambda blocks: hub.ViTDetBackbone(**(encode | small | {"num_layers": blocks})),
        why="attention joins batch and heads in one dimension, which has no equal parts by heads: "
        "its kernels are split without a pair, what they make is gathered",
    )


def stable_diffusion():
    """The transformer of two streams has the blocks; its last one computes less."""

    def text(width, heads, layers, kind, name):
        sizes = encoder(49408, layers, width, heads, 4 * width, 77)
        del sizes["dropout"]
        more = {"embedding_dim": width, "intermediate_activation": kind}
        return hub.CLIPTextEncoder(**sizes, **more, intermediate_output_index=-2, name=name)

    def whole():
        filters = [128, 256, 512, 512]
        module = importlib.import_module("keras_hub.src.models.vae.vae_backbone")
        vae = module.VAEBackbone(filters, [2] * 4, filters[::-1], [3] * 4)
        clips = text(768, 12, 12, "quick_gelu", "clip_l"), text(1280, 20, 32, "gelu", "clip_g")
        sizes = {"vae": vae, "clip_l": clips[0], "clip_g": clips[1]}
        return hub.StableDiffusion3Backbone(2, 64 * 24, 24, 24, 192, None, None, **sizes)

    def narrow(blocks):
        module = importlib.import_module("keras_hub.src.models.stable_diffusion_3.mmdit")
        given = {"latent_shape": (8, 8, 4), "context_shape": (LENGTH, 24)}
        return module.MMDiT(2, WIDTH, blocks + 1, HEADS, 8, **given, pooled_projection_shape=(16,))

    return Family("stable_diffusion_3_medium", 2987080931, whole, narrow, 4, TWO_STREAMS)


def flux(single):
    """Blocks of two streams, or those of one."""

    def make(depth, singles, width, heads, axes, lengths, features):
        image, text, y = features
        return hub.FluxBackbone(
            image, width, 4.0, heads, depth, singles, axes, 10000, True, True,
            image_shape=(lengths[0], image), text_shape=(lengths[1], text), y_shape=(y,),
            image_ids_shape=(lengths[0], 3), text_ids_shape=(lengths[1], 3),
        )  # fmt: skip

    why = TWO_STREAMS
    if single:
        why = "one kernel has unequal parts for attention and feed-forward: they are gathered"

    def narrow(blocks):
        depth = (1, blocks) if single else (blocks, 1)
        return make(*depth, WIDTH * 2, HEADS, [4, 2, 2], (LENGTH, 6), (4, 24, 16))

    def whole():
        sizes = 3072, 24, [16, 56, 56], (4096, 512), (64, 4096, 768)
        return make(19, 38, *sizes)

    return Family("flux dev", None, whole, narrow, 1 if single else 4, why)


def segformer():
    """Stages of blocks, of which the last one has heads for all devices."""

    def make(depths, widths, filters, size):
        images = hub.MiTBackbone(
            depths, 4, [1, 2, 5, 8], [8, 4, 2, 1], 0.0, [7, 3, 3, 3], [4, 2, 2, 2],
            image_shape=(size, size, 3), hidden_dims=widths,
        )  # fmt: skip
        return hub.SegFormerBackbone(images, filters)

    return Family(
        "segformer_b5_ade20k_640",
        81969344,  # and 4883 of a head for 19 classes
        lambda: make([3, 6, 40, 3], [64, 128, 320, 512], 256, 640),
        lambda blocks: make([1, 1, 1, blocks], [8, 16, 40, 32], 16, 64),
        why="heads of the first stages, 1, 2 and 5, not divisible; the block is the last stage's",
    )


def swin():
    """Stages of blocks with windows."""

    def make(width, depths, heads, size, window):
        return hub.SwinTransformerBackbone(
            (size, size, 3), width, depths, heads, window, drop_path=0.0
        )

    return Family(
        "swin_large_patch4_window7_224",
        194995476,
        lambda: make(192, [2, 2, 18, 2], [6, 12, 24, 48], 224, 7),
        lambda blocks: make(16, [1, blocks], [4, 8], 16, 2),
        why=f"{IN_A_ROW}; heads of the first stage, 6, not divisible",
    )


def families():
    """All families, by name."""
    gemma = {"head_dim": 256}
    gemma2 = gemma | {
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": 50,
        "final_logit_soft_cap": 30,
        "use_sliding_window_attention": True,
    }
    gemma3 = gemma | {"use_post_ffw_norm": True, "use_post_attention_norm": True}
    gemma3 |= {"image_size": None, "use_sliding_window_attention": True}
    t5 = encoder(32128, 24, 4096, 64, 10240)
    t5 |= {"key_value_dim": 64, "activation": "gelu", "tie_embedding_weights": False}
    del t5["max_sequence_length"]
    falcon = encoder(50304, 24, 2048, 32, 8192)
    falcon["num_attention_heads"] = falcon.pop("num_heads")
    bloom = encoder(250880, 30, 2560, 32, 10240)
    for sizes in (falcon, bloom):
        del sizes["max_sequence_length"], sizes["dropout"]
    phi3 = decoder(32064, 32, 3072, 32, 32, 8192)
    moe = decoder(151936, 48, 2048, 32, 4, 6144)
    moe |= {"head_dim": 128, "moe_intermediate_dim": 768, "num_experts": 128, "top_k": 8}
    smollm = decoder(128256, 36, 2048, 16, 4, 11008)
    smollm["num_attention_heads"] = smollm.pop("num_query_heads")
    smollm |= {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [1, 1, 1, 0] * 9,
        "layer_types": ["full_attention"] * 36,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": 5e6,
        "partial_rotary_factor": 1.0,
    }
    whisper = encoder(51865, 32, 1280, 20, 5120)
    del whisper["max_sequence_length"]
    whisper |= {"max_encoder_sequence_length": 3000, "max_decoder_sequence_length": 448}
    short = {"max_encoder_sequence_length": 64, "max_decoder_sequence_length": 32}
    electra = encoder(30522, 24, 1024, 16, 4096) | {"embedding_dim": 1024}
    electra["vocab_size"] = electra.pop("vocabulary_size")
    albert = encoder(30000, 12, 4096, 64, 16384) | {"embedding_dim": 128}
    dino = vision(40, 1536, 24, 14, 518) | {"intermediate_dim": 6144, "use_swiglu_ffn": True}
    vit = vision(32, 1280, 16, 14, 224) | {"mlp_dim": 5120}
    vit["patch_size"] = (14, 14)
    text = {"intermediate_dim": 5120, "embedding_dim": 1280, "max_sequence_length": 77}
    text |= {"vocabulary_size": 49408, "hidden_dim": 1280, "num_layers": 32, "num_heads": 20}
    image = vision(48, 1664, 16, 14, 224) | {"intermediate_dim": 8192}
    so400m = {"hidden_dim": 1152, "num_layers": 27, "num_heads": 16, "intermediate_dim": 4304}
    read = so400m | {"vocabulary_size": 32000, "embedding_dim": 1152, "max_sequence_length": 64}
    seen = so400m | {"patch_size": 14, "image_shape": (378, 378, 3)}
    qwen3 = decoder(151936, 36, 4096, 32, 8, 12288) | {"head_dim": 128}
    oss = decoder(201088, 24, 2880, 64, 8, 2880) | {"num_experts": 32, "top_k": 4, "head_dim": 64}
    mixtral = decoder(32000, 32, 4096, 32, 8, 14336) | {"num_experts": 8}
    untied = {"tie_word_embeddings": False}
    roberta = encoder(50265, 24, 1024, 16, 4096)
    return {
        "llama2": of("LlamaBackbone", "llama2_7b_en", 6738415616,
                     **decoder(32000, 32, 4096, 32, 32, 11008), small={"num_key_value_heads": 8}),
        "llama3": of("Llama3Backbone", "llama3_8b_en", 8030261248,
                     **decoder(128256, 32, 4096, 32, 8, 14336)),
        "mistral": of("MistralBackbone", "mistral_7b_en", 7241732096,
                      **decoder(32000, 32, 4096, 32, 8, 14336)),
        "mixtral": of("MixtralBackbone", "mixtral_8_7b_en", 46702792704, **mixtral),
        "gemma": of("GemmaBackbone", "gemma_7b_en", 8537680896,
                    **decoder(256000, 28, 3072, 16, 16, 49152), **gemma,
                    small={"num_key_value_heads": 8}),
        "gemma2": of("GemmaBackbone", "gemma2_9b_en", 9241705984,
                     **decoder(256000, 42, 3584, 16, 8, 28672), **gemma2),
        "gemma3": of("Gemma3Backbone", "gemma3_12b_text", 11765788416,
                     **decoder(262144, 48, 3840, 16, 8, 15360), **gemma3),
        "qwen2.5": of("QwenBackbone", "qwen2.5_math_7b_en", 7615616512,
                      **decoder(152064, 28, 3584, 28, 4, 18944), **untied),
        "qwen3": of("Qwen3Backbone", "qwen3_8b_en", 8190735360, **qwen3, **untied),
        "qwen3-moe": of("Qwen3MoeBackbone", "qwen3_moe_30b_a3b_en", 30532122624, **moe),
        "phi3": of("Phi3Backbone", "phi3_mini_4k_instruct_en", 3821079552, **phi3,
                   small={"num_key_value_heads": 8}),
        "gpt-oss": of("GptOssBackbone", "gpt_oss_20b_en", 20914757184, **oss),
        "smollm3": of("SmolLM3Backbone", "smollm3_3b_en", 3075100928, **smollm),
        "falcon": of("FalconBackbone", "falcon_refinedweb_1b_en", 1311625216, **falcon),
        "bloom": of("BloomBackbone", "bloom_3b_multi", 3002557440, **bloom),
        "gpt-neox": of("GPTNeoXBackbone", "gpt-neox 20b", None, sums=1,
                       **encoder(50432, 44, 6144, 64, 24576, 2048),
                       small={"rotary_percentage": 0.5}),
        "gpt2": of("GPT2Backbone", "gpt2_large_en", 774030080,
                   **encoder(50257, 36, 1280, 20, 5120, 1024)),
        "opt": of("OPTBackbone", "opt_6.7b_en", None, **encoder(50272, 32, 4096, 32, 16384, 2048)),
        "bart": of("BartBackbone", "bart_large_en", 406287360, sums=5,
                   **encoder(50265, 12, 1024, 16, 4096, 1024)),
        "t5": of("T5Backbone", "t5_1.1_xxl", 11135332352, sums=5, **t5),
        "whisper": of("WhisperBackbone", "whisper_large_multi_v2", 1543304960, sums=5, **whisper,
                      small=short),
        "bert": of("BertBackbone", "bert_large_en", None, **encoder(28996, 24, 1024, 16, 4096)),
        "roberta": of("RobertaBackbone", "roberta_large_en", 354307072, **roberta),
        "xlm-r": of("XLMRobertaBackbone", "xlm_roberta_large_multi", 558837760,
                    **(roberta | {"vocabulary_size": 250002})),
        "deberta-v3": of("DebertaV3Backbone", "deberta_v3_large_en", 434012160,
                         **encoder(128100, 24, 1024, 16, 4096), small={"bucket_size": 4},
                         bucket_size=256),
        "albert": of("AlbertBackbone", "albert_extra_extra_large_en_uncased", 222595584, **albert,
                     depth=("num_layers", "num_groups")),
        "electra": of("ElectraBackbone", "electra_large_discriminator_uncased_en", 335141888,
                      **electra),
        "vit": of("ViTBackbone", "vit_huge_patch14_224_imagenet21k", 630764800, **vit,
                  small={"patch_size": (4, 4)}),
        "dinov2": of("DINOV2Backbone", "dinov2_giant", 1138585088, why=IN_A_ROW, **dino),
        "clip": towers("CLIPBackbone", "clip_vit_bigg_14_laion2b_39b_b160k", 2539567362, image,
                       text, projection_dim=1280),
        "siglip": towers("SigLIPBackbone", "siglip_so400m_patch14_384", 877961291, seen, read),
        "sam": sam(32, 1280, 16, [7, 15, 23, 31]),
        "sd3": stable_diffusion(),
        "flux-double": flux(False),
        "flux-single": flux(True),
        "segformer": segformer(),
        "swin": swin(),
    }  # fmt: skip


def measured(family: Family) -> dict:
    """Bytes of a preset by plan."""
    keras.config.set_dtype_policy("bfloat16")
    with keras.StatelessScope(initialize_variables=False):
        model = family.whole()
    keras.config.set_dtype_policy("float32")
    whole = sum(map(bytes_of, model.weights))
    found = {"params": model.count_params(), "whole": whole}
    for kind, mesh in MESHES.items():
        devices = ktd.TPUStrategy(mesh).mesh
        plan = Planner(kind, memory_bytes=CHIP_BYTES).plan(model, devices, ("data",))
        found[kind] = sum(
            bytes_of(v) / math.prod(mesh[a] for a in names_in(plan.decision(v).axes))
            for v in [*model.trainable_variables, *model.non_trainable_variables]
        )
        found[f"{kind} layouts"] = {path: decision for path, _, decision in plan.decisions}
    return found


def bytes_of(variable) -> int:
    return math.prod(variable.shape) * jax.numpy.dtype(variable.dtype).itemsize


def batch(model, seed=0):
    """Rows for a model's inputs; of a padding mask the last places are empty."""
    random = np.random.default_rng(seed)

    def rows(tensor):
        shape = (ROWS, *(size or LENGTH for size in tensor.shape[1:]))
        if "mask" in tensor.name:
            return np.broadcast_to(np.arange(shape[-1]) < shape[-1] - 2, shape).astype("int32")
        if "int" in tensor.dtype:
            return random.integers(0, 2 if "segment" in tensor.name else WORDS - 4, shape)
        return random.normal(size=shape).astype("float32")

    return jax.tree.map(rows, model.input)


def run(family: Family, blocks: int, strategy, counted: bool):
    """A narrow model's predictions, weights after a step, and the program of the step."""

    def build():
        model = family.narrow(blocks)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model = built(build, strategy)
    x = batch(model)
    random = np.random.default_rng(1)
    given = model.predict(x, batch_size=ROWS, verbose=0)
    y = jax.tree.map(lambda each: random.normal(size=each.shape).astype("float32"), given)
    text = program(model, strategy, x, y) if counted else model.train_on_batch(x, y) and ""
    return {"predictions": given, "weights": model.get_weights()}, text, model


def difference(a, b) -> float:
    """The largest, of arrays in any structure; infinite if only one has a number."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(p - q))) if np.size(p) else 0.0 for p, q in pairs)


def compared(family: Family, checked: bool) -> dict:
    """The collectives of a block, and the difference of two blocks from one device."""
    tensor = Planner("tensor_parallel", min_size=MIN_SIZE)
    strategy = ktd.TPUStrategy(MESHES["tensor_parallel"], tensor)
    _, one, _ = run(family, 1, strategy, True)
    got, two, model = run(family, 2, strategy, True)
    mesh = MESHES["tensor_parallel"]
    of_two, of_one = sent(two, mesh, "model"), sent(one, mesh, "model")
    of_two.subtract(of_one)
    rows = strategy.explain(model).rows
    found = {"sent": of_two, "ends": of_one, "layouts": {r.path: r for r in rows}}
    if checked:
        expected, _, _ = run(family, 2, None, False)
        found["difference"] = difference(got, expected)
    return found


def differing(whole: dict, narrow: dict) -> list[str]:
    """Weights whose layout differs in the narrow model, equal blocks once."""
    return sorted(
        re.sub(r"\d+", "*", path)
        for path in whole.keys() & narrow.keys()
        if tuple(whole[path].axes) != tuple(narrow[path].axes)
    )


def sums(sent, phase: str) -> str:
    """The collectives of a block in a pass: its sums, and others."""
    kinds = {"all-reduce": "", "all-gather": " gather", "all-to-all": " all-to-all"}
    counts = {kind: sent[kind, each] for kind, each in sent if each == phase and sent[kind, each]}
    texts = [str(counts.pop("all-reduce", 0))]
    return " + ".join(texts + [f"{n}{kinds.get(k, f' {k}')}" for k, n in sorted(counts.items())])


def row(name: str, family: Family, checked: bool) -> str:
    """A family's line of the table."""
    sizes, found = measured(family), compared(family, checked)
    remarks = [family.why] if family.why else []
    if family.params not in (None, sizes["params"]):
        remarks.append(f"KerasHub states {family.params:,} parameters")
    others = differing(sizes["tensor_parallel layouts"], found["layouts"])
    if others:
        remarks.append(f"laid out differently in the narrow model: {', '.join(others)}")
    if found.get("difference", 0) > TOLERANCE:
        remarks.append(f"differs from one device by {found['difference']:.1e}")
    gigabytes = [f"{sizes[kind] / 2**30:.2f}" for kind in ("whole", *MESHES)]
    sent = [sums(found["sent"], phase) for phase in ("forward", "backward")]
    megatron = f"{family.sums} + {family.sums}"
    cells = [name, family.preset, f"{sizes['params'] / 1e6:,.0f} M", *gigabytes, *sent, megatron]
    return f"| {' | '.join([*cells, '; '.join(remarks)])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = families()
    parser.add_argument("--families", nargs="*", choices=known, default=list(known))
    parser.add_argument("--no-check", action="store_true", help="do not compare with one device")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="keras")
    head = ["family", "preset", "parameters", "GiB whole", *MESHES, *("forward", "backward")]
    head += ["Megatron", "remarks"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in options.families:
        print(row(name, known[name], not options.no_check), flush=True)


if __name__ == "__main__":
    main()
