"""The programs that a first and a second start compile, with the cache of compiled programs.

Steps are counted by themselves. JAX caches what process 0 compiles: a small program on a device of
another process is no program of process 0's, and is compiled at each start.

python benchmarks/compilation_cache.py
python benchmarks/compilation_cache.py --processes 2 fit fsdp
"""

import argparse
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable

FOUND, ASKED = (
    f"/jax/compilation_cache/{name}" for name in ("cache_hits", "compile_requests_use_cache")
)
FOLDER = "KTD_COMPILATION_CACHE"
_HERE, _TIMEOUT_S = pathlib.Path(__file__).resolve(), 3600


class Programs:
    """Models and functions that are trained for a few steps."""

    def __init__(self):
        import keras
        import numpy as np

        import keras_tpu_dist as ktd

        self.ktd, self.keras, self.layers = ktd, keras, keras.layers
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((26, 16)).astype("float32")
        self.y = rng.integers(0, 8, 26)
        self.ids = rng.integers(0, 512, (26, 16))

    def by_name(self) -> dict[str, Callable[[], None]]:
        """What is run, by name."""
        dense = self.classifier
        two = {"data": 4, "model": 2}
        by_rows = [("embedding/embeddings", ("model", None))]
        return {
            "fit": self.fit_and_more,
            "steps": lambda: self.trained(dense, rows=4, steps_per_execution=4),
            "fsdp": lambda: self.trained(self.attention, "fsdp"),
            "tensor": lambda: self.trained(self.attention, "tensor_parallel"),
            "lora": lambda: self.trained(self.with_lora, mesh=two),
            "remat": lambda: self.trained(self.blocks, mesh=two, remat="full"),
            "scan": lambda: self.trained(self.scanned, mesh=two),
            "tables": lambda: self.trained(
                self.table, by_rows, mesh=two, x=self.ids, tables="rows"
            ),
            "head": lambda: self.trained(
                self.language, mesh=two, x=self.ids, y=self.ids, head="pieces"
            ),
            "assigned": lambda: self.trained(self.towers, mesh=two),
            "run": self.replica_code,
        }

    def trained(
        self,
        build: Callable,
        layout=None,
        rows: int = 13,
        mesh=None,
        x=None,
        y=None,
        steps_per_execution: int = 1,
        **options,
    ):
        """Trains a model on two batches, the second of them ragged."""
        mesh = mesh or {"data": 2, "fsdp": 2, "model": 2}
        with self.ktd.TPUStrategy(mesh, layout, **options).scope():
            self.keras.utils.set_random_seed(1)
            model = build()
            model.compile(
                "adam",
                self.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                steps_per_execution=steps_per_execution,
            )
        x, y = self.x if x is None else x, self.y if y is None else y
        model.fit(x[:25], y[:25], batch_size=rows, verbose=0)
        return model

    def fit_and_more(self) -> None:
        """`fit`, `evaluate`, `predict` and `train_on_batch`."""
        model = self.trained(self.classifier, rows=8)
        model.evaluate(self.x, self.y, batch_size=8, verbose=0)
        model.predict(self.x, batch_size=8, verbose=0)
        model.train_on_batch(self.x[:9], self.y[:9])

    def replica_code(self) -> None:
        """`strategy.run` and `strategy.loop` with a model that draws numbers."""
        strategy = self.ktd.TPUStrategy()
        with strategy.scope():
            self.keras.utils.set_random_seed(1)
            model = self.classifier()
            total = self.keras.metrics.Mean()

        def step(x):
            total.update_state(model(x, training=True))

        strategy.run(step, (self.x[:16],))
        for _ in strategy.loop(step, strategy.distribute_dataset(self.x[:16], batch_size=8), 2):
            pass

    def classifier(self):
        """A model with layers that draw numbers and that sum over rows."""
        layers = self.layers
        return self.keras.Sequential(
            [
                self.keras.Input((16,)),
                layers.Dense(32, activation="relu"),
                layers.Dropout(0.2),
                layers.BatchNormalization(),
                layers.Dense(8),
            ]
        )

    def attention(self):
        """A model with an attention."""
        inputs = self.keras.Input((16,))
        x = self.layers.Reshape((4, 4))(self.layers.Dense(16)(inputs))
        x = x + self.layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
        x = self.layers.Flatten()(self.layers.LayerNormalization()(x))
        return self.keras.Model(inputs, self.layers.Dense(8)(x))

    def with_lora(self):
        """A model of which a low rank trains."""
        model = self.classifier()
        model.layers[0].enable_lora(2)
        return model

    def blocks(self):
        """A model of four equal blocks."""
        x = inputs = self.keras.Input((16,))
        for _ in range(4):
            block = self.keras.Sequential(
                [self.keras.Input((16,)), self.layers.Dense(16, "gelu"), self.layers.Dropout(0.1)]
            )
            x = x + block(x)
        return self.keras.Model(inputs, self.layers.Dense(8)(x))

    def scanned(self):
        """The same, whose blocks run as a loop."""
        model = self.blocks()
        self.ktd.scan_blocks(model)
        return model

    def table(self):
        """A model with a table that is split by rows."""
        return self.keras.Sequential(
            [
                self.keras.Input((16,), dtype="int32"),
                self.layers.Embedding(512, 8, name="embedding"),
                self.layers.GlobalAveragePooling1D(),
                self.layers.Dense(8),
            ]
        )

    def language(self):
        """A model with logits of a vocabulary."""
        return self.keras.Sequential(
            [
                self.keras.Input((16,), dtype="int32"),
                self.layers.Embedding(512, 8),
                self.layers.Dense(512),
            ]
        )

    def towers(self):
        """A model whose layers are assigned to logical devices."""
        inputs = self.keras.Input((16,))
        parts = [self.ktd.assign(self.layers.Dense(16), k)(inputs) for k in range(2)]
        return self.keras.Model(inputs, self.layers.Dense(8)(self.layers.Concatenate()(parts)))


class Explained(logging.Handler):
    """Collects what the log says of steps that are compiled."""

    def __init__(self, level: int):
        super().__init__(level)
        self.steps: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a message."""
        if "is compiled: " in record.getMessage():
            self.steps.append(record.getMessage())


def run_here(names: list[str]) -> None:
    """Runs programs in this process, and prints how many were compiled of how many."""
    import keras_tpu_dist as ktd

    if "KTD_COORDINATOR" in os.environ:
        ktd.initialize()
    else:
        ktd.simulate(8)
    import jax

    counts: Counter = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    explained = Explained(logging.INFO)
    logging.getLogger("keras_tpu_dist").setLevel(logging.INFO)
    logging.getLogger("keras_tpu_dist").addHandler(explained)
    programs = Programs().by_name()
    for name in names or programs:
        counts.clear()
        explained.steps.clear()
        programs[name]()
        counted = {
            "name": name,
            "process": jax.process_index(),
            "asked": counts[ASKED],
            "compiled": counts[ASKED] - counts[FOUND],
            "steps": explained.steps,
        }
        print(json.dumps(counted), flush=True)


def started(names: list[str], folder: str, processes: int = 1) -> list[dict]:
    """The counts that a new start prints, of all its processes."""
    words = [str(_HERE), "--here", *names]
    if processes > 1:
        launched = ["-m", "keras_tpu_dist", "launch", "--processes", str(processes)]
        words = [*launched, "--devices", str(8 // processes), *words]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, FOLDER: folder, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '"asked"' in line]
    return [json.loads(line) for line in lines]


def main() -> None:
    """Prints what a first and a second start compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="run in this process")
    given = parser.parse_args()
    if given.here:
        run_here(given.names)
        return
    with tempfile.TemporaryDirectory() as folder:
        starts = [started(given.names, folder, given.processes) for _ in range(2)]
    second = {(counts["name"], counts["process"]): counts for counts in starts[1]}
    print("program    process  first start: programs, steps  second start: programs, steps")
    for first in starts[0]:
        again = second[first["name"], first["process"]]
        print(
            f"{first['name']:10} {first['process']:7}"
            f" {first['compiled']:22} {len(first['steps']):6}"
            f" {again['compiled']:23} {len(again['steps']):6}"
        )
        for reason in again["steps"]:
            print(f"  {reason}")


if __name__ == "__main__":
    main()
