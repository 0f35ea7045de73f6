"""A pytest plugin: a distribution is active in every test of Keras's own.

`suite.py` starts pytest with `-p plugin`, in a process of its own; the plugin is imported before
JAX and chooses the devices. What becomes of each test is written to a file, one JSON object a
line, as soon as it is known, so that an abort or a hang loses nothing.
"""

# ruff: noqa: E402 (the devices come before JAX)

import contextlib
import os
import random
import sys
import types
import unittest

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# As Keras's conftest does: float32 stays the default where a test enables x64.
os.environ["JAX_DEFAULT_DTYPE_BITS"] = "32"
# Tests compile much and run little.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

# TensorFlow and torch's triton each bring LLVM; imported after TensorFlow, triton aborts.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

import keras_tpu_dist as ktd

ktd.simulate(8)

import jax
import keras
import numpy as np
import pytest
from keras.src import testing
from records import Recorder

_distribution = None


def _skip_if_backend(backend, reason):
    return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)


# Keras's conftest is not in its wheel; tests import this from it.
sys.modules["conftest"] = types.SimpleNamespace(skip_if_backend=_skip_if_backend)


def pytest_addoption(parser):
    """The distribution, where the results go, and which tests."""
    group = parser.getgroup("keras_own")
    group.addoption("--distribution", choices=tuple(DISTRIBUTIONS), default="ours")
    group.addoption("--results", required=True, help="file that gets one line for each test")
    group.addoption("--skip-listed", help="file of test ids that are not run")
    group.addoption("--only-listed", help="file of test ids; all others are not run")


def pytest_configure(config):
    """Makes the distribution and hooks it into every test."""
    global _distribution
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras; true of JAX")
    _distribution = DISTRIBUTIONS[config.getoption("--distribution")]()
    _activate_in_unittests()
    config.pluginmanager.register(Recorder(config.getoption("--results"), still_active))


def pytest_collection_modifyitems(config, items):
    """Leaves out what an earlier process has run."""
    skip, only = config.getoption("--skip-listed"), config.getoption("--only-listed")
    if skip:
        done = _lines(skip)
        items[:] = [item for item in items if item.nodeid not in done]
    if only:
        wanted = _lines(only)
        items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a plain function."""
    activate()
    return (yield)


def activate():
    """Makes the distribution active, and what tests draw at random the same in every run."""
    keras.distribution.set_distribution(_distribution)
    random.seed(0)
    np.random.seed(0)


def still_active() -> bool:
    """Whether the distribution is the active one."""
    return keras.distribution.distribution() is _distribution


def _activate_in_unittests():
    """After Keras's `setUp`, whose `clear_session` turns every distribution off, and at the test.

    Test classes build models after `super().setUp()`; those that do not call it, and plain
    `unittest` classes, get the distribution just before the test's body.
    """
    _call_after(testing.TestCase, "setUp", lambda self: activate())
    call_method = unittest.TestCase._callTestMethod

    def _call_test_method(self, method):
        if not still_active():
            activate()
        return call_method(self, method)

    unittest.TestCase._callTestMethod = _call_test_method


def _call_after(owner, name, action):
    original = getattr(owner, name)

    def wrapped(self):
        original(self)
        action(self)

    setattr(owner, name, wrapped)


def _lines(path) -> set[str]:
    with open(path) as file:
        return set(file.read().splitlines())


def _stock():
    return keras.distribution.DataParallel(devices=jax.devices())


DISTRIBUTIONS = {
    "ours": lambda: ktd.TPUStrategy(),
    "ours-2d": lambda: ktd.TPUStrategy({"data": 4, "model": 2}),
    "stock": _stock,
    "none": lambda: None,
}
