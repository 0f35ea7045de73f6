"""TPU devices that are only described."""

from dataclasses import dataclass


@dataclass(frozen=True)
class _CompileOnlyClient:
    """The attributes of a JAX client that lowering reads."""

    platform: str = "tpu"
    platform_version: str = "compile-only"
    runtime_type: str = "compile_only"

    def process_index(self) -> int:
        return 0

    def make_python_callback_from_host_send_and_recv(self, *arguments: object) -> object:
        """What would call the host; the program can be lowered, and nobody here runs it."""
        return arguments


@dataclass(frozen=True)
class CompileOnlyDevice:
    """A TPU device that is only described: programs can be lowered for it, not run on it.

    It has the attributes of the devices that `jax.experimental.topologies` gives for the same
    slice, without loading libtpu, so a mesh over it can be made on any machine, and an impossible
    slice cannot abort the process.
    """

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    slice_index: int = 0
    platform: str = "tpu"
    client: _CompileOnlyClient = _CompileOnlyClient()

    def __repr__(self) -> str:
        return f"CompileOnlyDevice(id={self.id}, {self.device_kind!r}, coords={self.coords})"
