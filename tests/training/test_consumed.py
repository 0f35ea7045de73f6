"""With donated state, no array of the state before a step is in memory after it."""

import jax
import pytest
from laws import catalogue
from training.test_guard import after_launch

import keras_tpu_dist as ktd

OPTIMIZERS = sorted(name for name in catalogue.subjects() if name.startswith("optimizers/"))
FAST = ("optimizers/Adafactor/plain", "optimizers/Adam/plain", "optimizers/SGD/plain")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in OPTIMIZERS],
)
def test_a_step_consumes_the_state_before(name, monkeypatch):
    """Adafactor's velocity of a kernel is written and never read."""
    subject, consumed = catalogue.subjects()[name], []

    def look(state):
        consumed.extend(leaf.is_deleted() for leaf in jax.tree.leaves(state))

    with ktd.TPUStrategy({"data": 4, "model": 2}, donate_state=True).scope():
        model = subject.model()
        model.compile(**subject.options())
    after_launch(monkeypatch, 2, look)
    x, y = subject.data(24)
    model.fit(x, y, batch_size=8, verbose=0)
    assert len(consumed) == len(model.weights) + len(model.optimizer.variables) + 2
    assert all(consumed)
