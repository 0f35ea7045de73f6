"""Augmentation within a model: the TPU compiler's program computes the same as one device."""

import keras
import pytest

import keras_tpu_dist as ktd

L = keras.layers
# RandomPerspective solves equations by a block of linear algebra that only a chip can run.
LAYERS = {
    "rotation": lambda: L.RandomRotation(0.1, seed=1),
    "zoom": lambda: L.RandomZoom(0.1, seed=1),
    "translation": lambda: L.RandomTranslation(0.1, 0.1, seed=1),
    "shear": lambda: L.RandomShear(0.1, 0.1, seed=1),
    "rand_augment": lambda: L.RandAugment(num_ops=1, seed=1),
}


def build(name):
    def model():
        layers = [L.RandomFlip("horizontal", seed=2), LAYERS[name](), L.Flatten(), L.Dense(2)]
        made = keras.Sequential([keras.Input((8, 8, 3)), *layers])
        made.compile("sgd", "mse")
        return made

    return model


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", LAYERS)
def test_augmentation_of_a_tpu_s_program_equals_one_device(name):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, topology="v5e:2x4")
    found = ktd.verify(build(name), strategy, batch_size=13)
    assert found.equal, str(found)
