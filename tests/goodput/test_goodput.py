"""The file of a run: what is written, read with care, and added up."""

import json
import time

import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.common import once, phases, recorder, records
from keras_tpu_dist.common.phases import BUILD, INPUT, OTHER, REPLAY, START, TRAIN, VALIDATE
from keras_tpu_dist.tools.goodput.report import IDLE, _time_text, goodput_of
from keras_tpu_dist.tools.shell.main import main

X = np.random.default_rng(0).normal(size=(45, 4)).astype("float32")


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """A recorder of this thread, as `initialize` begins it under `launch --goodput`."""
    monkeypatch.setattr(recorder, "_recorder", None)
    monkeypatch.setattr(phases, "step_listeners", [])
    monkeypatch.setattr(recorder.atexit, "register", lambda function: None)
    monkeypatch.setattr(recorder, "process_began", time.time)

    def begin():
        recorder.begin(str(tmp_path / "goodput.jsonl"))
        return recorder._recorder

    yield begin
    if recorder._recorder is not None:
        recorder._recorder._ends.set()
        phases.stop(recorder._recorder._timeline)


def trained(*callbacks, epochs=2, **options):
    keras.utils.set_random_seed(0)
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", steps_per_execution=options.pop("steps", 1))
    options = {"x": X, "y": X[:, :3], "batch_size": 8, "verbose": 0} | options
    model.fit(epochs=epochs, callbacks=list(callbacks), **options)
    return model


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(0.03)

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.1)


def test_a_fit_adds_up(counting, tmp_path):
    began = time.perf_counter()
    counting()
    time.sleep(0.2)
    trained(Slow(), epochs=3, validation_data=(X, X[:, :3]))
    recorder.write_rest()
    whole = time.perf_counter() - began
    report = goodput_of(tmp_path / "goodput.jsonl")
    assert sum(report.seconds.values()) == pytest.approx(whole, rel=0.02, abs=0.02)
    assert abs(report.unaccounted) < 0.02 * report.wall + 0.02
    assert report.seconds[START] >= 0.2
    assert report.seconds[TRAIN] >= 18 * 0.02
    assert report.seconds[VALIDATE] >= 3 * 2 * 0.03
    assert report.seconds[OTHER] >= 3 * 0.1
    assert report.seconds[BUILD] > 0.05
    assert report.starts[0].step == 18
    assert report.seconds[REPLAY] == report.seconds[IDLE] == 0


@pytest.mark.parametrize("steps", [1, 4])
def test_waiting_for_input_is_no_training(steps, counting, tmp_path):
    class Slowly(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            time.sleep(0.1)
            return X[:8], X[:8, :3]

    counting()
    trained(x=Slowly(), y=None, epochs=1, batch_size=None, steps=steps)
    recorder.write_rest()
    report = goodput_of(tmp_path / "goodput.jsonl")
    assert report.seconds[INPUT] >= 0.3
    assert abs(report.unaccounted) < 0.02 * report.wall + 0.02


def test_steps_of_an_earlier_start_are_replayed(counting, tmp_path):
    path = str(tmp_path / "goodput.jsonl")
    now = time.time()
    records.append(path, records.LAUNCH, at=now - 10, processes=2, number=1)
    records.append(path, records.START, at=now - 9, since=now - 9.5, host="a")
    fields = {"seconds": {START: 1.5, TRAIN: 3.0}, "now": TRAIN, "step": 9}
    records.append(path, records.SPENT, at=now - 5, **fields)
    records.append(path, records.FAILED, at=now - 4, process=1, code=-9, step=12)
    # The process was still ending.
    records.append(path, records.SPENT, at=now - 3.5, **fields)
    records.append(path, records.LAUNCH, at=now - 1, processes=1, number=2)
    counting()
    trained(Slow(), epochs=3)
    recorder.write_rest()
    report = goodput_of(path)
    assert report.seconds[IDLE] == pytest.approx(3, abs=0.01)
    assert report.seconds[REPLAY] >= 12 * 0.02
    assert report.seconds[TRAIN] - 4.0 >= 6 * 0.02  # and a second that was not written
    # Twelve steps of eighteen were made before.
    assert 0.3 < report.seconds[REPLAY] / (report.seconds[TRAIN] - 4.0) < 20
    assert [(s.processes, s.step, s.ended) for s in report.starts] == [
        (2, 12, "failed"),
        (1, 18, "unknown"),
    ]
    assert abs(report.unaccounted) < 0.02 * report.wall + 0.02


def test_a_run_that_ended_is_followed_by_a_new_one(tmp_path):
    path = str(tmp_path / "goodput.jsonl")
    records.append(path, records.FAILED, step=30)
    assert records.reached(records.read(path)[0]) == 30
    records.append(path, records.ENDED, code=0, step=40)
    assert records.reached(records.read(path)[0]) == 40
    records.append(path, records.ENDED, code=0)
    assert records.reached(records.read(path)[0]) == 0


def test_without_a_launcher_the_gap_is_idle(tmp_path):
    path = str(tmp_path / "goodput.jsonl")
    for at, what, fields in (
        (1000, records.START, {"since": 998}),
        (1010, records.SPENT, {"seconds": {START: 4, TRAIN: 8}, "now": TRAIN, "step": 5}),
        (1030, records.START, {"since": 1028}),
        (1040, records.SPENT, {"seconds": {START: 3, TRAIN: 9}, "now": TRAIN, "step": 9}),
    ):
        records.append(path, what, at=at, **fields)
    report = goodput_of(path)
    assert (report.wall, report.seconds[IDLE], report.seconds[TRAIN]) == (42, 18, 17)
    assert report.unaccounted == pytest.approx(0)
    assert report.trained == pytest.approx(17 / 42)


ODD = (
    b"\xff\xfe\n",
    b"[1, 2]\n",
    b"nonsense\n",
    b'{"what": "spent"}\n',
    b'{"what": "__class__", "at": 3}\n',
    b'{"what": "spent", "at": 1e999}\n',
    b'{"what": "spent", "at": NaN}\n',
    b'{"what": "spent", "at": 3, "seconds": {"train": "x"}}\n',
    b'{"what": "spent", "at": 3, "seconds": [1]}\n',
    b'{"what": "spent", "at": 3, "step": 1.5}\n',
    b'{"what": "spent", "at": 3, "now": {"a": 1}}\n',
    b'{"what": "start", "at": 3, "host": "' + b"x" * 5000 + b'"}\n',
    b"[" * 4000 + b"\n",
    b'{"what": "spent", "at": 3',
)


def test_of_several_launchers_that_of_process_0_tells_of_the_run(tmp_path):
    """With `launch --here --goodput` on a shared disk each host's launcher adds lines."""
    path = str(tmp_path / "goodput.jsonl")
    lines = [
        (records.LAUNCH, 100, {"processes": 1, "host": "a"}),
        (records.START, 101, {"since": 100.5, "host": "a"}),
        (records.LAUNCH, 102, {"processes": 1, "host": "b"}),
        (records.SPENT, 110, {"seconds": {TRAIN: 9.5}, "now": TRAIN, "step": 9}),
        (records.FAILED, 110.2, {"code": 75, "host": "b"}),
        (records.FAILED, 110.5, {"code": 1, "host": "a"}),
    ]
    for what, at, fields in lines:
        records.append(path, what, at=at, **fields)
    report = goodput_of(path)
    assert report.seconds[TRAIN] == pytest.approx(10.0)
    assert [start.ended for start in report.starts] == ["failed"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(3599, "1 h 0 min"), (7199, "2 h 0 min"), (5400, "1 h 30 min")]
)
def test_minutes_are_less_than_an_hour(seconds, text):
    assert _time_text(seconds) == text


def test_lines_of_another_form_are_left_out(tmp_path, capsys):
    path = tmp_path / "goodput.jsonl"
    good = b'{"what": "launch", "at": 5}\n{"what": "spent", "at": 9, "seconds": {"odd": 4}}\n'
    for odd in ODD:
        path.write_bytes(good[:28] + odd)
        found, left = records.read(str(path))
        assert (len(found), left >= 1) == (1, True), odd
    path.write_bytes(b"".join(ODD[:5]) + good)
    assert main(["goodput", str(path)]) == 0
    assert "note: 5 invalid line(s) of the file are ignored" in capsys.readouterr().out
    # A part of a line, as a machine that lost its power leaves it, spoils no other.
    path.write_bytes(good + ODD[-1])
    records.append(str(path), records.ENDED, code=0)
    assert [len(records.read(str(path))[0]), records.read(str(path))[1]] == [3, 1]


def test_a_full_file_is_one_warning_and_a_remark(counting, tmp_path, monkeypatch, caplog, capsys):
    path = tmp_path / "goodput.jsonl"
    one = counting()
    one.write()
    assert "full" not in str(goodput_of(path))
    monkeypatch.setattr(records, "MOST_BYTES", 200)
    for _ in range(20):
        records.append(str(path), records.LAUNCH, processes=2)
        one.write()
    assert len(records.read(str(path))[0]) < 6
    said = [each for each in caplog.records if "no longer recorded" in each.getMessage()]
    assert [each.levelname for each in said] == ["WARNING"]
    assert one._ends.is_set()
    # A run that starts again trains, and says it as well.
    once.forget()
    monkeypatch.setattr(recorder, "_recorder", None)
    trained(goodput := ktd.callbacks.Goodput(path))
    assert len([each for each in caplog.records if "no longer recorded" in each.getMessage()]) == 2
    assert goodput.report().full
    assert main(["goodput", str(path), "--html", str(tmp_path / "page.html")]) == 0
    words = "note: the file is full (200 bytes): later lines are missing"
    assert words in capsys.readouterr().out
    assert words in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("content", ["import keras\n", "\0\0\n", '{"what": "lunch", "at": 1}\n'])
def test_another_file_is_not_added_to(content, tmp_path, capsys):
    path = tmp_path / "model.py"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"which has no line of goodput and 1 other\(s\)"):
        trained(ktd.callbacks.Goodput(path))
    assert main(["launch", "--goodput", str(path), "--processes", "1", str(path)]) == 2
    assert "Use another name, such as goodput.jsonl." in capsys.readouterr().err
    assert path.read_text() == content


def test_a_file_that_is_damaged_at_its_end_is_added_to(tmp_path):
    path = tmp_path / "goodput.jsonl"
    for content in ("", '{"what": "ended", "at": 1}\n{"wha'):
        path.write_text(content)
        records.check_ours(str(path))
    records.check_ours(str(tmp_path / "missing.jsonl"))


def test_the_goodput_command_prints_and_writes_a_page(tmp_path, capsys):
    path = str(tmp_path / "goodput.jsonl")
    records.append(path, records.LAUNCH, at=1000, processes=2, number=1)
    records.append(path, records.START, at=1004, since=1001)
    fields = {"seconds": {START: 5, TRAIN: 30, BUILD: 4}, "now": TRAIN, "step": 90}
    records.append(path, records.SPENT, at=1040, **fields)
    records.append(path, records.ENDED, at=1040, code=0, step=90)
    assert main(["goodput", path, "--html", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "75.0% of 40.00 s trained, in 1 start"
    assert "useful steps" in text
    assert "75.0%" in (tmp_path / "page.html").read_text()
    assert main(["goodput", path, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["trained"], answer["seconds"][TRAIN], answer["wall"]) == (0.75, 30, 40)
    assert main(["goodput", str(tmp_path / "none")]) == 2
    assert "The goodput report needs a file of" in capsys.readouterr().err


def test_the_callback_reports_two_fits_of_a_run(counting, tmp_path):
    goodput = ktd.callbacks.Goodput(tmp_path / "goodput.jsonl")
    trained(goodput)
    trained(goodput)
    report = goodput.report()
    assert report.seconds[TRAIN] > 0
    assert report.starts[0].step == 12
    with pytest.raises(ValueError, match="A run has only one goodput file"):
        trained(ktd.callbacks.Goodput(tmp_path / "another.jsonl"))


def test_lines_come_less_often_as_the_run_grows_old(counting, tmp_path, monkeypatch):
    records.append(str(tmp_path / "goodput.jsonl"), records.LAUNCH, at=time.time() - 30 * 86400)
    one = counting()
    assert recorder._SHARE * (time.time() - one._first) == pytest.approx(720, rel=0.01)
