"""Checkpoints on each host's own disk: what the processes can read together, or the shared ones.

`python tests/processes/test_local_tier.py [CASE ...]` prints where each case, or some, went on.
"""

import functools
import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))

from helpers import loaded  # noqa: E402

from keras_tpu_dist.launcher.names import EXIT_TERMINATED  # noqa: E402

JOB, TERMINATED_AT = HERE / "local_job.py", 3
launched = loaded(HERE / "test_processes.py", "local_test_processes").launched


def run(how, cases, processes):
    """Runs trainings of so many processes; the exit code and what was printed."""
    words = ["|".join(map(str, case)) for case in cases]
    done = launched(JOB, how, *words, processes=processes, devices=4 // processes, timeout=1500)
    return done.returncode, done.stdout[-5000:] + done.stderr[-3000:]


@functools.cache
def killed(plan):
    """The directories of a run of two hosts that was killed after step 11."""
    folder = pathlib.Path(tempfile.mkdtemp())
    code, said = run("SIGKILL", [(folder, plan, "host0", "host1")], 2)
    assert code == 137, said
    found = {path.name: steps(path / f"process_{path.name[-1]}") for path in folder.glob("host*")}
    assert found == {"host0": [8, 10], "host1": [8, 10]}, said
    assert steps(folder / "shared") == [6], said
    return folder


def steps(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def nothing(folder):
    pass


def no_host1(folder):
    shutil.rmtree(folder / "host1")


def no_host0(folder):
    shutil.rmtree(folder / "host0")


def swapped(folder):
    (folder / "host0").rename(folder / "other")
    (folder / "host1").rename(folder / "host0")
    (folder / "other").rename(folder / "host1")


def only_one_has_the_newest(folder):
    shutil.rmtree(folder / "host0" / "process_0" / "10")


def half_written(folder):
    own = folder / "host1" / "process_1"
    (own / "10").rename(own / "10.orbax-checkpoint-tmp")


def flipped(folder):
    path = folder / "host1" / "process_1" / "10" / "arrays" / "d" / "parts"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def of_another_run(folder):
    shutil.rmtree(folder / "shared")


TWO, ONE = ("host0", "host1"), ("host0",)
# The plan that was killed, what happened to its disks, the plan and the disks that go on, and the
# step and the tier from which they do.
CASES = {
    "the same hosts": ("fsdp", nothing, "fsdp", TWO, [10, "local"]),
    "another mesh": ("fsdp", nothing, "tensor", TWO, [10, "local"]),
    "hosts in another order": ("fsdp", swapped, "fsdp", TWO, [10, "local"]),
    "a host was replaced": ("fsdp", no_host1, "fsdp", TWO, [6, "shared"]),
    "a host was replaced, of replicas": ("data", no_host1, "data", TWO, [10, "local"]),
    "the first host was replaced": ("data", no_host0, "fsdp", TWO, [10, "local"]),
    "one host is left": ("fsdp", no_host1, "fsdp", ONE, [6, "shared"]),
    "one host is left, of replicas": ("data", no_host1, "data", ONE, [10, "local"]),
    "one has a newer one": ("fsdp", only_one_has_the_newest, "fsdp", TWO, [8, "local"]),
    "half written": ("fsdp", half_written, "fsdp", TWO, [8, "local"]),
    "damaged": ("fsdp", flipped, "fsdp", TWO, [8, "local"]),
    "damaged, of replicas": ("data", flipped, "data", TWO, [10, "local"]),
    "of another run": ("fsdp", of_another_run, "fsdp", TWO, []),
}


WHOLE = "nobody kills it"


@functools.cache
def went_on(processes):
    """Goes on in each case of so many processes, one after the other, and trains a whole run."""
    folder, cases = pathlib.Path(tempfile.mkdtemp()), []
    for name, (plan, change, next_plan, disks, _) in CASES.items():
        if len(disks) == processes:
            shutil.copytree(killed(plan), folder / name)
            change(folder / name)
            cases.append((folder / name, next_plan, *disks))
    if processes == 1:
        (folder / WHOLE).mkdir()
        cases.append((folder / WHOLE, "data", "disk"))
    code, said = run("none", cases, processes)
    assert code == 0, said
    return folder


@functools.cache
def terminated():
    """The directories of a run of two hosts, one of which got SIGTERM, and the step it saved."""
    folder = pathlib.Path(tempfile.mkdtemp())
    code, said = run("SIGTERM", [(folder, "fsdp", "host0", "host1")], 2)
    assert code == EXIT_TERMINATED, said
    tiers = [folder / "shared", *(folder / f"host{i}" / f"process_{i}" for i in range(2))]
    newest = {steps(tier)[-1] for tier in tiers}
    assert len(newest) == 1, (newest, said)
    return folder, newest.pop()


@functools.cache
def after_sigterm():
    """Goes on from both tiers, and from each alone, and trains a whole run."""
    before, step = terminated()
    folder, cases = pathlib.Path(tempfile.mkdtemp()), []
    for name in ("both", "local", "shared"):
        shutil.copytree(before, folder / name)
        cases.append((folder / name, "tensor", *TWO))
    shutil.rmtree(folder / "local" / "shared" / str(step))
    for disk in TWO:
        shutil.rmtree(folder / "shared" / disk)
    (folder / WHOLE).mkdir()
    code, said = run("none", [*cases, (folder / WHOLE, "data", *TWO)], 2)
    assert code == 0, said
    return folder, step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tier"), [("both", "shared"), ("local", ""), ("shared", "shared")]
)
def test_after_sigterm_both_tiers_have_the_last_step(case, tier):
    folder, step = after_sigterm()
    found, whole = (
        json.loads((folder / name / "result.json").read_text()) for name in (case, WHOLE)
    )
    assert step >= TERMINATED_AT
    assert found["from"] == [step, tier or "host0"]
    for a, b in zip(found["weights"], whole["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for key, values in whole["history"].items():
        np.testing.assert_allclose(found["history"][key], values, rtol=1e-5, atol=1e-5)


def result(processes, case):
    return json.loads((went_on(processes) / case / "result.json").read_text())


def ends_wrong(case):
    """What is wrong with where a killed run went on from, and with how it ended."""
    *_, disks, expected = CASES[case]
    found, whole = result(len(disks), case), result(1, WHOLE)
    tier = ["shared" if name == "shared" else "local" for name in found["from"][1:]]
    if [*found["from"][:1], *tier] != expected:
        return f"goes on from {found['from']}"
    try:
        for a, b in zip(found["weights"], whole["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        for key, values in whole["history"].items():
            np.testing.assert_allclose(found["history"][key], values, rtol=1e-5, atol=1e-5)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_where_the_processes_go_on(case):
    wrong = ends_wrong(case)
    assert not wrong, wrong


def main(*cases):
    wrong = 0
    for case in set(CASES) - set(cases or CASES):
        del CASES[case]
    for case in cases or CASES:
        words = ends_wrong(case)
        wrong += bool(words)
        print(f"{case:36} {words or f'goes on from {CASES[case][-1]}, ends alike'}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
