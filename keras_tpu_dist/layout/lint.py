"""Finds mistakes in layouts, and what leaves a step uncompiled, with a fix for each."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, dividing_axes, entry_names, names_in
from keras_tpu_dist.common.errors import did_you_mean, value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.hardware.mesh import DATA_AXIS_NAMES, LOGICAL_AXIS, SEQUENCE_AXIS, state_axes
from keras_tpu_dist.layout.annotations import layouts_in
from keras_tpu_dist.layout.placement import UNDECIDED, Placement, Setting
from keras_tpu_dist.layout.planner import device_memory, state_bytes
from keras_tpu_dist.layout.rules import LayoutError, dead_patterns, matching, nearest_path
from keras_tpu_dist.show.page import Shown
from keras_tpu_dist.show.text import html_table, size_text

logger = logging.getLogger("keras_tpu_dist")

SEVERITIES = ("error", "warning", "info")

# Smaller replicated weights are never reported as giants.
_GIANT_BYTES = 2**20
# Without a layout, weights are replicated on purpose while the state takes less of the memory.
_SMALL_STATE = 1 / 3
_GIANTS_SHOWN = 5


@dataclass(frozen=True, repr=False)
class Finding(Printed):
    """One mistake, or one possible mistake.

    Attributes:
        severity: `"error"` (fit would fail), `"warning"` (probably not what you want) or `"info"`.
        code: A short name that does not change between versions.
        path: The path of the variable or layer, or the pattern or axis.
        words: The description.
        fix: The correction.
    """

    severity: str
    code: str
    path: str
    words: str
    fix: str

    def __str__(self):
        return f"{self.severity}: {self.path}: {self.words} {self.fix} [{self.code}]"


@dataclass(frozen=True, repr=False)
class LintReport(Shown):
    """All findings about one model, the most serious first.

    Attributes:
        model: The model's name.
        findings: The findings.
    """

    model: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not any(f.severity in ("error", "warning") for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts and lists."""
        return {**asdict(self), "ok": self.ok}

    def _title(self) -> str:
        return self.model

    def _blocks(self) -> list[str]:
        rows = [(f.severity, f.path, f.words, f.fix, f.code) for f in self.findings]
        table = html_table(("severity", "path", "finding", "fix", "code"), rows)
        return [table if rows else "no findings"]

    def __str__(self):
        if not self.findings:
            return f"{self.model}: no findings"
        return "\n".join([f"{self.model}:", *(f"  {finding}" for finding in self.findings)])

    def raise_if_bad(self) -> "LintReport":
        """Raises a `ValueError` with all errors and warnings, if there are any."""
        if self.ok:
            return self
        bad = [str(f) for f in self.findings if f.severity != "info"]
        raise value_error(
            "lint(strict=True) accepts no errors and no warnings.",
            received="\n" + "\n".join(bad) + "\n",
            fix="Apply the fixes above.",
        )


def lint_model(
    model: Any,
    placement: Placement,
    setting: Setting,
    *,
    batch_size: int | None = None,
    foreign: Sequence[str] = (),
    tables: Mapping[str, str] | None = None,
    cheap: bool = False,
) -> LintReport:
    """Looks for mistakes in a model's layouts.

    Args:
        model: The model.
        placement: Its placement.
        setting: The strategy's mesh and layout.
        batch_size: The global batch size, to compare with the mesh.
        foreign: Paths of variables that are not on the strategy's mesh.
        tables: The tables that cannot be used by rows although `tables=` asks for it: from path to
            reason.
        cheap: Whether to run only the checks that `fit` runs.
    """
    found = [*_dead_rules(model, setting), *_illegal(model, placement), *_unknown(placement)]
    found += _fallbacks(model, placement)
    found += _not_compiled(model)
    if not cheap:
        found += frozen_factors(model).findings
        found += _overlaps(model, setting)
        found += _giants(model, placement, setting)
        found += _unused_axes(model, placement, setting)
        found += _no_data_axis(setting)
        found += _batch(batch_size, setting)
        found += _built_outside(foreign, setting)
        found += [_table(path, words) for path, words in (tables or {}).items()]
        if not model.built:
            found.append(
                Finding(
                    "info",
                    "not-built",
                    model.name,
                    "The model has no variables yet, so most checks find nothing.",
                    "Call model.build(input_shape), or lint it after the first fit.",
                )
            )
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return LintReport(model.name, tuple(found))


def _not_compiled(model) -> list[Finding]:
    words = "Keras does not compile the model, so each operation is launched by itself."
    return [
        Finding("warning", "not-compiled", path, f"{words} {why}", fix)
        for path, why, fix in _keras.why_eager(model)
    ]


def frozen_factors(model: Any) -> LintReport:
    """LoRA that does nothing in a fit: Keras freezes what `enable_lora` adds to a frozen layer.

    Args:
        model: The model.
    """
    layers = [
        layer for layer in _keras.flatten_layers(model) if getattr(layer, "lora_enabled", False)
    ]
    if not layers or any(layer.trainable_variables for layer in layers):
        return LintReport(model.name, ())
    words = f"LoRA is enabled in {len(layers)} layer(s), and none of its factors trains."
    fix = (
        'Freeze after enable_lora: ktd.freeze(model, "*", exclude=["*lora*", ...]), with what else '
        "trains. A layer that you froze yourself needs layer.trainable = True before."
    )
    finding = Finding("warning", "frozen-factors", layers[0].path, words, fix)
    return LintReport(model.name, (finding,))


def _table(path: str, words: str) -> Finding:
    fix = "Split its rows, and train it with SGD or Adagrad; or leave tables= out."
    words = f"tables= asks to use it by rows, but {words}."
    return Finding("warning", "table-of-every-row", path, words, fix)


def log_report(report: LintReport) -> None:
    """Logs errors and warnings; `fit` does this once per model.

    Args:
        report: The report; findings of severity `"info"` are not logged.
    """
    for finding in report.findings:
        if finding.severity != "info":
            logger.warning("model %r: %s", report.model, finding)


def _weights(model) -> list:
    return _keras.variables_of(model)


def _paths(model) -> list[str]:
    outputs = [f"{layer.path}/output" for layer in _keras.flatten_layers(model) if layer.path]
    return [v.path for v in _weights(model)] + outputs


def _dead_rules(model, setting: Setting) -> list[Finding]:
    paths = _paths(model)
    if not _weights(model):
        return []
    found = []
    for pattern in dead_patterns(setting.layout, paths):
        near = nearest_path(pattern, paths)
        fix = f"The nearest path is {near!r}." if near else "Remove it, or use a path of the model."
        if near and isinstance(setting.layout, keras.distribution.LayoutMap):
            fix += " A LayoutMap pattern must match the whole path; LayoutRules need only its end."
        words = "This rule matches no variable and no layer output, so it does nothing."
        found.append(Finding("warning", "dead-rule", pattern, words, fix))
    return found


def _illegal(model, placement: Placement) -> list[Finding]:
    outputs = placement.annotations.outputs
    asked: list[tuple[str, Callable[[], Any]]] = [
        *((v.path, functools.partial(placement.decision, v)) for v in _weights(model)),
        *((f"{p}/output", functools.partial(placement.check_output, p)) for p in outputs),
    ]
    found = []
    for path, ask in asked:
        try:
            ask()
        except LayoutError as error:
            words, _, fix = str(error).rpartition(". ")
            found.append(Finding("error", error.code, path, f"{words}.", fix))
        except ValueError:
            continue  # Keras's own: several keys match, which is a finding of its own
    return found


def _unknown(placement: Placement) -> list[Finding]:
    return [
        Finding(
            "warning",
            "unknown-weight",
            path,
            f"split({name}=...) names a weight that this layer does not have.",
            "Use the name of a weight, as in layer.variables[0].name.",
        )
        for path, name in placement.annotations.unknown
    ]


def _overlaps(model, setting: Setting) -> list[Finding]:
    hidden: dict[tuple[str, ...], list[str]] = {}
    for variable in _weights(model):
        patterns = matching(setting.layout, variable.path)
        if len(patterns) > 1:
            hidden.setdefault(tuple(patterns), []).append(variable.path)
    stock = isinstance(setting.layout, keras.distribution.LayoutMap)
    return [
        Finding(
            "error" if stock else "info",
            "overlap",
            paths[0],
            f"{len(patterns)} rules match: {', '.join(map(repr, patterns))} "
            f"({len(paths)} variable(s)).",
            "Keras allows one; narrow the patterns." if stock else "The first one applies.",
        )
        for patterns, paths in hidden.items()
    ]


def _fallbacks(model, placement: Placement) -> list[Finding]:
    """Large weights that a plan could not split, unless an annotation decided."""
    plan = placement.plan
    if plan is None or plan.keeps_all:
        return []
    whole = []
    for variable in sorted(_weights(model), key=bytes_of, reverse=True):
        planned, decided = plan.decision(variable), placement.decisions[id(variable)]
        by_plan = planned is not None and planned.reason == decided.reason
        if by_plan and bytes_of(variable) >= _GIANT_BYTES and not any(decided.axes):
            whole.append((variable, decided))
    return [
        Finding(
            "warning",
            "plan-falls-back",
            variable.path,
            f"Every device holds all of it ({size_text(bytes_of(variable))}): {decision.reason}.",
            "Choose axis sizes that divide its dimensions, or give rules.",
        )
        for variable, decision in whole[:_GIANTS_SHOWN]
    ]


def _giants(model, placement: Placement, setting: Setting) -> list[Finding]:
    found = []
    if placement.plan is not None:
        return []  # see _fallbacks
    state = sum(map(state_bytes, _weights(model)))
    if setting.layout is None and state < _SMALL_STATE * device_memory(setting.mesh):
        return []
    for variable in sorted(_weights(model), key=bytes_of, reverse=True):
        left = placement.decisions[id(variable)].reason in UNDECIDED
        if not left or bytes_of(variable) < _GIANT_BYTES or len(found) == _GIANTS_SHOWN:
            continue
        names = setting.mesh.axis_names
        entries = [(d, dividing_axes(n, names, setting.mesh)) for d, n in enumerate(variable.shape)]
        possible = [(d, entry) for d, entry in entries if entry is not None]
        if not possible:
            continue
        dim, entry = max(possible, key=lambda p: axis_size(setting.mesh, p[1]))
        rule = tuple(entry if d == dim else None for d in range(dim + 1))
        found.append(
            Finding(
                "warning" if setting.layout else "info",
                "giant",
                variable.path,
                f"Every device holds all of it ({size_text(bytes_of(variable))}), although "
                f"dimension {dim} ({variable.shape[dim]}) could be split.",
                f'Add the rule ("{variable.path}", {rule}).',
            )
        )
    return found


def _unused_axes(model, placement: Placement, setting: Setting) -> list[Finding]:
    used = set(state_axes(setting.mesh, setting.data_axes))
    splits = any(
        getattr(layer, "splits_over_logical_devices", False)
        for layer in _keras.flatten_layers(model)
    )
    if placement.annotations.logical_devices or splits:
        return []
    for output in placement.layouts_of_outputs().values():
        used.update(names_in([entry for axes in layouts_in(output) for entry in axes]))
    # Layers that split tensors over a DeviceAssignment's axes within their call cannot be seen
    # here.
    used |= {name for name in setting.mesh.axis_names if name.startswith(f"{LOGICAL_AXIS}_")}
    for variable in _weights(model):
        for entry in placement.decisions[id(variable)].axes:
            used.update(entry_names(entry))
    return [
        Finding(
            "warning",
            "unused-axis",
            name,
            f"Nothing is split over this mesh axis: its {size} devices do the same work.",
            f"{_nearest_axis(name, setting)} the devices to the data axis, or split weights over "
            'it (layout="tensor_parallel").',
        )
        for name, size in setting.mesh.shape.items()
        if size > 1 and name not in used
    ]


def _nearest_axis(name: str, setting: Setting) -> str:
    """The start of the fix: a question if the axis is named almost like a usual one."""
    usual = {*DATA_AXIS_NAMES, SEQUENCE_AXIS, "model"}
    if any(other in name for other in usual):  # "model_1", "data2"
        return "Give"
    hint = did_you_mean(name, sorted(usual - {*setting.mesh.axis_names}), 0.5).strip()
    return f"{hint} Otherwise give" if hint else "Give"


def _no_data_axis(setting: Setting) -> list[Finding]:
    """If there is no data axis: an axis that is named almost like one."""
    names = setting.mesh.axis_names
    near = [name for name in names if did_you_mean(name, DATA_AXIS_NAMES)]
    if setting.data_axes or not near:
        return []
    hint = did_you_mean(near[0], DATA_AXIS_NAMES).strip()
    return [
        Finding(
            "warning",
            "no-data-axis",
            near[0],
            f"No axis of {names} splits the batch: every device computes all of it.",
            f"{hint} Otherwise name the axis that splits it with data_axes=(...).",
        )
    ]


def _batch(batch_size: int | None, setting: Setting) -> list[Finding]:
    if batch_size is None:
        return []
    ways = math.prod(setting.mesh.shape[name] for name in setting.data_axes)
    if batch_size < ways:
        words = f"{batch_size} rows for {ways} shards: {ways - batch_size} shards have no row."
        fix = f"Use a batch of at least {ways}."
        return [Finding("warning", "small-batch", "batch_size", words, fix)]
    return []


def _built_outside(foreign: Sequence[str], setting: Setting) -> list[Finding]:
    if not foreign:
        return []
    words = f"{len(foreign)} variable(s) are not on the mesh {dict(setting.mesh.shape)}."
    fix = "Build and compile inside strategy.scope(). Otherwise the first call moves them."
    return [Finding("warning", "outside-scope", foreign[0], words, fix)]
