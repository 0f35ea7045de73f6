"""The programs that a notebook compiles, cell by cell.

python benchmarks/compilations.py
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import keras_tpu_dist as ktd

ktd.simulate(8)

import jax
import keras
import numpy as np

# The events with which JAX reports a compilation, and the functions whose programs are steps.
COMPILED = "/jax/core/compile/backend_compile_duration"
STEPS = tuple(f"{kind}_step{more}" for kind in ("train", "test", "predict") for more in ("", "s"))


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Counts the compilations of steps, by the name of their function."""
    counts: Counter = Counter()

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        name = str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")
        if event == COMPILED and name in STEPS:
            counts[name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Notebook:
    """The cells of a notebook, in their order.

    Args:
        hidden: Makes the layers between the first one and the last.
    """

    def __init__(self, hidden: Callable[[], list]) -> None:
        self.hidden = hidden
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((300, 8)).astype("float32")
        self.y = rng.integers(0, 3, 300)
        self.scope = ktd.TPUStrategy().scope
        self.results: dict[str, list[float]] = {}
        self.model = self.built()

    def built(self, rate: float = 1e-3, metrics: tuple = ("accuracy",), steps: int = 1):
        """A new model, compiled."""
        with self.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [
                    keras.Input((8,)),
                    keras.layers.Dense(16, activation="relu"),
                    *self.hidden(),
                    keras.layers.Dense(3, activation="softmax"),
                ]
            )
        self.compiled(model, rate, metrics, steps)
        return model

    def compiled(self, model, rate: float, metrics: tuple = ("accuracy",), steps: int = 1) -> None:
        """Compiles a model in the strategy's scope."""
        with self.scope():
            model.compile(
                keras.optimizers.Adam(rate),
                "sparse_categorical_crossentropy",
                metrics=list(metrics),
                steps_per_execution=steps,
            )

    def batches(self, *sizes: int) -> Iterator[tuple]:
        """Batches of these sizes, as a generator."""
        for size in sizes:
            yield self.x[:size], self.y[:size]

    def fitted(self, rows: int, size: int, **options) -> list[float]:
        """Trains the model on some rows for an epoch; returns the loss."""
        options = {"epochs": 1, "verbose": 0, "shuffle": False, **options}
        history = self.model.fit(self.x[:rows], self.y[:rows], batch_size=size, **options)
        return [values[-1] for values in history.history.values()]

    def evaluated(self, rows: int, size: int, **options) -> list[float]:
        """The loss and the metrics of some rows."""
        data = self.x[:rows], self.y[:rows]
        return self.model.evaluate(*data, batch_size=size, verbose=0, **options)

    def predicted(self, rows: int, size: int = 32) -> list[float]:
        """The sum of the predictions for some rows."""
        return [float(np.square(self.model.predict(self.x[:rows], size, verbose=0)).sum())]

    def anew(self, **options) -> list[float]:
        """The same model built again after `clear_session`, and trained."""
        keras.utils.clear_session()
        self.model = self.built(**options)
        return self.fitted(128, 32)

    def rate(self, rate: float, rows: int = 128) -> list[float]:
        """Training with another learning rate, after `compile`."""
        self.compiled(self.model, rate)
        return self.fitted(rows, 32)

    def on_batch(self, *sizes: int) -> list[float]:
        """`train_on_batch` for batches of some sizes."""
        found = [self.model.train_on_batch(*batch) for batch in self.batches(*sizes)]
        return [float(value) for values in found for value in values]

    def tested(self, *sizes: int) -> list[float]:
        """`test_on_batch` and `predict_on_batch` for batches of some sizes."""
        found = []
        for x, y in self.batches(*sizes):
            found.extend(map(float, self.model.test_on_batch(x, y)))
            found.append(float(np.square(self.model.predict_on_batch(x)).sum()))
        return found

    def generated(self, *sizes: int) -> list[float]:
        """Training on a generator of batches of some sizes."""
        options = {"steps_per_epoch": len(sizes), "shuffle": False, "verbose": 0}
        history = self.model.fit(self.batches(*sizes), **options)
        return [values[-1] for values in history.history.values()]

    def several(self) -> list[float]:
        """The model compiled to run four steps a launch."""
        self.compiled(self.model, 1e-3, steps=4)
        return self.fitted(140, 32)

    def weighted(self, rows: int) -> list[float]:
        """Training with class weights, which are sample weights."""
        return self.fitted(rows, 32, class_weight={0: 1.0, 1: 2.0, 2: 0.5})

    def cells(self) -> dict[str, Callable[[], list[float]]]:
        """The cells by their text."""
        return {
            "fit, 128 rows by 32": lambda: self.fitted(128, 32),
            "fit, 140 rows by 32": lambda: self.fitted(140, 32),
            "fit with validation_split": lambda: self.fitted(150, 32, validation_split=0.2),
            "evaluate, 100 rows by 32": lambda: self.evaluated(100, 32),
            "evaluate, 77 rows by 32": lambda: self.evaluated(77, 32),
            "predict, 100 rows": lambda: self.predicted(100),
            "predict, 45 rows": lambda: self.predicted(45),
            "predict, 1 row": lambda: self.predicted(1),
            "compile with another rate, fit": lambda: self.rate(1e-4),
            "compile with a third rate, fit 140": lambda: self.rate(1e-5, 140),
            "evaluate after compile": lambda: self.evaluated(100, 32),
            "train_on_batch": lambda: self.on_batch(32, 20),
            "test_on_batch, predict_on_batch": lambda: self.tested(32, 20),
            "the same model built again, fit": lambda: self.anew(),
            "its evaluate, predict": lambda: [*self.evaluated(100, 32), *self.predicted(100)],
            "fit on a generator": lambda: self.generated(32, 30, 28, 32),
            "another generator": lambda: self.generated(31, 17, 32),
            "predict, 5 sizes": lambda: [v for n in (3, 7, 11, 19, 27) for v in self.predicted(n)],
            "steps_per_execution=4, fit": lambda: self.several(),
            "class_weight, fit 128": lambda: self.weighted(128),
            "class_weight, fit 139": lambda: self.weighted(139),
            "built again with a rate, fit": lambda: self.anew(rate=1e-2),
            "its evaluate, train_on_batch": lambda: [
                *self.evaluated(77, 32),
                *self.on_batch(32, 9),
            ],
        }

    def run(self) -> Iterator[tuple[str, Counter]]:
        """Runs the cells one after the other; yields the text and the compilations of one."""
        for text, cell in self.cells().items():
            with counted() as counts:
                self.results[text] = cell()
            yield text, counts


def normalized() -> list:
    """A layer that treats rows one by one."""
    return [keras.layers.LayerNormalization()]


def dropped() -> list:
    """Layers that draw numbers for the rows, and that sum over them."""
    return [keras.layers.Dropout(0.2), keras.layers.BatchNormalization()]


def main() -> None:
    """Prints the compilations of every cell, and their number."""
    for hidden in (normalized, dropped):
        print(f"{hidden.__name__}:")
        print_cells(Notebook(hidden))


def print_cells(notebook: Notebook) -> None:
    """Prints the compilations of every cell of one notebook."""
    total = 0
    for number, (text, counts) in enumerate(notebook.run(), 1):
        total += counts.total()
        steps = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"{number:2} {text:36} {steps}", flush=True)
    print(f"{total} compilations of steps")


if __name__ == "__main__":
    main()
