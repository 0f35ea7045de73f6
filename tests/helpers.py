"""Models, data and comparisons shared by the tests."""

import contextlib
import importlib.util
import pathlib
import signal
import subprocess
import sys

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import Planner

TOLERANCE = 1e-5


def data(rows=103, features=6, classes=3, seed=0):
    """A classification problem with `rows` rows."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype("float32")
    return x, rng.integers(0, classes, rows)


def mlp():
    """A two-layer classifier of 6 features and 3 classes."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(3, activation="softmax", name="out"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def sequential(shape, *layers, optimizer="sgd", loss="mse", name=None, **options):
    """A compiled model of layers; `shape` is that of a row, its features alone, or an `Input`."""
    if isinstance(shape, (int, tuple)):
        shape = keras.Input((shape,) if isinstance(shape, int) else shape)
    return compiled(keras.Sequential([shape, *layers], name=name), optimizer, loss, **options)


def compiled(model, *args, **options):
    """A model after its `compile`."""
    model.compile(*args, **options)
    return model


class Stop(Exception):
    """Ends a fit."""


class At(keras.callbacks.Callback):
    """Raises, or calls a function, where a method of it is called for the n-th time."""

    def __init__(self, n, act=None, method="on_train_batch_end"):
        super().__init__()
        self.left, self.act = n, act
        setattr(self, method, self.called)

    def called(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and callable(self.act):
            self.act()
        elif self.left == 0:
            raise self.act or Stop()


def terminate(times=1):
    """Sends SIGTERM to this process."""
    for _ in range(times):
        signal.raise_signal(signal.SIGTERM)


def in_launches(n, make=mlp, optimizer=lambda: "adam", **options):
    """A function that builds a classifier, compiled for launches of `n` steps."""

    def build():
        loss = "sparse_categorical_crossentropy"
        return compiled(make(), optimizer(), loss, steps_per_execution=n, **options)

    return build


def layout_named(word):
    """The layout of a strategy that tests name by a word.

    "none" is no layout, "split_between" a plan whose values between blocks are always split.
    """
    if word == "split_between":
        return Planner("tensor_parallel", between_blocks="split")
    return None if word == "none" else word


def scoped(strategy):
    """The strategy's scope, or no scope for `None`."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def built(build, strategy, seed=1):
    """`build()` under a strategy, with the seeds and names of every other call."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    with scoped(strategy):
        return build()


def largest_difference(a, b):
    """The largest absolute difference between two structures of arrays."""
    if isinstance(a, dict):
        assert list(a) == list(b)
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        return max((largest_difference(p, q) for p, q in zip(a, b)), default=0.0)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    return float(np.nanmax(np.abs(a - b), initial=0.0))


def assert_close(a, b, tolerance=TOLERANCE):
    """Structures of arrays that differ by at most `tolerance`."""
    assert largest_difference(a, b) <= tolerance


def results(model, x, y, predict_on=None, evaluate=True, **fit):
    """History, weights, predictions and evaluation after a fit."""
    history = model.fit(x, y, verbose=0, **fit).history
    predict_on = x if predict_on is None else predict_on
    return {
        "history": history,
        "weights": model.get_weights(),
        "predictions": model.predict(predict_on, batch_size=32, verbose=0),
        "evaluation": model.evaluate(x, y, batch_size=32, verbose=0) if evaluate else 0.0,
    }


def stepped(model, optimizer, inputs, loss, reduce="mean"):
    """In replica code: a step by the gradients of `loss(outputs)`; its value and the outputs."""
    groups = model.trainable_variables, model.non_trainable_variables

    def compute(weights, others):
        outputs, others = model.stateless_call(weights, others, inputs, training=True)
        return loss(outputs), (outputs, others)

    values = [[v.value for v in group] for group in groups]
    (value, (outputs, others)), gradients = jax.value_and_grad(compute, has_aux=True)(*values)
    gradients = ktd.get_replica_context().all_reduce(reduce, gradients)
    optimizer.apply(gradients, model.trainable_variables)
    for variable, new in zip(groups[1], others, strict=True):
        variable.assign(new)
    return value, outputs


def through_conditionals(program):
    """Names of the computations that only some devices run."""
    inside, todo = set(), []
    for computation in program:
        for instruction in computation:
            if instruction.opcode == "conditional":
                todo += instruction.called
    while todo:
        name = todo.pop()
        if name not in inside:
            inside.add(name)
            todo += [c for i in program.computations[name] for c in i.called]
    return inside


def python(*arguments, code=0, timeout=300, **options):
    """This Python's run with arguments; it must end with `code`, unless that is `None`."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert code in (None, done.returncode), done.stdout[-6000:] + done.stderr[-3000:]
    return done


def loaded(path, name):
    """A file as a module, for scripts that stand beside tests."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_docs(name):
    """A script of docs/ as a module."""
    return loaded(pathlib.Path(__file__).parents[1] / "docs" / f"{name}.py", name)
