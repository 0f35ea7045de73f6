"""Models with augmentation are compiled and equal eager ones; others say why they are not."""

import inspect
import logging

import keras
import numpy as np
import pytest
from conformance.precision import in_float64
from keras import layers as kl

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist._keras import compiling

X = np.random.default_rng(0).uniform(0, 1, (13, 8, 8, 3))
Y = np.random.default_rng(1).normal(size=(13, 2))
MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2})
LAYERS = {
    "RandomRotation": lambda: kl.RandomRotation(0.2, seed=3),
    "RandomZoom": lambda: kl.RandomZoom((-0.3, 0.3), seed=3),
    "RandomTranslation": lambda: kl.RandomTranslation(0.2, 0.2, seed=3),
    "RandomShear": lambda: kl.RandomShear(0.3, 0.3, seed=3),
    "RandomPerspective": lambda: kl.RandomPerspective(1.0, 0.5, seed=3),
}


def model_with(*augmentations, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            *augmentations,
            kl.Conv2D(4, 3, activation="tanh"),
            kl.Flatten(),
            kl.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    return model


def trained(model, x=X, y=Y, epochs=2):
    fed = {"batch_size": 4, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, **fed).history["loss"]
    return [np.asarray(history), *model.get_weights(), model.predict(x, batch_size=4, verbose=0)]


@pytest.fixture
def float64():
    """In float32, a rounded angle moves a pixel by more than 1e-5."""
    with in_float64():
        yield


def equal(found, expected, tolerance=1e-6):
    for one, other in zip(found, expected, strict=True):
        assert np.asarray(one).dtype == "float64"
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def under(mesh, make, **options):
    strategy = ktd.TPUStrategy(mesh)
    with strategy.scope():
        model = make(**options)
    return model


def messages(caplog, model):
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        model.fit(X, Y, batch_size=8, verbose=0)
    return [m for m in caplog.messages if "each operation is launched" in m]


def test_every_layer_that_keras_does_not_compile_is_known():
    """A new one of Keras is compiled or has a reason."""
    names = {
        name
        for name, kind in vars(kl).items()
        if inspect.isclass(kind) and "self.supports_jit = False" in inspect.getsource(kind)
    }
    # IntegerLookup is computed on the device; recurrent layers say so for TensorFlow alone.
    known = {kind.__name__ for kind in (*compiling._COMPILED_BY_JAX, *compiling._NOT_COMPILED)}
    assert names - {"IntegerLookup", "LSTM", "GRU"} == known - {"AugMix"}
    assert all(layer.supports_jit for layer in (kl.LSTM(2), kl.GRU(2)))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_compiled_and_equals_eager(float64, name, steps, caplog):
    expected = trained(model_with(LAYERS[name](), run_eagerly=True))
    # Each layer on some mesh, with and without launches of several steps.
    mesh = MESHES[(list(LAYERS).index(name) + steps) % len(MESHES)]
    model = under(mesh, lambda **o: model_with(LAYERS[name](), **o), steps_per_execution=steps)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        # Keras solves for the matrix of a perspective in float32 in any case.
        equal(trained(model), expected, 1e-5 if name == "RandomPerspective" else 1e-6)
    assert model.jit_compile
    assert not caplog.messages


def nested():
    inner = keras.Sequential([kl.RandomFlip(seed=1), kl.RandomRotation(0.2, seed=2)])
    return model_with(kl.Pipeline([inner, kl.RandomZoom(0.3, seed=3)]))


def functional():
    keras.utils.set_random_seed(1)
    images = keras.Input((8, 8, 3))
    h = kl.RandomShear(0.3, seed=2)(kl.RandomTranslation(0.1, 0.1, seed=1)(images))
    model = keras.Model(images, kl.Dense(2)(kl.Flatten()(h)))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.parametrize("make", [nested, functional])
def test_where_it_stands_makes_no_difference(float64, make):
    reference = make()
    reference.run_eagerly = True
    model = under(MESHES[2], make)
    equal(trained(model), trained(reference))
    assert model.jit_compile


def over_time():
    keras.utils.set_random_seed(1)
    frames = keras.Input((3, 8, 8, 3))
    h = kl.TimeDistributed(kl.RandomRotation(0.2, seed=2))(frames)
    model = keras.Model(frames, kl.Dense(2)(kl.Flatten()(h)))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def test_within_time_distributed(float64):
    frames = np.random.default_rng(0).uniform(0, 1, (13, 3, 8, 8, 3))
    reference = over_time()
    reference.run_eagerly = True
    model = under(MESHES[1], over_time)
    equal(trained(model, frames), trained(reference, frames))
    assert model.jit_compile


@pytest.mark.slow
def test_rand_augment(float64):
    def make(**options):
        return model_with(kl.RandAugment((0, 1), num_ops=1, factor=0.3, seed=3), **options)

    model = under(MESHES[1], make)
    equal(trained(model, epochs=1), trained(make(run_eagerly=True), epochs=1))
    assert model.jit_compile


def test_from_tf_data(float64):
    tf = pytest.importorskip("tensorflow")

    def fed():
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)

    def losses(model):
        return model.fit(fed(), epochs=2, shuffle=False, verbose=0).history["loss"]

    model = under(MESHES[1], lambda: model_with(LAYERS["RandomRotation"]()))
    expected = losses(model_with(LAYERS["RandomRotation"](), run_eagerly=True))
    np.testing.assert_allclose(losses(model), expected, rtol=1e-5)
    assert model.jit_compile


def test_a_model_that_ran_without_a_strategy_before():
    """Keras has decided by then that it does not compile it."""
    model = model_with(LAYERS["RandomRotation"]())
    assert not model.jit_compile
    with ktd.TPUStrategy().scope():
        model.fit(X, Y, batch_size=8, verbose=0)
        assert model.jit_compile


def cropped():
    return keras.Sequential([kl.RandomCrop(4, 4, name="crop"), kl.Resizing(8, 8)])


@pytest.mark.parametrize("options", [{}, {"jit_compile": False}], ids=["auto", "asked"])
def test_a_model_that_was_compiled_before_keras_was_changed(options):
    """Of which nothing tells what `compile` was given."""
    model = model_with(*([] if options else [LAYERS["RandomRotation"]()]), **options)
    # It is there if an earlier test of this process made a strategy.
    vars(model).pop("_keras_tpu_dist_jit_compile", None)
    with ktd.TPUStrategy().scope():
        model.fit(X, Y, batch_size=8, verbose=0)
    assert model.jit_compile is not bool(options)
    assert [eager.words for eager in _keras.why_eager(model)] == (
        ["It was compiled with jit_compile=False."] if options else []
    )


class Own(keras.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.supports_jit = False

    def call(self, inputs):
        return 2 * inputs


class OwnRotation(kl.RandomRotation):
    pass


@pytest.mark.parametrize(
    ("augmentation", "path", "why", "fix"),
    [
        (
            cropped,
            "crop",
            "It slices images at places that are drawn",
            "dataset.map(lambda x, y: (layer(x, training=True), y))",
        ),
        (
            lambda: kl.AugMix((0, 1), name="mix"),
            "mix",
            "It draws the order of its layers from Python's random numbers",
            "Use RandAugment.",
        ),
        (
            lambda: Own(name="own"),
            "own",
            "Its class, Own, sets supports_jit = False.",
            "If JAX can trace its call, write layer.supports_jit = True before compile",
        ),
        (
            lambda: OwnRotation(0.1, name="own_rotation"),
            "own_rotation",
            "Its class, OwnRotation, sets supports_jit = False.",
            "write layer.supports_jit = True before compile",
        ),
    ],
    ids=["RandomCrop", "AugMix", "a layer of your own", "a class derived of Keras's"],
)
def test_what_is_not_compiled_says_why(augmentation, path, why, fix, caplog):
    model = under(MESHES[0], lambda: model_with(augmentation()))
    (message,) = messages(caplog, model)
    assert message.startswith(f"model {model.name!r}: warning: ")
    assert f"{path}: Keras does not compile the model, so each operation is launched" in message
    assert why in message
    assert fix in message
    assert not model.jit_compile
    # Once for a model, and lint says the same.
    assert len(messages(caplog, model)) == 1
    findings = ktd.TPUStrategy(MESHES[0]).lint(model).findings
    (finding,) = [finding for finding in findings if finding.code == "not-compiled"]
    assert str(finding) in message


def test_a_dry_run_says_that_fit_runs_another_step():
    strategy = ktd.TPUStrategy(MESHES[1])
    text = str(ktd.dry_run(lambda: model_with(kl.AugMix((0, 1))), strategy, batch_size=8))
    _, second, *others = text.split("\n")
    assert second.startswith("fit does not run this step: ")
    assert "aug_mix: Keras does not compile the model" in second
    assert "Use RandAugment." in second
    assert sum("not-compiled" in line for line in others) == 1
    run = ktd.dry_run(lambda: model_with(LAYERS["RandomZoom"]()), strategy, batch_size=8)
    assert "fit does not run" not in str(run)
    words = "A dry run compiles the step. fit would not.*crop: It slices images.*dataset.map"
    with pytest.raises(ValueError, match=words):
        ktd.dry_run(lambda: model_with(cropped()), strategy, batch_size=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run_eagerly": True}, "with run_eagerly=True, or model.run_eagerly was set. Leave"),
        ({"jit_compile": False}, "with jit_compile=False. Leave jit_compile out."),
    ],
    ids=["run_eagerly", "jit_compile"],
)
def test_what_was_asked_for_is_said(options, words, caplog):
    model = under(MESHES[0], lambda: model_with(LAYERS["RandomZoom"](), **options))
    (message,) = messages(caplog, model)
    assert words in message


def test_nothing_is_changed_without_a_strategy():
    model = model_with(LAYERS["RandomRotation"]())
    model.fit(X, Y, batch_size=8, verbose=0)
    assert not model.jit_compile
    assert [eager.path for eager in _keras.why_eager(model)] == []


@pytest.mark.parametrize("mesh", MESHES[::2], ids=str)
def test_replica_code_augments_the_first_replica_as_one_device(mesh):
    """Every other replica draws numbers of its own, for the same rows."""
    strategy = ktd.TPUStrategy(mesh)
    replicas = strategy.num_replicas_in_sync
    makes = {**LAYERS, "RandAugment": lambda: kl.RandAugment((0, 1), seed=3)}
    images = X[:2].astype("float32")
    with strategy.scope():
        augments = [make() for make in makes.values()]

    def step(batch):
        return [augment(batch, training=True) for augment in augments]

    rows = np.tile(images, (replicas, 1, 1, 1))
    (batch,) = strategy.distribute_dataset(rows, batch_size=len(rows))
    found = strategy.gather(strategy.run(step, (batch,)), axis=0)
    for name, result in zip(makes, found, strict=True):
        expected = np.asarray(makes[name]()(images, training=True))
        parts = np.split(np.asarray(result), replicas)
        np.testing.assert_allclose(parts[0], expected, rtol=0, atol=1e-5)
        # These draw whether they change an image, so that two replicas may leave theirs.
        least = 2 if name in ("RandAugment", "RandomPerspective") else replicas
        assert len({part.tobytes() for part in parts}) >= least, name
