"""A program in which another library has replaced methods of Keras; see `test_wrapped.py`.

python wrapped.py MOMENT PLACE: when, and on which class.
"""

import functools
import os
import sys
import tempfile

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

import keras
import numpy as np

MOMENT, PLACE = sys.argv[1:]
NAMES = [
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    *("compile", "load_weights", "save_weights", "get_weights", "set_weights", "save"),
]
called = []


class Own(keras.Sequential):
    """A user's class."""


def replaced(owner):
    """Puts functions in front of methods, as mlflow's `safe_patch` does."""
    for name in NAMES:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(model, *args, _original=original, _name=name, **kwargs):
            called.append(_name)
            return _original(model, *args, **kwargs)

        patched._mlflow_original = original
        setattr(owner, name, patched)


OWNER = {"model": keras.Model, "subclass": Own}[PLACE]
if MOMENT == "import":
    replaced(OWNER)

import keras_tpu_dist as ktd  # noqa: E402 (the moment that is tried)
from keras_tpu_dist.training.loop import StepLoop  # noqa: E402

if MOMENT == "strategy":
    replaced(OWNER)


def made(steps=1):
    keras.utils.set_random_seed(0)
    model = Own([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=steps)
    return model


x = np.linspace(-1, 1, 48 * 6, dtype="float32").reshape(48, 6)
y = x.sum(1)


def fitted(model, callbacks=()):
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    return history.history["loss"], *model.get_weights()


def assert_equal(a, b):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


expected = fitted(made())
# The first object of ours, made within the call: Python has looked up `model.fit` before.
folder = tempfile.mkdtemp()
assert_equal(fitted(model := made()), expected)
with_checkpoint = model.__class__.fit(
    made(),
    x,
    y,
    batch_size=8,
    shuffle=False,
    verbose=0,
    callbacks=[ktd.callbacks.Checkpoint(folder)],
)
np.testing.assert_allclose(with_checkpoint.history["loss"], expected[0], rtol=1e-5)
assert os.listdir(folder), "no checkpoint"

strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "fsdp")
if MOMENT == "end":
    replaced(OWNER)
with strategy.scope():
    model = made(steps=2)
assert_equal(fitted(model), expected)
assert isinstance(model.train_function, StepLoop)


def fails():
    yield x[:8], y[:8]
    yield x[8:16], y[8:16]
    yield x[16:24], y[16:24]
    raise ZeroDivisionError


before = model.get_weights()
try:
    model.fit(fails(), verbose=0)
except ZeroDivisionError:
    pass
else:
    raise AssertionError("the generator failed")
after = model.get_weights()
assert all(np.isfinite(w).all() for w in after)
assert not np.allclose(before[0], after[0])

mae = {"mae": lambda y, p: float(np.abs(y - p[:, 0]).mean())}
history = model.fit(
    x,
    y,
    batch_size=8,
    verbose=0,
    validation_data=(x, y),
    callbacks=[ktd.callbacks.HostMetrics(mae), ktd.callbacks.Rates()],
).history
assert np.isfinite([*history["loss"], *history["val_mae"]]).all()

stock = made()
stock.set_weights(model.get_weights())
calls = {
    "evaluate": lambda m: m.evaluate(x[:27], y[:27], batch_size=8, verbose=0),
    "predict": lambda m: m.predict(x[:27], batch_size=8, verbose=0),
    "test_on_batch": lambda m: m.test_on_batch(x[:5], y[:5]),
    "predict_on_batch": lambda m: m.predict_on_batch(x[:5]),
}
for name, call in calls.items():
    np.testing.assert_allclose(call(model), call(stock), rtol=1e-4, atol=1e-5, err_msg=name)
functions = [model.train_function, model.test_function]
model.train_on_batch(x[:5], y[:5])
functions += [model.train_function]
assert all(isinstance(function, StepLoop) for function in functions)
path = os.path.join(folder, "of.weights.h5")
model.save_weights(path)
model.set_weights([0 * w for w in model.get_weights()])
model.load_weights(path)
np.testing.assert_allclose(model.get_weights()[0], stock.get_weights()[0], atol=0.1)
assert set(called) >= {*calls, "fit", "train_on_batch", "compile", "load_weights", "set_weights"}
print("all right")
