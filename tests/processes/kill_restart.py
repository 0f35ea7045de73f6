"""Kills trainings under `launch --restart` at random moments, and compares how they end.

    python tests/processes/kill_restart.py [--kills 50] [--processes 2 4] [--seed 0]

Each run begins with 2 or 4 processes, and goes on after each kill with 1 to 4. One process is ended
by SIGKILL, SIGTERM, `os._exit` or an exception, from the moment before its fit on: while it
restores or compiles, in a step, in validation, while it saves. The run must end with the weights
and the history of the one that nobody killed, to 1e-5, and its goodput must add up to wall time
within 2 %.
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
    """Runs the job until it ends; what the launcher said, and when it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kills").write_text(json.dumps(kills))
    (folder / "times").write_text("")
    (folder / "numbers").write_text("".join(f"{number}\n" for number in after) + "1\n")
    available = folder / "available"
    available.write_text(f'#!/bin/sh\ncd "{folder}"\nhead -n 1 numbers\nsed -i 1d numbers\n')
    available.chmod(0o755)
    command = [sys.executable, "-m", "keras_tpu_dist", "launch", "--devices", "2"]
    command += ["--processes", str(processes), "--restart", "20", "--backoff", "0.1"]
    command += ["--processes-from", str(available), "--goodput", str(folder / "goodput.jsonl")]
    done = subprocess.run(
        [*command, "--logs", str(folder / "logs"), str(HERE / "restarted.py"), mesh, str(folder)],
        capture_output=True,
        text=True,
        timeout=MOST_S,
        env=os.environ | {"KERAS_BACKEND": "jax"},
        check=False,
    )
    return done, time.time()


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


def goodput_differs(folder, ended):
    """What is wrong with the file of the run, or nothing; and the share that trained."""
    from keras_tpu_dist.tools.goodput.report import goodput_of

    report = goodput_of(folder / "goodput.jsonl")
    first = json.loads((folder / "goodput.jsonl").read_text().splitlines()[0])["at"]
    wall, counted = ended - first, sum(report.seconds.values())
    wrong = abs(counted - wall) > 0.02 * wall or abs(report.unaccounted) > 0.02 * wall
    return f"goodput counts {counted:.1f} of {wall:.1f} s" if wrong else "", counted / wall


def plan(rng, processes):
    """A run's mesh, first number of processes, kills, and numbers after them."""
    kills = [
        (WAYS[rng.randrange(4)], round(rng.uniform(0.0, 8.0), 2), rng.randrange(12))
        for _ in range(KILLS_OF_A_RUN)
    ]
    after = [rng.randint(1, 4) for _ in range(2 * KILLS_OF_A_RUN)]
    return rng.choice(MESHES), rng.choice(processes), kills, after


def killed_run(folder, expected, planned):
    """Runs a plan; what is wrong with how it ended, kills, seconds to next steps, coverage."""
    done, ended = run(planned[0], folder, *planned[1:])
    if done.returncode:
        return f"{planned}: exit code {done.returncode}\n{done.stderr[-3000:]}", 0, [], 0.0
    wrong = differs(json.loads((folder / "result.json").read_text()), expected)
    of_goodput, counted = goodput_differs(folder, ended)
    words = "; ".join(filter(None, (wrong, of_goodput)))
    text = f"{planned}: {words}" if words else ""
    return text, kills_made(folder), seconds_to_next_step(folder), counted


def whole_run(folder):
    done, _ = run("data", folder, 1)
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
            words, made, seconds, counted = killed_run(pathlib.Path(folder), expected, planned)
        runs, wrong, kills, waits = runs + 1, wrong + bool(words), kills + made, waits + seconds
        ways = " ".join(f"{how}@{after}" for how, after, _ in planned[2])
        verdict = f"WRONG {words}" if words else "right"
        print(
            f"{runs:2} {planned[0]:6} {verdict} {made} kills ({ways}), "
            f"goodput counts {counted:.1%} of wall time",
            flush=True,
        )
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
