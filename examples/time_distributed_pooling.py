"""TimeDistributed(GlobalMaxPooling2D) of TensorFlow issue 18103, which failed on a TPU.

    python examples/time_distributed_pooling.py                     # all time steps at once
    python examples/time_distributed_pooling.py --unroll true       # one call for each time step
    python examples/time_distributed_pooling.py --topology v5e:2x4  # compile for that slice

Random data of the shape given there, seeded: 1024 films of ten frames of ten by ten pixels. Each
pixel gets ten features, each frame their largest values. Unrolled it is Keras's own layer.

References:
    https://github.com/tensorflow/tensorflow/issues/18103
"""

import argparse

import keras_tpu_dist as ktd
import keras
import numpy as np

ROWS, STEPS, SIDE, FEATURES = 1024, 10, 10, 10


def load():
    """1024 videos, and a target for each frame."""
    rng = np.random.default_rng(0)
    x = rng.random((ROWS, STEPS, SIDE, SIDE)).astype("float32")
    return x, rng.random((ROWS, STEPS, FEATURES)).astype("float32")


def builder(unroll: bool):
    """Returns the function that builds and compiles the model."""
    over_time = keras.layers.TimeDistributed if unroll else ktd.layers.TimeDistributed

    def build():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((STEPS, SIDE, SIDE)),
                keras.layers.Reshape((STEPS, SIDE, SIDE, 1)),
                keras.layers.Dense(FEATURES),
                over_time(keras.layers.GlobalMaxPooling2D()),
            ]
        )
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
    parser.add_argument("--unroll", choices=("true", "false"), default="false")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--topology", help="a slice such as v5e:2x4 or v4:2x2x2")
    arguments = parser.parse_args()
    unroll = arguments.unroll == "true"
    if arguments.topology:
        print(compiled(unroll, arguments.topology))
        return
    ktd.simulate(8)
    for epoch, loss in enumerate(train(unroll, arguments.epochs, ktd.TPUStrategy()), 1):
        print(f"epoch {epoch}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
