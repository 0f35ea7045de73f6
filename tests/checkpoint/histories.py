"""Random histories of a folder of checkpoints of loops, against a list of what should lie there.

    python tests/checkpoint/histories.py [--histories 300] [--seed 0]

Events: a program begins (another build of the models: other numbers in Keras's names, built in
another order, with heads of other names), saves, restores the newest or an older one, ends, is
dropped without an end, or crashes (the n-th operation of the disk fails, once or from there on:
`disk.py`); a second writer comes; a step is moved to another disk, loses its manifest, or is
renamed; another run's checkpoint is copied into the folder. After each event the folder must hold
what the list has, each object must have its own values, and what is lost must have been said.
"""

import argparse
import collections
import contextlib
import gc
import json
import logging
import pathlib
import random
import shutil
import sys
import tempfile
import time

import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.keeping import Lock
from keras_tpu_dist.common import once

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from disk import Disk

EVENTS, MOST_OPERATIONS = 16, 40
logger = logging.getLogger("keras_tpu_dist")


class Plain:
    """What should lie in the folder: the steps in the order of writing, and what was set aside."""

    def __init__(self):
        self.top: list[tuple[int, int, str]] = []  # number, step, run
        self.aside: dict[tuple[str, int], int] = {}

    def save(self, number, step, run, keep):
        own = []
        for each in self.top:
            if each[2] != run:
                self.move(each)
            elif each[1] != step:
                own.append(each)
        own.append((number, step, run))
        self.top = own if keep is None else own[-keep:]

    def back_to(self, step):
        at = [each[1] for each in self.top].index(step)
        for each in self.top[at + 1 :]:
            self.move(each)
        del self.top[at + 1 :]

    def move(self, each):
        number, step, run = each
        self.aside[run, step] = number

    def by_step(self):
        return {step: number for number, step, _ in self.top}


class Folder:
    """What does lie there, read without the code that is tested."""

    def __init__(self, path):
        self.path = path

    def checkpoints(self, within):
        found = {}
        for path in within.iterdir() if within.is_dir() else ():
            if path.name.isdigit() and (path / "manifest/metadata").exists():
                training = json.loads((path / "manifest/metadata").read_text())["training"]
                found[int(path.name)] = training["loop"]["n"], training["run"]
        return found

    @property
    def top(self):
        return self.checkpoints(self.path)

    @property
    def aside(self):
        runs = (self.path / "set_aside").glob("*")
        return {
            (run.name, step): number
            for run in runs
            for step, (number, _) in self.checkpoints(run).items()
        }

    @property
    def rest(self):
        known = (".in_use", "set_aside", *map(str, self.top))
        return sorted(path.name for path in self.path.iterdir() if path.name not in known)


class Objects:
    """The objects of one build of the program."""

    def __init__(self, rng, first_task=1):
        if rng.random() < 0.5:
            keras.utils.clear_session(free_memory=False)
        for _ in range(rng.randrange(3)):
            keras.layers.Dense(1)

        def model():
            layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
            layers += [keras.layers.Dense(1, name=f"task_{first_task + i}") for i in range(2)]
            return keras.Sequential([keras.Input((1,)), *layers])

        def sums():
            return keras.metrics.AUC(num_thresholds=3)

        made = [None] * 4
        makers = list(enumerate((model, model, sums, sums)))
        rng.shuffle(makers)
        for at, make in makers:
            made[at] = make()
        self.given = [*made, keras.Variable(0.0, name="count")]

    def variables(self):
        each = [[one] if isinstance(one, keras.Variable) else one.variables for one in self.given]
        return [v for variables in each for v in variables]

    def set(self, number):
        for i, v in enumerate(self.variables()):
            v.assign(np.full(v.shape, 1000 * number + i))

    def fault(self, number):
        for i, v in enumerate(self.variables()):
            if not np.array_equal(v.numpy(), np.full(v.shape, 1000 * number + i)):
                return f"{v.path} has {v.numpy()}, not {1000 * number + i}"
        return ""


class Records(logging.Handler):
    """The text of what is logged."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record):
        self.text += record.getMessage() + "\n"


class WrongError(AssertionError):
    """What is in the folder is not what should be there."""


def expect(right, *words):
    if not right:
        raise WrongError(" ".join(map(str, words)))


class History:
    """One folder, and the programs that use it one after the other."""

    def __init__(self, rng, path, counts):
        self.rng, self.counts = rng, counts
        self.path, self.folder, self.plain = path / "run", Folder(path / "run"), Plain()
        self.donor, self.disk = path / "donor", path / "disk"
        self.disk.mkdir()
        self.number, self.told = 0, []
        self.saved = self.run = self.objects = None
        with ktd.LoopCheckpoint(self.donor, *Objects(rng).given) as donor:
            donor.save(7, n=-1)
        self.donor_run = Folder(self.donor).top[7][1]

    def go(self, events):
        self.begin()
        for _ in range(events):
            kinds = {
                self.save: 10,
                self.restore: 4,
                self.back: 3,
                self.restart: 4,
                self.crash: 3,
                self.wrong_build: 1,
                self.second_writer: 1,
                self.missing: 1,
                self.move_to_disk: 1,
                self.lose_manifest: 1,
                self.rename: 1,
                self.merge: 1,
            }
            event = self.rng.choices([*kinds], [*kinds.values()])[0]
            self.told.append(event.__name__)
            self.counts[event.__name__] += 1
            records = Records()
            logger.addHandler(records)
            once.forget()
            try:
                event(records)
            finally:
                logger.removeHandler(records)
            self.compare()
        self.restart(None)
        self.restore(None)
        # The newest first, because newer ones are set aside.
        for run, step in sorted(self.plain.aside, key=self.plain.aside.get, reverse=True):
            self.read_aside(run, step)

    def compare(self):
        if not self.path.is_dir():
            expect(not self.plain.top, "the folder is gone")
            return
        if self.saved is not None:
            self.saved._store.wait()
        found = {step: number for step, (number, _) in self.folder.top.items()}
        expect(found == self.plain.by_step(), "there is", found, "not", self.plain.top)
        expect(self.folder.aside == self.plain.aside, self.folder.aside, "is aside")
        expect(not self.folder.rest, "left:", self.folder.rest)
        if self.saved is not None:
            order = [step for _, step, _ in self.plain.top]
            expect(self.saved.steps == order, "in the order", self.saved.steps, "not", order)

    # A program.

    def begin(self, first_task=1):
        self.keep = self.rng.choice([1, 2, 2, 3, None])
        self.objects, self.run = Objects(self.rng, first_task), None
        self.saved = ktd.LoopCheckpoint(
            self.path,
            *self.objects.given,
            keep=self.keep,
            asynchronous=self.rng.random() < 0.3,
        )

    def resume(self):
        """As most programs do, and some forget."""
        if self.rng.random() < 0.75:
            self.restore(None)

    def end(self):
        how = self.rng.choice(["close", "drop", "stay"])
        old, self.saved = self.saved, None
        if how == "close":
            old.close()
        elif how == "stay":
            return old  # as a name of a cell that is run again
        del old
        gc.collect()
        return None

    def restart(self, records):
        old = self.end()
        self.begin()
        if old is not None:
            with contextlib.suppress(ktd.CheckpointError):
                old.save(1, n=0)
                raise WrongError("an object saves that another one has replaced")
            expect(records is None or "was not closed" in records.text, "nothing said of the old")
        self.resume()

    def save(self, records):
        self.number += 1
        self.objects.set(self.number)
        step = self.rng.choice([*range(0, 60, 5), *self.plain.by_step()])
        others = [each for each in self.plain.top if self.run != each[2]]
        self.saved.save(step, n=self.number)
        self.saved._store.wait()
        self.note_saved(step)
        if others:
            expect("set aside" in records.text, "nothing said of", others)

    def note_saved(self, step):
        number, run = self.folder.top[step]
        expect(number == self.number, "saved", number, "not", self.number)
        known = {each[2] for each in self.plain.top} | {run for run, _ in self.plain.aside}
        expect(run == self.run if self.run else run not in known, "run", run, "not", self.run)
        self.run = run
        self.plain.save(number, step, run, self.keep)

    def newest(self):
        return self.plain.top[-1] if self.plain.top else None

    def restore(self, records):
        before, newest = self.number_here(), self.newest()
        noted = self.saved.restore()
        self.check(noted, newest, before)
        several = len({run for _, _, run in self.plain.top}) > 1
        if several and records is not None:
            expect("checkpoints of several runs" in records.text, "nothing said of several runs")

    def number_here(self):
        return float(self.objects.given[-1].numpy())

    def check(self, noted, expected, before):
        if expected is None:
            expect(noted == {} and before == self.number_here(), "restored", noted, "of nothing")
            return
        number, step, run = expected
        expect(noted == {"step": step, "n": number}, "restored", noted, "not", expected)
        if number >= 0:
            words = self.objects.fault(number)
            expect(not words, words)
        self.run = run

    def back(self, records):
        if not self.plain.top:
            return
        at = self.rng.randrange(len(self.plain.top))
        expected = self.plain.top[at]
        noted = self.saved.restore(step=expected[1])
        self.check(noted, expected, None)
        if at + 1 < len(self.plain.top):
            expect("are set aside" in records.text, "nothing said of later ones")
        self.plain.back_to(expected[1])

    def missing(self, records):
        try:
            self.saved.restore(step=99)
        except ktd.CheckpointError as error:
            expect("There is no checkpoint 99" in str(error), error)
            return
        raise WrongError("restored what is not there")

    def wrong_build(self, records):
        self.end()
        self.begin(first_task=2)
        before = [v.numpy() for v in self.objects.variables()]
        try:
            noted = self.saved.restore()
        except ValueError as error:
            expect("missing" in str(error) and "task_3" in str(error), error)
            after = [v.numpy() for v in self.objects.variables()]
            expect(all(map(np.array_equal, before, after)), "an error has changed the values")
        else:
            expect(not self.plain.top and noted == {}, "other heads were loaded")
        self.end()
        self.begin()
        self.resume()

    def second_writer(self, records):
        self.saved.close()
        lock = Lock(str(self.path))  # as another process would
        try:
            ktd.LoopCheckpoint(self.path, *self.objects.given)
            raise WrongError("two write at once")
        except ktd.CheckpointError as error:
            expect("Only one fit at a time" in str(error), error)
        finally:
            lock.release()
        self.begin()
        with self.saved:
            try:
                ktd.LoopCheckpoint(self.path, *self.objects.given)
                raise WrongError("two write at once")
            except ktd.CheckpointError as error:
                expect("this process" in str(error), error)
        self.begin()
        self.resume()

    # What a user or another program does to the folder.

    def some(self):
        return self.rng.choice(self.plain.top) if self.plain.top else None

    def move_to_disk(self, records):
        one = self.some()
        path = self.path / str(one[1]) if one else None
        if path is None or path.is_symlink():
            return
        path.rename(self.disk / str(one[0]))
        path.symlink_to(self.disk / str(one[0]))

    def without(self, one, hide, show, words, records):
        """Restores while one is hidden, which must be said."""
        hide()
        left = [each for each in self.plain.top if each != one]
        try:
            noted = self.saved.restore()
            expect(words in records.text, f"nothing said of {one}:", records.text)
            self.check(noted, left[-1] if left else None, self.number_here())
        except ktd.CheckpointError as error:
            expect(not left and words in str(error), error)
        finally:
            show()

    def lose_manifest(self, records):
        if one := self.newest():
            manifest, kept = self.path / str(one[1]) / "manifest", self.disk / "manifest"
            self.without(
                one,
                lambda: shutil.move(manifest, kept),
                lambda: shutil.move(kept, manifest),
                f"checkpoint {one[1]} is skipped",
                records,
            )

    def rename(self, records):
        if one := self.newest():
            path, other = self.path / str(one[1]), self.path / "98"
            self.without(
                one,
                lambda: path.rename(other),
                lambda: other.rename(path),
                "its directory was renamed",
                records,
            )

    def merge(self, records):
        if 7 not in self.plain.by_step():
            shutil.copytree(self.donor / "7", self.path / "7")
            self.plain.top.insert(0, (-1, 7, self.donor_run))

    # A crash.

    def crash(self, records):
        """The n-th operation fails, once or from there on; then the program is gone."""
        n, stops = self.rng.randrange(1, MOST_OPERATIONS), self.rng.random() < 0.5
        disk = Disk(self.path, n, stops)
        before = list(self.plain.top)
        back = before and self.rng.random() < 0.3
        step = self.rng.choice(before)[1] if back else self.rng.choice(range(0, 60, 5))
        self.number += not back
        self.objects.set(self.number)
        try:
            with disk.watched():
                if back:
                    self.saved.restore(step=step)
                else:
                    self.saved.save(step, n=self.number)
                    self.saved._store.wait()
        except ktd.CheckpointError:
            failed = True
        else:
            failed = False
        self.counts["failed" if failed else "did not fail"] += 1
        self.told.append(f"{'back' if back else 'save'} {step} n={n} stops={stops} failed={failed}")
        if failed:
            gone, self.saved = self.saved, None
            del gone
            gc.collect()
            keep = self.keep
            self.begin()
            self.sync(before, step, back, keep)
            self.resume()
        elif back:
            self.plain.back_to(step)
            self.run = self.newest()[2]
        else:
            self.note_saved(step)

    def sync(self, before, step, back, keep):
        """After a failure: each is where it was or where it should be, and nothing was lost."""
        found = {(number, at): own for at, (number, own) in self.folder.top.items()}
        aside = self.folder.aside
        after = Plain()
        after.top, after.aside = list(before), dict(self.plain.aside)
        new = None
        if back:
            after.back_to(step)
        elif (self.number, step) in found:
            new = (self.number, step, found[self.number, step])
            after.save(*new, keep)
        for number, at, own in before:
            here = (number, at) in found
            moved = aside.get((own, at)) == number
            stays = (number, at, own) in after.top
            to_move = after.aside.get((own, at)) == number
            expect(here or not stays, f"{at} ({number}) is lost")
            expect(here or moved or not to_move, f"{at} ({number}) is lost on the way aside")
            # A link is made anew before the old one goes; a copy may have come once more.
            again = self.plain.aside.get((own, at)) == number
            twice = here and moved and not again and not (self.path / str(at)).is_symlink()
            expect(not twice, f"{at} ({number}) is there twice")
        for place, number in aside.items():
            right = {self.plain.aside.get(place), after.aside.get(place)}
            expect(number in right, f"{place} aside is {number}, of {right}")
        for place in self.plain.aside:
            # The new one comes at once after the old one is gone.
            expect(place in aside or place in after.aside, f"{place} is lost")
        self.plain.top = [each for each in [*before, new] if each and each[:2] in found]
        self.plain.aside = aside

    def read_aside(self, run, step):
        objects = Objects(self.rng)
        number = self.plain.aside[run, step]
        copied = self.disk / "copied" / run
        if not copied.is_dir():
            shutil.copytree(self.path / "set_aside" / run, copied, symlinks=True)
        with ktd.LoopCheckpoint(copied, *objects.given) as saved:
            noted = saved.restore(step=step)
        expect(noted == {"step": step, "n": number}, "aside", noted, "not", step, number)
        if number >= 0:
            expect(not objects.fault(number), objects.fault(number))


def history(seed, counts, events=EVENTS):
    """What is wrong in a history, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        one = None
        try:
            one = History(random.Random(seed), pathlib.Path(folder), counts)
            one.go(events)
        except Exception as error:
            told = "" if one is None else one.told
            return f"{type(error).__name__}: {str(error)[:600]} after {told}"
        finally:
            if one is not None and one.saved is not None:
                with contextlib.suppress(ktd.CheckpointError):
                    one.saved.close()
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=300)
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
