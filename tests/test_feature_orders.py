"""Features in any order, on a sample; `python tests/feature_orders.py` runs all permutations."""

import random

import feature_orders
import pytest

# Keras says so of each layer that has nothing to quantize.
pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`:UserWarning")
MODELS = ("lstm", "block", "experts")
SAMPLE = random.Random(0).sample(
    [(name, order) for name in MODELS for order in feature_orders.orders()], 24
)


@pytest.mark.slow
def test_remat_convert_and_annotations_in_one_order():
    assert feature_orders.Runner().run("experts", ("annotate", "remat", "convert")) is None


@pytest.mark.slow
def test_a_sample_of_orders():
    runner = feature_orders.Runner()
    wrong = {case: why for case in SAMPLE if (why := runner.run(*case)) is not None}
    assert not wrong
    assert runner.counts["equal"] > len(SAMPLE) / 2
