"""Random numbers: the same whatever the layout."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.checkup.bench import Bench, Job, same_bits
from keras_tpu_dist.checkup.report import RIGHT, CheckPart, Problem, numbered


def random_numbers(bench: Bench) -> CheckPart:
    """Draws the same numbers whole on one device, and split over each axis.

    Args:
        bench: What parts share.
    """
    mesh = bench.mesh
    shape = (8 * mesh.size, 4 * mesh.size)
    expected = np.asarray(_drawn(shape, bench.local[0])())
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
        wrong = _wrong(array, expected)
        wrong = sorted(bench.by_device(f"random numbers {words}", dict.fromkeys(wrong, True)))
        if wrong:
            problems.append(_problem(words, wrong))
    words = f"the same bits {len(layouts)} ways: {', '.join(layouts)}"
    return CheckPart("random numbers", RIGHT, words, tuple(problems))


def _drawn(shape: tuple[int, int], layout: Any) -> Any:
    sharding = layout if isinstance(layout, NamedSharding) else None

    def draw():
        return jax.random.bits(jax.random.key(7), shape)

    if sharding is not None:
        return jax.jit(draw, out_shardings=sharding)

    def on_one():
        with jax.default_device(layout):
            return jax.jit(draw)()

    return on_one


def _wrong(array: jax.Array, expected: np.ndarray) -> list[int]:
    return [
        part.device.id
        for part in array.addressable_shards
        if not same_bits(np.asarray(part.data), np.ascontiguousarray(expected[part.index]))
    ]


def _problem(words: str, devices: list[int]) -> Problem:
    return Problem(
        f"{numbered(devices)}: random numbers {words} are not those of one device",
        "Initial weights and dropout depend on the mesh, or the device computes wrongly.",
        'Leave jax_default_prng_impl at "threefry2x32" and jax_threefry_partitionable on; if they '
        "are, leave the device out: TPUStrategy(devices=[...]).",
        tuple(devices),
    )
