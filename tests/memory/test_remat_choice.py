"""Which layers are computed again: words, paths, blocks, what clones and files keep."""

import logging
import subprocess
import sys
import zipfile

import jax
import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.memory.blocks import blocks, matching
from keras_tpu_dist.memory.remat import LayerPolicies, policy_of

L = keras.layers


def block(name, width=4):
    inner = [L.Dense(2 * width, "tanh", name="up"), L.Dense(width, "tanh", name="down")]
    return keras.Sequential(inner, name=name)


def stack(*names, around=lambda layer: layer):
    layers = [keras.Input((4,)), *(around(block(name)) for name in names)]
    return keras.Sequential([*layers, L.Dense(1, name="head")], name="model")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            "ful",
            r"remat policy is one of 'full', .*Received: policy='ful'\..*Did you mean 'full'\?",
        ),
        (
            {"blok_*": "full"},
            r"must match the path of a layer.*'blok_\*'.*Did you mean 'block_\d'\?",
        ),
        ({"block_*": "ful"}, "Did you mean 'full'"),
    ],
)
def test_what_is_no_policy_or_layer_is_said_once(policy, said):
    with pytest.raises(ValueError, match=said):
        ktd.remat(stack("block_0", "block_1"), policy)


def test_only_layers_are_computed_again():
    with pytest.raises(ValueError, match=r"Only layers and models.*jax\.checkpoint"):
        ktd.remat(lambda x: x)


def test_a_name_that_nothing_has_is_said():
    layer = ktd.remat(block("block"), ["downn"])
    layer.build((None, 4))
    said = r"names in a remat policy.*name='downn'.*Use names among: down, up\. Did you mean 'down'"
    with pytest.raises(ValueError, match=said):
        jax.jit(layer)(np.ones((2, 4), "float32"))
    ktd.remat(layer, None)
    assert policy_of(layer) is None
    jax.jit(layer)(np.ones((2, 4), "float32"))


def test_a_strategy_says_which_pattern_matches_no_layer():
    strategy = ktd.TPUStrategy({"data": 8}, remat={"block_*": "full", "attention": "dots"})
    with strategy.scope():
        model = stack("block_0")
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"match the path of a layer.*pattern='attention'"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("block_*", "model/block_12", True),
        ("block_*", "model/block_12/up", False),
        ("*_block", "model/last_block", True),
        (r"block_\d+", "model/block_12", True),
        (r"block_[13]", "model/block_3", True),
        ("model/*", "model/block_3", True),
        ("lock_3", "model/block_3", False),
        ("block_?", "block_3", True),
    ],
)
def test_a_pattern_of_remat_matches_paths(pattern, path, matches):
    assert matching(pattern, path) is matches


def test_the_first_rule_that_matches_counts_and_none_leaves_a_layer_alone():
    model = stack("block_0", "block_1", "block_2")
    policies = LayerPolicies({"block_1": None, "block_.*": "dots", "block_2/up": "full"})
    policies.choose(model)
    first, second, third, head = model.layers
    assert [policies.of(each) for each in (first, second, third, head)] == [
        "dots",
        None,
        "dots",
        None,
    ]
    # "block_.*" also matches what is within the blocks, which would be computed twice
    assert policies.of(first.layers[0]) is None


class Encoder(L.Layer):
    """Holds blocks in a list, as research code does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [Two(name="a"), Two(name="b")]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Two(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.one, self.two = block("one"), block("two")

    def call(self, x):
        return self.two(self.one(x))


def found(model):
    return [path.partition("/")[2] for path, _ in blocks(model)]


def test_blocks_are_what_a_model_repeats():
    assert found(stack("block_0", "block_1")) == ["block_0", "block_1"]
    backbone = stack("block_0", "block_1")
    backbone.name = "backbone"
    assert found(keras.Sequential([backbone, L.Dense(2)])) == [
        *("backbone/block_0", "backbone/block_1"),
    ]
    x = keras.Input((4,))
    assert found(keras.Model(x, L.Dense(1)(Encoder(name="encoder")(x)))) == [
        *("encoder/a", "encoder/b"),
    ]
    assert found(keras.Model(x, L.Dense(1)(block("only")(x)))) == ["only"]
    plain = keras.Sequential(
        [keras.Input((4,)), L.Dense(3, name="p"), L.ReLU(), L.Dense(1, name="q")]
    )
    assert found(plain) == ["p", "q"]


def test_what_one_word_chose_is_said(caplog):
    with caplog.at_level(logging.INFO, "keras_tpu_dist"):
        LayerPolicies("full").choose(stack("block_0", "block_1"))
    assert "2 layer(s) of model 'model' are recomputed, from 'model/block_0' to" in caplog.text


def policies(model):
    return {layer.name: policy_of(layer) for layer in _keras.flatten_layers(model)}


def test_clones_configs_and_files_keep_it(tmp_path):
    inner = ktd.remat(block("inner"), ["up"])
    outer = ktd.remat(keras.Sequential([inner, L.Dense(4, name="last")], name="outer"), "dots")
    model = keras.Sequential([keras.Input((4,)), outer, ktd.remat(L.Dense(4, name="own"))])
    model.compile("sgd", "mse")
    expected = policies(model)
    assert {name: p for name, p in expected.items() if p} == {
        **{"outer": "dots", "inner": ("up",), "own": "full"},
    }
    own = model.layers[1].get_config()
    assert own == L.Dense(4, name="own").get_config()  # the keys are those of stock Keras
    assert policies(type(outer).from_config(outer.get_config()))["outer"] == "dots"
    assert policies(keras.models.clone_model(model)) == expected
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert policies(loaded) == expected
    assert policies(keras.models.model_from_json(model.to_json())) == expected
    x = np.ones((3, 4), "float32")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert b"remat" in zipfile.ZipFile(path).read("config.json")


PLAIN = """
import sys, keras
model = keras.models.load_model(sys.argv[1])
assert "keras_tpu_dist" not in sys.modules
model.fit(keras.ops.ones((3, 4)), keras.ops.ones((3, 4)), verbose=0)
"""


@pytest.mark.slow
def test_a_file_loads_where_this_package_is_not_installed(tmp_path):
    model = keras.Sequential([keras.Input((4,)), ktd.remat(L.Dense(4))])
    model.compile("sgd", "mse")
    path = tmp_path / "model.keras"
    model.save(path)
    subprocess.run([sys.executable, "-c", PLAIN, str(path)], check=True, timeout=300)


def residuals(layer, x):
    """Shapes of what a layer's forward pass keeps, beside its weights."""
    weights = [v.value for v in layer.trainable_variables]

    def forward(weights, x):
        return layer.stateless_call(weights, [], x)[0]

    kept = jax.eval_shape(lambda *arguments: jax.vjp(forward, *arguments)[1], weights, x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    for weight in weights:
        if weight.shape in shapes:
            shapes.remove(weight.shape)
    return sorted(shapes)


def test_only_what_the_policy_keeps_is_kept():
    layer = block("block")
    layer.build((None, 4))
    x = jax.ShapeDtypeStruct((3, 4), "float32")
    # How much the plain layer keeps is JAX's to say, and differs between its versions.
    assert len(residuals(layer, x)) > len(residuals(ktd.remat(layer, "dots"), x))
    assert residuals(ktd.remat(layer, "full"), x) == [(3, 4)]
    assert residuals(ktd.remat(layer, ["up"]), x) == [(3, 4), (3, 8)]
    assert residuals(ktd.remat(layer, "dots"), x) == [(3, 4), (3, 4), (3, 8)]


def test_names_given_in_the_code_are_kept():
    class Named(L.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(4, 4), name="w")

        def call(self, x):
            h = jax.ad_checkpoint.checkpoint_name(keras.ops.tanh(x @ self.w), "hidden")
            return keras.ops.sin(keras.ops.exp(h))

    layer = ktd.remat(Named(), ["hidden"])
    layer.build((None, 4))
    assert residuals(layer, jax.ShapeDtypeStruct((3, 4), "float32")) == [(3, 4), (3, 4)]


def program(model, kind):
    x = np.ones((2, 4), "float32")
    weights = [v.value for v in model.trainable_variables]

    def forward(weights, x):
        return model.stateless_call(weights, [], x, training=kind == "train")[0].sum()

    function = jax.grad(forward) if kind == "train" else forward
    return jax.jit(function).lower(weights, x).as_text()


def test_what_is_not_differentiated_is_the_same_program():
    again = stack("block_0", around=ktd.remat)
    kept = stack("block_0")
    assert program(again, "predict") == program(kept, "predict")
    assert program(again, "train") != program(kept, "train")
    assert "optimization_barrier" in program(again, "train")


def test_shapes_and_direct_calls_are_as_without():
    seen = []

    class Watching(L.Layer):
        def call(self, x):
            seen.append(x)
            return x

    layer = ktd.remat(Watching())
    x = layer(keras.Input((3,)))
    assert x.shape == (None, 3)
    assert layer(np.ones((2, 3), "float32")).shape == (2, 3)
    assert not isinstance(seen[-1], jax.core.Tracer)


def test_a_model_that_trained_is_compiled_anew_after_remat():
    strategy = ktd.TPUStrategy({"data": 8})
    with strategy.scope():
        model = stack("block_0")
        model.compile("sgd", "mse")
    x, y = np.ones((8, 4)), np.ones((8, 1))
    model.fit(x, y, verbose=0)
    before = model.train_function
    model.fit(x, y, verbose=0)
    assert model.train_function is before
    ktd.remat(model, {"block_0": "full"})
    model.fit(x, y, verbose=0)
    assert model.train_function is not before
