"""Kills trainings under `launch --restart` at random moments, and compares how they end.

    python tests/processes/kill_restart.py [--kills 50] [--processes 2 4] [--seed 0]

Each run begins with 2 or 4 processes. After a kill `launch` starts as many again, and after a
second one the run goes on with 1 to 4. One process is ended by SIGKILL, SIGTERM, `os._exit` or an
exception, from the moment before its fit on: while it restores or compiles, in a step, in
validation, while it saves. The run must end with the weights and the history of the one that nobody
killed, to 1e-5.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = pathlib.Path(__file__).parent
WAYS = ("SIGKILL", "SIGTERM", "exit", "raise")
MESHES = ("data", "fsdp", "tensor")
KILLS_OF_A_RUN = 5
MOST_S = 3600


def run(mesh, folder, processes, kills=(), after=()):
    """Runs the job until it ends, or was launched too often; how the last launch ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kills").write_text(json.dumps(kills))
    (folder / "times").write_text("")
    starts = 0
    for number in (processes, *after, 1):
        command = [sys.executable, "-m", "keras_tpu_dist", "launch", "--devices", "2"]
        command += ["--processes", str(number), "--restart", "1"]
        command += [str(HERE / "restarted.py"), mesh, str(folder), str(starts)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=MOST_S,
            env=os.environ | {"KERAS_BACKEND": "jax"},
            check=False,
        )
        starts += 1 + done.stderr.count("launch: restart ")
        if not done.returncode:
            break
    return done


def seconds_to_next_step(folder):
    """From each kill to the next step."""
    found, killed = [], None
    for line in (folder / "times").read_text().splitlines():
        what, at = line.split()
        if what == "kill":
            killed = float(at) if killed is None else killed
        elif killed is not None:
            found.append(float(at) - killed)
            killed = None
    return found


def kills_made(folder):
    return (folder / "times").read_text().count("kill")


def differs(result, expected):
    """What is wrong with how a run ended, or nothing."""
    try:
        for a, b in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert sorted(result["history"]) == sorted(expected["history"])
        for key, values in expected["history"].items():
            np.testing.assert_allclose(result["history"][key], values, rtol=1e-5, atol=1e-5)
    except AssertionError as error:
        return str(error)[:600]
    return ""


def plan(rng, processes):
    """A run's mesh, first number of processes, kills, and numbers after them."""
    kills = [
        (WAYS[rng.randrange(4)], round(rng.uniform(0.0, 8.0), 2), rng.randrange(12))
        for _ in range(KILLS_OF_A_RUN)
    ]
    after = [rng.randint(1, 4) for _ in range(2 * KILLS_OF_A_RUN)]
    return rng.choice(MESHES), rng.choice(processes), kills, after


def killed_run(folder, expected, planned):
    """Runs a plan; what is wrong with how it ended, kills, seconds to next steps."""
    done = run(planned[0], folder, *planned[1:])
    if done.returncode:
        return f"{planned}: exit code {done.returncode}\n{done.stderr[-3000:]}", 0, []
    wrong = differs(json.loads((folder / "result.json").read_text()), expected)
    text = f"{planned}: {wrong}" if wrong else ""
    return text, kills_made(folder), seconds_to_next_step(folder)


def whole_run(folder):
    done = run("data", folder, 1)
    if done.returncode:
        raise RuntimeError(f"fails unharmed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return json.loads((folder / "result.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began, wrong, runs, kills, waits = time.monotonic(), 0, 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        expected = whole_run(pathlib.Path(folder))
    while kills < arguments.kills:
        planned = plan(random.Random(arguments.seed * 10**6 + runs), arguments.processes)
        with tempfile.TemporaryDirectory() as folder:
            words, made, seconds = killed_run(pathlib.Path(folder), expected, planned)
        runs, wrong, kills, waits = runs + 1, wrong + bool(words), kills + made, waits + seconds
        ways = " ".join(f"{how}@{after}" for how, after, _ in planned[2])
        verdict = f"WRONG {words}" if words else "right"
        print(f"{runs:2} {planned[0]:6} {verdict} {made} kills ({ways})", flush=True)
        if not made and words:
            break
    print(
        f"{runs - wrong} of {runs} runs right, {kills} kills, median "
        f"{statistics.median(waits or [0]):.1f} s from a kill to the next step, "
        f"{time.monotonic() - began:.0f} s"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
