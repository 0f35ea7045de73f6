"""What each public name is given: right, or one clear error; see public_surface.py."""

import re

import numpy as np
import public_surface
import pytest
from public_surface import ROWS, arguments, odd_calls, surface

import keras_tpu_dist as ktd

IN_OUR_FORM = re.compile(r"\. Received: .+\. .+", re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def _directory(tmp_path_factory):
    """A directory with a checkpoint, for what reads one."""
    pytest.importorskip("orbax.checkpoint")
    folder = str(tmp_path_factory.mktemp("saved"))
    saved = ktd.callbacks.Checkpoint(folder)
    public_surface.made().fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0, callbacks=[saved])
    public_surface.DIRECTORY[:] = [folder]


def test_every_public_name_has_a_row():
    rows = {name: set(row.wrong) for name, row in ROWS.items()}
    assert {name: set(those) for name, those in surface().items()} == rows


@pytest.mark.parametrize("name", ROWS)
def test_all_else_is_one_clear_error(name):
    wrong = []
    for row, parameter, value in odd_calls():
        if row != name:
            continue
        given = arguments(name, parameter, value)
        try:
            ROWS[name].call(**given)
            wrong.append(f"{parameter}={value!r:.40} is taken")
        except Exception as error:
            named = parameter.rstrip("s") in str(error) or repr(value) in str(error)
            if not (named and IN_OUR_FORM.search(str(error))):
                wrong.append(f"{parameter}={value!r:.40}: {type(error).__name__}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: ktd.callbacks.Checkpoint("a", every_epoch=1), "Did you mean 'every_epochs'"),
        (lambda: ktd.TPUStrategy(layout="fsdq"), "Did you mean 'fsdp'"),
        (lambda: ktd.Planner("fsdq"), "Did you mean 'fsdp'"),
        (lambda: ktd.TPUStrategy(prefech=2), "Did you mean 'prefetch'"),
        (lambda: ktd.RunOptions(buckets="powr_of_two"), "Did you mean 'power_of_two'"),
        (lambda: ktd.Topology.parse("v5:4x4"), "Did you mean"),
    ],
)
def test_words_that_nearly_are_one(call, hint):
    with pytest.raises((ValueError, TypeError), match=hint):
        call()
