"""Pairs the layers and variables of a model with those of a copy, by their places in it.

A place is the attribute, position or key under which a layer holds something. Two lists in the same
order are not enough: one model may hold more than the other, such as the carried states of a
recurrent layer, and every pair behind that would be wrong.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import tree

from keras_tpu_dist._keras.structure import Functional, sublayers
from keras_tpu_dist.common.errors import value_error

Pair = tuple[Any, Any]
# Attributes that list again what other attributes hold.
_LISTS = frozenset(
    ("_layers", "_seed_generators", "_trainable_variables", "_non_trainable_variables")
)


@dataclass(frozen=True)
class Pairs:
    """The layers and variables of a model, each with its counterpart in a copy.

    Attributes:
        layers: A layer comes after all layers that hold it.
        variables: Weights, random states, and carried states of recurrent layers.
    """

    layers: list[Pair]
    variables: list[Pair] = field(default_factory=list)


def paired(model: Any, copied: Any) -> Pairs:
    """Pairs the layers and the variables of a model with those of a copy.

    Raises:
        ValueError: If one has a layer or a variable that the other does not have, other than a
            carried state, or if two at the same place have different classes or shapes.

    Public replacement: none; `Model.variables` says of a variable neither its layer nor its
    attribute.
    """
    pairs = Pairs(paired_layers(model, copied))
    known: dict[int, Any] = {}
    back: dict[int, Any] = {}
    for before, after in pairs.layers:
        matched = _paired_variables(before, after)
        for one, other in matched:
            # Layers may share a variable; then their counterparts share one too.
            same = known.setdefault(id(one), other) is other
            if not same or back.setdefault(id(other), one) is not one:
                raise _unlike("shared variables", before, [one.path], [other.path])
        pairs.variables.extend(matched)
    return pairs


def paired_layers(model: Any, copied: Any) -> list[Pair]:
    """Pairs the layers of a model with those of a copy. See `paired`."""
    counterparts: dict[int, Any] = {}
    pairs: list[Pair] = []

    def visit(before: Any, after: Any) -> None:
        if id(before) in counterparts:
            if counterparts[id(before)] is not after:
                raise value_error(
                    "A layer that is used in several places must be one layer in the converted "
                    "model too.",
                    received=f"layer {before.name!r}, which several models or layers hold. Keras "
                    "makes it again for each of them.",
                    fix="Build the model with layers of keras_tpu_dist.layers instead of "
                    "converting it.",
                )
            return
        counterparts[id(before)] = after
        for pair in reversed(_paired_sublayers(before, after)):
            visit(*pair)
        pairs.append((before, after))

    visit(model, copied)
    if len({id(after) for _, after in pairs}) != len(pairs):
        names = [(before.name, after.name) for before, after in pairs]
        raise _unlike("layers", model, *zip(*names, strict=True))
    return pairs[::-1]


def repeat_names(pairs: Pairs) -> None:
    """Gives layers and variables the names and paths of their counterparts.

    Keras numbers layers without a name, and a layer that is built from its config does not know the
    layers around it.
    """
    for before, after in pairs.layers:
        after.name, after._path = before.name, before._path
    for before, after in pairs.variables:
        after._name, after._path = before._name, before._path


def _paired_sublayers(before: Any, after: Any) -> list[Pair]:
    here, there = sublayers(before), sublayers(after)
    if isinstance(before, keras.Sequential | Functional):
        names = [{layer.name: layer for layer in each} for each in (here, there)]
        # In the graph of a model without its names, the order is that of the calls.
        by_name = not isinstance(before, keras.Sequential) and names[0].keys() == names[1].keys()
        pairs = [(layer, names[1][layer.name]) for layer in here] if by_name else []
        left, left_there = ([], []) if by_name else (here, there)
    else:
        pairs, left, left_there = _at_one_place(before, after, here, there)
    if len(left) == len(left_there):
        pairs += zip(left, left_there, strict=True)
    elif left or left_there:
        raise _unlike("layers", before, *([layer.name for layer in each] for each in (here, there)))
    for one, other in pairs:
        if not (isinstance(other, type(one)) or isinstance(one, type(other))):
            words = [f"{each.name} ({type(each).__name__})" for each in (one, other)]
            raise _unlike("layers", before, words[:1], words[1:])
    order = {id(layer): number for number, layer in enumerate(here)}
    return sorted(pairs, key=lambda pair: order[id(pair[0])])


def _paired_variables(before: Any, after: Any) -> list[Pair]:
    """Pairs of two layers' own variables; only the second may have further carried states."""
    here, there = _own(before), _own(after)
    pairs, left, left_there = _at_one_place(before, after, here, there)
    states = {id(state) for state in _states(after)}
    others = [variable for variable in left_there if id(variable) not in states]
    # Variables that no attribute holds.
    alike = list(map(_kind, left)) == list(map(_kind, others))
    if not alike or any(one.shape != other.shape for one, other in pairs):
        words = [[f"{v.path} {tuple(v.shape)}" for v in each] for each in (here, there)]
        raise _unlike("variables", before, *words)
    return [*pairs, *zip(left, others, strict=True)]


def _at_one_place(
    before: Any, after: Any, here: list, there: list
) -> tuple[list[Pair], list[Any], list[Any]]:
    """Pairs of what two layers hold at the same place, and what of both lists is left."""
    wanted, wanted_there = ({id(item) for item in each} for each in (here, there))
    pairs: dict[int, Pair] = {}
    for name, held in vars(before).items():
        for one, other in _held(held, vars(after).get(name)) if name not in _LISTS else ():
            if id(one) not in wanted or id(other) not in wanted_there:
                continue
            if pairs.setdefault(id(one), (one, other))[1] is not other:
                raise _unlike(f"attribute {name!r}", before, [one.path], [other.path])
    taken = {id(other) for _, other in pairs.values()}
    left = [item for item in here if id(item) not in pairs]
    return list(pairs.values()), left, [item for item in there if id(item) not in taken]


def _held(one: Any, other: Any) -> Iterator[Pair]:
    """Pairs of layers and variables at the same places in two values of an attribute."""
    for kind in (keras.Layer, keras.Variable):
        if isinstance(one, kind) and isinstance(other, kind):
            yield one, other
            return
    if isinstance(one, keras.random.SeedGenerator) and isinstance(other, type(one)):
        yield one.state, other.state
        return
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() == other.keys():
            one, other = list(one.values()), [other[key] for key in one]
        else:  # such as names that Keras numbers, so the order of insertion counts
            one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        # What only one of them holds stays without a counterpart.
        for pair in zip(one, other, strict=False):
            yield from _held(*pair)


def _own(layer: Any) -> list:
    """The variables of a layer, random and carried states too, without those of its sublayers."""
    inner = {id(variable) for sublayer in sublayers(layer) for variable in sublayer.variables}
    found = {id(v): v for v in (*layer.variables, *_states(layer))}
    return [variable for key, variable in found.items() if key not in inner]


def _states(layer: Any) -> list:
    """The carried states of a recurrent layer; Keras's own does not count them as variables."""
    states = tree.flatten(layer.states) if isinstance(layer, keras.layers.RNN) else []
    return [state for state in states if isinstance(state, keras.Variable)]


def _kind(variable: Any) -> tuple[str, tuple]:
    """A variable's name without Keras's number, and its shape."""
    return re.sub(r"_\d+$", "", variable.name), tuple(variable.shape)


def _unlike(what: str, layer: Any, before: Any, after: Any) -> ValueError:
    return value_error(
        f"The converted model must have the {what} of the original.",
        received=f"{layer.path or layer.name!r} with {list(before)}, converted to {list(after)}.",
        fix="Check that the model's get_config() returns all arguments of its __init__.",
    )
