"""The costs and savings of remat policies, by the TPU compiler: no chip is needed.

    python benchmarks/remat.py                          # three models, all policies
    python benchmarks/remat.py decoder --policies full  # some
    python benchmarks/remat.py --effort exact

One train step under `TPUStrategy(remat=policy)` on v5e:2x2, data-parallel, mixed_bfloat16, Adam.
Memory is that of the compiled program on one device, without weights and optimizer. Cycles are the
compiler's estimates for one step.
"""

import argparse

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import keras

from keras_tpu_dist.show.text import size_text

L = keras.layers
POLICIES = ("none", "full", "dots", "attention")
HEADER = ("model", "policy", "activations", "of none", "cycles", "of none")


class TransformerBlock(L.Layer):
    """Norm, attention, norm, feed-forward, as in KerasHub's decoders and ViTs."""

    def __init__(self, heads, width, causal, **kwargs):
        super().__init__(**kwargs)
        self.causal = causal
        self.norm_1, self.norm_2 = L.LayerNormalization(), L.LayerNormalization()
        self.attention = L.MultiHeadAttention(heads, width // heads, dropout=0.1)
        self.up, self.down = L.Dense(4 * width, "gelu"), L.Dense(width)
        self.dropout = L.Dropout(0.1)

    def build(self, shape):
        self.norm_1.build(shape)
        self.norm_2.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * shape[-1]))

    def call(self, x):
        h = self.norm_1(x)
        x = x + self.dropout(self.attention(h, h, use_causal_mask=self.causal))
        return x + self.dropout(self.down(self.up(self.norm_2(x))))


class ConvBlock(L.Layer):
    """Two convolutions with batch normalisation and a residual, as in ResNets."""

    def __init__(self, channels, **kwargs):
        super().__init__(**kwargs)
        self.convs = [L.Conv2D(channels, 3, padding="same", use_bias=False) for _ in range(2)]
        self.norms = [L.BatchNormalization() for _ in range(2)]

    def build(self, shape):
        for layer in (*self.convs, *self.norms):
            layer.build(shape)

    def call(self, x):
        h = keras.ops.relu(self.norms[0](self.convs[0](x)))
        return keras.ops.relu(x + self.norms[1](self.convs[1](h)))


def decoder(layers=4, width=512, time=512, vocabulary=4096):
    tokens = keras.Input((time,), dtype="int32")
    x = L.Embedding(vocabulary, width)(tokens)
    for i in range(layers):
        x = TransformerBlock(8, width, True, name=f"block_{i}")(x)
    return keras.Model(tokens, L.Dense(vocabulary, name="head")(L.LayerNormalization()(x)))


def vision_transformer(layers=4, width=384, size=128, patch=8):
    image = keras.Input((size, size, 3))
    x = L.Conv2D(width, patch, strides=patch, name="patches")(image)
    x = L.Reshape((-1, width))(x)
    for i in range(layers):
        x = TransformerBlock(6, width, False, name=f"block_{i}")(x)
    return keras.Model(image, L.Dense(1000)(L.GlobalAveragePooling1D()(x)))


def conv_net(layers=6, channels=128, size=64):
    image = keras.Input((size, size, 3))
    x = L.Conv2D(channels, 3, padding="same", name="stem")(image)
    for i in range(layers):
        x = ConvBlock(channels, name=f"block_{i}")(x)
    return keras.Model(image, L.Dense(1000)(L.GlobalAveragePooling2D()(x)))


# Each model, and its batch on four chips.
MODELS = {"decoder": (decoder, 32), "vit": (vision_transformer, 128), "conv": (conv_net, 128)}


def compiled(make):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def measured(name, policy, effort):
    """Bytes of activations and other temporaries on one device, and cycles of a step."""
    make, batch_size = MODELS[name]
    remat = None if policy == "none" else policy
    strategy = ktd.TPUStrategy(topology="v5e:2x2", remat=remat, compiler_options=None)
    run = ktd.dry_run(lambda: compiled(make), strategy, batch_size=batch_size, effort=effort)
    if not run.memory or run.cost is None:
        return run.error or "no program"
    return run.memory["temporaries"], run.cost.cycles


def main():
    """Prints the table, row by row."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="*", default=[*MODELS])
    arguments.add_argument("--policies", nargs="+", default=POLICIES[1:])
    arguments.add_argument("--effort", default="quick")
    given = arguments.parse_args()
    ktd.simulate(8)
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}", flush=True)
    for name in given.models:
        before = None
        for policy in ("none", *given.policies):
            found = measured(name, policy, given.effort)
            if isinstance(found, str):
                print(f"| {name} | {policy} | {found.splitlines()[0][:120]} |", flush=True)
                continue
            before = before or found
            memory, cycles = (f"{a / b:.2f}" for a, b in zip(found, before))
            row = (name, policy, size_text(found[0]), memory, f"{found[1]:,.0f}", cycles)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
