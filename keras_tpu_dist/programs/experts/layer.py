"""Calls of layers that compute only the chosen experts of each token."""

import logging
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, entry_names
from keras_tpu_dist.programs.answers import (
    Answer,
    CallContext,
    Level,
    Rewritten,
    Why,
    WrittenProgram,
)
from keras_tpu_dist.programs.experts.dense import computed
from keras_tpu_dist.programs.experts.routed import Where

# On the layers of a converted model.
mark = _keras.LayerMark("_keras_tpu_dist_experts", saved=True)

CHOSEN = "only the chosen experts of each token are computed"
ALL = "computes all experts for every token"
_WAITS = f"{CHOSEN}, if a call has more than one token: a step decides"


class ChosenExperts:
    """The pass that computes only the experts that `top_k` has chosen, in layers of `convert`."""

    name = "experts"
    level = Level.LAYER

    def wants(self, layer: Any, strategy: Any) -> bool:
        """Whether `convert` has marked a layer."""
        return bool(mark.of(layer))

    def rewritten(self, program: WrittenProgram, where: CallContext) -> Rewritten | Why:
        """The call with the chosen experts alone, or why it computes all."""
        layer = where.layer
        outputs = computed(program.jaxpr, program.args, lambda count: _where(where, count))
        if outputs is not None:
            return Rewritten(outputs, [Answer(layer.path, CHOSEN, True)])
        shapes = [jax.numpy.shape(x) for x in program.args]
        answer = Answer(
            layer.path,
            f"{ALL}: the choice cannot be seen in a call with arguments of the shapes {shapes}",
            level=logging.WARNING,
        )
        return Why([answer])

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """The layers that are marked."""
        layers = _keras.flatten_layers(model)
        return [Answer(layer.path, _WAITS) for layer in layers if self.wants(layer, strategy)]


def kernels_of(layer: Any, count: int | None = None) -> list:
    """Weights of a layer and its sublayers that may be kernels of experts, of `count` experts."""
    weights = [w for w in layer.weights if len(w.shape) > 2 and w.shape[0] > 1]
    return [w for w in weights if count is None or w.shape[0] == count]


def _where(call: CallContext, count: int) -> Where:
    """Which mesh axes split the tokens and the experts of a layer."""
    if call.mesh is None or call.mesh.size == 1:
        return Where()
    # The current layouts: a plan decides after a variable is created, and may change its layout.
    entries = {_first_axes(_keras.variable_layout(w)) for w in kernels_of(call.layer, count)}
    experts = entries.pop() if len(entries) == 1 else ()
    if count % axis_size(call.mesh, experts):
        experts = ()
    return Where(call.mesh, call.data_axes, experts)


def _first_axes(layout: Any) -> tuple[str, ...]:
    """The mesh axes that split the first dimension."""
    axes = layout.spec if isinstance(layout, NamedSharding) else getattr(layout, "axes", ())
    return entry_names((*axes, None)[0])
