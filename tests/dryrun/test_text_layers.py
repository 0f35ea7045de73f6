"""A dry run of a model that begins with text."""

import keras
import pytest

import keras_tpu_dist as ktd


def test_text_layers_are_named_as_what_to_leave_out():
    pytest.importorskip("tensorflow")

    def build():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                layers.StringLookup(vocabulary=["a", "b"]),
                layers.Embedding(3, 4),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=r"no input of strings\. .*such as StringLookup"):
        ktd.dry_run(build, ktd.TPUStrategy(topology="v5e:2x2"), batch_size=8)
