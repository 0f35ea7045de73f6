import json

import keras
import numpy as np
import pytest
from helpers import built, mlp

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.annotations import split

MESH = {"data": 4, "model": 2}


def by_path(explanation):
    return {row.path.split("/", 1)[1]: row for row in explanation.rows}


def test_every_variable_with_its_layout_bytes_and_reason():
    strategy = ktd.TPUStrategy(MESH, [("hidden/kernel", (None, "model")), ("kernel", ("model",))])
    model = built(mlp, strategy)
    rows = by_path(strategy.explain(model))
    hidden, out = rows["hidden/kernel"], rows["out/kernel"]
    assert (hidden.shape, hidden.dtype, hidden.axes) == ((6, 16), "float32", (None, "model"))
    assert (hidden.bytes, hidden.bytes_per_device) == (384, 192)
    assert hidden.reason == "rule 0 'hidden/kernel'"
    assert hidden.alternatives == ("rule 1 'kernel' also matches, but stands later",)
    assert out.reason == "rule 1 'kernel'"
    assert rows["out/bias"].reason == "no rule matches: replicated"
    assert hidden.slot_bytes == 0  # the optimizer is not built yet
    model.fit(np.ones((8, 6)), np.zeros(8), verbose=0)
    hidden = by_path(strategy.explain(model))["hidden/kernel"]
    assert (hidden.slot_bytes, hidden.slot_bytes_per_device) == (768, 384)


@pytest.mark.slow
def test_what_it_says_is_where_the_arrays_are():
    for layout in ("fsdp", "tensor_parallel", None):
        strategy = ktd.TPUStrategy(MESH, layout and ktd.Planner(layout, min_size=1))
        model = built(mlp, strategy)
        model.fit(np.ones((8, 6)), np.zeros(8), verbose=0)
        explanation = strategy.explain(model)
        state = [*model.weights, *(v for v in model.optimizer.variables if v.shape)]
        held = sum(v.value.addressable_shards[0].data.nbytes for v in state)
        assert explanation.bytes_per_device == held


def test_words_for_people_and_programs():
    strategy = ktd.TPUStrategy(MESH, [("hidden/kernel", (None, "model"))])
    model = built(mlp, strategy)
    split(model.layers[0], output=("data", "model"))
    explanation = strategy.explain(model)
    text = str(explanation)
    assert "sequential on 8 devices {'data': 4, 'model': 2}" in text
    assert "(·, model)" in text
    assert "output of sequential/hidden: ('data', 'model')  (split(output=...))" in text
    assert "largest replicated: sequential/out/kernel (192 B)" in text
    assert "weights and optimizer: 652 B in all, 460 B per device" in text
    assert json.loads(json.dumps(explanation.to_dict()))["bytes"] == 652
    page = explanation._repr_html_()
    assert page.count("<tr>") == 5
    assert "rule 0 &#x27;hidden/kernel&#x27;" in page


def test_one_variable_with_the_alternatives():
    strategy = ktd.TPUStrategy({"data": 4}, "fsdp", devices=ktd.TPUStrategy().mesh.devices[:4])
    model = built(lambda: keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)]), strategy)
    row = strategy.explain(model, "…/kernel")
    assert row.axes == (None, "data")
    assert row.reason == "fsdp: dimension 1, the largest that divides"
    assert "not: dimension 0 over 'data': not larger" in str(row)
    with pytest.raises(ValueError, match=r"speaks of one variable.*2 variables"):
        strategy.explain(built(mlp, strategy), "kernel")
    with pytest.raises(ValueError, match=r"0 variables.*The nearest is '.*/kernel'"):
        strategy.explain(model, "kernell")


def test_a_layout_that_is_not_legal_is_told_not_raised():
    strategy = ktd.TPUStrategy(MESH, [("out/kernel", (None, "model"))])
    explanation = strategy.explain(built(mlp, None))
    row = by_path(explanation)["out/kernel"]
    assert "dimension 1 has 3 elements for 2 shards" in row.problem
    assert row.bytes_per_device == row.bytes
    assert "PROBLEM" in str(explanation)
    assert "PROBLEM" in str(row)


def test_an_output_that_a_rule_lays():
    strategy = ktd.TPUStrategy(MESH, [("hidden/output", ("data", "model"))])
    (row,) = strategy.explain(built(mlp, strategy)).outputs
    assert (row.path, row.layout) == ("sequential/hidden", ("data", "model"))
    assert row.reason == "rule 0 'hidden/output'"


def test_before_build():
    strategy = ktd.TPUStrategy(MESH)
    explanation = strategy.explain(keras.Sequential([keras.layers.Dense(3)]))
    assert explanation.rows == ()
    assert "not built" in str(explanation)
