"""Seconds and host memory of saving and restoring a model split over 8 simulated devices.

    python benchmarks/checkpoint.py [--megabytes 1024]

One process saves, another restores. Memory is the peak of the process above its memory before; the
copy of the model on its simulated devices, which is host memory too, exists already. `stalled` is
the time that the training thread waits for a save, compared with a synchronous save.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

import keras_tpu_dist as ktd


def model_of(megabytes):
    import keras

    side = 4096
    layers = max(1, round(megabytes * 2**20 / (side * side * 4)))
    with ktd.TPUStrategy({"fsdp": 8}, "fsdp").scope():
        model = keras.Sequential(
            [
                keras.Input((side,)),
                *(keras.layers.Dense(side, use_bias=False) for _ in range(layers)),
            ]
        )
    return model


class Peak:
    """The peak memory of this process above its memory before, sampled every millisecond."""

    def __enter__(self):
        self._before = self.bytes = self._now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ends.set()
        self._thread.join()
        self.above_gb = (self.bytes - self._before) / 1e9

    def _watch(self):
        while not self._ends.wait(0.001):
            self.bytes = max(self.bytes, self._now())

    def _now(self):
        # What the process itself holds, not the files that the kernel keeps for it.
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024


def save(directory, megabytes, asynchronous):
    from keras_tpu_dist.checkpoint.snapshot import snapshot
    from keras_tpu_dist.checkpoint.store import Store

    model = model_of(megabytes)
    snapshot(model, {"run": "benchmark"}, {})[1]()  # compiles
    store = Store(directory, asynchronous=asynchronous)
    with Peak() as peak:
        began = time.perf_counter()
        store.save(1, *snapshot(model, {"run": "benchmark"}, {}))
        stalled = time.perf_counter() - began
        store.wait()
        seconds = time.perf_counter() - began
    store.close()
    return {"stalled_s": stalled, "seconds": seconds, "above_gb": peak.above_gb}


def restore(directory, megabytes):
    model = model_of(megabytes)
    with Peak() as peak:
        began = time.perf_counter()
        ktd.restore(model, directory)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "above_gb": peak.above_gb}


def in_a_process(*words):
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--part", choices=("save", "save-async", "restore"), help="used internally")
    parser.add_argument("--directory", help="used internally")
    arguments = parser.parse_args()
    if arguments.part:
        ktd.simulate(8)
        where = arguments.directory, arguments.megabytes
        found = (
            restore(*where)
            if arguments.part == "restore"
            else save(*where, asynchronous=arguments.part == "save-async")
        )
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        size = ("--megabytes", arguments.megabytes)
        parts = {}
        for part in ("save", "save-async", "restore"):
            where = os.path.join(folder, "a" if part == "save" else "b")
            parts[part] = in_a_process("--part", part, "--directory", where, *size)
    print(f"{arguments.megabytes} MB of weights over 8 devices")
    print(f"{'':14} {'seconds':>8} {'GB/s':>8} {'stalled':>8} {'GB above':>9}")
    for part, found in parts.items():
        stalled = f"{found['stalled_s']:8.2f}" if "stalled_s" in found else " " * 8
        rate = f"{arguments.megabytes * 2**20 / 1e9 / found['seconds']:8.2f}"
        print(f"{part:14} {found['seconds']:8.2f} {rate} {stalled} {found['above_gb']:9.2f}")
    share = parts["save-async"]["stalled_s"] / parts["save"]["seconds"]
    print(f"an asynchronous save stalls training for {share:.0%} of a synchronous one")


if __name__ == "__main__":
    main()
