"""One table of colours: each has one meaning, in every picture."""

import pathlib
import re

import jax
import numpy as np
import pytest
from helpers import built, mlp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import keras_tpu_dist as ktd
from keras_tpu_dist.show import colours
from keras_tpu_dist.show.pictures import MeshPicture, picture_of_mesh, picture_of_tensor

ALL = (
    *(*colours.AXES, colours.FURTHER_AXES, colours.NONE, *colours.MEMORY.values()),
    *(colours.FORWARD, colours.BACKWARD, *colours.DISTINCT),
)
PACKAGE = pathlib.Path(ktd.__file__).parent


def light(colour):
    """The relative luminance of WCAG 2."""
    parts = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def test_no_colour_has_two_meanings():
    assert len(set(ALL)) == len(ALL)
    for one in ALL:
        for other in set(ALL) - {one}:
            far = max(abs(int(one[n : n + 2], 16) - int(other[n : n + 2], 16)) for n in (1, 3, 5))
            assert far >= 16, (one, other)


@pytest.mark.parametrize(
    "colour", [*colours.AXES, colours.FURTHER_AXES, colours.NONE, *colours.DISTINCT]
)
def test_text_on_a_colour_can_be_read(colour):
    assert (light(colour) + 0.05) / (light(colours.ON_COLOUR) + 0.05) >= 4.5


def test_no_other_module_has_colours_of_its_own():
    """`page.py` has the ground and the ink of a page, which mean nothing."""
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("colours.py", "page.py"):
            assert not re.findall(r"[\"'](#[0-9a-fA-F]{6})\b", path.read_text()), path


def test_an_axis_has_its_colour_in_every_picture():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    model = built(mlp, strategy)
    known = colours.axis_colours(("data", "model"))
    data, split = known["data"], known["model"]
    mesh, tensor, whole = (strategy.show(what).svg() for what in (None, model.weights[0], model))
    assert data in mesh
    assert all(split in svg for svg in (mesh, tensor, whole))
    assert data not in tensor  # no axis "data" splits it
    assert f'fill="{colours.NONE}"' in whole


def test_more_axes_than_colours():
    names = [f"axis{n}" for n in range(8)]
    words = [words for _, words in colours.axis_legend(dict.fromkeys(names, 2))]
    assert words == [
        *(f"axis{n} 2" for n in range(6)),
        "further axes: axis6 2, axis7 2",
        "replicated: whole on every device",
    ]
    known = colours.axis_colours(names)
    assert known["axis6"] == known["axis7"] == colours.FURTHER_AXES
    assert colours.NONE not in known.values()


def test_panels_that_are_not_drawn_are_told_of():
    devices = tuple(((n, 0, 0), n, 0, None) for n in range(70))
    picture = MeshPicture({"data": 70, "model": 1, "expert": 1}, devices)
    words = "6 of 70 panels are not drawn: data=64 to data=69"
    assert words in picture.svg()
    assert words in str(picture)
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("data", "model"))
    assert "not drawn" not in picture_of_mesh(mesh).svg()


def test_pieces_that_share_a_colour_are_told_of():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    picture = picture_of_tensor("t", (8, 8), NamedSharding(mesh, P("data")))
    assert "share" not in picture.svg()
    assert colours.colours_left_out(9, "pieces") == "9 pieces share 8 colours"
