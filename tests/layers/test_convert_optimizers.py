"""A converted model has its optimizer as it is now: inner optimizers, slots, what was set later."""

import keras
import numpy as np
import pytest
from helpers import assert_close, compiled

import keras_tpu_dist as ktd

optimizers = keras.optimizers
BATCH = 4


def rows():
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def make(optimizer, **options):
    layers = [
        keras.layers.Dense(4, name="a"),
        keras.layers.Dense(5, name="b", trainable=False),
        keras.layers.Dense(1, name="c"),
    ]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), *layers])
    return compiled(model, optimizer(model), options.pop("loss", "mse"), **options)


def by_path(model=None):
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.1, momentum=0.9),
            # As the original's paths begin with its name: "sequential/c/kernel".
            {".*/a/.*": optimizers.Adam(0.01), ".*/c/kernel": optimizers.RMSprop(0.02)},
        )
    )


def by_function(model):
    adam, sgd = optimizers.Adam(0.01), optimizers.SGD(0.1, momentum=0.9)
    return optimizers.MultiOptimizer(lambda weight: adam if "kernel" in weight.path else sgd)


def one_for_each(model):
    return optimizers.MultiOptimizer(lambda weight: optimizers.Adam(0.01))


def one_twice(model):
    adam = optimizers.Adam(0.02)
    named = {".*/a/kernel": adam, ".*/c/kernel": adam}
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1), named))


def inner_options(model):
    default = optimizers.SGD(0.1, gradient_accumulation_steps=2)
    averaged = optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(default, {".*/a/.*": averaged}))


def without_decay(model):
    adam = optimizers.AdamW(0.01, weight_decay=0.5)
    adam.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
    return adam


class Scaled(optimizers.SGD):
    """Without a `get_config`, its config lacks the scale."""

    def __init__(self, learning_rate=0.01, scale=1.0, **options):
        super().__init__(learning_rate, **options)
        self.scale = scale

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.scale, variable, learning_rate)


class Lookahead(optimizers.Optimizer):
    """Its slots begin with the weights, and it wraps an optimizer."""

    def __init__(self, inner):
        super().__init__(0.01)
        self.inner = inner

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        for slow, weight in zip(self.slow, variables, strict=True):
            slow.assign(weight)

    def update_step(self, gradient, variable, learning_rate):
        self.inner.update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        slow.assign(slow + 0.5 * (variable - slow))
        variable.assign(slow.value * 1.0)

    @property
    def variables(self):
        return self._variables + self.inner.variables


KINDS = {
    "by path": by_path,
    "by a function": by_function,
    "one for each weight": one_for_each,
    "one twice": one_twice,
    "inner options": inner_options,
    "scaled loss": lambda model: optimizers.LossScaleOptimizer(by_path()),
    "without decay": without_decay,
    "a class without a config": lambda model: Scaled(0.1, scale=0.3),
    "a wrapper": lambda model: Lookahead(optimizers.Adam(0.05)),
    "slots that begin with weights": lambda model: optimizers.ScheduleFreeAdamW(0.05),
    "a function of a rate": lambda model: optimizers.Adam(lambda: 0.03),
    "averages": lambda model: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda model: optimizers.SGD(0.1, gradient_accumulation_steps=4),
}


def fit(model, epochs=1):
    x, y = rows()
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history["loss"]


def state(optimizer):
    return [np.asarray(v, "float32") for v in optimizer.variables]


def check(kind, before, steps=1, mesh=None):
    with ktd.TPUStrategy(mesh or {"data": 8}).scope():
        model = make(KINDS[kind], steps_per_execution=steps)
        before(model)
        own = state(model.optimizer)
        clone = ktd.convert(model)
        assert clone.optimizer.built == model.optimizer.built
        assert_close(state(clone.optimizer), own, 0)
        shared = {id(v) for v in clone.optimizer.variables}
        assert not shared & {id(v) for v in model.optimizer.variables}
    losses = [fit(each, 2) for each in (clone, model)]
    assert_close(*losses)
    assert_close(clone.get_weights(), model.get_weights())
    assert_close(state(clone.optimizer), state(model.optimizer))


@pytest.mark.parametrize("kind", KINDS)
def test_converted_before_it_has_trained(kind):
    check(kind, lambda model: None)


@pytest.mark.parametrize("kind", KINDS)
def test_converted_in_the_middle_of_training(kind):
    check(kind, fit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_converted_in_the_middle_of_launches_on_two_axes(kind):
    check(kind, fit, steps=4, mesh={"data": 4, "model": 2})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_converted_when_it_is_built(kind):
    check(kind, lambda model: model.optimizer.build(model.trainable_variables))


def test_slots_are_created_after_the_weights_are_there():
    # A rate that you set, and a count of steps, are state before the optimizer is built.
    model = make(lambda model: "adam")
    model.optimizer.learning_rate = 0.25
    model.optimizer.iterations.assign(7)
    clone = ktd.convert(model)
    assert not clone.optimizer.built
    assert (float(clone.optimizer.learning_rate), int(clone.optimizer.iterations)) == (0.25, 7)


@keras.saving.register_keras_serializable("tests_convert_optimizers")
class TwoOptimizers(keras.Sequential):
    """A model with a `compile` of its own."""

    def compile(self, first, second, **options):
        super().compile(first, "mse", **options)
        self.second = second

    def get_compile_config(self):
        given = {"first": self.optimizer, "second": self.second}
        return {name: keras.saving.serialize_keras_object(o) for name, o in given.items()}

    def compile_from_config(self, config):
        self.compile(**{n: keras.saving.deserialize_keras_object(o) for n, o in config.items()})

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        return super().train_step((trainable, others, optimizer, metrics), data)


def test_every_optimizer_of_the_model_is_copied():
    model = TwoOptimizers([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizers.SGD(0.1, momentum=0.9), optimizers.Adam(0.5))
    model.second.build(model.trainable_variables)
    model.second.variables[2].assign(model.second.variables[2] + 1)
    fit(model)
    clone = ktd.convert(model)
    for name in ("optimizer", "second"):
        assert_close(state(getattr(clone, name)), state(getattr(model, name)), 0)
    assert_close(fit(clone), fit(model))


class Unregistered(keras.losses.Loss):
    """Without a `get_config`, its config lacks the factor."""

    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor

    def call(self, y_true, y_pred):
        return self.factor * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


class Biggest(keras.metrics.Metric):
    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, self.factor * keras.ops.max(y_pred)))

    def result(self):
        return self.most.value


def test_losses_and_metrics_of_any_class_are_copied():
    metric = Biggest(3.0, name="biggest")
    model = make(lambda model: "sgd", loss=Unregistered(0.25), metrics=[metric])
    fit(model)
    seen = float(metric.result())
    clone = ktd.convert(model)
    x, y = rows()
    results = [each.evaluate(x, y, verbose=0, return_dict=True) for each in (clone, model)]
    assert_close(*results)
    assert results[0]["biggest"] > 0
    clone.evaluate(x, y, verbose=0)
    clone.evaluate(x * 9, y, verbose=0)
    assert float(metric.result()) == results[1]["biggest"] != seen
