"""Which strategy a model belongs to, and what is recorded of it there."""

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.layout import annotations
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.layout.use import note_uses
from keras_tpu_dist.memory import remat, scan_blocks
from keras_tpu_dist.processes.agreement import Agreed
from keras_tpu_dist.programs.passes import route_layers
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.guard import StateGuard
from keras_tpu_dist.training.protocol import Strategy
from keras_tpu_dist.training.turns import Turns

logger = logging.getLogger("keras_tpu_dist")


@dataclass
class Membership:
    """A model's strategy and placement, and, once it trains, the guard of its state.

    It also has the requests of a fit's callbacks.
    """

    strategy: Strategy
    guard: StateGuard | None = None
    fit: FitControl = field(default_factory=FitControl)
    placement: Placement | None = None
    linted: bool = False
    agreed: Agreed = field(default_factory=Agreed)
    turns: Turns = field(default_factory=Turns)
    _targets: list[tuple[Any, Any]] = field(default_factory=list)
    _versions: tuple[int, tuple[int, int]] | None = None

    def owns_slot(self, variable: Any) -> bool:
        """Whether a variable is an optimizer's slot, whose layout comes from its weight.

        Args:
            variable: A state variable of the model; slots are known after a call of `targets`.
        """
        return self.placement is not None and self.placement.is_slot(variable)

    def has_weights_of(self, model: Any) -> bool:
        """Whether some of the model's weights were on the mesh when it ran last.

        Args:
            model: The model whose membership this is.
        """
        targets = {id(variable) for variable, _ in self._targets}
        return bool(targets) and any(id(weight) in targets for weight in model.weights)

    def targets(self, model: Any) -> list[tuple[Any, Any]]:
        """The model's state variables, with the layouts that they should have.

        Args:
            model: The model whose membership this is.
        """
        variables = _keras.state_variables(model)
        same = len(variables) == len(self._targets) and all(
            variable is target
            for variable, (target, _) in zip(variables, self._targets, strict=True)
        )
        versions = annotations.mark.version, (remat.mark.version, scan_blocks.mark.version)
        if same and self._versions == versions and self.placement is not None:
            return self._targets
        if _keras.is_built(model):
            self.strategy.remat.choose(model)
        before, after = self.placement, self.strategy.placement(model)
        written = before is None or before.written_in_program() == after.written_in_program()
        if not written or (self._versions and self._versions[1] != versions[1]):
            _keras.forget_functions(model)
        self.placement = after
        self._versions = versions
        note_uses(model, after)
        route_layers(model, self.strategy)
        self._targets = [
            (v, self.strategy.layouts.target(v, given_layout(v), after)) for v in variables
        ]
        return self._targets


members: "weakref.WeakKeyDictionary[Any, Membership]" = weakref.WeakKeyDictionary()


# The strategies with devices to lose, for models that run outside of all of them.
_alive: "weakref.WeakSet[Strategy]" = weakref.WeakSet()


def register(strategy: Strategy) -> None:
    """Records a new strategy whose devices are attached."""
    if strategy.mesh.size > 1:
        _alive.add(strategy)


# On a variable: the layout that a strategy chose, in contrast to one from the user.
chosen_mark = _keras.Mark("_keras_tpu_dist_layout")


def find_strategy(model: Any) -> Any:
    """The strategy to run a model under: the active one, or the one it was created in.

    Args:
        model: The model that is about to run.

    Returns:
        The strategy, or `None` for stock Keras.
    """
    active = _keras.active_strategy()
    if active is not None:
        return active
    member = members.get(model)
    if member is None:
        _check_one_mesh(model)
        _warn_of_forgotten_scope(model)
        return None
    other = keras.distribution.distribution()
    if other is not None:
        raise value_error(
            "A model that belongs to a TPUStrategy cannot run under another distribution.",
            received={
                "model": model.name,
                "its strategy": member.strategy,
                "active distribution": other,
            },
            fix="Call it inside its strategy.scope() or outside of any scope; for another "
            "distribution, build a new model there and copy the weights.",
        )
    return member.strategy


def _check_one_mesh(model: Any) -> None:
    """Raises a `ValueError` if a model created outside of any scope has layers of two
    strategies."""
    meshes: dict[Any, str] = {}
    for variable in _keras.state_variables(model):
        layout = chosen_mark.of(variable)
        if layout is not None and layout is _keras.variable_layout(variable):
            meshes.setdefault(layout.mesh, variable.path)
    if len(meshes) > 1:
        raise value_error(
            "All layers of a model must be on one mesh.",
            received="; ".join(
                f"{path!r} on {dict(mesh.shape)} of devices "
                f"{[device.id for device in mesh.devices.flat]}"
                for mesh, path in meshes.items()
            )
            + ".",
            fix="Create and compile the model inside one strategy.scope(): its layers are "
            "moved there.",
        )


def _warn_of_forgotten_scope(model: Any) -> None:
    strategies = list(_alive)
    if not strategies or keras.distribution.distribution() is not None:
        return  # A distribution of Keras was chosen on purpose.
    strategy = max(strategies, key=lambda strategy: strategy.mesh.size)
    log_once(
        f"model {model.name!r} runs under no strategy, without the devices of {strategy!r}: build "
        "and compile it within `with strategy.scope():`. If it belongs to no strategy, silence "
        'this by logging.getLogger("keras_tpu_dist").addFilter(lambda record: "under no strategy" '
        "not in record.getMessage())",
        logging.WARNING,
        about="a model under no strategy",
    )


def why_not_trained(model: Any, strategy: Strategy) -> str:
    """Why a model that a strategy is asked about does not train under it, or `""`.

    Args:
        strategy: The strategy; it trains every model that runs in its scope.
    """
    member = members.get(model)
    if _keras.active_strategy() is strategy or (member and member.strategy is strategy):
        return ""
    if member is not None:
        return f"this strategy does not train the model: it belongs to {member.strategy!r}"
    # A part of a model need not belong to its strategy.
    layouts = _keras.variable_layouts(_keras.state_variables(model))
    if any(strategy.layouts.owns(layout) for layout in layouts):
        return ""
    return (
        "this strategy does not train the model, which belongs to none: build and compile it, or "
        "run it, within `with strategy.scope():`"
    )


def of_model(model: Any) -> Membership | None:
    """The membership of a model.

    Args:
        model: A model.

    Returns:
        Its membership, or `None` if it was never created, compiled or run under a strategy.
    """
    return members.get(model)


def is_local(model: Any) -> bool:
    """Whether a model is on this process's devices alone, so that no other process takes part.

    Args:
        model: A model; True for one without a strategy.
    """
    member = members.get(model)
    return member is None or member.strategy.placer.is_local


def fit_in_training(model: Any) -> FitControl | None:
    """The fit of a model that trains under a strategy now, for callbacks.

    Args:
        model: The callback's model.

    Returns:
        The controls of the fit, or `None` if no strategy is active or the model does not train.
    """
    member = None if _keras.active_strategy() is None else members.get(model)
    return None if member is None or member.guard is None else member.fit


def models_of(strategy: Strategy) -> list[Any]:
    """The models that belong to a strategy."""
    return [model for model, member in list(members.items()) if member.strategy is strategy]


def given_layout(variable: Any) -> Any:
    """The layout that the user gave a variable, or `None`.

    Args:
        variable: A `keras.Variable`. A layout that a strategy chose does not count.
    """
    layout = _keras.variable_layout(variable)
    return None if layout is chosen_mark.of(variable) else layout


def mark_as_chosen(variable: Any, layout: Any) -> Any:
    """Records that a layout is a strategy's choice, and not the user's.

    Args:
        variable: A `keras.Variable`.
        layout: The layout it is about to get.
    """
    chosen_mark.write(variable, layout)
    return layout


def layers_with(variables: list, strategy: Strategy) -> list:
    """The layers of a strategy's models that have some of the variables."""
    wanted = {id(v) for v in variables}
    models = models_of(strategy)
    layers = {id(layer): layer for m in models for layer in _keras.flatten_layers(m)}
    return [
        layer
        for layer in layers.values()
        if any(id(v) in wanted for v in _keras.own_variables(layer))
    ]


def variables_changed(strategy: Strategy) -> None:
    """Makes running fits continue from the variables, which other code has updated.

    Args:
        strategy: The strategy of the fits' models.
    """
    for model in models_of(strategy):
        if _keras.has_state(model):
            _keras.forget_state(model)


class _Constants:
    """Counts the loads that changed what layers keep beside variables: constants of programs."""

    version = 0

    def changed(self, models: Iterable[Any]) -> None:
        """Makes models trace anew, and all functions of `strategy.run`, which may use any layer."""
        self.version += 1
        for model in models:
            if hasattr(model, "train_function"):
                _keras.forget_functions(model)


constants = _Constants()
