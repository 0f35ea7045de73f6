"""The LSTM of TensorFlow issue 18102, whose time loop failed on a TPU: as a loop or unrolled.

    python examples/lstm_unroll.py                          # a compiled loop over time
    python examples/lstm_unroll.py --unroll_lstm true       # ten copies of the cell
    python examples/lstm_unroll.py --topology v5e:2x4       # compile for that slice, no TPU needed

Random data of the shapes given there, seeded; eight simulated devices train as one would.

References:
    https://github.com/tensorflow/tensorflow/issues/18102
"""

import argparse

import keras_tpu_dist as ktd
import keras
import numpy as np

ROWS, STEPS, FEATURES, UNITS = 1024, 10, 10, 10


def load():
    """1024 sequences of ten steps with ten features, and their targets."""
    rng = np.random.default_rng(0)
    x = rng.random((ROWS, STEPS, FEATURES)).astype("float32")
    return x, rng.random((ROWS, UNITS)).astype("float32")


def builder(unroll: bool):
    """Returns the function that builds and compiles the model."""

    def build():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((STEPS, FEATURES)), ktd.layers.LSTM(UNITS, unroll=unroll)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.001), "mse")
        return model

    return build


def train(unroll: bool, epochs: int, strategy=None):
    """The loss of each epoch, on the strategy's devices or on one."""
    x, y = load()
    if strategy is None:
        model = builder(unroll)()
    else:
        with strategy.scope():
            model = builder(unroll)()
    return model.fit(x, y, batch_size=ROWS, epochs=epochs, verbose=0).history["loss"]


def compiled(unroll: bool, topology: str):
    """A dry run of the train step for a slice."""
    strategy = ktd.TPUStrategy(topology=topology)
    return ktd.dry_run(builder(unroll), strategy, batch_size=ROWS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unroll_lstm", choices=("true", "false"), default="false")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--topology", help="a slice such as v5e:2x4 or v4:2x2x2")
    arguments = parser.parse_args()
    unroll = arguments.unroll_lstm == "true"
    if arguments.topology:
        print(compiled(unroll, arguments.topology))
        return
    ktd.simulate(8)
    for epoch, loss in enumerate(train(unroll, arguments.epochs, ktd.TPUStrategy()), 1):
        print(f"epoch {epoch}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
