"""The options of a strategy besides its mesh and its layout."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from jax.sharding import Mesh

from keras_tpu_dist.common.checks import one_of, whole
from keras_tpu_dist.hardware.compiler_options import (
    accepted,
    checked_compiler_options,
    chosen_names,
    options_for,
)

# Prefetched batches take the devices' memory.
Ahead = Annotated[int, whole(0, 10_000)]
Donate = Annotated[bool | str, one_of(True, False, "auto")]
Input = Annotated[str, one_of("global", "per_process")]
Head = Annotated[str, one_of("auto", "whole", "pieces")]
Tables = Annotated[str, one_of("auto", "rows", "lazy")]


@dataclass(frozen=True)
class Options:
    """The options of a `TPUStrategy`; see there. They are created once and passed to its parts.

    Options that depend on the mesh (`data_axes`, `batch_axis`, `remat`) are checked by the parts
    that use them, others by the annotations of `TPUStrategy`, or here.
    """

    data_axes: str | Sequence[str] | None = None
    batch_axis: Any = 0
    prefetch: int | None = None
    donate_state: bool | str = "auto"
    shard_optimizer: bool = False
    remat: Any = None
    input_timeout_s: float | None = None
    input: str = "global"
    compiler_options: Any = "auto"
    tables: str | None = "auto"
    head: str = "auto"
    compilation_cache: bool | str | None = None

    def __post_init__(self):
        checked_compiler_options(self.compiler_options)

    def as_arguments(self) -> dict[str, Any]:
        """The options by name, as `TPUStrategy` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def batches_ahead(self, platform: str) -> int:
        """How many batches to transfer ahead, on devices of a platform.

        Args:
            platform: The devices' platform, such as `"tpu"`; it matters if `prefetch` is `None`.
        """
        # On CPU, transfers and steps share the same cores.
        default = 0 if platform == "cpu" else 2
        return default if self.prefetch is None else self.prefetch

    def for_compiler(
        self, mesh: Mesh, layout: Any, *, only_described: bool
    ) -> dict[str, Any] | None:
        """The `compiler_options` of `jax.jit` for the programs of a mesh.

        Args:
            mesh: The mesh.
            layout: The strategy's layout, or `None`.
            only_described: Whether its devices are not attached. In that case a dry run finds out
                which options its compiler accepts.
        """
        if only_described:
            first = mesh.devices.flat[0]
            return options_for(self.compiler_options, first, mesh.size, self._splits(layout))
        return accepted(self.compiler_options, mesh, self._splits(layout))

    def optional_for_compiler(self, mesh: Mesh, layout: Any) -> tuple[str, ...]:
        """The options of `for_compiler` that a dry run may leave out, because the user did not set
        them.

        Args:
            mesh: The mesh.
            layout: The strategy's layout, or `None`.
        """
        first = mesh.devices.flat[0]
        return chosen_names(self.compiler_options, first, mesh.size, self._splits(layout))

    def _splits(self, layout: Any) -> bool:
        return layout is not None or bool(self.shard_optimizer)
