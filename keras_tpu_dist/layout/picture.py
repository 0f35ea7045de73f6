"""The picture for `strategy.show`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.layout.explain import explain_model
from keras_tpu_dist.layout.placement import Placement
from keras_tpu_dist.show.model import ModelPicture
from keras_tpu_dist.show.pictures import (
    MeshPicture,
    TensorPicture,
    picture_of_mesh,
    picture_of_tensor,
)

Picture = TensorPicture | MeshPicture | ModelPicture


def picture_of(
    what: Any,
    mesh: Mesh,
    placement: Callable[[Any], Placement],
    layout: Callable[[Any], tuple[NamedSharding, str]],
) -> Picture:
    """Draws a mesh, a model, a variable or an array.

    Args:
        what: What to draw; `None` for the mesh.
        mesh: The strategy's mesh.
        placement: Returns the placement of a model.
        layout: Returns the layout of a variable, and a warning if it is uncertain.
    """
    if what is None:
        return picture_of_mesh(mesh)
    if isinstance(what, keras.distribution.DeviceMesh):
        return picture_of_mesh(what.backend_mesh)
    if isinstance(what, Mesh):
        return picture_of_mesh(what)
    if isinstance(what, keras.Model):
        return ModelPicture(explain_model(what, placement(what), mesh, {}))
    if isinstance(what, keras.Variable):
        sharding, note = layout(what)
        return dataclasses.replace(picture_of_tensor(what.path, what.shape, sharding), note=note)
    if isinstance(what, jax.Array) and isinstance(what.sharding, NamedSharding):
        return picture_of_tensor("array", what.shape, what.sharding)
    raise value_error(
        "show draws the mesh, a model, a variable or an array on the mesh.",
        received={"what": type(what).__name__},
        fix="Call strategy.show(), or pass one of these.",
    )
