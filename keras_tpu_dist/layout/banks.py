"""Banks: the kernels of experts, which a layer keeps together along a first dimension."""

from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.layout.flow import NotTraced, flow_of

# (experts, features, units)
_RANK = 3


def banks_of(layer: Any) -> list:
    """The kernels of experts, if a layer has some: with three dimensions, the first one equal.

    Args:
        layer: A built layer.
    """
    weights = _keras.own_variables(layer)
    banks = [w for w in weights if w.trainable and len(w.shape) == _RANK]
    sizes = {w.shape[0] for w in banks}
    # A first dimension of 1 is only there for broadcasting, as in a table of positions.
    return banks if len(banks) > 1 and len(sizes) == 1 and sizes != {1} else []


def biases_of(layer: Any, banks: list) -> list:
    """The biases of experts, `(experts, units)`; a router's kernel is none.

    Args:
        layer: A built layer.
        banks: Its kernels of experts.
    """
    units = {w.shape[2] for w in banks}
    return [
        w
        for w in _keras.own_variables(layer)
        if w.trainable and len(w.shape) == 2 and w.shape[0] == banks[0].shape[0]
        if w.shape[1] in units
    ]


def tokens_are_sent_to(model: Any) -> frozenset[int]:
    """The ids of experts' weights to which tokens come by expert, as in GShard's layers.

    Args:
        model: A built model.
    """
    found: set[int] = set()
    for layer in _keras.flatten_layers(model):
        banks = banks_of(layer)
        if not banks:
            continue
        variables = _keras.variables_of(layer)
        number = {id(variable): n for n, variable in enumerate(variables)}
        try:
            flow = flow_of(layer, variables)
        except NotTraced:
            continue
        if all(flow.multiplies_by(number[id(bank)], 0) for bank in banks):
            found.update(map(id, (*banks, *biases_of(layer, banks))))
    return frozenset(found)
