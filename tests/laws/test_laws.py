"""The catalogue of the laws is whole, and a sample holds; `python tests/laws/run.py` tries all."""

import random
from dataclasses import replace

import pytest

from laws import interrupted, listing, run
from laws.acts import ACTS
from laws.cases import Case, compared
from laws.catalogue import CATALOGUES, classes_of, subjects, unlisted


def test_every_class_of_keras_has_a_subject_or_a_reason():
    assert unlisted() == []
    assert all(len(classes_of(catalogue)) > 2 for catalogue in CATALOGUES)


def test_every_callback_of_keras_and_ours_has_a_row_or_a_reason():
    assert interrupted.unlisted() == []


def test_what_is_left_out_of_a_subject_is_an_act_or_a_trainer():
    known = {*ACTS, "replica_code"}
    assert not {name for subject in subjects().values() for name in subject.without} - known


def test_all_cases_differ_and_every_act_is_among_them():
    jobs = listing.all_jobs()
    assert len({job["name"] for job in jobs}) == len(jobs) > 3000
    assert ACTS.keys() == {name for job in jobs for name in job.get("acts", ())}


def test_a_case_that_changes_something_is_found(monkeypatch):
    """A run that loses one weight is told from one that loses nothing."""
    case = Case("optimizers/SGD/plain", acts=("nothing", "weights_set"))
    assert compared(case)["right"]

    def forgets(run):
        weights = run.model.get_weights()
        run.model.set_weights([*weights[:-1], 0 * weights[-1]])

    act = replace(ACTS["weights_set"], apply=forgets, in_keras="nothing")
    monkeypatch.setitem(ACTS, "weights_set", act)
    found = compared(case)
    assert not found["right"]
    assert found["difference"] > 1e-3


# One of each fault that the first run of the laws found.
_FOUND = (
    r"^layers/GRU/stateful \| nothing then nothing \| fit then fit .* frozen|"
    r"^layers/GRU/stateful \| nothing then restored ",
    r"^optimizers/ScheduleFreeAdamW/plain \| .*replica_code then replica_code",
    r"^optimizers/ScheduleFreeAdamW/plain \| fine_tuned then",
    r"^interrupted optimizers/MultiOptimizer/plain",
    r"^interrupted .* \| state of a user \| cut at \(4, 3\)",
    r"^wrapped .* (failed|resumed) \| launches",
    r"^interrupted .*/two \| .* \| turned",
    r"^optimizers/MultiOptimizer/plain \| (converted|nothing) then (nothing|converted) \|",
    r"^dtypes/(float32/int32|mixed_float16/float16) \| .*launches",
    r"^layers/Bidirectional/concat \| nothing then (resumed|restored) ",
    r"^interrupted .* \| values of (JAX|NumPy) \| cut at \(4, 3\)",
)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", _FOUND, ids=range(1, len(_FOUND) + 1))
def test_what_the_laws_found_before(pattern):
    jobs = run.listed(pattern)
    assert jobs
    _hold(jobs[:4])


# A callback whose attributes were unknown, an `on_epoch_begin` that came twice, batches that were
# counted twice.
@pytest.mark.parametrize(
    "names",
    [
        ("ModelCheckpoint", "LearningRateScheduler"),
        ("ours/HostMetrics", "ModelCheckpoint/batches"),
        ("state of a user", "BackupAndRestore/batches"),
    ],
    ids=" + ".join,
)
def test_pairs_of_callbacks_that_differed(names):
    case = interrupted.Interrupted(callbacks=names, cuts=(5,), every_steps=3)
    assert interrupted.compared(case)["right"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*sorted(CATALOGUES), "interrupted"])
def test_a_sample_of_each_kind_holds(kind):
    _hold(random.Random(0).sample(run.listed(f"^{kind}"), 6))


def _hold(jobs):
    found = run.run_all(jobs, processes=1)
    assert not [str(finding) for finding in found if finding.outcome != "right"]
