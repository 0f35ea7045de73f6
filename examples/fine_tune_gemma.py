r"""Fine-tunes a Gemma 4 mixture of experts with LoRA: a small one here, 26 billion parameters dry.

    python examples/fine_tune_gemma.py                    # trains a small one on these devices
    python examples/fine_tune_gemma.py --dry-run          # Gemma 4 26B on a v5e-8, 2,048 tokens
    python examples/fine_tune_gemma.py --dry-run --levers # without each of the levers, one by one
    ktd verify examples/fine_tune_gemma.py:small --topology v5e:2x4 --batch-size 8 \
        --sequence-length 32

Needs KerasHub (pip install keras-hub); nothing is downloaded. On a TPU VM, load the weights within
the scope: `keras_hub.models.Gemma4CausalLM.from_preset("gemma4_26b_a4b", preprocessor=None)`.
"""

import argparse
import functools

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import keras
import numpy as np

TOKENS = 2048
# Gemma 4 26B A4B, its decoder of text, as its configuration has it.
WHOLE = {
    "vocabulary_size": 262_144,
    "num_layers": 30,
    "hidden_dim": 2816,
    "num_query_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "intermediate_dim": 2112,
    "num_experts": 128,
    "num_experts_per_token": 8,
    "expert_intermediate_dim": 704,
    "sliding_window_size": 1024,
}
SMALL = {
    "vocabulary_size": 512,
    "num_layers": 2,
    "hidden_dim": 32,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "intermediate_dim": 48,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "expert_intermediate_dim": 16,
    "sliding_window_size": 8,
    "sliding_window_pattern": 2,
}
# What makes it fit, and what is there without each.
LEVERS = {
    "LoRA": {"rank": 0},
    "chosen experts": {"chosen": False},
    "remat": {"remat": None},
    "head in pieces": {"head": "whole"},
    "bfloat16 weights": {"policy": "mixed_bfloat16"},
}


def gemma(sizes, rank=8, chosen=True):
    """A compiled model of text; with LoRA of a rank, and with the chosen experts alone."""
    import keras_hub

    backbone = keras_hub.models.Gemma4Backbone(
        image_size=896,
        final_logit_soft_cap=30.0,
        global_rope_partial_rotary_factor=0.25,
        enable_moe_block=True,
        **sizes,
    )
    if rank:
        backbone.enable_lora(rank)
    model = keras_hub.models.Gemma4CausalLM(backbone=backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss)
    return ktd.convert(model) if chosen else model


def small():
    """The small one."""
    return gemma(SMALL)


def dry_run(rank=8, chosen=True, remat="full", head="pieces", policy="bfloat16"):
    """The step of the whole model on eight v5e chips, one row of tokens on each."""
    strategy = ktd.TPUStrategy(layout="fsdp", topology="v5e-8", remat=remat, head=head)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        build = functools.partial(gemma, WHOLE, rank, chosen)
        return ktd.dry_run(build, strategy, batch_size=8, sequence_length=TOKENS)
    finally:
        keras.config.set_dtype_policy(before)


def line(name, run):
    """What a dry run says, in one line."""
    fits = "fits" if run.fits else "does not fit"
    sizes = f"{run.total_bytes / 2**30:.2f} of {run.limit_bytes / 2**30:.2f} GiB"
    return f"{name}: {fits}, {sizes} on each chip"


def counting(steps):
    """Sequences that count in some steps, as the model takes them, and their next tokens."""
    numbers = np.random.default_rng(0)
    start, step = numbers.integers(0, 100, (256, 1)), numbers.choice(steps, (256, 1))
    tokens = start + step * np.arange(33)
    given = tokens[:, :-1]
    places = np.broadcast_to(np.arange(32), given.shape)
    x = {"token_ids": given, "padding_mask": np.ones_like(given), "position_ids": places}
    return x, tokens[:, 1:]


def train(epochs):
    """Trains the small one to count in steps of 1 and 2, and fine-tunes it for 3 and 4."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel", remat="full")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = gemma(SMALL, rank=0)
        model.optimizer.learning_rate = 0.01
        whole = model.fit(*counting([1, 2]), batch_size=32, epochs=epochs, shuffle=False, verbose=0)
        model.backbone.enable_lora(8)
        model.compile(keras.optimizers.AdamW(0.02), model.loss)
    print(f"in full: loss {whole.history['loss'][0]:.2f} to {whole.history['loss'][-1]:.2f}")
    fit = model.fit(*counting([3, 4]), batch_size=32, epochs=epochs, shuffle=False, verbose=0)
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    print(f"{trained:,} of {model.count_params():,} parameters train")
    print(f"with LoRA: loss {fit.history['loss'][0]:.2f} to {fit.history['loss'][-1]:.2f}")
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--levers", nargs="*", choices=LEVERS, help="these ones; by default all")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    if not options.dry_run:
        ktd.simulate(8)
        train(options.epochs)
        return
    if not options.levers:
        run = dry_run()
        print(run)
        print(line("all of them", run), flush=True)
    if options.levers is None:
        return
    for name in options.levers or LEVERS:
        print(line(f"without {name}", dry_run(**LEVERS[name])), flush=True)


if __name__ == "__main__":
    main()
