"""Random histories of runs whose checkpoints leave out what does not train, against a plain record.

    python tests/checkpoint/trained_histories.py [--histories 100] [--seed 0]

Events: training, a save, a stop and a restart (on another mesh, with the base that the program
makes or one that `base=` loads), `freeze` of other weights, LoRA that comes later, a step that
assigns a frozen weight, another program that loads the newest checkpoint, and one that does so with
another base. After each event every variable must have the bits of the record, which is computed by
NumPy without any interruption or checkpoint.
"""

import argparse
import collections
import contextlib
import logging
import pathlib
import random
import sys
import tempfile
import time
import zlib

import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist.common import once

EVENTS = 14
PLACES = [
    ({"data": 8}, None),
    ({"data": 4, "model": 2}, "tensor_parallel"),
    ({"data": 2, "fsdp": 2, "model": 2}, "fsdp"),
    ({"fsdp": 8}, "fsdp"),
    None,
]
PATTERNS = ["*", "one", "two", "mean", ["one", "mean"], ["one", "two", "mean"], []]
logger = logging.getLogger("keras_tpu_dist")


class WrongError(AssertionError):
    """A value that an uninterrupted run would not have."""


def built(base=0):
    """The model as its program makes it, of which the wide layer is fingerprinted on devices."""
    layers = [
        keras.layers.Dense(1100, name="one"),
        keras.layers.BatchNormalization(name="mean"),
        keras.layers.Dropout(0.5, seed=3, name="drop"),
        keras.layers.Dense(2, name="two"),
    ]
    model = keras.Sequential([keras.Input((16,)), *layers], name="m")
    for v in model.variables:
        if v.dtype == "float32":
            v.assign(values(base, v.path, v.shape))
    return model


def values(number, path, shape):
    rng = np.random.default_rng([number, zlib.crc32(path.encode())])
    return rng.normal(size=tuple(shape)).astype("float32")


class History:
    """One run, in one program after the other."""

    def __init__(self, rng, path, counts):
        self.rng, self.path, self.counts = rng, path / "run", counts
        self.base_file = path / "base.weights.h5"
        built().save_weights(self.base_file)
        self.step, self.patterns, self.has_lora = 0, "*", False
        self.saved_at, self.record, self.told = None, {}, []
        self.loop = self.model = self.strategy = None

    def go(self, events):
        self.begin(restores=False)
        kinds = {
            self.train: 6,
            self.save: 6,
            self.restart: 4,
            self.freeze: 2,
            self.lora: 1,
            self.assign_frozen: 1,
            self.read: 2,
            self.read_other_base: 1,
        }
        for _ in range(events):
            event = self.rng.choices([*kinds], [*kinds.values()])[0]
            self.told.append(event.__name__)
            self.counts[event.__name__] += 1
            event()
            self.compare(self.model)
        self.restart()
        self.compare(self.model)

    # The program.

    def made(self, base=0):
        """A model on any mesh, frozen as the run has it now."""
        place = self.rng.choice(PLACES)
        strategy = None if place is None else ktd.TPUStrategy(*place)
        with in_scope(strategy):
            model = built(base)
            if self.has_lora:
                self.with_lora(model)
        ktd.freeze(model, self.patterns, exclude=["*lora*"] if self.has_lora else [])
        return model, strategy

    def with_lora(self, model):
        layer = model.get_layer("one")
        layer.enable_lora(2)
        for v in (layer.lora_kernel_a, layer.lora_kernel_b):
            v.assign(values(0, v.path, v.shape))

    def begin(self, restores=True):
        other = self.rng.random() < 0.3
        # Another base in the program, and the right one by name.
        source = self.base_file if other and restores and self.saved_at is not None else None
        self.model, self.strategy = self.made(base=1 if source else 0)
        keep = self.rng.choice([1, 2, None])
        self.loop = ktd.LoopCheckpoint(
            *(self.path, self.model), only="trained", base=source, keep=keep
        )
        if restores:
            noted = self.loop.restore()
            if self.saved_at is None:
                assert noted == {}
            else:
                step, record = self.saved_at
                self.record = dict(record)
                self.step = noted["step"]
                if self.step != step:
                    raise WrongError(f"restored {self.step}, not {step}")
        if not self.record or self.saved_at is None:
            self.record, self.step = self.values_of(self.model), 0
        if source is not None:
            self.counts["base="] += 1

    @staticmethod
    def values_of(model):
        return {name_of(v): np.array(v) for v in model.variables}

    def compare(self, model):
        found = self.values_of(model)
        if found.keys() != self.record.keys():
            raise WrongError(f"{found.keys() ^ self.record.keys()}")
        wrong = [path for path, value in self.record.items() if not same(found[path], value)]
        if wrong:
            raise WrongError(f"other values of {wrong}")

    # What happens.

    def train(self):
        """A step, as an optimizer and layers change variables: those that train, and state."""
        self.step += 1
        frozen_mean = not self.model.get_layer("mean").trainable
        trained = {v.path for v in self.model.trainable_variables}
        for v in self.model.variables:
            name = name_of(v)
            before = self.record[name]
            if name == "seed":
                new = before + np.ones_like(before)
            elif name in trained or ("moving" in name and not frozen_mean):
                new = before + values(self.step, v.path, v.shape)
            else:
                continue
            v.assign(new)
            self.record[name] = new

    def save(self):
        self.loop.save(self.step)
        self.saved_at = self.step, dict(self.record)

    def restart(self):
        self.loop.close()
        self.begin()

    def freeze(self):
        self.patterns = self.rng.choice(PATTERNS)
        ktd.freeze(self.model, self.patterns, exclude=["*lora*"] if self.has_lora else [])

    def lora(self):
        """LoRA comes while the run goes on; the next programs make it at once."""
        if self.has_lora:
            return
        self.has_lora = True
        with in_scope(self.strategy):
            self.with_lora(self.model)
        self.freeze()
        self.record = self.record | {
            path: value for path, value in self.values_of(self.model).items() if "lora" in path
        }
        # A checkpoint from before has other weights than the next program's.
        self.save()

    def assign_frozen(self):
        trained = {id(v) for v in self.model.trainable_variables}
        frozen = [v for v in self.model.weights if id(v) not in trained and v.dtype == "float32"]
        if frozen:
            v = self.rng.choice(frozen)
            new = self.record[v.path] + np.float32(1)
            v.assign(new)
            self.record[v.path] = new

    def read(self):
        """Another program, which has the base, loads the newest checkpoint."""
        if self.saved_at is None:
            return
        model, _ = self.made()
        ktd.restore(model, self.path)
        kept, self.record = self.record, self.saved_at[1]
        self.compare(model)
        self.record = kept

    def read_other_base(self):
        """Another program has other weights: an error if anything is left out, else its values."""
        if self.saved_at is None:
            return
        model, _ = self.made(base=1)
        before = self.values_of(model)
        try:
            report = ktd.restore(model, self.path)
        except ValueError as error:
            self.counts["refused"] += 1
            if "the model must have the values" not in str(error):
                raise
            if not all(same(value, before[p]) for p, value in self.values_of(model).items()):
                raise WrongError("an error has changed the model") from error
            return
        if report.base:
            raise WrongError(f"{report.base} of another base was taken for the same")
        kept, self.record = self.record, self.saved_at[1]
        self.compare(model)
        self.record = kept


def in_scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def name_of(variable):
    """Its path; Keras numbers the seed's."""
    return "seed" if "seed" in variable.path else variable.path


def same(one, other):
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def history(seed, counts, events=EVENTS):
    """What is wrong in a history, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        once.forget()
        one = History(random.Random(seed), pathlib.Path(folder), counts)
        try:
            one.go(events)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:600]} after {one.told}"
        finally:
            if one.loop is not None:
                one.loop.close()
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logger.propagate = False
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    wrong, began, counts = 0, time.monotonic(), collections.Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        words = history(seed, counts)
        wrong += bool(words)
        if words:
            print(f"WRONG with seed {seed}: {words}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"{arguments.histories} histories, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
