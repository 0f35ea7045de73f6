"""Shared by all parts of a check: devices, launches, the remaining time, other processes."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.hardware.chips import Chip, of_kind
from keras_tpu_dist.hardware.mesh import auto_mesh
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.training.protocol import Strategy

# A longer launch counts as hanging: it waits for a device that never joins.
HANGS_AFTER_S = 60.0


@dataclass(frozen=True, repr=False)
class Job(Printed):
    """The purpose of a launch.

    Args:
        kind: `"product"`, `"all-reduce"`, `"step"`, `"matrix units"`, and so on.
        axis: The mesh axis of a collective, or `""`.
        dtype: The dtype of the computation, or `""`.
    """

    kind: str
    axis: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        over = f" over {self.axis!r}" if self.axis else ""
        within = f" in {self.dtype}" if self.dtype else ""
        return f"{self.kind}{over}{within}"


class HangError(RuntimeError):
    """A launch did not finish in time."""


class Launcher:
    """Starts programs and waits for their results. Tests replace it to simulate faulty devices."""

    def __init__(self, patience_s: float = HANGS_AFTER_S):
        self.patience_s = patience_s

    def run(self, job: Job, program: Callable[..., Any], *args: Any) -> Any:
        """Runs a program, and returns its outputs when they are ready.

        Raises:
            HangError: If it takes longer than `patience_s`, without its compilation.
        """
        outputs, failed = program(*args), []

        def wait() -> None:
            try:
                jax.block_until_ready(outputs)
            except BaseException as error:
                failed.append(error)

        waiting = threading.Thread(target=wait, name=f"check: {job}", daemon=True)
        waiting.start()
        waiting.join(self.patience_s)
        if waiting.is_alive():
            raise HangError(f"{job} did not finish within {self.patience_s:.0f} s")
        if failed:
            raise failed[0]
        return outputs

    def seconds(self, job: Job, program: Callable[..., Any], *args: Any) -> float:
        """The seconds that a program takes. Call `run` first: it compiles, and detects hangs."""
        begin = time.perf_counter()
        jax.block_until_ready(program(*args))
        return time.perf_counter() - begin


@dataclass
class Bench:
    """The state that the parts of one check share."""

    strategy: Strategy
    launches: Launcher
    minutes: float
    began: float = field(default_factory=time.monotonic)

    @property
    def mesh(self) -> Mesh:
        """The strategy's mesh."""
        return self.strategy.mesh

    @property
    def devices(self) -> list:
        """All devices, in the mesh's order."""
        return list(self.mesh.devices.flat)

    @property
    def local(self) -> list:
        """The devices of this process."""
        return [d for d in self.devices if d.process_index == jax.process_index()]

    @property
    def platform(self) -> str:
        """`"tpu"`, `"cpu"` or `"gpu"`."""
        return self.devices[0].platform

    @property
    def chip(self) -> Chip | None:
        """The specification of this TPU, or `None` if these are other devices."""
        return of_kind(self.devices[0].device_kind) if self.platform == "tpu" else None

    @property
    def row(self) -> Mesh:
        """All devices as a mesh of one axis, `"device"`."""
        return auto_mesh(np.asarray(self.devices, dtype=object), ("device",))

    @property
    def left_s(self) -> float:
        """The remaining seconds."""
        return 60.0 * self.minutes - (time.monotonic() - self.began)

    def agreed(
        self, what: str, value: Any, reduce: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """Exchanges a value between all processes. All of them get the same result.

        Args:
            what: A description of the value, the same words in all processes.
            reduce: A function from the list of values to plain data; by default the list itself.
        """
        if self.strategy.placer.is_local:
            return [value] if reduce is None else reduce([value])
        fix = "Call strategy.check() in all processes, with the same arguments."
        return agree(f"check: {what}", fix, value, reduce=reduce)

    def by_name(self, what: str, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Joins the results of all processes. No two of them may use the same name.

        Args:
            what: A description of the results, the same words in all processes.
        """
        return self.agreed(
            what, dict(mine), lambda every: {k: v for one in every for k, v in one.items()}
        )

    def by_device(self, what: str, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Joins the results of all processes for their devices."""
        plain = {str(number): value for number, value in mine.items()}
        return {int(number): value for number, value in self.by_name(what, plain).items()}

    def some(self, what: str, mine: Iterable[int]) -> list[int]:
        """Joins the device ids that the processes report, sorted.

        Args:
            what: A description of the devices, the same words in all processes.
        """
        return sorted(self.by_device(what, dict.fromkeys(mine, True)))


def spread(mesh: Mesh, array: Callable[[int], np.ndarray]) -> jax.Array:
    """An array with one row on every device.

    Args:
        array: A function from a device's position in the mesh to its row.
    """
    first = array(0)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def row(index: Any) -> np.ndarray:
        return array(index[0].start or 0)[None]

    return jax.make_array_from_callback((mesh.size, *first.shape), sharding, row)


def rows_of(array: jax.Array) -> dict[int, np.ndarray]:
    """The parts of an array on the devices of this process, by device id."""
    return {part.device.id: np.asarray(part.data) for part in array.addressable_shards}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit by bit, including NaN and the sign of zero."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def odd_ones(marks: dict[int, Any]) -> list[int]:
    """The devices whose mark differs from the majority; all of them if there is no majority."""
    values = list(marks.values())
    usual = max(values, key=values.count, default=None)
    known = 2 * values.count(usual) > len(values)
    return sorted(number for number, mark in marks.items() if not known or mark != usual)


def median(values: Iterable[float]) -> float:
    """The median of some numbers."""
    return float(np.median(list(values)))
