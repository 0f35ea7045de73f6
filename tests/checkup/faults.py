"""Devices that are faulty: what a check is run on to see that it names them."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.tools.checkup.bench import Job, Launcher


def changed(array: jax.Array, how: dict[int, Callable[[np.ndarray], np.ndarray]]) -> jax.Array:
    """An array of which some devices, by their number, hold what a function makes of it."""
    parts = [
        jax.device_put(how[s.device.id](np.array(s.data)), s.device)
        if s.device.id in how
        else s.data
        for s in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _several(outputs: Any, how: dict[int, Callable]) -> Any:
    """The same for every array of a structure that lies on all devices."""
    return jax.tree.map(lambda a: changed(a, how) if len(a.sharding.device_set) > 1 else a, outputs)


@dataclass
class Faulty(Launcher):
    """Launcher on devices with a fault, in launches of some kinds, over one axis; or in all."""

    kinds: tuple[str, ...] = ()
    axis: str = ""
    patience_s: float = 60.0
    count: int = field(default=0, init=False)

    def strikes(self, job: Job) -> bool:
        return (not self.kinds or job.kind in self.kinds) and self.axis in ("", job.axis)

    def run(self, job, program, *args):
        if not self.strikes(job):
            return super().run(job, program, *args)
        self.count += 1
        return self.after(super().run(job, program, *self.before(args)))

    def before(self, args: tuple) -> tuple:
        return args

    def after(self, outputs: Any) -> Any:
        return outputs


@dataclass
class FlipsABit(Faulty):
    """A device flips the second highest bit of the first value of all that it computes."""

    device: int = 0
    sometimes: bool = False  # in every other launch only

    def after(self, outputs):
        if self.sometimes and self.count % 2:
            return outputs

        def flip(part: np.ndarray) -> np.ndarray:
            raw = bytearray(part.tobytes())
            if raw:
                raw[part.dtype.itemsize - 1] ^= 0x40
            return np.frombuffer(bytes(raw), part.dtype).reshape(part.shape)

        return _several(outputs, {self.device: flip})


@dataclass
class DropsAPart(Faulty):
    """What a device sends does not arrive."""

    device: int = 0

    def before(self, args):
        return tuple(_several(list(args), {self.device: np.zeros_like}))


@dataclass
class DropsItsBatch(DropsAPart):
    """A device does not get its part of the batch of a step."""

    def before(self, args):
        state, batch = args
        return state, super().before((batch,))[0]


@dataclass
class SwapsTwo(Faulty):
    """Two devices get what is the other's."""

    devices: tuple[int, int] = (0, 1)

    def after(self, outputs):
        one, other = self.devices

        def swap(array: jax.Array) -> jax.Array:
            held = {s.device.id: np.array(s.data) for s in array.addressable_shards}
            if held[one].shape != held[other].shape:
                return array
            return changed(array, {one: lambda _: held[other], other: lambda _: held[one]})

        return jax.tree.map(swap, outputs)


@dataclass
class RoundsOperands(Faulty):
    """Devices multiply in bfloat16 what is float32."""

    devices: Iterable[int] = ()

    def before(self, args):
        def rounded(part: np.ndarray) -> np.ndarray:
            if part.dtype != np.float32:
                return part
            return part.astype(jax.numpy.bfloat16).astype(part.dtype)

        return tuple(_several(list(args), dict.fromkeys(self.devices, rounded)))


class Never:
    """An array that never comes."""

    def block_until_ready(self):
        threading.Event().wait(30)


@dataclass
class Hangs(Faulty):
    """A launch that does not end."""

    def after(self, outputs):
        return Launcher.run(self, Job("all-gather", "model", "int32"), Never)
