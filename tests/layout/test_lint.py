"""Every finding, its severity and its words."""

import logging

import keras
import numpy as np
import pytest
from helpers import built, mlp

import keras_tpu_dist as ktd
from keras_tpu_dist.layout import planner
from keras_tpu_dist.layout.annotations import replicate, split
from keras_tpu_dist.layout.rules import LayoutRules
from keras_tpu_dist.tools.shell.main import main

MESH = {"data": 4, "model": 2}


def strategy_of(layout, mesh=None):
    return ktd.TPUStrategy(mesh or MESH, layout)


def outside(layout, build=mlp, mesh=None):
    """A model built under no scope, so that a wrong rule does not raise before lint sees it."""
    return built(build, None), strategy_of(layout, mesh)


def finding(report, code):
    found = [f for f in report.findings if f.code == code]
    assert found, str(report)
    return found[0]


def layout_map(**entries):
    device_mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"))
    stock = keras.distribution.LayoutMap(device_mesh)
    for key, axes in entries.items():
        stock[key] = axes
    return stock


def test_dead_rule_names_the_nearest_real_path():
    model, strategy = outside([("hiden/kernel", (None, "model")), ("out/kernel", ("model",))])
    found = finding(strategy.lint(model), "dead-rule")
    assert (found.severity, found.path) == ("warning", "hiden/kernel")
    assert "matches no variable and no layer output" in found.words
    assert "'sequential/hidden/kernel'" in found.fix


def test_rules_for_outputs_are_not_dead():
    model, strategy = outside([("hidden/output", ("data", "model"))])
    assert not [f for f in strategy.lint(model).findings if f.code == "dead-rule"]


def test_dead_pattern_of_a_stock_layout_map_is_warned_once_by_fit(caplog):
    strategy = ktd.TPUStrategy(layout=layout_map(**{"hidden/kernel": (None, "model")}))
    model = built(mlp, strategy)
    with caplog.at_level(logging.WARNING, logger="keras_tpu_dist"):
        for _ in range(2):
            model.fit(np.ones((8, 6)), np.zeros(8), verbose=0)
    warnings = [r.getMessage() for r in caplog.records if "dead-rule" in r.getMessage()]
    assert len(warnings) == 1
    assert "hidden/kernel" in warnings[0]
    assert "The nearest path is 'sequential/hidden/kernel'" in warnings[0]
    assert "must match the whole path" in warnings[0]


def test_overlapping_rules():
    model, strategy = outside([("hidden/kernel", (None, "model")), ("kernel", ())])
    found = finding(strategy.lint(model), "overlap")
    assert found.severity == "info"
    assert "2 rules match: 'hidden/kernel', 'kernel'" in found.words
    model, strategy = outside(layout_map(**{".*kernel": (None, "model"), ".*hidden.*": ()}))
    found = finding(strategy.lint(model), "overlap")
    assert found.severity == "error"
    assert "Keras allows one" in found.fix


def test_illegal_layouts():
    rules = [("hidden/bias", (None, "model")), ("out/kernel", (None, "model"))]
    model, strategy = outside(rules)
    report = strategy.lint(model)
    long = finding(report, "too-long")
    assert long.severity == "error"
    assert "more entries than the variable has dimensions" in long.words
    assert "at most 1" in long.fix
    uneven = finding(report, "indivisible")
    assert (uneven.severity, uneven.path) == ("error", "sequential/out/kernel")
    assert "dimension 1 has 3 elements for 2 shards" in uneven.words
    assert "Make it 2 or 4" in uneven.fix
    split(model.layers[0], kernel=(None, "modle"))
    unknown = finding(strategy_of(None).lint(model), "unknown-axis")
    assert "may only use axes of the mesh" in unknown.words
    assert "Did you mean 'model'?" in unknown.fix


def test_a_weight_that_the_annotated_layer_does_not_have():
    layer = split(keras.layers.Dense(4), kernal=(None, "model"))
    model = keras.Sequential([keras.Input((4,)), layer])
    found = finding(strategy_of(None).lint(model), "unknown-weight")
    assert "split(kernal=...)" in found.words


def wide():
    return keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024, name="wide")])


def test_giants_left_whole(monkeypatch):
    model, strategy = outside([("bias", ("model",))], wide)
    found = finding(strategy.lint(model), "giant")
    assert (found.severity, found.path) == ("warning", model.layers[0].kernel.path)
    assert "Every device holds all of it (2.0 MiB), although dimension" in found.words
    assert f'Add the rule ("{found.path}"' in found.fix
    # Replication by choice is no mistake, and not worth a word while the state fits easily.
    assert not [f for f in strategy_of(None).lint(model).findings if f.code == "giant"]
    monkeypatch.setattr(planner, "_MEMORY_WHERE_UNKNOWN", 2**24)
    assert finding(strategy_of(None).lint(model), "giant").severity == "info"
    by_rule, chosen = outside([("bias", ("model",)), ("wide/kernel", ())], wide)
    assert not [f for f in chosen.lint(by_rule).findings if f.code == "giant"]
    replicate(model.layers[0])
    for layout in ([("out/bias", ("model",))], "fsdp"):
        codes = {f.code for f in strategy_of(layout).lint(model).findings}
        assert not codes & {"giant", "plan-falls-back"}, layout


def test_mesh_axis_that_nothing_uses():
    model, strategy = outside(None)
    found = finding(strategy.lint(model), "unused-axis")
    assert (found.severity, found.path) == ("warning", "model")
    assert "2 devices do the same work" in found.words


def test_an_axis_that_is_named_almost_as_usual():
    mesh = {"data": 2, "modle": 4}
    model, strategy = outside(None, mesh=mesh)
    assert finding(strategy.lint(model), "unused-axis").fix.startswith("Did you mean 'model'?")


def test_an_axis_that_splits_an_output_is_used():
    def annotated():
        model = mlp()
        split(model.layers[0], output=[("data", "model")])
        return model

    def divided():
        x = keras.Input((8, 6))
        return keras.Model(x, strategy_of(None).split_to_logical_devices(x, [1, 2, 1]))

    for layout, build in (
        ([("hidden/output", ("data", "model"))], mlp),
        (layout_map(**{".*hidden/output": ("data", "model")}), mlp),
        (None, annotated),
        (None, divided),
    ):
        model, strategy = outside(layout, build)
        assert not [f for f in strategy.lint(model).findings if f.code == "unused-axis"], build


def test_an_output_over_an_axis_that_the_mesh_lacks():
    model = built(mlp, strategy := strategy_of(None))
    split(model.layers[0], output=("data", "modle"))
    found = finding(strategy.lint(model), "unknown-axis")
    assert found.path == "sequential/hidden/output"
    assert "Did you mean 'model'?" in found.fix
    with pytest.raises(ValueError, match=r"axes of the mesh.*hidden/output.*Did you mean 'model'"):
        model.fit(np.ones((8, 6)), np.zeros(8), verbose=0)


def test_batch_against_the_data_axes():
    model, strategy = outside("fsdp", mesh={"data": 8})
    small = finding(strategy.lint(model, batch_size=5), "small-batch")
    assert small.severity == "warning"
    assert "5 rows for 8 shards: 3 shards have no row" in small.words
    assert not [f for f in strategy.lint(model, batch_size=18).findings if "batch" in f.code]


def test_built_outside_the_scope():
    model, strategy = outside(None)
    found = finding(strategy.lint(model), "outside-scope")
    assert "not on the mesh {'data': 4, 'model': 2}" in found.words
    assert "inside strategy.scope()" in found.fix
    inside = built(mlp, strategy)
    assert not [f for f in strategy.lint(inside).findings if f.code == "outside-scope"]


def test_not_built():
    model = keras.Sequential([keras.layers.Dense(3)])
    assert "no variables yet" in finding(strategy_of(None).lint(model), "not-built").words


def test_strict_raises_and_a_clean_model_is_clean():
    rules = LayoutRules([("hidden/kernel", (None, "model"))])
    strategy = strategy_of(rules)
    model = built(mlp, strategy)
    report = strategy.lint(model, batch_size=32, strict=True)
    assert report.ok
    assert str(report) == "sequential: no findings"
    with pytest.raises(ValueError, match=r"(?s)no errors and no warnings.*small-batch"):
        strategy.lint(model, batch_size=1, strict=True)


PROGRAM = """
import keras, keras_tpu_dist as ktd
def good():
    strategy = ktd.TPUStrategy({"data": 8})
    with strategy.scope():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), strategy
def alone():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
def bad():
    strategy = ktd.TPUStrategy({"data": 8}, [("dens/kernel", ("data",))])
    with strategy.scope():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), strategy
def swapped():
    return good()[::-1]
def nothing():
    return None
NUMBER = 3
"""


def test_shell_command(tmp_path, capsys):
    """What a command is given: here `explain`, which takes what all take."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    assert main(["explain", f"{file}:good"]) == 0
    assert "kernel" in capsys.readouterr().out
    assert main(["explain", f"{file}:alone", "--mesh", "data=8", "--layout", "fsdp"]) == 0
    wrong = {
        "nothing": "module:function or FILE.py:function",
        "nowhere.py:good": "an existing Python file. Received: file='nowhere.py'",
        f"{file}:god": "Did you mean 'good'?",
        f"{file}:alone": "which returned='Sequential'. Add --mesh",
        f"{file}:swapped": "must return a model, or (model, strategy)",
        f"{file}:NUMBER": "has no function 'NUMBER'",
        ".program:good": "module:function or FILE.py:function",
    }
    for target, words in wrong.items():
        assert main(["explain", target]) == 2
        assert words in capsys.readouterr().err
    assert main(["explain", f"{file}:nothing", "--mesh", "data=8"]) == 2
    assert "must return a model, or (model, strategy)" in capsys.readouterr().err


def with_lora(frozen):
    """An MLP whose hidden layer gets LoRA after `frozen` froze it."""
    strategy = strategy_of("auto")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, name="hidden"), keras.layers.Dense(1)]
        )
        frozen(model)
        model.get_layer("hidden").enable_lora(2)
        model.compile("sgd", "mse")
    return model, strategy


@pytest.mark.parametrize(
    "frozen",
    [
        lambda model: ktd.freeze(model, "hidden"),
        lambda model: setattr(model.get_layer("hidden"), "trainable", False),
    ],
    ids=["freeze", "trainable"],
)
def test_factors_that_do_not_train_are_warned_by_fit(frozen, caplog):
    model, strategy = with_lora(frozen)
    found = finding(strategy.lint(model), "frozen-factors")
    assert found.path == model.get_layer("hidden").path
    assert "LoRA is enabled in 1 layer(s), and none of its factors trains" in found.words
    model.fit(np.ones((8, 6)), np.zeros(8), verbose=0)
    assert caplog.text.count("none of its factors trains") == 1
    # The fix that it names.
    model.get_layer("hidden").trainable = True
    ktd.freeze(model, "*", exclude="*lora*")
    assert [v.name for v in model.trainable_variables] == ["lora_kernel_a", "lora_kernel_b"]
    assert "frozen-factors" not in {f.code for f in strategy.lint(model).findings}


def test_factors_are_looked_at_when_they_should_train_and_not_before(caplog):
    """A model that only predicts may be frozen, and one that has predicted may be trained."""
    x = np.ones((13, 6), "float32")
    strategy = strategy_of("auto")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, name="hidden"), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", steps_per_execution=4)
        model.predict(x, verbose=0)
        model.get_layer("hidden").trainable = False
        model.get_layer("hidden").enable_lora(2)
        model.compile("sgd", "mse", steps_per_execution=4)
        model.predict(x, verbose=0)
        model.evaluate(x, np.zeros(13), verbose=0)
        assert "none of its factors trains" not in caplog.text
        model.fit(x, np.zeros(13), epochs=2, verbose=0)
    assert caplog.text.count("none of its factors trains") == 1


def test_factors_that_train_are_no_finding():
    model, strategy = with_lora(lambda model: None)
    assert "frozen-factors" not in {f.code for f in strategy.lint(model).findings}
