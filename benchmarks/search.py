"""The closed-form forecast against the TPU compiler, and `ktd.search` against a list.

    python benchmarks/search.py [--topology v5e:2x4] [--candidates 10] [--seed 0] [--model NAME ...]
    python benchmarks/search.py --against-list [--model NAME ...]
    python benchmarks/search.py --recorded [--model NAME ...]
    python benchmarks/search.py --without [--model NAME ...]
    python benchmarks/search.py --cycles [--model NAME ...]

For each model, compiles some candidates of `ktd.search`: the first by forecast, and others at
random. Prints Spearman's correlation of forecast and compiled step time and memory, the rank of the
compiler's best in the forecast, and the time of forecasts and compilations. Compiled times within 2
percent of each other count as equal. `--all` compiles every candidate, `--record` writes the
results to `tests/searches/compiled.json`.

`--against-list` compiles 30 strategies written by hand, the fastest four at full effort too, and
prints the fastest and what a search chooses, with an empty cache. `--cycles` prints the compiler's
time of each layer next to that at the chip's peak rates.

`--recorded` compiles nothing. It reads the results for most candidates on v5e:2x4 from
`tests/searches/compiled.json` (libtpu 0.0.42.1), and also prints the minimum over 20 draws of ten
candidates, five of them the first by forecast.

`--without` prints the same correlations without each of the forecast's constants in turn, which
shows the constants that are worth having.

Compilations are cached in `--cache`, so that a second run only has to lower.
"""

import argparse
import json
import math
import pathlib
import random
import statistics
import tempfile
import time

import keras

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun.cache import Cache
from keras_tpu_dist.tools.dryrun.compile import How
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.searches import activations, forecast
from keras_tpu_dist.tools.searches.candidates import Candidate, candidates
from keras_tpu_dist.tools.searches.ranking import rank
from keras_tpu_dist.tools.searches.search import _forecasts, compiled_step, lowered_step

L = keras.layers


def compiled(model, loss="mse"):
    model.compile("adam", loss)
    return model


def tokens_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def block(x, width, heads, causal=True):
    y = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    y = L.LayerNormalization()(x)
    return x + L.Dense(width)(L.Dense(4 * width, activation="gelu")(y))


def decoder(width=1024, layers=4, time=512, vocabulary=16_000):
    tokens = keras.Input((time,), dtype="int32")
    x = L.Embedding(vocabulary, width)(tokens)
    for _ in range(layers):
        x = block(x, width, width // 64)
    return compiled(keras.Model(tokens, L.Dense(vocabulary)(x)), tokens_loss())


def vit(width=512, layers=4):
    image = keras.Input((128, 128, 3))
    x = L.Reshape((64, width))(L.Conv2D(width, 16, 16)(image))
    for _ in range(layers):
        x = block(x, width, 8, causal=False)
    x = L.Dense(1000)(L.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(image, x), tokens_loss())


def cnn(layers=4):
    image = keras.Input((64, 64, 3))
    x = image
    for i in range(layers):
        x = L.Conv2D(64 * 2**i, 3, padding="same", activation="relu")(x)
        x = L.Conv2D(64 * 2**i, 3, 2, padding="same", activation="relu")(x)
    x = L.Dense(1000)(L.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(image, x), tokens_loss())


def lstm():
    tokens = keras.Input((64,), dtype="int32")
    x = L.Embedding(10_000, 512)(tokens)
    x = ktd.layers.LSTM(1024, return_sequences=True)(x)
    x = ktd.layers.LSTM(1024)(x)
    return compiled(keras.Model(tokens, L.Dense(10_000)(x)), tokens_loss())


def ranking():
    ids = keras.Input((16,), dtype="int32")
    numbers = keras.Input((64,))
    x = L.Flatten()(L.Embedding(500_000, 64)(ids))
    x = L.Concatenate()([x, numbers])
    for width in (1024, 512, 256):
        x = L.Dense(width, activation="relu")(x)
    return compiled(keras.Model([ids, numbers], L.Dense(1)(x)))


class Experts(L.Layer):
    """Each token goes to one expert, of which each takes so many of a row, as GShard does.

    References:
        https://arxiv.org/abs/2006.16668
    """

    def __init__(self, experts, width, **kwargs):
        super().__init__(**kwargs)
        self.experts, self.width = experts, width

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], self.experts), name="gate")
        self.up = self.add_weight(shape=(self.experts, shape[-1], self.width), name="up")
        self.down = self.add_weight(shape=(self.experts, self.width, shape[-1]), name="down")

    def call(self, x):
        ops, capacity = keras.ops, 2 * x.shape[1] // self.experts
        gates = ops.softmax(ops.cast(x @ self.gate, "float32"))
        chosen = ops.one_hot(ops.argmax(gates, -1), self.experts)
        place = ops.cumsum(chosen, 1) * chosen - 1
        sent = ops.one_hot(ops.cast(place, "int32"), capacity)
        brought = ops.cast(sent * ops.expand_dims(chosen * gates, -1), x.dtype)
        inner = ops.einsum("btec,btd->ebcd", ops.cast(sent, x.dtype), x)
        inner = ops.gelu(ops.einsum("ebcd,edf->ebcf", inner, self.up))
        inner = ops.einsum("ebcf,efd->ebcd", inner, self.down)
        return ops.einsum("ebcd,btec->btd", inner, brought)

    def compute_output_shape(self, shape):
        return shape


def moe(width=512, layers=4, time=256, vocabulary=8_000, experts=8):
    tokens = keras.Input((time,), dtype="int32")
    x = L.Embedding(vocabulary, width)(tokens)
    for _ in range(layers):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(width // 64, 64)(y, y, use_causal_mask=True)
        x = x + Experts(experts, 4 * width)(L.LayerNormalization()(x))
    return compiled(keras.Model(tokens, L.Dense(vocabulary)(x)), tokens_loss())


def encoder_decoder(width=512, layers=3, time=256, vocabulary=8_000):
    source, target = keras.Input((time,), dtype="int32"), keras.Input((time,), dtype="int32")
    embedding = L.Embedding(vocabulary, width)
    x, y = embedding(source), embedding(target)
    for _ in range(layers):
        x = block(x, width, width // 64, causal=False)
    x = L.LayerNormalization()(x)
    for _ in range(layers):
        z = L.LayerNormalization()(y)
        y = y + L.MultiHeadAttention(width // 64, 64)(z, x)
        y = block(y, width, width // 64)
    return compiled(keras.Model([source, target], L.Dense(vocabulary)(y)), tokens_loss())


# Rows a device.
MODELS = {"decoder": (decoder, 4), "ViT": (vit, 16), "CNN": (cnn, 16), "LSTM": (lstm, 32)}
MODELS["ranking"] = (ranking, 512)
# The constants of the forecast were read from those above; these two only check them.
MODELS |= {"MoE": (moe, 8), "encoder-decoder": (encoder_decoder, 8)}


# Mesh, layout, split optimizer, remat: what one might write down for eight chips.
_BOTH = "fsdp and tensor_parallel"
LIST = [
    Candidate(tuple(mesh.items()), layout, split, remat)
    for mesh, layout, split, policies in (
        ({"data": 8}, None, False, (None, "dots", "full")),
        ({"data": 8}, None, True, (None, "full")),
        ({"fsdp": 8}, "fsdp", False, (None, "dots", "full")),
        ({"data": 2, "fsdp": 4}, "fsdp", False, (None, "full")),
        ({"data": 4, "fsdp": 2}, "fsdp", False, (None,)),
        ({"data": 4, "model": 2}, "tensor_parallel", False, (None, "dots", "full")),
        ({"data": 4, "model": 2}, "tensor_parallel", True, (None,)),
        ({"data": 2, "model": 4}, "tensor_parallel", False, (None, "full")),
        ({"data": 2, "model": 4}, "tensor_parallel", True, (None,)),
        ({"data": 1, "model": 8}, "tensor_parallel", False, (None, "full")),
        ({"model": 2, "data": 4}, "tensor_parallel", False, (None,)),
        ({"model": 2, "data": 4}, "tensor_parallel", True, (None,)),
        ({"model": 4, "data": 2}, "tensor_parallel", False, (None,)),
        ({"fsdp": 4, "model": 2}, _BOTH, False, (None, "dots", "full")),
        ({"fsdp": 2, "model": 4}, _BOTH, False, (None, "full")),
        ({"data": 8}, "auto", False, (None,)),
        ({"data": 8}, "auto", True, (None,)),
    )
    for remat in policies
]
_ALIKE = 1.02
# How many of the list are compiled at full effort.
_AGAIN = 4
RECORD = pathlib.Path(__file__).parents[1] / "tests" / "searches" / "compiled.json"


def ranks(values, alike=1.0):
    """Ranks; values that differ by at most `alike` from the first share their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, first = [0.0] * len(values), 0
    for place in range(1, len(order) + 1):
        if place < len(order) and values[order[place]] <= alike * values[order[first]]:
            continue
        for i in order[first:place]:
            found[i] = (first + place - 1) / 2
        first = place
    return found


def spearman(forecast, compiled):
    a, b = ranks(forecast), ranks(compiled, _ALIKE)
    mean = (len(a) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    return both / max(
        math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)), 1e-9
    )


class Measured:
    """A model of this benchmark on a slice."""

    def __init__(self, name, arguments):
        self.name, (self.build, rows) = name, MODELS[name]
        self.topology = ktd.Topology.parse(arguments.topology)
        self.rows = rows * self.topology.num_devices
        self.cache = Cache.of(True if arguments.cache is None else arguments.cache)

    def forecasts(self, among):
        return _forecasts(self.build, self.topology, self.rows, Inputs(), among)[1]

    def compiled(self, tried, effort="quick"):
        lowered = lowered_step(self.build, self.topology, Inputs(), self.cache, tried)
        failed = isinstance(lowered, type(tried))
        return lowered if failed else compiled_step(How(effort, cache=self.cache), tried, lowered)


def correlation(measured, arguments):
    start = time.perf_counter()
    found = measured.forecasts(list(candidates(measured.topology.num_devices)))
    forecast_s = time.perf_counter() - start
    number = len(found) if arguments.all else arguments.candidates
    first = found[: number // 2]
    rest = random.Random(arguments.seed).sample(found[len(first) :], number - len(first))
    start = time.perf_counter()
    runs = [measured.compiled(tried) for tried in (*first, *rest)]
    compile_s = time.perf_counter() - start
    runs = [tried for tried in runs if tried.run is not None and tried.run.estimate is not None]
    steps = [tried.run.estimate.step for tried in runs]
    for tried in runs:
        run, f = tried.run, tried.forecast
        e = run.estimate
        ours = (f.step_s, f.compute_s + f.traffic_s, f.links_s)
        theirs = (e.step, e.kernels, e.exposed_link)
        print(f"  {tried.candidate}\n    step, kernels, exposed links, MiB", end="")
        for numbers, size in ((ours, f.memory_bytes), (theirs, run.total_bytes)):
            print("  |", *(f"{1e3 * s:8.2f}" for s in numbers), f"{size / 2**20:8.0f}", end="")
        print(flush=True)
    if arguments.record:
        record(measured.name, runs)
    right = spearman([tried.forecast.step_s for tried in runs], steps)
    memory = [tried.run.total_bytes for tried in runs]
    room = spearman([tried.forecast.memory_bytes for tried in runs], memory)
    print(
        f"{measured.name:15} {len(found)} candidates in {forecast_s:.1f} s, {len(runs)} compiled "
        f"in {compile_s:.0f} s: step {right:.2f}, memory {room:.2f}; the compiler's best was "
        f"number {steps.index(min(steps)) + 1} of the forecast",
        flush=True,
    )


def record(name, runs):
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found = sorted((str(t.candidate), t.run.estimate.step, t.run.total_bytes) for t in runs)
    recorded[name] = {text: [round(1e3 * step, 3), size // 1024] for text, step, size in found}
    RECORD.write_text(json.dumps(recorded, indent=0) + "\n")


def known_of(measured):
    """The candidates with a recorded compilation, and the correlations of some of them."""
    recorded = json.loads(RECORD.read_text())[measured.name]
    found = measured.forecasts(list(candidates(measured.topology.num_devices)))

    def of(chosen):
        steps, memory = zip(*(recorded[str(tried.candidate)] for tried in chosen))
        return (
            spearman([tried.forecast.step_s for tried in chosen], steps),
            spearman([tried.forecast.memory_bytes for tried in chosen], memory),
        )

    return found, [tried for tried in found if str(tried.candidate) in recorded], of


def recorded(measured, _):
    found, known, of = known_of(measured)
    draws = [of([*known[:5], *random.Random(s).sample(known[5:], 5)])[0] for s in range(20)]
    step, memory = of(known)
    print(
        f"{measured.name:15} {len(known)} of {len(found)} candidates: step {step:.2f}, memory "
        f"{memory:.2f}; of tens: median {statistics.median(draws):.2f}, least {min(draws):.2f}",
        flush=True,
    )


# Every constant of the forecast, and the value at which it does nothing.
NEUTRAL = [
    (forecast, "_QUICK", 1),
    (forecast, "_ROUND_S", 0),
    (forecast, "_PASSES", 1),
    (forecast, "_COLUMNS", 1),
    (forecast, "_PROGRAM", 0),
    (forecast, "_OUTPUTS", 0),
    (forecast, "_LAID_OUT_OF_SPLIT_SLOTS", 0),
    (forecast, "_GATHERED", 0),
    (activations, "_SMALLER", 0),
]


def without(measured, _):
    _, known, of = known_of(measured)
    print(f"{measured.name:15} {'as it is':24} step {of(known)[0]:.3f}, memory {of(known)[1]:.3f}")
    for module, name, neutral in NEUTRAL:
        own = getattr(module, name)
        setattr(module, name, neutral)
        try:
            _, known, of = known_of(measured)
        finally:
            setattr(module, name, own)
        step, memory = of(known)
        print(f"{'':15} {name:24} step {step:.3f}, memory {memory:.3f}", flush=True)


def against_list(measured, arguments):
    with tempfile.TemporaryDirectory() as empty:
        search = ktd.search(measured.build, measured.topology, measured.rows, cache=empty)
    start = time.perf_counter()
    runs = [measured.compiled(tried) for tried in measured.forecasts(LIST)]
    seconds = time.perf_counter() - start
    runs = sorted(
        (t for t in runs if t.run is not None and t.run.fits), key=lambda t: t.run.estimate.step
    )
    for tried in runs:
        print(f"  {1e3 * tried.run.estimate.step:8.2f} ms  {tried.candidate}", flush=True)
    # As a search ends: the fastest of them once more, as training would compile them.
    again = sorted((measured.compiled(t, "exact") for t in runs[:_AGAIN]), key=rank)
    for tried in again:
        print(f"  {1e3 * tried.run.estimate.step:8.2f} ms, exact  {tried.candidate}")
    best, chosen = again[0], search.best
    ratio = chosen.run.estimate.step / best.run.estimate.step
    print(
        f"{measured.name:15} search: {1e3 * chosen.run.estimate.step:.2f} ms, {chosen.candidate}, "
        f"{len(search.compiled)} compiled in {search.seconds:.0f} s\n"
        f"{'':15} list:   {1e3 * best.run.estimate.step:.2f} ms, {best.candidate}, "
        f"{len(runs)} of {len(LIST)} compiled or looked up in "
        f"{seconds:.0f} s\n{'':15} search / list: {ratio:.3f}",
        flush=True,
    )


def cycles(measured, arguments):
    whole = Candidate((("data", measured.topology.num_devices),), None, False, None)
    (tried,) = measured.forecasts([whole])
    cost, chip = measured.compiled(tried).run.cost, measured.topology
    print(f"{measured.name}: compiler, at peak, at bandwidth (ms)")
    for layer in cost.layers[:10]:
        peak, moved = layer.flops / chip.peak_flops(), layer.hbm_bytes / chip.hbm_bandwidth
        taken = layer.cycles / chip.chip.clock
        print(f"  {layer.layer:40}", *(f"{1e3 * s:8.3f}" for s in (taken, peak, moved)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--candidates", type=int, default=10)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--cache", help="a folder; by default that of ktd.search")
    parser.add_argument("--against-list", action="store_true")
    parser.add_argument("--cycles", action="store_true")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--without", action="store_true")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy(arguments.policy)
    others = {against_list: arguments.against_list, cycles: arguments.cycles}
    others |= {recorded: arguments.recorded, without: arguments.without}
    task = next((task for task, asked in others.items() if asked), correlation)
    if task is correlation:
        print("forecast | compiler, of step time and memory a device")
    for name in arguments.model or MODELS:
        task(Measured(name, arguments), arguments)


if __name__ == "__main__":
    main()
