"""`ktd.verify` sees a wrong gradient of one weight with any optimizer, and only a wrong one."""

import pytest
from replay.wrong_gradients import drawn, seen

pytestmark = [pytest.mark.slow, pytest.mark.tpu_compiler]


@pytest.mark.parametrize("seed", range(12))
def test_a_wrong_gradient_is_seen(seed):
    right, wrong = seen(drawn(seed))
    assert right, (drawn(seed), wrong)
