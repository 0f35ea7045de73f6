"""An LSTM reads scikit-learn's digits row by row, on eight simulated devices and on one.

python examples/digits_lstm.py
"""

import keras_tpu_dist as ktd

ktd.simulate(8)

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_tpu_dist.layers import LSTM


def load():
    """Images of 8 x 8 pixels: eight time steps of eight features."""
    digits = load_digits()
    return train_test_split(
        digits.images.astype("float32") / 16, digits.target, test_size=0.25, random_state=0
    )


def train(x, y, epochs=30):
    """A small model; its weights depend only on the seed, not on the devices."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8, 8)), LSTM(64), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(
        keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(x, y, batch_size=100, epochs=epochs, verbose=0)
    return model


def main(epochs=30):
    x_train, x_test, y_train, y_test = load()
    with ktd.TPUStrategy().scope():
        spread = train(x_train, y_train, epochs)
    single = train(x_train, y_train, epochs)
    accuracy = {
        name: model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
        for name, model in (("eight devices", spread), ("one device", single))
    }
    apart = np.abs(spread.predict(x_test, verbose=0) - single.predict(x_test, verbose=0)).max()
    return accuracy, float(apart)


if __name__ == "__main__":
    accuracy, apart = main()
    for name, value in accuracy.items():
        print(f"accuracy on {name}: {value:.3f}")
    print(f"largest difference of a predicted probability: {apart:.1e}")
