"""Programs drawn at random, some of every run; seeds that once failed, with what was wrong."""

from collections import Counter
from pathlib import Path

import pytest
from drawing import run_all
from options import all_pairs, covering, drawn, is_legal, pairs_of

WORKER = Path(__file__).with_name("worker.py")

# What failed before it was mended, by the options that matter.
FAILED = {
    "NameNaN and validation: the evaluation's program was handed a train step's watch": (
        ("callbacks", "name_nan"),
        ("validation", "steps"),
        ("model", "vectors"),
        ("run_eagerly", False),
    ),
    "tf.data: Keras expects a dataset back from distribute_dataset": (
        ("input", "tf.data"),
        ("model", "vectors"),
    ),
    "launches that an epoch cuts short were counted whole": (
        ("steps_per_execution", 3),
        ("steps_per_epoch", 2),
        ("input", "arrays"),
        ("model", "shared"),
    ),
    "an input of unknown length ended within an epoch's last launch, and was not begun anew": (
        ("steps_per_execution", 3),
        ("steps_per_epoch", 2),
        ("rows", 13),
        ("batch_size", 16),
        ("input", "grain"),
        ("model", "vectors"),
    ),
    "an epoch that found no more data had 0.0 for its logs, not the earlier epoch's": (
        ("steps_per_epoch", 2),
        ("rows", 24),
        ("batch_size", 16),
        ("input", "grain"),
        ("model", "vectors"),
    ),
    "steps_per_execution='auto' wrote its number on the model, which an evaluate beside read": (
        ("steps_per_execution", "auto"),
        ("steps_per_epoch", 5),
        ("beside", "evaluate"),
        ("trainer", "fit"),
        ("model", "vectors"),
    ),
    "padding was checked by a program laid out otherwise, which rounds bfloat16 otherwise": (
        ("trainer", "replica"),
        ("model", "moved_time"),
        ("mesh", "t2x4"),
        ("policy", "mixed_bfloat16"),
        ("rows", 13),
        ("batch_size", 8),
    ),
}


@pytest.mark.slow
def test_what_failed_before():
    programs = [drawn(number, fixed) for number, fixed in enumerate(FAILED.values())]
    found = run_all(programs, WORKER, timeout=300)
    assert [str(finding) for finding in found if finding.outcome != "right"] == []
    assert len(found) == len(FAILED)


@pytest.mark.slow
def test_models_with_tables_equal_one_device():
    """`python tests/random_models/run.py --given model=tables` draws others."""
    programs = [drawn(seed, [("model", "tables")]) for seed in (1, 2, 100, 101)]
    found = run_all(programs, WORKER, processes=1, timeout=600)
    assert [str(each) for each in found if each.outcome != "right"] == []
    assert len(found) == len(programs)


@pytest.mark.slow
def test_every_pair_of_options_meets():
    programs = covering([drawn(seed) for seed in range(30)], 1000)
    assert all_pairs() <= set().union(*map(pairs_of, programs))
    assert all(is_legal(program.choices) for program in programs)
    # No fewer programs can have all pairs of the two options with the most values.
    least = max(Counter((a, b) for (a, _), (b, _) in all_pairs()).values())
    assert len(programs) < 1.4 * least


def test_a_seed_is_one_program_and_what_is_not_legal_is_said():
    assert drawn(5) == drawn(5)
    assert drawn(5).choices != drawn(6).choices
    with pytest.raises(ValueError, match="no legal program has"):
        drawn(0, [("model", "split"), ("mesh", "8")])
    with pytest.raises(ValueError, match="no legal program has"):
        drawn(0, [("model", "tables"), ("use", "lazy"), ("updates", "adam")])
