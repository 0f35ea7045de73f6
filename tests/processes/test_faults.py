"""A fault in one process ends all, soon, with words that name it; nothing hangs.

`python tests/processes/test_faults.py [runs [orders [faults]]]` makes all of them, as often as
said; `5 all` in every order in which the processes can be started, `5 "jax;keras" "kill;callback"`
some of them.
"""

import collections
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.reader import CheckpointReader

SCRIPT = pathlib.Path(__file__).parent / "fault.py"
FIT = "fit of model 'sequential'"
_TERMINATED = "all of them have saved, and end with exit code 143"
_DRIFTED = r"All processes must have the same values in their variables\. Received: variable "
# What each fault ends with: the exit code, and what each process says.
FAULTS = {
    "none": (0, "came to its end", "came to its end"),
    "slow": (0, "came to its end", "came to its end"),
    "input": (
        1,
        f"process 0 ends (in {FIT}): process 1 failed in {FIT} with OSError: the file of this",
        "OSError: the file of this host is gone",
    ),
    "callback": (
        1,
        f"process 0 ends (in {FIT}): process 1 failed in {FIT} with OSError: the disk of this",
        "OSError: the disk of this host is full",
    ),
    "callback of process 0": (
        1,
        "OSError: the disk of this host is full",
        f"process 1 ends (in {FIT}): process 0 failed in {FIT} with OSError: the disk of this",
    ),
    # JAX itself ends the others when its coordinator, which process 0 runs, is gone.
    "kill process 0": (137, "", "(CoordinationService|is gone)"),
    "epoch end": (
        1,
        # Process 0 is within the epoch's end, or at the next epoch's first batch.
        rf"process 0 ends \(in {FIT}\): process 1 failed in {FIT} with OSError: the disk of this"
        rf"|process 1: failed in {FIT} with OSError: the disk of this",
        "OSError: the disk of this host is full",
    ),
    "kill": (137, f"process 1 silent for 6 s, last heard in {FIT}", ""),
    "stop": (75, f"process 1 silent for 6 s, last heard in {FIT}", ""),
    "terminate": (143, *[_TERMINATED] * 2),
    "terminate in a launch of several": (143, *[_TERMINATED] * 2),
    "terminate between two fits": (143, *[_TERMINATED] * 2),
    "terminate in validation": (143, *[_TERMINATED] * 2),
    "goes on": (0, "came to its end", "came to its end"),
    "save alone": (
        1,
        "process 0: saving model 'sequential' to",
        "process 1: evaluate of model 'sequential'. Call model.evaluate in all processes",
    ),
    "save in callback": (
        1,
        # Process 0 may be at the next epoch's first batch, or wait for process 1 before.
        r"process 1(:| failed in fit .*PeerError.* process 1:) saving model 'sequential' to",
        r"process 0: (still in fit|the first|comparing).*; process 1: saving model 'seq",
    ),
    "fit alone": (1, f"process 1: {FIT}", "process 0: evaluate of model 'sequential'"),
    "seed": (
        1,
        *["All processes must have the same weights. Received: variable 'sequential/dense/k"] * 2,
    ),
    "data": (
        1,
        *["All processes read the same batches. Received: x of an epoch's first batch"] * 2,
    ),
    "model": (1, *[f"process 0: {FIT}; process 1: fit of model 'other'"] * 2),
    "layers": (1, *["All processes must build the same model. Received: sequential/dense"] * 2),
    "plan": (
        1,
        *[r"same model. Received: sequential/dense/bias \(8,\) float32.* P\(.model.,\)"] * 2,
    ),
    "learning rate in callback": (1, *[_DRIFTED + "'.*learning_rate', which differs"] * 2),
    "weight in callback": (1, *[_DRIFTED + "'sequential/dense/kernel', which differs"] * 2),
    "learning rate in own loop": (1, *[_DRIFTED + "'.*learning_rate', which differs"] * 2),
    "learning rate between": (1, *[_DRIFTED + "'.*learning_rate', which differs"] * 2),
    "weight between": (1, *[_DRIFTED + "'sequential/dense_1/bias', which differs"] * 2),
    "same value in callback": (0, "came to its end", "came to its end"),
    "replica code": (
        1,
        "process 1 failed after strategy.run of 'step' with OSError: the disk of this host",
        "OSError: the disk of this host is full",
    ),
    "replica leaves": (75, "process 1 has ended its program after strategy.run of 'step'", ""),
    "replica other": (
        1,
        "process 1 failed ",
        r"process 0: still (in|after) strategy.run of 'step' after 6 s; process 1: strategy.run of",
    ),
    "leaves fit": (75, f"process 1 has ended its program in {FIT}", ""),
    # Of process 0, which may raise, or be within a collective that nothing can interrupt.
    "exits in fit": ((1, 75), f"process 1 has ended with exit code 0, last heard in {FIT}", ""),
    # JAX itself ends the others, as above.
    "exits in fit of process 0": (134, "", "(CoordinationService|is gone)"),
    "missing": (69, "All processes must call ktd.initialize()", ""),
}
# What the launcher names as the first failure, without an error in any process.
FIRST = {
    "replica leaves": "process 1 of 2 .*: has ended its program after strategy.run of 'step'",
    "leaves fit": f"process 1 of 2 .*: has ended its program in {FIT}",
    "exits in fit": "process 1 of 2 .*: ended with exit code 0, while the others waited for it",
    "exits in fit of process 0": "process 0 of 2 .*: ended with exit code 0, while the others",
}
# Start of the processes, and what they may take after a fault can be noticed.
MOST_S = 90


# Who starts JAX's distributed runtime, and whether we are called after that.
ORDERS = ("ours", "jax, ours", "jax", "keras, ours", "keras")


def ends_as_told(fault, folder, order="ours"):
    """Runs a fault; what was wrong with how it ended, or nothing."""
    code, *words = FAULTS[fault]
    command = [sys.executable, "-m", "keras_tpu_dist", "launch", "--processes", "2"]
    if fault == "missing":
        command = [sys.executable, "-c", _ONE_OF_TWO, str(SCRIPT)]
    else:
        command += ["--devices", "2", str(SCRIPT)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, fault, str(folder), order],
            capture_output=True,
            text=True,
            timeout=MOST_S,
            env=os.environ | {"KERAS_BACKEND": "jax"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return [f"still running after {MOST_S} s: {error.stdout!r}"]
    said = done.stdout + done.stderr
    codes = code if isinstance(code, tuple) else (code,)
    wrong = [f"exit code {done.returncode}"] if done.returncode not in codes else []
    for number, expected in enumerate(words):
        lines = [line for line in said.splitlines() if line.startswith(f"[{number}]")]
        told = "\n".join(lines) if fault != "missing" else said
        if expected not in told and not re.search(expected, told):
            wrong.append(f"process {number} does not say {expected!r}")
    if not re.search(f"launch: {FIRST.get(fault, '')}", said) and fault in FIRST:
        wrong.append("the launcher names another process")
    broken = [path for path in pathlib.Path(folder).iterdir() if not _opens(path)]
    if fault.startswith("terminate") and not ktd.callbacks.Checkpoint(f"{folder}/kept").steps:
        wrong.append("no checkpoint")
    wrong += [f"{path} is broken" for path in broken]
    if fault == "terminate in validation" and not wrong:
        wrong += goes_on_wrong(folder, order)
    return [*wrong, f"after {time.monotonic() - started:.0f} s", said[-4000:]] if wrong else []


@functools.cache
def whole_run(order):
    """The weights and the history of the run that nobody cut."""
    with tempfile.TemporaryDirectory() as folder:
        wrong = ends_as_told("goes on", folder, order)
        assert not wrong, wrong
        return dict(np.load(f"{folder}/ended.npz"))


def goes_on_wrong(folder, order):
    """Resumes the run that was cut in its second validation; how it ends otherwise than a whole."""
    found = CheckpointReader(f"{folder}/kept")
    training = found.manifest(found.steps[-1]).training
    wrong = []
    if (training["epoch"], training["done"]) != (1, 5):
        wrong.append(f"saved in epoch {training['epoch']} after {training['done']} batches")
    wrong += ends_as_told("goes on", folder, order)
    if wrong:
        return wrong
    one, other = dict(np.load(f"{folder}/ended.npz")), whole_run(order)
    if sorted(one) != sorted(other):
        return [f"{sorted(one)} and {sorted(other)}"]
    near = {name: np.allclose(one[name], other[name], rtol=1e-5, atol=1e-5) for name in one}
    return [f"{name} differs" for name, is_near in near.items() if not is_near]


_ONE_OF_TWO = """
import os, runpy, socket, sys
with socket.create_server(("127.0.0.1", 0)) as free:
    here = f"127.0.0.1:{free.getsockname()[1]}"
os.environ.update(KTD_COORDINATOR=here, KTD_NUM_PROCESSES="2", KTD_PROCESS_ID="0")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _opens(path):
    return path.is_dir() or zipfile.is_zipfile(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["callback", "kill", "save alone", "missing", "learning rate in callback", "weight between"]
    + list(FIRST)
    + [fault for fault in FAULTS if fault.startswith("terminate")],
)
def test_a_fault_ends_all_processes(fault, tmp_path):
    wrong = ends_as_told(fault, tmp_path)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "fault"),
    [
        *((order, "callback") for order in ORDERS[1:]),
        *(("jax", "callback of process 0"), ("keras", "kill"), ("jax, ours", "save alone")),
    ],
)
def test_a_fault_ends_all_processes_whoever_started_them(order, fault, tmp_path):
    wrong = ends_as_told(fault, tmp_path, order)
    assert not wrong, "\n".join(wrong)


def main(runs="1", orders="ours", faults=""):
    """Prints how often each fault ended as told; `orders` and `faults` are separated by `;`."""
    right = collections.Counter()
    orders = ORDERS if orders == "all" else orders.split(";")
    cases = [
        (fault, order)
        for order in orders
        for fault in (faults.split(";") if faults else FAULTS)
        if fault != "missing" or order == "ours"
    ]
    for case in cases:
        for _ in range(int(runs)):
            with tempfile.TemporaryDirectory() as folder:
                wrong = ends_as_told(case[0], folder, case[1])
            right[case] += not wrong
            if wrong:
                print(*case, *wrong, sep="\n  ")
        print(f"{case[0]:34} {case[1]:12} {right[case]} of {runs}", flush=True)
    return sum(right.values()) != int(runs) * len(cases)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
