"""Mixtures of experts: the TPU compiler's estimates for a train step; nothing runs on a chip.

    python benchmarks/experts.py [--effort exact] [chosen] [gshard]

`chosen`: layers like KerasHub's, which compute every expert for every token (top 8 of 64),
unchanged and converted by `ktd.convert`. `gshard`: two layers that assign tokens to experts by
one-hot products: under `"fsdp"`, whose kernels are gathered, and with `all_to_all` by hand.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse

import jax
import keras
from jax.sharding import PartitionSpec
from keras import ops

from keras_tpu_dist.layers.experts import route_experts
from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
TOPOLOGY = "v5e:2x4"


class Bank(L.Layer):
    """All experts, of all tokens, as in `keras_hub`'s Qwen3-MoE."""

    def __init__(self, count, hidden, **kwargs):
        super().__init__(**kwargs)
        self.count, self.hidden = count, hidden

    def build(self, shape):
        up, down = (shape[-1], 2 * self.hidden), (self.hidden, shape[-1])
        self.gate_up = self.add_weight(shape=(self.count, *up), name="gate_up")
        self.down = self.add_weight(shape=(self.count, *down), name="down")
        self.built = True

    def call(self, x):
        gate, up = ops.split(ops.einsum("th,ehm->etm", x, self.gate_up), 2, axis=-1)
        return ops.einsum("eti,eih->eth", up * ops.silu(gate), self.down)


@keras.saving.register_keras_serializable("benchmarks")
class Mixture(L.Layer):
    """A router and a bank, as in `keras_hub`'s Qwen3-MoE."""

    def __init__(self, count, hidden, top, **kwargs):
        super().__init__(**kwargs)
        self.count, self.hidden, self.top = count, hidden, top

    def get_config(self):
        own = {"count": self.count, "hidden": self.hidden, "top": self.top}
        return super().get_config() | own

    def build(self, shape):
        self.router = L.Dense(self.count, use_bias=False, name="router", dtype=self.dtype_policy)
        self.router.build(shape)
        self.bank = Bank(self.count, self.hidden, name="experts", dtype=self.dtype_policy)
        self.bank.build(shape)
        self.built = True

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        best, which = ops.top_k(ops.softmax(self.router(flat), axis=-1), k=self.top)
        best = best / ops.sum(best, axis=-1, keepdims=True)
        one_hot = ops.cast(ops.one_hot(which, self.count), best.dtype)
        weights = ops.transpose(ops.sum(one_hot * best[..., None], axis=1), (1, 0))
        y = ops.sum(self.bank(flat) * ops.cast(weights, flat.dtype)[:, :, None], axis=0)
        return ops.reshape(y, (-1, x.shape[1], x.shape[2]))


def mixtures(convert, layers=1, time=1024, width=2048, count=64, hidden=1024, top=8):
    """Residual mixtures, compiled."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = inputs = keras.Input((time, width))
    for _ in range(layers):
        x = x + Mixture(count, hidden, top)(L.RMSNormalization()(x))
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    if convert:
        route_experts(model)
    return model


def chosen(effort):
    """Prints the savings of computing only the chosen experts."""
    print("| mesh | experts | cycles at the clock | step | memory |\n| - | - | - | - | - |")
    plans = ({"data": 8}, "fsdp"), ({"data": 4, "model": 2}, "tensor_parallel")
    for mesh, plan in plans:
        for name in ("all", "chosen"):
            strategy = ktd.TPUStrategy(mesh, plan, topology=TOPOLOGY)
            run = ktd.dry_run(
                lambda name=name: mixtures(name == "chosen"),
                strategy,
                batch_size=32,
                effort=effort,
            )
            times = run.estimate
            cells = f"{mesh}, {plan}", name, duration_text(times.kernels), duration_text(times.step)
            print(f"| {' | '.join(cells)} | {size_text(run.peak_bytes)} |", flush=True)


class GShard(L.Layer):
    """Each token goes to one expert, of which each takes so many of a row, as GShard does.

    References:
        https://arxiv.org/abs/2006.16668
    """

    def __init__(self, count, hidden, strategy=None, **kwargs):
        super().__init__(**kwargs)
        self.count, self.hidden, self.strategy = count, hidden, strategy

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], self.count), name="gate")
        self.up = self.add_weight(shape=(self.count, shape[-1], self.hidden), name="up")
        self.down = self.add_weight(shape=(self.count, self.hidden, shape[-1]), name="down")

    def compute_output_shape(self, shape):
        return shape

    def routes(self, x, gate):
        """The expert and place of each token, with its weight: `(rows, time, experts, places)`."""
        capacity = 2 * x.shape[1] // self.count
        gates = ops.softmax(ops.cast(x @ gate, "float32"))
        chosen = ops.one_hot(ops.argmax(gates, -1), self.count)
        place = ops.cumsum(chosen, 1) * chosen - 1
        sent = ops.one_hot(ops.cast(place, "int32"), capacity)
        weighed = sent * ops.expand_dims(chosen * gates, -1)
        return ops.cast(sent, x.dtype), ops.cast(weighed, x.dtype)

    def call(self, x):
        if self.strategy is not None:
            return self.by_hand(x)
        sent, weighed = self.routes(x, self.gate)
        inner = ops.einsum("btec,btd->ebcd", sent, x)
        inner = ops.gelu(ops.einsum("ebcd,edf->ebcf", inner, self.up))
        inner = ops.einsum("ebcf,efd->ebcd", inner, self.down)
        return ops.einsum("ebcd,btec->btd", inner, weighed)

    def by_hand(self, x):
        """The same on each device, with two exchanges."""

        def device(x, gate, up, down):
            sent, weighed = self.routes(x, gate)
            inner = ops.einsum("btec,btd->ebcd", sent, x)
            inner = jax.lax.all_to_all(inner, "data", 0, 1, tiled=True)
            inner = ops.gelu(ops.einsum("ebcd,edf->ebcf", inner, up))
            inner = ops.einsum("ebcf,efd->ebcd", inner, down)
            inner = jax.lax.all_to_all(inner, "data", 1, 0, tiled=True)
            return ops.einsum("ebcd,btec->btd", inner, weighed)

        split = PartitionSpec("data")
        weights = [ops.convert_to_tensor(w) for w in (self.gate, self.up, self.down)]
        return jax.shard_map(
            device,
            mesh=self.strategy.mesh,
            in_specs=(split, PartitionSpec(), split, split),
            out_specs=split,
            check_vma=False,
        )(x, *weights)


def gshard_model(strategy, by_hand, layers=2, time=1024, width=1024, count=8, hidden=4096):
    """Residual layers of experts, compiled."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = inputs = keras.Input((time, width))
    for _ in range(layers):
        mixture = GShard(count, hidden, strategy if by_hand else None)
        x = x + mixture(L.RMSNormalization()(x))
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


def gshard(effort):
    """Prints the cost of gathering kernels, and of exchanging tokens by hand."""
    rules = ktd.LayoutRules([("g_shard.*/(up|down)", ("data",))])
    print("| tokens | cycles at the clock | step | HBM traffic | collectives | memory |")
    print("| - | - | - | - | - | - |")
    for name, layout, by_hand in ("gathered", "fsdp", False), ("by hand", rules, True):
        strategy = ktd.TPUStrategy({"data": 8}, layout, topology=TOPOLOGY)
        run = ktd.dry_run(
            lambda strategy=strategy, by_hand=by_hand: gshard_model(strategy, by_hand),
            strategy,
            batch_size=64,
            effort=effort,
        )
        times, sent = run.estimate, {}
        for collective in run.cost.collectives:
            whole = collective.bytes * collective.times
            sent[collective.kind] = sent.get(collective.kind, 0) + whole
        largest = sorted(((size, kind) for kind, size in sent.items()), reverse=True)[:2]
        words = ", ".join(f"{kind} of {size_text(size)}" for size, kind in largest)
        cells = name, duration_text(times.kernels), duration_text(times.step)
        cells += (size_text(run.cost.hbm_bytes), words, size_text(run.peak_bytes))
        print(f"| {' | '.join(cells)} |", flush=True)


def main():
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=["chosen", "gshard", []], default=[])
    parser.add_argument("--effort", default="exact", choices=["quick", "exact"])
    options = parser.parse_args()
    if not options.tables or "chosen" in options.tables:
        chosen(options.effort)
    if not options.tables or "gshard" in options.tables:
        gshard(options.effort)


if __name__ == "__main__":
    main()
