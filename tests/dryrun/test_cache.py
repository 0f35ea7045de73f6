"""Compilations on disk: found again for the same program, made again for anything else."""

import dataclasses
import gzip
import json
import logging
import os
import pickle
import tracemalloc

import keras
import pytest
from compile_only import lower

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun import compile as dryrun_compile
from keras_tpu_dist.tools.dryrun.cache import Cache, key_of, without_source_lines
from keras_tpu_dist.tools.dryrun.compile import compile_lowered

L = keras.layers
MESH = {"data": 8}
KEY = "b" * 64


def build():
    model = keras.Sequential([keras.Input((16,)), L.Dense(8, name="dense")])
    model.compile("adam", "mse")
    return model


def build_elsewhere():

    model = keras.Sequential([keras.Input((16,)), L.Dense(8, name="dense")])
    model.compile("adam", "mse")
    return model


def lowered(build=build, rows=16, mesh=None):
    with without_source_lines():
        return lower(build, ktd.TPUStrategy(mesh or MESH), batch_size=rows, platform="cpu")


RESULT = {
    "text": "HloModule a\n\n",
    "memory": {"arguments": 1, "outputs": 1, "aliased": 0, "temporaries": 2, "code": 0, "peak": 4},
    "seconds": 1.0,
    "cpu_seconds": 2.0,
    "peak_bytes": 3,
}


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that reach a compiling process, which is none here."""
    found = []

    def run(job, environment, timeout, where):
        found.append(job)
        return dict(RESULT), 'Involuntary full rematerialization op_name="jit(f)/dense"'

    monkeypatch.setattr(dryrun_compile, "run_job", run)
    return found


def test_the_same_program_is_compiled_once(jobs, tmp_path):
    cache = Cache(tmp_path / "made" / "here")
    first = compile_lowered(lowered(), timeout=9, cache=cache)
    second = compile_lowered(lowered(), timeout=9, cache=cache)
    assert len(jobs) == 1
    assert second == first
    assert first.rematerialized == ("jit(f)/dense",)
    # Where the model is written decides nothing.
    compile_lowered(lowered(build_elsewhere), timeout=9, cache=cache)
    assert len(jobs) == 1
    compile_lowered(lowered(), timeout=9)
    assert len(jobs) == 2


def test_programs_name_source_lines_unless_told():
    strategy = ktd.TPUStrategy(MESH)
    before = pickle.loads(lower(build, strategy, batch_size=16, platform="cpu").program)
    assert b"test_cache.py" in before.mlir_module_serialized
    without = pickle.loads(lowered().program).mlir_module_serialized
    assert b"test_cache.py" not in without
    assert b"(dense)" in without  # which layer an operation is of


def test_another_program_is_another_key(jobs, tmp_path, monkeypatch):
    cache = Cache(tmp_path)

    def compiled(lowered):
        compile_lowered(lowered, timeout=9, cache=cache)
        return len(jobs)

    assert compiled(lowered()) == 1
    assert compiled(lowered(rows=32)) == 2
    assert compiled(lowered(mesh={"data": 4, "model": 2})) == 3
    options = {"xla_optimization_level": "EFFORT_O1"}
    assert compiled(dataclasses.replace(lowered(), compiler_options=options)) == 4
    reversed_ = lowered()
    assert compiled(dataclasses.replace(reversed_, devices=reversed_.devices[::-1])) == 5
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=true")
    assert compiled(lowered()) == 6
    library = tmp_path / "libtpu.so"
    for number, text in enumerate((b"", b"1"), 7):
        library.write_bytes(text)
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
        assert compiled(lowered()) == number
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "nothing"))
    assert compiled(lowered()) == 9
    monkeypatch.undo()


@pytest.mark.parametrize(
    "damage", [b"", b"not compressed", "half", "other", "fields"], ids=lambda d: str(d)[:9]
)
def test_a_damaged_entry_is_compiled_again(jobs, tmp_path, damage):
    cache = Cache(tmp_path)
    first = compile_lowered(lowered(), timeout=9, cache=cache)
    (path,) = tmp_path.iterdir()
    if damage == "half":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "other":
        cache.put("another", {"text": ""})
        (tmp_path / "another.json.gz").replace(path)
    elif damage == "fields":
        cache.put(path.name.removesuffix(".json.gz"), {"rematerialized": [], "colour": "red"})
    else:
        path.write_bytes(damage)
    assert compile_lowered(lowered(), timeout=9, cache=cache) == first
    assert len(jobs) == 2
    assert compile_lowered(lowered(), timeout=9, cache=cache) == first
    assert len(jobs) == 2


OTHER_TYPES = {
    "text": [3, None, ["HloModule"]],
    "memory": ["4", {}, {"peak": 4}, dict(RESULT["memory"], peak="4"), [["peak", 4]]],
    "error": [3, False],
    "rematerialized": ["dense", [3], {}],
    "seconds": ["1", None, True, -1.0, float("nan"), float("inf")],
    "peak_process_bytes": [[3]],
    "refused_options": [[], {"a": 1}],
    "effort": [None],
    "colour": ["red"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OTHER_TYPES.items() for value in values]
)
def test_an_entry_of_other_types_is_compiled_again(jobs, tmp_path, name, value):
    cache = Cache(tmp_path)
    first = compile_lowered(lowered(), timeout=9, cache=cache)
    (path,) = tmp_path.iterdir()
    key = path.name.removesuffix(".json.gz")
    cache.put(key, cache.get(key) | {name: value})
    assert compile_lowered(lowered(), timeout=9, cache=cache) == first
    assert len(jobs) == 2


def test_a_program_that_does_not_fit_is_found_again(tmp_path):
    compiled = dryrun_compile.Compiled(
        "", {}, "RESOURCE_EXHAUSTED", (), "quick", "v5e", 1.0, 1.0, 2
    )
    entry = json.loads(json.dumps(dataclasses.asdict(compiled)))
    assert dryrun_compile._cached(entry) == compiled
    assert dryrun_compile._cached(entry | {"error": None}) is None


def test_an_entry_that_would_become_large_is_not_read(tmp_path, caplog):
    cache = Cache(tmp_path)
    cache.put(KEY, {"text": " " * 2**27})
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    try:
        with caplog.at_level(logging.INFO, "keras_tpu_dist"):
            assert cache.get(KEY) is None
        assert tracemalloc.get_traced_memory()[1] < 3 * 100 * path.stat().st_size
    finally:
        tracemalloc.stop()
    assert "so its program is compiled again: it holds more than" in caplog.text


def test_an_entry_is_a_file(tmp_path):
    os.mkfifo(tmp_path / f"{KEY}.json.gz")
    assert Cache(tmp_path).get(KEY) is None


def test_entries_of_a_folder_that_is_only_read_are_used(monkeypatch, tmp_path):
    cache = Cache(tmp_path)
    cache.put("a", {"text": "program"})

    def refused(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refused)
    assert cache.get("a") == {"text": "program"}


def test_what_was_used_the_longest_ago_goes_first(tmp_path):
    cache = Cache(tmp_path, most_bytes=800)
    words = ["".join(chr(33 + (i * i * n) % 90) for i in range(200)) for n in (7, 11, 13)]
    keys = [str(number) * 64 for number in range(3)]
    for number, word in enumerate(words[:2]):
        cache.put(keys[number], {"word": word})
        os.utime(tmp_path / f"{keys[number]}.json.gz", (number, number))
    assert cache.get(keys[0]) == {"word": words[0]}  # used now
    cache.files.most_bytes = sum(path.stat().st_size for path in tmp_path.iterdir()) + 50
    cache.put(keys[2], {"word": words[2]})
    assert cache.get(keys[1]) is None
    assert cache.get(keys[0]) == {"word": words[0]}
    assert cache.get(keys[2]) == {"word": words[2]}
    assert {path.suffix for path in tmp_path.iterdir()} == {".gz"}


def test_only_what_it_wrote_is_removed(tmp_path):
    cache = Cache(tmp_path, most_bytes=1)
    others = [tmp_path / name for name in ("data.json.gz", "a" * 63 + "g.json.gz", "notes.part")]
    of_a_killed, of_another = tmp_path / "compilation-1", tmp_path / "compilation-2"
    for path in (*others, of_a_killed, of_another):
        path.write_bytes(b"x" * 5000)
    for path in (*others, of_a_killed):
        os.utime(path, (1, 1))
    cache.put(KEY, {"a": 1})
    assert sorted(tmp_path.iterdir()) == sorted([*others, of_another])


def test_bytes_that_changed_on_the_disk_count_as_missing(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, {"words": [str(i * i) for i in range(99)]})
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 255
        path.write_bytes(damaged)
        kept = cache.get(KEY)
        # The first bytes of gzip say things that do not matter, as the time.
        assert kept is None or place < 10
    path.write_bytes(gzip.compress(json.dumps({"key": KEY}).encode()))
    assert cache.get(KEY) is None


def test_a_folder_that_cannot_be_written_to(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    cache.put("a", {})
    assert "compilations are not cached in" in caplog.text
    assert cache.get("a") is None


def test_which_cache(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache.of(True).folder == tmp_path / "keras_tpu_dist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Cache.of(True).folder.parts[-2:] == (".cache", "keras_tpu_dist")
    with monkeypatch.context() as inside:  # as in a container whose user is in no list
        inside.setattr(os.path, "expanduser", lambda path: path)
        assert Cache.of(True) is None
    assert "this user has no home" in caplog.text
    assert Cache.of(False) is None
    assert Cache.of(tmp_path).folder == Cache.of(str(tmp_path)).folder == tmp_path


def test_a_key_is_of_plain_data():
    job = {"program": b"1", "axes": (("data", 8),), "compiler_options": {}}
    assert key_of(job) == key_of(dict(reversed(job.items())))
    assert key_of(job) != key_of({**job, "program": b"2"})
