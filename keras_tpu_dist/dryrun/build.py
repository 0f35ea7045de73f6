"""From a user's build function to a lowered step, without a weight in memory."""

import contextlib
import math
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.plain import plain_operations
from keras_tpu_dist.hardware.topology import Topology, of_devices
from keras_tpu_dist.layout.lint import Finding
from keras_tpu_dist.training import membership
from keras_tpu_dist.training.auto_steps import MOST_STEPS
from keras_tpu_dist.training.batches import BatchPlacer, PlacedBatch
from keras_tpu_dist.training.step import jitted_step

Build = Callable[[], keras.Model] | keras.Model

KINDS = {"train": "train", "evaluate": "test", "predict": "predict"}
# Where `donate_state="auto"` draws the line; see guard.should_donate.
_KEEP_FRACTION_OF_MEMORY = 0.05


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a model's state on one device, by the arithmetic of its layouts.

    Args:
        weights: Trainable and other variables of the model.
        optimizer: Slots and scalars of the optimizer.
        metrics: Variables of the metrics.
        inputs: One batch.
    """

    weights: int
    optimizer: int
    metrics: int
    inputs: int


@dataclass(frozen=True)
class Lowered:
    """A step ready for a compiler.

    Args:
        program: The pickled `jax.export.Exported`, arguments flattened to `(state, batch)`.
        donate: Whether the state's buffers are reused for the new state.
        axes: Mesh axis names and sizes.
        devices: The mesh's devices, in order.
        topology: The slice, or `None` for a mesh that is no TPU slice.
        platform: What it was lowered for, `"tpu"` or `"cpu"`.
        state: Bytes on one device.
        parameters: Number of the model's weights.
        rows: Rows of the batch.
        tokens: Elements of the first integer input that has a time axis, else 0.
        layer_names: Names of the model's layers.
        overstated: Whether the program has loops or convolutions, whose memory quick compilation
            states up to three times too high.
        steps_per_execution: From `compile`; the program is one step in any case.
        ready_bytes: Bytes of the further batches that training holds on one device.
        seconds: Time to build and lower.
        findings: Mistakes in the layouts.
        notes: What was assumed.
    """

    program: bytes
    donate: bool
    axes: tuple[tuple[str, int], ...]
    devices: tuple[Any, ...]
    topology: Topology | None
    platform: str
    state: StateBytes
    parameters: int
    rows: int
    tokens: int
    layer_names: frozenset[str]
    overstated: bool
    steps_per_execution: int
    ready_bytes: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def lower(
    build: Build,
    strategy: Any,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int,
    mode: str = "train",
    platform: str = "tpu",
) -> Lowered:
    """Builds a model without memory and lowers its step for the strategy's mesh.

    See `keras_tpu_dist.dry_run` for the arguments.

    Returns:
        The `Lowered` step.

    Raises:
        ValueError: If `build` does not give a compiled model, or the batch does not fit.
    """
    started = time.perf_counter()
    placer = strategy._placer
    kind = _checked_mode(mode)
    _check_batch_size(batch_size, strategy)
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        if platform != "tpu":
            stack.enter_context(plain_operations())
        model = stack.enter_context(_model(build, strategy, mode))
        batch = _batch(model, placer, x, y, sample_weight, batch_size, mode, notes)
        symbolic = jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype), batch)
        if isinstance(build, keras.Model):
            _build_metrics(build, symbolic, mode)
            stack.enter_context(_borrowed(build, strategy))
        _keras.symbolic_build(model, symbolic, mode)
        stack.enter_context(_laid_out(model, strategy))
        findings = strategy.lint(model, batch_size=batch_size).findings
        placed = placer.describe(batch)
        state = _state(model, kind)
        donate = _donates(strategy, kind, state)
        exported = _export(jitted_step(model, kind, placer, donate), state, placed, platform)
        topology = strategy.topology or of_devices(strategy.mesh.devices)
        state_bytes = _state_bytes(state, kind, placed)
        steps = model.steps_per_execution
        steps = MOST_STEPS if steps == "auto" else steps
        # a launch of N steps has N batches on the devices, and the next N are made ready meanwhile
        ready = strategy._prefetch if steps == 1 else 2 * steps - 1
        return Lowered(
            program=pickle.dumps(_keras.without_vjp(exported)),
            donate=donate,
            axes=tuple(strategy.mesh.shape.items()),
            devices=tuple(strategy.mesh.devices.flat),
            topology=topology if platform == "tpu" else None,
            platform=platform,
            state=state_bytes,
            parameters=model.count_params(),
            rows=batch_size,
            tokens=_tokens(batch[0]),
            layer_names=frozenset(_keras.layer_names(model)),
            # the names of operations in MLIR's bytecode
            overstated=any(
                name in exported.mlir_module_serialized for name in (b"while", b"convolution")
            ),
            steps_per_execution=steps,
            ready_bytes=ready * state_bytes.inputs,
            seconds=time.perf_counter() - started,
            findings=findings,
            notes=tuple(notes),
        )


@contextlib.contextmanager
def _model(build: Build, strategy: Any, mode: str) -> Iterator[keras.Model]:
    """The model, in the strategy's scope, with variables that have no values."""
    if isinstance(build, keras.Model):
        _check_model(build, mode)
        _check_built(build)
        yield build
        return
    with strategy.scope(), _keras.abstract_variables(), _keras.fresh_names():
        try:
            model = build()
        except Exception as error:
            error.add_note(f"raised by {build!r}, the build function given to dry_run")
            raise
        _check_model(model, mode)
        yield model


def _build_metrics(model: keras.Model, symbolic: tuple, mode: str) -> None:
    """Builds the metrics of a user's own model for real, as its first `fit` would have."""
    optimizer, model.optimizer = model.optimizer, None
    try:
        _keras.symbolic_build(model, symbolic, mode)
    finally:
        model.optimizer = optimizer


@contextlib.contextmanager
def _borrowed(model: keras.Model, strategy: Any) -> Iterator[None]:
    """A user's own model: its layouts and its optimizer are given back as they were."""
    optimizer = model.optimizer
    with _keras.attributes_restored(_keras.state_variables(model), membership.CHOSEN):
        try:
            with strategy.scope(), _keras.abstract_variables():
                if optimizer is not None and not optimizer.built:
                    model.optimizer = _fresh(optimizer)
                yield
        finally:
            model.optimizer = optimizer


def _fresh(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    with warnings.catch_warnings():
        # NumPy 2 on how Keras reads the learning rate there
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        return type(optimizer).from_config(optimizer.get_config())


def _check_built(model: keras.Model) -> None:
    if not _keras.is_built(model):
        raise ValueError(
            message(
                "A model given to a dry run must be built.",
                received=f"model {model.name!r}, some of whose layers have no weights yet.",
                fix="Give the function that builds and compiles the model instead, or call the "
                "model on data first.",
            )
        )


def _check_model(model: Any, mode: str) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            message(
                "build() must return a keras.Model.",
                received={"build()": model},
                fix="End the function with `return model`.",
            )
        )
    if mode != "predict" and not model.compiled:
        raise ValueError(
            message(
                f"A dry run of mode {mode!r} needs a compiled model.",
                received=f"model {model.name!r}, on which compile() was not called.",
                fix='Call model.compile(optimizer, loss) in build(), or use mode="predict".',
            )
        )


def _checked_mode(mode: str) -> str:
    if mode not in KINDS:
        raise ValueError(
            message(
                "The mode says which step is compiled.",
                received={"mode": mode},
                fix=f"Use one of: {', '.join(KINDS)}.",
                name=mode,
                choices=KINDS,
            )
        )
    return KINDS[mode]


def _check_batch_size(batch_size: int, strategy: Any) -> None:
    is_count = isinstance(batch_size, (int, np.integer)) and not isinstance(batch_size, bool)
    if not is_count or batch_size < strategy.num_replicas_in_sync:
        raise ValueError(
            message(
                "The batch size counts the rows of all devices together, at least one for each "
                "part that the data axes make.",
                received=f"batch_size={batch_size!r} with {strategy.num_replicas_in_sync} part(s) "
                f"(data axes {strategy.data_axes}).",
                fix=f"Use a batch size of {strategy.num_replicas_in_sync} or more.",
            )
        )


def _batch(
    model: keras.Model,
    placer: BatchPlacer,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int,
    mode: str,
    notes: list[str],
) -> tuple[Any, Any, Any]:
    """The batch `(x, y, sample_weight)` as `jax.ShapeDtypeStruct`."""
    if x is None:
        if not getattr(model, "inputs", None):
            raise ValueError(
                message(
                    "A dry run needs to know the input.",
                    received=f"x=None and model {model.name!r}, which declares no inputs.",
                    fix='Give x as an array, or jax.ShapeDtypeStruct((1, 28, 28), "float32"); '
                    "its rows are replaced by batch_size.",
                )
            )
        x = _declared_inputs(model)
    assumed = False
    if mode == "predict":
        y = sample_weight = None
    elif y is None and getattr(model, "inputs", None):
        y = _targets(model)
        assumed = True
    batch = (x, y, sample_weight)
    leaves, treedef = jax.tree.flatten(batch)
    axes = placer.axes(batch)
    described = jax.tree.unflatten(
        treedef, [_described(leaf, axis, batch_size) for leaf, axis in zip(leaves, axes)]
    )
    if assumed:
        notes.append(f"y was not given, {_shapes_text(described[1])} is assumed from the outputs")
    return described


def _declared_inputs(model: keras.Model) -> Any:
    tensors = getattr(model, "_inputs_struct", model.inputs)
    return tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors


def _declared_outputs(model: keras.Model) -> Any:
    tensors = getattr(model, "_outputs_struct", model.outputs)
    return tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors


def _targets(model: keras.Model) -> Any:
    """What the model's outputs and their losses suggest as targets."""
    outputs, treedef = jax.tree.flatten(_declared_outputs(model))
    losses = model.loss
    if isinstance(losses, dict):
        losses = [losses.get(name) for name in getattr(model, "output_names", ())]
    if not isinstance(losses, (list, tuple)) or len(losses) != len(outputs):
        losses = [losses] * len(outputs)
    return jax.tree.unflatten(treedef, [_target(o, loss) for o, loss in zip(outputs, losses)])


def _target(output: Any, loss: Any) -> Any:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if "sparse" in name.lower():
        return keras.KerasTensor(output.shape[:-1], "int32")
    return keras.KerasTensor(output.shape, keras.config.floatx())


def _described(leaf: Any, axis: int | None, batch_size: int) -> jax.ShapeDtypeStruct:
    leaf = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    shape = list(leaf.shape)
    if axis is not None and axis < len(shape):
        shape[axis] = batch_size
    if None in shape:
        raise ValueError(
            message(
                "Every dimension of an input but the batch must be known.",
                received={"shape": tuple(leaf.shape)},
                fix='Give x with its sizes, as in jax.ShapeDtypeStruct((1, 512), "int32").',
            )
        )
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    # fit casts what NumPy makes by default to the model's default float
    dtype = {"float64": keras.config.floatx(), "int64": "int32"}.get(dtype, dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _shapes_text(structure: Any) -> str:
    return ", ".join(f"{t.dtype}{tuple(t.shape)}" for t in jax.tree.leaves(structure))


@contextlib.contextmanager
def _laid_out(model: keras.Model, strategy: Any) -> Iterator[None]:
    """Gives variables and layers' outputs the layouts that training under the strategy would."""
    member = membership.Membership(strategy)
    for variable, layout in member.targets(model):
        _keras.set_layout(variable, layout)
    with strategy._as_running(member):
        yield


def _state(model: keras.Model, kind: str) -> tuple[list, ...]:
    """The step's state as `jax.ShapeDtypeStruct`, in Keras's order."""
    groups: list[list] = [model.trainable_variables, model.non_trainable_variables]
    if kind == "train":
        groups.append(model.optimizer.variables)
    if kind != "predict":
        groups.append(model.metrics_variables)
    shardings = _keras.state_shardings(model, kind)
    return tuple(
        [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding)
            for v, sharding in zip(variables, of_group)
        ]
        for variables, of_group in zip(groups, shardings)
    )


def _donates(strategy: Any, kind: str, state: tuple) -> bool:
    if kind != "train" or strategy._donate_state is False:
        return False
    if strategy._donate_state is True or strategy.topology is None:
        return True
    kept = sum(_bytes_per_device(v) for v in jax.tree.leaves(state))
    return kept > strategy.topology.hbm_bytes * _KEEP_FRACTION_OF_MEMORY


def _export(
    step: Callable, state: tuple, placed: PlacedBatch, platform: str
) -> jax.export.Exported:
    leaves, treedef = jax.tree.flatten(placed)

    def flat_step(state, leaves):
        return step(state, jax.tree.unflatten(treedef, leaves))

    # Programs are compiled by the same JAX that lowers them, so calls into the compiler without
    # a promise of compatibility are safe.
    allowed = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    export = jax.export.export(jax.jit(flat_step), platforms=[platform], disabled_checks=allowed)
    return export(state, leaves)


def _state_bytes(state: tuple, kind: str, placed: PlacedBatch) -> StateBytes:
    sizes = [sum(_bytes_per_device(v) for v in group) for group in state]
    return StateBytes(
        weights=sizes[0] + sizes[1],
        optimizer=sizes[2] if kind == "train" else 0,
        metrics=sizes[-1] if kind != "predict" else 0,
        inputs=sum(_bytes_per_device(leaf) for leaf in jax.tree.leaves(placed)),
    )


def _bytes_per_device(array: jax.ShapeDtypeStruct) -> int:
    shard = array.sharding.shard_shape(array.shape) if array.sharding else array.shape
    return math.prod(shard) * np.dtype(array.dtype).itemsize


def _tokens(x: Any) -> int:
    for leaf in jax.tree.leaves(x):
        if np.dtype(leaf.dtype).kind in "iu" and leaf.ndim == 2:
            return math.prod(leaf.shape)
    return 0
