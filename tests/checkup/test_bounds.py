"""What a comparison with one device calls rounding."""

import jax.numpy as jnp
import numpy as np
import pytest

from keras_tpu_dist.tools.checkup.bounds import allowed, gap

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype("float32")


def steps_of(rate, dtype="float32", steps=1):
    """Gradient descent from gammas of 1; the gradients are about 1e-2."""

    def run(state, batches):
        gamma = state[0][0]
        for x in batches:
            gradient = (np.asarray(x, "float64") * 1e-2).mean(0)
            gamma = (gamma - rate * gradient).astype(dtype)
        return [np.asarray((gamma * X).sum(), "float32"), gamma]

    return run, [[np.ones(8, dtype)]], [X] * steps


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rate", [1e-1, 1e-2])
def test_a_learning_rate_hides_no_wrong_gradient(rate, steps):
    run, state, batches = steps_of(rate, steps=steps)
    right = run(state, batches)
    wrong = steps_of(0.9 * rate, steps=steps)[0](state, batches)
    options = {"before": [None, 0], "steps": steps}
    limits = allowed(run, state, batches, right, "cpu", False, **options)
    assert gap(wrong[1], right[1]) > limits[1]
    # What the value alone would allow hides it if the rate is small.
    by_value = allowed(run, state, batches, right, "cpu", False)
    assert limits[0] == by_value[0]
    assert (gap(wrong[1], right[1]) > by_value[1]) == (rate > 1e-2)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_rounding_of_a_sum_is_allowed(steps):
    run, state, batches = steps_of(1e-3, steps=steps)
    right = run(state, batches)
    limits = allowed(run, state, batches, right, "cpu", False, before=[None, 0], steps=steps)
    ulp = np.spacing(np.float32(1)) * steps
    assert gap(right[1] + ulp, right[1]) <= limits[1]


def test_in_half_precision_the_value_is_judged():
    """Rounding may turn the sign of an update."""
    run, state, batches = steps_of(0.1, jnp.bfloat16)
    right = run(state, batches)
    limits = allowed(run, state, batches, right, "cpu", True, before=[None, 0])
    assert limits[1] == 5e-2


def test_what_has_no_gradient_may_be_rounding():
    """As the bias of an attention's keys: 0 on one device, whose sums have another order."""

    def run(state, batches):
        return [state[0][0], state[1][0] + 1]

    state = [[np.zeros(4, "float32")], [np.array(0, "int32")]]
    right = run(state, [])
    limits = allowed(run, state, [], right, "cpu", False, before=[0, 1])
    assert 0 < limits[0] < 1e-8
    assert limits[1] == 1e-5
    assert gap(right[0] + 1e-12, right[0]) <= limits[0]
    assert gap(right[0] + 1e-9, right[0]) > limits[0]


def test_an_infinity_in_both_is_no_difference():
    def run(state, batches):
        return [np.array([np.inf, np.nan, state[0][0][2] * 1.5], "float32")]

    state = [[np.array([1.0, 2.0, 3.0], "float32")]]
    right = run(state, [])
    (limit,) = allowed(run, state, [], right, "cpu", False, before=[0])
    assert 0 < limit < 1e-4
    assert gap(right[0], right[0]) == 0
