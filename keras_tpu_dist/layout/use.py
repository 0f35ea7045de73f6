"""Weights that are used in another layout than the one that they are stored in.

A vocabulary that does not divide is stored by its width. To compute logits from it as it lies, all
devices would add up whole logits, or gather the whole table. So a program begins with
the table by vocabulary, in parts of unequal sizes, which XLA pads: each device sends the parts of
the others, once a step in each direction.
"""

from typing import Any

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, named_sharding, names_in
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.partitioner import in_compiled_code, mesh_here


def note_uses(model: Any, placement: Placement) -> None:
    """Has the calls of a model's layers find weights in the layouts that they use them in.

    Args:
        model: A model.
        placement: Its placement.
    """
    for variable in model.weights:
        _keras.set_use(variable, placement.decisions[id(variable)].used)


def _laid(value: Any, axes: Axes) -> Any:
    """A weight's value as compiled code uses it, but for updates, which are made where it lies."""
    strategy = _keras.active_strategy()
    traced = isinstance(value, jax.core.Tracer) and in_compiled_code()
    if strategy is None or not traced or _keras.in_symbolic_scope() or _keras.in_update():
        return value
    mesh = mesh_here(strategy.mesh)
    # Where one device computes a layer, what it is given is whole.
    free = set(mesh.axis_names) - set(getattr(mesh, "manual_axes", ()))
    if not set(names_in(axes)) <= free:
        return value
    return jax.lax.with_sharding_constraint(value, named_sharding(mesh, axes))


_keras.serve_uses(_laid)
