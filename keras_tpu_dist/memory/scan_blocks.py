"""scan_blocks: equal consecutive blocks of a model, compiled as a single block."""

import contextvars
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import checked_arguments
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.memory.blocks import layers_by_path
from keras_tpu_dist.programs.answers import Answer, forget, keep
from keras_tpu_dist.programs.partitioner import in_compiled_code
from keras_tpu_dist.programs.scan.loops import computed
from keras_tpu_dist.programs.scan.runs import (
    Run,
    Tracing,
    equal_layers,
    find_runs,
    is_tracing,
    noted,
    tracing,
    without_aliases,
)

ONE_LOOP = "{} blocks {} are one loop"
mark = _keras.LayerMark("_keras_tpu_dist_scan_blocks", saved=True)


@dataclass(frozen=True, repr=False)
class ScannedRun(Printed):
    """Blocks that run as one loop."""

    kind: str
    paths: tuple[str, ...]

    def __str__(self):
        first, last = self.paths[0], self.paths[-1]
        return f"{len(self.paths)} blocks {self.kind} as one: {first!r} to {last!r}"


@dataclass(frozen=True, repr=False)
class ScanReport(Printed):
    """The result of `scan_blocks` for a model.

    Attributes:
        model: The model's name.
        runs: The runs of equal blocks. Every run is one loop in compiled code.
        left_out: The path of every block that runs on its own, and the reason.
    """

    model: str
    runs: tuple[ScannedRun, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self):
        lines = [f"scan_blocks: model {self.model!r}"]
        lines += [f"  {run}" for run in self.runs] or ["  no two equal blocks follow one another"]
        for why, pairs in itertools.groupby(self.left_out, key=lambda pair: pair[1]):
            lines.append(f"  on its own: {', '.join(path for path, _ in pairs)}: {why}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


@checked_arguments
def scan_blocks(model: Any, enabled: bool = True, *, inputs: Any = None) -> ScanReport:
    """Compiles equal consecutive blocks of a model as a single block that runs in a loop.

    Blocks are equal if they have the same class, config, weights and layouts, apart from names,
    seeds and values, and if they compute the same. A run of equal blocks becomes one `jax.lax.scan`
    over the weights, stacked within the program, if every block gets its input from the block
    before and nothing else that differs. The compiler then sees one block instead of all.
    Variables, paths, saved files and LoRA do not change, nor do outputs, gradients, dropout, moving
    statistics, masks and added losses. `remat` on the blocks applies to the body of the loop.

    It takes effect in compiled code; eager calls run block by block. If the model has already
    trained without a strategy, compile it again. `from_config`, `copy.deepcopy`, pickle and
    `.keras` files keep the setting, `clone_model` does not.

    Args:
        model: A built model of any kind. If it has no such run, nothing changes.
        enabled: `False` turns it off again.
        inputs: The model's inputs: arrays or `jax.ShapeDtypeStruct`. Defaults to the model's
            declared inputs; you have to give them for a subclassed model.

    Returns:
        The runs that were found, and the blocks that are left out, with reasons.

    Raises:
        ValueError: If `model` is not a model, is not built, or cannot be traced without `inputs`.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> x = inputs = keras.Input((8,))
    >>> for i in range(12):
    ...     block = [keras.layers.Dense(16, "gelu"), keras.layers.Dense(8)]
    ...     x = keras.Sequential(block, name=f"block_{i}")(x)
    >>> model = keras.Model(inputs, keras.layers.Dense(1)(x), name="mlp")
    >>> print(ktd.scan_blocks(model))
    scan_blocks: model 'mlp'
      12 blocks Sequential as one: 'mlp/block_0' to 'mlp/block_11'
    """
    _check(model)
    if not enabled:
        _write(model, None)
        forget("scan", model)
        return ScanReport(model.name, ())
    if _keras.in_symbolic_scope() or not _keras.is_built(model):
        raise value_error(
            "scan_blocks looks for equal blocks in a model that is built.",
            received={"model": model.name, "built": False},
            fix="Give a Sequential model a keras.Input, or call model.build(shape) first.",
        )
    _prepare(model)
    report = _report_of(model, _specs(model, inputs))
    _write(model, True if report.runs else None)
    _keep(model, report)
    return report


def is_scanned(model: Any) -> bool:
    """Whether `scan_blocks` is on for a model.

    Args:
        model: A model.
    """
    return bool(mark.of(model))


def _write(model: Any, value: bool | None) -> None:
    mark.write(model, value)
    if value:
        _prepare(model)


def _prepare(model: Any) -> None:
    _keras.route_calls(type(model), "scan", _around)
    _keras.install()  # for saved models


# Set while a trace only looks for blocks to scan.
_reports: contextvars.ContextVar[list[ScanReport] | None] = contextvars.ContextVar(
    "reports", default=None
)


def _around(stock: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a model class of which some models are scanned."""
    reports = _reports.get()
    if (not is_scanned(model) and reports is None) or is_tracing() or _keras.in_symbolic_scope():
        return stock(*args, **kwargs)
    if not in_compiled_code():
        log_once(
            f"scan_blocks: model {model.name!r} is called outside of compiled code, so its "
            "blocks run one by one"
        )
        return stock(*args, **kwargs)
    call, notes = _keras.PureCall(stock, model, args, kwargs), Tracing(equal_layers(model))
    for layer in _keras.flatten_layers(model):
        if id(layer) in notes.keys:
            _keras.route_calls(type(layer), "scan", noted, "__call__")
    with tracing(notes):
        jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(call.inputs)
    jaxpr = without_aliases(jaxpr, notes)
    runs, reasons = find_runs(jaxpr, notes)
    report = _report(model, runs, reasons, notes)
    if reports is None:
        _keep(model, report)
        log_once(str(report), logging.INFO if runs else logging.WARNING)
    else:
        reports.append(report)
    outputs = computed(jaxpr, runs, jax.tree.leaves(call.inputs))
    return call.finish(jax.tree.unflatten(jax.tree.structure(shapes), outputs))


def _keep(model: Any, report: ScanReport) -> None:
    forget("scan", model)
    answers = [Answer(path, f"on its own: {why}") for path, why in report.left_out]
    for run in report.runs:
        words = ONE_LOOP.format(len(run.paths), run.kind)
        answers.append(Answer(f"{run.paths[0]} to {run.paths[-1]}", words, done=True))
    keep("scan", model, answers)


def _report(model: Any, runs: list[Run], reasons: dict[int, str], notes: Tracing) -> ScanReport:
    paths: dict[int, str] = {}
    for path, layer in layers_by_path(model):
        paths.setdefault(id(layer), path)
    made = tuple(
        ScannedRun(
            type(run.blocks[0].layer).__name__,
            tuple(paths[id(block.layer)] for block in run.blocks),
        )
        for run in runs
    )
    called = {id(layer) for layer in notes.layers}
    others = dict.fromkeys(_unequal(model, notes), _DIFFERENT)
    others |= {number: _NOT_CALLED for number in notes.keys if number not in called} | reasons
    left_out = [(paths[number], why) for number, why in others.items()]
    return ScanReport(model.name, made, tuple(sorted(left_out, key=lambda pair: pair[::-1])))


_DIFFERENT = "its config or weights differ from those of the blocks beside it"
_NOT_CALLED = "the model does not call it"


def _unequal(layer: Any, notes: Tracing) -> Iterator[int]:
    """Composite layers beside others of their class, if none of those is equal to them."""
    inner = [sublayer for sublayer in _keras.sublayers(layer) if id(sublayer) not in notes.keys]
    beside = Counter(type(sublayer) for sublayer in _keras.sublayers(layer))
    for composite in inner:
        holds = any(within.variables for within in _keras.sublayers(composite))
        if holds and beside[type(composite)] > 1:
            yield id(composite)
        yield from _unequal(composite, notes)


def _report_of(model: Any, specs: Any) -> ScanReport:
    """Traces a model's call, from shapes alone."""
    variables = model.variables

    def forward(values, inputs):
        with keras.StatelessScope(
            list(zip(variables, values, strict=True)), initialize_variables=False
        ):
            return jax.tree.leaves(model(inputs))

    values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
    with setting(_reports, []) as reports:
        try:
            jax.make_jaxpr(forward)(values, specs)
        except Exception as error:
            raise value_error(
                "scan_blocks must be able to call the model, from shapes alone.",
                received=f"{type(error).__name__}: {error}",
                fix="Give the model's inputs: scan_blocks(model, inputs=x).",
            ) from error
    return reports[-1]


# The size used for open dimensions of a model, such as the batch.
_OPEN = 8


def _specs(model: Any, inputs: Any) -> Any:
    if inputs is None:
        try:
            inputs = _keras.declared_inputs(model)
        except (AttributeError, ValueError):
            inputs = None
    if inputs is None:
        raise value_error(
            "scan_blocks needs the inputs of the model's blocks.",
            received={"model": model.name, "inputs": None},
            fix="Give those of a subclassed model: scan_blocks(model, inputs=x).",
        )

    def spec(each):
        shape = tuple(_OPEN if size is None else size for size in each.shape)
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(each.dtype))

    return keras.tree.map_structure(spec, inputs)


def _check(model: Any) -> None:
    if isinstance(model, keras.Layer):
        return
    raise value_error(
        "scan_blocks looks for equal blocks in a model.",
        received={"model": model},
        fix="Pass a keras.Model, or a layer that contains the blocks.",
    )


@mark.restored_by
def _restored(model: Any, value: Any) -> None:
    _write(model, bool(value) or None)
