"""Random iterations over distributed datasets, saved and restored, against plain lists.

    python tests/replica/iterations.py [--count 200] [--seed 0]

Each program has one to three datasets of several kinds and a `LoopCheckpoint` of them. It begins
iterations, within others too, takes batches one by one or several in a launch, leaves iterations,
saves, restores, within iterations too, and goes on in another process. Every batch must be the one
that a model of lists has next, and every restored number the saved one.
"""

import argparse
import itertools
import logging
import pathlib
import random
import sys
import tempfile
import time
from collections import Counter

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd

OPERATIONS = 40
NO_POSITION = object()


class Shuffled:
    """Batches in an order of each pass, which Python's random numbers draw with the first one."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        yield from random.sample(self.batches, len(self.batches))


class Unsized:
    """Batches whose number is not known."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches_of(length, first):
    return [np.full((2,), first + i, "float32") for i in range(length)]


KINDS = {
    "arrays": lambda strategy, batches: strategy.distribute_dataset(
        np.concatenate(batches), batch_size=2
    ),
    "list": lambda strategy, batches: strategy.distribute_dataset(batches),
    "unsized": lambda strategy, batches: strategy.distribute_dataset(Unsized(batches)),
    "shuffled": lambda strategy, batches: strategy.distribute_dataset(Shuffled(batches)),
    "generator": lambda strategy, batches: strategy.distribute_dataset(b for b in batches),
    "function": lambda strategy, batches: strategy.distribute_datasets_from_function(
        lambda context: [half for batch in batches for half in np.split(batch, 2)]
    ),
}


class Pass:
    """An iteration of the model: the batches of its epoch, and how many of them were taken."""

    def __init__(self):
        self.order, self.taken, self.numbers, self.ended = None, 0, None, False


class Source:
    """What a dataset should do, as plain lists."""

    def __init__(self, kind, length, first):
        self.kind, self.length, self.first = kind, length, first
        self.values = [first + i for i in range(length)]
        # Of a generator, there is one pass for all iterations.
        self.once, self.read = (self.anew() if kind == "generator" else None), False
        # Passes that were begun and have not ended, and whether they were left.
        self.under_way: list = []
        self.left: set = set()
        # Where the next batch of a pass, or of the next one, comes from after a restore.
        self.moved = None

    def anew(self):
        fresh = Pass()
        fresh.order = self.values
        return fresh

    def take(self, one, most, numbers):
        """The next values of a pass."""
        if self.once is not None:
            # A generator that is read for the first time here is read with the numbers of then.
            if self.once.numbers is None:
                self.once.numbers = numbers.getstate()
            elif not self.read:
                numbers.setstate(self.once.numbers)
            self.read = True
            return self._taken(self.once, most)
        if one.order is None:
            self.under_way = [each for each in self.under_way if each not in self.left]
            saved = NO_POSITION
            if self.moved is not None and (
                self.moved[1] in self.left or self.moved[1] in (None, one)
            ):
                saved, self.moved = self.moved[0], None
            if saved is NO_POSITION or saved is None:
                one.numbers, one.taken = numbers.getstate(), 0
            else:
                one.numbers, one.taken = saved
                numbers.setstate(one.numbers)
            one.order = self.values
            if self.kind == "shuffled":
                one.order = numbers.sample(self.values, self.length)
            self.under_way.append(one)
        found = self._taken(one, most)
        if one.ended:
            self.under_way = [each for each in self.under_way if each is not one]
        return found

    @staticmethod
    def _taken(one, most):
        found = one.order[one.taken : one.taken + most]
        one.taken += len(found)
        one.ended = one.ended or len(found) < most
        return found

    def place(self):
        """What a checkpoint should hold."""
        if self.once is not None:
            return (self.once.numbers, self.once.taken) if self.once.taken else None
        if self.moved is not None:
            return self.moved[0]
        return (self.under_way[0].numbers, self.under_way[0].taken) if self.under_way else None

    def can_go_to(self, place):
        return self.once is None or self.once.taken <= (0 if place is None else place[1])

    def go_to(self, place):
        if self.once is not None:
            if place is not None:
                self.once.taken = place[1]
                self.once.numbers = self.once.numbers if self.read else place[0]
            return
        living = [each for each in self.under_way if each not in self.left]
        self.moved = place, living[0] if living else None
        self.under_way = living[1:]
        if living:
            living[0].order, living[0].taken = None, 0


class Program:
    """One random program."""

    def __init__(self, seed, folder, strategy):
        self.draw, self.folder, self.strategy = random.Random(seed), folder, strategy
        self.numbers = random.Random(seed + 1)
        self.kinds = self.draw.choices(sorted(KINDS), k=self.draw.choice((1, 1, 2, 3)))
        self.lengths = [self.draw.randint(1, 7) for _ in self.kinds]
        self.saved: dict[int, tuple] = {}
        self.step, self.counts, self.saver = 0, Counter(), None
        self.begin()

    def begin(self):
        """What a process does first."""
        if self.saver is not None:
            self.saver.close()
        firsts = itertools.accumulate([0, *self.lengths[:-1]])
        self.sources = [
            Source(*each) for each in zip(self.kinds, self.lengths, firsts, strict=True)
        ]
        self.datasets = [
            KINDS[source.kind](self.strategy, batches_of(source.length, source.first))
            for source in self.sources
        ]
        # Iterations by dataset: the model's, and the real one.
        self.running: list = [[] for _ in self.sources]
        with self.strategy.scope():
            self.variable = keras.Variable(0.0, name="taken")
        self.saver = ktd.LoopCheckpoint(self.folder, self.variable, *self.datasets, keep=None)

    def run(self):
        random.setstate(self.numbers.getstate())
        for _ in range(OPERATIONS):
            ways = [self.take] * 8 + [self.nest, self.leave, self.save, self.save]
            ways += [self.restore, self.other_process]
            self.draw.choice(ways)()
        self.running.clear()
        self.saver.close()
        return self.counts

    def take(self):
        i = self.draw.randrange(len(self.sources))
        if not self.running[i]:
            self.running[i].append((Pass(), iter(self.datasets[i])))
        one, real = self.draw.choice(self.running[i])
        most = self.draw.choice((1, 1, 1, 2, 3))
        expected = [] if one.ended else self.sources[i].take(one, most, self.numbers)
        found = list(itertools.islice(self.of_launch(real, most), len(expected) + 1))
        if self.sources[i].kind == "shuffled":
            # Reading ahead draws nothing: the order is drawn with the first batch.
            check(random.getstate() == self.numbers.getstate(), "other random numbers")
        check(found == expected, f"took {found} for {expected} of {self.sources[i].kind}")
        self.variable.assign(self.variable + len(found))
        self.counts["batches"] += len(found)
        if len(expected) < most:
            self.running[i] = [each for each in self.running[i] if each[0] is not one]

    def of_launch(self, real, most):
        if most == 1:
            batch = next(real, None)
            return iter(() if batch is None else (float(np.asarray(batch.values[0]).ravel()[0]),))
        try:
            rows = self.strategy.run(of_batch, (real,), steps=most, outputs="all")
        except StopIteration:
            return iter(())
        return iter([float(v) for v in np.asarray(rows.values[0]).ravel()])

    def nest(self):
        i = self.draw.randrange(len(self.sources))
        if len(self.running[i]) < 3:
            self.running[i].append((Pass(), iter(self.datasets[i])))
            self.counts["begun within another"] += len(self.running[i]) > 1

    def leave(self):
        i = self.draw.randrange(len(self.sources))
        if self.running[i]:
            one, _ = self.running[i].pop(self.draw.randrange(len(self.running[i])))
            self.sources[i].left.add(one)
            self.counts["left"] += 1

    def save(self):
        self.step += 1
        places = [source.place() for source in self.sources]
        state = float(self.variable), places, self.numbers.getstate()
        self.saved[self.step] = state
        self.saver.save(self.step, taken=state[0])
        self.counts["saved"] += 1

    def restore(self):
        if not self.saved:
            check(self.saver.restore() == {}, "restored nothing that was saved")
            return
        taken, places, numbers = self.saved[self.step]
        pairs = list(zip(self.sources, places, strict=True))
        before = float(self.variable)
        if not all(source.can_go_to(place) for source, place in pairs):
            try:
                self.saver.restore()
            except ValueError as error:
                check("cannot go back" in str(error), str(error))
            else:
                check(False, "a generator went back")
            check(float(self.variable) == before, "an error changed a variable")
            self.counts["refused"] += 1
            return
        noted = self.saver.restore()
        check(noted == {"step": self.step, "taken": taken}, f"restored {noted}")
        check(float(self.variable) == taken, "another value")
        for source, place in pairs:
            source.go_to(place)
            # Before the first batch, random numbers are those of the moment.
            if place is None:
                self.numbers.setstate(numbers)
        within = any(self.running)
        self.counts["restored within an iteration" if within else "restored between"] += 1

    def other_process(self):
        if self.draw.random() < 0.5:
            return
        self.begin()
        self.numbers.seed(self.draw.random())
        random.setstate(self.numbers.getstate())
        self.counts["other processes"] += 1
        if self.saved:
            self.restore()


def of_batch(batch):
    return batch[:1]


def check(true, words):
    if not true:
        raise AssertionError(words)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    counts, wrong, start = Counter(), 0, time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        with tempfile.TemporaryDirectory() as folder:
            program = None
            try:
                program = Program(seed, pathlib.Path(folder) / "loop", strategy)
                counts += program.run()
            except Exception as error:
                wrong += 1
                kinds = None if program is None else program.kinds
                print(f"WRONG {seed} {kinds}: {type(error).__name__}: {error}", flush=True)
                if program is not None:
                    program.saver.close()
    print(
        f"{options.count} programs, {wrong} wrong, {time.perf_counter() - start:.0f} s:",
        ", ".join(f"{number} {name}" for name, number in sorted(counts.items())),
    )
    return wrong


if __name__ == "__main__":
    logging.getLogger("keras_tpu_dist").setLevel(logging.ERROR)
    sys.exit(bool(main()))
