"""Makes layers that compute all experts for every token compute only the chosen ones."""

from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.layout.flow import NotTraced, traced_call
from keras_tpu_dist.programs.answers import Answer, forget, keep
from keras_tpu_dist.programs.experts.dense import chosen_sums
from keras_tpu_dist.programs.experts.layer import ALL, ChosenExperts, kernels_of, mark
from keras_tpu_dist.programs.graph import Graph, graph_of
from keras_tpu_dist.programs.passes import route

_NOT_SHOWN = f"{ALL}: its call does not show a sum over experts that top_k has chosen"


def route_experts(model: Any) -> list:
    """Makes the mixtures of experts in a model compute only the experts that tokens have chosen.

    Args:
        model: A built model.

    Returns:
        The changed layers. Layers whose call does not show the choice of `top_k` are not changed.
    """
    routed: list = []
    others: list = []
    for layer in reversed(_keras.flatten_layers(model)):
        inside = _keras.flatten_layers(layer)
        if any(mark.of(inner) for inner in inside if inner is not layer) or not kernels_of(layer):
            continue
        try:
            graph = graph_of(traced_call(layer))
        except NotTraced:
            continue
        forget(ChosenExperts.name, layer)
        if chosen_sums(graph):
            _write(layer, True)
            routed.append(layer)
        elif _chooses(graph) and not any(other in inside for other in others):
            others.append(layer)
            keep(ChosenExperts.name, layer, [Answer(layer.path, _NOT_SHOWN)])
    return routed


def is_routed(layer: Any) -> bool:
    """Whether a layer computes only the experts that tokens have chosen.

    Args:
        layer: The layer.
    """
    return bool(mark.of(layer))


def _chooses(graph: Graph) -> bool:
    return any(operation.name == "top_k" for operation in graph.operations)


def _write(layer: Any, value: bool | None) -> None:
    mark.write(layer, value)
    if value:
        route(ChosenExperts(), type(layer))
        _keras.install()  # for saved models


@mark.restored_by
def _restored(layer: Any, value: Any) -> None:
    _write(layer, bool(value) or None)
