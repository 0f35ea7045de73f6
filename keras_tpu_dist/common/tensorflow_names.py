"""TensorFlow names that this package does not have, and what to write instead."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keras_tpu_dist.common.errors import message

_GUIDE = "Pass none of TensorFlow's objects: docs/migration.md says what to write for each."
_NO_CLUSTER = "Leave it out: there is no cluster and no session, JAX finds the chips."
_RUN = "Write strategy.run over the batches of strategy.distribute_dataset."
_STEPS = (
    "Write strategy.run(fn, (iterator,), steps=N), or for fit "
    "model.compile(..., steps_per_execution=N)."
)
_UPDATE = "Assign to the variable, variable.assign(value), within strategy.run or outside."
_DATASET_OPTIONS = (
    "Leave it out: batches are put on the devices, and TPUStrategy(prefetch=N) says how many ahead."
)
_COLLECTIVES = "Leave it out: XLA schedules the collectives."
_COORDINATES = "Ask topology.coordinates() for the chips and topology.devices() for the devices."
_COMPILE = "Write it in model.compile(...): optimizer=, loss=, metrics=."
_SAVE = "Write ktd.callbacks.Checkpoint(directory, every_steps=, every_minutes=, keep=)."
_ONE_PIPELINE = (
    'Write TPUStrategy(input="per_process") for one input pipeline in each process; else all read '
    "the same global batches."
)
_INFEED = "Leave it out: there is no infeed or outfeed."
_SCOPE = "Build and compile a Keras model within strategy.scope()."
_BATCH_SIZE = "Write batch_size= of fit, evaluate or predict: the global one, of any size."
_OUTPUTS = "Return it from the model's call."
_EXPORT = "Write model.export(path)."
_OTHER_STRATEGY = (
    "Write TPUStrategy(): it runs on all devices that JAX has, on any number of hosts."
)
_PREEMPTION = "Write ktd.callbacks.Checkpoint(directory): it saves when the machine is taken away."
_DEVICES_OF_FUNCTION = (
    "Write `with strategy.logical_device(k):` around the layers' creation, ktd.assign(layer, k), "
    "or strategy.assign_to_logical_device(function, k)(x)."
)
_ELEMENT_SPEC = (
    "Leave it out: nothing is traced for a signature, programs are made for the shapes that come."
)
_PARTITION = "Write strategy.split_to_logical_devices(x, [1, 2, 2, 1]) in the model."
_TPU_CONFIG = {
    "iterations_per_loop": "Write model.compile(..., steps_per_execution=N).",
    "num_shards": "Leave it out: strategy.num_replicas_in_sync follows from the mesh.",
    "num_cores_per_replica": 'Write TPUStrategy({"data": -1, "model": N}).',
    "per_host_input_for_training": _ONE_PIPELINE,
    "tpu_job_name": _NO_CLUSTER,
    "initial_infeed_sleep_secs": _INFEED,
    "input_partition_dims": _PARTITION,
    "eval_training_input_configuration": _ONE_PIPELINE,
    "experimental_host_call_every_n_steps": "Write a callback that acts on each Nth batch.",
    "experimental_allow_per_host_v2_parallel_get_next": "Write TPUStrategy(prefetch=N).",
    "experimental_customized_tpu_infeed_outfeed_session_hook_class": _INFEED,
    "experimental_feed_hook": _INFEED,
}
_RUN_CONFIG = {
    "tpu_config": "Write what stands in it; ktd.TPUConfig(...) says what to write for each.",
    "model_dir": _SAVE,
    **dict.fromkeys(("evaluation_master", "master", "cluster", "session_config"), _NO_CLUSTER),
    **dict.fromkeys(("device_fn", "protocol", "session_creation_timeout_secs"), _NO_CLUSTER),
    "tf_random_seed": "Write keras.utils.set_random_seed(seed).",
    "save_summary_steps": "Write keras.callbacks.TensorBoard(directory, update_freq=N).",
    "log_step_count_steps": "Write keras.callbacks.TensorBoard(directory, update_freq=N).",
    **dict.fromkeys(("save_checkpoints_steps", "save_checkpoints_secs"), _SAVE),
    **dict.fromkeys(("keep_checkpoint_max", "keep_checkpoint_every_n_hours"), _SAVE),
    "checkpoint_save_graph_def": _SAVE,
    **dict.fromkeys(("train_distribute", "eval_distribute"), _SCOPE),
    "experimental_distribute": _SCOPE,
    "experimental_max_worker_delay_secs": _NO_CLUSTER,
}
_RUN_OPTIONS = {
    "experimental_enable_dynamic_batch_size": "Write RunOptions(dynamic_batch=True), and mask with "
    "context.batch_mask.",
    "experimental_bucketizing_dynamic_shape": 'Write RunOptions(buckets="power_of_two", axis=1), '
    "and mask with context.length_mask.",
    "experimental_xla_options": "Leave it out: programs are always partitioned as one (SPMD).",
}
_INPUT_OPTIONS = {
    "experimental_fetch_to_device": _DATASET_OPTIONS,
    "experimental_per_replica_buffer_size": "Write TPUStrategy(prefetch=N).",
    "experimental_place_dataset_on_device": "Pass arrays that are on the mesh to strategy.run.",
    "experimental_replication_mode": _ONE_PIPELINE,
}
_FOUND = "Leave it out: JAX finds the chips; docs/pods.md says how a pod's processes start."
_RESOLVER = {
    "tpu": _FOUND,
    "zone": _FOUND,
    "project": _FOUND,
    "job_name": _FOUND,
    "coordinator_name": _FOUND,
    "coordinator_address": _FOUND,
    "credentials": _FOUND,
    "service": _FOUND,
    "discovery_url": _FOUND,
}

# From one of our classes, or a name of TensorFlow's that has parts, to its attributes.
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "TPUStrategy": {
        "cluster_resolver": "Ask strategy.mesh for the devices and strategy.num_hosts for the "
        "number of processes; there is no cluster.",
        "extended": "Write what its part needs: strategy.extended.NAME says it for each.",
        "unwrap": "Write strategy.local_results(value).",
        "group": "Leave it out: there are no operations to group, results come when they are read.",
        "steps_per_run": _STEPS,
        "colocate_vars_with": "Leave it out: optimizer slots have the layout of their weight.",
        "make_dataset_iterator": _RUN,
        "make_input_fn_iterator": _RUN,
        "experimental_make_numpy_dataset": "Write strategy.distribute_dataset(arrays, "
        "batch_size=N).",
        "experimental_run": _RUN,
        "configure": _NO_CLUSTER,
        "update_config_proto": _NO_CLUSTER,
    },
    "strategy.extended": {
        "reduce_to": "Write strategy.reduce(op, value, axis=None); within strategy.run "
        "context.all_reduce(op, value).",
        "batch_reduce_to": "Write strategy.reduce(op, values, axis=None): it takes structures.",
        "broadcast_to": "Leave it out: a plain array goes to all replicas.",
        "update": _UPDATE,
        "update_non_slot": _UPDATE,
        "non_slot_devices": _UPDATE,
        "read_var": "Write variable.value.",
        "colocate_vars_with": "Leave it out: optimizer slots have the layout of their weight.",
        "variable_created_in_scope": "Compare variable.value.sharding.mesh with strategy.mesh.",
        "value_container": "Leave it out: a value per replica is one object, a PerReplica.",
        "worker_devices": "Write strategy.mesh.devices.",
        "parameter_devices": "Write strategy.mesh.devices.",
        "experimental_require_static_shapes": "Leave it out: programs always have fixed shapes; "
        "RunOptions pads what varies.",
        "experimental_logical_device": _DEVICES_OF_FUNCTION,
        "call_for_each_replica": "Write strategy.run(fn, args, kwargs).",
        "tpu_run": "Write strategy.run(fn, args, kwargs).",
        "experimental_run_steps_on_iterator": _STEPS,
        "experimental_make_numpy_dataset": "Write strategy.distribute_dataset(arrays, "
        "batch_size=N).",
        "steps_per_run": _STEPS,
        "num_hosts": "Write strategy.num_hosts.",
        "num_replicas_per_host": "Write strategy.num_replicas_in_sync // strategy.num_hosts.",
        "tpu_hardware_feature": "Leave it out: tables for SparseCore are in KerasRS.",
        "lazy_variable_tracker": "Leave it out: a variable is created when it is called for.",
        **dict.fromkeys(
            ("should_checkpoint", "should_save_summary"),
            "Leave it out: all processes call, and one of them writes.",
        ),
        **dict.fromkeys(
            ("experimental_between_graph", "experimental_should_init"),
            "Leave it out: there is no graph to set up.",
        ),
    },
    "ReplicaContext": {
        "devices": "Leave it out: a replica's code does not know its device; strategy.mesh.devices "
        "has all.",
        "experimental_logical_device": _DEVICES_OF_FUNCTION,
    },
    "PerReplica": {
        "numpy": "Write strategy.reduce(op, value, axis), strategy.gather(value, axis), or "
        "strategy.local_results(value).",
        "primary": "Write strategy.local_results(value)[0].",
    },
    "DistributedDataset": {
        "element_spec": _ELEMENT_SPEC,
        "reduce": "Write a loop over the dataset: `for batch in dataset: ...`.",
    },
    "DistributedIterator": {
        "element_spec": _ELEMENT_SPEC,
        "get_next": "Write next(iterator).",
        "get_next_as_optional": "Write next(iterator, None).",
    },
    "RunOptions": _RUN_OPTIONS,
    "DeviceAssignment": {
        "host_device": "Write assignment.host(replica, logical_core): the number of the process.",
    },
    "Topology": {
        "mesh_shape": "Write topology.shape.",
        "mesh_rank": "Write len(topology.shape).",
        "num_tasks": "Write topology.num_hosts.",
        "num_tpus_per_task": "Write topology.num_devices // topology.num_hosts.",
        "missing_devices": "Leave it out: a slice is complete.",
        "serialized": "Write topology.to_dict(), or topology.name, which Topology.parse reads.",
        "device_coordinates": _COORDINATES,
        "task_ordinal_at_coordinates": _COORDINATES,
        "tpu_device_ordinal_at_coordinates": _COORDINATES,
        "tpu_device_name_at_coordinates": _COORDINATES,
        "cpu_device_name_at_coordinates": _COORDINATES,
    },
    "keras_tpu_dist": {
        "TPUEstimator": f"{_SCOPE} Then call fit, evaluate and predict.",
        "TPUEstimatorSpec": "Write the model's call, and loss and metrics in model.compile.",
        "TPUConfig": "Write TPUStrategy(...) and model.compile(...).",
        "RunConfig": "Write TPUStrategy(...), model.compile(...) and callbacks.",
        "InputPipelineConfig": _ONE_PIPELINE,
        "CrossShardOptimizer": "Leave it out: fit has the gradient of the global batch; in replica "
        'code write context.all_reduce("mean", gradients).',
        "cross_replica_sum": 'Write get_replica_context().all_reduce("sum", value).',
        "bfloat16_scope": 'Write keras.config.set_dtype_policy("mixed_bfloat16").',
        "StopAtStepHook": "Write ktd.callbacks.StopAtStep(last_step), or "
        "StopAtStep(num_steps, more=True).",
        "NanTensorHook": "Write ktd.callbacks.NameNaN(), or keras.callbacks.TerminateOnNaN().",
        "train_and_evaluate": "Write model.fit(..., validation_data=...).",
        "TPUClusterResolver": _NO_CLUSTER,
        "cluster_resolver": _NO_CLUSTER,
        "initialize_tpu_system": f"{_NO_CLUSTER} For its topology write Topology.attached().",
        "shutdown_tpu_system": _NO_CLUSTER,
        "TPUSystemMetadata": "Write Topology.attached().",
        "HardwareFeature": "Leave it out: tables for SparseCore are in KerasRS.",
        "embedding": "Leave it out: tables for SparseCore are in KerasRS.",
        "DeviceOrderMode": "Leave it out: replicas are numbered along the torus.",
        "InputOptions": _DATASET_OPTIONS,
        "InputReplicationMode": _ONE_PIPELINE,
        "CommunicationOptions": _COLLECTIVES,
        "CommunicationImplementation": _COLLECTIVES,
        "CollectiveHints": _COLLECTIVES,
        "CollectiveCommunication": _COLLECTIVES,
        "CrossDeviceOps": _COLLECTIVES,
        "HierarchicalCopyAllReduce": _COLLECTIVES,
        "NcclAllReduce": _COLLECTIVES,
        "ReductionToOneDevice": _COLLECTIVES,
        "ReduceOp": 'Write "sum" or "mean".',
        "DistributedValues": "Write PerReplica.",
        "DistributedIterator": "Write iter(dataset) of a DistributedDataset.",
        "StrategyExtended": "Write what its part needs: strategy.extended.NAME says it for each.",
        "Strategy": _OTHER_STRATEGY,
        "MirroredStrategy": _OTHER_STRATEGY,
        "MultiWorkerMirroredStrategy": _OTHER_STRATEGY,
        "OneDeviceStrategy": "Write TPUStrategy(devices=jax.devices()[:1]).",
        "CentralStorageStrategy": _OTHER_STRATEGY,
        "ParameterServerStrategy": _OTHER_STRATEGY,
        "Server": _NO_CLUSTER,
        "coordinator": _NO_CLUSTER,
        "rpc": _NO_CLUSTER,
        "partitioners": "Write layout= of TPUStrategy.",
        "experimental": "Write the name itself, without `experimental`.",
        "get_strategy": "Write keras.distribution.distribution().",
        "has_strategy": "Write keras.distribution.distribution() is not None.",
        "in_cross_replica_context": "Leave it out: call get_replica_context() only within "
        "strategy.run.",
        "experimental_set_strategy": "Write keras.distribution.set_distribution(strategy).",
        "PreemptionCheckpointHandler": _PREEMPTION,
        "PreemptionWatcher": _PREEMPTION,
        "TerminationConfig": _PREEMPTION,
    },
}
# From a callable, as Python writes its name, to arguments of its like in TensorFlow.
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "TPUStrategy": {
        "tpu_cluster_resolver": "Leave it out, or write devices=jax.devices()[:4] for some of the "
        "chips; JAX finds them.",
        "experimental_device_assignment": "Write TPUStrategy(mesh=assignment).",
        "device_assignment": "Write TPUStrategy(mesh=assignment).",
        "experimental_spmd_xla_partitioning": "Leave it out: programs are always partitioned as "
        "one (SPMD).",
        "steps_per_run": _STEPS,
        **_RESOLVER,
        **_TPU_CONFIG,
    },
    "RunOptions": _RUN_OPTIONS,
    "ReplicaContext.all_reduce": {"options": _COLLECTIVES, "experimental_hints": _COLLECTIVES},
    "ReplicaContext.all_gather": {"options": _COLLECTIVES, "experimental_hints": _COLLECTIVES},
    "DistributedInput.distribute_datasets_from_function": {"options": _DATASET_OPTIONS},
    "DeviceAssignment.build": {
        "computation_stride": "Leave it out: blocks are contiguous, as the torus rewards; another "
        "order is DeviceAssignment.from_order(order, topology).",
        "device_order_mode": "Leave it out: replicas are numbered along the torus.",
    },
    "DeviceAssignment": {
        "core_assignment": "Write DeviceAssignment.from_order(core_assignment, topology).",
    },
    "DeviceAssignment.tpu_device": {"job": "Leave it out: it gives the jax.Device."},
    "Topology": dict.fromkeys(
        ("serialized", "mesh_shape", "device_coordinates"),
        'Write Topology.parse("v5e:4x4"), or Topology.attached().',
    ),
    "Checkpoint": _RUN_CONFIG,
    "InputOptions": _INPUT_OPTIONS,
    "TPUClusterResolver": _RESOLVER,
    "TPUConfig": _TPU_CONFIG,
    "RunConfig": _RUN_CONFIG,
    "TPUEstimatorSpec": {
        **dict.fromkeys(("mode", "predictions", "export_outputs"), _OUTPUTS),
        "loss": "Write model.compile(loss=...), or layer.add_loss.",
        "train_op": "Write model.compile(optimizer=...).",
        "eval_metrics": "Write model.compile(metrics=[...]); for a function of all predictions "
        "ktd.callbacks.HostMetrics.",
        "host_call": "Write a callback: keras.callbacks.LambdaCallback(on_train_batch_end=...).",
        "scaffold_fn": "Write model.load_weights(path).",
        **dict.fromkeys(
            ("training_hooks", "evaluation_hooks", "prediction_hooks"),
            "Write callbacks= of fit, evaluate or predict.",
        ),
    },
    "TPUEstimator": {
        "model_fn": f"Write the model's call. {_COMPILE}",
        "model_dir": _SAVE,
        "config": "Write what stands in it; ktd.RunConfig(...) says what to write for each.",
        "params": "Write batch_size= of fit; other values are arguments of your own.",
        "use_tpu": "Leave it out; JAX_PLATFORMS=cpu, or ktd.simulate(8), runs without a TPU.",
        **dict.fromkeys(("train_batch_size", "eval_batch_size", "predict_batch_size"), _BATCH_SIZE),
        "batch_axis": "Write TPUStrategy(batch_axis=...).",
        "eval_on_tpu": "Write model.evaluate under a TPUStrategy of CPU devices.",
        **dict.fromkeys(("export_to_tpu", "export_to_cpu"), _EXPORT),
        "export_saved_model_api_version": _EXPORT,
        "warm_start_from": "Write model.load_weights(path).",
        "embedding_config_spec": "Leave it out: tables for SparseCore are in KerasRS.",
    },
}


def of_attribute(owner: str, name: str) -> str | None:
    """What to write instead of a TensorFlow attribute, or `None` if it is not one.

    Args:
        owner: The class, or the name in TensorFlow that has the attribute.
        name: The attribute.
    """
    return ATTRIBUTES.get(owner, {}).get(name)


def of_argument(function: str, name: str) -> str | None:
    """What to write instead of a TensorFlow argument, or `None` if it is not one.

    Args:
        function: The callable, as Python writes its name.
        name: The argument.
    """
    return ARGUMENTS.get(function, {}).get(name)


def of_value(value: Any) -> str | None:
    """What to write instead of a TensorFlow object, or `None` if it is not one.

    Args:
        value: Anything.
    """
    kind = type(value)
    if kind.__module__.partition(".")[0] != "tensorflow":
        return None
    name = kind.__name__
    if name == "DeviceAssignment":
        return "Write DeviceAssignment.from_order(assignment.core_assignment, topology)."
    if name == "RunOptions":
        return "Write keras_tpu_dist.RunOptions(dynamic_batch=, buckets=, axis=)."
    return of_attribute("keras_tpu_dist", name) or _GUIDE


def sentence_of(attribute: str, instead: str) -> str:
    """The error about a TensorFlow attribute.

    Args:
        attribute: The attribute and its owner, as the user wrote it.
        instead: What to write.
    """
    name = attribute.rpartition(".")[2]
    return message(
        f"{name} is TensorFlow's, and there is none here.", received=f"{attribute}.", fix=instead
    )


class TensorFlowNames:
    """A class whose TensorFlow attributes raise an error that says what to write instead."""

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name):
            for kind in type(self).__mro__:
                instead = of_attribute(kind.__name__, name)
                if instead is not None:
                    return absent(f"{_written(kind)}.{name}", instead)
            # Python's own error; also the one of a property that failed for such a reason.
            return super().__getattribute__(name)


class Absent:
    """A TensorFlow name with parts; using a part raises the error for that part.

    Args:
        name: The name, with its owner.
        instead: What to write.
    """

    def __init__(self, name: str, instead: str):
        self._name = name
        self._instead = instead

    def __call__(self, *_: Any, **arguments: Any) -> Any:
        """Raises a `TypeError` that says what to write instead of the arguments."""
        short = self._name.rpartition(".")[2]
        known = {name: of_argument(short, name) for name in arguments}
        fixes = [f"{name}: {instead}" for name, instead in known.items() if instead]
        raise TypeError(
            message(
                f"{short} is TensorFlow's, and there is none here.",
                received=f"{self._name}({', '.join(f'{name}=' for name in arguments)}).",
                fix=" ".join([self._instead, *fixes]),
            )
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            instead = of_attribute(self._name, name) or self._instead
            raise AttributeError(sentence_of(f"{self._name}.{name}", instead))

    def __repr__(self):
        return f"<{self._name}: {self._instead}>"


def absent(name: str, instead: str) -> Absent:
    """An object for a TensorFlow name that has parts or arguments with entries of their own.

    Args:
        name: The name, with its owner.
        instead: What to write.

    Raises:
        AttributeError: If it has neither.
    """
    if name in ATTRIBUTES or name.rpartition(".")[2] in ARGUMENTS:
        return Absent(name, instead)
    raise AttributeError(sentence_of(name, instead))


_VARIABLES = {
    "TPUStrategy": "strategy",
    "ReplicaContext": "context",
    "PerReplica": "value",
    "DistributedDataset": "dataset",
    "DistributedIterator": "iterator",
    "RunOptions": "options",
    "DeviceAssignment": "assignment",
    "Topology": "topology",
}


def _written(kind: type) -> str:
    return _VARIABLES.get(kind.__name__, kind.__name__)
