"""A strategy on another slice: `strategy.on_topology` and `strategy.dry_run`."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.hardware.mesh import SEQUENCE_AXIS
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.training.protocol import StrategyPart

if TYPE_CHECKING:
    from keras_tpu_dist.tools.dryrun.run import Build, DryRun, Progress


class DryRuns(StrategyPart):
    """The methods of a strategy for slices that you don't have."""

    def on_topology(self, topology: str | Topology, mesh: Mapping[str, int] | None = None) -> Self:
        """The same strategy for a slice that you don't have.

        Args:
            topology: The slice, such as `"v5e:16x16"`.
            mesh: The axis sizes. By default the axes are those of this strategy: the first data
                axis grows or shrinks to fill the slice, all others keep their size.

        Returns:
            A strategy like this one with that `topology`. You can `explain`, `lint` and dry-run
            models with it, but not train them.

        Raises:
            ValueError: If the size of the slice is not divisible by the other axes, or no axis
                splits the batch.

        Example:

        >>> import keras_tpu_dist as ktd
        >>> here = ktd.TPUStrategy({"data": 4, "model": 2})
        >>> dict(here.on_topology("v5e:16x16").mesh.shape)
        {'data': 128, 'model': 2}
        """
        topology = Topology.parse(topology)
        if mesh is None:
            mesh = _grown(dict(self.layouts.mesh.shape), self.layouts.data_axes, topology)
        options = self.options.as_arguments()
        return type(self)(mesh, self.layouts.layout, topology=topology, **options)  # pyright: ignore

    def dry_run(
        self,
        model: "Build",
        *,
        batch_size: int | None = None,
        topology: str | Topology | None = None,
        mesh: Mapping[str, int] | None = None,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        sequence_length: int | None = None,
        mode: str = "train",
        effort: str = "quick",
        timeout: float = 1800.0,
        calibration: Any = None,
        progress: "Progress | None" = None,
    ) -> "DryRun":
        """Compiles one step of a model for this strategy's devices or for another slice.

        Args:
            model: A built model, which may be on this strategy's mesh and is not changed; or a
                function that builds, compiles and returns one, which needs no memory for weights.
            batch_size: The global batch size. By default, the largest that fits a slice.
            topology: A slice, such as `"v5e:16x16"`; see `on_topology`. Defaults to this strategy's
                own devices.
            mesh: Axis sizes on that slice. By default the first data axis fills it.
            x: As in `keras_tpu_dist.dry_run`, like all further arguments.
            y: The target.
            sample_weight: Sample weights.
            sequence_length: The length of texts, for inputs that leave it open.
            mode: `"train"`, `"evaluate"` or `"predict"`.
            effort: `"quick"` or `"exact"`.
            timeout: Seconds after which a compilation is stopped.
            calibration: Measurements on such chips.
            progress: Called with a line of text at every stage.

        Returns:
            A `DryRun`. If the model does not fit, you see it in the report; no error is raised.

        Raises:
            ValueError: If an argument is wrong, or the mesh does not fill the slice.
            RuntimeError: If the compiler fails for a reason other than memory.

        Example:

        >>> import keras, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
        ...     model.compile("adam", "mse")
        >>> print(strategy.dry_run(model, batch_size=4096, topology="v5e:16x16"))  # doctest: +SKIP
        """
        if mesh is not None and not isinstance(mesh, Mapping):
            raise ValueError(
                message(
                    "mesh has the axis sizes on another slice.",
                    received={"mesh": mesh},
                    fix='Write for example mesh={"data": 64, "model": 4}.',
                )
            )
        if topology is None and mesh is not None:
            raise ValueError(
                message(
                    "mesh has the axis sizes on another slice.",
                    received={"mesh": dict(mesh), "topology": None},
                    fix='Name the slice, as in topology="v5e:16x16", or leave mesh out.',
                )
            )
        # Imported here: training needs no module that reads programs.
        from keras_tpu_dist.tools.dryrun.run import dry_run

        return dry_run(
            model,
            self if topology is None else self.on_topology(topology, mesh),
            x=x,
            y=y,
            sample_weight=sample_weight,
            sequence_length=sequence_length,
            batch_size=batch_size,
            mode=mode,
            effort=effort,
            timeout=timeout,
            calibration=calibration,
            progress=progress,
        )


def _grown(axes: dict[str, int], data_axes: tuple[str, ...], topology: Topology) -> dict[str, int]:
    """The axes, with the first data axis, or else that of time, as large as the slice allows."""
    grows = next(iter((*data_axes, *(name for name in axes if name == SEQUENCE_AXIS))), None)
    others = math.prod(size for name, size in axes.items() if name != grows)
    if grows is None or topology.num_devices % others:
        raise ValueError(
            message(
                "On another slice, the first data axis gets the devices that the other axes leave.",
                received=f"{topology.num_devices} devices of {topology.name} for the mesh {axes} "
                f"with data axes {data_axes}.",
                fix='Give the axis sizes on that slice, as in mesh={"data": -1, "model": 4}.',
            )
        )
    return {**axes, grows: topology.num_devices // others}
