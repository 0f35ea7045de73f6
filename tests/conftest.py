"""Eight virtual CPU devices for every test, set before JAX starts."""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import random
import signal

os.environ.setdefault("KERAS_BACKEND", "jax")
# Texts are as wide here as where there is no terminal.
os.environ["COLUMNS"] = "100"
# Several test processes share two cores and may each load libtpu for compile-only tests.
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# XLA reports each program that it reads back as one of another machine: it counts settings of its
# compiler among the features of the machine (jax-ml/jax 38445).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Tests compile much and run little. Newer versions of jaxlib end at the last flag, and compile as
# fast without it.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

import keras_tpu_dist as ktd

ktd.simulate(8)
# A shell that starts tests in the background has them ignore Ctrl-C, and their children too.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import hypothesis
import keras
import pytest

from keras_tpu_dist.common import once
from keras_tpu_dist.programs.equal import EXECUTABLES

# How long an example takes is the machine's.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Models to compare with run under no strategy.
logging.getLogger("keras_tpu_dist").addFilter(
    lambda record: "under no strategy" not in record.getMessage()
)

# Many tests compile the same programs: they share them, with the tests that run beside these and
# with the next run. Only in this process: libtpu's programs cannot be read back.
_PROGRAMS = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# CI installs every library that a test asks for: there a skip for one is a failure.
_ALL_INSTALLED = "KTD_TESTS_MAY_NOT_MISS_MODULES"
_MISSING = ("is not installed", "could not import", "needs libtpu")


def _fail_if_missing(report):
    words = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    if report.skipped and os.environ.get(_ALL_INSTALLED) and any(w in words for w in _MISSING):
        report.outcome = "failed"
        report.longrepr = f"{words} (no test may be skipped for it: {_ALL_INSTALLED} is set)"
    return report


# What any change may break: none of it is left out of a sample.
_OF_THE_WHOLE_TREE = (
    *("test_docs.py", "test_pages.py", "test_names_used.py", "test_packages.py"),
    *("test_public_surface.py", "test_readers.py", "test_seam.py"),
    *("test_shell_page.py", "test_site_reports.py"),
)


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        type=float,
        metavar="N",
        help="of each slow test at most N cases, below 1 one case of this share of them; of the "
        "docs, and of names and packages, all",
    )
    parser.addoption("--sample-seed", default="", metavar="WORD", help="what --sample draws with")


@functools.cache
def _slow_cases():
    """Cases that `tests/slow_cases.py` found slow, beside those that are marked."""
    return frozenset((pathlib.Path(__file__).parent / "slow_cases.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    """Marks slow cases, before `-m` looks, and what the compiler for TPUs is missing for."""
    if item.nodeid in _slow_cases():
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("tpu_compiler") and not importlib.util.find_spec("libtpu"):
        item.add_marker(pytest.mark.skip(reason="needs libtpu"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out what `--sample` does not draw, the same on every worker."""
    most = config.getoption("sample")
    if most is None:
        return
    cases = {}
    for item in items:
        if item.get_closest_marker("slow") and item.path.name not in _OF_THE_WHOLE_TREE:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped = []
    for name, several in cases.items():
        dice = random.Random(config.getoption("sample_seed") + name)
        number = int(most) if most >= 1 else int(dice.random() < most)
        drawn = dice.sample(several, min(number, len(several)))
        dropped += [item for item in several if item not in drawn]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _fail_if_missing((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _fail_if_missing((yield))


@pytest.fixture(autouse=True)
def _fresh_keras():
    """No distribution, name counters, executables and messages leak from one test into the next."""
    EXECUTABLES.clear()
    once.forget()
    keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
    keras.distribution.set_distribution(None)
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def two(devices):
    """A strategy of two replicas."""
    return ktd.TPUStrategy(devices=devices[:2])


@pytest.fixture
def four(devices):
    """A strategy of four replicas."""
    return ktd.TPUStrategy(devices=devices[:4])


@pytest.fixture(scope="session")
def devices():
    """The eight simulated devices."""
    assert len(jax.devices()) == 8
    return jax.devices()
