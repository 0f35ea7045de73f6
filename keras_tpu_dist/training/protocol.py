"""The part of a strategy that lower packages may use, as protocols."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from jax.sharding import Mesh

from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.input.own_input import OwnInput
from keras_tpu_dist.layout.layouts import Layouts
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.memory.remat import LayerPolicies
from keras_tpu_dist.training.options import Options

if TYPE_CHECKING:
    from keras_tpu_dist.layout.lint import LintReport


class ModelRunner(Protocol):
    """The part of a strategy's runner that other packages use."""

    prefetch: int
    compiler_options: dict[str, Any] | None
    replica_options: dict[str, Any] | None

    @property
    def own_input(self) -> OwnInput | None:
        """The separate input of every process with `input="per_process"`, else `None`."""
        ...

    def running(
        self, strategy: Any, model: Any, name: str, arguments: Mapping[str, Any]
    ) -> AbstractContextManager:
        """The context of a call that runs a model.

        Args:
            strategy: The distribution to be active.
            model: The model.
            name: The method that was called.
            arguments: Its arguments, by name.
        """
        ...

    def read_state(self, model: Any, groups: tuple[list, ...]) -> tuple[list, ...]:
        """The values of a model's variables, as a step takes them.

        Args:
            model: The model whose state it is.
            groups: Lists of its variables, in the order of the state.
        """
        ...

    def call(self, member: Any, model: Any = None) -> AbstractContextManager:
        """A context in which layer outputs have the layouts of a model's plan.

        Args:
            member: The model's membership.
            model: The model that runs, if there is one.
        """
        ...


class Strategy(Protocol):
    """The parts and properties of a `TPUStrategy`."""

    options: Options
    layouts: Layouts
    remat: LayerPolicies
    placer: BatchPlacer

    @property
    def runner(self) -> ModelRunner:
        """Runs models."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        ...

    @property
    def topology(self) -> Topology | None:
        """The slice, if it has no chips attached, or `None`."""
        ...

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        ...

    @property
    def num_hosts(self) -> int:
        """The number of processes whose devices are in the mesh."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of parts the batch is split into."""
        ...

    def scope(self) -> AbstractContextManager:
        """A context in which models are built, compiled and run on the mesh."""
        ...

    def placement(self, model: Any) -> Placement:
        """The decisions about every variable of a model.

        Args:
            model: A model. If it is not built yet, the variables it has so far are used.
        """
        ...

    def lint(
        self, model: Any, batch_size: int | None = None, *, strict: bool = False
    ) -> LintReport:
        """Mistakes in the layouts of a model."""
        ...

    def _verified(self, model: Any, **asked: Any) -> Any:
        """The `Verification` of a model; see `keras_tpu_dist.verify`."""
        ...
