"""Decides about the variables of one model: all rules in one place, in one order."""

import math
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import keras
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, named_sharding, spell_out
from keras_tpu_dist.hardware.mesh import sequence_axis
from keras_tpu_dist.layout.activations import block_outputs
from keras_tpu_dist.layout.annotations import Annotated, annotated, layouts_in
from keras_tpu_dist.layout.planner import MIN_SIZE, Plan, Planner, slot_decision, split_largest
from keras_tpu_dist.layout.rules import (
    Decision,
    LayoutRules,
    check_axis_names,
    checked,
    decide,
    matching,
    patterns,
)
from keras_tpu_dist.programs.between.sums import Between


@dataclass(frozen=True, eq=False)
class Setting:
    """The strategy's options for the decision.

    Attributes:
        batch_first: Whether the batch is the first dimension, so that plans may set layouts of
            outputs.
    """

    mesh: Mesh
    data_axes: tuple[str, ...]
    layout: Any = None
    shard_optimizer: bool = False
    batch_first: bool = True


@dataclass(frozen=True)
class Placement:
    """How every variable of a model is split.

    Attributes:
        decisions: From the id of a variable to its decision, not yet checked against its shape.
        slots: `(slot, weight)` pairs of the optimizer.
        planned_outputs: From a layer's path to the layout of its output, by the plan or the mesh.
        ruled_outputs: From a layer's path to the decision of a rule about its output.
    """

    decisions: dict[int, Decision]
    slots: list[tuple[Any, Any]]
    plan: Plan | None
    planned_outputs: dict[str, Axes]
    ruled_outputs: dict[str, Decision]
    annotations: Annotated
    _setting: Setting = field(repr=False)
    _slot_ids: frozenset[int] = field(repr=False)
    _shardings: dict[tuple[str, tuple[int, ...]], NamedSharding] = field(
        default_factory=dict, repr=False
    )

    def decision(self, variable: Any) -> Decision:
        """The decision for a variable, checked against its shape.

        Args:
            variable: A variable of the model or its optimizer; an unknown one is replicated.

        Raises:
            LayoutError: If a rule or annotation does not fit the shape or the mesh.
        """
        decision = self.decisions.get(id(variable), _REPLICATED)
        self._sharding(decision, variable)
        return decision

    def sharding(self, variable: Any) -> NamedSharding:
        """The layout of a variable by its `decision`."""
        return self._sharding(self.decisions.get(id(variable), _REPLICATED), variable)

    def _sharding(self, decision: Decision, variable: Any) -> NamedSharding:
        if decision.reason.startswith(_AMBIGUOUS):
            decide(variable.path, self._setting.layout)  # raises Keras's own error
        # The variables of a large model have few layouts: JAX compares one object fastest.
        alike = str(decision.axes), tuple(variable.shape)
        if alike not in self._shardings:
            check_axis_names([(variable.path, decision.axes)], self._setting.mesh.axis_names)
            checked(decision, variable.path, variable.shape, self._setting.mesh)
            self._shardings[alike] = named_sharding(self._setting.mesh, decision.axes)
        return self._shardings[alike]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return self._setting.data_axes

    @property
    def between(self) -> Between | None:
        """How values between blocks may be split along time, or `None`."""
        return None if self.plan is None else self.plan.between

    def is_slot(self, variable: Any) -> bool:
        """Whether a variable is an optimizer's slot, whose layout Keras copied from its weight.

        Args:
            variable: A variable of the model or of its optimizer.
        """
        return id(variable) in self._slot_ids

    def layouts_of_outputs(self) -> dict[str, Any]:
        """From a layer's path to the layout of its output, by annotation, rule, plan or mesh."""
        ruled = {path: decision.axes for path, decision in self.ruled_outputs.items()}
        return {**self.planned_outputs, **ruled, **self.annotations.outputs}

    def check_output(self, path: str) -> None:
        """Raises a `ValueError` if an annotation's output names an axis that the mesh lacks.

        Args:
            path: The path of a layer with such an annotation.
        """
        names = self._setting.mesh.axis_names
        for axes in layouts_in(self.annotations.outputs[path]):
            check_axis_names([(f"{path}/output", axes)], names)

    def written_in_program(self) -> tuple[Any, ...]:
        """All constants of a compiled step besides its variables' layouts."""
        uses = {
            k: (d.used, d.view, d.gathered)
            for k, d in self.decisions.items()
            if d.used or d.gathered
        }
        return self.layouts_of_outputs(), self.annotations.logical_devices, uses, self.between


_AMBIGUOUS = "LayoutMap: several keys match"
_REPLICATED = Decision((), "default: replicated")
_NO_RULE = Decision((), "no rule matches: replicated")
# Reasons of weights that are whole on every device although nobody asked for it.
UNDECIDED = (_REPLICATED.reason, _NO_RULE.reason)


def place(model: Any, setting: Setting, given: Any) -> Placement:
    """Decides for every variable of a model.

    In this order: a layout of the variable itself, an annotation on its layer, the rules, the plan,
    the assignment of its layer to a logical device, replication. Optimizer slots have the layout of
    their weight; metrics and the optimizer's other variables follow the rules.

    Args:
        model: A model, built or not.
        setting: The strategy's options.
        given: Returns the layout that the user gave a variable, or `None`.
    """
    notes = annotated(model)
    plan, outputs = None, {}
    trainable, fixed, *others = _keras.state_groups(model)
    weights = [*trainable, *fixed]
    if isinstance(setting.layout, Planner) and weights:
        plan = setting.layout.plan(model, setting.mesh, setting.data_axes)
        if not setting.batch_first:
            plan = replace(plan, outputs={}, between=None)
        outputs = plan.outputs
    elif setting.batch_first and sequence_axis(setting.mesh, setting.data_axes) is not None:
        outputs = block_outputs(model, setting.mesh, setting.data_axes)
    decisions = {id(v): _decide(v, given(v), notes, setting, plan) for v in weights}
    slots = [(slot, weight) for _, slot, weight in _keras.optimizer_slots(model)]
    for slot, weight in slots:
        if tuple(slot.shape) != tuple(weight.shape):
            continue
        decision = decisions.get(id(weight), _REPLICATED)
        if setting.shard_optimizer:
            decision = slot_decision(decision, slot.shape, setting.mesh, setting.data_axes)
        decisions[id(slot)] = decision
    for other in chain.from_iterable(others):
        if id(other) not in decisions:
            decisions[id(other)] = _decide(other, given(other), notes, setting, None)
    slot_ids = frozenset(id(slot) for slot, _ in slots)
    ruled = _ruled_outputs(model, setting.layout)
    return Placement(decisions, slots, plan, outputs, ruled, notes, setting, slot_ids)


def _ruled_outputs(model: Any, layout: Any) -> dict[str, Decision]:
    ruled = {}
    for layer in _keras.flatten_layers(model) if patterns(layout) else ():
        path = f"{layer.path}/output"
        # If several keys of a LayoutMap match, the layer's call raises an error about that.
        keys = matching(layout, path) if layer.path else []
        if keys and (len(keys) == 1 or isinstance(layout, LayoutRules)):
            decision = decide(path, layout)
            if decision is not None:
                ruled[layer.path] = decision
    return ruled


def _decide(variable, given, notes: Annotated, setting: Setting, plan: Plan | None) -> Decision:
    decision = _by_precedence(variable, given, notes, setting, plan)
    axes = spell_out(decision.axes, setting.mesh.axis_names)
    return decision if axes is decision.axes else replace(decision, axes=axes)


def _by_precedence(variable, given, notes: Annotated, setting: Setting, plan) -> Decision:
    if given is not None:
        return Decision(_axes_of(given), "the variable's own layout")
    if id(variable) in notes.weights:
        return Decision(*notes.weights[id(variable)])
    if isinstance(setting.layout, keras.distribution.LayoutMap):
        keys = matching(setting.layout, variable.path)
        if len(keys) > 1:
            return Decision((), f"{_AMBIGUOUS}: {keys}")
    decision = decide(variable.path, setting.layout)
    if decision is None and plan is not None:
        decision = plan.decision(variable)
    if decision is not None:
        return decision
    if id(variable) in notes.assigned:
        return _shared_by_replica(variable, notes.assigned[id(variable)], setting)
    return _NO_RULE if setting.layout else _REPLICATED


def _shared_by_replica(variable, device: int, setting: Setting) -> Decision:
    """The layout of a weight of an assigned layer: every logical device stores a part of it.

    The device that computes gets the other parts when it needs them. So all devices of a replica
    store equally much, and together one copy.
    """
    axes = tuple(name for name in setting.mesh.axis_names if name not in setting.data_axes)
    reason = f"assigned to logical device {device}: "
    if math.prod(setting.mesh.shape[name] for name in axes) == 1:
        return _NO_RULE if setting.layout else _REPLICATED
    if math.prod(variable.shape) < MIN_SIZE:
        return Decision((), f"{reason}whole on each, as it is small")
    parts = split_largest(variable.shape, (), setting.mesh, axes)
    if not any(parts.axes):
        return Decision((), f"{reason}whole on each, as no dimension divides")
    return Decision(parts.axes, f"{reason}stored in parts on all of its replica")


def _axes_of(layout) -> tuple:
    if isinstance(layout, keras.distribution.TensorLayout):
        return tuple(layout.axes)
    return tuple(layout.spec) if isinstance(layout, NamedSharding) else ()
