import json
import re

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
    assert hidden.alternatives == ("rule 1 'kernel' also matches, but comes later",)
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
    title, summary, *_ = text.splitlines()
    assert title == "sequential on 8 devices {'data': 4, 'model': 2}"
    assert summary == (
        "Weights 652 B, 460 B a device (float32); 1 of 4 split over model; batch over data"
    )
    assert "(None, 'model')" in text
    assert "output of sequential/hidden: ('data', 'model')  (split(output=...))" in text
    assert "largest replicated: sequential/out/kernel (192 B)" in text
    assert json.loads(json.dumps(explanation.to_dict()))["bytes"] == 652
    page = explanation._repr_html_()
    assert page.count("<tr>") == 5
    assert "1 of 4 split over model" in page
    assert "rule 0 &#x27;hidden/kernel&#x27;" in page


def decoder(blocks=32, width=4096, heads=32, hidden=11008, words=32000):
    """Llama 2 7B by its sizes, in plain Keras."""
    L = keras.layers

    class Decoder(L.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            parts = {n: L.Dense(width, use_bias=False, name=n) for n in ("query", "key", "value")}
            self.parts = list(parts.values())
            self.out = L.Dense(width, use_bias=False, name="out")
            self.norms = [L.RMSNormalization(name=name) for name in ("before", "after")]
            self.gate, self.up = (L.Dense(hidden, use_bias=False, name=n) for n in ("gate", "up"))
            self.down = L.Dense(width, use_bias=False, name="down")

        def build(self, shape):
            for layer in (*self.parts, self.out, *self.norms, self.gate, self.up):
                layer.build(shape)
            self.down.build((*shape[:-1], hidden))

        def call(self, x):
            h = self.norms[0](x)
            split = (-1, x.shape[1], heads, width // heads)
            q, k, v = (keras.ops.reshape(part(h), split) for part in self.parts)
            p = keras.ops.softmax(keras.ops.einsum("bqnh,bknh->bnqk", q, k))
            h = keras.ops.einsum("bnqk,bknh->bqnh", p, v)
            x = x + self.out(keras.ops.reshape(h, x.shape))
            h = self.norms[1](x)
            return x + self.down(keras.ops.silu(self.gate(h)) * self.up(h))

    x = ids = keras.Input((16,), dtype="int32", batch_size=2)
    x = L.Embedding(words, width, name="words")(x)
    for n in range(blocks):
        x = Decoder(f"decoder_{n}")(x)
    x = L.RMSNormalization(name="norm")(x)
    return keras.Model(ids, L.Dense(words, use_bias=False, name="logits")(x), name="llama")


def explained(build, mesh, layout="tensor_parallel"):
    """Of a model without values, as large as it may be."""
    with keras.StatelessScope(initialize_variables=False):
        model = build()
    return ktd.TPUStrategy(mesh, layout).explain(model)


@pytest.mark.parametrize("layout", ["tensor_parallel", "fsdp", "auto", None])
def test_a_decoder_of_seven_billion_is_forty_lines(layout):
    explanation = explained(decoder, {"data": 2, "model": 4}, layout)
    assert len(explanation.rows) == 291
    lines = str(explanation).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert sum("decoder_0 .. decoder_31  x 32, each" in line for line in lines) == 1
    assert not any("decoder_1/" in line for line in lines)
    assert lines[1].startswith("Weights 25.10 GiB, ")
    if layout == "tensor_parallel":
        assert "226 of 291 split over model; batch over data" in lines[1]
        assert "row: fed by 'gate'" in " ".join(str(explanation).split())
    # everything is still there
    assert len(explanation.to_dict()["rows"]) == 291
    assert len(explanation.table().splitlines()) >= 292
    assert all(row.path in explanation._repr_html_() for row in explanation.rows)


@pytest.mark.parametrize(
    ("layout", "slots"),
    [
        ("tensor_parallel", True),
        ("fsdp", False),
        *(
            pytest.param(layout, slots, marks=pytest.mark.slow)
            for layout, slots in [("tensor_parallel", False), ("fsdp", True), ("auto", True)]
        ),
    ],
)
def test_a_decoder_is_forty_lines_in_a_narrow_terminal_too(slots, layout, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    # for a slice that is not attached, variables have no values
    strategy = ktd.TPUStrategy({"data": 2, "model": 4}, layout, topology="v5e:2x4")
    with strategy.scope():
        model = decoder()
        model.compile("adam", "mse")
        if slots:
            model.optimizer.build(model.trainable_variables)
    lines = str(strategy.explain(model)).splitlines()
    assert ("optimizer" in lines[1]) == slots
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("decoder_0 .. ") and "x 32, each" in line for line in lines)


def test_weights_of_a_layer_that_are_equal_share_a_line():
    text = " ".join(str(explained(decoder, {"data": 2, "model": 4})).split())
    assert "{query, key, value}/kernel 3 x (4096, 4096) (None, 'model') 192.0 MiB 48.0 MiB" in text
    assert "{gate, up}/kernel 2 x (4096, 11008)" in text


def stages(blocks=(3, 4, 6, 3)):
    """A net of convolutions side by side, whose stages have other sizes."""
    L = keras.layers
    x = image = keras.Input((64, 64, 3))
    for stage, times in enumerate(blocks):
        for n in range(times):
            name, wide = f"stage{stage + 1}_block{n + 1}", 32 * 2**stage
            for k, (size, width) in enumerate(((1, wide), (3, wide), (1, 4 * wide))):
                strides = 2 if stage and not n and not k else 1
                x = L.Conv2D(width, size, strides, "same", name=f"{name}_{k}_conv")(x)
                x = L.BatchNormalization(name=f"{name}_{k}_bn")(x)
                x = L.Activation("relu")(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(image, L.Dense(10, name="classes")(x), name="stages")


@pytest.mark.parametrize("layout", ["tensor_parallel", "fsdp", None])
def test_layers_that_differ_have_lines_of_their_own(layout):
    explanation = explained(stages, {"data": 2, "model": 4}, layout)
    assert len(explanation.rows) == 290
    lines = str(explanation).splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert all(f"stage{stage}_block1_1_conv/" in text for stage in (1, 2, 3, 4))
    assert "all 290 weights: explain(model).table()" in lines
    if layout is None:
        assert "classes/kernel (1024, 10) replicated" in text
    if layout == "fsdp":
        assert "fsdp: not split: 32 elements are below min_size=4096" in text
        assert "output of 97 layers, stage1_block1_0_conv to classes: ('data',)" in text
    # nothing is lost: every weight is in a line, or in a block that is shown once
    assert len(explanation.table().splitlines()) >= 291
    times = 1
    found = 0
    for row in explanation._folded()[1]:
        if isinstance(row, str):
            times = int(re.search(r"  x (\d+)", row)[1])
            continue
        times = times if row[0].startswith(" ") else 1
        found += times * int(re.match(r"(?:(\d+) x )?", row[1])[1] or 1)
    assert found == 290


def test_blocks_that_differ_are_not_one():
    def build():
        x = inputs = keras.Input((64,))
        for n in range(8):
            x = keras.layers.Dense(64, name=f"block_{n}")(x)
        return keras.Model(inputs, x)

    layout = [("block_5/kernel", (None, "model")), ("kernel", ("model",))]
    text = str(explained(build, MESH, layout))
    assert "block_0 .. block_4  x 5" in text
    assert "block_5/kernel" in text
    assert "block_6/kernel" in text


def test_one_variable_with_the_alternatives():
    strategy = ktd.TPUStrategy({"data": 4}, "fsdp", devices=ktd.TPUStrategy().mesh.devices[:4])
    model = built(lambda: keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)]), strategy)
    row = strategy.explain(model, "…/kernel")
    assert row.axes == (None, "data")
    assert row.reason == "fsdp: dimension 1"
    assert "not: dimension 0 over 'data': not larger" in str(row)
    with pytest.raises(ValueError, match=r"explains one variable.*2 variables"):
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
    assert explanation.summary.endswith("1 invalid: see PROBLEM in the table")
    assert "PROBLEM" in str(row)


def test_an_output_that_a_rule_lays():
    strategy = ktd.TPUStrategy(MESH, [("hidden/output", ("data", "model"))])
    (row,) = strategy.explain(built(mlp, strategy)).outputs
    assert (row.path, row.layout) == ("sequential/hidden", ("data", "model"))
    assert row.reason == "rule 0 'hidden/output'"


def test_explain_before_the_model_is_built():
    strategy = ktd.TPUStrategy(MESH)
    explanation = strategy.explain(keras.Sequential([keras.layers.Dense(3)]))
    assert explanation.rows == ()
    assert "not built" in str(explanation)
