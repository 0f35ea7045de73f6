"""Slots that begin with the weights begin with those that were loaded, by every door."""

import logging
import shutil

import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd

opt = keras.optimizers
X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = X[:, :3]


class Pulled(opt.SGD):
    """Keeps the weights that it began with in a list, and pulls to them."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")
        for slot, variable in zip(self.slow, variables, strict=True):
            slot.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        slow = self.slow[self._get_variable_index(variable)]
        self.assign(variable, variable - learning_rate * gradient - 0.1 * (variable - slow))


class PulledByName(opt.Optimizer):
    """The same with a dict, and variables without names."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = {}
        for variable in variables:
            self.slow[variable.path] = slot = self.add_variable(variable.shape)
            slot.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        slow = self.slow[variable.path]
        self.assign(variable, variable - learning_rate * gradient - 0.1 * (variable - slow))


class Around(opt.Optimizer):
    """One that holds another, and a copy of the weights."""

    def __init__(self, inner, **options):
        super().__init__(learning_rate=0.1, **options)
        self.inner = inner

    @property
    def variables(self):
        return super().variables + self.inner.variables

    def build(self, variables):
        if self.built:
            return
        self.inner.build(variables)
        super().build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")
        for slot, variable in zip(self.slow, variables, strict=True):
            slot.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        self.inner.update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        self.assign(variable, variable - 0.1 * (variable - slow))


OPTIMIZERS = {
    "schedule free": lambda: opt.ScheduleFreeAdamW(1e-2),
    "copies": lambda: Pulled(1e-2),
    "copies in a dict": lambda: PulledByName(1e-2),
    "around another": lambda: Around(opt.RMSprop(1e-2)),
    "loss scale": lambda: opt.LossScaleOptimizer(opt.ScheduleFreeAdamW(1e-2)),
    "several": lambda: opt.MultiOptimizer(
        opt.OptimizerMap(opt.ScheduleFreeAdamW(1e-2), {"m/b/.*": Pulled(1e-3)})
    ),
    "averages": lambda: opt.SGD(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "placeholders": lambda: opt.Adafactor(1e-2),
}
DOORS = ["checkpoint", ".keras", ".weights.h5", "fit"]


def made(optimizer, seed=1, last="b"):
    keras.utils.set_random_seed(seed)
    with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", name="a"),
                keras.layers.Dense(3, name=last),
            ],
            name="m",
        )
        model.compile(optimizer, "mse")
    return model


def fit(model, epochs, first=0, *callbacks):
    model.fit(
        X, Y, 8, epochs, initial_epoch=first, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of Lion, saved in every form."""
    folder = tmp_path_factory.mktemp("trained")
    model = made(opt.Lion(1e-2))
    fit(model, 2, 0, ktd.callbacks.Checkpoint(folder / "checkpoint"))
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    return model, folder


def expected(model, make, epochs=1):
    """Stock Keras's way: the weights are there first."""
    other = made(make(), seed=5)
    other.set_weights(model.get_weights())
    return fit(other, epochs).get_weights()


def close(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("door", "built"),
    [*((door, False) for door in DOORS), *((door, True) for door in DOORS if door != "fit")],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_optimizer_begins_with_the_loaded_weights(built, name, door, trained, tmp_path):
    model, folder = trained
    other = made(OPTIMIZERS[name](), seed=5)
    if built:
        with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
            other.optimizer.build(other.trainable_variables)
    if door == "fit":
        shutil.copytree(folder / "checkpoint", tmp_path / "again")
        fit(other, 3, 0, ktd.callbacks.Checkpoint(tmp_path / "again"))
    else:
        paths = {".keras": "m.keras", ".weights.h5": "m.weights.h5"}
        report = ktd.restore(other, folder / paths.get(door, door))
        assert not report.optimizer
        close(other.get_weights(), model.get_weights())
        fit(other, 1)
    close(other.get_weights(), expected(model, OPTIMIZERS[name]))


def test_what_you_set_of_a_built_optimizer_stays(trained):
    model, folder = trained
    other = made(opt.ScheduleFreeAdamW(1e-2), seed=5)
    optimizer = other.optimizer
    optimizer.build(other.trainable_variables)
    optimizer.learning_rate = 0.125
    before = optimizer.variables
    ktd.restore(other, folder / "checkpoint")
    assert float(optimizer.learning_rate) == 0.125
    assert other.optimizer is optimizer
    # The same variables: a program may hold them.
    assert [id(v) for v in optimizer.variables] == [id(v) for v in before]
    for name in ("kernel", "bias"):
        slot = next(v for v in before if v.path.endswith(f"m_a_{name}_momentum"))
        np.testing.assert_array_equal(slot, getattr(model.layers[0], name))


def test_one_that_has_trained_stays_if_nothing_of_it_is_loaded(trained, caplog):
    _, folder = trained
    other = fit(made(opt.ScheduleFreeAdamW(1e-2), seed=5), 1)
    before = [np.asarray(v) for v in other.optimizer.variables]
    ktd.restore(other, folder / "checkpoint")
    for variable, value in zip(other.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("options", [{"exclude": "m/b/*"}, {"strict": False}])
def test_a_part_of_the_weights(options, trained):
    """Slots of loaded weights begin with these, the others with the weights that are there."""
    model, folder = trained
    other = made(opt.ScheduleFreeAdamW(1e-2), seed=5, last="b" if "exclude" in options else "c")
    other.optimizer.build(other.trainable_variables)
    last = other.layers[1].get_weights()
    ktd.restore(other, folder / "checkpoint", **options)
    for weight in other.trainable_variables:
        name = weight.path.replace("/", "_")
        slot = next(v for v in other.optimizer.variables if v.path.endswith(f"{name}_momentum"))
        np.testing.assert_array_equal(slot, weight)
    np.testing.assert_array_equal(other.layers[0].kernel, model.layers[0].kernel)
    np.testing.assert_array_equal(other.layers[1].kernel, last[0])


def test_slots_that_the_checkpoint_has_are_loaded_and_the_others_begin(tmp_path, caplog):
    first = fit(made(opt.ScheduleFreeAdamW(1e-2)), 2, 0, ktd.callbacks.Checkpoint(tmp_path))
    other = made(opt.ScheduleFreeAdamW(1e-2, gradient_accumulation_steps=2), seed=5)
    with caplog.at_level(logging.WARNING):
        assert ktd.restore(other, tmp_path).optimizer
    assert "accumulated_gradients begin anew" in caplog.text
    saved = {v.path.partition("/")[2]: np.asarray(v) for v in first.optimizer.variables}
    for variable in other.optimizer.variables:
        name = variable.path.partition("/")[2]
        if name != "iteration":
            expected = saved.get(name, np.zeros(variable.shape))
            np.testing.assert_allclose(variable, expected, rtol=1e-6, err_msg=name)


def test_an_optimizer_that_cannot_be_built_again_is_said(trained, caplog):
    class Once(Pulled):
        builds = 0

        def build(self, variables):
            Once.builds += 1
            if Once.builds > 1:
                raise RuntimeError("twice")
            super().build(variables)

    _, folder = trained
    other = made(Once(1e-2), seed=5)
    with caplog.at_level(logging.WARNING):
        ktd.restore(other, folder / "checkpoint")
    assert caplog.text.count("they cannot be made again (RuntimeError: twice)") == 1


def test_files_of_another_optimizer_with_equal_shapes(trained, tmp_path, caplog):
    """Adam's means of gradients were loaded as the weights that ScheduleFreeAdamW averages."""
    one = fit(made(opt.Adam(1e-2)), 1)
    one.save(tmp_path / "m.keras")
    other = made(opt.ScheduleFreeAdamW(1e-2), seed=5)
    assert not ktd.restore(other, tmp_path / "m.keras").optimizer
    assert "the optimizer's state is not loaded: that in" in caplog.text
    close(fit(other, 1).get_weights(), expected(one, OPTIMIZERS["schedule free"]))

    class Mine(opt.Adam):
        pass

    for kind in (opt.AdamW, Mine):
        assert ktd.restore(made(kind(1e-2)), tmp_path / "m.keras").optimizer
