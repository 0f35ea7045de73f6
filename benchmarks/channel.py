"""The cost of the control plane alone: N clients of one JAX coordinator, without devices.

    python benchmarks/channel.py [--processes 16 64 256 1024]

Each client is a thread with its own `Channel`; they share one connection to a coordinator in this
process. Prints the requests and the bytes of keys and values of all clients together, the seconds
until the last one is done, and how both grow with N (the exponent: 1 is linear). Beats are the
requests of the watch in one round of all processes.
"""

import argparse
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import keras_tpu_dist as ktd

ktd.simulate(1)

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.processes import agreement
from keras_tpu_dist.processes.assigned import parts_differ
from keras_tpu_dist.processes.channel import Channel
from keras_tpu_dist.processes.watch import Watch


class Counted:
    """A client of the coordinator that counts its requests and the bytes in both directions."""

    def __init__(self, client):
        self._client, self._lock = client, threading.Lock()
        self.requests = self.bytes = 0

    def _count(self, *texts):
        with self._lock:
            self.requests += 1
            self.bytes += sum(map(len, texts))

    def key_value_set(self, key, value, allow_overwrite=False):
        self._count(key, value)
        self._client.key_value_set(key, value, allow_overwrite=allow_overwrite)

    def key_value_dir_get(self, prefix):
        found = self._client.key_value_dir_get(prefix)
        self._count(prefix, *(text for pair in found for text in pair))
        return found

    def key_value_delete(self, key):
        self._count(key)
        self._client.key_value_delete(key)

    def blocking_key_value_get(self, key, timeout_ms):
        self._count(key)
        found = self._client.blocking_key_value_get(key, timeout_ms)
        self._count(found)
        self.requests -= 1
        return found


@dataclass(frozen=True)
class Case:
    """An operation that all processes perform.

    Args:
        name: Its name.
        work: A function of a channel, the watch of its process, and the process's number.
    """

    name: str
    work: Callable


def value_of(number, size, same):
    """Plain data of about this many bytes."""
    return {f"weight {i}": 0 if same else number for i in range(max(1, size // 16))}


def start_of_fit(variables=2000, shards=4, shapes=20):
    """The messages about weights at the start of a fit, by the part that each process holds."""
    layouts = [f"({n + 1}, 512) float32 ('model',)" for n in range(shapes)]
    named = [f"weight{n} {layouts[n % shapes]}" for n in range(variables)]
    return [
        agreement._marks(named, [{f"part {shard}": 1000 * shard + n} for n in range(variables)])
        for shard in range(shards)
    ]


def rows_of_batches(number):
    """The messages about the next 16 batches, of which the last is smaller in some processes."""
    batches = [{"rows": 32, "leaves": [[[512], "int32"], [[], "int32"]]} for _ in range(16)]
    batches[-1] = {**batches[-1], "rows": 32 - number % 4}
    return {"ended": False, "batches": batches, "checksums": []}


def cases():
    """The measured operations."""
    marks = start_of_fit()

    def agreed(size, same, reduce=None):
        def work(channel, watch, number):
            channel.agree("a call", "", value_of(number, size, same), reduce=reduce)

        return work

    return [
        Case("agreement, empty message", lambda c, w, i: c.agree("a call", "")),
        Case("agreement, 1 kB, the same", agreed(1024, True)),
        Case("agreement, 20 kB, the same", agreed(20480, True)),
        Case("agreement, 20 kB, one verdict", agreed(20480, False, reduce=lambda every: True)),
        Case("agreement, 16 bytes of each", agreed(16, False)),
        Case(
            "start of a fit, 2,000 x 4 shards",
            lambda c, w, i: c.agree("start", "", marks[i % 4], reduce=parts_differ),
        ),
        Case(
            "16 steps of uneven input",
            lambda c, w, i: c.agree("rows", "", rows_of_batches(i)),
        ),
        Case("a beat of the watch", lambda c, w, i: w._look()),
    ]


def measured(client, number, case):
    """Requests, bytes and seconds of a case with a number of processes, after a warm-up round."""
    counted = Counted(client)
    channels = [Channel(counted, i, number) for i in range(number)]
    watches = [Watch(channel, i, number, 60.0) for i, channel in enumerate(channels)]
    with ThreadPoolExecutor(number) as pool:

        def round_of(i):
            case.work(channels[i], watches[i], i)

        list(pool.map(round_of, range(number)))
        counted.requests = counted.bytes = 0
        began = time.monotonic()
        list(pool.map(round_of, range(number)))
        seconds = time.monotonic() - began
    client.key_value_delete("keras_tpu_dist")
    return counted.requests, counted.bytes, seconds


def exponent(numbers, amounts):
    """The exponent of growth between the first and the last amount."""
    return math.log(amounts[-1] / amounts[0]) / math.log(numbers[-1] / numbers[0])


def main():
    """Prints a table."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--processes", type=int, nargs="+", default=[16, 64, 256, 1024])
    given = arguments.parse_args()
    logging.getLogger("keras_tpu_dist").setLevel(logging.ERROR)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    jax.distributed.initialize(address, 1, 0)
    client = _keras.coordination_client()
    print(f"{'':32} {'N':>5} {'requests':>9} {'kB':>10} {'seconds':>8}")
    for case in cases():
        rows = [(n, *measured(client, n, case)) for n in given.processes]
        for n, requests, size, seconds in rows:
            print(f"{case.name:32} {n:5} {requests:9} {size / 1e3:10.1f} {seconds:8.2f}")
        numbers, requests, sizes, _ = zip(*rows, strict=True)
        if len(rows) > 1:
            print(
                f"{'':32} grows with N to the power of {exponent(numbers, requests):.2f} in "
                f"requests, {exponent(numbers, sizes):.2f} in bytes"
            )


if __name__ == "__main__":
    main()
