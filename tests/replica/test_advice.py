"""Errors of what cannot be traced say what to write instead."""

import keras
import numpy as np
import pytest
from jax.errors import UnexpectedTracerError

import keras_tpu_dist as ktd

X = np.ones((16, 4), "float32")
KEPT = []


def branches(x):
    if keras.ops.sum(x) > 0:
        return x
    return -x


def reads(x):
    return float(keras.ops.sum(x))


def indexes(x):
    return ["a", "b"][keras.ops.cast(keras.ops.sum(x), "int32")]


def leaves_to_numpy(x):
    return np.sin(np.asarray(x)).sum()


def filters(x):
    return x[x > 0]


def keeps(x):
    KEPT.append(keras.ops.sum(x))
    return KEPT[0] + KEPT[-1]


CASES = {
    branches: "keras.ops.where(condition, a, b)",
    reads: 'float(strategy.reduce("mean", losses))',
    indexes: "keras.ops.take for an index",
    leaves_to_numpy: "keras.ops or jax.numpy for numpy",
    filters: "keras.ops.where(mask, x, 0)",
    keeps: "assign it to a keras.Variable",
}


def advice(error):
    """The notes that are not JAX's."""
    notes = getattr(error, "__notes__", [])
    return [note for note in notes if not note.startswith("---")]


@pytest.mark.parametrize("call", ["run", "loop"])
@pytest.mark.parametrize("function", list(CASES))
def test_what_to_write_instead(function, call):
    KEPT.clear()
    strategy = ktd.TPUStrategy()

    def train():
        for rows in (16, 8):  # of two shapes, so that it is traced twice
            dataset = strategy.distribute_dataset((X[:rows],), batch_size=rows)
            if call == "run":
                for (x,) in dataset:
                    strategy.run(function, (x,))
            else:
                list(strategy.loop(of_batch, dataset))

    def of_batch(batch):
        return function(batch[0])

    with pytest.raises((TypeError, IndexError, ValueError, UnexpectedTracerError)) as error:
        train()
    (note,) = advice(error.value)
    assert CASES[function] in note
    assert note.startswith("A function of strategy.run is compiled")


def test_a_layer_that_cannot_be_compiled_says_where_to_apply_it():
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        crop = keras.layers.RandomCrop(2, 2)
    images = np.ones((16, 4, 4, 3), "float32")
    with pytest.raises(IndexError) as error:
        strategy.run(lambda x: crop(x, training=True), (images,))
    (note,) = advice(error.value)
    assert note.startswith(f"A function of strategy.run is compiled, and {crop.path} cannot be.")
    assert "dataset.map(lambda x, y: (layer(x, training=True), y))" in note
    # Without training nothing is drawn.
    cropped = strategy.run(lambda x: crop(x, training=False), (images,))
    expected = crop(images, training=False).shape
    assert strategy.local_results(cropped)[0].shape == expected


def test_other_errors_have_no_advice():
    with pytest.raises(KeyError) as error:
        ktd.TPUStrategy().run(lambda: {}["labels"])
    assert advice(error.value) == []


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda s: ktd.distribute, AttributeError, "ktd.TPUStrategy() for tf.distribute"),
        (lambda s: ktd.distribute.TPUStrategy(), AttributeError, "ktd.TPUStrategy() for"),
        (lambda s: ktd.serch, AttributeError, "Did you mean 'search'?"),
        (lambda s: ktd.search(X.mean, batch_size=8), TypeError, "search needs topology. Received:"),
        (lambda s: ktd.search(), TypeError, "Write search(build=..., topology=...)."),
        (
            lambda s: s.experimental_run_v2(X),
            AttributeError,
            "Write strategy.run(fn, args, kwargs).",
        ),
    ],
)
def test_names_of_others_and_missing_arguments(call, kind, words):
    with pytest.raises(kind) as error:
        print(call(ktd.TPUStrategy()).any)
    assert words in str(error.value)
