"""Compiled programs in a folder: whole or absent, bounded, and why one is missing."""

import hashlib
import logging
import os
import threading

import pytest

from keras_tpu_dist.common.compiled_programs import CompiledPrograms, compiling

MUCH = 2**20


def key_of(name, text):
    return f"jit_{name}-{hashlib.sha256(text.encode()).hexdigest()}"


KEY = key_of("train_step", "a")


def entries(tmp_path, most_bytes=MUCH):
    return CompiledPrograms(tmp_path, most_bytes)


def the_file(tmp_path):
    (path,) = tmp_path.iterdir()
    return path


def test_a_program_is_found_by_its_key(tmp_path):
    assert entries(tmp_path).get(KEY) is None
    entries(tmp_path).put(KEY, b"program")
    assert entries(tmp_path).get(KEY) == b"program"
    assert entries(tmp_path).get(key_of("train_step", "b")) is None


def truncated(data):
    return data[:-1]


def changed(data):
    return data[:-1] + b"!"


def of_a_long_description(data):
    return data[:57] + b"\xff\xff\xff\xff" + data[61:]


def foreign(data):
    return b"\x80\x04."


@pytest.mark.parametrize(
    "damage", [truncated, changed, of_a_long_description, foreign, lambda data: b""]
)
def test_a_damaged_program_is_compiled_again_and_replaced(damage, tmp_path, caplog):
    entries(tmp_path).put(KEY, b"program")
    path = the_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert entries(tmp_path).get(KEY) is None
    assert "is compiled again, because it cannot be read: it is damaged" in caplog.text
    entries(tmp_path).put(KEY, b"program")
    assert entries(tmp_path).get(KEY) == b"program"


def test_a_program_of_another_key_is_not_taken(tmp_path, caplog):
    entries(tmp_path).put(KEY, b"program")
    other = key_of("train_step", "b")
    path = the_file(tmp_path)
    path.rename(path.with_name(path.name.replace(KEY, other)))
    assert entries(tmp_path).get(other) is None
    assert "or of another program" in caplog.text


def test_what_is_no_file_is_not_read(tmp_path, caplog):
    os.mkfifo(tmp_path / f"{KEY}.compiled")
    assert entries(tmp_path).get(KEY) is None
    assert "it is no file" in caplog.text


def test_the_least_recently_used_programs_go_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("x" * 5000)
    small = entries(tmp_path, 3500)
    keys = [key_of("step", str(number)) for number in range(3)]
    for number, key in enumerate(keys):
        small.put(key, bytes(1000))
        os.utime(tmp_path / f"{key}.compiled", (number, number))
    small.get(keys[0])
    small.put(key_of("step", "3"), bytes(1000))
    assert [small.get(key) is not None for key in keys] == [True, False, True]
    assert (tmp_path / "notes.txt").exists()


def test_a_program_larger_than_the_folder_may_be_is_not_written(tmp_path, caplog):
    entries(tmp_path, 500).put(KEY, bytes(1000))
    assert list(tmp_path.iterdir()) == []
    assert "bytes is not cached" in caplog.text
    assert "at most 500" in caplog.text


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    broken = CompiledPrograms(tmp_path / "file", MUCH)
    for _ in range(2):
        broken.put(KEY, b"program")
    assert caplog.text.count("compiled programs are not cached in") == 1


def test_writers_and_readers_at_once_see_whole_programs(tmp_path):
    found, programs = [], [bytes([number]) * 100_000 for number in range(4)]

    def write(program):
        for _ in range(10):
            entries(tmp_path).put(KEY, program)

    def read():
        found.extend(entries(tmp_path).get(KEY) for _ in range(40))

    threads = [threading.Thread(target=write, args=(program,)) for program in programs]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) <= {None, *programs}
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.compiled"]


def explained(tmp_path, caplog, *described, key=KEY):
    """What is logged of a missing program, beside those of earlier descriptions."""
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    *before, here = described
    for number, about in enumerate(before):
        with compiling("train_step", lambda about=about: about):
            entries(tmp_path).put(key_of("train_step", str(number)), b"program")
    with compiling("train_step", lambda: here):
        assert entries(tmp_path).get(key) is None
    return [record.getMessage() for record in caplog.records]


BATCH = {"argument [1]": "float32[8, 4]", "jax": "0.10.1"}


@pytest.mark.parametrize(
    ("before", "here", "reason"),
    [
        ([], BATCH, "no program of this name is in the cache"),
        (
            [BATCH | {"jax": "0.9", "x": "1"}, BATCH],
            BATCH | {"argument [1]": "float32[13, 4]"},
            "argument [1] was float32[8, 4] and is float32[13, 4]",
        ),
        ([BATCH], BATCH | {"compiler option a": "1"}, "compiler option a was absent and is 1"),
        ([BATCH], BATCH, "the function is another: layers, loss"),
    ],
)
def test_a_missing_program_is_explained(before, here, reason, tmp_path, caplog):
    (said,) = explained(tmp_path, caplog, *before, here)
    assert (said.startswith("jit_train_step is compiled: ") and said.endswith(reason)) or (
        "layers" in reason and reason in said
    )


def test_many_differences_are_counted(tmp_path, caplog):
    (said,) = explained(tmp_path, caplog, BATCH, {str(n): "x" for n in range(9)})
    assert said.endswith(", and 6 more")


def test_only_the_announced_program_is_explained(tmp_path, caplog):
    assert explained(tmp_path, caplog, BATCH, key=key_of("add", "a")) == []
    entries(tmp_path).get(KEY)
    assert caplog.records == []


def test_a_description_in_a_file_is_only_text(tmp_path, caplog):
    (said,) = explained(tmp_path, caplog, {"jax": "\x1b[31m" + "x" * 900}, {"jax": "0.10"})
    assert "\x1b" not in said
    assert "\\x1b[31m" in said
    assert len(said) < 400


@pytest.mark.parametrize("about", [b"[1]", b'{"a": 1}', b"{", b"[" * 20_000])
def test_an_odd_description_is_left_out(about, tmp_path, caplog):
    entries(tmp_path).put(key_of("train_step", "0"), b"program")
    path = the_file(tmp_path)
    head = path.read_bytes()[:57]
    path.write_bytes(head + len(about).to_bytes(4, "big") + about)
    (said,) = explained(tmp_path, caplog, BATCH)
    assert said.endswith("1 of this name in the cache do not say what they are for")


def test_programs_in_a_bucket_are_objects(tmp_path, caplog):
    """What `epath` opens is written without a second name, and is not bounded here."""
    epath = pytest.importorskip("etils.epath")
    bucket = CompiledPrograms(epath.Path(tmp_path), 1)
    with compiling("train_step", lambda: BATCH | {"jax": "0.9"}):
        bucket.put(KEY, b"program")
    assert bucket.get(KEY) == b"program"
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    with compiling("train_step", lambda: BATCH):
        assert bucket.get(key_of("train_step", "b")) is None
    assert "jax was 0.9 and is 0.10.1" in caplog.text
