"""The savings of replacing `get_metrics_result`, for a loss and an accuracy on 8 simulated devices.

python benchmarks/metric_results.py
"""

import timeit
from collections.abc import Callable
from functools import partial

import keras_tpu_dist as ktd

ktd.simulate(8)

import keras
import numpy as np

from keras_tpu_dist._keras import seam

TRAINER = "keras.src.trainers.trainer:Trainer"


def main() -> None:
    """Prints the milliseconds for one result, with this package's function and with Keras's."""
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(np.ones((64, 4), "float32"), np.zeros(64), batch_size=8, verbose=0)
        stock = seam.stock(TRAINER, "get_metrics_result")
        ways = {"ours": model.get_metrics_result, "Keras's": lambda: stock(model)}
        for name, result in ways.items():
            read = partial(read_all, result)
            read()
            print(f"{name:8} {min(timeit.repeat(read, number=100, repeat=3)) * 10:.2f} ms")


def read_all(result: Callable[[], dict]) -> list[float]:
    """Waits for the numbers of one result, and returns them."""
    return [float(value) for value in result().values()]


if __name__ == "__main__":
    main()
