"""TPUStrategy: the distribution that trains Keras models on a mesh of devices."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import keras
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist import attention as attention  # registers its replacements in Keras
from keras_tpu_dist.common import tensorflow_names
from keras_tpu_dist.common.checks import PositiveInt, Seconds, checked_arguments
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.hardware.assignment import DeviceAssignment
from keras_tpu_dist.hardware.crossings import num_hosts
from keras_tpu_dist.hardware.libtpu import start_without_tpu
from keras_tpu_dist.hardware.mesh import MeshLike, auto_mesh, build_mesh, grown, splitting_axes
from keras_tpu_dist.hardware.simulation import warn_without_tpu
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.input.clock import InputWait
from keras_tpu_dist.input.process_rows import placer_for
from keras_tpu_dist.input.shards import InputShard, input_shards_of
from keras_tpu_dist.layout.layouts import Layouts
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.layout.planner import PLANS, Plan
from keras_tpu_dist.logical.devices import LogicalDevices
from keras_tpu_dist.memory.remat import LayerPolicies
from keras_tpu_dist.processes.start import watch_peers
from keras_tpu_dist.programs.passes import explained
from keras_tpu_dist.programs.tables.step import refused
from keras_tpu_dist.replica.datasets import (
    InputContext,
    ValueContext,
    distribute_dataset,
    distribute_datasets_from_function,
    distribute_values_from_function,
)
from keras_tpu_dist.replica.iteration import DistributedDataset, DistributedIterator
from keras_tpu_dist.replica.loop import Launches
from keras_tpu_dist.replica.run import ReplicaCode, gather, local_results, reduce
from keras_tpu_dist.replica.run_options import RunOptions
from keras_tpu_dist.training import adoption, membership, pickling
from keras_tpu_dist.training.compilation_cache import checked_cache, use_cache
from keras_tpu_dist.training.options import Ahead, Donate, Head, Input, Options, Tables
from keras_tpu_dist.training.runner import Runner
from keras_tpu_dist.training.scope import DescribedScope, Scope

if TYPE_CHECKING:
    from keras_tpu_dist.layout.explain import Explanation, VariableRow
    from keras_tpu_dist.layout.lint import LintReport
    from keras_tpu_dist.layout.picture import Picture
    from keras_tpu_dist.tools.checkup.report import Check
    from keras_tpu_dist.tools.dryrun.run import Build, DryRun, Progress
    from keras_tpu_dist.tools.replay import Verification


class TPUStrategy(TensorFlowNames, keras.distribution.ModelParallel):
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
            the state; if a launch fails, you get the weights from the start of the epoch, or from
            at most a minute before it. `False` keeps a copy of the state before every step.
            `"auto"` keeps a copy if two states fit in 10 % of the device's memory (8 MiB if that is
            unknown) and there are at most 64 variables.
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
        head: How to compute logits of a large vocabulary and their loss in `fit` and `evaluate`.
            `"pieces"`: in pieces of the vocabulary, so that the logits of all words never exist at
            the same time; they are computed twice. `"whole"`: as the model does. `"auto"`: in
            pieces if the logits and their gradient would take more than 0.4 of the memory that
            weights, slots and gradients leave.
        compilation_cache: Where compiled programs are cached, so that the next process does not
            compile them again: a folder or a bucket, `True` for the default one, `False` for none.
            JAX has one cache for the process. `None`: the folder of `KTD_COMPILATION_CACHE`, if it
            is set, else the default one on TPUs. A cache that you set in JAX itself stays.

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

    @checked_arguments
    def __init__(
        self,
        mesh: MeshLike = None,
        layout: Any = None,
        *,
        devices: Sequence | None = None,
        topology: str | Topology | None = None,
        data_axes: str | Sequence[str] | None = None,
        batch_axis: Any = 0,
        prefetch: Ahead | None = None,
        donate_state: Donate = "auto",
        shard_optimizer: bool = False,
        remat: Any = None,
        input_timeout_s: Seconds | None = None,
        input: Input = "global",
        compiler_options: Any = "auto",
        tables: Tables | None = "auto",
        head: Head = "auto",
        compilation_cache: bool | str | os.PathLike | None = None,
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
            head=head,
            compilation_cache=checked_cache(compilation_cache),
        )
        self._topology = _only_named(mesh, topology)
        self._given_mesh = mesh
        if self._topology is not None and not isinstance(mesh, DeviceAssignment):
            devices = _described_devices(self._topology, devices)
        if mesh is None and isinstance(layout, keras.distribution.LayoutMap):
            mesh = layout.device_mesh
        device_mesh = build_mesh(mesh, devices)
        self._make_parts(device_mesh.backend_mesh, layout)
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
            membership.register(self)
            if not self.placer.is_local:
                watch_peers()

    def _make_parts(self, mesh: Mesh, layout: Any) -> None:
        options = self.options
        mesh = auto_mesh(mesh.devices, mesh.axis_names)  # Keras names no types of axes.
        warn_without_tpu(list(mesh.devices.flat))
        data_axes = splitting_axes(options.data_axes, mesh)
        if self._topology is None:
            # Before anything is compiled.
            first = mesh.devices.flat[0]
            use_cache(options.compilation_cache, first.platform, num_hosts(mesh))
        self.layouts = Layouts(
            mesh, data_axes, layout, options.shard_optimizer, options.batch_axis == 0
        )
        self.remat = LayerPolicies(options.remat)
        self.replica_code = ReplicaCode()
        self.logical_devices = LogicalDevices(mesh, data_axes, self._topology)
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
    def logical_axes(self) -> tuple[str, ...]:
        """The mesh axes that make up a replica."""
        return self.logical_devices.axes

    @property
    def num_logical_devices(self) -> int:
        """The number of devices that share one replica."""
        return self.logical_devices.number

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

    def scope(self) -> Scope:
        """A context in which you build, compile and run models on this strategy's mesh.

        Scopes nest. To use the strategy for the rest of the program, call
        `keras.distribution.set_distribution(strategy)`.
        """
        return Scope(self) if self._topology is None else DescribedScope(self)

    def get_variable_layout(self, variable: Any) -> NamedSharding:
        """The layout of a variable: the one it was given, or else the one that the rules choose.

        Args:
            variable: A `keras.Variable`.

        Raises:
            ValueError: If the rule that matches does not fit the variable's shape.
        """
        if not isinstance(variable, keras.Variable):
            raise value_error(
                "get_variable_layout returns the layout of a variable.",
                received={"variable": variable},
                fix="Pass a keras.Variable.",
            )
        return adoption.choose_layout(variable, self)

    @checked_arguments
    def get_tensor_layout(self, path: str) -> Any:
        """The layout of a layer's output, or `None`.

        Args:
            path: The layer's path followed by `/output`. An annotation on the layer takes
                precedence, then a rule for this path, then the plan of the running model.
        """
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

    @checked_arguments
    def explain(
        self, model: Any, path: str | None = None, *, passes: bool = True
    ) -> "Explanation | VariableRow":
        """How every variable of a model is split, its bytes, and why.

        Below the variables, it lists what is computed otherwise than you wrote it, and why the rest
        is not.

        Args:
            model: A model. If it is not built yet, the variables it has so far are explained.
            path: The path of one variable, or the end of its path, to see that variable alone and
                the alternatives that were considered.
            passes: Whether to list what is computed otherwise.

        Returns:
            The explanation, or the row of one variable. You can print both.

        Raises:
            ValueError: If `path` matches no variable, or several.
        """
        # Imported here: training needs no module that explains, lints or draws.
        from keras_tpu_dist.layout.explain import explain_model, one_row

        explanation = explain_model(
            model,
            self.placement(model),
            self.layouts.mesh,
            explained(model, self) if passes else {},
            membership.why_not_trained(model, self),
        )
        return explanation if path is None else one_row(explanation, path)

    @checked_arguments
    def lint(
        self, model: Any, batch_size: PositiveInt | None = None, *, strict: bool = False
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

        placement = self.placement(model)
        foreign = [
            v.path
            for v in _keras.state_variables(model)
            if not self.layouts.owns(_keras.variable_layout(v))
        ]
        report = lint_model(
            model,
            placement,
            self.layouts,
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
                model, so the picture warns if that model is not this strategy's.

        Returns:
            A picture. Notebooks draw it. In a terminal, `print` it or `rich.print` it. To save it,
            call `picture.save("x.svg")`.

        Raises:
            ValueError: If `what` is none of these.
        """
        from keras_tpu_dist.layout.picture import picture_of

        def layout(variable: Any) -> tuple[NamedSharding, str]:
            return adoption.layout_now(variable, self)

        return picture_of(what, self.layouts.mesh, self.placement, layout)

    def placement(self, model: Any) -> Placement:
        """The decisions about every variable of a model, with their reasons; `explain` prints them.

        Args:
            model: A model. If it is not built yet, the variables it has so far are used.
        """
        return self.layouts.placement(model, membership.given_layout)

    def get_data_layout(self, data_shape: Sequence[int]) -> NamedSharding:
        """The layout of an input whose first dimension is the batch.

        Args:
            data_shape: The input's shape. A scalar, with shape `()`, has no batch and is not split.
        """
        if not isinstance(data_shape, Iterable) or isinstance(data_shape, str):
            raise value_error(
                "get_data_layout takes the shape of an input.",
                received={"data_shape": data_shape},
                fix="Pass for example x.shape.",
            )
        return self.placer.sharding(0 if len(data_shape) else None)

    def run(
        self,
        fn: Callable,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        steps: int = 1,
        outputs: str = "last",
    ) -> Any:
        """Runs a function once per replica, as one compiled program.

        Every replica gets its own part of per-replica arguments (from `distribute_dataset`,
        `distribute_values_from_function` or an earlier `run`), and all other arrays and numbers
        whole. `True`, strings and other objects are constants of the program. Within the function,
        `get_replica_context()` has the replica's number and the collectives.

        With `steps=N` the function runs N times in one launch. If an argument is an iterator over a
        distributed dataset, the steps use its next N batches; otherwise they use the same
        arguments. Variables, seeds and metrics go from step to step, so the results are those of N
        calls. Batches are transferred together, and the next N while the devices work. If fewer
        batches are left, or they differ in shape, they are launched one by one, as are those with
        `RunOptions(buckets=...)`. `strategy.loop` does the same for a whole dataset.

        The function can read and update Keras variables, layers, models, optimizers and metrics
        from its closure or its arguments. An update is combined by the variable's `aggregation`:
        `"mean"`, `"sum"`, `"only_first_replica"`. With `"none"`, Keras's default, an update that is
        the same on all replicas is assigned as it is, a floating-point update that differs (moving
        statistics) is averaged, and it is an error if a trainable weight would differ: reduce the
        gradients first. Metrics (`synchronization="on_read"`) have a separate value on every
        replica, which are combined when you read them outside. Seed generators draw different
        numbers on every replica and advance once a step. If anything raises before the program is
        launched, no variable is assigned. The strategy's `donate_state` decides, as in `fit`,
        whether a launch overwrites updated variables, or keeps the old values and needs memory for
        both. Arrays that you keep, such as `variable.value`, are never overwritten. Within the
        function a variable is not split over the data axes, even under "fsdp"; splits over other
        axes remain.

        The function is traced at its first call and for new shapes, and not called again, so pass
        the same function object every time. A lambda written in the loop is a new function every
        time, and is traced and compiled again, with a warning.

        If the mesh spans several processes, all of them call `run` with the same function and the
        same arguments; pass values that differ as per-replica values. This is checked at the first
        call of every program, as are the values of the variables.

        Args:
            fn: The function. It returns arrays, numbers, `None` or a structure of them.
            args: Its positional arguments: arrays, `keras.Variable`s, structures of them, and
                constants; or an iterator over a distributed dataset, which every step replaces by
                the next batch.
            kwargs: Its keyword arguments.
            options: `RunOptions` for inputs of varying sizes.
            steps: The number of steps in the launch; fewer if the iterator has fewer batches left.
            outputs: Which results of several steps to return: `"last"`, or `"all"`, with the steps
                along a new first dimension of every replica's values.

        Returns:
            The structure that `fn` returned, with a `PerReplica` instead of every array.

        Raises:
            ValueError: If `fn` returns something else, a per-replica argument belongs to another
                strategy or is uneven, or an update cannot be combined; on all processes, if their
                arguments or variables differ; if `outputs="all"` and steps have results of
                different shapes.
            StopIteration: If the iterator among the arguments has no batch left.
            PeerError: If other processes run something else.
            RuntimeError: Inside another `run`.
            TypeError: If an argument has the wrong type.

        Example:

        >>> import jax, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> strategy.run(lambda x: x * 2.0, args=(3.0,))
        PerReplica:{
          0: array(6., dtype=float32),
          1: array(6., dtype=float32)
        }
        >>> import numpy as np
        >>> batches = iter(strategy.distribute_dataset(np.arange(6), batch_size=2))
        >>> strategy.run(lambda x: x[0], args=(batches,), steps=2, outputs="all")
        PerReplica:{
          0: array([0, 2], dtype=int32),
          1: array([1, 3], dtype=int32)
        }
        """
        return self.replica_code.run(self, fn, args, kwargs, options, steps, outputs)

    def loop(
        self,
        fn: Callable,
        dataset: DistributedDataset | DistributedIterator,
        steps_per_launch: int = 32,
        *,
        args: Sequence[Any] = (),
        options: RunOptions | None = None,
        outputs: str = "last",
    ) -> Launches:
        """Runs a function for every batch of a dataset, many in one launch.

        It is `strategy.run(fn, (batch, *args))` for one batch after the other, with the same
        numbers, at the speed of `fit` with `steps_per_execution`. `steps_per_launch` batches of one
        shape are one program with a loop on the devices, while the next ones are read and
        transferred. Remaining batches at the end, and batches of another shape, are launched one by
        one.

        Steps run while you iterate, so between two launches you can print, save, evaluate or leave
        the loop. You can use `keras.utils.Progbar` and Keras's callbacks there.

        Args:
            fn: The function of a batch. See `run`.
            dataset: The result of `distribute_dataset` or `distribute_datasets_from_function`, or
                an iterator over it, which continues.
            steps_per_launch: The number of steps in a launch.
            args: More arguments after the batch, the same in all steps.
            options: `RunOptions` for batches of varying sizes.
            outputs: Which results to return: `"last"`, those of a launch's last step; or `"all"`,
                with the steps along a new first dimension of every replica's values.

        Returns:
            An iterator. It runs the next launch, and yields the number of steps so far and the
            structure that `fn` returned, with a `PerReplica` for every array.

        Raises:
            ValueError: If `run` raises it.
            TypeError: If `dataset` is neither, or an argument has the wrong type.

        Example:

        >>> import jax, numpy as np, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> dataset = strategy.distribute_dataset(np.arange(10.0), batch_size=2)
        >>> def step(x):
        ...     return ktd.get_replica_context().all_reduce("sum", x[0])
        >>> for step, sums in strategy.loop(step, dataset, steps_per_launch=2, outputs="all"):
        ...     print(step, strategy.local_results(sums)[0])
        2 [1. 5.]
        4 [ 9. 13.]
        5 [17.]
        """
        return self.replica_code.loop(self, fn, dataset, steps_per_launch, args, options, outputs)

    def local_results(self, value: Any) -> tuple:
        """The values of all replicas of this process.

        With several processes, every process gets the values of its own replicas, as in
        `tf.distribute`: of the replicas that have a device there (`PerReplica.replica_ids`). A
        replica that spans processes is in all of them. The values are local arrays of this process.

        Args:
            value: A result of `run` or a batch of a distributed dataset: a `PerReplica` or a
                structure with some; or an `"on_read"` variable, for the separate values of the
                replicas.

        Returns:
            A tuple with one structure per replica; `(value,)` for anything without a `PerReplica`.

        Raises:
            ValueError: If a value belongs to another strategy.
        """
        return local_results(self, value)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Combines values over replicas, and optionally over a dimension of the values.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"max"`, `"min"`, in any case, or an enum with such names.
            value: A `PerReplica` or a structure of them. The mean, maximum and minimum of a value
                that all replicas share is the value itself.
            axis: The dimension of the replicas' values, or several, to reduce as well, usually 0,
                the batch; `None` or `()`: only over replicas. A mean over uneven batches counts
                rows, not replicas.

        A sum of integers or of `bool` has at least 32 bits, their mean is a floating-point number,
        everything else keeps its dtype; numbers with fewer than 32 bits are added up in float32.
        `all_reduce` of the replica context does the same.

        Returns:
            Arrays, the same on all devices and in all processes. All processes must call it.

        Raises:
            ValueError: For a sum of a value that all replicas share; for values of different sizes
                without the axis in which they differ; for the maximum or minimum of no values or of
                complex numbers; if a value belongs to another strategy.
        """
        return reduce(self, reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Joins values of all replicas along a dimension.

        Args:
            value: A `PerReplica` or a structure of them; others are returned as they are.
            axis: The dimension.

        Returns:
            Arrays, the same on all devices and in all processes. All processes must call it.

        Raises:
            ValueError: If a value is a scalar or lacks the dimension, or values differ in another
                dimension, or belong to another strategy.
        """
        return gather(self, value, axis)

    def distribute_dataset(
        self, dataset: Any, options: RunOptions | None = None, *, batch_size: int | None = None
    ) -> DistributedDataset:
        """Splits the global batches of a dataset over the replicas.

        If a batch has B rows, every one of N replicas gets ceil(B / N) consecutive rows, and the
        last ones fewer, or none, as in `tf.distribute`; for such a batch, pass
        `RunOptions(dynamic_batch=True)` to `run`. All replicas get whole scalars, and whole
        elements that the strategy's `batch_axis` declares without a batch.

        With several processes, all of them pass the same dataset, and every process transfers the
        rows of its own replicas. With `TPUStrategy(input="per_process")` every process passes its
        own rows (`strategy.input_shard`), as to `fit`. They go to its own replicas, a step uses the
        next batch of every process, and all iterations end together.

        Args:
            dataset: An iterable of global batches (structures of arrays): a list, a generator, a
                `keras.utils.PyDataset`, a `tf.data.Dataset`, a torch `DataLoader`; or, with
                `batch_size`, an array or a structure of arrays, to divide into batches along the
                strategy's `batch_axis`.
            options: The `RunOptions` that you pass to `run`: lengths are padded to buckets here,
                before the transfer.
            batch_size: The global batch size, if `dataset` is arrays.

        Returns:
            A `DistributedDataset`; its batches hold a `PerReplica` for every array.

        Raises:
            ValueError: If arrays come without `batch_size` or batches with it; while iterating, on
                all processes, if their batches do not fit together.
            PeerError: While iterating, if not all processes do.
            TypeError: If `options` is not `RunOptions`.

        Example:

        >>> import jax, numpy as np, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> for x in strategy.distribute_dataset(np.arange(4), batch_size=2):
        ...     print(strategy.run(lambda x: x * 2, args=(x,)))
        PerReplica:{
          0: array([0], dtype=int32),
          1: array([2], dtype=int32)
        }
        PerReplica:{
          0: array([4], dtype=int32),
          1: array([6], dtype=int32)
        }
        """
        return distribute_dataset(self, dataset, options, batch_size)

    @checked_arguments
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable]
    ) -> DistributedDataset:
        """Distributes a dataset that already has batches for one replica.

        Every step takes one batch for every replica, in order. If the dataset ends within a step,
        the remaining replicas get no rows.

        With several processes, all of them call the function. By default there is one input
        pipeline, which all of them read. With `TPUStrategy(input="per_process")` there is one for
        every input shard, whose batches go to the replicas of its processes. If your function
        splits its data by the context's `input_pipeline_id` of `num_input_pipelines`, it is right
        in both cases.

        Args:
            dataset_fn: A function of an `InputContext` that returns an iterable of batches of one
                replica's size (`context.get_per_replica_batch_size(global_batch_size)`).

        Returns:
            A `DistributedDataset`.
        """
        return distribute_datasets_from_function(self, dataset_fn)

    @checked_arguments
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Creates per-replica values by a function that is called once for every replica.

        With several processes, every process calls it for its own replicas, in the order of their
        numbers.

        Args:
            value_fn: A function of a `ValueContext` that returns a number, an array or a structure
                of them.

        Returns:
            The structure, with a `PerReplica` instead of every array.

        Raises:
            ValueError: If the values are not numbers or do not fit together.
            PeerError: If not all processes call it.

        Example:

        >>> import jax, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> strategy.distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        PerReplica:{
          0: array(2, dtype=int32),
          1: array(2, dtype=int32)
        }
        """
        return distribute_values_from_function(self, value_fn)

    def split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int], batch_axis: int | None = 0
    ) -> Any:
        """Splits a tensor over the logical devices of every replica.

        Logical device `i` of a replica gets block `i` of the replica's rows, in row-major order, as
        `numpy.arange(num_logical_devices).reshape(partition_dimensions)` counts. Operations on the
        tensor run on the devices that hold its parts; the compiler adds the exchange of borders
        that a convolution needs. Values do not change.

        You can use it in `Layer.call`, in custom steps, in functions passed to `strategy.run`, on
        the `keras.KerasTensor` of a functional model (it becomes a layer of the model and is saved
        with it), or on arrays.

        Args:
            tensor: A tensor whose dimension `batch_axis` is the batch, `(batch, ...)`.
            partition_dimensions: One positive integer for every dimension: the number of parts. In
                compiled code the batch may have any size; every other dimension must be divisible.
            batch_axis: The dimension that is also split over the replicas, or `None` if every
                replica has the whole tensor.

        Returns:
            The tensor, split.

        Raises:
            ValueError: If there is not one number for every dimension, a dimension is not
                divisible, the product is not `num_logical_devices`, or the mesh's axes cannot
                express the partition.

        References:
            - tensorflow.org/api_docs/python/tf/distribute/TPUStrategy,
              `experimental_split_to_logical_devices`.

        Example:

        >>> import jax, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy({"data": 2, "rows": 2, "columns": 2})
        >>> images = jax.numpy.ones((4, 8, 6, 3))
        >>> split = strategy.split_to_logical_devices(images, [1, 2, 2, 1])
        >>> split.addressable_shards[0].data.shape
        (2, 4, 3, 3)
        """
        return self.logical_devices.split(tensor, partition_dimensions, batch_axis)

    def replicate_to_logical_devices(self, tensor: Any, batch_axis: int | None = 0) -> Any:
        """Copies the full tensor to every logical device of its replica.

        Args:
            tensor: A tensor whose dimension `batch_axis` is the batch. For the kinds of tensors,
                see `split_to_logical_devices`.
            batch_axis: The dimension that the replicas split, or `None`.

        Returns:
            The tensor, whole on every logical device; the batch stays split over the replicas.

        Raises:
            ValueError: If an array outside of compiled code has a batch that is not divisible.
        """
        return self.logical_devices.replicate(tensor, batch_axis)

    def assign_to_logical_device(self, target: Any, logical_device_id: int) -> Any:
        """Lets one logical device of every replica compute a layer or a function.

        Args:
            target: A layer or model, or a function of arrays; see `keras_tpu_dist.assign`. A
                `keras.KerasTensor` means the layer that computes it. An array is returned
                unchanged, because it is already computed.
            logical_device_id: The logical device, from 0.

        Returns:
            The layer; a function that computes on that device; or the tensor.

        Raises:
            ValueError: If there is no such logical device, or `target` cannot be assigned.
        """
        return self.logical_devices.assign(target, logical_device_id)

    def logical_device(self, logical_device_id: int) -> AbstractContextManager[None]:
        """A scope that assigns the layers created in it to one logical device.

        Models created in it are not assigned as a whole, but their layers are.

        Args:
            logical_device_id: The logical device, from 0.

        Raises:
            ValueError: If there is no such logical device.
        """
        return self.logical_devices.scope(logical_device_id)

    experimental_local_results = local_results
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_split_to_logical_devices = split_to_logical_devices
    experimental_replicate_to_logical_devices = replicate_to_logical_devices
    experimental_assign_to_logical_device = assign_to_logical_device
    experimental_logical_device = logical_device

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
            mesh = grown(dict(self.layouts.mesh.shape), self.layouts.data_axes, topology)
        options = self.options.as_arguments()
        return type(self)(mesh, self.layouts.layout, topology=topology, **options)

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
        rows: int | None = None,
        mode: str = "train",
        effort: str = "quick",
        timeout: float = 1800.0,
        verify: bool = False,
        progress: "Progress | None" = None,
    ) -> "DryRun":
        """Compiles one step of a model for this strategy's devices or for another slice.

        The arguments that are not listed are those of `keras_tpu_dist.dry_run`.

        Args:
            model: A built model, which may be on this strategy's mesh and is not changed; or a
                function that builds, compiles and returns one, which needs no memory for weights.
            batch_size: The global batch size. By default, the largest that fits a slice.
            topology: A slice, such as `"v5e:16x16"`; see `on_topology`. Defaults to this strategy's
                own devices.
            mesh: Axis sizes on that slice. By default the first data axis fills it.

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
        if mesh is not None and (topology is None or not isinstance(mesh, Mapping)):
            raise value_error(
                "mesh has the axis sizes on another slice.",
                received={"mesh": mesh, "topology": topology},
                fix="Name the slice with topology, or leave mesh out.",
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
            rows=rows,
            mode=mode,
            effort=effort,
            timeout=timeout,
            verify=verify,
            progress=progress,
        )

    def verify_run(
        self,
        fn: Callable,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        steps: int = 1,
        topology: str | Topology,
        as_on_chip: bool = False,
        timeout: float = 1800.0,
    ) -> "Verification":
        """Runs what the TPU compiler makes of a launch of `run` or `loop`, without a TPU.

        The real TPU compiler compiles the launch for a slice with as many devices as this strategy
        has simulated ones. Its program runs on these, and so does the program that they have
        anyway, with the same arguments and values of variables. Every result and every update is
        compared. No variable changes; an iterator among the arguments moves on.

        The arguments that are not listed are those of `run`.

        Args:
            steps: The number of steps of the launch; for `loop`, its `steps_per_launch`.
            topology: The slice, such as `"v5e:2x4"`.
            as_on_chip: Whether products of float32 round their operands, as a TPU does by default.
            timeout: Seconds after which compiling, or running, is stopped.

        Returns:
            A `Verification`. If results differ, you see it there; no error is raised.

        Raises:
            ValueError: If an argument is wrong, the strategy has no simulated devices or another
                number of them than the slice, or the program has an operation that cannot be run
                on simulated devices.
            RuntimeError: If the compiler refuses the program, or libtpu is not installed.

        Example:

        >>> import keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy()  # on 8 simulated devices
        >>> def mean(x):
        ...     return ktd.get_replica_context().all_reduce("mean", x)
        >>> print(strategy.verify_run(mean, (1.0,), topology="v5e:2x4").equal)  # doctest: +SKIP
        True
        """
        from keras_tpu_dist.tools.replay.replica import verify_run

        return verify_run(self, fn, args, kwargs, options, steps, topology, as_on_chip, timeout)

    def _verified(self, model: Any, **asked: Any) -> "Verification":
        """`keras_tpu_dist.verify`, for dry runs, which do not import what runs their programs."""
        from keras_tpu_dist.tools.replay import verify

        return verify(model, self, **asked)

    def check(
        self,
        model: Any = None,
        *,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        minutes: float = 3.0,
    ) -> "Check":
        """Checks whether the devices compute correct results.

        It compares products, collectives and launches of small models with references. If you pass
        a model, it also compares a training step on all devices with the step on one device. With
        several processes, call it in all of them. Parts that do not fit into the time limit are
        left out, and listed. If you have set a `floatx` other than float32, build and train nothing
        in other threads meanwhile: Keras has one for all threads, and some parts set it to float32.

        Args:
            model: A built and compiled model. The check does not change it.
            x: Its input: arrays, or `jax.ShapeDtypeStruct` for random values. Defaults to the
                inputs that the model declares.
            y: The target: arrays or `jax.ShapeDtypeStruct`, too.
            sample_weight: Sample weights.
            batch_size: Rows of the step, for all devices together. The default is an uneven
                batch: two rows for each part and one more.
            sequence_length: The size of every open time axis of the inputs.
            minutes: The approximate time limit.

        Returns:
            A `Check`. You can `print` it, or look at `check.ok` and `check.problems`.

        Raises:
            ValueError: If an argument is wrong, the model has no step that can be compared, or the
                strategy is for a slice that is not attached.

        Example:

        >>> import keras_tpu_dist as ktd
        >>> check = ktd.TPUStrategy({"data": 4, "model": 2}).check()  # doctest: +SKIP
        >>> check.ok  # doctest: +SKIP
        True
        """
        from keras_tpu_dist.tools.checkup.method import check

        return check(self, model, x, y, sample_weight, batch_size, sequence_length, minutes)

    def __reduce__(self):
        recipe = (
            pickling.mesh_recipe(self.layouts.mesh, self._given_mesh, self._topology),
            pickling.layout_recipe(self.layouts.layout),
            None if isinstance(self._given_mesh, DeviceAssignment) else self._topology,
            self.options,
        )
        return _made_again, (type(self), *recipe)

    def __repr__(self):
        mesh = self.layouts.mesh
        where = f"{mesh.size} {mesh.devices.flat[0].platform}"
        if self._topology is not None:
            where = f"a described {self._topology.name}"
        return f"<TPUStrategy mesh={dict(mesh.shape)} on {where}>"


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
        raise value_error(
            "topology= is for a slice that is not attached to this machine.",
            received={"topology": f"{named}, which is attached"},
            fix="Leave it out, or write devices=topology.devices().",
        )
    if not isinstance(mesh, DeviceAssignment):
        return named
    if named is not None and named != mesh.topology:
        raise value_error(
            "A DeviceAssignment belongs to one slice.",
            received={"mesh": f"on {mesh.topology}", "topology": named.name},
            fix="Leave `topology` out.",
        )
    return mesh.topology if mesh.topology.is_described else None


def _described_devices(topology: Topology, devices: Sequence | None) -> list:
    if devices is not None:
        raise value_error(
            "A strategy has devices or a topology, not both.",
            received={"devices": list(devices), "topology": topology.name},
            fix="Leave one of them out.",
        )
    return topology.devices()


def _check_no_word(mesh: Any) -> None:
    """Raises a `ValueError` if the mesh is a text or a TensorFlow object."""
    instead = tensorflow_names.of_value(mesh)
    if isinstance(mesh, str):
        instead = tensorflow_names.of_argument("TPUStrategy", "tpu")
        if mesh in PLANS:
            instead = f"A plan is a layout: write TPUStrategy(layout={mesh!r})."
        elif re.match(r"(\d+\*)?v\d", mesh):  # the name of a slice
            instead = f"To use a slice without its chips, write TPUStrategy(topology={mesh!r})."
        elif mesh.isidentifier() and mesh not in ("local", "tpu"):
            instead = f"Write TPUStrategy({{{mesh!r}: -1}}) for an axis; for a TPU: {instead}"
    if instead is not None:
        raise value_error(
            "A mesh is a dict of axis sizes, and the first argument of TPUStrategy.",
            received={"mesh": mesh},
            fix=instead,
        )


def _check_environment() -> None:
    if keras.config.is_nnx_enabled():
        raise runtime_error(
            "TPUStrategy needs Keras's own variables, not those of Flax NNX.",
            received="keras.config.is_nnx_enabled()=True.",
            fix="Unset KERAS_NNX_ENABLED.",
        )
