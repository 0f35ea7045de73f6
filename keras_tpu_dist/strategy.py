"""TPUStrategy: the distribution that trains Keras models on a mesh of devices."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist import attention as attention  # registers its replacements in Keras
from keras_tpu_dist.common import tensorflow_names
from keras_tpu_dist.common.checks import check_counts, check_flags, check_text, known_words
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.hardware.assignment import DeviceAssignment
from keras_tpu_dist.hardware.crossings import num_hosts
from keras_tpu_dist.hardware.libtpu import start_without_tpu
from keras_tpu_dist.hardware.mesh import MeshLike, auto_mesh, build_mesh, splitting_axes
from keras_tpu_dist.hardware.simulation import warn_without_tpu
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.input.clock import InputWait
from keras_tpu_dist.input.own_rows import placer_for
from keras_tpu_dist.input.shards import InputShard, input_shards_of
from keras_tpu_dist.layout.layouts import Layouts
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.layout.planner import PLANS, Plan
from keras_tpu_dist.logical.devices import LogicalDevices
from keras_tpu_dist.memory.remat import LayerPolicies
from keras_tpu_dist.processes.start import watch_peers
from keras_tpu_dist.programs.tables.step import described, refused
from keras_tpu_dist.replica.run import ReplicaCode
from keras_tpu_dist.tools.checkup.method import Checks
from keras_tpu_dist.tools.dryrun.retarget import DryRuns
from keras_tpu_dist.training import membership, pickling
from keras_tpu_dist.training.options import Options
from keras_tpu_dist.training.runner import Runner

if TYPE_CHECKING:
    from keras_tpu_dist.layout.explain import Explanation, VariableRow
    from keras_tpu_dist.layout.lint import LintReport
    from keras_tpu_dist.layout.picture import Picture


class TPUStrategy(
    TensorFlowNames, ReplicaCode, LogicalDevices, DryRuns, Checks, keras.distribution.ModelParallel
):
    """Trains an ordinary Keras model on a mesh of TPU chips, with the numbers of one device.

    Build and compile the model inside `strategy.scope()`. You can then call `fit`, `evaluate`,
    `predict` and the `*_on_batch` methods inside or outside of the scope: the model remembers its
    strategy. The batch is split over the data axes, whatever its size. `layout` decides how
    variables are split. If you built the model before the scope, it moves to the mesh at its first
    call.

    Args:
        mesh: `None` (all devices on one axis `"data"`), a dict of axis sizes, of which one may be
            -1, a `keras.distribution.DeviceMesh`, a `jax.sharding.Mesh`, or a `DeviceAssignment`.
            The replicas of a `DeviceAssignment` are the axis `"data"`; in rules and layouts, the
            axis `"logical"` means its logical devices (`"logical_0"`, ...: prime factors). An axis
            named `"sequence"` splits time.
        layout: How variables are split: `None` (replicated), `LayoutRules` or a list of their
            `(pattern, axes)` pairs, a `keras.distribution.LayoutMap`, or the name of a plan:
            `"fsdp"`, `"tensor_parallel"`, `"auto"` (see `Planner`, which also has options). `split`
            and `replicate` on a layer take precedence.
        devices: The devices to use. Defaults to `jax.devices()`.
        topology: The name of a TPU slice, such as `"v5e:16x16"`. You need no chip of it: you can
            build models on the slice without memory and dry-run them, but not train them. For the
            spellings, see `keras_tpu_dist.hardware.topology.Topology.parse`.
        data_axes: The mesh axes that split the batch. Defaults to the axes named `"data"`, `"fsdp"`
            or `"batch"`. If there are none, or for `()`, the batch is replicated.
        batch_axis: The batch dimension of the inputs: an integer, `None` for inputs without a
            batch, or a structure of those that is a prefix of `(x, y, sample_weight)`: `(1, 0)` for
            time-major `x`, `({"image": 0, "anchors": None}, 0)`. A dict applies to `x`.
        prefetch: How many batches to transfer to the devices ahead of the running step. Defaults to
            2, and to 0 on CPU, because transfers and steps share the cores there.
        donate_state: Whether a train step overwrites its input state. `True` halves the memory for
            the state; if a launch fails, you get the weights from the start of the epoch. `False`
            keeps a copy of the state before every step. `"auto"` keeps a copy if two states fit in
            10 % of the device's memory (8 MiB if that is unknown) and there are at most 64
            variables.
        shard_optimizer: Whether to split the optimizer's slots over the data axes too (ZeRO-1). The
            weights stay as `layout` splits them.
        remat: Which activations to recompute in the backward pass: a policy of `ktd.remat` for the
            repeated blocks of a model, such as `"full"`, or a mapping of patterns of layer paths to
            policies, such as `{"block_*": "dots"}`.
        input_timeout_s: The most seconds that one batch of input may take. If one takes longer, the
            run ends with a `TimeoutError` and the model keeps its weights. Defaults to `None`: no
            limit.
        input: With several processes, which data you give to them: `"global"` if all get the same
            data (every process transfers its part), `"per_process"` if every process gets its own
            rows (see `input_shard`). `batch_size` is the global one in both cases.
        compiler_options: Options for XLA, as `jax.jit` takes them. `"auto"` lets TPUs compute while
            they sum gradients. A dict is added to these and overrides them; `None` adds nothing.
        tables: How to look up and update embedding tables that are split by rows. `"rows"`: devices
            exchange ids and rows. Only the rows that a step used are updated, if the optimizer
            would not change the others (SGD, Adagrad). `"lazy"`: only those rows are updated with
            any optimizer, which changes the results of Adam and momentum. `"auto"`: `"rows"` for
            large tables if a step uses few of their rows; other large tables are used by their
            width if gathering them would take longer. `None`: the compiler decides.

    Raises:
        ValueError: If the mesh does not fit the devices, a name is not an axis of the mesh, or a
            rule is malformed.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("dense/kernel", (None, "model"))])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    ...     model.compile("adam", "mse")
    >>> tuple(model.layers[0].kernel.value.sharding.spec)
    (None, 'model')
    """

    @known_words
    def __init__(
        self,
        mesh: MeshLike = None,
        layout: Any = None,
        *,
        devices: Sequence | None = None,
        topology: str | Topology | None = None,
        data_axes: str | Sequence[str] | None = None,
        batch_axis: Any = 0,
        prefetch: int | None = None,
        donate_state: bool | str = "auto",
        shard_optimizer: bool = False,
        remat: Any = None,
        input_timeout_s: float | None = None,
        input: str = "global",
        compiler_options: Any = "auto",
        tables: str | None = "auto",
    ):
        _keras.install()
        if topology is not None:
            start_without_tpu()
        _check_environment()
        _check_no_word(mesh)
        self.options = Options(
            data_axes=data_axes,
            batch_axis=batch_axis,
            prefetch=prefetch,
            donate_state=donate_state,
            shard_optimizer=shard_optimizer,
            remat=remat,
            input_timeout_s=input_timeout_s,
            input=input,
            compiler_options=compiler_options,
            tables=tables,
        )
        self._topology = _only_named(mesh, topology)
        self._given_mesh = mesh
        if self._topology is not None and not isinstance(mesh, DeviceAssignment):
            devices = _described_devices(self._topology, devices)
        if mesh is None and isinstance(layout, keras.distribution.LayoutMap):
            mesh = layout.device_mesh
        device_mesh = build_mesh(mesh, devices)
        made = device_mesh.backend_mesh  # Keras names no types of axes.
        self._make_parts(auto_mesh(made.devices, made.axis_names), layout)
        super().__init__(
            layout_map=_as_layout_map(layout, device_mesh),
            batch_dim_name=self.mesh.axis_names[0],
            # Keras would split tf.data datasets by process, and then reads the number of replicas.
            auto_shard_dataset=False,
        )
        # If the layout is a `LayoutMap`, Keras has set the mesh of that map, and its first axis.
        self._device_mesh = device_mesh
        self._batch_dim_name = self.data_axes[0] if self.data_axes else None
        if self._topology is None:
            membership.exists(self)
            if not self.placer.is_local:
                watch_peers()

    def _make_parts(self, mesh: Mesh, layout: Any) -> None:
        options = self.options
        warn_without_tpu(list(mesh.devices.flat))
        data_axes = splitting_axes(options.data_axes, mesh)
        self.layouts = Layouts(
            mesh, data_axes, layout, options.shard_optimizer, options.batch_axis == 0
        )
        self.remat = LayerPolicies(options.remat)
        self.placer = placer_for(mesh, data_axes, options.batch_axis, options.input)
        name = None if self._topology is None else self._topology.name
        self.runner = Runner(self.layouts, self.placer, options, only_described=name)

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh`."""
        return self.layouts.mesh

    @property
    def topology(self) -> Topology | None:
        """The slice given as `topology`, else `None`."""
        return self._topology

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return self.layouts.data_axes

    @property
    def sequence_axis(self) -> str | None:
        """The mesh axis that splits activations along time: the one named `"sequence"`, if any."""
        return self.placer.sequence_axis

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of parts the batch is split into."""
        return self.placer.num_shards

    @property
    def num_model_replicas(self) -> int:
        """Keras's name for `num_replicas_in_sync`."""
        return self.placer.num_shards

    @property
    def num_hosts(self) -> int:
        """The number of processes whose devices are in the mesh."""
        return num_hosts(self.layouts.mesh)

    @property
    def input_shard(self) -> InputShard:
        """The part of every batch that this process provides, with `input="per_process"`.

        With `input="global"`, it is the part of the common batch that this process transfers.

        Raises:
            ValueError: If the parts of the processes overlap on this mesh.
        """
        return input_shards_of(self.layouts.mesh, self.layouts.data_axes).shard

    @property
    def input_wait(self) -> InputWait | None:
        """How long the devices waited for input in the last training epoch, or `None`."""
        return self.runner.reports.input_wait

    def scope(self) -> membership.Scope:
        """A context in which you build, compile and run models on this strategy's mesh.

        Scopes nest. To use the strategy for the rest of the program, call
        `keras.distribution.set_distribution(strategy)`.
        """
        return membership.Scope(self) if self._topology is None else membership.DescribedScope(self)

    def __enter__(self):
        raise TypeError(
            message(
                "A strategy is not a context manager; its scope is.",
                received={"with": self},
                fix="Write `with strategy.scope():`.",
            )
        )

    def __exit__(self, *exception):
        """Never reached: `__enter__` raises."""

    def get_variable_layout(self, variable: Any) -> NamedSharding:
        """The layout of a variable: the one it was given, or else the one that the rules choose.

        Args:
            variable: A `keras.Variable`.

        Raises:
            ValueError: If the rule that matches does not fit the variable's shape.
        """
        if not isinstance(variable, keras.Variable):
            raise ValueError(
                message(
                    "get_variable_layout returns the layout of a variable.",
                    received={"variable": variable},
                    fix="Pass a keras.Variable.",
                )
            )
        return membership.choose_layout(variable, self)

    def get_tensor_layout(self, path: str) -> Any:
        """The layout of a layer's output, or `None`.

        Args:
            path: The layer's path followed by `/output`. An annotation on the layer takes
                precedence, then a rule for this path, then the plan of the running model.
        """
        check_text("get_tensor_layout", path=path)
        return self.runner.output_layout(path)

    def plan(self, model: Any) -> Plan:
        """The layouts that the strategy's plan chooses for a model.

        Args:
            model: A built model.

        Returns:
            The plan. `plan.rules()` returns ordinary rules that you can edit and pass as `layout=`.

        Raises:
            ValueError: If the strategy's layout is not a plan.
        """
        return self.layouts.planned(model)

    def explain(self, model: Any, path: str | None = None) -> "Explanation | VariableRow":
        """How every variable of a model is split, its bytes, and why.

        Args:
            model: A model. If it is not built yet, the variables it has so far are explained.
            path: The path of one variable, or the end of its path, to see that variable alone and
                the alternatives that were considered.

        Returns:
            The explanation, or the row of one variable. You can print both.

        Raises:
            ValueError: If `path` matches no variable, or several.
        """
        # Imported here: training needs no module that explains, lints or draws.
        from keras_tpu_dist.layout.explain import explain_model, one_row

        if path is not None:
            check_text("explain", path=path)
        explanation = explain_model(
            model,
            self.placement(model),
            self.layouts.mesh,
            described(model, self),
            membership.why_not_trained(model, self),
        )
        return explanation if path is None else one_row(explanation, path)

    def lint(
        self, model: Any, batch_size: int | None = None, *, strict: bool = False
    ) -> "LintReport":
        """Finds mistakes in the layouts of a model, with a fix for every one.

        Args:
            model: A model.
            batch_size: The global batch size, to compare it with the mesh.
            strict: Whether to raise an error for findings that are errors or warnings.

        Raises:
            ValueError: If `strict` is set and there is an error or a warning.
        """
        from keras_tpu_dist.layout.lint import lint_model

        check_flags("lint", strict=strict)
        if batch_size is not None:
            check_counts("lint", 1, batch_size=batch_size)
        placement = self.placement(model)
        foreign = [
            v.path
            for v in _keras.state_variables(model)
            if not self.layouts.owns(_keras.variable_layout(v))
        ]
        report = lint_model(
            model,
            placement,
            self.layouts.setting,
            batch_size=batch_size,
            foreign=foreign,
            tables=refused(model, self),
        )
        return report.raise_if_bad() if strict else report

    def show(self, what: Any = None) -> "Picture":
        """A picture of the mesh, of a tensor over it, or of a model.

        Args:
            what: `None` for the mesh; a model; a `keras.Variable`, to see how it is split when its
                model runs; a `jax.Array`, to see how it is split now. A plan needs the variable's
                model, so the picture warns if this strategy has not seen that model.

        Returns:
            A picture. Notebooks draw it. In a terminal, `print` it or `rich.print` it. To save it,
            call `picture.save("x.png")` (needs matplotlib) or `picture.save("x.svg")`.

        Raises:
            ValueError: If `what` is none of these.
        """
        from keras_tpu_dist.layout.picture import picture_of

        def layout(variable: Any) -> tuple[NamedSharding, str]:
            return membership.layout_now(variable, self)

        return picture_of(what, self.layouts.mesh, self.placement, layout)

    def placement(self, model: Any) -> Placement:
        """The decisions about every variable of a model, with their reasons; `explain` prints them.

        Args:
            model: A model. If it is not built yet, the variables it has so far are used.
        """
        placement = self.layouts.placement(model, membership.given_layout)
        membership.note_asked(model, self)
        return placement

    def get_data_layout(self, data_shape: Sequence[int]) -> NamedSharding:
        """The layout of an input whose first dimension is the batch.

        Args:
            data_shape: The input's shape. A scalar, with shape `()`, has no batch and is not split.
        """
        if not isinstance(data_shape, Iterable) or isinstance(data_shape, str):
            raise ValueError(
                message(
                    "get_data_layout takes the shape of an input.",
                    received={"data_shape": data_shape},
                    fix="Pass for example x.shape.",
                )
            )
        return self.placer.sharding(0 if len(data_shape) else None)

    def __reduce__(self):
        recipe = (
            pickling.mesh_recipe(self.layouts.mesh, self._given_mesh, self._topology),
            pickling.layout_recipe(self.layouts.layout),
            None if isinstance(self._given_mesh, DeviceAssignment) else self._topology,
            self.options,
        )
        return _made_again, (type(self), *recipe)

    def __repr__(self):
        mesh, platform = self.layouts.mesh, self.layouts.mesh.devices.flat[0].platform
        return f"<TPUStrategy mesh={dict(mesh.shape)} on {mesh.size} {platform}>"


def _made_again(cls: type, mesh: Any, layout: Any, topology: Any, options: Options) -> TPUStrategy:
    """A strategy from its pickled arguments."""
    mesh = pickling.mesh_of(mesh)
    layout = pickling.layout_of(layout, mesh, topology)
    return cls(mesh, layout, topology=topology, **options.as_arguments())


def _as_layout_map(layout: Any, device_mesh: Any) -> keras.distribution.LayoutMap:
    """The layout as Keras takes it: an empty map if it is not a `LayoutMap`."""
    kind = keras.distribution.LayoutMap
    return layout if isinstance(layout, kind) else kind(device_mesh)


def _only_named(mesh: MeshLike, topology: str | Topology | None) -> Topology | None:
    """The topology of a strategy that has no chips attached, or `None`."""
    named = None if topology is None else Topology.parse(topology)
    if named is not None and not named.is_described:
        raise ValueError(
            message(
                "topology= is for a slice that is not attached to this machine.",
                received={"topology": f"{named}, which is attached"},
                fix="Leave it out, or write devices=topology.devices().",
            )
        )
    if not isinstance(mesh, DeviceAssignment):
        return named
    if named is not None and named != mesh.topology:
        raise ValueError(
            message(
                "A DeviceAssignment belongs to one slice.",
                received={"mesh": f"on {mesh.topology}", "topology": named.name},
                fix="Leave `topology` out.",
            )
        )
    return mesh.topology if mesh.topology.is_described else None


def _described_devices(topology: Topology, devices: Sequence | None) -> list:
    if devices is not None:
        raise ValueError(
            message(
                "A strategy has devices or a topology, not both.",
                received={"devices": list(devices), "topology": topology.name},
                fix="Leave one of them out.",
            )
        )
    return topology.devices()


def _check_no_word(mesh: Any) -> None:
    """Raises a `ValueError` if the mesh is a text or a TensorFlow object."""
    instead = tensorflow_names.of_value(mesh)
    if isinstance(mesh, str):
        instead = tensorflow_names.of_argument("TPUStrategy", "tpu")
        if mesh in PLANS:
            instead = f"A plan is a layout: write TPUStrategy(layout={mesh!r})."
        elif ":" in mesh and "/" not in mesh:
            instead = f"To use a slice without its chips, write TPUStrategy(topology={mesh!r})."
        elif mesh.isidentifier() and mesh != "local":
            instead = f"Write TPUStrategy({{{mesh!r}: -1}}) for an axis; for a TPU: {instead}"
    if instead is not None:
        raise ValueError(
            message(
                "A mesh is a dict of axis sizes, and the first argument of TPUStrategy.",
                received={"mesh": mesh},
                fix=instead,
            )
        )


def _check_environment() -> None:
    if keras.config.is_nnx_enabled():
        raise RuntimeError(
            message(
                "TPUStrategy needs Keras's own variables, not those of Flax NNX.",
                received="keras.config.is_nnx_enabled()=True.",
                fix="Unset KERAS_NNX_ENABLED.",
            )
        )
