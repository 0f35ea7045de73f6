"""What counts as a whole number."""

import jax.numpy as jnp
import numpy as np
import pytest

from keras_tpu_dist.common.checks import is_count


@pytest.mark.parametrize("value", [0, 7, np.int8(3), np.uint64(2), np.array(5), jnp.int32(4)])
def test_whole_numbers(value):
    assert is_count(value)
    assert is_count(value, 0)
    assert not is_count(value, 100)


@pytest.mark.parametrize(
    "value", [None, True, np.True_, 1.0, np.float32(1), "1", (1,), np.ones(2, int), 1j]
)
def test_other_values_are_no_counts(value):
    assert not is_count(value)
    assert not is_count(value, 0)
