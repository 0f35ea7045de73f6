"""How every variable of a model is split, and why."""

import html
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, layout_text, names_in, split_ways
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.hardware.crossings import crossings_text
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.layout.rules import Decision, nearest_path
from keras_tpu_dist.programs.answers import Answer
from keras_tpu_dist.show.folding import (
    Repeated,
    folded,
    relative,
    shapes_text,
    short_rows,
)
from keras_tpu_dist.show.page import Shown
from keras_tpu_dist.show.text import html_table, size_text, text_table, text_width, wrapped

_LARGEST_SHOWN = 5
# A replicated weight is listed if it has at least this share of a device's weights.
_WORTH_A_LINE = 0.01
# The most layers that a remark names.
_MOST_LAYERS = 4


@dataclass(frozen=True, repr=False)
class VariableRow(Printed):
    """One variable.

    Attributes:
        path: Its path.
        shape: Its shape.
        dtype: Its dtype.
        axes: One entry per dimension; `()` means replicated.
        bytes: Bytes of the whole value.
        bytes_per_device: Bytes on one device.
        slot_bytes: Bytes of its whole optimizer slots.
        slot_bytes_per_device: Bytes of them on one device.
        reason: The rule, annotation or plan that decided.
        alternatives: Other layouts that were considered, or rules that also match.
        problem: Why the layout is invalid, or `""`.
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

    @property
    def layout(self) -> str:
        """Its layout as text, one entry for each dimension."""
        return layout_text(self.axes, len(self.shape))

    def __str__(self):
        lines = [
            self.path,
            f"  shape {self.shape}, {self.dtype}, layout {self.layout}",
            f"  {size_text(self.bytes)}, {size_text(self.bytes_per_device)} a device; optimizer "
            f"{size_text(self.slot_bytes)}, {size_text(self.slot_bytes_per_device)} a device",
            f"  because: {self.reason}",
            *(f"  not: {other}" for other in self.alternatives),
        ]
        return "\n".join([*lines, f"  PROBLEM: {self.problem}"] if self.problem else lines)


@dataclass(frozen=True)
class OutputRow:
    """One layer whose output has a layout."""

    path: str
    layout: Any
    reason: str


@dataclass(frozen=True)
class LayerRow:
    """A layer that decides itself how to use its split weights."""

    path: str
    choice: str


@dataclass(frozen=True, repr=False)
class PassRow(Printed):
    """What is computed otherwise than the model is written, or why it is not.

    Attributes:
        name: The pass of `programs.passes`.
        path: The variable or layer; `""` for the whole model.
        done: Whether it is computed otherwise.
        words: How, or why not.
    """

    name: str
    path: str
    done: bool
    words: str

    def __str__(self):
        return _of_pass(self, self.path)


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """How a model's variables are split, and why.

    Attributes:
        model: The model's name.
        mesh: Axis sizes.
        rows: One per weight.
        outputs: One per layer whose output has a layout.
        note: Why the strategy does not train the model, or why variables are missing, or `""`.
        logical_devices: `(layer path, logical device)` of every assigned layer.
        layers: One per layer that decides itself how to use its split weights.
        passes: What is computed otherwise, and why the rest is not.
        crossings: Which axes cross hosts or slices, in words; `""` on one host.
        data_axes: The axes that split the batch.
    """

    model: str
    mesh: dict[str, int]
    rows: tuple[VariableRow, ...]
    outputs: tuple[OutputRow, ...] = ()
    note: str = ""
    logical_devices: tuple[tuple[str, int], ...] = ()
    layers: tuple[LayerRow, ...] = ()
    crossings: str = ""
    data_axes: tuple[str, ...] = ()
    passes: tuple[PassRow, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all weights and optimizer slots."""
        return sum(row.bytes + row.slot_bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of weights and optimizer slots on one device."""
        return sum(row.bytes_per_device + row.slot_bytes_per_device for row in self.rows)

    @property
    def largest_replicated(self) -> tuple[VariableRow, ...]:
        """The five largest weights of which every device holds a full copy."""
        whole = [row for row in self.rows if row.bytes and row.bytes == row.bytes_per_device]
        return tuple(sorted(whole, key=lambda row: -row.bytes)[:_LARGEST_SHOWN])

    @property
    def summary(self) -> str:
        """One sentence: the weights, how many of them are split over which axes, the batch."""
        count = sum(bool(row.problem) for row in self.rows)
        problems = [f"{count} invalid: see PROBLEM in the table"] if count else []
        return "; ".join([*self._sizes(), self._split(), self._batch(), *problems])

    def entries(self) -> tuple[Any, ...]:
        """The rows by layer; equal blocks in a row are one `Repeated`."""
        return folded(self.rows, _path, _key)

    def table(self) -> str:
        """A table with a line for every weight, its dtype and its optimizer slots."""
        return text_table(_HEADER, [_cells([row]) for row in self.rows], indent="")

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain dicts and lists, with every row and the totals."""
        totals = {"bytes": self.bytes, "bytes_per_device": self.bytes_per_device}
        return {**asdict(self), **totals, "summary": self.summary}

    def __str__(self):
        lines = _lines([self.title, self.summary])
        if self.rows:
            header, rows = self._folded()
            lines.append(text_table(header, rows, indent=""))
            fewer = self._fewer(rows)
            lines += [f"all {len(self.rows)} weights: explain(model).table()"] if fewer else []
        return "\n".join([*lines, *_lines(self._remarks())])

    def _title(self) -> str:
        return self.title

    @property
    def title(self) -> str:
        """The model, the number of devices and the mesh."""
        return f"{self.model} on {math.prod(self.mesh.values())} devices {self.mesh}"

    def _blocks(self) -> list[str]:
        header, rows = self._folded()
        whole = ""
        if self._fewer(rows):
            table = html_table(_HEADER, [_cells([row]) for row in self.rows])
            whole = f"<details><summary>all {len(self.rows)} weights</summary>{table}</details>"
        lines = [f"<p>{html.escape(line)}</p>" for line in self._remarks()]
        summary = f"<p>{html.escape(self.summary)}</p>"
        return [summary, html_table(header, rows), whole, *lines]

    def _sizes(self) -> list[str]:
        dtypes = " and ".join(dict.fromkeys(row.dtype for row in self.rows))
        words = [f"Weights {_amount(self.rows)}{f' ({dtypes})' if dtypes else ''}"]
        slots = sum(row.slot_bytes for row in self.rows)
        here = sum(row.slot_bytes_per_device for row in self.rows)
        if slots:
            words.append(f"optimizer {size_text(slots)}, {size_text(here)} a device")
        return words

    def _split(self) -> str:
        ways = Counter(
            tuple(name for name in self.mesh if name in names_in(row.axes)) for row in self.rows
        )
        ways.pop((), None)
        split, of = sum(ways.values()), len(self.rows)
        if not split:
            return f"all {of} replicated"
        if len(ways) == 1:
            return f"{split} of {of} split over {' and '.join(next(iter(ways)))}"
        parts = (f"{n} over {' and '.join(names)}" for names, n in ways.most_common())
        return f"{split} of {of} split ({', '.join(parts)})"

    def _batch(self) -> str:
        if not self.data_axes:
            return "batch replicated"
        return f"batch over {' and '.join(self.data_axes)}"

    def _folded(self) -> tuple[list[str], list[tuple[str, ...] | str]]:
        """The table to print: without empty columns, equal blocks folded."""
        mixed = len({row.dtype for row in self.rows}) > 1
        slots = any(row.slot_bytes for row in self.rows)
        shown = [True, True, mixed, True, True, True, slots, True]

        def cells(rows: Sequence[VariableRow], name: str, within: str) -> tuple[str, ...]:
            return tuple(c for c, yes in zip(_cells(rows, name, within), shown, strict=True) if yes)

        rows = short_rows(self.rows, _path, _key, cells, _amount)
        return [name for name, yes in zip(_HEADER, shown, strict=True) if yes], rows

    def _fewer(self, rows: Sequence[Any]) -> bool:
        """Whether weights share lines in the printed table."""
        return sum(not isinstance(row, str) for row in rows) < len(self.rows)

    def _remarks(self) -> list[str]:
        lines = [f"axes: {self.crossings}"] if self.crossings else []
        outputs = ((o.path, f"{o.layout}  ({o.reason})") for o in self.outputs)
        lines += [f"output of {line}" for line in _folded_lines(outputs)]
        assigned = (
            (p, f"computed by logical device {k}  (assign())") for p, k in self.logical_devices
        )
        lines += _folded_lines(assigned)
        lines += _folded_lines((row.path, row.choice) for row in self.layers)
        least = _WORTH_A_LINE * sum(row.bytes_per_device for row in self.rows)
        alike: dict[tuple[str, bool, str], list[PassRow]] = defaultdict(list)
        large = [row for row in self.largest_replicated if row.bytes >= least]
        if large:
            words = ", ".join(f"{row.path} ({size_text(row.bytes)})" for row in large)
            lines.append(f"largest replicated: {words}")
        for row in sorted(self.passes, key=lambda row: not row.done):
            alike[row.name, row.done, row.words].append(row)
        for rows in alike.values():
            lines.append(_of_pass(rows[0], _layers_text([row.path for row in rows])))
        return [*lines, self.note] if self.note else lines


def _of_pass(row: PassRow, paths: str) -> str:
    of = f"{paths}: " if paths else ""
    return f"{'otherwise' if row.done else 'as written'}, {row.name}: {of}{row.words}"


def explain_model(
    model: Any,
    placement: Placement,
    mesh: Mesh,
    passes: Mapping[str, Sequence[Answer]],
    not_trained: str = "",
) -> Explanation:
    """Converts a placement to rows.

    Args:
        model: A model; if it is not built, its existing variables are used.
        placement: Its placement.
        mesh: The mesh.
        passes: The answers of each pass, by its name; see `programs.passes.explained`.
        not_trained: Why the model does not train under this strategy, or `""`.

    Returns:
        The explanation. An invalid layout is reported in its row; no error is raised.
    """
    slots: dict[int, list] = {}
    for slot, weight in placement.slots:
        slots.setdefault(id(weight), []).append(slot)
    weights = _keras.variables_of(model)
    rows = tuple(_row(v, slots.get(id(v), []), placement, mesh) for v in weights)
    outputs = tuple(
        OutputRow(path, layout, _reason_of_output(path, placement))
        for path, layout in placement.layouts_of_outputs().items()
    )
    assigned = tuple(placement.annotations.logical_devices.items())
    return Explanation(
        model.name,
        dict(mesh.shape),
        rows,
        outputs,
        "; ".join(filter(None, [_note(model, rows), not_trained])),
        assigned,
        tuple(_layer_rows(model, placement)),
        crossings_text(mesh),
        tuple(placement.data_axes),
        tuple(PassRow(n, a.path, a.done, a.words) for n, found in passes.items() for a in found),
    )


def _note(model: keras.Model, rows: Sequence[VariableRow]) -> str:
    """Why weights are missing, and how to get them, or `""`."""
    if _keras.is_built(model):
        return "" if rows else "the model has no weights"
    missing = "only existing variables are listed" if rows else "it has no variables yet"
    return f"the model is not built: {missing}; call model.build(input_shape) or fit first"


def _reason_of_output(path: str, placement: Placement) -> str:
    if path in placement.annotations.outputs:
        return "split(output=...)"
    ruled = placement.ruled_outputs.get(path)
    return "plan: rows stay split" if ruled is None else ruled.reason


def _layer_rows(model, placement: Placement):
    """Rows from layers that decide themselves, such as recurrent ones."""

    def axes_of(variable) -> tuple:
        decision = placement.decisions.get(id(variable))
        return () if decision is None else tuple(decision.axes)

    for layer in _keras.flatten_layers(model):
        choose = getattr(layer, "gathering", None)
        choice = choose(axes_of) if callable(choose) else None
        if choice is not None:
            yield LayerRow(layer.path, str(choice))


def one_row(explanation: Explanation, path: str) -> VariableRow:
    """The row of one variable, by its path or the end of it.

    Args:
        explanation: The explanation of the whole model.
        path: The variable's path, or its last segments; a leading `…` or `/` is ignored.
    """
    tail = path.lstrip("…").lstrip("/")
    found = [row for row in explanation.rows if row.path == path]
    found = found or [r for r in explanation.rows if f"/{r.path}".endswith(f"/{tail}")]
    if len(found) == 1:
        return found[0]
    near = nearest_path(tail, [row.path for row in found or explanation.rows])
    raise value_error(
        "explain(model, path) explains one variable.",
        received=f"path={path!r}, which {len(found)} variables of {explanation.model!r} have.",
        fix="Give the full path, or more of its last segments."
        + (f" The nearest is {near!r}." if near else ""),
    )


_HEADER = ("weight", "shape", "dtype", "layout", "bytes", "a device", "slots", "reason")


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
        slot_bytes_per_device=sum(
            b if problem else b // w for b, w in zip(slot_bytes, slot_ways, strict=True)
        ),
        reason=decision.reason,
        alternatives=decision.alternatives,
        problem=problem,
    )


def _ways(mesh, axes) -> int:
    try:
        return split_ways(mesh, axes)
    except KeyError:  # an unknown axis is reported as the row's problem
        return 1


def _cells(rows: Sequence[VariableRow], name: str = "", within: str = "") -> tuple[str, ...]:
    """A line for similar rows; paths in its reason are relative to the block's path."""
    problem = rows[0].problem
    return (
        name or rows[0].path,
        shapes_text([row.shape for row in rows]),
        rows[0].dtype,
        rows[0].layout,
        size_text(sum(row.bytes for row in rows)),
        size_text(sum(row.bytes_per_device for row in rows)),
        size_text(sum(row.slot_bytes_per_device for row in rows)),
        relative(f"PROBLEM: {problem}" if problem else rows[0].reason, within),
    )


def _key(row: VariableRow) -> tuple:
    """The key that equal blocks share."""
    sizes = (row.bytes_per_device, row.slot_bytes, row.slot_bytes_per_device)
    return row.shape, row.dtype, row.axes, sizes, row.reason, row.problem


def _amount(rows: Sequence[VariableRow]) -> str:
    """The bytes of some weights, in total and on one device."""
    whole, here = sum(r.bytes for r in rows), sum(r.bytes_per_device for r in rows)
    return f"{size_text(whole)}, {size_text(here)} a device"


def _folded_lines(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A line `paths: words` for all pairs with the same words; repeated layers are folded."""
    by_words: dict[str, list[str]] = {}
    for path, words in pairs:
        by_words.setdefault(words, []).append(path)
    return [f"{_layers_text(paths)}: {words}" for words, paths in by_words.items()]


def _layers_text(paths: Sequence[str]) -> str:
    entries = folded(paths, str, lambda path: None)
    blocks = [e for e in entries if isinstance(e, Repeated)]
    if len(entries) > _MOST_LAYERS or any(len(block.rows) > 1 for block in blocks):
        return f"{len(paths)} layers, {paths[0]} to {paths[-1]}"
    return ", ".join(e.words if isinstance(e, Repeated) else e for e in entries)


def _lines(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in wrapped(text, text_width())]


def _path(row: VariableRow) -> str:
    return row.path
