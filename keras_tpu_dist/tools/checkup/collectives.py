"""Tests every collective over every mesh axis, with values that identify their sender."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.tools.checkup.bench import Bench, Job, rows_of, spread
from keras_tpu_dist.tools.checkup.report import CheckPart, Problem, numbered

SUMS, MOVES = ("all-reduce", "reduce-scatter"), ("all-gather", "all-to-all", "permute")
# The number of values per piece, so that links carry more than one packet.
_WIDTH = 256


def collectives(bench: Bench) -> CheckPart:
    """Checks that every device receives the right pieces from the right devices.

    Args:
        bench: The check's shared state.
    """
    axes = [name for name, size in bench.mesh.shape.items() if size > 1]
    if not axes:
        return CheckPart("collectives", left_out="one device exchanges nothing")
    problems: list[Problem] = []
    for axis in axes:
        for kind in (*SUMS, *MOVES):
            problems += _over(bench, kind, axis)
    kinds = ", ".join((*SUMS, *MOVES))
    end = "" if problems else ": each part comes from its sender"
    return CheckPart("collectives", f"{kinds} over {', '.join(axes)}{end}", tuple(problems))


class Wrong(NamedTuple):
    """A difference between the values that a device got and those it should get.

    Args:
        sender: The id of the device whose values are missing or wrong, if known.
        words: What the device got.
        itself: Whether the receiving device itself may have changed the values.
    """

    sender: int | None
    words: str
    itself: bool = False


def _over(bench: Bench, kind: str, axis: str) -> list[Problem]:
    mesh = bench.mesh
    size, positions = mesh.shape[axis], _peers(mesh, axis)
    sent = spread(mesh, lambda i: _sent(kind, i, size, mesh.size))
    job = Job(kind, axis, "float32" if kind in SUMS else "int32")
    got = rows_of(bench.launches.run(job, _program(kind, mesh, axis), sent))
    ids = [device.id for device in bench.devices]
    mine = [
        [number, *wrong]
        for position, number in enumerate(ids)
        if number in got
        for wrong in _wrong(kind, got[number][0], positions[position], position, ids)
    ]
    every = bench.agreed(str(job), mine, lambda of_all: [item for one in of_all for item in one])
    by_wrong: dict[Wrong, list[int]] = defaultdict(list)
    for number, *wrong in every:
        by_wrong[Wrong(*wrong)].append(number)
    return [_problem(job, wrong, numbers) for wrong, numbers in by_wrong.items()]


def _problem(job: Job, wrong: Wrong, numbers: list[int]) -> Problem:
    # If only one device has wrong values, it may have changed them itself.
    itself = wrong.sender is None or (wrong.itself and len(numbers) == 1)
    senders = [] if wrong.sender is None else [wrong.sender]
    return Problem(
        f"{job}: {numbered(numbers)} {wrong.words}",
        "Devices do not receive what others send: gradients and activations over this axis are "
        "wrong.",
        "If you chose the order of the devices, check it. If it is right, a link or a chip is "
        "faulty: ask your cloud provider for another slice.",
        tuple(sorted({*senders, *(numbers if itself else [])})),
        job.axis,
    )


def _peers(mesh: Mesh, axis: str) -> list[list[int]]:
    """For every position in the mesh, the positions along an axis through it, in order."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    groups = np.moveaxis(places, mesh.axis_names.index(axis), -1)
    of = {int(i): list(map(int, g)) for g in groups.reshape(-1, mesh.shape[axis]) for i in g}
    return [of[i] for i in range(mesh.size)]


def _sent(kind: str, position: int, size: int, number: int) -> np.ndarray:
    """The `size` pieces that a device sends.

    For sums, a device contributes 1, 2, ... for its pieces, in a column of its own. Other
    collectives move the number of the sender and piece; no piece has the number 0.
    """
    if kind in SUMS:
        row = np.zeros((size, max(number, _WIDTH)), np.float32)
        row[:, position] = np.arange(1, size + 1)
        return row
    pieces = position * size + np.arange(size, dtype=np.int32) + 1
    return np.broadcast_to(pieces[:, None], (size, _WIDTH)).copy()


def _program(kind: str, mesh: Mesh, axis: str) -> Any:
    size = mesh.shape[axis]
    around = [(i, (i + 1) % size) for i in range(size)]

    def exchange(x):
        x = x[0]
        if kind == "all-reduce":
            return lax.psum(x, axis)[None]
        if kind == "reduce-scatter":
            return lax.psum_scatter(x, axis)[None]
        if kind == "all-gather":
            return lax.all_gather(x[0], axis)[None]
        if kind == "all-to-all":
            return lax.all_to_all(x, axis, 0, 0)[None]
        return lax.ppermute(x[0], axis, around)[None]

    spec = PartitionSpec(mesh.axis_names)
    exchanged = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(exchanged)


def _wrong(
    kind: str, row: np.ndarray, peers: list[int], position: int, ids: list[int]
) -> Iterator[Wrong]:
    """The differences of the device at a position."""
    size, place = len(peers), peers.index(position)
    if kind in SUMS:
        pieces = range(1, size + 1) if kind == "all-reduce" else [place + 1]
        yield from _of_sum(np.atleast_2d(row), pieces, peers, ids)
        return
    if kind == "permute":
        expected = [peers[place - 1] * size + 1]
    elif kind == "all-gather":
        expected = [peer * size + 1 for peer in peers]
    else:
        expected = [peer * size + place + 1 for peer in peers]
    for value, values in zip(expected, np.atleast_2d(row), strict=True):
        other = values[values != value]
        if other.size:
            yield _of_move(int(other[0]), value, size, ids)


def _of_sum(
    rows: np.ndarray, pieces: Sequence[int], peers: list[int], ids: list[int]
) -> Iterator[Wrong]:
    expected = np.zeros_like(rows)
    expected[:, peers] = np.asarray(pieces)[:, None]
    for slot in sorted({int(n) for n in np.nonzero(rows != expected)[1]}):
        if slot >= len(ids):
            yield Wrong(None, "got values that no device sent")
            continue
        row = int(np.nonzero(rows[:, slot] != expected[:, slot])[0][0])
        found, wanted, who = rows[row, slot], expected[row, slot], ids[slot]
        if wanted == 0:
            words = f"got {found:g} from device {who}, which is not on this axis"
            yield Wrong(who, words, itself=True)
        elif found == 0:
            yield Wrong(who, f"lacks the part of device {who}")
        elif found == 2 * wanted:
            yield Wrong(who, f"got the part of device {who} twice")
        else:
            words = f"got {found:g} instead of {wanted:g} from device {who}"
            yield Wrong(who, words, itself=True)


def _of_move(found: int, expected: int, size: int, ids: list[int]) -> Wrong:
    wanted, piece = ids[(expected - 1) // size], (expected - 1) % size
    if found == 0:
        return Wrong(wanted, f"got nothing from device {wanted}")
    if not 0 < found <= size * len(ids):
        words = f"got {found}, which no device sent, instead of the values of device {wanted}"
        return Wrong(None, words)
    sender, other = ids[(found - 1) // size], (found - 1) % size
    if sender != wanted:
        words = f"got the values of device {sender} instead of those of device {wanted}"
        return Wrong(None, words)
    words = f"got piece {other} of device {wanted} instead of its piece {piece}"
    return Wrong(wanted, words, itself=True)
