"""The state of an input with `get_state()` comes back as it was."""

import json
import logging

import numpy as np
import pytest

from keras_tpu_dist.common import once
from keras_tpu_dist.input.position import POSITION, set_state, state_of


class Batches:
    """An iterator whose state is a user's."""

    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {0: (3, [1, 2]), "rng": np.random.default_rng(3).bit_generator.state},
        {"at": np.int64(7), "order": np.arange(600)},
        {"files": ["a", "b"], "at": 3, "rest": None},
        b"\x00\xff",
    ],
)
def test_a_state_of_an_input_comes_back_as_it_was(state):
    saved = json.loads(json.dumps(state_of(Batches(state))))
    assert POSITION["state"][1](saved)
    other = Batches()
    assert set_state(other, saved)
    assert repr(other.state) == repr(state)


def test_states_that_were_saved_before_types_were_marked():
    other = Batches()
    assert set_state(other, {"json": '{"at": [1, {"x": null}]}'})
    assert other.state == {"at": [1, {"x": None}]}


def test_a_state_that_cannot_be_saved_is_said_once(caplog):
    once.forget()
    caplog.set_level(logging.WARNING, "keras_tpu_dist")
    for _ in range(3):
        assert state_of(Batches({"file": [object()]})) is None
    assert caplog.text.count("WARNING") == 1
    assert "Batches.get_state()['file'][0] is of type object, which a checkpoint" in caplog.text


def test_a_state_of_another_form_is_said(caplog):
    caplog.set_level(logging.WARNING, "keras_tpu_dist")
    hostile = {"json": '{"keras_tpu_dist type": "array", "dtype": "object", "shape": [], "of": ""}'}
    assert not set_state(Batches(), hostile)
    assert "does not accept the state in the checkpoint (ValueError: a dtype of" in caplog.text
