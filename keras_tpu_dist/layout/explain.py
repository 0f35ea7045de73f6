"""Where every variable of a model lies, and why."""

import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, layout_text, split_ways
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.hardware.crossings import crossings_text
from keras_tpu_dist.layout.placement import Placement, bytes_of
from keras_tpu_dist.layout.rules import Decision, nearest_path
from keras_tpu_dist.show.page import Shown
from keras_tpu_dist.show.text import html_table, size_text, text_table

_LARGEST_SHOWN = 5


@dataclass(frozen=True)
class VariableRow:
    """One variable.

    Attributes:
        path: Its path.
        shape: Its shape.
        dtype: Its dtype.
        axes: One entry per dimension; `()` means replicated.
        bytes: Bytes of the whole value.
        bytes_per_device: Bytes on each device.
        slot_bytes: Bytes of its optimizer slots, whole.
        slot_bytes_per_device: The same on each device.
        reason: The rule, annotation or plan that decided.
        alternatives: What else was considered or would also match.
        problem: Why the layout is not legal, or `""`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    bytes: int
    bytes_per_device: int
    slot_bytes: int
    slot_bytes_per_device: int
    reason: str
    alternatives: tuple[str, ...] = ()
    problem: str = ""

    def __str__(self):
        lines = [
            self.path,
            f"  shape {self.shape}, {self.dtype}, layout {layout_text(self.axes)}",
            f"  {size_text(self.bytes)}, {size_text(self.bytes_per_device)} per device; optimizer "
            f"{size_text(self.slot_bytes)}, {size_text(self.slot_bytes_per_device)} per device",
            f"  because: {self.reason}",
            *(f"  not: {other}" for other in self.alternatives),
        ]
        return "\n".join([*lines, f"  PROBLEM: {self.problem}"] if self.problem else lines)


@dataclass(frozen=True)
class OutputRow:
    """One layer whose output has a layout.

    Attributes:
        path: The layer's path.
        layout: Axes, or a list or dict of axes.
        reason: What decided.
    """

    path: str
    layout: Any
    reason: str


@dataclass(frozen=True)
class LayerRow:
    """One layer that treats its split weights in a way of its own.

    Attributes:
        path: The layer's path.
        choice: What it does with them, and why.
    """

    path: str
    choice: str


@dataclass(frozen=True)
class Explanation(Shown):
    """Where a model's variables lie, and why.

    Attributes:
        model: The model's name.
        mesh: Axis sizes.
        rows: One per weight.
        outputs: One per layer whose output has a layout.
        note: What is missing, or `""`.
        logical_devices: `(layer path, logical device)` of each assigned layer.
        layers: One per layer that chooses what to do with its split weights.
        crossings: Which axes cross hosts or slices, in words, on a mesh of several hosts.
    """

    model: str
    mesh: dict[str, int]
    rows: tuple[VariableRow, ...]
    outputs: tuple[OutputRow, ...] = ()
    note: str = ""
    logical_devices: tuple[tuple[str, int], ...] = ()
    layers: tuple[LayerRow, ...] = ()
    crossings: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of weights and optimizer slots, whole."""
        return sum(row.bytes + row.slot_bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of weights and optimizer slots on each device."""
        return sum(row.bytes_per_device + row.slot_bytes_per_device for row in self.rows)

    @property
    def largest_replicated(self) -> tuple[VariableRow, ...]:
        """The five largest weights that are whole on every device."""
        whole = [row for row in self.rows if row.bytes and row.bytes == row.bytes_per_device]
        return tuple(sorted(whole, key=lambda row: -row.bytes)[:_LARGEST_SHOWN])

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain dicts and lists, with the totals."""
        totals = {"bytes": self.bytes, "bytes_per_device": self.bytes_per_device}
        return {**asdict(self), **totals}

    def __str__(self):
        devices = math.prod(self.mesh.values())
        lines = [f"{self.model} on {devices} devices {self.mesh}"]
        lines += [f"  axes: {self.crossings}"] if self.crossings else []
        lines.append(text_table(_HEADER, [_cells(row) for row in self.rows], indent=""))
        lines += [f"  {line}" for line in self._lines_of_layers()]
        return "\n".join([*lines, *self._totals()])

    def _title(self) -> str:
        return f"{self.model} on {self.mesh}"

    def _blocks(self) -> list[str]:
        axes = [f"axes: {self.crossings}"] if self.crossings else []
        lines = [*axes, *self._lines_of_layers(), *self._totals()]
        table = html_table(_HEADER, [_cells(row) for row in self.rows])
        return [table, *(f"<p>{html.escape(line)}</p>" for line in lines)]

    def _lines_of_layers(self) -> list[str]:
        return [
            *(f"output of {o.path}: {o.layout}  ({o.reason})" for o in self.outputs),
            *(f"{p}: computed by logical device {k}  (assign())" for p, k in self.logical_devices),
            *(f"{row.path}: {row.choice}" for row in self.layers),
        ]

    def _totals(self) -> list[str]:
        lines = [
            f"weights and optimizer: {size_text(self.bytes)} in all, "
            f"{size_text(self.bytes_per_device)} per device"
        ]
        if self.largest_replicated:
            whole = ", ".join(f"{r.path} ({size_text(r.bytes)})" for r in self.largest_replicated)
            lines.append(f"largest replicated: {whole}")
        return [*lines, self.note] if self.note else lines


def explain_model(model: Any, placement: Placement, mesh: Mesh) -> Explanation:
    """Reads a placement as rows.

    Args:
        model: A model; of an unbuilt one the variables that exist.
        placement: Its placement.
        mesh: The mesh.

    Returns:
        The explanation; an illegal layout is reported in its row, not raised.
    """
    slots: dict[int, list] = {}
    for slot, weight in placement.slots:
        slots.setdefault(id(weight), []).append(slot)
    weights = [*model.trainable_variables, *model.non_trainable_variables]
    rows = tuple(_row(v, slots.get(id(v), []), placement, mesh) for v in weights)
    outputs = tuple(
        OutputRow(path, layout, _reason_of_output(path, placement))
        for path, layout in placement.layouts_of_outputs().items()
    )
    note = ""
    if not model.built:
        note = "the model is not built: variables that do not exist yet are not listed"
    assigned = tuple(placement.annotations.logical_devices.items())
    layers = tuple(_layer_rows(model, placement, mesh))
    where = crossings_text(mesh)
    return Explanation(model.name, dict(mesh.shape), rows, outputs, note, assigned, layers, where)


def _reason_of_output(path: str, placement: Placement) -> str:
    if path in placement.annotations.outputs:
        return "split(output=...)"
    ruled = placement.ruled_outputs.get(path)
    return "plan: rows stay split" if ruled is None else ruled.reason


def _layer_rows(model, placement: Placement, mesh: Mesh):
    """Layers say themselves what they do: recurrent ones, which know what their loop needs."""

    def axes_of(variable) -> tuple:
        decision = placement.decisions.get(id(variable))
        return () if decision is None else tuple(decision.axes)

    for layer in _keras.flatten_layers(model):
        choose = getattr(layer, "gathering", None)
        choice = choose(axes_of, mesh, placement.data_axes) if callable(choose) else None
        if choice is not None:
            yield LayerRow(layer.path, str(choice))


def one_row(explanation: Explanation, path: str) -> VariableRow:
    """The row of one variable, by its path or the end of it.

    Args:
        explanation: The explanation of the whole model.
        path: The variable's path, or its last segments; a leading `…` or `/` is ignored.

    Raises:
        ValueError: If no variable, or more than one, has this path.
    """
    tail = path.lstrip("…").lstrip("/")
    found = [row for row in explanation.rows if row.path == path]
    found = found or [r for r in explanation.rows if f"/{r.path}".endswith(f"/{tail}")]
    if len(found) == 1:
        return found[0]
    near = nearest_path(tail, [row.path for row in found or explanation.rows])
    raise ValueError(
        message(
            "explain(model, path) speaks of one variable.",
            received=f"path={path!r}, which {len(found)} variables of {explanation.model!r} have.",
            fix="Give the whole path, or more of its end."
            + (f" The nearest is {near!r}." if near else ""),
        )
    )


_HEADER = ("variable", "shape", "dtype", "layout", "bytes", "per device", "slots", "reason")


def _row(variable, slots: Sequence, placement: Placement, mesh: Mesh) -> VariableRow:
    problem = ""
    decision = placement.decisions[id(variable)]
    try:
        placement.decision(variable)
    except ValueError as error:
        problem = str(error)
    whole = bytes_of(variable)
    slot_bytes = [bytes_of(slot) for slot in slots]
    slot_ways = [
        _ways(mesh, placement.decisions.get(id(slot), Decision((), "")).axes) for slot in slots
    ]
    return VariableRow(
        path=variable.path,
        shape=tuple(variable.shape),
        dtype=str(variable.dtype),
        axes=decision.axes,
        bytes=whole,
        bytes_per_device=whole if problem else whole // _ways(mesh, decision.axes),
        slot_bytes=sum(slot_bytes),
        slot_bytes_per_device=sum(b if problem else b // w for b, w in zip(slot_bytes, slot_ways)),
        reason=decision.reason,
        alternatives=decision.alternatives,
        problem=problem,
    )


def _ways(mesh, axes) -> int:
    try:
        return split_ways(mesh, axes)
    except KeyError:  # an unknown axis is reported as the row's problem
        return 1


def _cells(row: VariableRow) -> tuple[str, ...]:
    return (
        row.path,
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        layout_text(row.axes),
        size_text(row.bytes),
        size_text(row.bytes_per_device),
        size_text(row.slot_bytes_per_device),
        row.reason if not row.problem else f"PROBLEM: {row.problem}",
    )
