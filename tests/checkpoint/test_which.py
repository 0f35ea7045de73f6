"""Which checkpoint is the newest, of which run it is, and whose values go into which object."""

import gc
import json
import logging
import os
import shutil
import signal
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from helpers import assert_close

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.store import Store


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "keras_tpu_dist")
    return caplog


def opened(folder, value=0.0, **options):
    """A LoopCheckpoint of one variable."""
    return ktd.LoopCheckpoint(folder, keras.Variable(value, name="value"), **options)


def save(saved, *steps, offset=0.0):
    """Saves, with the step as the value."""
    for step in steps:
        saved._parts.others[0].assign(step + offset)
        saved.save(step)


def restored(folder, **options):
    """What a new program finds: the step and the value."""
    with opened(folder) as saved:
        noted = saved.restore(**options)
        return noted.get("step"), float(saved._parts.others[0].numpy())


def aside(folder):
    paths = sorted(folder.glob("set_aside/*/*"), key=lambda path: int(path.name))
    return [int(path.name) for path in paths]


def run_of(path):
    return json.loads((path / "manifest/metadata").read_text())["training"]["run"]


def fitted(folder, epochs, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")], name="m")
    model.compile("sgd", "mse")
    saved = ktd.callbacks.Checkpoint(folder, asynchronous=False, **options)
    ones = np.ones((4, 2), "float32")
    model.fit(ones, ones[:, :1], epochs=epochs, verbose=0, callbacks=[saved])
    return saved


# The newest one.


def test_a_loop_that_forgot_to_restore_keeps_what_it_saves(tmp_path, said):
    """`save(5)` and `save(15)` returned, and were deleted as they were written."""
    with opened(tmp_path, keep=2) as saved:
        save(saved, 20, 30)
    first = run_of(tmp_path / "30")
    with opened(tmp_path, keep=2) as saved:
        save(saved, 5)
        # As soon as the new run has a checkpoint, and not before.
        assert saved.steps == [5]
        assert aside(tmp_path) == [20, 30]
        save(saved, 15)
        assert saved.steps == [5, 15]
    assert said.text.count("are set aside") == 1
    assert f"[20, 30] of {tmp_path} are set aside, because they are of another run" in said.text
    assert restored(tmp_path) == (15, 15.0)
    # Nothing deletes them, and they can be read where they are.
    assert restored(tmp_path / "set_aside" / first) == (30, 30.0)


def test_the_same_step_of_another_run_is_set_aside_too(tmp_path):
    for offset in (0.0, 0.5):
        with opened(tmp_path) as saved:
            save(saved, 20, offset=offset)
    assert restored(tmp_path) == (20, 20.5)
    (first,) = (tmp_path / "set_aside").iterdir()
    assert restored(first) == (20, 20.0)


def test_a_new_run_that_cannot_save_leaves_the_old_one(tmp_path, monkeypatch):
    with opened(tmp_path) as saved:
        save(saved, 20, 30)
    with opened(tmp_path) as saved:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "manifest", lambda *args: 1 / 0)
            with pytest.raises(ktd.CheckpointError):
                saved.save(5)
    assert (tmp_path / "30").exists()
    assert not aside(tmp_path)


def test_a_return_to_an_earlier_step_sets_later_ones_aside(tmp_path, said):
    with opened(tmp_path, keep=None) as saved:
        save(saved, 10, 20, 30)
        with pytest.raises(
            ktd.CheckpointError, match=r"no checkpoint 15.*There are: \[10, 20, 30\]"
        ):
            saved.restore(step=15)
        assert json.dumps(saved.restore(step=np.int64(10))) == '{"step": 10}'
        assert saved.steps == [10]
        assert "[20, 30]" in said.text
        assert "newer than 10, which is restored" in said.text
    assert aside(tmp_path) == [20, 30]
    # It is the newest one from now on, also if the program ends before it saves.
    assert restored(tmp_path) == (10, 10.0)
    with opened(tmp_path, keep=None) as saved:
        saved.restore()
        save(saved, 20, offset=0.5)
        saved.restore(step=10)
    # Of a run and a step the one that was set aside last.
    run = run_of(tmp_path / "10")
    assert restored(tmp_path / "set_aside" / run, step=20) == (20, 20.5)
    for step in (-1, 1.5, "10", True):
        with opened(tmp_path) as saved, pytest.raises(ValueError, match="whole number"):
            saved.restore(step=step)


def test_a_return_that_does_not_load_sets_nothing_aside(tmp_path):
    with opened(tmp_path) as saved:
        save(saved, 10, 20)
    with ktd.LoopCheckpoint(tmp_path, keras.Variable([1.0, 2.0], name="value")) as saved:
        with pytest.raises(ValueError, match="objects it was saved from"):
            saved.restore(step=10)
        assert saved.steps == [10, 20]


def test_a_clock_that_was_set_back(tmp_path, monkeypatch):
    with opened(tmp_path, keep=1) as saved:
        save(saved, 10)
        clock = SimpleNamespace(time=lambda: 1577836800.0)  # in 2020
        monkeypatch.setattr("keras_tpu_dist.checkpoint.store.time", clock)
        save(saved, 20)
        assert saved.steps == [20]
        save(saved, 5)
        assert saved.steps == [5]


@pytest.mark.slow
def test_a_fit_keeps_what_it_saves_after_a_damaged_one(tmp_path, said):
    """By their numbers, the damaged one was the newest, and what came was deleted."""
    saved = fitted(tmp_path, 6, keep=2)
    assert saved.steps == [5, 6]
    (tmp_path / "6").rename(tmp_path / "60")
    file = tmp_path / "60/manifest/metadata"
    content = json.loads(file.read_text())
    del content["crc32"]
    file.write_text(json.dumps(content))
    saved = fitted(tmp_path, 8, keep=1)
    assert "after 5 steps" in said.text
    assert saved.steps == [8]


# The runs.


def merged(tmp_path):
    """Two runs' folders merged by hand; the second one is the newer run."""
    for run, steps in (("a", (30, 40)), ("b", (10, 20))):
        with opened(tmp_path / run) as saved:
            save(saved, *steps)
    for step in (30, 40):
        shutil.copytree(tmp_path / "a" / str(step), tmp_path / "b" / str(step))
    return tmp_path / "b"


def test_two_runs_in_one_folder(tmp_path, said):
    """It loaded the other run's step in silence."""
    folder = merged(tmp_path)
    assert restored(folder) == (20, 20.0)
    assert said.text.count("has checkpoints of several runs") == 1
    other = run_of(folder / "40")
    assert f"the newest run is used, not steps [30, 40] of run {other}" in said.text
    # To read one of them is possible, and the first save sets them aside.
    with opened(folder) as saved:
        saved.restore()
        save(saved, 25)
        assert saved.steps == [10, 20, 25]
    assert aside(folder) == [30, 40]
    assert "because they are of another run" in said.text


def test_a_return_to_a_checkpoint_of_another_run(tmp_path):
    folder = merged(tmp_path)
    with opened(folder) as saved:
        saved.restore(step=40)
        assert saved.steps == [30, 40]
        save(saved, 45)
    assert aside(folder) == [10, 20]
    assert restored(folder) == (45, 45.0)


@pytest.mark.slow
def test_two_runs_of_fit_in_one_folder(tmp_path, said):
    fitted(tmp_path / "a", 6)
    fitted(tmp_path / "b", 2)
    shutil.copytree(tmp_path / "a/6", tmp_path / "b/6")
    saved = fitted(tmp_path / "b", 4)
    assert "after 2 steps" in said.text
    assert (saved.steps, aside(tmp_path / "b")) == ([2, 3, 4], [6])
    assert "has checkpoints of several runs" in said.text


# What is no checkpoint, or another one.


def test_a_step_without_its_manifest_is_reported(tmp_path, said):
    with opened(tmp_path) as saved:
        save(saved, 4, 8)
    shutil.rmtree(tmp_path / "8/manifest")
    assert restored(tmp_path) == (4, 4.0)
    assert f"checkpoint 8 is skipped: '{tmp_path / '8'}' has no manifest" in said.text
    with opened(tmp_path) as saved:
        saved.restore()
        save(saved, 8)
        assert saved.steps == [4, 8]


def test_a_directory_that_was_renamed_is_not_that_step(tmp_path, said):
    with opened(tmp_path) as saved:
        save(saved, 4, 8)
    (tmp_path / "8").rename(tmp_path / "9")
    assert restored(tmp_path) == (4, 4.0)
    assert "is that of another step: its directory was renamed" in said.text
    assert "Rename it to 8" in said.text
    (tmp_path / "9").rename(tmp_path / "8")
    assert restored(tmp_path) == (8, 8.0)


def test_a_step_that_is_a_link(tmp_path, said):
    """Saves that went well were errors, and `8.removed` was left."""
    folder, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    with opened(folder, keep=2) as saved:
        save(saved, 8, 9)
        for step in (8, 9):
            (folder / str(step)).rename(disk / str(step))
            (folder / str(step)).symlink_to(os.path.join("..", "disk", str(step)))
        assert restored(folder / "..") == (None, 0.0)
        assert saved.restore() == {"step": 9}
        save(saved, 10)
        assert saved.steps == [9, 10]
        assert sorted(os.listdir(folder)) == [".in_use", "10", "9"]
        saved.restore(step=10)
        # What it pointed to is the user's, and is still there.
        assert sorted(os.listdir(disk)) == ["8", "9"]
        # The step is written again, and set aside.
        save(saved, 9, offset=0.5)
        assert not (folder / "9").is_symlink()
    assert restored(folder) == (9, 9.5)
    with opened(folder) as saved:
        save(saved, 1)
        (folder / "3").symlink_to("../gone")
        saved.steps  # noqa: B018
        assert "checkpoint 3 is skipped" in said.text
        save(saved, 3)
    assert not [record for record in said.records if record.levelno > logging.WARNING]


def test_a_link_is_set_aside_as_a_link(tmp_path):
    with opened(tmp_path / "run") as saved:
        save(saved, 1, 2)
        (tmp_path / "run/2").rename(tmp_path / "moved")
        (tmp_path / "run/2").symlink_to("../moved")
        saved.restore(step=1)
    (link,) = tmp_path.glob("run/set_aside/*/2")
    assert link.is_symlink()
    assert (link / "manifest/metadata").exists()


# The objects.


def dense(units=3, name=None, **options):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, name=name)], **options)


def numbers(model):
    return [np.asarray(weight) for weight in model.get_weights()]


def test_equal_models_are_matched_in_their_order(tmp_path):
    """A program that builds the target first got the weights of the other one in it."""
    keras.utils.clear_session(free_memory=False)
    q, target = dense(), dense()
    with ktd.LoopCheckpoint(tmp_path, q, target) as saved:
        saved.save(1)
    keras.utils.clear_session(free_memory=False)
    target_again, q_again = dense(), dense()
    with ktd.LoopCheckpoint(tmp_path, q_again, target_again) as saved:
        saved.restore()
    assert_close(numbers(q_again), numbers(q))
    assert_close(numbers(target_again), numbers(target))


@pytest.mark.parametrize("names", [(None, None), ("q", "t")])
def test_what_layers_keep_beside_variables_goes_with_their_model(names, tmp_path):
    pytest.importorskip("tensorflow")  # Keras's tables of words

    def lookup(words, name):
        layer = keras.layers.StringLookup()
        layer.adapt(words)
        return keras.Sequential([keras.Input((1,), dtype="string"), layer], name=name)

    def words(model):
        return sorted(model.layers[0].get_vocabulary()[1:])

    keras.utils.clear_session(free_memory=False)
    first, second = lookup(["a", "b"], names[0]), lookup(["c", "d"], names[1])
    with ktd.LoopCheckpoint(tmp_path, first, second) as saved:
        saved.save(1)
    keras.utils.clear_session(free_memory=False)
    second, first = lookup(["x", "y"], names[1]), lookup(["x", "y"], names[0])
    with ktd.LoopCheckpoint(tmp_path, first, second) as saved:
        saved.restore()
    assert (words(first), words(second)) == (["a", "b"], ["c", "d"])


def test_other_objects_are_matched_in_their_order_too(tmp_path):
    keras.utils.clear_session(free_memory=False)
    model = dense(name="out", units=1)
    first, second = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.2, momentum=0.9)
    one, two = keras.metrics.AUC(num_thresholds=3), keras.metrics.AUC(num_thresholds=3)
    for optimizer, value in ((first, 1.0), (second, 2.0)):
        optimizer.build(model.trainable_variables)
        for slot in optimizer.variables[2:]:
            slot.assign(slot + value)
    one.update_state([0, 1], [0.2, 0.9])
    with ktd.LoopCheckpoint(tmp_path, model, first, second, one, two) as saved:
        saved.save(1)
    keras.utils.clear_session(free_memory=False)
    # A rate that is compiled differently would stay as compiled.
    second, first = keras.optimizers.SGD(0.2, momentum=0.9), keras.optimizers.SGD(0.1, momentum=0.9)
    two, one = keras.metrics.AUC(num_thresholds=3), keras.metrics.AUC(num_thresholds=3)
    for optimizer in (first, second):
        optimizer.build(model.trainable_variables)
    with ktd.LoopCheckpoint(tmp_path, model, first, second, one, two) as saved:
        saved.restore()
    assert (float(first.learning_rate), float(second.learning_rate)) == pytest.approx((0.1, 0.2))
    # Both have a momentum of the same weights.
    assert [float(np.mean(each.variables[2])) for each in (first, second)] == [1.0, 2.0]
    assert (float(np.sum(one.true_positives)), float(np.sum(two.true_positives))) == (2.0, 0.0)


def test_objects_in_another_order_are_an_error_unless_their_names_tell(tmp_path):
    q, target = dense(name="q_out"), dense(4, name="target_out")
    with ktd.LoopCheckpoint(tmp_path / "auto", q, target) as saved:
        saved.save(1)
    with ktd.LoopCheckpoint(tmp_path / "auto", target, q) as saved:
        with pytest.raises(ValueError, match=r"missing.*target_out.*unexpected.*same order"):
            saved.restore()
    q, target = named("q"), named("target")
    with ktd.LoopCheckpoint(tmp_path / "named", q, target) as saved:
        saved.save(1)
    before = numbers(q)
    q.set_weights([value + 1 for value in before])
    with ktd.LoopCheckpoint(tmp_path / "named", target, q) as saved:
        saved.restore()
    assert_close(numbers(q), before)


def named(name):
    layers = [keras.Input((2,)), keras.layers.Dense(3, name="out")]
    return keras.Sequential(layers, name=name)


def test_one_of_two_models_alone(tmp_path):
    """The error advised strict=False, which loaded the other model's weights."""
    keras.utils.clear_session(free_memory=False)
    q, target, small = dense(), dense(), dense(1)
    with ktd.LoopCheckpoint(tmp_path, q, target, small) as saved:
        saved.save(1)
    keras.utils.clear_session(free_memory=False)
    alone = dense()
    before = numbers(alone)
    for strict in (True, False):
        with pytest.raises(
            ValueError, match=r"has 3 models.*'sequential_1'.*LoopCheckpoint"
        ) as info:
            ktd.restore(alone, tmp_path, strict=strict)
        assert "strict" not in str(info.value)
    assert_close(numbers(alone), before)
    # Only one of them fits.
    other = dense(1)
    report = ktd.restore(other, tmp_path)
    assert_close(numbers(other), numbers(small))
    assert (report.unused, report.kept) == ((), ())


def test_one_of_two_models_by_its_name_and_all_in_one(tmp_path):
    q, target = named("q"), named("target")
    with ktd.LoopCheckpoint(tmp_path, q, target) as saved:
        saved.save(1)
    alone = named("target")
    ktd.restore(alone, tmp_path)
    assert_close(numbers(alone), numbers(target))
    # A model that holds both.
    inputs = keras.Input((2,))
    q_again, target_again = named("q"), named("target")
    both = keras.Model(inputs, [q_again(inputs), target_again(inputs)])
    assert len(ktd.restore(both, tmp_path).loaded) == 4
    assert_close(numbers(target_again), numbers(target))
    # With patterns for what is not to be loaded.
    report = ktd.restore(alone, tmp_path, exclude=["*/bias"])
    assert report.kept == ("target/out/bias",)
    with pytest.raises(ValueError, match="exclude must match"):
        ktd.restore(alone, tmp_path, exclude=["*/nothing"])


@pytest.mark.parametrize("strict", [True, False])
def test_heads_that_the_user_named_are_not_shifted(strict, tmp_path):
    """task_1 was put into task_2, and task_2 into task_3."""

    def heads(first):
        inputs = keras.Input((2,))
        outputs = [
            keras.layers.Dense(2, name=f"task_{first + i}")(keras.layers.Dense(2)(inputs))
            for i in range(2)
        ]
        return keras.Model(inputs, outputs)

    keras.utils.clear_session(free_memory=False)
    one = heads(1)
    one.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    saved = ktd.callbacks.Checkpoint(tmp_path)
    one.fit(x, [x, x], verbose=0, callbacks=[saved])
    other = heads(2)
    kept = numbers(other.get_layer("task_3"))
    if strict:
        with pytest.raises(
            ValueError, match=r"missing 'task_3/kernel'.*unexpected 'task_1/kernel'"
        ):
            ktd.restore(other, tmp_path)
    else:
        report = ktd.restore(other, tmp_path, strict=False)
        assert report.kept == ("task_3/kernel", "task_3/bias")
        assert report.unused == ("task_1/kernel", "task_1/bias")
        assert_close(numbers(other.get_layer("task_2")), numbers(one.get_layer("task_2")))
        # The numbers of layers without names are Keras's.
        assert_close(numbers(other.layers[1]), numbers(one.layers[1]))
    assert_close(numbers(other.get_layer("task_3")), kept)


# One that was not closed.


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cell_that_is_run_twice(asynchronous, tmp_path, said):
    """The folder was locked for the life of the process."""
    first = opened(tmp_path, asynchronous=asynchronous)
    save(first, 1, 2)
    second = opened(tmp_path, asynchronous=asynchronous)
    # What the first one was writing is there.
    assert second.restore() == {"step": 2}
    assert said.text.count("was not closed, and is closed now for a new one") == 1
    for use in (first.restore, lambda: first.save(3)):
        with pytest.raises(
            ktd.CheckpointError, match=r"was closed.*another LoopCheckpoint was made"
        ):
            use()
    save(second, 3)
    second.close()
    first.close()
    assert restored(tmp_path) == (3, 3.0)
    with pytest.raises(ktd.CheckpointError, match="was closed"):
        second.save(4)


def test_one_that_is_deleted_lets_go_of_the_folder(tmp_path):
    saved = opened(tmp_path)
    save(saved, 1)
    del saved
    gc.collect()
    assert os.listdir(tmp_path) == ["1"]
    # A fit does not wait for it either.
    fitted(tmp_path / "other", 1)
    saved = opened(tmp_path / "other")
    with pytest.raises(ktd.CheckpointError, match=r"this process, writes.*close\(\)"):
        fitted(tmp_path / "other", 2)
    saved.close()
    fitted(tmp_path / "other", 2)


def test_one_that_is_deleted_while_it_writes_is_waited_for(tmp_path, monkeypatch, said):
    """The next one of this process found the folder locked, and a failure was in no log."""
    stock = Store._delete_others

    def slow(store):
        time.sleep(1)
        stock(store)
        if store.steps[-1] == 2:
            raise OSError("no space left")

    monkeypatch.setattr(Store, "_delete_others", slow)
    for step in (1, 2):
        saved = opened(tmp_path, asynchronous=True)
        saved.restore()
        saved.save(step)
        del saved
        opened(tmp_path).close()
    assert "the last checkpoint is missing" in said.text
    assert "no space left" in said.text


def test_one_that_is_in_use_is_not_closed_for_another(tmp_path):
    with opened(tmp_path) as saved:
        with pytest.raises(ktd.CheckpointError, match=r"this process, writes.*`with` block"):
            opened(tmp_path)
        link = tmp_path.parent / "link"
        link.symlink_to(tmp_path)
        with pytest.raises(ktd.CheckpointError, match="Only one fit at a time"):
            opened(link)
        save(saved, 1)
    opened(link).close()


def test_one_that_is_deleted_does_not_keep_the_signal(tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        saved = opened(tmp_path)
        assert not saved.preempted
        signal.raise_signal(signal.SIGTERM)
        assert (saved.preempted, came) == (True, [])
        del saved
        gc.collect()
        assert len(came) == 1
        signal.raise_signal(signal.SIGTERM)
        assert len(came) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
