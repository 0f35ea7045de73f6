"""Tests that random numbers do not depend on the layout."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.tools.checkup.bench import Bench, Job, same_bits
from keras_tpu_dist.tools.checkup.report import RIGHT, CheckPart, Problem, numbered


def random_numbers(bench: Bench) -> CheckPart:
    """Draws the same numbers on one device, replicated, and split over every axis."""
    mesh = bench.mesh
    shape = (8 * mesh.size, 4 * mesh.size)
    with jax.default_device(bench.local[0]):
        expected = np.asarray(_drawn(shape)())
    names = [name for name, size in mesh.shape.items() if size > 1]
    layouts: dict[str, PartitionSpec] = {"replicated": PartitionSpec()}
    layouts |= {f"split over {name!r}": PartitionSpec(name) for name in names}
    layouts |= {f"columns over {name!r}": PartitionSpec(None, name) for name in names[-1:]}
    if len(names) > 1:
        layouts["split over all axes"] = PartitionSpec(tuple(names))
    problems = []
    for words, spec in layouts.items():
        layout = NamedSharding(mesh, spec)
        array = bench.launches.run(Job("random numbers", words), _drawn(shape, layout))
        wrong = bench.some(f"random numbers {words}", _wrong(array, expected))
        if wrong:
            problems.append(_problem(words, wrong))
    start = "drawn" if problems else "the same bits in"
    words = f"{start} {len(layouts)} layouts: {', '.join(layouts)}"
    return CheckPart("random numbers", RIGHT, words, tuple(problems))


def _drawn(shape: tuple[int, int], layout: NamedSharding | None = None) -> Any:
    return jax.jit(lambda: jax.random.bits(jax.random.key(7), shape), out_shardings=layout)


def _wrong(array: jax.Array, expected: np.ndarray) -> list[int]:
    return [
        part.device.id
        for part in array.addressable_shards
        if not same_bits(np.asarray(part.data), np.ascontiguousarray(expected[part.index]))
    ]


def _problem(words: str, devices: list[int]) -> Problem:
    return Problem(
        f"{numbered(devices)}: random numbers {words} differ from those on one device",
        "Initial weights and dropout depend on the mesh, or the device computes wrong results.",
        'Set jax_default_prng_impl to "threefry2x32" and jax_threefry_partitionable to True. If '
        "they are set so, leave the device out: TPUStrategy(devices=[...]).",
        tuple(devices),
    )
