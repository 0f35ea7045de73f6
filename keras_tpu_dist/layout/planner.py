"""Plans, which choose the layouts of any Keras model: "fsdp", "tensor_parallel", "auto"."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import jax
from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import (
    Axes,
    axis_size,
    dividing_axes,
    entry_names,
    layout_text,
    names_in,
    split_ways,
)
from keras_tpu_dist.common.checks import (
    NaturalInt,
    PositiveInt,
    check_model,
    checked_constructor,
    one_of,
)
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.hardware.chips import of_kind
from keras_tpu_dist.hardware.compile_only import CompileOnlyDevice
from keras_tpu_dist.hardware.mesh import sequence_axis, state_axes
from keras_tpu_dist.layout.activations import block_outputs
from keras_tpu_dist.layout.banks import tokens_are_sent_to
from keras_tpu_dist.layout.rules import Decision, LayoutRules
from keras_tpu_dist.layout.tensor import TensorPlan
from keras_tpu_dist.programs.between.sums import Between
from keras_tpu_dist.show.folding import relative, shapes_text, short_rows
from keras_tpu_dist.show.page import Shown
from keras_tpu_dist.show.text import html_table, text_table

PLANS = ("fsdp", "tensor_parallel", "auto")
# What searches and reports call the plan that splits every weight both ways.
BOTH = "fsdp and tensor_parallel"

# Splitting a small tensor saves little memory and costs a collective.
MIN_SIZE = 4096

# The smallest chip on sale (v5e), for devices that do not report their memory, such as simulated.
_MEMORY_WHERE_UNKNOWN = int(15.75e9)

# "auto" reserves the rest for activations, temporaries and fragmentation.
_STATE_FRACTION = 0.5

_COLUMNS = ("weight", "shape", "layout", "reason")

# For a variable that no rule matches.
_UNPLANNED = Decision((), "")

# Weight, gradient, and two slots of Adam.
_COPIES_OF_A_TRAINABLE_WEIGHT = 4


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """A layout for every variable of one model.

    Attributes:
        name: The plan's name; for `"auto"` also its choice and the reason.
        decisions: The path, shape and decision of every variable.
        outputs: From a layer's path to the layout of its output.
        keeps_all: Whether the plan replicates everything.
        between: How values between blocks may be split along time, or `None`.
    """

    name: str
    decisions: tuple[tuple[str, tuple[int, ...], Decision], ...]
    outputs: dict[str, Axes] = field(default_factory=dict)
    keeps_all: bool = False
    between: Between | None = None
    _by_id: dict[int, Decision] = field(default_factory=dict, repr=False, compare=False)

    def decision(self, variable: Any) -> Decision | None:
        """The decision for one of the model's variables.

        Args:
            variable: The variable itself, not one with the same path in a clone of the model.

        Returns:
            The decision, or `None` for a variable that the plan does not know.
        """
        return self._by_id.get(id(variable))

    def rules(self) -> LayoutRules:
        """The plan as ordinary rules, to print, edit and pass as `layout=`.

        Returns:
            One rule for every split variable, and one for every output whose features the plan does
            not split. (Rules cannot express "leave the features as they are".) Variables without a
            rule are replicated.
        """
        paths = [path for path, _, _ in self.decisions]
        pairs = {_pattern(p, paths): d.axes for p, _, d in self.decisions if any(d.axes)}
        pairs |= {f"^{re.escape(path)}/output$": axes for path, axes in self._outputs_by_rows()}
        return LayoutRules(pairs)

    def _outputs_by_rows(self) -> list[tuple[str, Axes]]:
        """Outputs of layers whose weights split no features, and that pass on no split features."""
        rows = {name for axes in self.outputs.values() for name in names_in(axes)}
        if all(rows.issuperset(names_in(d.axes)) for _, _, d in self.decisions):
            return list(self.outputs.items())
        whole, split = [], []
        for path, shape, d in self.decisions:
            last = d.axes[-1] if d.axes and len(d.axes) == len(shape) else None
            (whole if rows.issuperset(entry_names(last)) else split).append(path)
        return [
            (layer, axes)
            for layer, axes in self.outputs.items()
            if any(path.startswith(f"{layer}/") for path in whole)
            and not any(path.startswith(f"{layer}/") for path in split)
        ]

    def _title(self) -> str:
        return f"plan {self.name}"

    def _blocks(self) -> list[str]:
        return [html_table(_COLUMNS, self._rows())]

    def __str__(self):
        return f"{self._title()}\n{text_table(_COLUMNS, self._rows())}"

    def _rows(self) -> list[tuple[str, ...] | str]:
        """A row for every decision, with equal blocks folded; `decisions` has all."""

        def key(each: tuple[str, tuple[int, ...], Decision]) -> tuple:
            _, shape, decision = each
            return shape, decision.axes, decision.reason

        def cells(those, name: str, within: str) -> tuple[str, ...]:
            shapes = [shape for _, shape, _ in those]
            _, shape, decision = those[0]
            layout = layout_text(decision.axes, len(shape))
            return name, shapes_text(shapes), layout, relative(decision.reason, within)

        return short_rows(self.decisions, _path, key, cells)


def _path(decision: tuple[str, tuple[int, ...], Decision]) -> str:
    return decision[0]


@checked_constructor
@dataclass(frozen=True)
class Planner:
    """Chooses layouts by layer classes, shapes and neighbours, and never by names.

    Args:
        kind: `"fsdp"`: splits every variable with at least `min_size` elements over the data axes,
            along its largest divisible dimension, or by expert if tokens are sent to experts.
            `"tensor_parallel"`: splits kernels in column and row pairs, attention by heads,
            embeddings by vocabulary or width, convolutions by channels, experts by expert,
            recurrent kernels by gates, over the axes that do not split the batch. `"auto"`: uses
            tensor_parallel on the model axes, if the mesh has any; adds fsdp over the data axes if
            the training state would not fit in memory.
        min_size: The number of elements from which a variable is split.
        memory_bytes: Memory of a device, for `"auto"`. Defaults to the device's memory, or to that
            of a v5e chip if that is unknown.
        between_blocks: What devices that share weights have of the values between pairs of kernels,
            `(batch, time, features)`, such as residual sums and inputs of norms: `"split"`: a part
            of the times, if their number is divisible; as many bytes are sent, and these values
            take a part of the memory; `"whole"`: all of them; `"auto"`: a part, unless a device's
            values are below 1 MiB, which takes longer to send in two parts, or a sequence axis
            splits time already.

    Raises:
        ValueError: If `kind` is not a plan, or a number is invalid.

    References:
        [Megatron-LM](https://arxiv.org/abs/1909.08053) for pairs;
        [ZeRO](https://arxiv.org/abs/1910.02054) for fsdp and split optimizer slots;
        [sequence parallelism](https://arxiv.org/abs/2205.05198) for `between_blocks`.

    Example:

    >>> import jax, keras, numpy as np
    >>> from jax.sharding import Mesh
    >>> mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, name="up"),
    ...                           keras.layers.Dense(8, name="down")], name="m")
    >>> plan = Planner("tensor_parallel").plan(model, mesh, ("data",))
    >>> [axes for pattern, axes in plan.rules().rules]
    [(None, 'model'), ('model',), ('model', None)]
    """

    kind: Annotated[str, one_of(*PLANS)]
    min_size: NaturalInt = MIN_SIZE
    memory_bytes: PositiveInt | None = None
    between_blocks: Annotated[str, one_of("auto", "split", "whole")] = "whole"

    def check_mesh(self, mesh: Mesh, data_axes: Sequence[str]) -> None:
        """Raises a `ValueError` if the mesh has no axis that this plan could split over.

        Args:
            mesh: The mesh.
            data_axes: The axes of the mesh that split the batch.

        Raises:
            ValueError: If `"fsdp"` has no data axes, or `"tensor_parallel"` only data axes; if
                `between_blocks="split"` has no axis to split over.
        """
        missing = {
            "fsdp": None if state_axes(mesh, data_axes) else 'split the batch, such as "data"',
            "tensor_parallel": None
            if _model_axes(mesh, data_axes)
            else 'do not split the batch, such as "model"',
        }.get(self.kind)
        if missing is not None:
            raise value_error(
                f"The plan {self.kind!r} splits over mesh axes that {missing}.",
                received={"mesh": dict(mesh.shape), "data axes": tuple(data_axes)},
                fix='Add such an axis, for example mesh={"data": -1, "model": 2}, or choose '
                'layout="auto".',
            )
        splits_weights = self.kind != "fsdp" and _model_axes(mesh, data_axes)
        if self.between_blocks == "split" and not splits_weights:
            raise value_error(
                'between_blocks="split" splits values over the axes that split weights in a '
                '"tensor_parallel" plan.',
                received={"plan": self.kind, "mesh": dict(mesh.shape), "data axes": data_axes},
                fix='Write ktd.Planner("tensor_parallel", between_blocks="split") with '
                'mesh={"data": -1, "model": 2}, or leave between_blocks out.',
            )

    def plan(self, model: Any, mesh: Mesh, data_axes: Sequence[str]) -> Plan:
        """Decides how to split every variable of a built model.

        Args:
            model: A model whose variables exist.
            mesh: The mesh.
            data_axes: The axes of the mesh that split the batch.

        Returns:
            The plan. Every split dimension in it is divisible by its axes.
        """
        check_model(model, "Planner.plan")
        variables = _keras.variables_of(model)
        stored, model_axes = state_axes(mesh, data_axes), _model_axes(mesh, data_axes)
        tensor: dict[int, Decision] = {}
        if self.kind != "fsdp" and model_axes:
            tensor = TensorPlan(model, mesh, model_axes, self.min_size).decisions
        chosen, name = self._chosen(variables, tensor, mesh, stored)
        experts = tokens_are_sent_to(model) if "fsdp" in chosen else frozenset()
        by_id = {}
        for variable in variables:
            decision = tensor.get(id(variable))
            if "fsdp" in chosen:
                before = decision or _UNPLANNED
                sent = id(variable) in experts
                decision = self._spread(variable.shape, decision, mesh, stored, sent)
                decision = replace(
                    decision,
                    used=before.used,
                    view=before.view,
                    gathered=before.gathered,
                )
            elif decision is None:
                why = "no rule for this layer class" if chosen else "the state fits on one device"
                decision = Decision((), f"{name}: replicated: {why}")
            by_id[id(variable)] = decision
        rows = tuple((v.path, tuple(v.shape), by_id[id(v)]) for v in variables)
        lies_split = "fsdp" in chosen or sequence_axis(mesh, data_axes) is not None
        outputs = block_outputs(model, mesh, data_axes) if lies_split else {}
        between = self._between(tensor, mesh, data_axes) if "tensor_parallel" in chosen else None
        return Plan(name, rows, outputs, not chosen, between, by_id)

    def _between(self, tensor: dict[int, Decision], mesh: Mesh, data_axes) -> Between | None:
        """How values between blocks may be split: over the axes that split most of the weights."""
        time, always = sequence_axis(mesh, data_axes), self.between_blocks == "split"
        splits = Counter(axes for d in tensor.values() if (axes := tuple(names_in(d.axes))))
        # A sequence axis has them split already.
        if self.between_blocks == "whole" or not splits or (time is not None and not always):
            return None
        ((axes, _),) = splits.most_common(1)
        return Between(axes, time, always)

    def before_build(self, shape: Sequence[int], mesh: Mesh, data_axes: Sequence[str]) -> Decision:
        """The layout of a new variable, whose model and plan are not known yet.

        The variable is split over all axes that the plan may use. So you can build a model that
        does not fit on one device. Its variables move once, when the plan is known.

        Args:
            shape: The variable's shape.
            mesh: The mesh.
            data_axes: The axes of the mesh that split the batch.
        """
        axes = {
            "fsdp": state_axes(mesh, data_axes),
            "tensor_parallel": _model_axes(mesh, data_axes),
            "auto": mesh.axis_names,
        }[self.kind]
        return self._spread(shape, None, mesh, axes)

    def _chosen(self, variables, tensor, mesh, stored) -> tuple[tuple[str, ...], str]:
        """The plans to combine, and the name of the result."""
        if self.kind != "auto":
            return (self.kind,), self.kind
        room = (self.memory_bytes or device_memory(mesh)) * _STATE_FRACTION
        state = sum(
            state_bytes(v) / split_ways(mesh, tensor.get(id(v), _UNPLANNED).axes) for v in variables
        )
        plans = ["tensor_parallel"] if len(mesh.axis_names) > len(stored) else []
        already = " after that" if plans else ""
        if state > room and math.prod(mesh.shape[name] for name in stored) > 1:
            plans.append("fsdp")
        needs = f"state of {state / 1e9:.3g} GB{already}, {room / 1e9:.3g} GB of room per device"
        return tuple(plans), f"auto, {' and '.join(plans) or 'replicated'} ({needs})"

    def _spread(
        self, shape, decision: Decision | None, mesh, data_axes, experts: bool = False
    ) -> Decision:
        """Adds the data axes to the largest dimension that is divisible by them.

        If tokens are sent to experts, kernels are split by expert: the compiler then gathers them
        in less time (17.63 ms a step instead of 20.68, `python benchmarks/experts.py gshard`).
        """
        before = decision.reason + "; " if decision is not None else ""
        taken = decision.axes if decision is not None else ()
        if math.prod(shape) < self.min_size:
            few = f"{math.prod(shape)} elements are below min_size={self.min_size}"
            return Decision(taken, f"{before}fsdp: not split: {few}")
        if experts and (found := _by_expert(shape, taken, mesh, data_axes, before)) is not None:
            return found
        return split_largest(shape, taken, mesh, data_axes, before)


def planner_code(planner: Planner) -> str:
    """A planner as Python; by its name if it has no other options than usual."""
    options = [f"{f.name}={getattr(planner, f.name)!r}" for f in fields(planner)[1:]]
    usual = [f"{f.name}={f.default!r}" for f in fields(planner)[1:]]
    other = [option for option in options if option not in usual]
    kind = json.dumps(planner.kind)
    return f"ktd.Planner({kind}, {', '.join(other)})" if other else kind


def layout_named(layout: Any) -> Any:
    """The layout for a strategy: the plan that `BOTH` names, anything else as it is."""
    # With so little memory, "auto" splits everything.
    named = isinstance(layout, str) and layout == BOTH
    return Planner("auto", memory_bytes=1) if named else layout


def _by_expert(shape, taken: Axes, mesh, data_axes, before: str) -> Decision | None:
    """Adds all data axes to the first dimension, if they divide it."""
    first, *rest = *taken, *(None,) * (len(shape) - len(taken))
    entry = dividing_axes(shape[0] // axis_size(mesh, first), data_axes, mesh)
    if axis_size(mesh, entry) < axis_size(mesh, tuple(data_axes)):
        return None
    names = (*entry_names(first), *entry_names(entry))
    entry_of_first = names[0] if len(names) == 1 else names
    return Decision((entry_of_first, *rest), f"{before}fsdp: by expert, to which tokens are sent")


def split_largest(
    shape: Sequence[int], taken: Axes, mesh: Mesh, data_axes: Sequence[str], before: str = ""
) -> Decision:
    """Splits the largest divisible dimension over the data axes, besides the existing splits.

    Args:
        shape: The tensor's shape.
        taken: Its layout so far; axes in it are kept.
        mesh: The mesh.
        data_axes: The axes to add.
        before: The reason so far, in front of the new one.

    Returns:
        The decision; it has the axes `taken` if no dimension is divisible.
    """
    axes = [*taken, *(None,) * (len(shape) - len(taken))]
    choices = []
    for dim, size in enumerate(shape):
        inner = size // axis_size(mesh, axes[dim])
        entry = dividing_axes(inner, data_axes, mesh)
        if entry is not None:
            # Most ways first, then untouched dimensions, then the largest.
            choices.append((axis_size(mesh, entry), axes[dim] is None, inner, -dim, entry))
    if not choices:
        ways = {name: mesh.shape[name] for name in data_axes}
        return Decision(taken, f"{before}fsdp: not split: no dimension of {tuple(shape)} "
                        f"divides by {ways}")  # fmt: skip
    choices.sort(reverse=True, key=lambda choice: choice[:4])
    _, _, inner, dim, entry = choices[0]
    axes[-dim] = entry if axes[-dim] is None else (*entry_names(axes[-dim]), *entry_names(entry))
    others = tuple(
        f"dimension {-d} over {e!r}: {_worse(c, choices[0])}"
        for c in choices[1:]
        for d, e in [(c[3], c[4])]
    )
    reason = f"{before}fsdp: dimension {-dim}"
    return Decision(tuple(axes), reason, others)


def slot_decision(weight: Decision, shape: Sequence[int], mesh: Mesh, data_axes) -> Decision:
    """The layout of an optimizer slot under ZeRO-1: its weight's, split over the data axes too.

    Args:
        weight: The layout of the slot's weight.
        shape: The slot's shape.
        mesh: The mesh.
        data_axes: The axes that split the batch.
    """
    used = set(names_in(weight.axes))
    if not used <= set(mesh.axis_names):
        return weight  # an error is raised when this layout is requested
    free = [name for name in state_axes(mesh, data_axes) if name not in used]
    further_split = split_largest(shape, weight.axes, mesh, free)
    if split_ways(mesh, further_split.axes) == split_ways(mesh, weight.axes):
        return weight
    return Decision(
        further_split.axes, "shard_optimizer: split over the data axes", further_split.alternatives
    )


def _pattern(path: str, paths: Sequence[str]) -> str:
    """The path itself, anchored if it is also the end of another path."""
    plain = re.escape(path)
    longer = [p for p in paths if p != path and p.endswith(f"/{path}")]
    return f"^{plain}$" if longer else plain


def _worse(choice, best) -> str:
    if choice[0] < best[0]:
        return "fewer ways"
    return "already split" if choice[1] < best[1] else "not larger"


def _model_axes(mesh, data_axes) -> tuple[str, ...]:
    others = state_axes(mesh, data_axes)
    return tuple(name for name in mesh.axis_names if name not in others)


def state_bytes(variable: Any) -> int:
    """The bytes of a weight with a usual optimizer's slots and its gradient."""
    copies = _COPIES_OF_A_TRAINABLE_WEIGHT if variable.trainable else 1
    return bytes_of(variable) * copies


def device_memory(mesh: Mesh) -> int:
    """The memory that a device may use: the same in all processes, which must plan alike."""
    device = mesh.devices.flat[0]
    if (chip := of_kind(device.device_kind)) is not None:
        return chip.device_hbm_bytes
    if isinstance(device, CompileOnlyDevice) or device.platform not in ("tpu", "gpu", "cuda"):
        return _MEMORY_WHERE_UNKNOWN
    # Only the process's own devices report their memory.
    local_devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    stats = local_devices[0].memory_stats() if local_devices else None
    return (stats or {}).get("bytes_limit", _MEMORY_WHERE_UNKNOWN)
