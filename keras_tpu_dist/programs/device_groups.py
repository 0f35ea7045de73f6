"""The groups of devices that take part in a collective, as XLA writes them."""

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def replica_groups(text: str, num_devices: int) -> Groups:
    """Reads `replica_groups` in any of the compiler's three spellings.

    Args:
        text: `"{{0,1},{2,3}}"`, `"[2,4]<=[4,2]T(1,0)"`, or `"mesh['a'=4,'b'=2] {'b'}"`, which may
            also have `device_ids=` in one of the first two forms.
        num_devices: What an empty list of groups stands for.
    """
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if match := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _as_groups(_iota(match[2]).reshape(_numbers(match[1])))
    groups = re.findall(r"\{([\d, ]+)\}", text)
    if not groups:
        return (tuple(range(num_devices)),)
    return tuple(tuple(int(n) for n in group.split(",")) for group in groups)


def _iota(text: str) -> np.ndarray:
    """The device ids of `"[4,2]T(1,0)"`: ids in order in that shape, transposed."""
    shape, *order = map(_numbers, re.findall(r"[\[(]([\d,]+)", text))
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(order[0]) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _mesh_groups(text: str) -> Groups:
    mesh, _, used = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values()))
    if order := re.search(r"device_ids=\(([\d,]+)\)", text):
        ids = np.array(_numbers(order[1]))
    elif order := re.search(r"device_ids=\((\[.*?\](?:T\([\d,]+\))?)\)", text):
        ids = _iota(order[1]).reshape(-1)
    used = re.sub(r"device_ids=\([\d,]*\)", "", used)
    # "'x':(2)4" is the sub-axis of x with size 4 that has 2 before it. A group is in the order in
    # which they are listed, the first one the slowest.
    listed = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)
    split: list[int] = []
    places: dict[int, int] = {}
    for name, size in sizes.items():
        parts = [
            (int(before or 1), int(part or size), number)
            for number, (of, before, part) in enumerate(listed)
            if of == name
        ]
        done = 1
        for before, part, number in sorted(parts):
            places[number] = len(split) + 1
            split += [before // done, part]
            done = before * part
        split.append(size // done)
    grouped = [places[number] for number in range(len(listed))]
    kept = [i for i in range(len(split)) if i not in grouped]
    ids = ids.reshape(split).transpose([*kept, *grouped])
    return _as_groups(ids.reshape(-1, math.prod(split[i] for i in grouped)))


def _as_groups(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids.reshape(-1, ids.shape[-1]))
