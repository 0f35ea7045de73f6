"""Muon's kernels, whole on one device each, against one device."""

import jax
import keras
import numpy as np
import pytest
from conformance.precision import in_float64
from helpers import assert_close, built, compiled

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.programs import muon
from keras_tpu_dist.programs.answers import PassContext, kept

L = keras.layers
CLOSE = 1e-6
THREE = {"data": 2, "fsdp": 2, "model": 2}
PLANS = {
    "data": ({"data": 8}, None),
    "fsdp": ({"fsdp": 8}, ktd.Planner("fsdp", min_size=4)),
    "model": ({"data": 4, "model": 2}, ktd.Planner("tensor_parallel", min_size=4)),
    "auto": (THREE, ktd.Planner("auto", min_size=4)),
    "both": (THREE, [("(up|square).*/kernel", ("fsdp", "model")), ("down", ("model", "data"))]),
}


@pytest.fixture(autouse=True)
def _small_kernels_too(monkeypatch):
    for cost, of_any in {"_PER_BYTE": 0.0, "_PER_COLLECTIVE": 0.0, "_PER_WHOLE": 1e-3}.items():
        monkeypatch.setattr(muon, cost, of_any)


def mlp(optimizer, blocks=2, frozen="down_1", **options):
    """Kernels of (8, 16), (16, 16) and (16, 8), of which one is frozen, and one of (8, 2)."""
    inputs = x = keras.Input((8,))
    for n in range(blocks):
        y = L.Dense(16, activation="tanh", name=f"up_{n}")(x)
        y = L.Dense(16, activation="tanh", name=f"square_{n}")(y)
        x = L.Add()([x, L.Dense(8, name=f"down_{n}", trainable=f"down_{n}" != frozen)(y)])
    model = keras.Model(inputs, L.Dense(2, name="head")(x))
    return compiled(model, optimizer, "mse", **options)


def stock(**options):
    given = {"learning_rate": 0.01, "exclude_layers": ["head"], "ns_steps": 3, **options}
    return keras.optimizers.Muon(**given)


def several():
    of_layers = {"head/.*": keras.optimizers.SGD(0.1), "up_0/.*": stock(learning_rate=0.02)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(stock(), of_layers))


class Halved(keras.optimizers.Muon):
    """A Muon of yours: half of what Keras computes, of another matrix."""

    def zeropower_via_newtonschulz5(self, x, steps):
        return super().zeropower_via_newtonschulz5(3 * x, steps) / 2


OPTIMIZERS = {
    "muon": stock,
    "decay": lambda: stock(weight_decay=0.1, clipnorm=0.5),
    "no nesterov": lambda: stock(nesterov=False, rms_rate=None, ns_steps=5),
    "accumulated": lambda: stock(gradient_accumulation_steps=2),
    "ema": lambda: stock(use_ema=True, ema_overwrite_frequency=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(stock()),
    "several": several,
    "halved": lambda: Halved(0.01, exclude_layers=["head"]),
}


def with_lora(optimizer, **options):
    model = mlp(optimizer, frozen="", **options)
    for layer in model.layers:
        if layer.name.startswith("up"):
            layer.enable_lora(2)
    return compiled(model, optimizer, "mse", **options)


class Block(L.Layer):
    """A block of a loop."""

    def __init__(self, **options):
        super().__init__(**options)
        self.up, self.down = L.Dense(16, activation="tanh", name="up"), L.Dense(8, name="down")

    def call(self, x):
        return x + self.down(self.up(x))


def scanned(optimizer, **options):
    inputs = x = keras.Input((8,))
    for n in range(4):
        x = Block(name=f"block_{n}")(x)
    model = keras.Model(inputs, L.Dense(2, name="head")(x))
    assert ktd.scan_blocks(model).runs
    return compiled(model, optimizer, "mse", **options)


def trained(strategy, optimizer="muon", rows=13, start=None, build=mlp, **options):
    model = built(lambda: build(OPTIMIZERS[optimizer](), **options), strategy)
    if start is not None:
        model.set_weights(start)
    start, dtype = model.get_weights(), keras.config.floatx()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 8)).astype(dtype), rng.normal(size=(rows, 2)).astype(dtype)
    losses = model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history["loss"]
    variables = [*model.weights, *model.optimizer.variables]
    return model, start, [losses, *[v.numpy() for v in variables]]


def lines(model):
    return {path: str(answer.words) for path, answer in kept(model, "muon").items() if answer.done}


def check(plan, optimizer="muon", split_slots=False, **options):
    """Trains in float64, as Muon amplifies rounding; three batches, the last with three rows."""
    with in_float64():
        _, start, expected = trained(None, optimizer, **options)
        strategy = ktd.TPUStrategy(*PLANS[plan], shard_optimizer=split_slots)
        model, _, found = trained(strategy, optimizer, start=start, **options)
    assert_close(found, expected, CLOSE)
    assert lines(model)
    return strategy, model


def test_training_equals_one_device():
    strategy, model = check("model", steps_per_execution=4)
    text = " ".join(str(strategy.explain(model)).split())
    one = "otherwise, muon: up_0/kernel: 3 kernels of shape (8, 16): each device orthogonalises 1"
    assert one in text, text


SLOW = [(plan, name, {}) for plan in ("data", "fsdp", "auto", "both") for name in ("muon",)]
SLOW += [("both", name, {"steps_per_execution": 4}) for name in OPTIMIZERS if name != "muon"]
SLOW += [("data", "muon", {"split_slots": True, "steps_per_execution": 4})]
SLOW += [("fsdp", "accumulated", {}), ("data", "several", {"steps_per_execution": 4})]
SLOW += [(plan, "muon", {"build": with_lora}) for plan in ("fsdp", "model")]
SLOW += [("fsdp", "muon", {"build": scanned, "steps_per_execution": 4})]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "optimizer", "options"), SLOW)
def test_further_trainings_equal_one_device(plan, optimizer, options):
    check(plan, optimizer, **options)


@pytest.mark.parametrize(
    ("axes", "count"),
    [
        (((), ()), 11),
        ((("model",), ()), 3),
        (((), ("fsdp", "data")), 8),
        ((("model",), ("data",)), 2),
        ((("data", "model"), ("fsdp",)), 11),
    ],
)
def test_every_kernel_comes_back_in_its_place(axes, count, monkeypatch):
    """By a function that gives a matrix's largest value: of a part it would be another."""
    monkeypatch.setattr(muon, "_STACK_BYTES", 1024)
    mesh = ktd.TPUStrategy(THREE).mesh
    layout = jax.NamedSharding(mesh, jax.P(*(names or None for names in axes)))
    arrays = [np.arange(n, n + 32.0).reshape(4, 8).astype("float32") for n in range(count)]
    kernels = [keras.Variable(array, name=f"kernel_{n}") for n, array in enumerate(arrays)]
    for kernel in kernels:
        _keras.set_layout(kernel, layout)

    def together(arrays):
        pairs = zip(kernels, arrays, strict=True)
        matrices = [_keras.MuonMatrix(kernel, kernel, array, 5) for kernel, array in pairs]
        (group,) = muon.groups_of(matrices, PassContext(None, "train", mesh, (), 16 << 30))
        results = {}
        for stack in group.stacks():
            results |= stack.computed(lambda x, steps: x + x.max((1, 2), keepdims=True))
        return [results[n] for n in range(count)]

    found = jax.jit(together, in_shardings=(layout,))(arrays)
    assert_close([np.asarray(each) for each in found], [each + each.max() for each in arrays])


def test_what_is_not_worth_it_stays_as_written(monkeypatch):
    monkeypatch.undo()
    strategy = ktd.TPUStrategy({"data": 8})
    model, *_ = trained(strategy)
    answers = list(kept(model, "muon").values())
    assert not any(answer.done for answer in answers)
    text = " ".join(str(strategy.explain(model)).split())
    assert "whole ones would take longer" in text


@pytest.mark.parametrize(
    ("mesh", "axes", "count", "whole"),
    [
        ({"fsdp": 8}, ((), ("fsdp",)), 4, False),
        ({"fsdp": 8}, ((), ("fsdp",)), 8, True),
        ({"data": 4, "model": 2}, ((), ("model",)), 4, True),
        ({"data": 8}, ((), ()), 1, False),
        ({"data": 8}, ((), ()), 8, True),
    ],
)
def test_kernels_are_whole_if_that_is_faster(mesh, axes, count, whole, monkeypatch):
    monkeypatch.undo()
    kernel = keras.Variable(np.zeros((1, 1)), name="kernel")
    array = jax.ShapeDtypeStruct((1024, 4096), "float32")
    part = muon._Part(0, _keras.MuonMatrix(kernel, kernel, array, 5), False)
    kind = muon._Kind(array.shape, axes, array.dtype, 5)
    group = muon.KernelGroup(ktd.TPUStrategy(mesh).mesh, kind, [part] * count, 16 << 30)
    assert (group.trouble() is None) is whole
    small = muon.KernelGroup(group.mesh, kind, group.parts, 256 << 20)
    assert small.trouble() == "a whole one takes too much memory"


def test_before_the_first_step_and_without_muon():
    strategy = ktd.TPUStrategy({"data": 8})
    words = "muon: kernels may be whole on one device each: the first step decides"
    assert words in " ".join(str(strategy.explain(built(lambda: mlp(stock()), strategy))).split())
    assert "muon" not in str(strategy.explain(built(lambda: mlp("adam"), strategy)))


@pytest.mark.slow
def test_eager_steps_stay_as_written(monkeypatch):
    monkeypatch.setattr(muon.KernelGroup, "computed", None)
    strategy = ktd.TPUStrategy({"data": 8})
    model, *_ = trained(strategy, run_eagerly=True, rows=5)
    assert not kept(model, "muon")


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_the_tpus_program_equals_one_device():
    mesh, layout = {"fsdp": 2, "model": 2}, PLANS["both"][1][:1]
    strategy = ktd.TPUStrategy(mesh, layout, topology="v5e:2x2")
    found = ktd.verify(lambda: mlp(stock(ns_steps=2), blocks=1), strategy, batch_size=13)
    assert found.equal, str(found)
