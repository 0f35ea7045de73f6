"""From a user's build function to a lowered step, without memory for weights."""

import contextlib
import functools
import operator
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.export
import keras
import numpy as np
from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import one_of
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.left_out import counted
from keras_tpu_dist.common.plain import plain_operations
from keras_tpu_dist.common.sizes import bytes_per_device
from keras_tpu_dist.hardware.mesh import auto_mesh
from keras_tpu_dist.hardware.topology import Topology, of_devices
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch
from keras_tpu_dist.input.position import random_numbers, set_random_numbers
from keras_tpu_dist.layout.lint import Finding
from keras_tpu_dist.programs.head import step as head
from keras_tpu_dist.programs.jaxprs import (
    inner_jaxprs,
    opened,
)
from keras_tpu_dist.programs.partitioner import exchanges
from keras_tpu_dist.programs.partitioner.branches import choosing_axes
from keras_tpu_dist.tools.dryrun.changes import Levers, levers_of
from keras_tpu_dist.tools.dryrun.inputs import (
    Inputs,
    check_batch_size,
    described_batch,
    symbolic,
)
from keras_tpu_dist.tools.dryrun.state_bytes import StateBytes, state_bytes
from keras_tpu_dist.tools.dryrun.tokens import TokenLoop, token_loop
from keras_tpu_dist.training import membership
from keras_tpu_dist.training.auto_steps import MOST_STEPS
from keras_tpu_dist.training.flops import ModelFlops, count_tokens, model_flops
from keras_tpu_dist.training.generation import generate_program, generate_step
from keras_tpu_dist.training.guard import states_that_fit
from keras_tpu_dist.training.protocol import Strategy
from keras_tpu_dist.training.step import jitted_step

Build = Callable[[], keras.Model] | keras.Model

KINDS = {"train": "train", "evaluate": "test", "predict": "predict", "generate": "predict"}
MODE = one_of(*KINDS)


@dataclass(frozen=True)
class Launch:
    """What is needed to run a lowered program.

    Args:
        shapes: One batch `(x, y, sample_weight)`, described.
        placed: The program's batch, described: padded, and stacked if there are several steps.
        returned: The numbers of the state's values that the program returns.
        kernels: The equations of its hand-written kernels.
    """

    shapes: tuple[Any, Any, Any]
    placed: PlacedBatch
    returned: tuple[int, ...]
    kernels: tuple[Any, ...] = ()


@dataclass(frozen=True)
class WholeRows:
    """A step of which every device that computes an assigned layer has all rows.

    It is for a compiler that would exchange rows in the layer's branch; see `Jitted`.

    Args:
        program: As that of `Lowered`.
        taken: The axes of the mesh that choose the branches.
        kernels: The equations of its hand-written kernels.
    """

    program: bytes
    taken: frozenset[str]
    kernels: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class ToCompile:
    """A program, and what a compiler gets with it.

    Args:
        program: The pickled `jax.export.Exported`, arguments flattened to `(state, batch)`.
        donate: Whether the state's buffers are reused for the new state.
        devices: The mesh's devices, in order.
        topology: The slice, or `None` if the mesh is not a TPU slice.
        optional_options: Names of the options that the strategy chose itself; if a compiler refuses
            them, it compiles without.
        whole: The step with whole rows, if it has assigned layers.
    """

    program: bytes
    donate: bool
    axes: tuple[tuple[str, int], ...]
    devices: tuple[Any, ...]
    topology: Topology | None
    compiler_options: Mapping[str, Any] | None = None
    optional_options: tuple[str, ...] = ()
    whole: WholeRows | None = None

    def without_exchange(self, text: str) -> Self | None:
        """The step with whole rows, if a compiler's program exchanges some in a branch."""
        whole = self.whole
        if whole is None or not exchanges.exchanged_in_branches(text, dict(self.axes), whole.taken):
            return None
        return replace(self, program=whole.program)


@dataclass(frozen=True, kw_only=True)
class Lowered(ToCompile):
    """A step ready for a compiler, and what its report says beside the compiler's answer.

    Args:
        mode: `"train"`, `"evaluate"`, `"predict"` or `"generate"`.
        state: Bytes on one device.
        parameters: Number of the model's weights.
        rows: Rows of the batch.
        tokens: Elements of the first integer input that has a time axis, else 0.
        layer_names: Names of the model's layers.
        overstated: Whether the program has loops or convolutions. Quick compilation reports up to
            three times too much memory for these.
        steps: How many steps the program has: a launch of `fit`.
        ready_bytes: Bytes on one device of further batches, which training transfers ahead.
        seconds: Time to build and lower.
        findings: Mistakes in the layouts.
        notes: Assumptions.
        model_flops: Operations of the matrix products on all devices, those for gradients
            included, without recomputation.
        hidden_flops: Those of them that causal masks hide.
        tokens_loop: What one round of the loop over tokens reads, in mode `"generate"`.
        levers: What could be changed, for training.
    """

    mode: str
    state: StateBytes
    parameters: int
    rows: int
    tokens: int
    layer_names: frozenset[str]
    overstated: bool
    steps: int
    ready_bytes: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    model_flops: float = 0.0
    hidden_flops: float = 0.0
    tokens_loop: TokenLoop | None = None
    launch: Launch | None = None
    levers: Levers | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        shape = [size for _, size in self.axes]
        devices = np.asarray(self.devices, dtype=object).reshape(shape)
        return auto_mesh(devices, [name for name, _ in self.axes])


@dataclass(frozen=True)
class Subject:
    """What is dry-run: a launch of a model's steps. See `dry_run`.

    Args:
        build: The function that builds the model, or the model.
        mode: `"train"`, `"evaluate"`, `"predict"` or `"generate"`.
    """

    build: Build
    strategy: Strategy
    batch_size: int
    inputs: Inputs = field(default_factory=Inputs)
    mode: str = "train"


def lower(
    step: Subject, platform: str = "tpu", steps: int | None = None, to_run: bool = False
) -> Lowered:
    """Builds a model without memory and lowers a launch of it for the strategy's mesh.

    Args:
        platform: `"tpu"` or `"cpu"`.
        steps: Steps of the launch; by default `steps_per_execution`, the most that it may be.
        to_run: Whether the program is to be run on simulated devices.
    """
    started = time.perf_counter()
    strategy, mode, kind = step.strategy, step.mode, KINDS[step.mode]
    placer = strategy.placer
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        if platform != "tpu":
            stack.enter_context(plain_operations())
        model, batch = stack.enter_context(described(step, notes))
        # In the form that fit passes it to a step: a custom step may unpack `x, y`.
        placed = placer.describe(keras.utils.pack_x_y_sample_weight(*batch))
        state = _state(model, kind)
        donate = _donates(strategy, kind, state)
        ahead = strategy.runner.prefetch * state_bytes(state, kind, placed).inputs
        loop = None
        if mode == "generate":
            steps, ahead, held = 1, 0, state_bytes(state, kind, placed)
            program, state, loop = _generating(model, placer, state, placed)
        else:
            steps = steps or _steps_of(model)
            placed = placer.describe_many(placed, steps) if steps > 1 else placed
            program = jitted_step(model, kind, placer, donate, scanned=steps > 1)
            held = state_bytes(state, kind, placed)
            ahead = ahead if steps == 1 else held.inputs  # of the next launch
        rows = operator.index(step.batch_size)
        with _compiled_by_keras(model):
            exported = export_step(program, state, placed, platform)
        figures = _figures(model, step, batch, steps, notes)
        return Lowered(
            mode=mode,
            program=pickled(exported),
            donate=donate,
            axes=tuple(strategy.mesh.shape.items()),
            devices=tuple(strategy.mesh.devices.flat),
            state=held,
            parameters=model.count_params(),
            rows=rows,
            tokens=rows if mode == "generate" else count_tokens(batch[0]),
            layer_names=frozenset(_keras.layer_names(model)),
            overstated=_is_overstated(exported, steps),
            steps=steps,
            ready_bytes=ahead,
            seconds=time.perf_counter() - started,
            notes=tuple(notes),
            tokens_loop=loop,
            **figures,
            launch=_launch(program, state, placed, exported, batch) if to_run else None,
            whole=whole_rows_of(lambda: program, (state, placed), platform, exported),
            **of_platform(strategy, platform),
        )


@contextlib.contextmanager
def _compiled_by_keras(model: keras.Model) -> Iterator[None]:
    """Says why a step cannot be traced if `fit` would not compile it either."""
    try:
        yield
    except Exception as error:  # from layers: anything
        for path, words, fix in _keras.why_eager(model):
            raise value_error(
                "A dry run compiles the step. fit would not: it launches each operation by itself.",
                received=f"{path}: {words}",
                fix=fix,
            ) from error
        raise


def _steps_of(model: keras.Model) -> int:
    """The steps of a launch of `fit`, or the most that it may choose."""
    return MOST_STEPS if model.steps_per_execution == "auto" else model.steps_per_execution


def _generating(
    model: keras.Model, placer: BatchPlacer, state: tuple, placed: PlacedBatch
) -> tuple[Callable, tuple, TokenLoop | None]:
    """The program of `generate`, its state, and its loop over tokens."""
    sampler = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in _keras.sampler_variables(model)]
    state = (sampler, *state)
    sizes = [bytes_per_device(leaf) for leaf in jax.tree.leaves(state)]
    traced = jax.jit(generate_step(model, placer, None)).trace(state, placed)
    return generate_program(model, placer, None), state, token_loop(traced.jaxpr, sizes)


@contextlib.contextmanager
def described(step: Subject, notes: list[str]) -> Iterator[tuple[keras.Model, tuple]]:
    """A model without memory, with the layouts of training under the strategy, and its batch's
    shapes.

    Args:
        step: The model, its strategy, mode, rows and inputs.
        notes: Assumptions are appended here.

    Yields:
        The model and the batch, of `jax.ShapeDtypeStruct`.
    """
    build, strategy, mode = step.build, step.strategy, step.mode
    check_batch_size(step.batch_size, strategy)
    rows = operator.index(step.batch_size)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(_model(build, strategy, mode))
        # Its inputs and its state are those of predictions.
        mode = "predict" if mode == "generate" else mode
        batch = described_batch(model, strategy.placer, step.inputs, rows, mode, notes)
        tensors = symbolic(batch)
        if isinstance(build, keras.Model):
            stack.enter_context(_keras.compiled_anew(model))
            _build_metrics(build, tensors, mode)
            stack.enter_context(_borrowed(build, strategy))
        _keras.symbolic_build(model, tensors, mode)
        stack.enter_context(_laid_out(model, strategy))
        yield model, batch


def _figures(
    model: keras.Model, step: Subject, batch: tuple, steps: int, notes: list[str]
) -> dict[str, Any]:
    """What the report of a step counts beside the compiler; what fails is a note."""
    strategy, rows = step.strategy, operator.index(step.batch_size)
    heads = counted("heads in pieces", lambda: head.described(model), {}, notes.append)
    notes += [f"{path}: {words}" for path, words in heads.items()]
    flops = _flops(model, batch, step.mode, notes)
    levers = None
    if step.mode == "train":
        count = functools.partial(levers_of, model, strategy, batch, steps)
        levers = counted("what to change", count, None, notes.append)
    findings = counted(
        "mistakes in the layouts",
        lambda: strategy.lint(model, batch_size=rows).findings,
        (),
        notes.append,
    )
    return {
        "findings": findings,
        "model_flops": flops.full,
        "hidden_flops": flops.hidden,
        "levers": levers,
    }


def _flops(model: keras.Model, batch: tuple, mode: str, notes: list[str]) -> ModelFlops:
    """Operations of a step's matrix products by the model's formula, 0 if unknown."""
    if mode == "generate":  # the operations for a token are not those of a call on the prompt
        return ModelFlops(0.0, 0.0)
    if type(model).call is keras.Model.call:
        notes.append("the model has no call(), so the operations of its formula are not known")
        return ModelFlops(0.0, 0.0)
    # `fit` need not call the model on its x: a step of the model's own may make other inputs.
    return counted(
        "model FLOPs utilisation",
        lambda: model_flops(model, batch, mode),
        ModelFlops(0.0, 0.0),
        notes.append,
    )


@contextlib.contextmanager
def _model(build: Build, strategy: Strategy, mode: str) -> Iterator[keras.Model]:
    """The model, in the strategy's scope, with variables that have no values."""
    if isinstance(build, keras.Model):
        _check_model(build, mode)
        _check_built(build)
        yield build
        return
    # Initializers draw their seeds from Python's random numbers. A dry run must not change the
    # weights of the program's next model.
    numbers = random_numbers()
    with strategy.scope(), _keras.abstract_variables(), _keras.fresh_names():
        try:
            model = build()
        except Exception as error:
            name = getattr(build, "__qualname__", repr(build))
            error.add_note(f"raised by {name}, the build function given to dry_run")
            raise
        finally:
            set_random_numbers(numbers)
        _check_model(model, mode)
        yield model


def _build_metrics(model: keras.Model, tensors: tuple, mode: str) -> None:
    """Builds the metrics of the user's model for real, as its first `fit` would."""
    if mode == "predict":
        _keras.symbolic_build(model, tensors, mode)
        return
    optimizer, model.optimizer = model.optimizer, None
    try:
        _keras.symbolic_build(model, tensors, mode)
    finally:
        model.optimizer = optimizer


@contextlib.contextmanager
def _borrowed(model: keras.Model, strategy: Strategy) -> Iterator[None]:
    """Uses the user's model, and restores its layouts and its optimizer afterwards."""
    optimizer = getattr(model, "optimizer", None)
    variables = _keras.state_variables(model)
    with _keras.attributes_restored(variables, membership.chosen_mark.attribute):
        try:
            with strategy.scope(), _keras.abstract_variables():
                if optimizer is not None and not optimizer.built:
                    model.optimizer = _keras.fresh_optimizer(optimizer)
                yield
        finally:
            model.optimizer = optimizer


def _check_built(model: keras.Model) -> None:
    if not _keras.is_built(model):
        raise value_error(
            "A model passed to a dry run must be built.",
            received=f"model {model.name!r}, some of whose layers have no weights yet.",
            fix="Pass the function that builds and compiles the model instead, or call the "
            "model on data first.",
        )


class NoModel(ValueError):
    """The function that builds the model returned something else."""


def fails_anywhere(error: BaseException) -> bool:
    """Whether a dry run failed in the user's code, so that no mesh and no layout would help.

    Args:
        error: What the dry run raised.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
    in_a_library = frame is None or module.partition(".")[0] in (
        "keras_tpu_dist",
        "keras",
        "jax",
        "jaxlib",
    )
    return isinstance(error, NoModel) or not in_a_library


def _check_model(model: Any, mode: str) -> None:
    if not isinstance(model, keras.Model):
        raise NoModel(
            message(
                "build() must return a keras.Model.",
                received={"build()": model},
                fix="End the function with `return model`.",
            )
        )
    if mode == "generate":
        _check_generates(model)
    if mode != "predict" and not model.compiled:
        raise value_error(
            f"A dry run of mode {mode!r} needs a compiled model.",
            received=f"model {model.name!r}, on which compile() was not called.",
            fix='Call model.compile(optimizer, loss) in build(), or use mode="predict".',
        )


def _check_generates(model: keras.Model) -> None:
    if not _keras.generates(model):
        raise value_error(
            'A dry run of mode "generate" needs a model with generate_step(), as language '
            "models of KerasHub have.",
            received=f"model {model.name!r}, a {type(model).__name__}.",
            fix='Pass a CausalLM, or use mode="predict" for one call of the model.',
        )


@contextlib.contextmanager
def _laid_out(model: keras.Model, strategy: Strategy) -> Iterator[None]:
    """Gives variables and layer outputs the layouts that they have in training."""
    member = membership.Membership(strategy)
    for variable, layout in member.targets(model):
        given = membership.given_layout(variable) is not None
        _keras.set_layout(
            variable, layout if given else membership.mark_as_chosen(variable, layout)
        )
    with strategy.runner.call(member):
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
            for v, sharding in zip(variables, of_group, strict=True)
        ]
        for variables, of_group in zip(groups, shardings, strict=True)
    )


def of_platform(strategy: Strategy, platform: str) -> dict[str, Any]:
    """The slice, and the strategy's options for the compiler; none if CPU devices replace it."""
    topology = strategy.topology or of_devices(strategy.mesh.devices)
    arguments = {"topology": topology if platform == "tpu" else None}
    if strategy.mesh.devices.flat[0].platform != platform:
        return arguments
    optional = strategy.options.optional_for_compiler(strategy.mesh, strategy.layouts.layout)
    options = strategy.runner.compiler_options
    return {**arguments, "compiler_options": options, "optional_options": optional}


def _donates(strategy: Strategy, kind: str, state: tuple) -> bool:
    if kind != "train" or strategy.options.donate_state is False:
        return False
    sizes = [bytes_per_device(v) for v in jax.tree.leaves(state)]
    hbm_bytes = None if strategy.topology is None else strategy.topology.hbm_bytes
    return states_that_fit(strategy.options.donate_state, sizes, hbm_bytes) == 0


def _is_overstated(exported: jax.export.Exported, steps: int) -> bool:
    # These are the names of operations in MLIR's bytecode.
    serialized = exported.mlir_module_serialized
    if b"convolution" in serialized or b"while" not in serialized:
        return b"convolution" in serialized
    # The loop over steps stores nothing for gradients, which is what is overstated.
    return steps == 1 or exported.mlir_module().count("stablehlo.while") > 1


def _launch(
    step: Callable,
    state: tuple,
    placed: PlacedBatch,
    exported: jax.export.Exported,
    shapes: tuple,
) -> Launch:
    """What is needed to run a program."""
    numbered = jax.tree.unflatten(exported.out_tree, range(len(exported.out_avals)))
    # A step leaves out values that it only reads.
    after = [value for group in numbered[1] for value in group]
    returned = tuple(n for n, value in enumerate(after) if value is not None)

    return Launch(shapes, placed, returned, kernels_of(step, (state, placed), exported))


def whole_rows_of(
    step: Callable[[], Callable], arguments: tuple, platform: str, exported: jax.export.Exported
) -> WholeRows | None:
    """A step with whole rows, `None` if it has no assigned layers.

    Args:
        step: Returns the step, traced anew.
        exported: The step as it is tried first.
    """
    if exchanges.ONE_DEVICE.encode() not in exported.mlir_module_serialized:
        return None
    state, placed = arguments
    taken = choosing_axes(_traced_anew(step(), arguments))
    with exchanges.whole_rows():
        program = step()
        again = export_step(program, state, placed, platform)
        return WholeRows(pickled(again), taken, kernels_of(program, arguments, again))


def pickled(exported: jax.export.Exported) -> bytes:
    """A program for another process."""
    return pickle.dumps(_keras.without_vjp(exported))


def _traced_anew(program: Callable, arguments: tuple) -> Any:
    """The jaxpr of a program, which `jax.jit` has not traced before."""
    return jax.jit(lambda *given: program(*given)).trace(*arguments).jaxpr


def kernels_of(
    program: Callable, arguments: tuple, exported: jax.export.Exported
) -> tuple[Any, ...]:
    """The equations of a program's hand-written kernels."""

    def kernels(jaxpr: Any) -> Iterator[Any]:
        for equation in opened(jaxpr).eqns:
            if equation.primitive.name == "pallas_call":
                yield equation
            else:
                for inner in inner_jaxprs(equation):
                    yield from kernels(inner)

    if b"tpu_custom_call" not in exported.mlir_module_serialized:
        return ()
    return tuple(kernels(_traced_anew(program, arguments)))


def export_step(step: Callable, state: Any, placed: Any, platform: str) -> jax.export.Exported:
    """Lowers a step for a platform.

    Args:
        step: `(state, batch) -> (outputs, state)`, jitted.
        state: The state as `jax.ShapeDtypeStruct`.
        placed: The batch, likewise.
        platform: `"tpu"` or `"cpu"`.
    """
    leaves, treedef = jax.tree.flatten(placed)

    def flat_step(state, leaves):
        return step(state, jax.tree.unflatten(treedef, leaves))

    # The JAX that lowers a program also compiles it, so calls into the compiler are safe even if
    # JAX does not promise compatibility for them.
    allowed = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        # jax 0.10.1 does not know "ALL"
        for target in ("ALL", "LayoutConstraint")
    ]

    # A value that is not read is in memory all the same, and is laid out as it is given.
    jitted = jax.jit(flat_step, keep_unused=True)
    export = jax.export.export(jitted, platforms=[platform], disabled_checks=allowed)
    try:
        return export(state, leaves)
    except NotImplementedError as error:
        if "host_callbacks" not in str(error):
            raise
        raise value_error(
            "The step of a dry run is compiled in another process, which cannot call Python "
            "code of this process.",
            received="a step that calls Python, as jax.debug.print and jax.pure_callback do.",
            fix="Leave it out of the model that `build` returns.",
        ) from error
