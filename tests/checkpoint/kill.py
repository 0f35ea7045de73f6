"""Kills trainings at random moments, starts them again on other meshes, and compares how they end.

    python tests/checkpoint/kill.py [--runs 100] [--seed 0] [--processes 1 2 4]

Each run is killed by SIGKILL up to three times, at random moments after its fit began: in a step,
while it saves, in validation. Each start has a mesh, a plan and a number of processes of its own.
It must end with the weights and the history of the run that nobody killed, to 1e-5.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
# Names only: the job's own imports start no devices.
RUNS = ("arrays", "launches", "pydataset", "grain", "epochs")
MESHES = ("data", "fsdp", "tensor", "cube")
MOST_S = 180


def started(name, mesh, directory, result, processes):
    command = [sys.executable, "-m", "keras_tpu_dist", "launch", "--processes", str(processes)]
    command += ["--devices", str(8 // processes), str(HERE / "job.py")]
    return subprocess.Popen(
        [*command, name, mesh, str(directory), str(result)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"KERAS_BACKEND": "jax"},
    )


def ended(process, kill_after_s=None):
    """Waits for a job, or kills it some time after its fit began; its output."""
    lines, began = [], time.monotonic()
    for line in process.stdout:
        lines.append(line)
        if kill_after_s is not None and "begins" in line:
            time.sleep(kill_after_s)
            os.killpg(process.pid, signal.SIGKILL)
            break
        if time.monotonic() - began > MOST_S:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"still running after {MOST_S} s:\n{''.join(lines[-40:])}")
    process.stdout.close()
    process.wait()
    return "".join(lines)


def whole_run(name, folder):
    """The weights and history of a run that nobody kills."""
    output = ended(started(name, "data", folder / "whole", folder / "whole.json", 1))
    path = folder / "whole.json"
    if not path.exists():
        raise RuntimeError(f"{name} fails unharmed:\n{output[-3000:]}")
    return json.loads(path.read_text())


def differs(name, expected, folder, rng, processes):
    """Kills and resumes one run; what is wrong with its end, and how often it was killed."""
    starts = []
    directory, result = folder / "checkpoints", folder / "result.json"
    for _ in range(rng.randint(1, 3)):
        chosen = rng.choice(MESHES), rng.choice(processes), round(rng.uniform(0.2, 9.0), 1)
        starts.append(chosen)
        ended(started(name, chosen[0], directory, result, chosen[1]), chosen[2])
        if result.exists():
            break
    if not result.exists():
        chosen = rng.choice(MESHES), rng.choice(processes), None
        starts.append(chosen)
        output = ended(started(name, chosen[0], directory, result, chosen[1]))
        if not result.exists():
            return f"{starts}: did not end:\n{output[-3000:]}", starts
    found = json.loads(result.read_text())
    try:
        for a, b in zip(found["weights"], expected["weights"]):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert sorted(found["history"]) == sorted(expected["history"])
        for key, values in expected["history"].items():
            np.testing.assert_allclose(found["history"][key], values, rtol=1e-5, atol=1e-5)
    except AssertionError as error:
        return f"{starts}: {str(error)[:600]}", starts
    return "", starts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, nargs="*", default=[1])
    arguments = parser.parse_args()
    wrong = killed = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        expected = {}
        for run in range(arguments.runs):
            name = RUNS[run % len(RUNS)]
            if name not in expected:
                unharmed = pathlib.Path(folder, name)
                unharmed.mkdir()
                expected[name] = whole_run(name, unharmed)
            rng = random.Random(arguments.seed * 10**6 + run)
            with tempfile.TemporaryDirectory() as each:
                words, starts = differs(
                    name, expected[name], pathlib.Path(each), rng, arguments.processes
                )
            wrong += bool(words)
            killed += len(starts) - 1
            text = words or " ".join(f"{mesh}/{n}@{after}" for mesh, n, after in starts)
            print(f"{run:3} {name:10} {'WRONG' if words else 'right'} {text}", flush=True)
    print(f"{arguments.runs - wrong} of {arguments.runs} right, {killed} kills,", end=" ")
    print(f"{time.monotonic() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
