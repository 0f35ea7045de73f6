"""What is done to a folder of checkpoints, at random: python tests/checkpoint/histories.py."""

import collections
import pathlib

import pytest
from helpers import loaded

histories = loaded(pathlib.Path(__file__).with_name("histories.py"), "checkpoint_histories")


@pytest.mark.parametrize(
    ("seed", "events"), [(1, 6), *(pytest.param(n, 14, marks=pytest.mark.slow) for n in range(6))]
)
# Orbax's threads raise what they also hand on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_holds_what_it_should_after_each_event(seed, events):
    counts = collections.Counter()
    assert histories.history(seed, counts, events) == ""
    assert sum(counts.values()) >= events


def test_a_wrong_folder_is_noticed(monkeypatch):
    """With the newest one by its number, as it was."""
    from keras_tpu_dist.checkpoint import keeping, reader, store

    for module in (keeping, reader, store):
        monkeypatch.setattr(module, "in_order", sorted)
    counts = collections.Counter()
    found = [histories.history(seed, counts, 10) for seed in range(3)]
    assert any("WrongError" in words for words in found), found
