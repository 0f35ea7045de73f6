"""How fast: matrix units, memory, transfers, launches, links, and the user's step.

Measured on each device by itself, then compared with the chip's table and with the other devices.
What is slow is measured again, so that a busy moment is no alarm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_tpu_dist.checkup.bench import Bench, Job, median, spread
from keras_tpu_dist.checkup.report import FAST, CheckPart, Problem, numbered
from keras_tpu_dist.hardware.topology import of_devices
from keras_tpu_dist.hlo.wire import Wire, seconds_over, sent_bytes
from keras_tpu_dist.show.text import duration_text

# The best of so many counts.
_REPEATS, _AGAIN = 3, 4
# A device is slow below this share of the median. Simulated devices share a machine's cores, whose
# load changes; only what is far off, again and again, is no noise.
_SHARE = {"tpu": 0.8}
_SHARE_ELSEWHERE = 0.35
# All devices are slow below this share of the chip's table. Never measured on a TPU, so they are
# wide: a plain program should reach 0.8 and more of the first two.
_OF_TABLE = {"matrix units": 0.5, "memory": 0.5, "links": 0.3}


@dataclass(frozen=True)
class Load:
    """Work whose time is measured on one device.

    Args:
        name: What is measured.
        unit: The unit of the rate, such as `"GB/s"`.
        scale: What of the work a unit is.
        work: The work of one run: operations or bytes.
        program: The work.
        args: From a device to the program's arguments there.
        peak: What the chip's table says for a second, or 0.
    """

    name: str
    unit: str
    scale: float
    work: float
    program: Callable[..., Any]
    args: Callable[[Any], tuple]
    peak: float = 0.0


def matrix_units(bench: Bench) -> CheckPart:
    """Operations per second of products.

    Args:
        bench: What parts share.
    """
    size, times = (4096, 20) if bench.platform == "tpu" else (256, 4)
    dtype = jnp.bfloat16 if bench.platform == "tpu" else jnp.float32
    ones = np.ones((size, size), dtype) / np.asarray(size, dtype)

    def multiply(a, b):
        return lax.fori_loop(0, times, lambda _, c: (c @ b).astype(c.dtype), a)

    chip = bench.chip
    peak = dict(chip.flops)["bfloat16"] / chip.devices if chip else 0.0
    work = 2.0 * size**3 * times
    name = f"matrix units, {np.dtype(dtype).name}"

    def args(device: Any) -> tuple:
        return tuple(jax.device_put(ones, device) for _ in range(2))

    load = Load(name, "GFLOP/s", 1e9, work, jax.jit(multiply), args, peak)
    return _measured(bench, "matrix units", load)


def memory(bench: Bench) -> CheckPart:
    """Bytes per second of a device's memory.

    Args:
        bench: What parts share.
    """
    number, times = (2**26, 8) if bench.platform == "tpu" else (2**20, 4)

    def move(x):
        return lax.fori_loop(0, times, lambda _, c: c * 1.0001, x)

    def args(device: Any) -> tuple:
        return (jax.device_put(np.ones(number, np.float32), device),)

    chip = bench.chip
    peak = chip.hbm_bandwidth / chip.devices if chip else 0.0
    load = Load("memory", "GB/s", 1e9, 8.0 * number * times, jax.jit(move), args, peak)
    return _measured(bench, "memory", load)


def transfers(bench: Bench) -> CheckPart:
    """Bytes per second from the host to a device, and back.

    Args:
        bench: What parts share.
    """
    number = 2**24 if bench.platform == "tpu" else 2**20
    host = np.ones(number, np.float32)
    figures: dict[str, Any] = {}
    for name in ("to", "from"):
        rates = {}
        for device in bench.local:
            placed = jax.device_put(host, device)

            def go(placed: Any, to: Any = device, name: str = name) -> Any:
                return jax.device_put(host, to) if name == "to" else np.array(placed + 0)

            rates[device.id] = 4.0 * number / _best(bench, Job("transfer"), go, placed)
        figures[name] = bench.by_device(f"transfers {name}", rates)
    middle = {name: median(list(rates.values())) / 1e9 for name, rates in figures.items()}
    words = f"{middle['to']:.1f} GB/s to a device, {middle['from']:.1f} GB/s back"
    return CheckPart("host transfer", FAST, words, figures=_plain(figures))


def launches(bench: Bench) -> CheckPart:
    """Time of a launch that computes next to nothing, and whether launches wait.

    Args:
        bench: What parts share.
    """
    small = jax.jit(lambda x: x + 1)
    row = bench.row
    spec = PartitionSpec("device")
    everywhere = jax.jit(
        jax.shard_map(lambda x: lax.psum(x, "device"), mesh=row, in_specs=spec, out_specs=spec)
    )
    one = jax.device_put(np.float32(1), bench.local[0])
    all_of = spread(row, lambda _: np.zeros(8, np.float32))
    alone = _best(bench, Job("launch"), small, one, repeats=20)
    together = _best(bench, Job("launch"), everywhere, all_of, repeats=10)
    figures = {"one device": alone, "all devices": together}
    words = f"{duration_text(alone)} on one device, {duration_text(together)} with a sum over all"
    return CheckPart("launches", FAST, words, figures=figures)


def links(bench: Bench) -> CheckPart:
    """Bytes per second over each mesh axis.

    Args:
        bench: What parts share.
    """
    axes = [name for name, size in bench.mesh.shape.items() if size > 1]
    if not axes:
        return CheckPart("links", FAST, left_out="one device has none")
    number = 2**23 if bench.platform == "tpu" else 2**16
    topology = of_devices(bench.mesh.devices) if bench.platform == "tpu" else None
    wire = Wire.of(dict(bench.mesh.shape), tuple(bench.devices) if topology else (), topology)
    figures: dict[str, Any] = {}
    problems, words = [], []
    for axis in axes:
        size, rates = bench.mesh.shape[axis], {}
        for kind in ("all-reduce", "all-gather"):
            moved = 4.0 * number * (size if kind == "all-gather" else 1)
            seconds = _collective(bench, kind, axis, number)
            rates[kind] = sent_bytes(kind, int(moved), size) / seconds
            wanted = seconds_over(wire, kind, moved, (axis,))
            if wanted and wanted / seconds < _OF_TABLE["links"]:
                problems.append(_slow_links(kind, axis, wanted / seconds))
        figures[axis] = rates
        shown = ", ".join(f"{kind} {rate / 1e9:.2g} GB/s" for kind, rate in rates.items())
        words.append(f"{axis}: {shown}")
    return CheckPart("links", FAST, "; ".join(words), tuple(problems), figures)


def _collective(bench: Bench, kind: str, axis: str, number: int) -> float:
    mesh, spec = bench.mesh, PartitionSpec(bench.mesh.axis_names)

    def exchange(x):
        return lax.psum(x, axis) if kind == "all-reduce" else lax.all_gather(x[0], axis)[None]

    over = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sent = spread(mesh, lambda _: np.ones(number, np.float32))
    job = Job(kind, axis, "float32")
    return bench.agreed(f"time of {job}", _best(bench, job, jax.jit(over), sent), max)


def _slow_links(kind: str, axis: str, share: float) -> Problem:
    return Problem(
        f"{kind} over {axis!r} reaches {share:.0%} of what the chip's links should carry",
        "A link is slow or down, or the devices along this axis are not neighbours.",
        "Look at the order of the devices with strategy.show(); leave it to TPUStrategy. If it is "
        "its own, ask your cloud provider for another slice.",
        axis=axis,
    )


def _best(bench: Bench, job: Job, program: Callable, *args: Any, repeats: int = _REPEATS) -> float:
    """The shortest time, after one run that does not count."""
    jax.block_until_ready(program(*args))
    return min(bench.launches.seconds(job, program, *args) for _ in range(repeats))


def _measured(bench: Bench, name: str, load: Load) -> CheckPart:
    job = Job(name)

    def best(device: Any) -> float:
        return load.work / _best(bench, job, load.program, *load.args(device))

    rates = {device.id: best(device) for device in bench.local}
    every = bench.by_device(f"rates of {name}", rates)
    share = _SHARE.get(bench.platform, _SHARE_ELSEWHERE)
    # Rounds are as many in all processes, whoever has a slow device.
    for round in range(_AGAIN):
        middle = median(list(every.values()))
        if min(every.values()) >= share * middle:
            break
        for device in bench.local:
            if rates[device.id] < share * middle:
                rates[device.id] = max(rates[device.id], best(device))
        every = bench.by_device(f"rates of {name}, again {round}", rates)
    middle = median(list(every.values()))
    slow = {n: rate / middle for n, rate in every.items() if rate < share * middle}
    problems = [_slow(load, slow, share)] if slow else []
    if load.peak and middle < _OF_TABLE[name] * load.peak:
        problems.append(_all_slow(load, middle))
    return CheckPart(
        name, FAST, _words(load, every, middle), tuple(problems), _plain({name: every})
    )


def _words(load: Load, every: dict[int, float], middle: float) -> str:
    least, most = (f(every.values()) / load.scale for f in (min, max))
    digits = 0 if middle > 10 * load.scale else 1
    of_peak = ""
    if load.peak:
        of_peak = f", {middle / load.peak:.0%} of the chip's {load.peak / load.scale:,.0f}"
    kind = load.name.partition(", ")[2]
    return (
        f"{middle / load.scale:,.{digits}f} {load.unit} a device"
        f"{f' in {kind}' if kind else ''}, {least:,.{digits}f} to {most:,.{digits}f}"
        f"{of_peak}"
    )


def _slow(load: Load, slow: dict[int, float], share: float) -> Problem:
    worst = min(slow.values())
    return Problem(
        f"{numbered(slow)}: {load.name} at {worst:.0%} of the others' median, each time it was "
        f"measured; {share:.0%} is slow",
        "Every step waits for the slowest device.",
        "See whether something else runs there; if not, leave it out, TPUStrategy(devices=[...]), "
        "or ask your cloud provider for another host.",
        tuple(sorted(slow)),
    )


def _all_slow(load: Load, middle: float) -> Problem:
    return Problem(
        f"all devices: {load.name} at {middle / load.peak:.0%} of what the chip's table says",
        "Another program uses the chips, they are throttled, or this is another chip than it says.",
        "Look whether another process runs on this machine, and measure again.",
    )


def _plain(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {str(number): float(rate) for number, rate in each.items() if math.isfinite(rate)}
        for name, each in figures.items()
    }
