"""Patterns of paths."""

import pytest

from keras_tpu_dist.common.patterns import matches, patterns_of


@pytest.mark.parametrize(
    ("path", "patterns", "expected"),
    [
        ("mlp/head/kernel", "*/head/*", True),
        ("mlp/head/kernel", "head/*", False),
        ("mlp/head/kernel", ["*bias", "mlp/*"], True),
        ("mlp/head/kernel", [], False),
        ("mlp/Head/kernel", "*/head/*", False),
    ],
)
def test_a_text_is_one_pattern(path, patterns, expected):
    assert matches(path, patterns_of(patterns)) == expected
