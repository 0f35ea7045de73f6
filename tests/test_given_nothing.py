"""What is asked about something that is no model, no rules, no directory."""

import pytest

import keras_tpu_dist as ktd


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda s, v: s.explain(v), r"What a strategy says of layouts needs a model.*model={}"),
        (lambda s, v: s.lint(v), r"What a strategy says of layouts needs a model.*model={}"),
        (lambda s, v: s.plan(v), r"What a strategy says of layouts needs a model.*model={}"),
        (lambda s, v: s.placement(v), r"What a strategy says of layouts needs a model.*model={}"),
        (lambda s, v: ktd.convert(v), r"convert needs a model.*model={}"),
        (lambda s, v: ktd.search(v, "v5e:2x4"), r"build of search is a function.*build={}"),
        (lambda s, v: ktd.LayoutRules(v), r"LayoutRules takes \(pattern, axes\) pairs.*rules={}"),
        (
            lambda s, v: ktd.callbacks.Checkpoint(v),
            r"of Checkpoint is a path.*directory={}",
        ),
    ],
)
@pytest.mark.parametrize("value", [None, 5])
def test_none_or_a_number_is_an_error_that_names_the_argument(asked, words, value):
    with pytest.raises(ValueError, match=words.format(value)):
        asked(ktd.TPUStrategy(layout="fsdp"), value)


def test_an_empty_directory():
    with pytest.raises(ValueError, match=r"directory of Checkpoint is a path.*directory=''"):
        ktd.callbacks.Checkpoint("")
