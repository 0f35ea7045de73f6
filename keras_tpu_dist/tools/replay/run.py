"""Verify: what the TPU compiler makes of a model, run on simulated devices beside one device."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import FLAG, SECONDS, one_of, require
from keras_tpu_dist.common.checks import whole as whole_number
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.common.left_out import counted
from keras_tpu_dist.hardware.versions import DISABLED_PASSES, libtpu_version, version_text
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.host_arrays import padded
from keras_tpu_dist.processes.arrays import whole
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.tools.checkup.aside import aside, on_one
from keras_tpu_dist.tools.checkup.batch import Given, values
from keras_tpu_dist.tools.checkup.bounds import State, allowed, gap, is_half, largest
from keras_tpu_dist.tools.checkup.prepared import on_one_device
from keras_tpu_dist.tools.dryrun.build import (
    KINDS,
    Build,
    Lowered,
    Subject,
    ToCompile,
    lower,
)
from keras_tpu_dist.tools.dryrun.compile import (
    cpu_environment,
    has_libtpu,
    job_of,
    run_compiler,
    run_job,
)
from keras_tpu_dist.tools.dryrun.inputs import check_asked, symbolic
from keras_tpu_dist.tools.hlo.operations import unlisted
from keras_tpu_dist.tools.hlo.parse import parse
from keras_tpu_dist.tools.replay import execute
from keras_tpu_dist.tools.replay.kernels import interpreted, kernel_name
from keras_tpu_dist.tools.replay.passes import first_wrong
from keras_tpu_dist.tools.replay.report import Row, Verification
from keras_tpu_dist.tools.replay.rewrite import runnable
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")

_MODES = ("train", "evaluate", "predict")
# They store operands of products as bfloat16, which a chip rounds them to anyway. Without them,
# what is left is float32, and comparable to 1e-5.
ROUNDING_PASSES = (
    "bfloat16-propagation",
    "bf16-conversion-folding",
    "bfloat16-conversion-folding",
    "multi_output_fusion_and_bf16_folding",
)


def verify(
    build: Build,
    strategy: Strategy | None = None,
    *,
    batch_size: int,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    sequence_length: int | None = None,
    mode: str = "train",
    steps: int | None = None,
    as_on_chip: bool = False,
    timeout: float = 1800.0,
) -> Verification:
    """Runs the TPU compiler's program for a model, without a TPU, beside the model on one device.

    The real TPU compiler compiles the launch that `fit` would make for the slice: partitioned,
    fused and scheduled. That program is run on as many simulated devices, and every result is
    compared with stock Keras on one device: weights, slots, metrics, losses, predictions. If they
    differ, the program is also run as it was after each of the compiler's passes, as far as
    needed to name the first one after which it is wrong.

    This finds what a compiler computes wrongly. It does not find what is wrong with a chip, how
    long a step takes, or faults behind the compiler's text, such as two arrays in one place of
    memory. It computes in full float32 unless you ask for the rounding of the chip.

    Args:
        build: A function without arguments that builds, compiles and returns a model; or a built
            model, which is not changed. It runs here, so use one that fits into your memory: fewer
            layers of the same kinds make the same kinds of programs.
        strategy: A `TPUStrategy` for a slice, with `topology="v5e:2x4"`. Up to 16 chips are
            practical. Defaults to the one that the model belongs to, or that is in scope.
        batch_size: The global batch size.
        x: The input: arrays, whose rows are used in turn, or their shapes. By default random
            numbers for the inputs that the model declares.
        y: The target, likewise.
        sample_weight: Sample weights, likewise.
        sequence_length: The size of every open time axis, as for `dry_run`.
        mode: `"train"`, `"evaluate"` or `"predict"`.
        steps: Steps of a launch. Defaults to `steps_per_execution` of `compile`. With one step,
            two launches follow each other.
        as_on_chip: Whether products of float32 round their operands to bfloat16, as a TPU does
            by default. Results then differ from one device by what you will see on the chip.
        timeout: Seconds after which compiling, or running, is stopped.

    Returns:
        A `Verification`. If results differ, you see it there; no error is raised.

    Raises:
        ValueError: If an argument is wrong, or the program has an operation that cannot be run on
            simulated devices.
        RuntimeError: If the compiler refuses the program, or libtpu is not installed.

    References:
        - TPUs multiply float32 in bfloat16 by default: jax.readthedocs.io, jax.lax.Precision

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> def build():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    ...     model.compile("adam", "mse", steps_per_execution=4)
    ...     return model
    >>> strategy = ktd.TPUStrategy(topology="v5e:2x2")
    >>> verified = ktd.verify(build, strategy, batch_size=10)  # doctest: +SKIP
    >>> verified.equal  # doctest: +SKIP
    True
    """
    started = time.perf_counter()
    strategy = check_asked(build, strategy, "verify")
    _check(strategy, mode, steps, as_on_chip, timeout)
    given = Given(x, y, sample_weight, sequence_length, batch_size)
    step = Subject(build, strategy, batch_size, given, mode)
    with stages(f"verify, {mode}", 4) as begin:
        begin("building and lowering for the slice")
        # The compiler has kernels of its own for ragged products, whose code cannot be run here.
        with ragged_products_as_products():
            lowered = lower(step, steps=steps, to_run=True)
        assert lowered.launch is not None
        begin("running on one device")
        reference = _alone(step, given, lowered, as_on_chip)
        begin("compiling for the TPU")
        kernels = lowered.launch.kernels
        compiled = TPUProgram(lowered, _expected(lowered, reference), kernels, timeout, as_on_chip)
        begin("running the TPU's program")
        return compiled.verification(
            started,
            mode=mode,
            model=reference.name,
            batch_size=int(batch_size),
            steps=lowered.steps,
            launches=len(reference.batches) // lowered.steps,
        )


@contextlib.contextmanager
def ragged_products_as_products() -> Iterator[None]:
    """Lets ragged products be traced as plain ones."""
    name = "jax_ragged_dot_use_ragged_dot_instruction"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _check(
    strategy: Strategy, mode: str, steps: int | None, as_on_chip: bool, timeout: float
) -> None:
    require("verify", one_of(*_MODES), mode=mode)
    require("verify", whole_number(1), True, steps=steps)
    check_options("verify", as_on_chip, timeout)
    if strategy.topology is None:
        raise value_error(
            "verify needs a slice to compile for.",
            received=f"a strategy on {len(strategy.mesh.devices.flat)} attached devices.",
            fix='Pass TPUStrategy(..., topology="v5e:2x4").',
        )


def check_options(where: str, as_on_chip: bool, timeout: float) -> None:
    """Checks what all verifications need."""
    require(where, SECONDS, timeout=timeout)
    require(where, FLAG, as_on_chip=as_on_chip)
    if not has_libtpu():
        raise runtime_error(
            f"{where} needs the TPU compiler.",
            received="libtpu is not installed.",
            fix="pip install 'jax[tpu]', on Linux x86-64.",
        )


@dataclass(frozen=True)
class _Reference:
    """A model that ran on one device.

    Args:
        results: The results, of the last launch and of the state after it.
        allowed: How far each may be off by rounding.
    """

    name: str
    batches: list[Any]
    state: State
    names: list[str]
    results: list[np.ndarray]
    allowed: list[float]


def _alone(step: Subject, given: Given, lowered: Lowered, as_on_chip: bool) -> _Reference:
    """Builds the model with values, and runs some steps of stock Keras on one device."""
    launch, steps = lowered.launch, lowered.steps
    assert launch is not None
    kind, shapes, mode = KINDS[step.mode], launch.shapes, step.mode
    device = jax.local_devices(backend="cpu")[0]
    with aside(), on_one(device), _with_values(step.build, shapes, mode) as model:
        # With one step, the second launch starts from what the first has computed.
        number = 2 if steps == 1 and mode == "train" else steps
        batches = [values(model, shapes, given, step.strategy.placer, n) for n in range(number)]
        groups = _keras.state_groups(model, kind)
        state = [[np.array(whole(v)) for v in _keras.full_values(group)] for group in groups]
        names = [v.path for group in groups for v in group]
        run = on_one_device(model, kind, device)

        def computed(state: State, batches: list[Any]) -> tuple[list[str], list[np.ndarray]]:
            outputs, after = run(state, batches)
            return _of_launch(kind, outputs[-steps:], after)

        logs, results = computed(state, batches)
        # Kernels may store what they multiply as bfloat16, as the chip would round it.
        half = as_on_chip or is_half(model) or "bf16" in str(launch.kernels)
        limits = allowed(
            lambda *of: computed(*of)[1],
            state,
            batches,
            results,
            "cpu",
            half,
            before=[*([None] * len(logs)), *range(len(names))],
            steps=number,
        )
    if as_on_chip:
        # A gradient near 0 may have either sign, and an optimizer such as Adam moves its weight by
        # a whole step: results can be judged, variables are only reported.
        limits[len(logs) :] = [math.inf] * len(names)
    return _Reference(model.name, batches, state, [*logs, *names], results, limits)


@contextlib.contextmanager
def _with_values(build: Build, shapes: tuple, mode: str) -> Iterator[keras.Model]:
    """The model with values, as the first call of `fit` would make them."""
    if not isinstance(build, keras.Model):
        model = build()
        _keras.symbolic_build(model, symbolic(shapes), mode)
        yield model
        return
    optimizer = getattr(build, "optimizer", None)
    with _keras.compiled_anew(build):
        try:
            if optimizer is not None and not optimizer.built:
                build.optimizer = _keras.fresh_optimizer(optimizer)
            _keras.symbolic_build(build, symbolic(shapes), mode)
            yield build
        finally:
            if optimizer is not None:
                build.optimizer = optimizer


def _of_launch(kind: str, outputs: list[Any], after: Any) -> tuple[list[str], list[np.ndarray]]:
    """The names and values that a launch returns, and the state after it."""
    last = outputs[-1]
    if kind == "predict" and len(outputs) > 1:
        last = jax.tree.map(lambda *of: np.stack([np.asarray(array) for array in of]), *outputs)
    paths, _ = jax.tree_util.tree_flatten_with_path(last)
    names = [f"result {jax.tree_util.keystr(path)}".strip() for path, _ in paths]
    leaves = [*(leaf for _, leaf in paths), *jax.tree.leaves(tuple(map(list, after)))]
    return names, [np.asarray(leaf) for leaf in leaves]


@dataclass(frozen=True)
class Expected:
    """What launches of a program get, and what the last one should return.

    Args:
        launches: The arguments of each launch; `None` for one that a launch before has returned.
        carried: From such an argument to the result, by their numbers.
        allowed: How far each may be off by rounding, relative to its largest value.
    """

    launches: list[list[Any]]
    carried: dict[int, int]
    names: list[str]
    results: list[np.ndarray]
    allowed: list[float]


def _expected(lowered: Lowered, reference: _Reference) -> Expected:
    state = [value for group in reference.state for value in group]
    assert lowered.launch is not None
    batch, steps = lowered.launch.placed, lowered.steps
    stacked, given = steps > 1, reference.batches
    launches = []
    for first in range(0, len(given), steps):
        columns = zip(*(flatten(one)[0] for one in given[first : first + steps]), strict=True)
        arrays = []
        for column, slot, shape in zip(columns, batch.slots, flatten(batch.data)[0], strict=True):
            array = np.stack(column) if stacked else np.asarray(column[0])
            if slot.axis is not None:
                axis = slot.axis + stacked
                array = padded(array, axis, shape.shape[axis])
            arrays.append(array.astype(shape.dtype))
        launches.append([*(state if first == 0 else [None] * len(state)), *arrays])
    # Evaluation and prediction return only values that they change.
    outputs = len(reference.results) - len(state)
    chosen = [*range(outputs), *(outputs + n for n in lowered.launch.returned)]
    return Expected(
        launches,
        {n: len(chosen) - len(state) + n for n in range(len(state))},
        [reference.names[n] for n in chosen],
        [reference.results[n] for n in chosen],
        [reference.allowed[n] for n in chosen],
    )


def job_to_run(
    lowered: ToCompile, options: dict[str, Any] | None = None, as_on_chip: bool = False
) -> dict[str, Any]:
    """What the compiler's process is to make a program of that is run here.

    Args:
        options: Further options of the compiler.
        as_on_chip: Whether the program may store operands of products as bfloat16.
    """
    job: dict[str, Any] = {**job_of(lowered, "exact"), "to_run": True}
    wanted: dict[str, Any] = {**job["compiler_options"], **(options or {})}
    if not as_on_chip:
        passes = [*ROUNDING_PASSES, wanted.get(DISABLED_PASSES, "")]
        wanted[DISABLED_PASSES] = ",".join(name for name in passes if name)
    return {**job, "compiler_options": wanted}


class TPUProgram:
    """The TPU's program, and what it computes on simulated devices.

    Args:
        timeout: Seconds after which compiling, or running, is stopped.
        as_on_chip: Whether products round their operands as the chip does.
    """

    def __init__(
        self,
        lowered: ToCompile,
        expected: Expected,
        kernels: tuple[Any, ...],
        timeout: float,
        as_on_chip: bool,
    ):
        assert lowered.topology is not None
        self._lowered, self._expected = lowered, expected
        self._where = lowered.topology.name
        self._timeout, self._as_on_chip = timeout, as_on_chip
        self._answer = self._compile({})
        if (whole := lowered.without_exchange(self._answer["text"])) is not None:
            assert whole.whole is not None
            self._lowered, kernels = whole, whole.whole.kernels
            self._answer = self._compile({})
        self._kernels = interpreted(kernels)
        self._names = tuple(sorted({kernel_name(kernel) for kernel in kernels}))

    def verification(self, started: float, **of_program: Any) -> Verification:
        """The comparison of every result, and the pass that makes the program wrong, if any.

        Args:
            started: When the verification began, by `time.perf_counter()`.
            **of_program: What a `Verification` says of the program that was compiled.
        """
        rows = self.rows()
        wrong = any(not row.equal for row in rows)
        program = parse(self._answer["text"])
        found = None
        if wrong and not self._as_on_chip:
            found = counted("the first wrong pass", lambda: first_wrong(self), None, logger.warning)
        return Verification(
            **of_program,
            rows=tuple(rows),
            topology=self._where,
            mesh=dict(self._lowered.axes),
            libtpu=version_text(libtpu_version()),
            as_on_chip=self._as_on_chip,
            kernels=self._names,
            unlisted=unlisted(program),
            instructions=sum(len(computation.instructions) for computation in program),
            first_wrong_pass=found,
            seconds=time.perf_counter() - started,
        )

    def _compile(self, options: dict[str, Any]) -> dict[str, Any]:
        job = job_to_run(self._lowered, options, self._as_on_chip)
        answer, _ = run_compiler(self._lowered, job, self._timeout, self._where)
        if error := answer.get("error"):
            raise runtime_error(
                "A program must fit into the chip's memory to be verified.",
                received=str(error)[:400],
                fix="Use a smaller model of the same kind, a smaller batch or a larger slice.",
            )
        return answer

    def dumped(self, folder: str) -> None:
        """Writes the program after each pass into a folder."""
        self._compile(
            {
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": ".*",
                "xla_dump_hlo_as_text": True,
                "xla_dump_large_constants": True,
            }
        )

    def rows(self) -> list[Row]:
        """The comparison of every result of the finished program.

        Raises:
            RuntimeError: If it cannot be run.
        """
        rows = self.run(self._answer["text"])
        if isinstance(rows, str):
            raise runtime_error(
                "The TPU's program must run on simulated devices.",
                received=rows[:600],
                fix="Please report it with the model: the rewriting of this program has a "
                "fault. Leave layers out to verify the rest.",
            )
        return rows

    def run(self, text: str) -> list[Row] | str:
        """Runs a program and compares its results.

        Returns:
            The comparisons, or the error of a program that cannot be run.

        Raises:
            CannotRun: If it has an operation that is not known.
        """
        answer, devices = self._answer, [device.id for device in self._lowered.devices]
        number = len(devices)
        job = {
            "script": os.path.abspath(execute.__file__),
            "text": runnable(
                parse(text), devices, kernels=self._kernels, as_on_chip=self._as_on_chip
            ),
            "devices": number,
            "arguments": self._expected.launches,
            "carried": self._expected.carried,
            **{name: answer[name] for name in ("inputs", "outputs", "shapes")},
            "x64": bool(jax.config.read("jax_enable_x64")),
        }
        ran, _ = run_job(job, cpu_environment(number), self._timeout, self._where)
        return ran.get("error") or self._compared(ran["results"])

    def _compared(self, results: list[tuple[Any, float]]) -> list[Row]:
        expected, rows = self._expected, []
        for (found, apart), name, right, allowed_here in zip(
            results, expected.names, expected.results, expected.allowed, strict=True
        ):
            scale = largest(right)
            # Devices that hold the same part must hold the same numbers.
            off = max(gap(found, right, scale), gap(apart, 0.0, scale))
            rows.append(Row(name, tuple(right.shape), str(right.dtype), off, allowed_here))
        return rows
