"""Copies of optimizers, losses and metrics, made from the objects and not from their configs.

A config lacks what was set after the object was made, such as `exclude_from_weight_decay`, and the
arguments of a class without a `get_config` of its own.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import keras
from keras.src.utils.tracking import DotNotTrackScope, Tracker

from keras_tpu_dist._keras.structure import slots_of_optimizer, weights_of

COPIED = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.losses.Loss)


class Copier:
    """Copies optimizers, losses and metrics for a copy of a model.

    A copy has variables of its own with the same values, and all other attributes. What belongs to
    a weight, such as a slot, belongs to its counterpart. An object is copied once. One that is not
    built stays so, because a slot may begin with the value that its weight has then.

    Args:
        counterparts: Pairs of a layer or variable of the model, and the one in its copy.
    """

    def __init__(self, counterparts: Iterable[tuple[Any, Any]]):
        self._pairs = {id(before): (before, after) for before, after in counterparts}
        self._weights = [
            pair for pair in self._pairs.values() if isinstance(pair[0], keras.Variable)
        ]

    def of(self, original: Any) -> Any:
        """The copy of an optimizer, a loss or a metric.

        Raises:
            TypeError: If an attribute cannot be copied, such as a lock.

        Public replacement: none; `from_config` knows the arguments alone.
        """
        if id(original) in self._pairs:
            return self._pairs[id(original)][1]
        objects = [o for o in _held([original], COPIED) if id(o) not in self._pairs]
        for one in objects:
            self._add(one, object.__new__(type(one)))
        for one in objects:
            self._copy_variables(one)
        for layer in _held([vars(one) for one in objects], (keras.Layer,)):
            if id(layer) not in self._pairs:  # it belongs to no layer of the model
                self._add(layer, layer)
        memo: dict[int, Any] = {key: after for key, (_, after) in self._pairs.items()}
        with DotNotTrackScope():
            for one in objects:
                vars(memo[id(one)]).update(copy.deepcopy(vars(one), memo))
        for one in objects:
            self._follow_identities(memo[id(one)])
            chosen = getattr(one, "_optimizer_map", None)
            if callable(chosen) and not isinstance(chosen, Mapping) and not one.built:
                memo[id(one)]._optimizer_map = self._choosing(chosen)
        return memo[id(original)]

    def _add(self, before: Any, after: Any) -> None:
        self._pairs[id(before)] = before, after

    def _copy_variables(self, owner: Any) -> None:
        of_slots = {id(slot): weight for _, slot, weight in slots_of_optimizer(owner)}
        for weight in weights_of(owner):
            if id(weight) not in self._pairs:  # of no layer of the model
                self._add(weight, weight)
        for variable in _held([vars(owner)], (keras.Variable,)):
            if id(variable) not in self._pairs:
                weight = of_slots.get(id(variable))
                after = None if weight is None else self._pairs[id(weight)][1]
                self._add(variable, _new(variable, getattr(after, "_layout", None)))

    def _follow_identities(self, copied: Any) -> None:
        """Renews what is known by the `id` of a variable: slots, and the places of weights."""
        ids = {key: id(after) for key, (_, after) in self._pairs.items()}
        for value in vars(copied).values():
            if isinstance(value, Tracker):
                value.stored_ids = {
                    store: {id(item) for item in items}
                    for store, (_, items) in value.config.items()
                }
            # In place, and past Keras's tracking: objects may share the dict or set.
            elif isinstance(value, dict) and not ids.keys().isdisjoint(value):
                items = {ids.get(key, key): item for key, item in value.items()}
                dict.clear(value)
                dict.update(value, items)
            elif isinstance(value, set) and not ids.keys().isdisjoint(value):
                known = {ids.get(key, key) for key in value}
                set.clear(value)
                set.update(value, known)

    def _choosing(self, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function by which a `MultiOptimizer` chooses optimizers, for the copy's weights.

        The function itself would return optimizers of the original.
        """
        chosen = {id(after): self.of(choose(w)) for w, after in self._weights if w.trainable}

        @functools.wraps(choose)
        def of_counterpart(variable):
            return chosen[id(variable)] if id(variable) in chosen else choose(variable)

        return of_counterpart


def _held(values: Iterable[Any], kinds: tuple[type, ...]) -> Iterator[Any]:
    """Objects of some classes in values, in containers and in optimizers of these; each once."""
    seen: set[int] = set()
    waiting = list(values)[::-1]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            yield value
        inner: list[Any] = []
        if isinstance(value, COPIED):
            inner = list(vars(value).values())
        elif isinstance(value, Mapping):  # `OptimizerMap` has a default beside its items
            inner = [*value.values(), getattr(value, "default_optimizer", None)]
        elif isinstance(value, list | tuple | set | frozenset):
            inner = list(value)
        waiting += inner[::-1]


def _new(variable: Any, layout: Any) -> Any:
    made = keras.Variable(
        # A train step donates its model's arrays; the other model would lose them.
        jnp.copy(variable.value),
        dtype=variable.dtype,
        trainable=variable.trainable,
        autocast=variable._autocast,
        aggregation=variable.aggregation,
        layout=layout,
        name=variable.name,
    )
    made._path = variable.path
    return made
