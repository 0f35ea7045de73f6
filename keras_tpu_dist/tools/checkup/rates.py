"""Measures speed: matrix units, memory, transfers and links.

Every device is measured alone, then compared with the chip's specification and with the other
devices. Slow measurements are repeated, so that a busy moment does not raise an alarm.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_tpu_dist.hardware.topology import of_devices
from keras_tpu_dist.tools.checkup.bench import Bench, Job, median, spread
from keras_tpu_dist.tools.checkup.report import FAST, CheckPart, Problem, numbered
from keras_tpu_dist.tools.hlo.wire import Wire, seconds_over, sent_bytes

# The best of this many repeats counts; slow measurements get this many further rounds.
_REPEATS, _AGAIN = 3, 4
# A device is slow below this share of the median. Simulated devices share a machine's cores, so
# their rates vary: only large, repeated differences count.
_SHARE = {"tpu": 0.8}
_SHARE_ELSEWHERE = 0.35
# Rates of links and host transfers vary more, since devices share some of them. On other platforms
# than TPU they are copies in the host's memory, so only a link that is almost down is reported.
_SHARE_OF_LINKS, _SHARE_OF_TRANSFERS = {"tpu": 0.5}, {"tpu": 0.5}
_SHARE_OF_COPIES = 0.1
# All devices are slow below this share of the chip's specification. The shares were never measured
# on a TPU, so they are low: a plain program should reach 0.8 or more of the first two.
_OF_TABLE = {"matrix units": 0.5, "memory": 0.5, "links": 0.3}
# By the names of the chip's specification: the dtypes of the operands and of the result.
_DTYPES = {
    "bfloat16": (jnp.bfloat16, jnp.float32),
    "int8": (jnp.int8, jnp.int32),
    "float8": (jnp.float8_e4m3fn, jnp.float32),
}
_EXCHANGES = ("all-reduce", "all-gather")


@dataclass(frozen=True)
class Load:
    """A program to time on one device.

    Args:
        unit: The unit of the rate: a billion units of `work` per second.
        work: The work of one run: operations or bytes.
        args: A function from a device to the program's arguments there.
        peak: The work per second in the chip's specification, or 0.
    """

    job: Job
    unit: str
    work: float
    program: Callable[..., Any]
    args: Callable[[Any], tuple]
    peak: float = 0.0


def matrix_units(bench: Bench) -> CheckPart:
    """Measures operations per second of products, in every dtype of the chip's specification."""
    chip = bench.chip
    if chip is None:
        load = _product("float32", (jnp.float32, jnp.float32), 256, 4, 0.0)
        return _measured(bench, "matrix units", {"float32": load})
    loads = {
        name: _product(name, _DTYPES[name], 4096, 20, flops / chip.devices)
        for name, flops in chip.flops
    }
    return _measured(bench, "matrix units", loads)


def _product(name: str, dtypes: tuple[Any, Any], size: int, times: int, peak: float) -> Load:
    operands, result = dtypes
    values = np.random.default_rng(0).normal(size=(size, size)) / size**0.5
    matrix = (values * 127 if name == "int8" else values).astype(operands)
    dimensions = (((1,), (0,)), ((), ()))

    def multiply(a, b):
        def once(_, c):
            return lax.dot_general(c, b, dimensions, preferred_element_type=result).astype(c.dtype)

        return lax.fori_loop(0, times, once, a)

    def args(device: Any) -> tuple:
        return tuple(jax.device_put(matrix, device) for _ in range(2))

    work = 2.0 * size**3 * times
    return Load(Job("matrix units", dtype=name), "GFLOP/s", work, jax.jit(multiply), args, peak)


def memory(bench: Bench) -> CheckPart:
    """Measures the bandwidth of a device's memory."""
    number, times = (2**26, 8) if bench.platform == "tpu" else (2**20, 4)

    def move(x):
        return lax.fori_loop(0, times, lambda _, c: c * 1.0001, x)

    def args(device: Any) -> tuple:
        return (jax.device_put(np.ones(number, np.float32), device),)

    chip = bench.chip
    peak = chip.hbm_bandwidth / chip.devices if chip else 0.0
    load = Load(Job("memory"), "GB/s", 8.0 * number * times, jax.jit(move), args, peak)
    return _measured(bench, "memory", {"memory": load})


def _measured(bench: Bench, name: str, loads: Mapping[str, Load]) -> CheckPart:
    figures: dict[str, Any] = {}
    words: list[str] = []
    problems: list[Problem] = []
    share = _SHARE.get(bench.platform, _SHARE_ELSEWHERE)

    def rate(load: Load, device: Any) -> float:
        return load.work / _best(bench, load.job, load.program, *load.args(device))

    for kind, load in loads.items():
        once = {str(device.id): functools.partial(rate, load, device) for device in bench.local}
        every, slow = _rates(bench, f"rates of {load.job}", once, share)
        middle = median(every.values())
        figures[kind] = every
        words.append(_rate_words(load, every, middle))
        if slow:
            devices = {int(number): of_median for number, of_median in slow.items()}
            problems.append(_slow(f"{numbered(devices)}: {load.job}", slow, share, devices))
        if middle < _OF_TABLE[name] * load.peak:
            problems.append(_all_slow(load, middle))
    return CheckPart(name, FAST, "; ".join(words), tuple(problems), figures)


def _rates(
    bench: Bench, what: str, once: Mapping[str, Callable[[], float]], share: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Measures rates, and repeats slow ones.

    Args:
        what: A description of the rates, the same words in all processes.
        share: A rate below this share of the median is slow.

    Returns:
        The rates of all processes by name, and for those that stay slow, their share of the
        median.
    """
    mine = {name: measure() for name, measure in once.items()}
    every = bench.by_name(what, mine)
    # All processes run the same number of rounds, because every round is an exchange.
    for number in range(_AGAIN):
        middle = median(every.values()) if every else 0.0
        if all(rate >= share * middle for rate in every.values()):
            break
        for name, rate in mine.items():
            if rate < share * middle:
                mine[name] = max(rate, once[name]())
        every = bench.by_name(f"{what}, again {number}", mine)
    middle = median(every.values()) if every else 0.0
    return every, {n: rate / middle for n, rate in every.items() if rate < share * middle}


def _rate_words(load: Load, every: Mapping[str, float], middle: float) -> str:
    digits = 0 if middle > 1e10 else 1
    least, most = (f"{f(every.values()) / 1e9:,.{digits}f}" for f in (min, max))
    of = f" in {load.job.dtype}" if load.job.dtype else ""
    words = f"{middle / 1e9:,.{digits}f} {load.unit} a device{of}, {least} to {most}"
    if load.peak:
        words += f", {middle / load.peak:.0%} of the specified {load.peak / 1e9:,.0f}"
    return words


def _slow(
    what: str, slow: Mapping[str, float], share: float, devices: Any, link: bool = False
) -> Problem:
    return Problem(
        f"{what} at {min(slow.values()):.0%} of the median of all, in every round; below "
        f"{share:.0%} is slow",
        "The link between them is slow, or one of them is busy: collectives wait for it."
        if link
        else "Every step waits for the slowest device.",
        "Check whether another program runs there. If not, leave the device out, "
        "TPUStrategy(devices=[...]), or ask your cloud provider for another host.",
        tuple(sorted(devices)),
    )


def _all_slow(load: Load, middle: float) -> Problem:
    return Problem(
        f"all devices: {load.job} at {middle / load.peak:.0%} of the chip's specification",
        "Another program uses the chips, they are throttled, or they are not the chips that they "
        "report.",
        "Check whether another process runs on this machine, and measure again.",
    )


def transfers(bench: Bench) -> CheckPart:
    """Measures the bandwidth from the host to a device, and back."""
    number = 2**24 if bench.platform == "tpu" else 2**20
    host = np.ones(number, np.float32)
    share = _SHARE_OF_TRANSFERS.get(bench.platform, 0.0)

    def to_device(on: Any) -> float:
        return 4.0 * number / _best(bench, Job("transfer to"), lambda: jax.device_put(host, on))

    def from_device(on: Any) -> float:
        placed = jax.device_put(host, on)
        # A new array every time, since JAX caches the host copy of an array.
        return 4.0 * number / _best(bench, Job("transfer from"), lambda x: np.array(x + 0), placed)

    figures, words, problems = {}, [], []
    for name, measure in (("to a device", to_device), ("back", from_device)):
        once = {str(device.id): functools.partial(measure, device) for device in bench.local}
        every, slow = _rates(bench, f"transfers {name}", once, share)
        figures[name] = every
        words.append(f"{median(every.values()) / 1e9:.1f} GB/s {name}")
        if slow:
            devices = list(map(int, slow))
            problems.append(_slow(f"{numbered(devices)}: transfers {name}", slow, share, devices))
    return CheckPart("host transfer", FAST, ", ".join(words), tuple(problems), figures)


def links(bench: Bench) -> CheckPart:
    """Measures the bandwidth over every mesh axis, and between neighbours."""
    axes = [name for name, size in bench.mesh.shape.items() if size > 1]
    if not axes:
        return CheckPart("links", FAST, left_out="one device has none")
    topology = of_devices(bench.mesh.devices) if bench.platform == "tpu" else None
    wire = Wire.of(dict(bench.mesh.shape), tuple(bench.devices) if topology else (), topology)
    over = {axis: _over(bench, wire, axis) for axis in axes}
    problems = [
        _slow_axis(kind, axis, share)
        for axis, found in over.items()
        for kind, share in found["of the table"].items()
        if share < _OF_TABLE["links"]
    ]
    words = []
    for axis, found in over.items():
        shown = ", ".join(f"{kind} {found[kind] / 1e9:.2g} GB/s" for kind in _EXCHANGES)
        words.append(f"{axis}: {shown}")
    between, slow = _between(bench)
    problems += slow
    if between:
        least, middle = min(between.values()) / 1e9, median(between.values()) / 1e9
        words.append(f"copies to a neighbour {middle:.2g} GB/s, the slowest {least:.2g}")
    figures = {"axes": over, "neighbours": between}
    return CheckPart("links", FAST, "; ".join(words), tuple(problems), figures)


def _over(bench: Bench, wire: Wire, axis: str) -> dict[str, Any]:
    """The rates of collectives over an axis, and their shares of the specified bandwidth."""
    number, size = 2**23 if bench.platform == "tpu" else 2**16, bench.mesh.shape[axis]
    found: dict[str, Any] = {"of the table": {}}
    if wire.devices:
        found["network"] = "DCN" if axis in wire.crossing_axes() else "ICI"
    for kind in _EXCHANGES:
        moved = 4.0 * number * (size if kind == "all-gather" else 1)
        seconds = _collective(bench, kind, axis, number)
        found[kind] = sent_bytes(kind, int(moved), size) / seconds
        wanted = seconds_over(wire, kind, moved, (axis,))
        if wanted:
            found["of the table"][kind] = wanted / seconds
    return found


def _collective(bench: Bench, kind: str, axis: str, number: int) -> float:
    mesh, spec = bench.mesh, PartitionSpec(bench.mesh.axis_names)

    def exchange(x):
        return lax.psum(x, axis) if kind == "all-reduce" else lax.all_gather(x[0], axis)[None]

    over = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sent = spread(mesh, lambda _: np.ones(number, np.float32))
    job = Job(kind, axis, "float32")
    return bench.agreed(f"time of {job}", _best(bench, job, jax.jit(over), sent), max)


def _between(bench: Bench) -> tuple[dict[str, float], list[Problem]]:
    """The rates of copies from every device to the next along every axis, within a process."""
    number = 2**24 if bench.platform == "tpu" else 2**20
    once = {
        f"{one.id} to {other.id}": functools.partial(_copied, bench, one, other, number)
        for one, other in _neighbours(bench)
    }
    share = _SHARE_OF_LINKS.get(bench.platform, _SHARE_OF_COPIES)
    every, slow = _rates(bench, "copies between neighbours", once, share)
    if not slow:
        return every, []
    devices = {int(number) for name in slow for number in name.split(" to ")}
    what = f"copies from device {', '.join(slow)}"
    return every, [_slow(what, slow, share, devices, link=True)]


def _neighbours(bench: Bench) -> list[tuple[Any, Any]]:
    """Pairs of this process's devices that are neighbours along an axis."""
    grid, local, found = bench.mesh.devices, set(bench.local), {}
    for axis in range(grid.ndim):
        following = np.roll(grid, -1, axis)
        for one, other in zip(grid.flat, following.flat, strict=True):
            if one is not other and {one, other} <= local:
                found[one.id, other.id] = (one, other)
    return list(found.values())


def _copied(bench: Bench, one: Any, other: Any, number: int) -> float:
    placed = jax.device_put(np.ones(number, np.float32), one)
    job = Job(f"copy from {one.id} to {other.id}")
    return 4.0 * number / _best(bench, job, lambda x: jax.device_put(x, other), placed)


def _slow_axis(kind: str, axis: str, share: float) -> Problem:
    return Problem(
        f"{kind} over {axis!r} reaches {share:.0%} of the bandwidth of the chip's links",
        "A link is slow or down, or the devices along this axis are not neighbours.",
        "If you chose the order of the devices, let TPUStrategy choose it; strategy.show() draws "
        "it. If TPUStrategy chose it, ask your cloud provider for another slice.",
        axis=axis,
    )


def _best(bench: Bench, job: Job, program: Callable, *args: Any) -> float:
    """The shortest time of a few runs, after a run that does not count."""
    bench.launches.run(job, program, *args)
    return min(bench.launches.seconds(job, program, *args) for _ in range(_REPEATS))
