"""Models join a strategy: the layouts of their variables, and moving those that are elsewhere."""

import contextlib
import gc
import logging
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import runtime_error
from keras_tpu_dist.processes.saving import written_once
from keras_tpu_dist.training.generation import Generation
from keras_tpu_dist.training.membership import (
    Membership,
    find_strategy,
    given_layout,
    mark_as_chosen,
    members,
    models_of,
)
from keras_tpu_dist.training.pickling import carry_strategy
from keras_tpu_dist.training.protocol import Strategy
from keras_tpu_dist.training.turns import assign_together, compiling, read_together, turns_of

logger = logging.getLogger("keras_tpu_dist")


def join_active(model: Any) -> None:
    """Records that a model was created or compiled under the current strategy.

    Args:
        model: The model, built or not.
    """
    strategy = _keras.active_strategy()
    if strategy is not None:
        _join(model, strategy)


def choose_layout(variable: Any, strategy: Strategy) -> Any:
    """The layout of a variable under a strategy; a layout from the user is kept.

    Args:
        variable: A `keras.Variable`, also one without a value yet.
        strategy: The strategy whose mesh and rules apply.
    """
    given = given_layout(variable)
    if given is not None:
        return strategy.layouts.translated(variable, given)
    layout = strategy.layouts.by_rule(variable)
    # Keras asks for a new variable and gives it this layout. Others ask for a variable that has a
    # layout: recording this one as chosen would make the variable's own look like the user's.
    if _keras.variable_layout(variable) is not None:
        return layout
    return mark_as_chosen(variable, layout)


def layout_now(variable: Any, strategy: Strategy) -> tuple[Any, str]:
    """The layout of a variable once its model has run, which `explain` shows.

    Args:
        variable: A `keras.Variable`. If it is in no model of the strategy, the result is its
            current layout, or the one it would get if it is not on the strategy's mesh.
        strategy: The strategy.

    Returns:
        The layout, and what is uncertain about it, or `""`.
    """
    model = _largest_with(variable, models_of(strategy))
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


def _largest_with(variable: Any, models: list[Any]) -> Any:
    largest = None, 0
    for model in models:
        if not _keras.is_built(model):
            continue
        variables = _keras.state_variables(model)
        if len(variables) > largest[1] and any(v is variable for v in variables):
            largest = model, len(variables)
    return largest[0]


def adopt(model: Any, strategy: Strategy) -> Membership:
    """Moves all variables of a model that are not on the strategy's mesh yet, and logs it once.

    Args:
        model: A model; also unbuilt.
        strategy: The strategy it is about to run under.
    """
    turns = turns_of(model)
    with turns.lock:
        member_before = members.get(model)
        if turns.elsewhere and member_before is not None:
            _check_same_strategy(model, member_before.strategy, strategy)
            return member_before
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
        given = given_layout(variable) is not None and not member.owns_slot(variable)
        moves.append((variable, target if given else mark_as_chosen(variable, target)))
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
    """Adopts every built model of a strategy that is not part of another one.

    Args:
        strategy: The strategy that is about to use their variables.
    """
    built = [model for model in models_of(strategy) if _keras.is_built(model)]
    inner = {id(layer) for m in built for layer in _keras.flatten_layers(m) if layer is not m}
    for model in built:
        if id(model) not in inner:
            adopt(model, strategy)


def _join(model: Any, strategy: Strategy) -> Membership:
    member = members.get(model)
    if member is not None and member.strategy is strategy:
        return member
    if member is not None:
        logger.info("model %r moves from %r to %r", model.name, member.strategy, strategy)
    member = members[model] = Membership(strategy, turns=turns_of(model))
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
    generation = model.generate_function
    if isinstance(generation, Generation) and generation.serves(strategy):
        return generation
    return Generation(model, strategy)


def _strategy_of(model: Any) -> Strategy | None:
    member = members.get(model)
    return None if member is None else member.strategy


_keras.serve(find_strategy, join_active, compiling, read_together, assign_together, written_once)
