"""Models, optimizers and metrics that are built by the first call: as in stock Keras."""

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, data

import keras_tpu_dist as ktd

MESHES = {
    "one device": ({"data": 1}, {}),
    "data": ({"data": 8}, {}),
    "fsdp": ({"data": 4, "model": 2}, {"layout": "fsdp"}),
}


class Lookahead(keras.optimizers.SGD):
    """Slow weights, which begin with the weights."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(keras.ops.copy(variable))  # stock Keras donates both

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        self.assign(slow, 0.8 * slow + 0.2 * variable)
        self.assign(variable, 0.5 * slow + 0.5 * variable)


class Assigned(keras.layers.Layer):
    """A layer that assigns in `build`."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")
        self.scale.assign(np.linspace(0.5, 2, shape[-1]))

    def call(self, x):
        return x * self.scale


class Late(keras.metrics.Metric):
    """A metric that makes and assigns its variable when it is first updated."""

    def __init__(self):
        super().__init__(name="late")
        self.total = None

    def update_state(self, y, y_pred, sample_weight=None):
        if self.total is None:
            self.total = self.add_variable((), "zeros", name="total")
            self.total.assign(5.0)
        self.total.assign(self.total + keras.ops.cast(keras.ops.mean(y_pred), "float32"))

    def result(self):
        return self.total.value if self.total is not None else 0.0

    def reset_state(self):
        pass


class Subclassed(keras.Model):
    """A model without `build`."""

    def __init__(self):
        super().__init__()
        self.parts = [Assigned(), keras.layers.Dense(8), keras.layers.Dense(3, "softmax")]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


class WithBuild(Subclassed):
    """A model that builds its layers, and assigns."""

    def build(self, shape):
        for part, features in zip(self.parts, (shape[-1], shape[-1], 8), strict=True):
            part.build((None, features))
        self.parts[1].kernel.assign(0.1 * np.ones(self.parts[1].kernel.shape))


MODELS = {
    "sequential": lambda: keras.Sequential([Assigned(), keras.layers.Dense(3, "softmax")]),
    "subclassed": Subclassed,
    "with build": WithBuild,
}
OPTIMIZERS = {
    "schedule-free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "Lookahead": lambda: Lookahead(0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(Lookahead(0.1)),
}
ENTRIES = ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]


def ran(model, first):
    x, y = data(8 * 5 + 3)
    calls = {
        "fit": lambda: model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history,
        "evaluate": lambda: model.evaluate(x, y, batch_size=8, verbose=0),
        "predict": lambda: model.predict(x, batch_size=8, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x[:7], y[:7]),
        "test_on_batch": lambda: model.test_on_batch(x[:7], y[:7]),
        "predict_on_batch": lambda: model.predict_on_batch(x[:7]),
    }
    order = [first, *(name for name in ENTRIES if name != first)]
    found = {name: calls[name]() for name in order}
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return found, [v.numpy() for v in variables]


def made(model, optimizer, metrics, steps):
    keras.utils.set_random_seed(3)
    model = MODELS[model]()
    metrics = [Late()] if metrics == "late" else metrics
    model.compile(
        OPTIMIZERS[optimizer](),
        "sparse_categorical_crossentropy",
        metrics=metrics,
        steps_per_execution=steps,
    )
    return model


def compared(model, optimizer, metrics, steps, mesh, first):
    expected = ran(made(model, optimizer, metrics, 1), first)
    axes, options = MESHES[mesh]
    devices = jax.devices()[: np.prod(list(axes.values()))]
    with ktd.TPUStrategy(axes, devices=devices, **options).scope():
        ours = made(model, optimizer, metrics, steps)
    assert_close(ran(ours, first), expected)


@pytest.mark.parametrize(
    "mesh", [m if m == "fsdp" else pytest.param(m, marks=pytest.mark.slow) for m in MESHES]
)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_by_fit(model, optimizer, steps, mesh):
    compared(model, optimizer, ["accuracy"], steps, mesh, "fit")


@pytest.mark.parametrize("first", [entry for entry in ENTRIES if entry != "fit"])
@pytest.mark.parametrize("model", MODELS)
def test_by_other_calls(model, first):
    compared(model, "Lookahead", ["accuracy"], 4, "data", first)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("mesh", ["one device", "data"])
def test_a_metric_that_is_made_by_its_first_update(mesh, steps):
    compared("subclassed", "schedule-free", "late", steps, mesh, "fit")
