"""Trains a small CNN on scikit-learn's digits on every TPU chip here, or on 8 simulated devices.

    pip install ".[examples]" && python examples/quickstart.py

1,797 real images, no download. 80 % train in batches of 100, 20 % test, so that neither the
training set (1,437 rows) nor the test set (360) divides by the batch or by eight devices.
"""

import argparse
import importlib.util

import keras_tpu_dist as ktd

import numpy as np

BATCH = 100
STEPS_COMPARED = 5


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=12)
    arguments.add_argument(
        "--devices", type=int, default=8, help="simulated devices if there is no TPU"
    )
    arguments = arguments.parse_args()

    if not tpu_attached():
        ktd.simulate(arguments.devices)

    import jax

    (x_train, y_train), (x_test, y_test) = digits()

    strategy = ktd.TPUStrategy()
    print(f"mesh: {strategy}")
    model = train(strategy, x_train, y_train, arguments.epochs, verbose=1)
    print("\nlayouts of the variables:")
    for variable in model.variables:
        print(f"  {variable.path:40} {variable.shape!s:16} {variable.value.sharding.spec}")

    accuracy = model.evaluate(x_test, y_test, batch_size=100, verbose=0)[1]
    print(f"\ntest accuracy: {accuracy:.4f}")

    # Only a few steps: training amplifies rounding errors. After an epoch, two correct runs on
    # different devices can differ in the second digit.
    alone = ktd.TPUStrategy(devices=jax.devices()[:1])
    rows = STEPS_COMPARED * BATCH
    pair = [train(s, x_train[:rows], y_train[:rows], 1, verbose=0) for s in (strategy, alone)]
    difference = max(np.abs(a - b).max() for a, b in zip(*(m.get_weights() for m in pair)))
    print(
        f"largest difference of a weight from one device, after {STEPS_COMPARED} steps: "
        f"{difference:.1e}"
    )
    return accuracy, difference


def tpu_attached():
    """Whether JAX will find a TPU; without starting JAX, after which devices cannot change."""
    import glob

    chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    cut = len(images) * 4 // 5
    train, test = order[:cut], order[cut:]
    return (images[train], labels[train]), (images[test], labels[test])


def build():
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def train(strategy, x, y, epochs, verbose):
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=verbose)
    return model


if __name__ == "__main__":
    main()
