"""The strategy of a model, and moving models that were built elsewhere."""

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.own_mesh import own_mesh
from keras_tpu_dist.layout import annotations
from keras_tpu_dist.layout.low_rank import note_low_rank
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.layout.use import note_uses
from keras_tpu_dist.memory import remat, scan_blocks
from keras_tpu_dist.processes.agreement import Agreed
from keras_tpu_dist.processes.saving import written_once
from keras_tpu_dist.programs.experts.exchange import exchange_tokens
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.generation import Generation
from keras_tpu_dist.training.guard import StateGuard
from keras_tpu_dist.training.pickling import carry_strategy
from keras_tpu_dist.training.protocol import Strategy
from keras_tpu_dist.training.turns import Turns, assign_together, compiling, read_together, turns_of

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
        """Whether some of the model's weights were on the mesh when it ran last."""
        known = {id(variable) for variable, _ in self._targets}
        return bool(known) and any(id(weight) in known for weight in model.weights)

    def targets(self, model: Any) -> list[tuple[Any, Any]]:
        """The model's state variables, with the layouts that they should have."""
        variables = _keras.state_variables(model)
        same = len(variables) == len(self._targets) and all(
            variable is known for variable, (known, _) in zip(variables, self._targets, strict=True)
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
        if _keras.is_built(model):
            exchange_tokens(model, lambda v: after.decision(v).axes, self.strategy.data_axes)
        self.placement = after
        self._versions = versions
        note_uses(model, after)
        note_low_rank(model)
        self._targets = [
            (v, self.strategy.layouts.target(v, given_layout(v), after)) for v in variables
        ]
        return self._targets


_members: "weakref.WeakKeyDictionary[Any, Membership]" = weakref.WeakKeyDictionary()


# The strategies with devices to lose, for models that run outside of all of them.
_alive: "weakref.WeakSet[Strategy]" = weakref.WeakSet()


def exists(strategy: Strategy) -> None:
    """Records a new strategy whose devices are attached."""
    if strategy.mesh.size > 1:
        _alive.add(strategy)


# On a variable: the layout that a strategy chose, in contrast to one from the user.
chosen_mark = _keras.Mark("_keras_tpu_dist_layout")


class Scope:
    """The context of `strategy.scope()`. Scopes nest; an object can be entered once at a time."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._entered = False
        self._outer: Any = None
        self._mesh: Any = None

    def __enter__(self):
        if self._entered:
            raise runtime_error(
                "A scope object can be entered only once.",
                received=f"a second entry into a scope of {self._strategy!r}.",
                fix="Write `with strategy.scope():` every time; scopes may nest.",
            )
        self._entered = True
        self._outer = _keras.active_distribution()
        keras.distribution.set_distribution(self._strategy)
        if not jax.sharding.get_abstract_mesh().empty:
            self._mesh = own_mesh(self._own_mesh)
        return self._strategy

    def __exit__(self, *exception):
        keras.distribution.set_distribution(self._outer)
        if self._mesh is not None:
            self._mesh.__exit__(*exception)
            self._mesh = None

    @property
    def _own_mesh(self) -> jax.sharding.Mesh | None:
        return self._strategy.mesh


class DescribedScope(Scope):
    """The scope on a slice that is not attached: variables created in it get no value."""

    def __enter__(self):
        strategy = super().__enter__()
        self._abstract = _keras.abstract_variables()
        self._abstract.__enter__()
        return strategy

    def __exit__(self, *exception):
        self._abstract.__exit__(*exception)
        super().__exit__(*exception)

    @property
    def _own_mesh(self) -> None:
        return None  # JAX would compute on devices that are not attached.


def created(model: Any) -> None:
    """Records that a model was created or compiled under the current strategy."""
    strategy = _keras.active_strategy()
    if strategy is not None:
        _join(model, strategy)


def find_strategy(model: Any) -> Any:
    """The strategy to run a model under: the active one, or the one it was created in.

    Returns:
        The strategy, or `None` for stock Keras.
    """
    active = _keras.active_strategy()
    if active is not None:
        return active
    member = _members.get(model)
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
    member = _members.get(model)
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

    Returns:
        Its membership, or `None` if it was never created, compiled or run under a strategy.
    """
    return _members.get(model)


def is_local(model: Any) -> bool:
    """Whether a model is on this process's devices alone, so that no other process takes part.

    Args:
        model: A model; True for one without a strategy.
    """
    member = _members.get(model)
    return member is None or member.strategy.placer.is_local


def fit_in_training(model: Any) -> FitControl | None:
    """The fit of a model that trains under a strategy now, for callbacks.

    Returns:
        The controls of the fit, or `None` if no strategy is active or the model does not train.
    """
    member = None if _keras.active_strategy() is None else _members.get(model)
    return None if member is None or member.guard is None else member.fit


def choose_layout(variable: Any, strategy: Strategy) -> Any:
    """The layout of a variable under a strategy; a layout from the user is kept.

    Args:
        variable: A `keras.Variable`, also one without a value yet.
    """
    given = given_layout(variable)
    if given is not None:
        return strategy.layouts.translated(variable, given)
    layout = strategy.layouts.by_rule(variable)
    # Keras asks for a new variable and gives it this layout. Others ask for a variable that has a
    # layout: recording this one as chosen would make the variable's own look like the user's.
    return layout if _keras.variable_layout(variable) is not None else chosen(variable, layout)


def layout_now(variable: Any, strategy: Strategy) -> tuple[Any, str]:
    """The layout of a variable once its model has run, which `explain` shows.

    Args:
        variable: A `keras.Variable`. If it is in no model of the strategy, the result is its
            current layout, or the one it would get if it is not on the strategy's mesh.

    Returns:
        The layout, and what is uncertain about it, or `""`.
    """
    model = _largest_with(variable, _models_of(strategy))
    if model is not None:
        placement = strategy.placement(model)
        return strategy.layouts.target(variable, given_layout(variable), placement), ""
    layout = _keras.variable_layout(variable)
    if strategy.layouts.owns(layout):
        return layout, ""
    alone = strategy.layouts.planned_by_model and given_layout(variable) is None
    return choose_layout(variable, strategy), _ALONE if alone else ""


_ALONE = (
    "planned without its model, which is not this strategy's: build or run it in the scope for the "
    "layout that it gets, or call strategy.explain(model)"
)


def _models_of(strategy: Strategy) -> list[Any]:
    return [model for model, member in list(_members.items()) if member.strategy is strategy]


def _largest_with(variable: Any, models: list[Any]) -> Any:
    found = None, 0
    for model in models:
        if not _keras.is_built(model):
            continue
        variables = _keras.state_variables(model)
        if len(variables) > found[1] and any(v is variable for v in variables):
            found = model, len(variables)
    return found[0]


def given_layout(variable: Any) -> Any:
    """The layout that the user gave a variable, or `None`.

    Args:
        variable: A `keras.Variable`. A layout that a strategy chose does not count.
    """
    layout = _keras.variable_layout(variable)
    return None if layout is chosen_mark.of(variable) else layout


def adopt(model: Any, strategy: Strategy) -> Membership:
    """Moves all variables of a model that are not on the strategy's mesh yet, and logs it once."""
    turns = turns_of(model)
    with turns.lock:
        known = _members.get(model)
        if turns.elsewhere and known is not None:
            _check_same_strategy(model, known.strategy, strategy)
            return known
        with _uncollected():
            return _adopted(model, strategy)


@contextlib.contextmanager
def _uncollected():
    """Leaves out Python's garbage collections: they go through all objects of a large model again
    and again, and the program that a plan traces lives until the plan is done."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _adopted(model: Any, strategy: Strategy) -> Membership:
    member = _join(model, strategy)
    knew_weights = member.has_weights_of(model)
    moved, foreign, moves = [], [], []
    for variable, target in member.targets(model):
        layout = _keras.variable_layout(variable)
        if layout == target:
            _keras.claim(variable)
            continue
        (moved if strategy.layouts.owns(layout) else foreign).append(variable)
        own = given_layout(variable) is not None and not member.owns_slot(variable)
        moves.append((variable, target if own else chosen(variable, target)))
    _keras.move_variables(moves)
    if moved or foreign:
        member.guard = None
        _keras.forget_functions(model)
    if moved:
        logger.debug("%d variable(s) of model %r take their final layout", len(moved), model.name)
    if foreign:
        _log_foreign(model, strategy, foreign, knew_weights)
    return member


def _log_foreign(model: Any, strategy: Strategy, foreign: list, knew_weights: bool) -> None:
    mesh = dict(strategy.mesh.shape)
    weights = {id(weight) for weight in model.weights}
    built_outside = not knew_weights and any(id(variable) in weights for variable in foreign)
    if built_outside:
        logger.warning(
            "moved %d variable(s) of model %r, built outside of the scope, onto the mesh %s "
            "(first: %s); build and compile inside strategy.scope() to create them there",
            len(foreign),
            model.name,
            mesh,
            foreign[0].path,
        )
    else:
        # Variables of a new optimizer, of new metrics, of LoRA, of quantization.
        logger.info(
            "placed %d new variable(s) of model %r on the mesh %s (first: %s)",
            len(foreign),
            model.name,
            mesh,
            foreign[0].path,
        )


def _check_same_strategy(model: Any, strategy: Strategy, other: Strategy) -> None:
    if strategy is not other:
        raise runtime_error(
            "A model that trains in one thread must run under the same strategy in the others.",
            received={"model": model.name, "strategy": strategy, "here": other},
            fix="Wait for the other thread's fit, or leave the scope of the other strategy.",
        )


def adopt_all(strategy: Strategy) -> None:
    """Adopts every built model of a strategy that is not part of another one."""
    built = [model for model in _models_of(strategy) if _keras.is_built(model)]
    inner = {id(layer) for m in built for layer in _keras.flatten_layers(m) if layer is not m}
    for model in built:
        if id(model) not in inner:
            adopt(model, strategy)


def layers_with(variables: list, strategy: Strategy) -> list:
    """The layers of a strategy's models that have some of the variables."""
    wanted = {id(v) for v in variables}
    models = _models_of(strategy)
    layers = {id(layer): layer for m in models for layer in _keras.flatten_layers(m)}
    return [
        layer
        for layer in layers.values()
        if any(id(v) in wanted for v in _keras.own_variables(layer))
    ]


def variables_changed(strategy: Strategy) -> None:
    """Makes running fits continue from the variables, which other code has updated."""
    for model in _models_of(strategy):
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


def _join(model: Any, strategy: Strategy) -> Membership:
    member = _members.get(model)
    if member is not None and member.strategy is strategy:
        return member
    if member is not None:
        logger.info("model %r moves from %r to %r", model.name, member.strategy, strategy)
    member = _members[model] = Membership(strategy, turns=turns_of(model))
    carry_strategy(type(model), _strategy_of)
    _keras.serve_generation(model, _generation)
    if hasattr(model, "train_function"):
        _keras.forget_functions(model)
    return member


def _generation(model: Any) -> Generation | None:
    """The `generate` function of a model; `None` if Keras's own one is to be used."""
    strategy = find_strategy(model)
    if strategy is None or model.run_eagerly:
        return None
    # Moves variables that are not on the mesh yet; that resets the model's functions.
    adopt(model, strategy)
    known = model.generate_function
    if isinstance(known, Generation) and known.serves(strategy):
        return known
    return Generation(model, strategy)


def _strategy_of(model: Any) -> Strategy | None:
    member = _members.get(model)
    return None if member is None else member.strategy


def chosen(variable: Any, layout: Any) -> Any:
    """Records that a layout is a strategy's choice, and not the user's."""
    chosen_mark.write(variable, layout)
    return layout


_keras.serve(find_strategy, created, compiling, read_together, assign_together, written_once)
