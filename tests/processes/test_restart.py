"""`launch --restart`: what is started again, when, and what is said of it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from keras_tpu_dist.launcher.launch import launch
from keras_tpu_dist.launcher.output import Folded
from keras_tpu_dist.launcher.restart import Restarts

# Does in each start what the argument says. A process writes its step and its error where
# `initialize` would, which takes seconds to import.
SCRIPT = """
import json, os, pathlib, signal, sys, time
number, of = int(os.environ["KTD_PROCESS_ID"]), int(os.environ["KTD_NUM_PROCESSES"])
report = os.environ["KTD_REPORT"]
start = int(pathlib.Path(report).parent.name)
print("start", start, "of", of, flush=True)
acts = sys.argv[1].split(",")
act, _, step = acts[min(start, len(acts)) - 1].partition("@")
if step:
    pathlib.Path(report + ".step").write_text(step.rjust(20))
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

    def run(acts, processes=2, limit=3, backoff=0.0, **options):
        code = launch(
            [sys.executable, "script.py", acts],
            processes,
            1,
            grace_s=0.3,
            restarts=Restarts(limit, backoff, **options),
            logs=tmp_path / "logs",
        )
        out, err = capfd.readouterr()
        return code, 1 + err.count("launch: restart "), err, out

    return run


def test_a_process_that_is_killed_starts_all_again(started):
    code, starts, said, out = started("kill@3,ends")
    assert (code, starts) == (0, 2)
    assert "failed first, at step 3" in said
    assert (
        "restart 1 of 3 after 0 s, with 2 processes: process 1 failed at step 3: killed by SIGKILL"
        in said
    )
    assert "[1] start 2 of 2" in out


def test_no_restart_unless_asked(started):
    code, starts, said, _ = started("kill@3,ends", limit=0)
    assert (code, starts) == (137, 1)
    assert "failed first, at step 3" in said
    assert "launch: restart" not in said
    assert "no restart" not in said


def test_the_number_of_restarts_has_a_limit(started):
    code, starts, said, _ = started("kill@1,kill@2,kill@3", limit=2)
    assert (code, starts) == (137, 3)
    assert "no restart: 2 of 2 restarts were made" in said


def test_an_error_that_comes_again_at_the_same_step_ends_the_run(started):
    code, starts, said, _ = started("OSError@5")
    assert (code, starts) == (1, 2)
    assert "no restart: OSError came again at step 5: a restart does not mend that" in said
    assert "OSError: the disk is full" in said


@pytest.mark.parametrize("acts", ["OSError@5,OSError@6,ends", "OSError@5,ValueError@5,ends"])
def test_another_error_or_another_step_is_no_reason(acts, started):
    assert started(acts)[:2] == (0, 3)


def test_an_exit_code_that_comes_again_ends_the_run_and_a_kill_does_not(started):
    code, starts, said, _ = started("kill@5,kill@5,exit3@5", limit=9)
    assert (code, starts) == (3, 4)
    assert "exit code 3 came again at step 5" in said


def test_the_wait_doubles_until_a_step_is_made(started, monkeypatch):
    waits = []
    monkeypatch.setattr(
        "keras_tpu_dist.launcher.restart.time.sleep",
        lambda s, real=time.sleep: (waits.append(s), real(0))[1],
    )
    # The launcher's own looks sleep by the same function.
    acts = "kill,kill,kill,kill@5,kill@5,ends"
    code, starts, _, _ = started(acts, limit=9, backoff=16.0, longest_backoff_s=50.0)
    assert (code, starts) == (0, 6)
    assert [each for each in waits if each >= 16] == [32.0, 50.0, 50.0, 16.0, 32.0]


def test_the_number_of_processes_is_read_before_each_restart(started, tmp_path):
    (tmp_path / "available").write_text("3\n")
    code, starts, said, out = started("kill@1,ends", processes_from="available")
    assert (code, starts) == (0, 2)
    assert "with 3 processes (2 before)" in said
    assert "[2] start 2 of 3" in out


def test_a_program_says_the_number_of_processes(started, tmp_path):
    program = tmp_path / "available"
    program.write_text("#!/bin/sh\necho 1\n")
    program.chmod(0o755)
    code, starts, said, _ = started("kill@1,ends", processes_from="available")
    assert (code, starts) == (0, 2)
    assert "with 1 process (2 before)" in said
    program.write_text("#!/bin/sh\necho many\n")
    code, starts, said, _ = started("kill@1,ends", processes_from="available")
    assert "says no number of processes" in said
    assert "with 2 processes:" in said


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="The number of processes is read from a file"):
        Restarts(3, processes_from=str(tmp_path / "none"))


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
    code, _, said, out = started("OSError@2", limit=0)
    assert code == 1
    assert "in <module>" in said
    lines = said.splitlines()
    assert lines[0].startswith("launch: process 1 of 2 on ")
    assert "OSError: the disk is full" in lines[0]
    path = lines[-1].rpartition(" ")[2]
    assert "Traceback (most recent call last):" in pathlib.Path(path).read_text()
    assert "Traceback (most recent call last):" not in out


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
