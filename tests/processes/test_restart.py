"""`launch`: what is said of a failure, and what is started again."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from keras_tpu_dist.tools.launcher.launch import launch
from keras_tpu_dist.tools.launcher.output import Folded, Reader

# Does in each start what the argument says. A process writes its error where `initialize` would,
# which takes seconds to import.
SCRIPT = """
import json, os, pathlib, signal, sys, time
number, of = int(os.environ["KTD_PROCESS_ID"]), int(os.environ["KTD_NUM_PROCESSES"])
report = os.environ["KTD_REPORT"]
start = int(pathlib.Path(report).parent.name)
print("start", start, "of", of, flush=True)
acts = sys.argv[1].split(",")
act = acts[min(start, len(acts)) - 1]
if number == of - 1:
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act.startswith("exit"):
        os._exit(int(act[4:]))
    if act.endswith("Error"):
        text = json.dumps([time.monotonic(), act, f"{act}: the disk is full"])
        pathlib.Path(report + ".error").write_text(text)
        raise getattr(__builtins__, act)("the disk is full")
if act != "ends":
    time.sleep(60)
"""


@pytest.fixture
def started(tmp_path, monkeypatch, capfd):
    """Launches the script; its exit code, the starts of each process, and what was said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(acts, restarts=3):
        code = launch(
            [sys.executable, "script.py", acts],
            2,
            1,
            grace_s=0.3,
            restarts=restarts,
            logs=tmp_path / "logs",
        )
        out, err = capfd.readouterr()
        return code, 1 + err.count("launch: restart "), err, out

    return run


def test_a_process_that_is_killed_starts_all_again(started):
    code, starts, said, out = started("kill,ends")
    assert (code, starts) == (0, 2)
    assert re.search(r"launch: process 1 of 2 on .* failed first, .*: killed by SIGKILL", said)
    assert "launch: restart 1 of 3" in said
    assert "[1] start 2 of 2" in out


def test_no_restart_unless_asked(started):
    code, starts, said, _ = started("kill,ends", restarts=0)
    assert (code, starts) == (137, 1)
    assert "failed first" in said
    assert "launch: restart" not in said
    assert "no restart" not in said


def test_the_number_of_restarts_has_a_limit(started):
    code, starts, said, _ = started("kill,OSError,exit3", restarts=2)
    assert (code, starts) == (3, 3)
    assert "no restart: 2 of 2 restarts are used up" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_is_no_reason_to_restart(number, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["launch", "--processes", "2", "--restart", "5", "script.py", "waits"]
    launcher = [sys.executable, "-m", "keras_tpu_dist", *words]
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": env}
    with subprocess.Popen(launcher, **options) as process:
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert "start 2" not in process.stdout.read()


def test_what_failed_first_is_said_once_with_the_users_frames(started, tmp_path):
    code, _, said, out = started("OSError", restarts=0)
    assert code == 1
    assert "in <module>" in said
    lines = said.splitlines()
    assert lines[0].startswith("launch: process 1 of 2 on ")
    assert "OSError: the disk is full" in lines[0]
    path = lines[-1].rpartition(" ")[2]
    assert "Traceback (most recent call last):" in pathlib.Path(path).read_text()
    assert "Traceback (most recent call last):" not in out


ODD = """
import os, pathlib, signal, subprocess, sys, time
act, start = sys.argv[1], int(pathlib.Path(os.environ["KTD_REPORT"]).parent.name)
if act == "prints":
    for number in range(20_000):
        print("line", number)
if act == "signal":
    os.kill(os.getpid(), signal.SIGRTMIN + 3)
if act in ("aborted", "aborts"):
    if os.environ["KTD_PROCESS_ID"] == "0":
        time.sleep(0.2)
        os._exit(75)
    if act == "aborted":
        print("F0000 client.h:80] Terminating process because the JAX distributed service detected "
              "fatal errors. This most likely indicates that another task died", file=sys.stderr)
    os.abort()
if act.startswith("leaves"):
    if os.environ["KTD_PROCESS_ID"] == "1":
        open("left", "w").close()
        os._exit(0)
    while not os.path.exists("left"):
        pass
    if act == "leaves, Gloo":
        raise RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    if act == "leaves, JAX":
        print("F0000 client.h:80] Terminating process because the JAX distributed service detected "
              "fatal errors. This most likely indicates that another task died", file=sys.stderr)
    os.abort()
if act == "ends":
    if os.environ["KTD_PROCESS_ID"] == "1":
        os._exit(0)
    time.sleep(3)
    os.abort()
if act == "child" and start == 1:
    subprocess.Popen(["sleep", "40"])
    os._exit(3)
"""


@pytest.fixture
def odd(tmp_path, monkeypatch, capfd):
    """Launches two processes that do something odd; the exit code, and what was said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(ODD)

    def run(act, restarts=0):
        command = [sys.executable, "odd.py", act]
        code = launch(command, 2, 1, 0.3, restarts=restarts, logs=tmp_path / "logs")
        return code, *capfd.readouterr()

    return run


def test_a_full_disk_under_the_logs_does_not_end_the_run(odd, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "1.log").symlink_to("/dev/full")
    code, out, said = odd("prints")
    assert code == 0
    assert out.count("[1] line ") == out.count("[0] line ") == 20_000
    assert said.count("launch: the output of process 1 is no longer logged") == 1
    assert "No space left on device" in said


def test_a_signal_without_a_name(odd):
    code, _, said = odd("signal")
    assert code == 128 + signal.SIGRTMIN + 3
    assert f"killed by signal {signal.SIGRTMIN + 3}" in said


@pytest.mark.parametrize(("act", "code", "first"), [("aborted", 75, 0), ("aborts", 134, 1)])
def test_a_process_that_jax_aborts_is_not_the_first_that_failed(act, code, first, odd):
    received, _, said = odd(act)
    assert received == code
    assert f"launch: process {first} of 2 " in said


@pytest.mark.parametrize(
    ("act", "code"), [("leaves", 134), ("leaves, JAX", 134), ("leaves, Gloo", 1)]
)
def test_a_process_that_leaves_is_the_first_and_not_one_that_it_takes_along(act, code, odd):
    received, _, said = odd(act)
    assert "launch: process 1 of 2 " in said
    assert "ended with exit code 0, while the others waited for it" in said
    assert received == code


def test_a_process_that_ended_long_before_is_not_why_another_one_aborts(odd):
    received, _, said = odd("ends")
    assert "launch: process 0 of 2 " in said
    assert "killed by SIGABRT" in said
    assert received == 134


def test_a_folder_that_a_killed_launcher_left(odd, tmp_path):
    (tmp_path / "logs" / ".reports" / "1").mkdir(parents=True)
    report = [time.monotonic(), "OSError", "OSError: of a run before"]
    (tmp_path / "logs" / ".reports" / "1" / "0.error").write_text(json.dumps(report))
    code, _, said = odd("signal")
    assert code == 128 + signal.SIGRTMIN + 3
    assert "of a run before" not in said


def test_a_childs_child_that_holds_the_output_costs_seconds_once(odd, monkeypatch):
    waits, join = [], Reader.join

    def joined(reader, timeout_s):
        began = time.monotonic()
        join(reader, timeout_s)
        waits.append(time.monotonic() - began)

    monkeypatch.setattr(Reader, "join", joined)
    assert odd("child", restarts=1)[0] == 0
    # Two processes started one each.
    assert len(waits) == 4
    assert 4 < sum(waits) < 8


def test_a_process_may_change_its_directory(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code = "import os; os.chdir('/'); open(os.environ['KTD_REPORT'] + '.error', 'w')"
    assert launch([sys.executable, "-c", code], 1, 1, logs="logs") == 0


HERE = """
import os
print(os.environ.get("KTD_COORDINATOR"), os.environ["XLA_FLAGS"], os.environ["KTD_REPORT"][-2:])
"""


def test_here_is_one_process_with_the_devices_of_the_host(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XLA_FLAGS", "--as_it_was")
    (tmp_path / "script.py").write_text(HERE)
    assert launch([sys.executable, str(tmp_path / "script.py")], 1, None) == 0
    assert capfd.readouterr().out == "[0] None --as_it_was /0\n"


TRACEBACK = """before
Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    main()
    ~~~~^^
  File "/venv/lib/python3.13/site-packages/keras/src/utils/traceback_utils.py", line 1, in handler
    raise
  File "/venv/lib/python3.13/site-packages/jax/_src/api.py", line 1, in call
    x
  File "/package/keras_tpu_dist/training/loop.py", line 9, in run
    y
  File "/home/me/train.py", line 9, in fail
    raise OSError("full")
  File "/usr/lib/python3.13/runpy.py", line 9, in run
    z
a line of another thread
OSError: full
after
""".splitlines()


def test_tracebacks_are_folded():
    folded = Folded("/package/keras_tpu_dist")
    lines = [line for one in TRACEBACK for line in folded.take(one)]
    assert lines == [
        "before",
        "a line of another thread",
        '  File "/home/me/train.py", line 3, in <module>',
        "    main()",
        "    ~~~~^^",
        "  … 3 frames in keras, jax, keras_tpu_dist …",
        '  File "/home/me/train.py", line 9, in fail',
        '    raise OSError("full")',
        "  … 1 frame in python …",
        "OSError: full",
        "after",
    ]
    assert folded.error == ("OSError", "OSError: full")


def test_a_traceback_that_is_cut_is_printed_as_it_is():
    folded = Folded("/package")
    lines = [line for one in TRACEBACK[:4] for line in folded.take(one)]
    assert [*lines, *folded.rest()] == TRACEBACK[:4]
