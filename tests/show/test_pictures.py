import xml.etree.ElementTree as ElementTree

import jax
import keras
import numpy as np
import pytest
from helpers import built, data, mlp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import keras_tpu_dist as ktd
from keras_tpu_dist.show.pictures import picture_of_mesh, picture_of_tensor

MESH = {"data": 2, "model": 2, "expert": 2}


def cells(picture):
    return sum(len(line) for _, grid in picture.panels() for line in grid)


@pytest.mark.parametrize(
    ("shape", "axes", "pieces", "panels", "drawn"),
    [
        ((), (), 1, 1, (None, None)),
        ((8,), ("data",), 2, 1, (None, 0)),
        ((8, 6), (), 1, 1, (0, 1)),
        ((8, 6), (("data", "model"), "expert"), 8, 1, (0, 1)),
        ((4, 6, 8), ("expert", None, "model"), 4, 1, (0, 2)),
        ((4, 6, 8), ("expert", "data", "model"), 8, 2, (1, 2)),
        ((2, 4, 6, 8), ("data", None, "expert", "model"), 8, 2, (2, 3)),
        ((2, 4, 6, 8, 2), (("data", "expert"), None, None, None, None), 2, 1, None),
    ],
)
def test_every_element_is_drawn_once_for_each_holder(shape, axes, pieces, panels, drawn):
    mesh = ktd.TPUStrategy(MESH).mesh
    if shape and len(shape) == 5:
        axes = ("data", None, None, None, None)
    picture = picture_of_tensor("t", shape, NamedSharding(mesh, P(*axes)))
    assert len(picture.pieces) == pieces == cells(picture)
    assert len(picture.panels()) == panels
    if drawn is not None:
        assert (picture.rows, picture.columns) == drawn
    covered = np.zeros(shape, int)
    for piece in picture.pieces:
        covered[tuple(slice(*index) for index in piece.index)] += 1
    assert (covered == 1).all()
    devices = [d for piece in picture.pieces for d in piece.devices]
    assert sorted(devices) == list(range(8))


def test_where_the_shards_of_a_real_array_are():
    strategy = ktd.TPUStrategy(MESH)
    sharding = NamedSharding(strategy.mesh, P("expert", None, ("data", "model")))
    array = jax.device_put(np.zeros((4, 3, 8)), sharding)
    picture = strategy.show(array)
    where = {d: piece.index for piece in picture.pieces for d in piece.devices}
    for shard in array.addressable_shards:
        index = tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape))
        assert where[shard.device.id] == index


def test_text_of_a_four_dimensional_tensor():
    mesh = ktd.TPUStrategy(MESH).mesh
    sharding = NamedSharding(mesh, P("data", None, "expert", "model"))
    text = str(picture_of_tensor("activations", (2, 4, 6, 8), sharding))
    assert "activations (2, 4, 6, 8) ('data', None, 'expert', 'model'): 8 piece(s)" in text
    assert "[0:1, :, rows, columns]" in text
    assert "[1:2, :, rows, columns]" in text
    assert "3:6" in text
    assert "4:8" in text


def test_mesh():
    strategy = ktd.TPUStrategy(MESH)
    text = str(strategy.show())
    assert "mesh {'data': 2, 'model': 2, 'expert': 2}" in text
    assert "data=1" in text
    assert "expert=1" in text

    class Chip:
        def __init__(self, number):
            self.id, self.process_index = number, number // 2
            self.coords = (number % 2, number // 2, 0)

    devices = np.array([Chip(i) for i in range(4)], object).reshape(2, 2)
    fake = type("FakeMesh", (), {"devices": devices, "shape": {"data": 2, "model": 2}})
    picture = picture_of_mesh(fake)
    assert "2 @0,1,0 host 1" in str(picture)
    assert picture.to_dict()["axes"] == {"data": 2, "model": 2}


def test_a_model_is_boxes_coloured_by_axes():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    picture = strategy.show(built(mlp, strategy))
    hidden, out = picture.boxes()
    assert (hidden.words, hidden.bytes, hidden.bytes_per_device) == ("sequential/hidden", 448, 256)
    assert [row.path.rpartition("/")[2] for row in out.rows] == ["kernel", "bias"]
    text = str(picture)
    assert "(None, 'model')" in text
    assert "sequential/hidden" in text
    assert "1 of 4 split over model" in text
    assert "model 2" in text
    # What one device holds of the widest weight, and the rest of it.
    assert "████████░░░░░░░░" in text
    page = picture._repr_html_()
    segment = '<i style="flex:384 1 0;background:#56b4e9" title="sequential/hidden/kernel (6, 16) '
    assert segment in page
    # what the colours mean
    assert '<i style="background:#56b4e9"></i>model 2' in page
    assert '<i style="background:#999999"></i>replicated: whole on every device' in page
    assert "model 2" in picture.svg()
    assert picture.to_dict()["bytes"] == 652


def test_repeated_blocks_are_one_box():
    def build():
        layers = keras.layers
        x = inputs = keras.Input((16,))
        for n in range(12):
            x = layers.Dense(16, name=f"down_{n}")(layers.Dense(64, name=f"up_{n}")(x))
        return keras.Model(inputs, layers.Dense(3, name="out")(x))

    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, {"up.*/kernel": (None, ("data", "model"))})
    picture = strategy.show(built(build, strategy))
    blocks, out = picture.boxes()
    assert (blocks.words, blocks.times, len(blocks.rows)) == ("up_0 .. down_11", 12, 4)
    assert out.words == "out"
    assert "x 12, each" in picture.svg()
    assert "x 12" in str(picture)
    page = picture._repr_html_()
    assert page.count('class="box again"') == 1
    # both axes
    assert "linear-gradient(#e69f00 0% 50%,#56b4e9 50% 100%)" in page


def test_many_layers_of_one_kind_share_a_box():
    def build():
        x = inputs = keras.Input((8,))
        for n in range(30):
            x = keras.layers.Dense(8 + n % 7, name=f"block{n}_up")(x)
            x = keras.layers.Dense(8 + n % 5, name=f"block{n}_down")(x)
        return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))

    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    picture = strategy.show(built(build, strategy))
    boxes = picture.boxes()
    assert [(box.words, box.layers) for box in boxes] == [
        ("block*_up", 30),
        ("block*_down", 30),
        ("out", 1),
    ]
    assert sum(box.bytes for box in boxes) == picture.explanation.bytes
    text = str(picture)
    assert "block*_up, 30 layers: " in text
    assert len(text.splitlines()) < 20
    assert len(ElementTree.fromstring(picture.svg())) > 120


def test_a_weight_whose_model_is_not_known():
    """A plan is of a model: alone, a weight may be laid out otherwise than in it."""

    def build():
        layers = keras.layers
        hidden = [layers.Dense(n, activation="relu", name=f"hidden_{n}") for n in (512, 256)]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])

    strategy = ktd.TPUStrategy({"data": 2, "model": 4}, "tensor_parallel")
    model = build()
    bias = model.layers[0].bias
    assert "planned without its model" in str(strategy.show(bias))
    assert "planned without its model" in strategy.show(bias).svg()
    with strategy.scope():
        model = build()
    rows = strategy.explain(model).rows
    for row, weight in zip(rows, model.weights):
        picture = strategy.show(weight)
        assert (picture.name, picture.layout, picture.note) == (row.path, row.layout, "")
    assert strategy.show(model.layers[0].bias).layout == "('model',)"
    # Rules need no model.
    assert ktd.TPUStrategy({"data": 8}, [("kernel", ("data",))]).show(bias).note == ""


def test_a_model_of_one_layer_and_one_without_weights():
    strategy = ktd.TPUStrategy({"data": 8})
    one = built(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), strategy)
    (box,) = strategy.show(one).boxes()
    assert [row.path.rpartition("/")[2] for row in box.rows] == ["kernel", "bias"]
    none = keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
    picture = strategy.show(none)
    assert picture.boxes() == []
    assert "all 0 replicated" in str(picture)
    assert "the model has no weights" in str(picture)
    assert picture.svg().startswith("<svg")
    assert picture._repr_html_()


def test_a_model_that_is_not_built_says_why_it_has_no_boxes():
    strategy = ktd.TPUStrategy({"data": 8})
    model = keras.Sequential([keras.layers.Dense(3)], name="lazy")
    words = "the model is not built: it has no variables yet; call model.build(input_shape) or fit"
    picture = strategy.show(model)
    for drawn in (str(picture), picture._repr_html_(), picture.svg(), str(strategy.explain(model))):
        assert words in drawn
    model.build((None, 4))
    assert "not built" not in str(strategy.show(model))
    partly = keras.Sequential([model.layers[0], keras.layers.Dense(2)], name="partly")
    assert "only existing variables are listed; call model.build" in str(strategy.show(partly))


def test_looking_at_a_weight_leaves_it_to_the_plan():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    for look in (strategy.show, strategy.get_variable_layout):
        model = built(mlp, strategy)
        look(model.layers[0].kernel)
        model.fit(*data(40), verbose=0)
        assert model.layers[0].kernel.value.sharding.spec == P(None, "model")
        picture = strategy.show(model.layers[0].kernel)
        assert picture.layout == "(None, 'model')"
        assert [piece.devices for piece in picture.pieces] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_svg(tmp_path):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    model = built(mlp, strategy)
    for what in (None, model, model.layers[0].kernel):
        picture = strategy.show(what)
        root = ElementTree.fromstring(picture.svg())
        assert root.findall("{http://www.w3.org/2000/svg}rect")
        picture.save(tmp_path / "p.svg")
        assert (tmp_path / "p.svg").read_text() == picture.svg()
        assert "<" in picture._repr_html_()
        picture.save(tmp_path / "p.html")
        page = (tmp_path / "p.html").read_text()
        assert page == picture.to_html()
        assert page.startswith("<!doctype html>")
        assert all(block in page for block in picture._blocks())
    with pytest.raises(ValueError, match=r"written as an \.svg or \.html file.*path='.*p\.png'"):
        picture.save(str(tmp_path / "p.png"))


def test_a_mesh_of_keras_is_drawn_itself():
    mesh = keras.distribution.DeviceMesh((2, 4), ("rows", "columns"), jax.devices())
    assert ktd.TPUStrategy().show(mesh).axes == {"rows": 2, "columns": 4}


def test_an_ending_in_capitals(tmp_path):
    ktd.TPUStrategy().show().save(tmp_path / "mesh.SVG")
    assert (tmp_path / "mesh.SVG").read_text().startswith("<svg")


def test_its_text_is_no_display_of_a_notebook(monkeypatch):
    """A notebook asks for the text of what it shows: rich would show that too."""
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *given: shown.append(given))
    assert "data=0" in repr(ktd.TPUStrategy({"model": 2, "data": 4}).show())
    assert shown == []


def test_brackets_of_a_rule_are_its_text():
    """Not what rich takes for styles."""
    rules = {"out_?[a-z0-9]*/kernel": ("model", None), "hidden_?[0-9]*[/]kernel": (None, "model")}
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, rules)
    model = built(mlp, strategy)
    text = str(strategy.explain(model))
    assert "out_?[a-z0-9]*" in text
    assert "[/]kernel" in text
    named = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a[b]")], name="[c]")
    assert "[c]/a[b]" in str(strategy.show(named))
