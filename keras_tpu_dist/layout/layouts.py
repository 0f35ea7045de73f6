"""The layouts of a strategy, for variables, outputs and whole models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.common.checks import check_model
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.mesh import sequence_axis, state_axes
from keras_tpu_dist.layout.activations import Activations
from keras_tpu_dist.layout.placement import Placement, Setting, place
from keras_tpu_dist.layout.planner import PLANS, Plan, Planner
from keras_tpu_dist.layout.rules import Decision, LayoutRules, check_axis_names, checked, decide


class Layouts(Setting):
    """Decides the layouts of variables and layer outputs on one mesh.

    Args:
        mesh: The mesh.
        data_axes: The mesh axes that split the batch.
        layout: `None`, `LayoutRules`, `(pattern, axes)` pairs, a `LayoutMap`, a plan or its name.
        shard_optimizer: Whether optimizer slots are split over the data axes.
        batch_first: Whether the batch is the first dimension of every input.
    """

    def __init__(
        self,
        mesh: Mesh,
        data_axes: tuple[str, ...],
        layout: Any,
        shard_optimizer: bool = False,
        batch_first: bool = True,
    ):
        layout = checked_layout(layout, mesh.axis_names)
        super().__init__(mesh, data_axes, layout, bool(shard_optimizer), batch_first)
        if isinstance(self.layout, Planner):
            self.layout.check_mesh(mesh, data_axes)
        if shard_optimizer and not state_axes(mesh, data_axes):
            raise value_error(
                "shard_optimizer splits optimizer slots over the data axes.",
                received={"shard_optimizer": True, "data axes": ()},
                fix='Add an axis "data" to the mesh, or name one with data_axes=.',
            )

    @property
    def planned_by_model(self) -> bool:
        """Whether the layout of a variable depends on the rest of its model."""
        return isinstance(self.layout, Planner)

    def owns(self, layout: Any) -> bool:
        """Whether a layout is on this mesh.

        Args:
            layout: A sharding; anything but a `NamedSharding` is on no mesh.
        """
        return isinstance(layout, NamedSharding) and layout.mesh == self.mesh

    def placement(self, model: Any, given: Callable[[Any], Any]) -> Placement:
        """The decisions about every variable of a model.

        Args:
            model: A model. If it is not built yet, the variables it has so far are used.
            given: Returns the layout that the user gave a variable, or `None`.
        """
        check_model(model, "What a strategy says of layouts")
        return place(model, self, given)

    def planned(self, model: Any) -> Plan:
        """The layouts that the plan chooses for a model.

        Args:
            model: A built model.
        """
        check_model(model, "What a strategy says of layouts")
        if not isinstance(self.layout, Planner):
            raise value_error(
                "Only a strategy with a plan as its layout can plan.",
                received={"layout": self.layout},
                fix='Use layout="fsdp", "tensor_parallel" or "auto".',
            )
        return self.layout.plan(model, self.mesh, self.data_axes)

    def target(self, variable: Any, given: Any, placement: Placement) -> Any:
        """The layout that a variable of a known model should have.

        Args:
            variable: A variable of the model or of its optimizer.
            given: The layout that the user gave it, or `None`; ignored for an optimizer slot,
                because Keras copied that layout from the weight.
            placement: The placement of the variable's model.
        """
        if given is not None and not placement.is_slot(variable):
            return self.translated(variable, given)
        return placement.sharding(variable)

    def by_rule(self, variable: Any) -> NamedSharding:
        """The layout of a variable from its path and shape alone.

        Args:
            variable: A variable that is being created, or whose model is not known.
        """
        decision = decide(variable.path, self.layout)
        if decision is None and isinstance(self.layout, Planner):
            decision = self.layout.before_build(variable.shape, self.mesh, self.data_axes)
        if decision is None:
            return named_sharding(self.mesh)
        checked(decision, variable.path, variable.shape, self.mesh)
        return named_sharding(self.mesh, decision.axes)

    def translated(self, variable: Any, given: Any) -> Any:
        """A variable's own layout, on this mesh.

        Args:
            variable: The variable.
            given: A `TensorLayout` or a `NamedSharding`, also on another mesh; anything else is
                returned unchanged.
        """
        if isinstance(given, keras.distribution.TensorLayout):
            axes = tuple(given.axes)
        elif isinstance(given, NamedSharding):
            axes = tuple(given.spec)
        else:
            return given
        check_axis_names([(variable.path, axes)], self.mesh.axis_names)
        decision = Decision(axes, "the variable's own layout")
        checked(decision, variable.path, variable.shape, self.mesh)
        return named_sharding(self.mesh, axes)

    def of_output(self, path: str, placement: Placement | None) -> Any:
        """The layout of a layer's output, or `None`.

        Args:
            path: The layer's path followed by `/output`. An annotation on the layer takes
                precedence, then a rule for this path, then the plan, then the mesh.
            placement: The placement of the running model, if there is one.
        """
        layer = path.removesuffix("/output")
        if placement is not None and layer in placement.annotations.outputs:
            placement.check_output(layer)
            axes = placement.annotations.outputs[layer]
            # A list or dict has a layout for each tensor.
            return axes if isinstance(axes, (list, dict)) else named_sharding(self.mesh, axes)
        decision = decide(path, self.layout)
        if decision is not None:
            return named_sharding(self.mesh, decision.axes)
        planned = {} if placement is None else placement.planned_outputs
        if layer not in planned:
            return None
        rows, time = planned[layer][0], sequence_axis(self.mesh, self.data_axes)
        return Activations(rows, time, placement is not None and placement.between is not None)


def checked_layout(layout: Any, axis_names: Sequence[str]) -> Any:
    """Converts a strategy's `layout` to `None`, rules, a `LayoutMap` or a planner.

    Args:
        layout: Any form that `TPUStrategy` takes, or a `Plan`, whose rules are used.
        axis_names: The mesh's axes.
    """
    if layout is None or isinstance(layout, Planner):
        return layout
    if isinstance(layout, keras.distribution.LayoutMap):
        check_axis_names(LayoutRules.from_layout_map(layout).rules, axis_names)
        return layout
    if isinstance(layout, Plan):
        layout = layout.rules()
    if isinstance(layout, str) and layout in PLANS:
        return Planner(layout)
    if isinstance(layout, str) or not isinstance(layout, (LayoutRules, Sequence, Mapping)):
        raise value_error(
            "A layout is None, LayoutRules, a list of (pattern, axes) pairs, a LayoutMap or "
            "one of the plans fsdp, tensor_parallel, auto.",
            received={"layout": layout},
            fix='Write for example layout=[("dense/kernel", (None, "model"))].',
            name=layout if isinstance(layout, str) else None,
            choices=PLANS,
        )
    rules = layout if isinstance(layout, LayoutRules) else LayoutRules(layout)
    check_axis_names(rules.rules, axis_names)
    return rules
