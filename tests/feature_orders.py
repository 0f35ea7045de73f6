"""Features applied to a model in every order: all permutations of three.

    python tests/feature_orders.py [--models lstm,block,experts] [--only remat,convert] [--seed 0]
        [--sample 0] [--order remat,convert,lora] [--every]

Each permutation is applied to a new model, with classes of layers as no earlier permutation left
them. What is not among the three is done where users do it: adapt and build first, compile last.
The model then trains two steps of 13 rows on {"data": 4, "model": 2} and predicts. Losses, outputs
and weights must equal those of the same order in plain Keras on one device (1e-5), and every
feature must be in the model and in the program of its step. An order that cannot work must be one
error of ours. Models with the same program and weights train only once. Each permutation meets one
of the models, in turn; with `--every` it meets all of them.
"""

import argparse
import contextlib
import itertools
import random
import re
import time
from collections import Counter
from typing import Any

import keras
import numpy as np
from keras import ops

import keras_tpu_dist as ktd
from keras_tpu_dist.layers.experts import is_routed
from keras_tpu_dist.layout.annotations import annotation_of
from keras_tpu_dist.memory.remat import policy_of
from keras_tpu_dist.programs.experts import routed
from keras_tpu_dist.programs.jaxprs import any_equation
from keras_tpu_dist.programs.partitioner import Jitted

L = keras.layers
ROWS, TIME, WIDTH = 13, 6, 16
TOLERANCE = 1e-5
register = keras.saving.register_keras_serializable("feature_orders")


class Core(L.Layer):
    """A residual layer with a feed-forward layer that can have LoRA."""

    def build(self, shape):
        self.norm.build(shape)
        self.feed.build(shape)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.LayerNormalization(name="norm", dtype=self.dtype_policy)
        self.feed = L.Dense(WIDTH, name="feed", dtype=self.dtype_policy)


@register
class Block(Core):
    """A transformer's block with one kernel for queries, keys and values, and more attention."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.fused = L.Dense(3 * WIDTH, name="query_key_value", dtype=self.dtype_policy)
        self.second = L.MultiHeadAttention(4, 4, name="second", dtype=self.dtype_policy)

    def build(self, shape):
        super().build(shape)
        self.fused.build(shape)
        self.second.build(shape, shape)

    def call(self, x):
        y = ops.reshape(self.fused(self.norm(x)), (-1, TIME, 3, 4, WIDTH // 4))
        q, k, v = ops.unstack(y, axis=2)
        p = ops.softmax(ops.einsum("bqnh,bknh->bnqk", q, k) / 2)
        y = ops.reshape(ops.einsum("bnqk,bknh->bqnh", p, v), (-1, TIME, WIDTH))
        y = x + self.feed(y)
        return y + self.second(y, y)


@register
class Mixture(Core):
    """A router and experts that are all computed, as KerasHub has them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.router = L.Dense(8, use_bias=False, name="router", dtype=self.dtype_policy)

    def build(self, shape):
        super().build(shape)
        self.router.build(shape)
        self.up = self.add_weight(shape=(8, WIDTH, 8), name="up")
        self.down = self.add_weight(shape=(8, 8, WIDTH), name="down")

    def call(self, x):
        y = self.norm(x)
        best, which = ops.top_k(ops.softmax(self.router(y)), 2)
        gates = ops.sum(ops.one_hot(which, 8) * best[..., None], -2)
        hidden = ops.silu(ops.einsum("btd,edh->bteh", y, self.up))
        every = ops.einsum("bteh,ehd->bted", hidden, self.down)
        return x + self.feed(ops.sum(every * gates[..., None], 2))


def core_of(name):
    if name == "lstm":
        return [L.LSTM(WIDTH, return_sequences=True, name="core"), L.LSTM(WIDTH, name="second")]
    return [Block(name="core") if name == "block" else Mixture(name="core"), L.Flatten()]


def start(name):
    """The model, not built."""
    layers = [L.Normalization(name="input"), L.Dense(WIDTH, name="first"), *core_of(name)]
    return keras.Sequential([*layers, L.Dense(WIDTH, name="last"), L.Dense(3, name="head")])


def data():
    rng = np.random.default_rng(7)
    x = rng.normal(2, 3, size=(ROWS, TIME, WIDTH)).astype("float32")
    return x, rng.normal(size=(ROWS, 3)).astype("float32")


def build(model):
    model.build((None, TIME, WIDTH))
    filled(model, lambda weight: "lora" not in weight.path)


def filled(model, holds=lambda weight: True):
    """Weights that do not depend on what was drawn before."""
    for number, weight in enumerate(model.trainable_weights):
        if holds(weight):
            rng = np.random.default_rng([len(model.weights), number])
            weight.assign(rng.normal(size=weight.shape) * 0.7 / np.sqrt(weight.shape[-1]))


def adapt(model):
    model.get_layer("input").adapt(data()[0])


def compile_(model):
    # At 0.05 the loss grows fivefold in two steps, and an ulp of the weights becomes 2e-5 of it.
    model.compile(keras.optimizers.SGD(0.01), "mse")


def lora(model):
    for name in ("last", "head"):
        layer = model.get_layer(name)
        layer.enable_lora(2)
        for weight in layer.weights:
            if "lora" in weight.path:
                rng = np.random.default_rng(len(weight.shape))
                weight.assign(rng.normal(size=weight.shape) * 0.2)


def annotate(model):
    ktd.split(model.get_layer("first"), kernel=(None, "model"))
    ktd.assign(model.get_layer("second" if has(model, "second") else "last"), 1)


def has(model, name):
    return any(layer.name == name for layer in model.layers)


def remat(model):
    ktd.remat(model.get_layer("core"))
    ktd.remat(model.get_layer("last"), "dots")


PLAIN = {
    "quantize": lambda model: model.quantize("int8"),
    "lora": lora,
    "freeze": lambda model: ktd.freeze(model, ["first", "*/bias"]) and None,
    "compile": compile_,
    "build": build,
    "adapt": adapt,
}
FEATURES = {"remat": remat, "convert": ktd.convert, "annotate": annotate, **PLAIN}


def steps_of(order):
    """What is done, in order."""
    rest = [name for name in ("adapt", "build") if name not in order]
    return [*rest, *order, *(["compile"] if "compile" not in order else [])]


def made(name, order, features):
    """A model with features applied."""
    keras.utils.set_random_seed(3)
    model = start(name)
    for step in steps_of(order):
        if step in features:
            model = features[step](model) or model
    return model


def trained(model):
    """What two steps and a prediction give."""
    x, y = data()
    losses = [model.train_on_batch(x, y) for _ in range(2)]
    return [losses, model.predict_on_batch(x), *model.get_weights()]


class _Traced(Exception):
    pass


def program(model):
    """The train step of a model, traced; the model does not change."""
    launch = Jitted._to_launch

    def traced(self, kind, args):
        raise _Traced(self.trace(*args).jaxpr)

    Jitted._to_launch = traced
    try:
        model.train_on_batch(*data())
    except _Traced as found:
        return found.args[0]
    finally:
        Jitted._to_launch = launch
    raise AssertionError("the step was not traced")


@contextlib.contextmanager
def rows_of_experts():
    """Notes whether experts are computed for the chosen tokens alone."""
    found: list[int] = []
    stock = routed._on_device

    def noted(*args, **kwargs):
        found.append(1)
        return stock(*args, **kwargs)

    routed._on_device = noted
    try:
        yield found
    finally:
        routed._on_device = stock


def lost(name, order, model, jaxpr, routed_calls, strategy):
    """The features that are not in a model or in its program."""
    found = []
    core, last = model.get_layer("core"), model.get_layer("last")
    calls: Counter[str] = Counter()
    any_equation(jaxpr, lambda each: bool(calls.update([each.primitive.name])))
    if "remat" in order and not (
        policy_of(core) == "full" and policy_of(last) == "dots" and calls["remat2"] >= 2
    ):
        found.append("remat")
    if "convert" in order and name == "lstm" and type(core) is not ktd.layers.LSTM:
        found.append("convert")
    if "convert" in order and name == "experts" and not (is_routed(core) and routed_calls):
        found.append("convert")
    layout = strategy.explain(model)
    by_path = {row.path: row for row in layout.rows}
    if "annotate" in order:
        first = next(row for path, row in by_path.items() if path.endswith("first/kernel"))
        assigned = model.get_layer("second" if name == "lstm" else "last")
        device = getattr(annotation_of(assigned), "logical_device", None)
        if tuple(first.axes) != (None, "model") or device != 1 or "cond" not in calls:
            found.append("annotate")
    fused = [row for path, row in by_path.items() if path.endswith("query_key_value/kernel")]
    if name == "block" and not all("used as" in row.reason for row in fused):
        found.append("plan")
    if "quantize" in order and last.quantization_mode != "int8":
        found.append("quantize")
    if "lora" in order and not last.lora_enabled:
        found.append("lora")
    if "freeze" in order and model.get_layer("first").trainable:
        found.append("freeze")
    mean = np.mean(data()[0], axis=(0, 1))
    if np.max(np.abs(np.reshape(model.get_layer("input").mean, (-1,)) - mean)) > TOLERANCE:
        found.append("adapt")
    return found


METHODS = ("call", "quantized_call", "__call__", "_compute_attention")


def with_stock_classes():
    """Undoes what an earlier permutation did to the classes of layers of these models."""
    kinds = [L.LSTM, ktd.layers.LSTM, L.Dense, L.MultiHeadAttention, L.LayerNormalization]
    for kind in [*kinds, L.Normalization, L.Flatten, keras.Sequential, Block, Mixture]:
        for name in METHODS:
            stock = vars(kind).get(name)
            while any(key.startswith("_keras_tpu_dist") for key in getattr(stock, "__dict__", ())):
                stock = stock.__wrapped__
            if stock is not vars(kind).get(name):
                inherited = any(vars(base).get(name) is stock for base in kind.__mro__[1:])
                delattr(kind, name) if inherited else setattr(kind, name, stock)


class Runner:
    """Runs permutations; equal programs with equal weights, and equal references, run once."""

    def __init__(self):
        self._references: dict[Any, Any] = {}
        self._results: dict[Any, Any] = {}
        self.counts: Counter[str] = Counter()

    def _reference(self, name, order):
        plain = tuple(step for step in steps_of(order) if step in PLAIN)
        if (name, plain) not in self._references:
            with_stock_classes()
            keras.utils.clear_session(free_memory=False)
            try:
                model = made(name, order, PLAIN)
                self._references[name, plain] = trained(model)
            except ValueError as error:
                self._references[name, plain] = error
        return self._references[name, plain]

    def run(self, name, order):
        """What is wrong with an order, or `None`."""
        expected = self._reference(name, order)
        with_stock_classes()
        keras.utils.clear_session(free_memory=False)
        strategy = ktd.TPUStrategy(
            {"data": 4, "model": 2}, ktd.Planner("tensor_parallel", min_size=64)
        )
        with strategy.scope(), rows_of_experts() as rows:
            try:
                model = made(name, order, FEATURES)
                jaxpr = program(model)
            except ValueError as error:
                return self._refused(order, error, expected)
            if isinstance(expected, Exception):
                return f"plain Keras refuses: {expected}"
            missing = lost(name, order, model, jaxpr, bool(rows), strategy)
            if missing:
                return f"lost: {', '.join(missing)}"
            text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
            key = text, *(np.asarray(w).tobytes() for w in model.get_weights())
            if key not in self._results:
                self.counts["distinct programs"] += 1
                self._results[key] = trained(model)
        found = self._results[key]
        if len(found) != len(expected):
            return f"{len(found) - 2} weights, not {len(expected) - 2}"
        pairs = zip(found, expected, strict=True)
        worst = max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in pairs)
        if not worst <= TOLERANCE:
            return f"differs by {worst:.1e}"
        self.counts["equal"] += 1
        return None

    def _refused(self, order, error, expected):
        words = str(error).strip()
        ours = "Received:" in words or isinstance(expected, Exception)
        kind = "refused as Keras does" if isinstance(expected, Exception) else "refused by us"
        self.counts[kind] += 1
        self.counts[f"  {words.splitlines()[0][:90]}"] += 1
        return None if ours else f"an error without our words: {words[:300]}"


def orders(only=()):
    """All permutations of three features; those with `only` among them."""
    every = itertools.permutations(FEATURES, 3)
    return [order for order in every if set(only) <= set(order)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="lstm,block,experts")
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--order", default="")
    parser.add_argument("--every", action="store_true")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    chosen = [tuple(options.order.split(","))] if options.order else orders(only)
    models = options.models.split(",")
    cases = [
        (name, order)
        for number, order in enumerate(chosen)
        for name in (models if options.every else [models[number % len(models)]])
    ]
    if options.sample:
        cases = random.Random(options.seed).sample(cases, options.sample)
    runner, wrong, began = Runner(), 0, time.monotonic()
    for number, (name, order) in enumerate(cases, 1):
        trouble = runner.run(name, order)
        if trouble is not None:
            wrong += 1
            print(f"WRONG {name} {','.join(order)}: {trouble}", flush=True)
        if number % 25 == 0:
            print(f"{number} of {len(cases)} in {time.monotonic() - began:.0f} s", flush=True)
    for words, count in runner.counts.items():
        print(f"{count:6} {words}")
    print(f"{len(cases)} orders, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
