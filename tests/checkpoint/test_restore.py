"""Checkpoints load right on any mesh, or raise; nothing is ever loaded in silence or in part."""

import importlib
import pathlib

import keras
import numpy as np
import pytest
from checkpoint_models import PLACES, X, Y, functional, made, mlp, nested, numbers, subclassed
from helpers import assert_close, python

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint import fingerprint
from keras_tpu_dist.checkpoint.reader import CheckpointReader
from keras_tpu_dist.checkpoint.store import Store

slow = pytest.mark.slow


def trained(place, directory, build=mlp, **options):
    model = made(place, build, **options)
    saved = ktd.callbacks.Checkpoint(directory, every_epochs=1)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[saved])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("source", PLACES)
def test_what_one_mesh_wrote_every_other_reads(source, tmp_path):
    one = trained(source, tmp_path)
    for target in PLACES:
        other = made(target)
        before = {v.path: v.value.sharding for v in other.weights}
        report = ktd.restore(other, tmp_path)
        assert report.optimizer
        assert report.step == 8
        assert_close(numbers(other), numbers(one))
        assert {v.path: v.value.sharding for v in other.weights} == before


# Bytes of the arrays that go through the memory of the host: all of them, some, and none.
@pytest.mark.parametrize(
    "small", [2**16, pytest.param(64, marks=slow), pytest.param(-1, marks=slow)]
)
def test_one_mesh_wrote_another_reads(small, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_SMALL_BYTES", small)
    one = trained("tensor", tmp_path)
    other = made("fsdp")
    report = ktd.restore(other, tmp_path)
    assert (report.optimizer, report.step) == (True, 8)
    assert_close(numbers(other), numbers(one))


@pytest.mark.slow
@pytest.mark.parametrize("build", [mlp, functional, subclassed, nested])
def test_models_made_twice_in_one_process_load_right(build, tmp_path):
    one = trained("tensor", tmp_path, build)
    again = made("data", build)
    report = ktd.restore(again, tmp_path)
    assert len(report.loaded) == len(again.variables)
    assert_close(again.predict(X, verbose=0), one.predict(X, verbose=0))


def alike(frozen=None):
    """Layers of which three have names that Keras numbers."""
    names = ("first", None, None, None)
    layers = [keras.layers.Dense(16, name=name) for name in names]
    model = keras.Sequential([keras.Input((16,)), *layers])
    for number, layer in enumerate(layers):
        layer.trainable = number != frozen
    return model


def two_of_one_name(frozen=None):
    """Two models with a layer of one name, whose weights have the same paths, in a third."""

    def part(name):
        inputs = keras.Input((16,))
        return keras.Model(inputs, keras.layers.Dense(16, name="out")(inputs), name=name)

    inputs = keras.Input((16,))
    encoder, decoder = part("encoder"), part("decoder")
    model = keras.Model(inputs, decoder(encoder(inputs)))
    for each in (encoder, decoder):
        each.trainable = each.name != frozen
    return model


@pytest.mark.parametrize(
    ("build", "source", "target"),
    [
        (alike, None, 1),
        pytest.param(alike, 1, None, marks=slow),
        pytest.param(alike, 1, 2, marks=slow),
        (two_of_one_name, None, "encoder"),
        (two_of_one_name, "encoder", "encoder"),
        pytest.param(two_of_one_name, "encoder", None, marks=slow),
        pytest.param(two_of_one_name, "encoder", "decoder", marks=slow),
        pytest.param(two_of_one_name, "decoder", None, marks=slow),
    ],
)
def test_weights_of_one_name_are_told_apart_whichever_train(build, source, target, tmp_path):
    one, again = (made("data", lambda which=which: build(which)) for which in (source, target))
    one.fit(X, X, epochs=1, verbose=0, callbacks=[ktd.callbacks.Checkpoint(tmp_path)])
    report = ktd.restore(again, tmp_path)
    assert_close(again.get_weights(), one.get_weights())
    assert report.optimizer
    numbers = {id(v): i for model in (one, again) for i, v in enumerate(model.weights)}
    slots = {(n, numbers[id(w)]): slot for n, slot, w in _keras.optimizer_slots(one)}
    # Moments that were saved are loaded; a weight that was frozen begins with none.
    for name, slot, weight in _keras.optimizer_slots(again):
        saved = slots.get((name, numbers[id(weight)]))
        assert_close(slot.numpy(), np.zeros(slot.shape) if saved is None else saved.numpy())


def test_a_checkpoint_of_another_model_is_one_error(tmp_path):
    trained("data", tmp_path)
    wider = made("data", lambda: mlp(classes=9))
    before = wider.get_weights()
    with pytest.raises(
        ValueError, match=r"must have exactly the weights of this model.*of another shape"
    ) as e:
        ktd.restore(wider, tmp_path)
    assert "(32, 9), saved as (32, 8)" in str(e.value)
    assert "strict=False" in str(e.value)
    named = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, name="heat")])
    with pytest.raises(ValueError, match=r"missing '\S*heat/kernel' Did you mean '\S*head/kernel'"):
        ktd.restore(named, tmp_path)
    assert_close(wider.get_weights(), before)


@pytest.mark.slow
def test_fine_tuning_leaves_the_head(tmp_path):
    one = trained("fsdp", tmp_path)
    other = made("tensor", lambda: mlp(classes=3), compiled=False)
    head = other.layers[-1].get_weights()
    report = ktd.restore(other, tmp_path, exclude=["*/head/*"])
    assert not report.optimizer
    assert_close(other.layers[-1].get_weights(), head)
    assert "optimizer state left as it is" in str(report)
    loose = made("tensor", lambda: mlp(classes=3))
    report = ktd.restore(loose, tmp_path, strict=False)
    assert [words for words in report.kept if "(32, 3), saved as (32, 8)" in words]
    assert_close(loose.layers[0].get_weights(), one.layers[0].get_weights())
    assert_close(loose.layers[1].get_weights(), one.layers[1].get_weights())


@pytest.mark.slow
def test_an_optimizer_that_does_not_fit_is_left_and_said(tmp_path, caplog):
    one = trained("data", tmp_path, optimizer="adam")
    other = made("data", optimizer="sgd")
    assert not ktd.restore(other, tmp_path).optimizer
    assert_close(other.get_weights(), one.get_weights())
    assert "optimizer's state is not loaded: Adam saved it" in caplog.text


@pytest.mark.parametrize("file", ["a.keras", "a.weights.h5", "a.weights.json"])
def test_files_of_keras_load_the_same_way(file, tmp_path):
    one = made("tensor")
    one.fit(X, Y, batch_size=8, verbose=0)
    path = tmp_path / file
    if file.endswith("json"):
        one.save_weights(path, max_shard_size=0.000002)
        assert len(list(tmp_path.glob("*.h5"))) > 1
    else:
        (one.save if file.endswith("keras") else one.save_weights)(path)
    other = made("fsdp")  # its optimizer has no slots yet
    report = ktd.restore(other, path)
    assert report.optimizer
    assert_close(other.get_weights(), one.get_weights())
    for a, b in zip(other.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    wider = made("data", lambda: mlp(classes=3), compiled=False)
    before = wider.get_weights()
    words = r"of another shape or dtype: \S*head/kernel \(32, 3\), saved as \(32, 8\)"
    with pytest.raises(ValueError, match=f"must have exactly the weights of this model.*{words}"):
        ktd.restore(wider, path)
    assert_close(wider.get_weights(), before)
    words = r"of exclude must match weights.*'\*/haed/\*', which matches"
    with pytest.raises(ValueError, match=words):
        ktd.restore(wider, path, exclude=["*/head/*", "*/haed/*"])
    report = ktd.restore(wider, path, exclude=["*/head/*"])
    assert_close(wider.get_weights()[:-2], one.get_weights()[:-2])
    assert_close(wider.get_weights()[-2:], before[-2:])
    assert [path.rpartition("/")[0][-4:] for path in report.kept] == ["head", "head"]


def test_the_optimizer_in_a_file_of_keras_fits_as_a_whole_or_is_left(tmp_path, caplog):
    one = made("stock")
    one.fit(X, Y, batch_size=8, verbose=0)
    one.save_weights(tmp_path / "a.weights.h5")
    other = made("stock", optimizer=keras.optimizers.SGD(0.5))
    # Step and learning rate stand first in both, and in Adam's slots follow.
    assert not ktd.restore(other, tmp_path / "a.weights.h5").optimizer
    assert (int(other.optimizer.iterations), float(other.optimizer.learning_rate)) == (0, 0.5)
    assert "optimizer's state is not loaded" in caplog.text


def test_a_file_of_keras_in_parts_of_which_one_is_missing(tmp_path):
    one = made("stock")
    one.save_weights(tmp_path / "a.weights.json", max_shard_size=0.000002)
    last = max(tmp_path.glob("*.h5"))
    whole = last.read_bytes()
    other = made("stock")
    before = other.get_weights()
    for damage in (last.unlink, lambda: last.write_bytes(whole[:1500])):
        damage()
        with pytest.raises(
            ktd.CheckpointError, match=r"a\.weights\.json' cannot be read: \w+Error"
        ):
            ktd.restore(other, tmp_path / "a.weights.json")
        assert_close(other.get_weights(), before)


def test_a_file_that_is_no_file_of_keras(tmp_path):
    (tmp_path / "a.keras").write_text("no zip")
    with pytest.raises(ktd.CheckpointError, match=r"a\.keras' cannot be read: BadZipFile"):
        ktd.restore(made("stock"), tmp_path / "a.keras")
    with pytest.raises(ValueError, match=r"has one state.*step=3"):
        ktd.restore(made("stock"), tmp_path / "a.keras", step=3)


def test_no_checkpoint_no_model(tmp_path):
    with pytest.raises(ktd.CheckpointError, match="There is no directory"):
        ktd.restore(made("stock"), tmp_path / "nowhere")
    with pytest.raises(ktd.CheckpointError, match="There is no checkpoint in"):
        ktd.restore(made("stock"), tmp_path)
    trained("stock", tmp_path)
    with pytest.raises(ktd.CheckpointError, match=r"no checkpoint 3 in .*There are: \[4, 8\]"):
        ktd.restore(made("stock"), tmp_path, step=3)
    unbuilt = keras.Sequential([keras.layers.Dense(1)], name="unbuilt")
    with pytest.raises(ValueError, match=r"needs a built model\. Received: 'unbuilt'"):
        ktd.restore(unbuilt, tmp_path)


@pytest.mark.slow
def test_damage_is_found_or_harmless():
    # In a process of its own: Orbax leaves the arrays behind that it was reading when one failed.
    python(pathlib.Path(__file__).parent / "damage.py", "--cases", "12", timeout=500)


@pytest.mark.slow
def test_a_newer_version_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("keras_tpu_dist.checkpoint.manifest._WITHOUT_BASE", 99)
    trained("data", tmp_path)
    monkeypatch.undo()
    with pytest.raises(ktd.CheckpointError, match="written by a newer keras_tpu_dist"):
        ktd.restore(made("data"), tmp_path)


def test_a_directory_that_is_a_file(tmp_path):
    path = pathlib.Path(tmp_path / "file")
    path.write_text("no directory")
    with pytest.raises(ktd.CheckpointError, match=r"A checkpoint of '.*file' cannot be opened"):
        Store(path)


@pytest.mark.slow
def test_a_state_of_several_groups(tmp_path, monkeypatch):
    one = trained("tensor", tmp_path)
    module = importlib.import_module("keras_tpu_dist.checkpoint.restored")
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 1000)
    monkeypatch.setattr(module, "GROUP_BYTES", 1000)
    other = made("fsdp")
    assert ktd.restore(other, tmp_path).optimizer
    assert_close(numbers(other), numbers(one))
    load, calls = CheckpointReader.load, []

    def fails_later(store, step, wanted):
        calls.append(step)
        if len(calls) == 3:
            raise ktd.CheckpointError("It is damaged.")
        return load(store, step, wanted)

    monkeypatch.setattr(CheckpointReader, "load", fails_later)
    with pytest.raises(ktd.CheckpointError, match=r"damaged\. \d+ of \d+ variables were loaded"):
        ktd.restore(made("fsdp"), tmp_path, step=8)
    # A model that has trained loses nothing.
    other.fit(X, Y, verbose=0)
    before = numbers(other)
    for failing in (1, 2, 3):
        calls[:] = [0] * (3 - failing)
        with pytest.raises(ktd.CheckpointError, match=r"It is damaged\.$"):
            ktd.restore(other, tmp_path, step=8)
        assert_close(numbers(other), before)


class Optional(keras.layers.Layer):
    """A weight for options, of which there are none."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.options = self.add_weight(shape=(0, 8), name="options")

    def call(self, x):
        return x @ self.kernel + keras.ops.sum(self.options, axis=0)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_without_elements(tmp_path, caplog, strict):
    def build(name=None):
        layers = [keras.Input((X.shape[1],)), Optional(name="layer"), keras.layers.Softmax()]
        return keras.Sequential(layers, name="model")

    one, other = trained("data", tmp_path, build), made("fsdp", build)
    assert "cannot be written" not in caplog.text
    report = ktd.restore(other, tmp_path, strict=strict)
    assert (report.step, report.optimizer) == (8, True)
    assert_close(numbers(other), numbers(one))
    assert other.layers[0].options.shape == (0, 8)
