"""Mixtures of experts: the TPU compiler's estimates for a train step; nothing runs on a chip.

    python benchmarks/experts.py [--effort exact] [--overlap] [chosen] [gshard] [sizes]

`chosen`: layers like KerasHub's, which compute every expert for every token (top 8 of 64),
unchanged and converted by `ktd.convert`. `gshard`: two layers that assign tokens to experts by
one-hot products, with experts over the data axis: with gathered kernels, with exchanged tokens,
and with `all_to_all` by hand. `sizes`: which is faster for several sizes, and what is chosen.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
from unittest import mock

import jax
import keras
from jax.sharding import PartitionSpec
from keras import ops

from keras_tpu_dist.layers.experts import route_experts
from keras_tpu_dist.programs.experts import exchange
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


def gshard_run(layout, by_hand, exchanged, effort, overlap, rows=64, **sizes):
    """A dry run, and what the rule was asked: bytes of tokens and kernels, and its choice.

    `exchanged` decides instead of the rule.
    """
    options = {exchange.ASYNCHRONOUS: True} if overlap else "auto"
    strategy = ktd.TPUStrategy({"data": 8}, layout, topology=TOPOLOGY, compiler_options=options)
    asked, rule = set(), exchange.is_shorter

    def decide(*question):
        asked.add((*question, rule(*question)))
        return exchanged

    with mock.patch.object(exchange, "is_shorter", decide):
        run = ktd.dry_run(
            lambda: gshard_model(strategy, by_hand, **sizes),
            strategy,
            batch_size=rows,
            effort=effort,
        )
    return run, asked


# Rows of 1,024 tokens, unless it says otherwise.
SIZES = (
    {"rows": 32},
    {"rows": 128},
    {"rows": 128, "count": 32},
    {"rows": 64, "hidden": 3072},
    {"rows": 96},
    {"rows": 64, "hidden": 2048},
    {"rows": 128, "count": 16, "hidden": 3072},
    {"rows": 64, "width": 512},
    {"rows": 32, "time": 512, "hidden": 1024},
    {"rows": 128, "count": 16},
    {"rows": 64, "width": 2048},
    {"rows": 96, "width": 2048},
    {"rows": 64},
    {"rows": 48},
    {"rows": 48, "width": 2048},
)


def sizes(effort, overlap):
    """Prints which way takes less time for several sizes, and what the rule chooses."""
    header = "rows, sizes", "tokens", "kernels that are waited for", "gathered", "exchanged"
    header += ("chosen", "slower than the other")
    print(f"| {' | '.join(header)} |\n|{' - |' * len(header)}")
    for size in SIZES:
        (gathered, asked), (exchanged, _) = (
            gshard_run("fsdp", False, way, effort, overlap, **size) for way in (False, True)
        )
        ((tokens, kernels, *_, chosen),) = asked
        steps = gathered.estimate.step, exchanged.estimate.step
        cells = [", ".join(f"{name} {number}" for name, number in size.items())]
        cells += [size_text(tokens), size_text(kernels), *map(duration_text, steps)]
        cells += ["exchanged" if chosen else "gathered", f"{steps[chosen] / min(steps) - 1:.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def gshard(effort, overlap):
    """Prints the cost of gathering kernels, of exchanging tokens by the plan, and by hand."""
    rules = ktd.LayoutRules([("g_shard.*/(up|down)", ("data",))])
    rows = (
        ("gathered", "fsdp", False, False),
        ("exchanged", "fsdp", False, True),
        ("by hand", rules, True, False),
    )
    print("| tokens | cycles at the clock | step | HBM traffic | collectives | memory |")
    print("| - | - | - | - | - | - |")
    for name, layout, by_hand, exchanged in rows:
        run, _ = gshard_run(layout, by_hand, exchanged, effort, overlap)
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
    parser.add_argument("tables", nargs="*", choices=["chosen", "gshard", "sizes", []], default=[])
    parser.add_argument("--effort", default="exact", choices=["quick", "exact"])
    parser.add_argument("--overlap", action="store_true", help="all-to-alls beside other work")
    options = parser.parse_args()
    if not options.tables or "chosen" in options.tables:
        chosen(options.effort)
    if not options.tables or "gshard" in options.tables:
        gshard(options.effort, options.overlap)
    if not options.tables or "sizes" in options.tables:
        sizes(options.effort, options.overlap)


if __name__ == "__main__":
    main()
