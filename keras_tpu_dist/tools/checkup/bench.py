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
from keras_tpu_dist.hardware.mesh import auto_mesh
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.training.protocol import Strategy

# A longer launch counts as hanging: it waits for a device that never joins.
HANGS_AFTER_S = 60.0


@dataclass(frozen=True, repr=False)
class Job(Printed):
    """The purpose of a launch.

    Args:
        kind: `"product"`, `"all-reduce"`, `"step"` and so on.
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
    """Starts programs and waits for their results. Tests replace it to simulate faulty devices.

    Args:
        patience_s: Seconds after which a launch counts as hanging.
    """

    def __init__(self, patience_s: float = HANGS_AFTER_S):
        self.patience_s = patience_s

    def run(self, job: Job, program: Callable[..., Any], *args: Any) -> Any:
        """Runs a program, and returns its outputs when they are ready.

        Args:
            job: The purpose of the launch.
            program: A compiled function.
            args: Its arguments.

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


@dataclass
class Bench:
    """The state that the parts of one check share.

    Args:
        strategy: The strategy.
        launches: Starts programs.
        minutes: The time limit.
        began: When the check began, in seconds of `time.monotonic()`.
    """

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
            value: The value of this process, plain data.
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
            mine: The results of this process by name.
        """
        return self.agreed(
            what, dict(mine), lambda every: {k: v for one in every for k, v in one.items()}
        )

    def by_device(self, what: str, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Joins the results of all processes for their devices.

        Args:
            what: A description of the results, the same words in all processes.
            mine: The results of this process by device id.
        """
        plain = {str(number): value for number, value in mine.items()}
        return {int(number): value for number, value in self.by_name(what, plain).items()}

    def some(self, what: str, mine: Iterable[int]) -> list[int]:
        """Joins the device ids that the processes report, sorted.

        Args:
            what: A description of the devices, the same words in all processes.
            mine: The ids that this process reports.
        """
        return sorted(self.by_device(what, dict.fromkeys(mine, True)))


def spread(mesh: Mesh, array: Callable[[int], np.ndarray]) -> jax.Array:
    """An array with one row on every device.

    Args:
        mesh: The mesh.
        array: A function from a device's position in the mesh to its row.
    """
    first = array(0)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def row(index: Any) -> np.ndarray:
        return array(index[0].start or 0)[None]

    return jax.make_array_from_callback((mesh.size, *first.shape), sharding, row)


def rows_of(array: jax.Array) -> dict[int, np.ndarray]:
    """The parts of an array on the devices of this process, by device id.

    Args:
        array: An array in any layout.
    """
    return {part.device.id: np.asarray(part.data) for part in array.addressable_shards}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit by bit, including NaN and the sign of zero.

    Args:
        a: An array.
        b: Another one.
    """
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def odd_ones(marks: dict[int, Any]) -> list[int]:
    """The devices whose mark differs from the majority; all of them if there is no majority.

    Args:
        marks: A mark, such as a checksum, for every device.
    """
    values = list(marks.values())
    usual = max(values, key=values.count, default=None)
    known = 2 * values.count(usual) > len(values)
    return sorted(number for number, mark in marks.items() if not known or mark != usual)
