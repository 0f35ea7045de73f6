"""A disk that fails, or stops, at the n-th operation of saving checkpoints: all n.

    python tests/checkpoint/disk.py [--every 1]

What Python asks of the file system is counted: making, renaming, deleting, opening for writing
(the arrays themselves are written by TensorStore in C++, into a directory that has no name yet).
`fails`: the n-th raises, the next ones work. `stops`: nothing works from the n-th on, which leaves
the disk as a kill at that moment would. Afterwards each checkpoint that counts must load and have
its own values, the newest that was whole before must be there or have a successor, no half may be
left once a store was opened again, and a failure must have been said.
"""

import argparse
import builtins
import contextlib
import io
import logging
import os
import pathlib
import sys
import tempfile
import time

import jax.numpy as jnp
import numpy as np

from keras_tpu_dist.checkpoint.fingerprint import fingerprints
from keras_tpu_dist.checkpoint.keeping import Keep
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest, Saved
from keras_tpu_dist.checkpoint.names import Entry
from keras_tpu_dist.checkpoint.store import Store

CHANGES = ("mkdir", "rename", "replace", "rmdir", "unlink", "remove")
KEEP, MOST_S = 2, 60
# The newest two, and the best.
AT_END = [2, 6, 7]
RUN = "run7"


class Disk:
    """Counts what is asked of files below a directory, and fails from some operation on."""

    def __init__(self, root, fails_at=None, stops=False):
        self.root, self.fails_at, self.stops = str(root), fails_at, stops
        self.count, self.names = 0, []

    def asked(self, name, path):
        # Deleting a tree names files relative to an open directory.
        if isinstance(path, int) or not (name in ("rmdir", "unlink") or self._below(path)):
            return
        self.count += 1
        self.names.append(f"{name} {path}")
        if self.fails_at is None or self.count < self.fails_at:
            return
        if self.stops or self.count == self.fails_at:
            raise OSError(5, f"operation {self.count} fails", str(path))

    def _below(self, path):
        return os.fspath(path).startswith(self.root)

    @contextlib.contextmanager
    def watched(self):
        """Within it, operations are counted."""
        kept = {name: getattr(os, name) for name in CHANGES}
        opened = builtins.open

        def counting(name, stock):
            def asked(path, *args, **kwargs):
                self.asked(name, path)
                return stock(path, *args, **kwargs)

            return asked

        def opening(file, mode="r", *args, **kwargs):
            if any(letter in mode for letter in "wxa+"):
                self.asked("open", file)
            return opened(file, mode, *args, **kwargs)

        for name, stock in kept.items():
            setattr(os, name, counting(name, stock))
        builtins.open = io.open = opening
        try:
            yield self
        finally:
            builtins.open = io.open = opened
            for name, stock in kept.items():
                setattr(os, name, stock)


def described(step):
    array = jnp.full((4,), step, jnp.float32)
    entry = Entry("w", (4,), "float32", "")
    saved = Saved(entry, "weights_00000", fingerprints([array])[0])
    training = {"step": step, "epoch": 0, "done": step, "metrics": {}, "run": RUN}
    return {"weights_00000": array}, saved, Manifest({"weights": (saved,)}, training, {})


def work(root, whole):
    """Saves, judges and replaces; `whole` gets the steps that were whole when a call returned."""
    said = 0
    for asynchronous in (False, True):
        try:
            store = Store(root, keep=Keep(KEEP, ("loss", "min")), asynchronous=asynchronous)
        except CheckpointError:
            said += 1
            continue
        for step in (1, 2, 3, 3, 4) if not asynchronous else (5, 6, 7):
            try:
                arrays, _, manifest = described(step)
                store.save(step, arrays, lambda manifest=manifest: manifest)
                store.wait()
                whole.append(step)
                if step == 2:
                    store.judge(step, {"loss": 0.5})
            except CheckpointError:
                said += 1
        try:
            store.close()
        except CheckpointError:
            said += 1
    return said


class Records(logging.Handler):
    """Counts what is logged."""

    count = 0

    def emit(self, record):
        self.count += 1


def fault(disk):
    """What is wrong after the work on a disk, or an empty text."""
    whole, records = [], Records(logging.WARNING)
    logger = logging.getLogger("keras_tpu_dist")
    logger.addHandler(records)
    try:
        with disk.watched():
            said = work(disk.root, whole)
    finally:
        logger.removeHandler(records)
    return look_at(disk.root, whole, said + records.count)


def look_at(root, whole, said):
    """What is wrong with what is left, or an empty text."""
    try:
        store = Store(root, keep=Keep(KEEP))
    except CheckpointError as error:
        return f"cannot be opened: {error}"
    try:
        if store.steps != AT_END and not said:
            return f"{store.steps} are there, and nothing was said"
        names = sorted(path.name for path in pathlib.Path(root).iterdir())
        left = [name for name in names if not name.isdigit() and name != ".in_use"]
        if left:
            return f"left: {left}"
        if [int(n) for n in names if n.isdigit()] != store.steps:
            return f"{names} are there, {store.steps} count"
        if whole and (not store.steps or store.steps[-1] < max(whole)):
            return f"{whole} were whole, {store.steps} are there"
        for step in store.steps:
            _, saved, _ = described(step)
            assert store.manifest(step).training["step"] == step
            (found,) = store.load(step, [(saved, None, np.float32)])
            np.testing.assert_array_equal(found, np.full(4, step))
    except (CheckpointError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.close()
    return ""


def operations():
    """How many there are where none fails."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(pathlib.Path(folder, "run"))
        words = fault(disk)
        assert not words, words
    return disk.names


def fault_at(n, stops):
    """What is wrong after the n-th operation failed, or from it on all."""
    with tempfile.TemporaryDirectory() as folder:
        return fault(Disk(pathlib.Path(folder, "run"), n, stops))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of so many operations one")
    arguments = parser.parse_args()
    logging.getLogger("keras_tpu_dist").propagate = False
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return tried(arguments.every) > 0


def tried(every):
    """Fails and stops at every so many operations; how often that ended wrong."""
    names, wrong, began = operations(), 0, time.monotonic()
    for n in range(1, len(names) + 1, every):
        for stops in (False, True):
            one = time.monotonic()
            words = fault_at(n, stops)
            if time.monotonic() - one > MOST_S:
                words = f"took {time.monotonic() - one:.0f} s. {words}"
            wrong += bool(words)
            if words:
                what = "stops" if stops else "fails"
                print(f"WRONG {what} at {n} ({names[n - 1]}): {words[:600]}", flush=True)
    made = 2 * len(range(1, len(names) + 1, every))
    print(f"{len(names)} operations, {made} failures and stops, {wrong} wrong,", end=" ")
    print(f"{time.monotonic() - began:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
