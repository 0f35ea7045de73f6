"""Compiled programs are there for the next process, and JAX's own settings come first."""

import importlib
import logging
import pickle
from collections import Counter

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, sequential
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import keras_tpu_dist as ktd
from benchmarks import compilation_cache as benchmark
from keras_tpu_dist import _keras
from keras_tpu_dist.programs.equal import EXECUTABLES
from keras_tpu_dist.training import compilation_cache
from keras_tpu_dist.training.compilation_cache import FOLDER, cache_beside, use_cache

X = np.random.default_rng(0).standard_normal((26, 4)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
FOLDER_OF_JAX = "jax_compilation_cache_dir"
LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def of_jax(monkeypatch):
    """JAX as a user starts it, and after the test as the other tests have it."""
    before = {name: getattr(jax.config, name) for name in (FOLDER_OF_JAX, LEAST_SECONDS)}
    jax.config.update(FOLDER_OF_JAX, None)
    jax.config.update(LEAST_SECONDS, 1.0)
    monkeypatch.delenv(FOLDER, raising=False)
    jax_cache.reset_cache()
    yield
    _keras.end_caching()
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def fitted(units=8, rows=13, **options):
    with ktd.TPUStrategy({"data": 4, "model": 2}, **options).scope():
        keras.utils.set_random_seed(1)
        hidden = [keras.layers.Dense(units), keras.layers.Dropout(0.2)]
        model = sequential(4, *hidden, keras.layers.Dense(1), optimizer="adam")
    history = model.fit(X, Y, batch_size=rows, epochs=1, shuffle=False, verbose=0)
    return [*history.history["loss"], *map(np.asarray, model.get_weights())]


def compiled_by(call):
    """How many programs a call compiles of how many it needs, as in a new process."""
    jax.clear_caches()
    EXECUTABLES.clear()
    counts = Counter()

    def listen(event, **_):
        counts[event] += 1

    jax.monitoring.register_event_listener(listen)
    try:
        result = call()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    asked = counts[benchmark.ASKED]
    return asked - counts[benchmark.FOUND], asked, result


def test_what_one_process_compiled_another_finds(tmp_path):
    first, asked, losses = compiled_by(lambda: fitted(compilation_cache=tmp_path))
    assert first == asked > 2
    names = {path.name.rpartition("-")[0] for path in tmp_path.iterdir()}
    assert "jit_train_step" in names
    again, asked, found = compiled_by(lambda: fitted(compilation_cache=tmp_path))
    assert (again, asked) == (0, first)
    assert_close(found, losses)


def test_another_shape_or_option_is_explained(tmp_path, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    explained = "jit_train_step is compiled: "

    def reason(**options):
        caplog.clear()
        compiled_by(lambda: fitted(compilation_cache=tmp_path, **options))
        return [r.getMessage() for r in caplog.records if explained in r.getMessage()]

    assert reason() == [f"{explained}no program of this name is in the cache"]
    assert reason() == []
    (text,) = reason(rows=26)
    assert "argument [1].data[0] was float32[16, 4]" in text
    assert "and is float32[28, 4]" in text
    (text,) = reason(compiler_options={"xla_cpu_enable_fast_math": True})
    assert text.endswith("compiler option xla_cpu_enable_fast_math was absent and is True")


def test_a_damaged_program_is_compiled_again(tmp_path, caplog):
    compiled_by(lambda: fitted(compilation_cache=tmp_path))
    (path,) = tmp_path.glob("jit_train_step-*")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert compiled_by(lambda: fitted(compilation_cache=tmp_path))[0] == 1
    assert f"{path} is compiled again, because it cannot be read" in caplog.text
    assert compiled_by(lambda: fitted(compilation_cache=tmp_path))[0] == 0


def used(given=None, platform="cpu", processes=1):
    use_cache(compilation_cache.checked_cache(given), platform, processes)
    return jax.config.jax_compilation_cache_dir


def test_on_a_tpu_programs_are_cached_in_the_users_folder(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert used() is None
    folder = tmp_path / "keras_tpu_dist" / "compiled"
    assert used(platform="tpu") == used(platform="tpu") == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (said,) = [r.getMessage() for r in caplog.records if "compiled programs" in r.getMessage()]
    assert said == (
        f"compiled programs are cached in {folder} (at most 4 GiB) for the next start; "
        "compilation_cache=False turns this off"
    )
    assert getattr(jax.config, LEAST_SECONDS) == 0
    assert used(False, "tpu") is None
    assert getattr(jax.config, LEAST_SECONDS) == 1.0


def test_with_several_processes_the_folder_must_be_shared(tmp_path, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    used(tmp_path, processes=2)
    assert "process 0 writes, so all hosts must share this folder" in caplog.text


def test_a_named_folder_comes_before_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER, str(tmp_path / "variable"))
    assert used() == str(tmp_path / "variable")
    assert used(tmp_path / "argument") == str(tmp_path / "argument")
    monkeypatch.delenv(FOLDER)
    # A further strategy that says nothing changes nothing.
    assert used(platform="tpu") == str(tmp_path / "argument")
    assert used(True) == str(tmp_path / "keras_tpu_dist" / "compiled")
    monkeypatch.setenv(FOLDER, "0")
    assert used(platform="tpu") is None


def test_a_cache_that_jax_has_stays(tmp_path, monkeypatch, caplog):
    jax.config.update(FOLDER_OF_JAX, str(tmp_path))
    assert used(platform="tpu") == used(True) == used(False) == str(tmp_path)
    assert caplog.text == ""
    assert used("/other") == str(tmp_path)
    assert "are not cached in '/other': JAX caches them in" in caplog.text
    assert getattr(jax.config, LEAST_SECONDS) == 1.0


def test_a_cache_that_the_user_sets_later_stays(tmp_path):
    assert used(tmp_path / "ours") == str(tmp_path / "ours")
    jax.config.update(FOLDER_OF_JAX, str(tmp_path / "theirs"))
    assert used(False) == str(tmp_path / "theirs")


def test_caches_that_are_switched_off_stay_off(tmp_path, caplog):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert used(tmp_path) is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert (
        "JAX's caches are switched off (JAX_ENABLE_COMPILATION_CACHE), which stays" in caplog.text
    )


def test_a_folder_that_others_may_write_to_is_no_default(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "keras_tpu_dist" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert used(platform="tpu") is None
    assert f"others may write to {folder}, and programs from there would run here" in caplog.text
    assert used(folder) == str(folder)


def test_a_user_without_a_home_is_told(monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert used(platform="tpu") is None
    assert "this user has no home" in caplog.text


def test_the_size_that_jax_has_is_the_bound(tmp_path, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    jax.config.update("jax_compilation_cache_max_size", 2**29)
    try:
        used(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_max_size", -1)
    assert "(at most 0.5 GiB)" in caplog.text


def test_a_run_with_checkpoints_in_a_bucket_has_its_programs_beside_them(tmp_path, monkeypatch):
    pytest.importorskip("etils.epath")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = used(platform="tpu")
    # Beside checkpoints on a disk, which may be a download, no program is looked for.
    cache_beside(str(tmp_path / "run"))
    assert jax.config.jax_compilation_cache_dir == before
    cache_beside("gs://bucket/run/")
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/run-compiled"
    # Small programs are no objects there.
    assert getattr(jax.config, LEAST_SECONDS) == 1.0
    used(tmp_path / "named")
    cache_beside("gs://bucket/run")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "named")


def test_checkpoints_say_where_they_are(tmp_path, monkeypatch):
    seen = []
    for name in ("callbacks.checkpoint", "checkpoint.loop"):
        module = importlib.import_module(f"keras_tpu_dist.{name}")
        monkeypatch.setattr(module, "cache_beside", seen.append)
    ktd.callbacks.Checkpoint(tmp_path / "a").before_fit({"callbacks": []})
    ktd.LoopCheckpoint(tmp_path / "b", keras.Variable(0.0)).close()
    assert seen == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_bad_caches(tmp_path):
    for bad in ("", 3, b"folder", []):
        with pytest.raises(ValueError, match=r"compilation_cache of TPUStrategy is a path.*Write"):
            ktd.TPUStrategy(compilation_cache=bad)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"is a folder that can be created.*File exists.*False"):
        ktd.TPUStrategy(compilation_cache=tmp_path / "file")


def test_a_strategy_for_a_slice_without_chips_changes_nothing(tmp_path):
    ktd.TPUStrategy(topology="v5e:2x2", compilation_cache=tmp_path)
    assert jax.config.jax_compilation_cache_dir is None


def test_a_pickled_strategy_keeps_the_folder(tmp_path):
    strategy = ktd.TPUStrategy(compilation_cache=tmp_path / "a")
    assert pickle.loads(pickle.dumps(strategy)).options.compilation_cache == str(tmp_path / "a")


def test_a_jax_without_the_name_caches_by_itself(tmp_path, monkeypatch, caplog):
    module = importlib.import_module("jax._src.compilation_cache")
    stock = module.get_file_cache
    monkeypatch.delattr(module, "get_file_cache")
    _keras.caching._serve_entries.cache_clear()
    assert used(tmp_path) == str(tmp_path)
    assert "has no get_file_cache, so it stores compiled programs in" in caplog.text
    monkeypatch.setattr(module, "get_file_cache", stock, raising=False)
    _keras.caching._serve_entries.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_start_compiles_nothing(processes, tmp_path):
    first, second = (benchmark.started([], str(tmp_path), processes) for _ in range(2))
    assert all(counts["asked"] >= 2 for counts in second)
    # The key of process 1 is another one where devices are simulated, and JAX has process 0 write.
    of_first = [counts for counts in second if counts["process"] == 0]
    assert [counts for counts in of_first if counts["steps"] or counts["compiled"]] == []
    assert all(counts["steps"] for counts in first)
    assert {counts["process"] for counts in second} == set(range(processes))
