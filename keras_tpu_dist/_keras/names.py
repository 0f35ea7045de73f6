"""The second table: private names of Keras and JAX that are read or written, but not replaced.

`seam` has the first table, for replaced names. Both are checked together, before anything is
replaced. Names of modules are needed at import, and are checked then.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist._keras.seam import at, declare_read, fault_of, raise_faults


@dataclass(frozen=True)
class Name:
    """One private name that is read or written.

    Attributes:
        owner: Where it is: `"module"`, `"module:Class"`, or `"module:function"` that sets it.
        name: The name of a function or class there, or of an attribute of the class or its objects.
        hook: The public hook of Keras or JAX that would replace it.
    """

    owner: str
    name: str
    why: str
    hook: str

    def __str__(self):
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def fault(self) -> str | None:
        """What this Keras or JAX lacks, or `None`."""
        try:
            holder = at(self.owner)
        except (ImportError, AttributeError):
            return fault_of(self)
        # An attribute of instances is not on their class, but a method of the class uses its name.
        found = hasattr(holder, self.name) or self.name in _names_used_by(holder)
        return None if found else fault_of(self)


@functools.cache
def _names_used_by(holder: Any) -> frozenset[str]:
    """The names that a function, or the methods of a class, use."""
    kinds = holder.__mro__ if isinstance(holder, type) else ()
    functions = [value for kind in kinds for value in vars(kind).values()] or [holder]
    # A decorator that Keras adds hides no name.
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    return frozenset(name for code in codes if code for name in code.co_names)


_LAYER, _VARIABLE = "keras.src.layers.layer:Layer", "keras:Variable"
_FUNCTIONAL = "keras.src.models.functional:Functional"
_TRAINER, _BASE = "keras.src.backend.jax.trainer:JAXTrainer", "keras.src.trainers.trainer:Trainer"
_OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
_ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"
_ADAPTERS = "keras.src.trainers.data_adapters"
_PYDATASET = f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter"
_LOSS = "keras.src.trainers.compile_utils:CompileLoss"
_METRICS = "keras.src.trainers.compile_utils:CompileMetrics"
_GLOBAL = "keras.src.backend.common.global_state"
_SEEDS = "keras.src.random.seed_generator"
_CALLBACKS = "keras.callbacks"
_NO_HOOK = "none"
_GOES_ON, _STATES = "what a callback counts, after training goes on", "callbacks with state_dict"


def _each(owner: str, names: str, why: str, hook: str = _NO_HOOK) -> tuple[Name, ...]:
    return tuple(Name(owner, name, why, hook) for name in names.split())


MODULES = (
    *_each(
        "jax._src.xla_bridge",
        "backends_are_initialized",
        "whether devices can still be chosen",
        "jax.config that refuses every update that comes too late",
    ),
    *_each("jax._src.core", "trace_ctx", "the program that is being traced"),
    *_each(
        "jax._src.core:TracingContext",
        "reset set_trace set_axis_env",
        "what replica code builds is built outside of its trace",
        "jax.ensure_compile_time_eval that leaves the axes of the trace",
    ),
    *_each("jax._src.core:Tracer", "_trace", "the program that a value is in"),
    *_each(
        "jax._src.distributed",
        "global_state",
        "the coordinator's client and address",
        "jax.distributed with a store of keys",
    ),
    *_each(
        _GLOBAL,
        "get_global_attribute set_global_attribute GLOBAL_STATE_TRACKER",
        "names, seeds and scopes that are entered",
        "queries beside keras.StatelessScope and keras.SymbolicScope",
    ),
    *_each(
        _SEEDS,
        "GLOBAL_SEED_GENERATOR global_seed_generator",
        "random state of operations without a seed",
        "keras.random that gives and takes its global state",
    ),
    *_each("keras.src.backend.common.masking", "get_keras_mask set_keras_mask", "masks on tensors"),
    *_each(
        "keras.src.backend.common.variables",
        "AutocastScope",
        "values of variables in their own dtype",
        "a value of keras.Variable that is not cast",
    ),
    *_each(
        "keras.src.backend",
        "compute_output_spec",
        "outputs of a model as shapes",
        "keras.Model.compute_output_spec of any model",
    ),
    *_each("keras.src.models.functional", "Functional", "the class of functional models"),
    *_each(
        "keras.src.trainers.compile_utils",
        "CompileLoss CompileMetrics",
        "losses and metrics as compile makes them",
        "compile that keeps the state of training",
    ),
    *_each(
        "keras.src.utils.numerical_utils",
        "encode_categorical_inputs",
        "an IntegerLookup in a compiled program, as a sorted table",
        "an IntegerLookup that is computed by the backend",
    ),
    *_each(
        "keras.src.utils.naming",
        "to_snake_case",
        "which names of layers Keras gave",
        "whether a layer's name is the user's",
    ),
    *_each(
        "keras.src.utils.tracking",
        "DotNotTrackScope Tracker",
        "attributes that Keras does not track, and copies of what it tracks",
    ),
    *_each(
        "keras.src.saving.saving_lib",
        "H5IOStore ShardedH5IOStore safe_get_h5_dataset _save_state",
        "which variable is where in Keras's files",
        "a list of variables by their names in files",
    ),
    *_each(
        "keras.src.saving.saving_api",
        "is_orbax_checkpoint ocp file_utils find_latest_orbax_checkpoint",
        "which directory Keras reads by Orbax",
        "an error for weights that are not loaded",
    ),
    *_each(
        "keras.src.saving.serialization_lib",
        "serialize_keras_object ObjectSharingScope",
        "layers made again in one process, with its functions and classes",
        "a config that refers to the objects of its process",
    ),
    *_each(
        "keras.src.saving.object_registration",
        "get_registered_name",
        "layers made again in one process, with its functions and classes",
        "a config that refers to the objects of its process",
    ),
    *_each(
        "keras.src.saving.saving_lib",
        "get_attr_skipset",
        "an optimizer that Keras makes while it saves, where no variable can be made",
    ),
    *_each(
        _ADAPTERS, "is_grain_dataset", "input that each process brings", "an adapter of one's own"
    ),
    *_each(
        _ADAPTERS,
        "is_tf_dataset",
        "a dataset that Keras would have the distribution cut for its process",
        "a name of its own for that; distribute_dataset is tf.distribute's",
    ),
    *_each(
        f"{_ADAPTERS}.array_data_adapter",
        "can_convert_arrays",
        "input that each process brings",
        "an adapter of one's own",
    ),
    *_each(
        f"{_ADAPTERS}.generator_data_adapter",
        "GeneratorDataAdapter",
        "input that is the user's code, whose arrays may be used again",
    ),
    *_each(
        f"{_ADAPTERS}.py_dataset_adapter",
        "PyDatasetAdapter",
        "input that is the user's code, whose arrays may be used again",
    ),
    *_each("keras.src.trainers.epoch_iterator", "EpochIterator", "the iterator of an epoch"),
    *_each(
        "keras.src.backend.jax.trainer:JAXEpochIterator",
        "_get_iterator",
        "batches of any number of rows, placed ahead of the step",
        "a distribution that makes the iterator",
    ),
    *_each(
        "keras.src.distribution.distribution_lib",
        "Distribution GLOBAL_ATTRIBUTE_NAME",
        "what a strategy is, and which one is active",
        "keras.distribution.Distribution",
    ),
)
ATTRIBUTES = (
    *_each(
        _VARIABLE,
        "_layout",
        "a variable's layout, set after it was made",
        "a setter for keras.Variable(layout=...)",
    ),
    *_each(
        _VARIABLE,
        "_value",
        "the newest state is put into the variables after each launch, without a check",
        "assign that trusts shapes and layouts",
    ),
    *_each(
        _VARIABLE,
        "_initialize_with_initializer _deferred_initialize _initialize _direct_assign "
        "_initializer _shape _validate_shape",
        "variables without values, for dry runs",
        "a scope in which variables get no values",
    ),
    *_each(
        _TRAINER,
        "_jax_state _jax_state_synced",
        "whether the variables or the trainer hold the state",
        "a trainer whose variables hold the state",
    ),
    *_each(
        _TRAINER, "_initial_epoch", "fit goes on in an epoch", "callbacks that set initial_epoch"
    ),
    *_each(
        _BASE,
        "_symbolic_build",
        "builds metrics and optimizer as fit does",
        "a public method that does",
    ),
    *_each(
        _BASE,
        "_compile_loss _compile_metrics",
        "losses and metrics that have seen no batch",
        "compile that keeps the state of training",
    ),
    *_each(
        _BASE,
        "_jit_compile",
        "a model that Keras decided not to compile is compiled if JAX can compile its layers",
        "layers that say for each backend whether they can be compiled",
    ),
    *_each(
        _BASE,
        "_compile_config",
        "what compile was given",
        "a list of compile's arguments, functions included",
    ),
    *_each(_LOSS, "_user_loss _user_loss_weights", "a loss is made once more"),
    *_each(_METRICS, "_user_metrics _user_weighted_metrics", "metrics are made once more"),
    *_each(
        _LAYER,
        "_flatten_layers _layers",
        "all layers in a layer, or those that it holds itself",
        "Layer.layers, also of layers within layers",
    ),
    *_each(
        _LAYER,
        "_trainable",
        "what a traced program of replica code depends on, read at every launch",
        "a version that counts changes",
    ),
    *_each(_VARIABLE, "_trainable", "the same for a variable", "a version that counts changes"),
    *_each(
        _LAYER,
        "_trainable_variables _non_trainable_variables",
        "variables of a layer without those of inner layers",
        "Layer.variables(recursive=False)",
    ),
    *_each(
        _LAYER,
        "_call_has_training_arg _call_has_mask_arg",
        "whether a call takes an argument",
        "the signature of Layer.call, which wrappers hide",
    ),
    *_each(_LAYER, "_path", "a copied layer has its original's path", "Layer.path with a setter"),
    *_each(_LAYER, "_seed_generators", "what a layer holds, by attribute"),
    *_each(
        _VARIABLE,
        "_path _name",
        "a copied variable has its original's path",
        "keras.Variable(path=...)",
    ),
    *_each(
        _VARIABLE,
        "_autocast",
        "a copy of a variable; metrics in layers of mixed precision that count in float32",
        "a public attribute",
    ),
    *_each(_LAYER, "_metrics", "which layer has a metric", "Layer.metrics(recursive=False)"),
    *_each(
        "keras.layers:Lambda",
        "_serialize_function_to_config",
        "layers made again in one process, with its functions and classes",
        "a config that refers to the objects of its process",
    ),
    *_each(_LAYER, "_loss_ids", "which layer added a loss", "a scope that learns who adds one"),
    *_each(_LAYER, "_called", "whether a layer was called"),
    *_each(
        "keras.src.layers.preprocessing.index_lookup:IndexLookup",
        "_ensure_known_vocab_size _frozen_vocab_size _token_start_index _oov_start_index "
        "_default_value _mask_key _mask_value",
        "an IntegerLookup in a compiled program, as a sorted table",
        "an IntegerLookup that is computed by the backend",
    ),
    *_each(
        _FUNCTIONAL,
        "_inputs_struct _outputs_struct",
        "inputs and outputs in their structure",
        "Model.inputs in their structure",
    ),
    *_each(
        "keras.src.ops.function:Function",
        "_nodes_by_depth",
        "the graph of a functional model",
        "Functional.operations with their edges",
    ),
    *_each("keras:Sequential", "_functional", "the graph of a sequential model"),
    *_each("keras.src.ops.node:Node", "_keras_history", "what made a symbolic tensor"),
    *_each(
        _OPTIMIZER,
        "_trainable_variables _variables",
        "which slot belongs to which weight",
        "an optimizer that says it",
    ),
    *_each(
        _OPTIMIZER,
        "_get_variable_index _clip_gradients _apply_weight_decay _backend_update_step "
        "_update_model_variables_moving_average _model_variables_moving_average "
        "_accumulated_gradients",
        "the update by accumulated gradients, without the accumulation",
        "an optimizer that separates accumulation from its update",
    ),
    *_each(
        "keras.optimizers:Muon",
        "adam_velocities momentums _muon_update_step",
        "which variables Muon orthogonalises",
        "an optimizer that says it",
    ),
    *_each(
        "keras.src.utils.tracking:Tracker",
        "stored_ids config",
        "copies of optimizers and metrics, with all that was set on them",
        "a copy of an optimizer",
    ),
    *_each(
        "keras.optimizers:MultiOptimizer",
        "_optimizer_map",
        "which inner optimizer belongs to which weight",
        "a copy of an optimizer",
    ),
    *_each(
        _OPTIMIZER,
        "_iterations",
        "train steps, those of accumulation counted singly",
        "a public count",
    ),
    *_each(
        "keras.src.saving.saving_lib:H5IOStore",
        "_h5_entry_group",
        "arrays in a file before they are read",
        "a reader of weights by name",
    ),
    *_each(
        "keras.src.saving.saving_lib:ShardedH5IOStore",
        "_switch_h5_file",
        "arrays in a file before they are read",
        "a reader of weights by name",
    ),
    *_each(f"{_CALLBACKS}:CallbackList", "_model", "whose callbacks they are"),
    *_each(
        f"{_CALLBACKS}:CallbackList",
        "_async_dispatch",
        "bars are printed by threads, whatever keras.config says in the program's own",
        "keras.config.disable_interactive_logging for all threads",
    ),
    *_each(
        "keras.layers:Dense",
        "_kernel",
        "the weight below the sum that a LoRA layer shows",
        "a layer's stored weights by name",
    ),
    *_each(
        _ITERATOR,
        "_steps_seen _num_batches _interrupted_warning",
        "steps that were counted and not made",
        "a trainer that counts the steps of a launch",
    ),
    *_each(
        _PYDATASET,
        "enqueuer shuffle",
        "whether workers draw an epoch's order when it begins",
        "a PyDataset that goes on from a batch",
    ),
    *_each(
        f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter",
        "_shuffle",
        "whether arrays are shuffled",
        "an input that says its place",
    ),
    *_each(
        "keras.src.utils.python_utils:default",
        "_is_default",
        "whether a callback looks at batches",
        "callbacks that say whether they listen",
    ),
    *_each(
        "jax.export:Exported",
        "_get_vjp",
        "programs that can be pickled",
        "Exported.serialize without the package flatbuffers",
    ),
)
# Not every Keras has them: they are looked up when they are used.
OPTIONAL = (
    # A process that runs a TPU's program on simulated devices reads them; `fit` does not.
    *_each(
        "jax._src",
        "compiler",
        "options of a program of replicas",
        "jax.export of replicas",
    ),
    *_each(
        "jax._src.compilation_cache",
        "get_file_cache",
        "a cache of compiled programs that is bounded, whole, and says why one is missing",
        "jax.config.jax_compilation_cache_dir that takes a cache",
    ),
    *_each("jax._src.lib", "_jax", "HLO as text, compiled", "jax.export that reads HLO"),
    *_each(
        "keras_hub.src.utils.preset_utils",
        "get_file",
        "the weights of a preset, without a second model",
        "a preset of KerasHub that says where its weights are",
    ),
    *_each(
        f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter",
        "_epoch",
        "the epoch by which Keras 3.16 shuffles",
        "an input that says its place",
    ),
    *_each(
        _PYDATASET,
        "_epoch",
        "the epoch by which Keras 3.16 shuffles",
        "an input that says its place",
    ),
    *_each(f"{_CALLBACKS}:SwapEMAWeights", "_ema_weights_in_model", _GOES_ON, _STATES),
    *(
        name
        for kind in ("ModelCheckpoint", "OrbaxCheckpoint", "BackupAndRestore")
        for name in _each(
            f"{_CALLBACKS}:{kind}",
            "_batches_seen_since_last_saving _last_batch_seen",
            _GOES_ON,
            _STATES,
        )
    ),
    *_each(f"{_CALLBACKS}:OrbaxCheckpoint", "_total_batches_seen", _GOES_ON, _STATES),
    *_each(f"{_CALLBACKS}:BackupAndRestore", "_current_epoch", _GOES_ON, _STATES),
    *_each(
        f"{_CALLBACKS}:TensorBoard", "_global_train_batch _global_test_batch", _GOES_ON, _STATES
    ),
)


def names() -> tuple[Name, ...]:
    """All names of the second table."""
    return (*MODULES, *ATTRIBUTES, *OPTIONAL)


declare_read(*MODULES, *ATTRIBUTES)
# Modules of this package import these names; their own error would not help.
raise_faults(MODULES)
