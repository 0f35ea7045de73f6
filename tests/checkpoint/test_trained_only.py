"""`only="trained"`: checkpoints leave out what is frozen, and give back the whole model."""

import collections
import json
import pathlib

import keras
import numpy as np
import pytest
from helpers import loaded

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.contents import contents
from keras_tpu_dist.checkpoint.trained import frozen_weights
from keras_tpu_dist.common import once

L = keras.layers
histories = loaded(pathlib.Path(__file__).with_name("trained_histories.py"), "trained_histories")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(26, 8)).astype("float32")
Y = X[:, :2]
ONE = {"data": 4, "model": 2}, "tensor_parallel"
OTHER = {"data": 2, "fsdp": 2, "model": 2}, "fsdp"
KERNEL = 8 * 64 * 4


@pytest.fixture(autouse=True)
def _each_is_said():
    once.forget()


def built(where=ONE, seed=0, lora=True, freeze=()):
    with ktd.TPUStrategy(*where).scope():
        keras.utils.set_random_seed(seed)
        layers = [
            L.Dense(64, name="base"),
            L.BatchNormalization(name="mean"),
            L.Dropout(0.2, seed=1, name="drop"),
            L.Dense(2, name="head"),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers], name="m")
        if lora:
            model.get_layer("base").enable_lora(2)
        if freeze:
            ktd.freeze(model, freeze)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def fit(model, directory, epochs, **options):
    saved = []
    if directory is not None:
        saved = [ktd.callbacks.Checkpoint(directory, **{"only": "trained"} | options)]
    how = {"batch_size": 13, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, epochs=epochs, callbacks=saved, **how)


def save(model, directory, step, *others, only="trained"):
    with ktd.LoopCheckpoint(directory, model, *others, only=only) as saved:
        saved.save(step)


def values_of(model):
    return [np.array(v) for v in (*model.variables, *model.optimizer.variables)]


def manifest(directory, step):
    return json.loads((pathlib.Path(directory) / str(step) / "manifest/metadata").read_text())


def left_out(directory, step):
    rows = manifest(directory, step)["arrays"]["weights"]
    return [row["path"].removeprefix("m/") for row in rows if row.get("left_out")]


def equal(one, other):
    return all(map(np.array_equal, one, other))


def test_what_counts_as_frozen():
    class Counter(L.Layer):
        def build(self, shape):
            self.count = self.add_weight(name="count", initializer="zeros", trainable=False)
            self.scale = self.add_weight(name="scale", initializer="ones")

        def call(self, x):
            return x * self.scale

    made = [L.Dense(4, name=name) for name in ("frozen", "part", "lora", "int8")]
    made += [L.BatchNormalization(name=name) for name in ("mean", "frozen_mean")]
    made += [Counter(name=name) for name in ("counter", "frozen_counter")]
    layers = {layer.name: layer for layer in [*made, L.Dropout(0.1, name="drop")]}
    model = keras.Sequential([keras.Input((4,)), *layers.values()])
    layers["lora"].enable_lora(2)
    layers["int8"].quantize("int8")
    ktd.freeze(model, "part/bias")
    for name in ("frozen", "frozen_mean", "frozen_counter"):
        layers[name].trainable = False
    named = {}
    for name, layer in layers.items():
        own = {id(v) for v in layer.variables}
        named[name] = {v.name for v in frozen_weights([model]) if id(v) in own}
    assert named == {
        "frozen": {"kernel", "bias"},
        "part": {"bias"},
        "lora": {"kernel"},
        "int8": {"kernel", "kernel_scale"},
        "mean": set(),
        "frozen_mean": {"gamma", "beta", "moving_mean", "moving_variance"},
        "counter": set(),
        # It counts also if it is frozen.
        "frozen_counter": {"scale"},
        "drop": set(),
    }


def test_a_run_goes_on_exactly_on_another_mesh(tmp_path, caplog):
    whole = built()
    history = fit(whole, None, 3).history["loss"]
    fit(built(), tmp_path, 1)
    assert left_out(tmp_path, 2) == ["base/kernel"]
    assert "leave out 1 weight of 2.0 KiB" in caplog.text
    # Programs from before refuse it; one that has all is as before.
    assert manifest(tmp_path, 2)["version"] == 3
    resumed = built(OTHER)
    assert np.allclose(fit(resumed, tmp_path, 3).history["loss"], history, atol=1e-6)
    for one, other in zip(values_of(whole), values_of(resumed), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    [*_, row] = contents(tmp_path).rows
    assert row.left_out == KERNEL
    # A slot for each weight that trains, and the count and rate of the optimizer.
    trained = sum(v.value.nbytes for v in whole.trainable_variables)
    state = sum(v.value.nbytes for v in whole.non_trainable_variables) - KERNEL
    assert row.bytes == 2 * trained + state + 8
    # A narrow terminal wraps the cells.
    assert {"left", "base"} <= set(str(contents(tmp_path)).split())
    report = ktd.restore(built(OTHER), tmp_path)
    assert report.base == ("m/base/kernel",)
    assert "left out, and equal to the base: 1 variables" in str(report)


def test_another_base_is_one_error_and_base_loads_the_right_one(tmp_path):
    first = built()
    first.save_weights(tmp_path / "base.weights.h5")
    fit(first, tmp_path / "run", 1, base="the/first")
    expected = values_of(first)
    model = built(OTHER, seed=1)
    before = values_of(model)
    with pytest.raises(ValueError, match=r"2 of .*leaves out 1 weight of a frozen base") as error:
        ktd.restore(model, tmp_path / "run")
    words = str(error.value)
    assert "of a run with base='the/first'" in words
    assert "other values of 1: 'm/base/kernel'" in words
    assert "Load that base into the model before, or name it with base=" in words
    with pytest.raises(ValueError, match="leaves out 1 weight"):
        fit(model, tmp_path / "run", 2)
    assert equal(values_of(model)[: len(model.variables)], before[: len(model.variables)])
    save(built(seed=2, lora=False), tmp_path / "other", 2, only=None)
    with pytest.raises(ValueError, match=r"after base=.* was loaded, other values of 1"):
        ktd.restore(model, tmp_path / "run", base=tmp_path / "other")
    report = ktd.restore(model, tmp_path / "run", base=tmp_path / "base.weights.h5")
    assert report.optimizer
    assert equal(values_of(model), expected)


def test_a_step_of_another_directory_is_a_base(tmp_path):
    first = built(lora=False, freeze="*")
    with ktd.LoopCheckpoint(tmp_path / "before", first) as saved:
        saved.save(1)
        first.get_layer("base").kernel.assign(np.zeros((8, 64)))
        saved.save(2)
    run = built()
    save(run, tmp_path / "run", 7)
    model = built(OTHER, seed=1)
    with pytest.raises(ValueError, match="after base="):
        ktd.restore(model, tmp_path / "run", base=tmp_path / "before")
    ktd.restore(model, tmp_path / "run", base=tmp_path / "before/1")
    variables = len(model.variables)
    assert equal(values_of(run)[:variables], values_of(model)[:variables])
    with pytest.raises(ktd.CheckpointError, match="There is no checkpoint 9"):
        ktd.restore(built(OTHER, seed=1), tmp_path / "run", base=tmp_path / "before", step=9)


def test_a_frozen_weight_that_changes_is_saved(tmp_path, caplog):
    model = built()
    with ktd.LoopCheckpoint(tmp_path, model, only="trained", base="x.keras") as saved:
        saved.save(1)
        assert "leave out" not in caplog.text
        kernel = model.get_layer("base")._kernel
        value = np.array(kernel)
        value[0, 0] = np.nextafter(value[0, 0], 9)  # a step of yours may average a teacher
        kernel.assign(value)
        saved.save(2)
    assert left_out(tmp_path, 1) == ["base/kernel"]
    assert left_out(tmp_path, 2) == []
    assert "changed in this run, although they do not train" in caplog.text
    other = built(OTHER)
    ktd.restore(other, tmp_path)
    assert np.array_equal(other.get_layer("base")._kernel, kernel)


def test_what_trained_before_it_was_frozen_is_saved(tmp_path, caplog):
    model = built(lora=False, freeze="base/kernel")
    fit(model, tmp_path, 1)
    ktd.freeze(model, "head/*")
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    fit(model, tmp_path, 2)
    # The kernel trains now; the head does not, and the base does not have it.
    assert left_out(tmp_path, 2) == ["base/kernel"]
    assert left_out(tmp_path, 4) == []
    assert "2 weights of 520 B (m/head/kernel, m/head/bias) do not train now" in caplog.text
    again = built(OTHER, lora=False, freeze="head/*")
    ktd.restore(again, tmp_path)
    assert equal(values_of(model), values_of(again))


def test_a_run_that_began_with_all_goes_on_with_all(tmp_path, caplog):
    save(built(), tmp_path, 2, only=None)
    assert manifest(tmp_path, 2)["version"] == 2
    with ktd.LoopCheckpoint(tmp_path, built(), only="trained") as saved:
        saved.restore()
        saved.save(4)
    assert left_out(tmp_path, 4) == []
    assert "the run's base does not have them" in caplog.text
    assert "begin a run in another directory" in caplog.text


def test_two_rhythms(tmp_path):
    def both(**options):
        often = ktd.callbacks.Checkpoint(tmp_path / "often", only="trained", **options)
        seldom = ktd.callbacks.Checkpoint(tmp_path / "seldom")
        return [often, seldom]

    how = {"batch_size": 13, "shuffle": False, "verbose": 0}
    built().fit(X, Y, callbacks=both(), **how)
    # The newest is the one with all.
    model = built(OTHER)
    model.fit(X, Y, epochs=2, callbacks=both(), **how)
    assert left_out(tmp_path / "often", 4) == ["base/kernel"]
    assert left_out(tmp_path / "seldom", 4) == []


def test_wrong_options_are_one_error():
    with pytest.raises(ValueError, match=r"Did you mean 'trained'\?"):
        ktd.callbacks.Checkpoint("run", only="trainde")
    with pytest.raises(ValueError, match=r'Write only="trained", too, or leave base out'):
        ktd.callbacks.Checkpoint("run", base="base.keras")
    with pytest.raises(ValueError, match=r'Write only="trained", too'):
        ktd.LoopCheckpoint("run", built(), base="base.keras")
    with pytest.raises(ValueError, match="base of restore is a path"):
        ktd.restore(built(), "run", base=3)


def test_a_base_that_is_nothing_is_one_error(tmp_path):
    save(built(), tmp_path / "run", 1)
    with pytest.raises(ValueError, match="backbones of KerasHub in the model=0"):
        ktd.restore(built(seed=1), tmp_path / "run", base=tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"must be there.*There is no checkpoint in '.*empty'"):
        ktd.restore(built(seed=1), tmp_path / "run", base=tmp_path / "empty")
    with pytest.raises(ValueError, match=r"must be there.*'.*no\.keras' cannot be read"):
        ktd.restore(built(seed=1), tmp_path / "run", base=tmp_path / "no.keras")


def test_a_stranger_cannot_leave_out_slots(tmp_path):
    from keras_tpu_dist.checkpoint.manifest import _crc32

    model = built()
    model.optimizer.build(model.trainable_variables)
    save(model, tmp_path, 2, model.optimizer)
    path = tmp_path / "2/manifest/metadata"
    data = json.loads(path.read_text())
    data["arrays"]["slots"][0]["left_out"] = True
    del data["crc32"]
    path.write_text(json.dumps({"crc32": _crc32(data), **data}))
    with pytest.raises(ktd.CheckpointError, match="left_out of 'slots'"):
        ktd.restore(model, tmp_path)


@pytest.mark.parametrize(
    "seed",
    [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(100, 200))],
)
def test_random_histories_equal_an_uninterrupted_run(seed):
    counts = collections.Counter()
    assert histories.history(seed, counts, 6 if seed == 1 else histories.EVENTS) == ""
    assert sum(counts.values()) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_fits_equal_an_uninterrupted_run(seed, tmp_path):
    """Epochs in several programs, on other meshes, with what trains changed between them."""
    rng = np.random.default_rng(seed)
    phases = [[], "base/kernel", ["base/*", "mean/*"], "head/bias"]
    frozen = [phases[i] for i in rng.integers(0, len(phases), 4)]

    def go(directory, stops):
        model = built(lora=False)
        for epoch, patterns in enumerate(frozen):
            if stops:
                model = built(ONE if rng.random() < 0.5 else OTHER, lora=False)
            ktd.freeze(model, patterns)
            # What the user compiles anew has a new optimizer, unless the same weights train.
            model.compile(keras.optimizers.SGD(0.01), "mse")
            saved = []
            if stops:
                saved = [ktd.callbacks.Checkpoint(directory, only="trained", keep=1)]
            how = {"initial_epoch": 0 if stops else epoch, "shuffle": False, "verbose": 0}
            model.fit(X, Y, batch_size=13, epochs=epoch + 1, callbacks=saved, **how)
        return model

    whole, resumed = go(None, False), go(tmp_path, True)
    for one, other in zip(whole.variables, resumed.variables, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5, err_msg=one.path)


@pytest.mark.slow
def test_int8_with_lora(tmp_path):
    def quantized(where):
        model = built(where, lora=False)
        with ktd.TPUStrategy(*where).scope():
            layer = model.get_layer("base")
            layer.quantize("int8")
            layer.enable_lora(2)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    first = quantized(ONE)
    fit(first, tmp_path, 1)
    assert left_out(tmp_path, 2) == ["base/kernel", "base/kernel_scale"]
    resumed = quantized(OTHER)
    ktd.restore(resumed, tmp_path)
    assert equal(values_of(first), values_of(resumed))


def bert(hub, seed, lora=True):
    keras.utils.set_random_seed(seed)
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}
    backbone = hub.models.BertBackbone(vocabulary_size=32, max_sequence_length=8, **sizes)
    if lora:
        backbone.enable_lora(2)
    return backbone


@pytest.mark.slow
@pytest.mark.parametrize("shards", [None, 0.000002])
def test_a_preset_is_a_base(shards, tmp_path):
    hub = pytest.importorskip("keras_hub", reason="there is no KerasHub here")
    bert(hub, 0, lora=False).save_to_preset(tmp_path / "preset", max_shard_size=shards)
    first = bert(hub, 0)
    with ktd.LoopCheckpoint(tmp_path / "run", first, only="trained") as saved:
        for v in first.trainable_variables:
            v.assign(np.array(v) + 1)
        saved.save(1)
    strategy = ktd.TPUStrategy(*OTHER)
    with strategy.scope():
        other = bert(hub, 1)
    with pytest.raises(ValueError, match="weights of a frozen base"):
        ktd.restore(other, tmp_path / "run")
    ktd.restore(other, tmp_path / "run", base=tmp_path / "preset")
    pairs = zip(first.variables, other.variables, strict=True)
    assert all(np.array_equal(one, two) for one, two in pairs)
    (tmp_path / "preset" / ("model.weights.json" if shards else "model.weights.h5")).unlink()
    with strategy.scope():
        other = bert(hub, 1)
    with pytest.raises(ValueError, match="A preset as the base has weights in Keras's format"):
        ktd.restore(other, tmp_path / "run", base=tmp_path / "preset")


def factors_of(model):
    return [v for v in model.trainable_variables if v.name.startswith("lora_kernel_")]


@pytest.mark.slow
def test_a_file_of_lora_weights(tmp_path):
    hub = pytest.importorskip("keras_hub", reason="there is no KerasHub here")
    first, path = bert(hub, 0), tmp_path / "one.lora.h5"
    # KerasHub saves the factors, and not the biases that train beside them.
    for i, v in enumerate(factors_of(first)):
        v.assign(np.full(v.shape, i + 1))
    first.save_lora_weights(path)
    with ktd.TPUStrategy(*OTHER).scope():
        other = bert(hub, 0)
    report = ktd.restore(other, path)
    assert set(report.loaded) == {v.path for v in factors_of(other)}
    pairs = zip(first.variables, other.variables, strict=True)
    assert all(np.array_equal(one, two) for one, two in pairs)
    plain = bert(hub, 0, lora=False)
    with pytest.raises(ValueError, match=r"2 layers .* in the file, 0 layers in the model"):
        ktd.restore(plain, path)
    with pytest.raises(ValueError, match="Leave them out"):
        ktd.restore(other, path, step=1)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ktd.CheckpointError, match="cannot be read"):
        ktd.restore(other, path)
