"""What every part of a check uses: devices, launches, the time left, other processes."""

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
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.training.protocol import Strategy

# A launch that takes longer waits for a device that does not come.
HANGS_AFTER_S = 60.0


@dataclass(frozen=True, repr=False)
class Job(Printed):
    """What a launch is for.

    Args:
        kind: `"product"`, `"all-reduce"`, `"step"`, `"matrix units"`, and so on.
        axis: The mesh axis that it goes over, or `""`.
        dtype: The dtype that it computes in, or `""`.
    """

    kind: str
    axis: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        over = f" over {self.axis!r}" if self.axis else ""
        within = f" in {self.dtype}" if self.dtype else ""
        return f"{self.kind}{over}{within}"


class HangError(RuntimeError):
    """A launch did not end."""


class Launcher:
    """Starts programs, and waits for them. Tests put faulty devices in its place.

    Args:
        patience_s: Seconds after which a launch counts as one that never ends.
    """

    def __init__(self, patience_s: float = HANGS_AFTER_S):
        self.patience_s = patience_s

    def run(self, job: Job, program: Callable[..., Any], *args: Any) -> Any:
        """The outputs of a program, once they are there.

        Args:
            job: What it is for.
            program: A compiled function.
            *args: Its arguments.

        Raises:
            HangError: If it takes too long, compiling not counted.
        """
        return self._waited(job, program(*args))

    def seconds(self, job: Job, program: Callable[..., Any], *args: Any) -> float:
        """How long a program takes that `run` has run before, which waits for it with patience.

        Args:
            job: What it is for.
            program: A compiled function.
            *args: Its arguments.
        """
        begin = time.perf_counter()
        jax.block_until_ready(program(*args))
        return time.perf_counter() - begin

    def _waited(self, job: Job, outputs: Any) -> Any:
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                jax.block_until_ready(outputs)
            except BaseException as error:
                failed.append(error)

        waiting = threading.Thread(target=wait, name=f"check: {job}", daemon=True)
        waiting.start()
        waiting.join(self.patience_s)
        if waiting.is_alive():
            raise HangError(f"{job} did not end within {self.patience_s:.0f} s")
        if failed:
            raise failed[0]
        return outputs


@dataclass
class Bench:
    """What the parts of one check share.

    Args:
        strategy: The strategy.
        launches: Starts programs.
        minutes: The time that there is.

    Attributes:
        figures: What the parts that ran have measured, by their names.
    """

    strategy: Strategy
    launches: Launcher
    minutes: float
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
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
        """This process's devices among them."""
        return [d for d in self.devices if d.process_index == jax.process_index()]

    @property
    def platform(self) -> str:
        """`"tpu"`, `"cpu"` or `"gpu"`."""
        return self.devices[0].platform

    @property
    def chip(self) -> Chip | None:
        """The numbers of the TPU that this is, or `None`."""
        return of_kind(self.devices[0].device_kind) if self.platform == "tpu" else None

    @property
    def row(self) -> Mesh:
        """All devices as a mesh of one axis, `"device"`."""
        return Mesh(np.asarray(self.devices, dtype=object), ("device",))

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return 60.0 * self.minutes - (time.monotonic() - self.began)

    def agreed(
        self, what: str, value: Any, reduce: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """The values of all processes, or what `reduce` makes of them, which all get.

        Args:
            what: What they are, the same words in all processes.
            value: This process's, plain data.
            reduce: From the list of them to plain data.
        """
        if self.strategy.placer.is_local:
            return [value] if reduce is None else reduce([value])
        fix = "Call strategy.check() in all processes, with the same arguments."
        return agree(f"check: {what}", fix, value, reduce=reduce)

    def by_name(self, what: str, mine: Mapping[str, Any]) -> dict[str, Any]:
        """What all processes found, by names that no two of them share.

        Args:
            what: What it is, the same words in all processes.
            mine: What this process found.
        """
        return self.agreed(
            what, dict(mine), lambda every: {k: v for one in every for k, v in one.items()}
        )

    def by_device(self, what: str, mine: Mapping[int, Any]) -> dict[int, Any]:
        """What all processes found of their devices, by the devices' numbers.

        Args:
            what: What it is, the same words in all processes.
            mine: What this process found.
        """
        plain = {str(number): value for number, value in mine.items()}
        return {int(number): value for number, value in self.by_name(what, plain).items()}

    def some(self, what: str, mine: Iterable[int]) -> list[int]:
        """The numbers of devices of all processes, in order.

        Args:
            what: What they are, the same words in all processes.
            mine: This process's.
        """
        return sorted(self.by_device(what, dict.fromkeys(mine, True)))


def spread(mesh: Mesh, array: Callable[[int], np.ndarray]) -> jax.Array:
    """An array of which each device holds one row, its own.

    Args:
        mesh: The mesh.
        array: From a device's position in the mesh to its row.
    """
    first = array(0)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback(
        (mesh.size, *first.shape), sharding, lambda index: array(_first(index))[None]
    )


def _first(index: Any) -> int:
    return index[0].start or 0


def rows_of(array: jax.Array) -> dict[int, np.ndarray]:
    """What each of this process's devices holds, by the device's number.

    Args:
        array: An array of any layout.
    """
    return {part.device.id: np.asarray(part.data) for part in array.addressable_shards}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit by bit, NaN and signs of zero included.

    Args:
        a: An array.
        b: Another one.
    """
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def odd_ones(marks: dict[int, Any]) -> list[int]:
    """The devices whose mark is not that of most of them; all of them if most agree on none.

    Args:
        marks: A mark for each device.

    Example:

    >>> odd_ones({0: "a", 1: "b", 2: "a"}), odd_ones({0: "a", 1: "b"}), odd_ones({0: "a", 1: "a"})
    ([1], [0, 1], [])
    """
    values = list(marks.values())
    usual = max(values, key=values.count, default=None)
    known = 2 * values.count(usual) > len(values)
    return sorted(number for number, mark in marks.items() if not known or mark != usual)


def median(values: Iterable[float]) -> float:
    """The middle one of some numbers.

    Args:
        values: The numbers.
    """
    return float(np.median(list(values)))
