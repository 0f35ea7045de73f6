"""`ktd.verify` sees a wrong gradient of one weight with any optimizer, and only a wrong one."""

import pytest
from replay.wrong_gradients import Case, drawn, seen

pytestmark = [pytest.mark.slow, pytest.mark.tpu_compiler]

SPLIT = {"mesh": {"model": 4}, "plan": "auto", "remat": None, "policy": "float32"}
# What the generator found: a slot that is not read, and rows that are exchanged with padding.
FOUND = {
    "recurrent, Adafactor": Case(
        "recurrent", "optimizers/Adafactor/plain", steps=1, weight=0.5, factor=1.0, **SPLIT
    ),
    "mlp, Muon": Case("mlp", "optimizers/Muon/plain", steps=3, weight=0.5, factor=2.0, **SPLIT),
}


@pytest.mark.parametrize("seed", range(12))
def test_a_wrong_gradient_is_seen(seed):
    right, wrong = seen(drawn(seed))
    assert right, (drawn(seed), wrong)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_verified(name):
    right, wrong = seen(FOUND[name])
    assert right, (FOUND[name], wrong)
