"""The list of passes: what each answered is kept and explained; a new one takes a class."""

import re

import keras
import numpy as np
import pytest
from helpers import assert_close, built

import keras_tpu_dist as ktd
from keras_tpu_dist.programs import passes
from keras_tpu_dist.programs.answers import Answer, Level, Rewritten, Why, words_of
from keras_tpu_dist.programs.tables.step import BY_ROWS

L = keras.layers


def ranking():
    ids = keras.Input((3,), dtype="int32")
    x = L.Flatten()(L.Embedding(64, 8, name="table")(ids))
    model = keras.Model(ids, L.Dense(1)(x), name="ranking")
    model.compile("adagrad", "mse")
    return model


def fitted(strategy):
    rng = np.random.default_rng(0)
    model = built(ranking, strategy)
    x, y = rng.integers(0, 64, (16, 3)), rng.normal(size=(16, 1))
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    return model


def strategy_of():
    rules = [("table/embeddings", ("data", None))]
    return ktd.TPUStrategy({"data": 8}, rules, tables="rows", head="pieces")


def lines_of(explanation):
    """The lines on passes; a line that is longer than the terminal is several."""
    text = " ".join(str(explanation).split())
    return re.findall("(?:otherwise|as written), .*?(?= otherwise, | as written, |$)", text)


def test_answers_are_kept_and_explained():
    strategy = strategy_of()
    assert lines_of(strategy.explain(built(ranking, strategy))) == [
        "as written, tables: table/embeddings: may be used by rows: the first step decides",
        "as written, head: in pieces, if a layer computes logits of a vocabulary: the first step "
        "decides",
    ]
    model = fitted(strategy)
    assert lines_of(strategy.explain(model)) == [
        f"otherwise, tables: table/embeddings: {BY_ROWS}",
        "as written, head: ranking: head as a whole: no layer computes logits of a vocabulary",
    ]
    assert [row.done for row in strategy.explain(model).passes] == [True, False]
    assert lines_of(strategy.explain(model, passes=False)) == []
    assert strategy.explain(model, passes=False).passes == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tables": None, "head": "whole"}, ["tables=None", 'head as a whole: head="whole"']),
        ({"tables": "rows"}, ["table/embeddings: every row is updated: it is replicated"]),
        ({}, ["no Embedding has a table of 64 MiB or more that is split"]),
    ],
)
def test_what_is_not_done_has_a_reason(options, words):
    strategy = ktd.TPUStrategy({"data": 8}, **options)
    text = " ".join(str(strategy.explain(built(ranking, strategy))).split())
    assert all(each in text for each in words), text


class Nothing:
    """A pass that does nothing."""

    name = "nothing"
    level = Level.STEP

    def rewritten(self, program, where):
        return Why([Answer(where.model.name, f"nothing to do in a {where.kind} step")])

    def waits(self, model, strategy):
        return []


class Doubled:
    """A pass of layers' calls, which the layer asks for by its name."""

    name = "doubled"
    level = Level.LAYER

    def wants(self, layer, strategy):
        return strategy is not None and layer.name == "doubled"

    def rewritten(self, program, where):
        answers = [Answer(where.layer.path, "its outputs are doubled", done=True)]
        return Rewritten([2 * output for output in program.run()], answers)

    def waits(self, model, strategy):
        return []


def test_a_pass_of_layers_is_a_class_in_the_list(monkeypatch):
    class Dense(L.Dense):
        """No other test has its calls."""

    def model():
        return keras.Sequential([keras.Input((3,)), Dense(2, name="doubled"), Dense(2)])

    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, Doubled()))
    passes.set_order()
    x, strategy = np.ones((8, 3)), ktd.TPUStrategy()
    alone, doubled = built(model, None), built(model, strategy)
    assert_close(doubled.predict(x, verbose=0), 2 * alone.predict(x, verbose=0))
    rows = map(str, strategy.explain(doubled).passes)
    assert "otherwise, doubled: sequential/doubled: its outputs are doubled" in list(rows)


def test_a_pass_is_a_class_in_the_list(monkeypatch):
    before = fitted(strategy_of())
    monkeypatch.setattr(passes, "PASSES", (Nothing(), *passes.PASSES))
    strategy = strategy_of()
    model = fitted(strategy)
    assert words_of(model, "nothing") == {"ranking": "nothing to do in a train step"}
    assert "as written, nothing: ranking: nothing to do" in str(strategy.explain(model))
    assert_close(model.get_weights(), before.get_weights(), 0.0)
