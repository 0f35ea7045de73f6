"""Which model belongs to which strategy, and moving what was built elsewhere."""

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.errors import message
from keras_tpu_dist.guard import StateGuard

logger = logging.getLogger("keras_tpu_dist")


@dataclass
class Membership:
    """A model's strategy, and the guard of its training state once it trains."""

    strategy: Any
    guard: StateGuard | None = None


_members: "weakref.WeakKeyDictionary[Any, Membership]" = weakref.WeakKeyDictionary()


# Marks on a variable the layout that a strategy chose, as opposed to one its user gave it.
CHOSEN = "_keras_tpu_dist_layout"


class _Scopes(threading.local):
    def __init__(self):
        self.entered: list = []


_scopes = _Scopes()


class Scope:
    """The context of `strategy.scope()`. Nests; each object can be entered once at a time."""

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._entered = False
        self._outer: Any = None

    def __enter__(self):
        if self._entered:
            raise RuntimeError(
                message(
                    "A scope object can be entered only once.",
                    received=f"a second entry into a scope of {self._strategy!r}.",
                    fix="Write `with strategy.scope():` each time; scopes may nest.",
                )
            )
        self._entered = True
        self._outer = keras.distribution.distribution()
        keras.distribution.set_distribution(self._strategy)
        _scopes.entered.append(self._strategy)
        return self._strategy

    def __exit__(self, *exception):
        _scopes.entered.pop()
        keras.distribution.set_distribution(self._outer)


def current_strategy() -> Any:
    """The active strategy; inside a scope also after `clear_session()` dropped it."""
    active = _keras.active_strategy()
    if active is None and _scopes.entered and keras.distribution.distribution() is None:
        active = _scopes.entered[-1]
        keras.distribution.set_distribution(active)
        logger.warning(
            "keras.utils.clear_session() inside strategy.scope() had turned distribution off; "
            "it is on again for the models of this scope"
        )
    return active


def created(model: Any) -> None:
    """Notes that a model was created or compiled under the current strategy."""
    strategy = current_strategy()
    if strategy is not None:
        _join(model, strategy)


def find_strategy(model: Any) -> Any:
    """The strategy to run a model under: the active one, else the one it was created in.

    Raises:
        ValueError: If the model has a strategy and a distribution that is not ours is active.
    """
    active = current_strategy()
    if active is not None:
        return active
    member = _members.get(model)
    if member is None:
        return None
    other = keras.distribution.distribution()
    if other is not None:
        raise ValueError(
            message(
                "A model that belongs to a TPUStrategy cannot run under another distribution.",
                received={
                    "model": model.name,
                    "its strategy": member.strategy,
                    "active distribution": other,
                },
                fix="Call it inside its strategy.scope() or outside of any scope; for another "
                "distribution, build the model anew there and copy the weights.",
            )
        )
    return member.strategy


def membership(model: Any) -> Membership | None:
    """What is known of a model's strategy."""
    return _members.get(model)


def choose_layout(variable: Any, strategy: Any) -> Any:
    """The layout of a variable under a strategy, keeping one that the user gave the variable."""
    given = _keras.variable_layout(variable)
    if given is not None and given is not getattr(variable, CHOSEN, None):
        return strategy._translate(variable, given)
    return _chosen(variable, strategy._rule_layout(variable))


def adopt(model: Any, strategy: Any) -> Membership:
    """Moves whatever of a model is not on the strategy's mesh yet, and says so once.

    Args:
        model: A model; also unbuilt.
        strategy: The strategy it is about to run under.

    Returns:
        The model's membership.
    """
    member = _join(model, strategy)
    weights = {id(slot): weight for slot, weight in _keras.optimizer_slots(model)}
    moved = []
    for variable in _keras.state_variables(model):
        if strategy._owns(_keras.variable_layout(variable)):
            continue
        weight = weights.get(id(variable))
        if weight is not None and tuple(weight.shape) == tuple(variable.shape):
            layout = _chosen(variable, choose_layout(weight, strategy))
        else:
            layout = choose_layout(variable, strategy)
        _keras.move_variable(variable, layout)
        moved.append(variable.path)
    if moved:
        member.guard = None
        _keras.forget_functions(model)
        logger.info(
            "moved %d variable(s) of model %r, built outside of the scope, onto the mesh %s "
            "(first: %s); build and compile inside strategy.scope() to create them there",
            len(moved),
            model.name,
            dict(strategy.mesh.shape),
            moved[0],
        )
    return member


def _join(model: Any, strategy: Any) -> Membership:
    member = _members.get(model)
    if member is not None and member.strategy is strategy:
        return member
    if member is not None:
        logger.info("model %r moves from %r to %r", model.name, member.strategy, strategy)
    member = _members[model] = Membership(strategy)
    if hasattr(model, "train_function"):
        _keras.forget_functions(model)
    return member


def _chosen(variable: Any, layout: Any) -> Any:
    setattr(variable, CHOSEN, layout)
    return layout
