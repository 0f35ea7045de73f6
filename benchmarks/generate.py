"""The time per generated token of KerasHub models, beside that of reading weights and cache once.

    python benchmarks/generate.py [--effort exact] [--topology v5e:2x4] [--rows 8] [--length 1024]

Dry-runs `generate` for language models without values, in bfloat16, with 2 devices on "data" and
the rest on "model". Compares KerasHub's loop, which restacks the whole cache for each token and
repeats keys and values for the heads that share them, with this package's. Needs keras_hub.
"""

import argparse
import contextlib
import os
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras

import keras_tpu_dist as ktd
from keras_tpu_dist.programs import passes


def models():
    """Names and build functions: two or four layers with the width of a known model."""
    from keras_hub import models as hub

    def llama():
        return hub.LlamaCausalLM(
            hub.LlamaBackbone(
                vocabulary_size=32_000,
                num_layers=4,
                num_query_heads=16,
                num_key_value_heads=8,
                hidden_dim=2048,
                intermediate_dim=5632,
            )
        )

    def gpt2():
        return hub.GPT2CausalLM(
            hub.GPT2Backbone(
                vocabulary_size=50_257,
                num_layers=4,
                num_heads=16,
                hidden_dim=1024,
                intermediate_dim=4096,
                max_sequence_length=1024,
            )
        )

    def gemma():
        return hub.GemmaCausalLM(
            hub.GemmaBackbone(
                vocabulary_size=256_000,
                num_layers=2,
                num_query_heads=8,
                num_key_value_heads=1,
                hidden_dim=2048,
                intermediate_dim=32_768,
                head_dim=256,
            )
        )

    def mistral():
        return hub.MistralCausalLM(
            hub.MistralBackbone(
                vocabulary_size=32_000,
                num_layers=4,
                num_query_heads=32,
                num_key_value_heads=8,
                hidden_dim=4096,
                intermediate_dim=14_336,
                sliding_window=1024,
            )
        )

    return {"Llama": llama, "Mistral": mistral, "GPT-2": gpt2, "Gemma": gemma}


def dry_run(build, options):
    def compiled():
        model = build()
        model.compile(sampler="greedy")
        return model

    tokens = jax.ShapeDtypeStruct((options.rows, options.length), "int32")
    strategy = ktd.TPUStrategy(
        {"data": 2, "model": -1}, "tensor_parallel", topology=options.topology
    )
    inputs = {"token_ids": tokens, "padding_mask": tokens}
    how = {"batch_size": options.rows, "mode": "generate", "effort": options.effort}
    return ktd.dry_run(compiled, strategy, x=inputs, **how)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effort", choices=("quick", "exact"), default="exact")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--only", nargs="+", default=None)
    options = parser.parse_args()
    keras.config.set_dtype_policy("bfloat16")
    print(f"{'model':8} {'loop':7} {'cycles':>9} {'token us':>9} {'limit us':>9} {'ratio':>6}")
    stock = mock.patch.object(passes, "PASSES", ())
    for name, build in models().items():
        if options.only and name not in options.only:
            continue
        cycles = []
        for words, how in (("stacked", stock), ("ours", contextlib.nullcontext())):
            with how:
                run = dry_run(build, options)
            cycles.append(run.cost.cycles)
            step, limit = run.estimate.step * 1e6, run.token_limit_s * 1e6
            row = f"{name:8} {words:7} {cycles[-1]:9,} {step:9.1f} {limit:9.1f} {step / limit:6.2f}"
            print(row, flush=True)
        print(f"{name:8} {cycles[0] / cycles[1]:.2f} times fewer cycles", flush=True)


if __name__ == "__main__":
    main()
