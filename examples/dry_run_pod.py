"""A transformer of a billion parameters on 256 TPU chips that you need not have.

    python examples/dry_run_pod.py            # three dry runs, a few minutes on a laptop

Needs libtpu (`pip install 'jax[tpu]'`), no TPU.
"""

import resource
import sys

import keras_tpu_dist as ktd
import keras
from keras_tpu_dist.tools.dryrun.run import dry_run
from keras_tpu_dist.tools.dryrun.build import lower

VOCABULARY, LENGTH = 32_000, 1024


def transformer(width: int, depth: int, heads: int):
    """Returns the function that builds and compiles a decoder-only transformer."""
    layers = keras.layers

    def block(x, i):
        h = layers.LayerNormalization(name=f"norm_a{i}")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"attention{i}")
        x = layers.Add(name=f"add_a{i}")([x, attention(h, h, use_causal_mask=True)])
        h = layers.LayerNormalization(name=f"norm_b{i}")(x)
        h = layers.Dense(4 * width, activation="gelu", name=f"up{i}")(h)
        h = layers.Dense(width, name=f"down{i}")(h)
        return layers.Add(name=f"add_b{i}")([x, h])

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(VOCABULARY, width, name="embedding")(tokens)
        for i in range(depth):
            x = block(x, i)
        x = layers.LayerNormalization(name="norm")(x)
        logits = layers.Dense(VOCABULARY, use_bias=False, dtype="float32", name="logits")(x)
        model = keras.Model(tokens, logits)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-4), loss)
        keras.config.set_dtype_policy("float32")
        return model

    return build


# Megatron's layout: heads and the wide features of the feed-forward block over "model".
TENSOR_PARALLEL = [
    (r"attention\d+/(query|key|value)/kernel", (None, "model", None)),
    (r"attention\d+/(query|key|value)/bias", ("model", None)),
    (r"attention\d+/attention_output/kernel", ("model", None, None)),
    (r"up\d+/kernel", (None, "model")),
    (r"up\d+/bias", ("model",)),
    (r"down\d+/kernel", ("model", None)),
    (r"embedding/embeddings", ("model", None)),
    (r"logits/kernel", (None, "model")),
]


def peak_gb() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> int:
    one_billion = transformer(width=2560, depth=12, heads=20)

    print("1. A billion parameters on 256 v5e chips, data 64 x model 4")
    pod = ktd.TPUStrategy({"data": 64, "model": 4}, TENSOR_PARALLEL, topology="v5e:16x16")
    run = dry_run(one_billion, pod, batch_size=256, progress=print)
    print(
        run,
        f"\npeak memory of this process: {peak_gb():.2f} GB, of the compiler's: "
        f"{run.compile_peak_bytes / 1e9:.2f} GB; compiler {run.compile_cpu_seconds:.0f} CPU s\n",
    )

    print("2. The same on one host's eight chips, data-parallel")
    host = ktd.TPUStrategy({"data": 8}, topology="v5e:2x4")
    small = dry_run(one_billion, host, batch_size=256, progress=print)
    print(small, "\n")

    print("3. Seven billion parameters: built and lowered")
    lowered = lower(transformer(width=4096, depth=33, heads=32), pod, batch_size=256)
    gigabytes = (lowered.state.weights + lowered.state.optimizer) / 1e9
    print(
        f"{lowered.parameters:,} parameters in {lowered.seconds:.1f} s, state per chip "
        f"{gigabytes:.2f} GB, peak memory of this process {peak_gb():.2f} GB"
    )
    return 0 if run.fits and not small.fits and peak_gb() < 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
