"""A strategy's own dry runs: on other slices, of models that live and train on its mesh."""

import dataclasses
import inspect
import json

import keras
import numpy as np
import pytest
from compile_only import lower
from helpers import assert_close, compiled, data, mlp

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.lint import Finding
from keras_tpu_dist.tools.dryrun import run as dryrun
from keras_tpu_dist.training.options import Options


@pytest.fixture
def no_libtpu(monkeypatch):
    monkeypatch.setattr(dryrun, "has_libtpu", lambda: False)


def _axes(strategy):
    return dict(strategy.mesh.shape)


def test_the_first_data_axis_fills_the_slice():
    here = ktd.TPUStrategy({"data": 4, "model": 2})
    assert _axes(here.on_topology("v5e:16x16")) == {"data": 128, "model": 2}
    assert _axes(here.on_topology("v5e:2x2")) == {"data": 2, "model": 2}
    assert _axes(here.on_topology("v5e:4x4", {"data": -1, "model": 4})) == {"data": 4, "model": 4}
    assert _axes(here.on_topology("v5e:4x4", {"x": 16})) == {"x": 16}
    fsdp = ktd.TPUStrategy({"data": 2, "fsdp": 4}, "fsdp")
    assert _axes(fsdp.on_topology("v5p:2x2x4")) == {"data": 4, "fsdp": 4}
    assert _axes(ktd.TPUStrategy().on_topology("2*v5e:4x4")) == {"data": 32}
    assigned = ktd.TPUStrategy(ktd.DeviceAssignment.build(computation_shape=(4,)))
    there = assigned.on_topology("v5e:4x4")
    assert (there.num_replicas_in_sync, there.num_logical_devices) == (4, 4)
    again = here.on_topology("v5e:16x16").on_topology("v5e:2x4")
    assert _axes(again) == {"data": 4, "model": 2}
    assert again.topology.name == "v5e:2x4"


def test_options_go_along():
    here = ktd.TPUStrategy(
        {"rows": 4, "model": 2},
        [("kernel", (None, "model"))],
        data_axes="rows",
        batch_axis=(1, 0),
        shard_optimizer=True,
        donate_state=True,
        prefetch=5,
    )
    there = here.on_topology("v5e:4x4")
    assert _axes(there) == {"rows": 8, "model": 2}
    assert there.data_axes == ("rows",)
    assert there.placer.batch_axis == here.placer.batch_axis
    assert there.layouts.shard_optimizer is True
    assert (there.options.donate_state, there.runner.prefetch) == (True, 5)
    taken = inspect.signature(ktd.TPUStrategy).parameters.values()
    defaults = {each.name: each.default for each in taken}
    beside = {"mesh", "layout", "devices", "topology"}
    assert Options().as_arguments() == {n: v for n, v in defaults.items() if n not in beside}
    # what depends on the devices is chosen anew
    assert ktd.TPUStrategy().runner.prefetch == 0
    assert ktd.TPUStrategy().on_topology("v5e:4x4").runner.prefetch == 2


def test_what_does_not_fit_a_slice_is_said():
    here = ktd.TPUStrategy({"data": 1, "model": 8})
    with pytest.raises(
        ValueError, match=r"the devices that the other axes leave.*4 devices of v5e:2x2.*mesh="
    ):
        here.on_topology("v5e:2x2")
    with pytest.raises(ValueError, match=r"data axes \(\)"):
        ktd.TPUStrategy({"model": 8}, data_axes=()).on_topology("v5e:4x4")
    with pytest.raises(ValueError, match=r"TPU slice that exists"):
        here.dry_run(mlp, batch_size=8, topology="v5e:5x5")
    with pytest.raises(ValueError, match=r"axis sizes on another slice.*Name the slice"):
        here.dry_run(mlp, batch_size=8, mesh={"data": 8})
    with pytest.raises(ValueError, match=r"multiply to 3, on 16"):
        here.dry_run(mlp, batch_size=8, topology="v5e:4x4", mesh={"data": 3})


def _layout_map():
    mesh = keras.distribution.DeviceMesh(
        (4, 2), ("data", "model"), keras.distribution.list_devices()
    )
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*hidden.*kernel"] = (None, "model")
    return layouts


def _model():
    hidden = keras.layers.Dense(32, activation="relu", name="hidden")
    layers = [keras.Input((16,)), hidden, keras.layers.Dense(4, name="out")]
    return compiled(keras.Sequential(layers), "adam", "mse")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [[("hidden/kernel", (None, "model"))], "tensor_parallel", _layout_map, None]
)
def test_a_model_that_trains_here_is_lowered_for_there(layout):
    layout = layout() if callable(layout) else layout
    here = ktd.TPUStrategy({"data": 4, "model": 2}, layout)
    x, y = np.ones((8, 16), "float32"), np.ones((8, 4), "float32")

    def trained(between):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with here.scope():
            model = _model()
            if layout is None:
                ktd.split(model.layers[0], kernel=(None, "model"))
        model.fit(x, y, verbose=0)
        between(model)
        model.fit(x, y, verbose=0)
        return model.get_weights()

    lowered = []

    def dry(model):
        there = here.on_topology("v5e:4x4")
        lowered.append(lower(model, there, batch_size=16, platform="cpu"))
        kernel = model.layers[0].kernel
        assert kernel.value.sharding.mesh == here.mesh
        with there.scope():
            lowered.append(
                lower(_model if layout is not None else _annotated, there, batch_size=16)
            )

    assert_close(trained(dry), trained(lambda model: None), 0)
    of_model, of_build = lowered
    assert dict(of_model.axes) == {"data": 8, "model": 2}
    assert of_model.state == of_build.state
    # the hidden kernel and what goes with it is halved
    assert of_model.state.weights < 4 * (16 * 32 + 32 + 32 * 4 + 4)


def _annotated():
    model = _model()
    ktd.split(model.layers[0], kernel=(None, "model"))
    return model


@pytest.mark.slow
def test_a_dry_run_of_a_model_that_is_here(no_libtpu):
    x, y = data(40)
    here = ktd.TPUStrategy()
    with here.scope():
        model = mlp()
    model.fit(x, y, batch_size=16, verbose=0)
    weights = model.get_weights()
    run = here.dry_run(model, batch_size=4096, topology="v5e:4x4")
    assert (run.mesh, run.batch_size) == ((("data", 16),), 4096)
    assert run.parameters == model.count_params()
    assert {c.axes for c in run.cost.collectives} == {("data",)}
    assert_close(model.get_weights(), weights, 0)
    # on its own mesh, which is no slice: the CPU partitioner, and no limit
    own = here.dry_run(model, batch_size=16)
    assert (own.mesh, own.compiled_for, own.fits) == ((("data", 8),), "CPU", None)
    model.fit(x, y, batch_size=16, verbose=0)


@pytest.mark.slow
def test_mistakes_in_the_layouts_are_in_the_report(no_libtpu):
    rules = [("hiden/kernel", (None, "model"))]
    run = ktd.TPUStrategy({"data": 4, "model": 2}, rules).dry_run(
        _model, batch_size=10, topology="v5e:2x4"
    )
    codes = [f.code for f in run.findings]
    assert codes == ["dead-rule", "unused-axis"]
    text = str(run)
    assert "lint: warning: hiden/kernel: This rule matches no variable" in text
    assert "The nearest path is 'hidden/kernel'" in text or "hidden/kernel" in text
    assert "lint: warning: hiden/kernel" in run._repr_html_()
    assert json.loads(run.to_json())["findings"][0]["code"] == "dead-rule"
    clean = lower(_model, ktd.TPUStrategy(topology="v5e:2x4"), batch_size=16)
    assert clean.findings == ()

    def lines(*severities):
        found = tuple(Finding(s, "code", f"path{i}", "Words.", "Fix.") for i, s in severities)
        text = str(dataclasses.replace(run, findings=found))
        return [line for line in text.splitlines() if line.startswith("lint: ")]

    # only the first doubts are shown, but every mistake
    infos = lines(*((i, "info") for i in range(5)))
    assert len(infos) == 4
    assert infos[-1] == "lint: 2 more; see strategy.lint(model)"
    mixed = lines(*((i, "warning") for i in range(5)), (5, "info"))
    assert len(mixed) == 6
    assert mixed[-1] == "lint: 1 more; see strategy.lint(model)"
