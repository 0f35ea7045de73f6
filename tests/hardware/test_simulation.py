import os
import subprocess
import sys

import jax
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware import libtpu


def _python(code):
    set_by_simulate = ("XLA_FLAGS", "PJRT_NPROC", "JAX_PLATFORMS", "KERAS_BACKEND")
    env = {name: value for name, value in os.environ.items() if name not in set_by_simulate}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env
    )


def _assert_refused(code, *words):
    done = _python(code)
    assert [word for word in words if word not in done.stderr] == []


@pytest.mark.parametrize("found", ["/dev/accel*", "/dev/nvidia[0-9]*", "/dev/kfd", None])
def test_jax_is_kept_on_the_cpu_where_it_has_nothing_else(found, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(libtpu, "jax_backend_started", lambda: False)
    monkeypatch.setattr("glob.glob", lambda pattern: [pattern] if pattern == found else [])
    said = []
    monkeypatch.setattr(jax.config, "update", lambda *setting: said.append(setting))
    libtpu.start_without_tpu()
    assert said == ([("jax_platforms", "cpu")] if found is None else [])


def test_simulate_gives_devices_after_the_imports():
    done = _python(
        "import keras_tpu_dist as ktd; ktd.simulate(3); import jax, os;"
        "print(len(jax.devices()), jax.devices()[0].platform, os.environ['PJRT_NPROC'])"
    )
    assert done.stdout.split() == ["3", "cpu", "12"], done.stderr


def test_simulate_where_there_are_chips_says_so():
    done = _python(
        "import glob; glob.glob = lambda p: ['/dev/accel0'] if 'accel' in p else [];"
        "import keras_tpu_dist as ktd; ktd.simulate(3)"
    )
    assert done.returncode == 0, done.stderr
    assert "simulate(3) trains on the CPU, though this machine seems to have TPU" in done.stderr
    assert "(/dev/accel0); to use them, remove the call" in done.stderr


@pytest.mark.slow
def test_simulate_after_jax_started_says_so():
    _assert_refused(
        "import keras_tpu_dist as ktd, jax; jax.config.update('jax_platforms', 'cpu');"
        "jax.devices(); ktd.simulate(4)",
        "simulate() must run before JAX starts.",
        "JAX already runs on 1 device(s) of platform 'cpu'",
        "restart the kernel",
    )


def test_simulate_twice_with_the_same_number_is_fine():
    ktd.simulate(len(jax.devices()))


def test_another_keras_backend_is_refused():
    _assert_refused(
        "import sys, types; keras = types.ModuleType('keras');"
        "keras.config = types.SimpleNamespace(backend=lambda: 'torch');"
        "sys.modules['keras'] = keras; import keras_tpu_dist",
        "needs Keras on the JAX backend",
        "in a notebook, restart the kernel first.",
        "'torch'",
        "KERAS_BACKEND=jax",
    )


def test_import_starts_no_backend_and_no_optional_package():
    done = _python(
        "import sys, keras_tpu_dist; from jax._src import xla_bridge;"
        "print(xla_bridge.backends_are_initialized(),"
        "[m for m in ('tensorflow', 'matplotlib', 'orbax', 'grain', 'libtpu') if m in sys.modules])"
    )
    assert done.stdout.split(maxsplit=1)[0] == "False", done.stderr
    assert "orbax" not in done.stdout


def test_a_fit_imports_no_tool():
    done = _python(
        "import sys, keras_tpu_dist as ktd, keras, numpy as np; ktd.simulate(2);"
        "strategy = ktd.TPUStrategy(); strategy.scope().__enter__();"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]);"
        "model.compile('sgd', 'mse'); x = np.ones((3, 2));"
        "model.fit(x, x[:, :1], verbose=0, callbacks=[ktd.callbacks.Rates()]);"
        "print([name for name in sys.modules if name.startswith('keras_tpu_dist.tools')])"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_what_a_fit_does_not_need_is_loaded_when_asked_for():
    done = _python(
        "import sys, keras_tpu_dist as ktd;"
        "names = [f'keras_tpu_dist.{name}' for name in "
        "('tools.hlo', 'tools.dryrun.run', 'checkpoint', 'callbacks', 'layout.pictures')];"
        "print([name for name in names if name in sys.modules], ktd.callbacks.Checkpoint.__name__,"
        "ktd.dry_run.__module__, 'restore' in dir(ktd));"
        "from keras_tpu_dist import search, nothing"
    )
    assert done.stdout.strip() == "[] Checkpoint keras_tpu_dist.tools.dryrun.run True", done.stderr
    assert "cannot import name 'nothing' from 'keras_tpu_dist'" in done.stderr


# Each starts JAX in a process of its own; "no TPU" is what most machines of developers have.
ASKS = "import keras_tpu_dist as ktd, logging; logging.basicConfig();"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ktd.TPUStrategy(); ktd.TPUStrategy({'data': 1})", ["train on 1 CPU device(s): ", "tpu"]),
        (
            "import jax; jax.config.update('jax_platforms', 'cpu'); ktd.TPUStrategy()",
            ["train on 1 CPU device(s): JAX_PLATFORMS is 'cpu'."],
        ),
    ],
)
def test_a_strategy_that_finds_no_tpu_says_so_once(code, words):
    done = _python(ASKS + code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no TPU was found, so models train on") == 1
    for word in [*words, "pip install 'jax[tpu]'", "ktd.simulate(8)", "restart the kernel"]:
        assert word in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "ktd.simulate(2); ktd.TPUStrategy()",
        "ktd.simulate(1); ktd.TPUStrategy()",
        "ktd.TPUStrategy(topology='v5e-8')",
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2';"
        "ktd.TPUStrategy()",
    ],
)
def test_a_strategy_that_was_asked_for_no_tpu_says_nothing(code):
    done = _python(ASKS + code)
    assert done.returncode == 0, done.stderr
    assert "no TPU was found" not in done.stderr


def test_a_mesh_that_a_laptop_lacks_names_simulate():
    _assert_refused(
        "import keras_tpu_dist as ktd; ktd.TPUStrategy({'data': 2, 'model': 4})",
        "whose sizes multiply to 8, on 1 device(s)",
        "call ktd.simulate(8) right after the imports",
        "restart the kernel",
    )
