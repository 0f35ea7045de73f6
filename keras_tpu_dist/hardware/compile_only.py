"""TPU devices that are not attached, to compile for."""

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
        """Would call the host; the program is only lowered here and never runs."""
        return arguments


@dataclass(frozen=True)
class CompileOnlyDevice:
    """A TPU device that is not attached: you can lower programs for it, but not run them.

    It has the attributes of the devices that `jax.experimental.topologies` returns for the same
    slice, without loading libtpu. So you can create a mesh over it on any machine, and an
    impossible slice cannot abort the process.
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
