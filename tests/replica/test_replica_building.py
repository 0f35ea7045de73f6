"""What replica code builds in its first call has the values that it has if it was built before."""

import inspect

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, data, stepped

import keras_tpu_dist as ktd

context = ktd.get_replica_context

MESHES = {
    "one device": ({"data": 1}, {}),
    "data": ({"data": 8}, {}),
    "tensor parallel": ({"data": 4, "model": 2}, {"layout": "tensor_parallel"}),
    "fsdp": ({"data": 4, "model": 2}, {"layout": "fsdp"}),
}


def strategy_on(mesh):
    axes, options = MESHES[mesh]
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return ktd.TPUStrategy(axes, devices=devices, **options)


class Lookahead(keras.optimizers.SGD):
    """Slow weights, which begin with the weights."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        self.assign(slow, 0.8 * slow + 0.2 * variable)
        self.assign(variable, 0.5 * slow + 0.5 * variable)


class Copies(Lookahead):
    """Slow weights made of arrays."""

    def build(self, variables):
        if self.built:
            return
        keras.optimizers.SGD.build(self, variables)
        with keras.name_scope("copies"):
            self.slow = [keras.Variable(np.asarray(v), trainable=False) for v in variables]


def _by_kernel(variable, made={}):  # noqa: B006 (one optimizer for all kernels, one for the rest)
    kind = "kernel" in variable.path
    if kind not in made or made[kind].built:
        made[kind] = keras.optimizers.Adam(0.01) if kind else keras.optimizers.SGD(0.1)
    return made[kind]


def _of_map():
    optimizers = keras.optimizers
    chosen = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*kernel": optimizers.Adam(0.01)})
    return optimizers.MultiOptimizer(chosen)


def _all_of_keras():
    abstract = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    return {
        name: kind
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind)
        and issubclass(kind, keras.optimizers.Optimizer)
        and name not in abstract
    }


OPTIMIZERS = {
    **{name: (lambda kind=kind: kind(0.01)) for name, kind in _all_of_keras().items()},
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "small batches": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(Lookahead(0.1)),
    "scaled ScheduleFree": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.ScheduleFreeAdamW(0.01)
    ),
    "map": _of_map,
    "callable": lambda: keras.optimizers.MultiOptimizer(_by_kernel),
    "Lookahead": lambda: Lookahead(0.1),
    "copies": lambda: Copies(0.1),
}
OF_WEIGHTS = ["ScheduleFreeAdamW", "scaled ScheduleFree", "callable", "Lookahead", "copies"]


class Assigned(keras.layers.Layer):
    """A layer that assigns in `build`."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")
        self.scale.assign(np.linspace(0.5, 2, shape[-1]))
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
        self.seen.assign(3.0)

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1.0)
        return x * self.scale


class Subclassed(keras.Model):
    """A model without `build`."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(8, activation="relu")
        self.second = keras.layers.Dense(3)

    def call(self, x, training=False):
        return self.second(self.first(x))


def _sequential(*first):
    return keras.Sequential([*first, keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])


MODELS = {
    "built": lambda: _sequential(keras.Input((6,))),
    "sequential": _sequential,
    "assigned": lambda: _sequential(Assigned()),
    "mixed": lambda: _sequential(Assigned(dtype="mixed_bfloat16")),
    "subclassed": Subclassed,
    "spectral": lambda: _sequential(keras.layers.SpectralNormalization(keras.layers.Dense(8))),
}


class Run:
    """A model, its optimizer, and a step that builds both."""

    def __init__(self, strategy, model, optimizer, is_built=False):
        keras.utils.set_random_seed(1)
        self.strategy = strategy
        with strategy.scope():
            self.model, self.optimizer = MODELS[model](), OPTIMIZERS[optimizer]()
            if is_built:
                self.model(np.zeros((1, 6), "float32"))
                self.optimizer.build(self.model.trainable_variables)

    def step(self, batch):
        x, y = batch
        if not self.model.built:
            self.model(x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        value, _ = stepped(self.model, self.optimizer, x, lambda logits: loss(y, logits))
        return context().all_reduce("mean", value)

    def losses(self, steps_per_launch=1, options=None):
        dataset = self.strategy.distribute_dataset(data(16 * 6), batch_size=16)
        launches = self.strategy.loop(
            self.step, dataset, steps_per_launch, outputs="all", options=options
        )
        found = [self.strategy.local_results(losses)[0] for _, losses in launches]
        return np.concatenate([np.ravel(losses) for losses in found])

    def state(self):
        variables = [*self.model.variables, *self.optimizer.variables]
        return [np.asarray(v.value, "float64") for v in variables]


def assert_as_built_before(mesh, model, optimizer, **how):
    before = Run(strategy_on(mesh), model, optimizer, is_built=True)
    within = Run(strategy_on(mesh), model, optimizer)
    assert_close(within.losses(**how), before.losses(**how), 1e-6)
    assert_close(within.state(), before.state(), 1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer):
    assert_as_built_before("data", "built", optimizer)


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "data"])
@pytest.mark.parametrize("optimizer", OF_WEIGHTS)
def test_optimizers_that_begin_with_the_weights_on_every_mesh(optimizer, mesh):
    assert_as_built_before(mesh, "built", optimizer)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [model for model in MODELS if model != "built"])
def test_layers(model, mesh):
    assert_as_built_before(mesh, model, "Lookahead")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("optimizer", OF_WEIGHTS)
def test_several_steps_in_a_launch(optimizer, mesh):
    assert_as_built_before(mesh, "assigned", optimizer, steps_per_launch=3)


def test_batches_of_varying_sizes():
    options = ktd.RunOptions(dynamic_batch=True, check_padding=False)
    assert_as_built_before("data", "assigned", "Lookahead", options=options)


def test_what_a_call_that_fails_has_built():
    """The next call finds it built, with true values."""
    before = Run(strategy_on("fsdp"), "assigned", "ScheduleFreeAdamW", is_built=True)
    expected = before.losses()
    within = Run(strategy_on("fsdp"), "assigned", "ScheduleFreeAdamW")
    step = within.step

    def fails(batch):
        step(batch)
        raise ZeroDivisionError

    within.step = fails
    with pytest.raises(ZeroDivisionError):
        within.losses()
    assert within.optimizer.built
    assert int(within.optimizer.iterations) == 0
    within.step = step
    assert_close(within.losses(), expected, 1e-6)
    assert_close(within.state(), before.state(), 1e-6)


def test_a_layer_built_inside_of_a_gradient_and_a_recomputed_one():
    """Where a trace is within another one."""
    states = []
    for is_built in (True, False):
        keras.utils.set_random_seed(2)
        strategy = strategy_on("data")
        with strategy.scope():
            layer, outer = Assigned(), _sequential(ktd.remat(Assigned()))
            if is_built:
                layer.build((4, 6))
                outer.build((4, 6))

        def step(layer=layer, outer=outer):
            x = np.linspace(0, 1, 24, dtype="float32").reshape(4, 6)
            gradient = jax.grad(lambda x: (layer(x) ** 2 + outer(x).sum()).sum())(x)
            return context().all_reduce("mean", gradient)

        found = strategy.local_results(strategy.run(step))[0]
        states.append([found, *map(np.asarray, layer.weights + outer.weights)])
    assert_close(*states, 1e-6)


def test_what_is_assigned_only_in_the_first_trace():
    """It would be lost, so that it raises."""
    strategy = strategy_on("data")
    with strategy.scope():
        average, weight = (keras.Variable(v, trainable=False) for v in (0.0, 2.0))
        optimizer = keras.optimizers.ScheduleFreeAdamW(0.1)
    begun = []

    def step():
        if not begun:
            begun.append(True)
            average.assign(weight)
        average.assign(0.9 * average + 0.1 * weight)

    message = (
        r"assign the same variables every time.*Received: 2 assignment\(s\) of 'variable\S*' "
        r"in the first trace, and 1 in the last.*outside, before strategy.run"
    )
    with pytest.raises(RuntimeError, match=message):
        strategy.run(step)
    assert float(average.value) == 0

    def explicit():
        optimizer.build([weight])

    with pytest.raises(RuntimeError, match="every time it is traced"):
        strategy.run(explicit)


def test_an_optimizer_that_begins_with_weights_assigned_in_the_same_call():
    strategy = strategy_on("data")
    with strategy.scope():
        weights = [keras.Variable(np.ones(3, "float32")) for _ in range(2)]
        other, slow = keras.optimizers.SGD(0.1), Lookahead(0.1)

    def step():
        other.apply([w.value for w in weights], weights)
        slow.apply([w.value for w in weights], weights)

    message = (
        r"begins with values from before the call.*'lookahead\w*', which reads .*Build it before"
    )
    with pytest.raises(ValueError, match=message):
        strategy.run(step)
    assert all(float(w.value[0]) == 1 for w in weights)
    fresh = Lookahead(0.1)
    fresh.build(weights)

    def built_before():
        other.apply([w.value for w in weights], weights)
        fresh.apply([w.value for w in weights], weights)

    strategy.run(built_before)
    assert all(float(w.value[0]) < 1 for w in weights)
