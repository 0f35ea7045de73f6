"""Which blocks run as one loop, which do not and why, and what keeps it."""

import copy
import logging
import pickle

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close
from jax.ad_checkpoint import checkpoint_name

import keras_tpu_dist as ktd
from keras_tpu_dist.memory.scan_blocks import is_scanned

L = keras.layers
WIDTH = 4


def block(name, units=WIDTH, activation="relu"):
    return keras.Sequential([L.Dense(8, activation), L.Dense(units)], name=name)


def row(blocks=3, kinds=block):
    x = inputs = keras.Input((WIDTH,))
    for i in range(blocks):
        x = kinds(f"block_{i}")(x)
    return keras.Model(inputs, L.Dense(1)(x), name="model")


def loops(model, *inputs):
    """How many loops there are in a model's compiled call."""
    groups = [model.trainable_variables, model.non_trainable_variables]
    values = [[v.value for v in group] for group in groups]
    return str(jax.make_jaxpr(model.stateless_call)(*values, *inputs)).count(" scan[")


def rows(count=5):
    return np.random.default_rng(0).normal(size=(count, WIDTH)).astype("float32")


def test_equal_blocks_are_one_loop():
    model = row()
    report = ktd.scan_blocks(model)
    assert str(report) == (
        "scan_blocks: model 'model'\n"
        "  3 blocks Sequential as one: 'model/block_0' to 'model/block_2'"
    )
    assert report.to_dict()["runs"][0]["kind"] == "Sequential"
    assert loops(model, rows()) == 1
    assert ktd.scan_blocks(model, False).runs == ()
    assert loops(model, rows()) == 0


def test_layers_of_a_sequential_model_need_not_hold_layers():
    model = keras.Sequential(
        [keras.Input((3,)), *(L.Dense(WIDTH, "relu", name=f"dense_{i}") for i in range(4))],
        name="model",
    )
    report = ktd.scan_blocks(model)  # the first has a kernel of another shape
    assert report.runs[0].paths == ("model/dense_1", "model/dense_2", "model/dense_3")


class Looping(keras.Model):
    """Blocks in a list; `between` is what happens between them."""

    def __init__(self, between=lambda x: x):
        super().__init__(name="model")
        self.blocks = [block(f"block_{i}") for i in range(4)]
        self.between = between

    def build(self, shape):
        for each in self.blocks:
            each.build(shape)

    def call(self, x):
        for each in self.blocks:
            x = self.between(each(x))
        return x


def test_a_loop_over_blocks_in_a_subclassed_model_is_seen():
    model = Looping()
    model.build((None, WIDTH))
    with pytest.raises(ValueError, match="Give those of a subclassed model"):
        ktd.scan_blocks(model)
    assert len(ktd.scan_blocks(model, inputs=rows()).runs[0].paths) == 4
    assert loops(model, rows()) == 1


def test_what_lies_between_blocks_is_said():
    model = Looping(between=keras.ops.tanh)
    model.build((None, WIDTH))
    report = ktd.scan_blocks(model, inputs=rows())
    assert report.runs == ()
    assert not is_scanned(model)
    assert "no two equal blocks follow one another" in str(report)
    assert "no equal block feeds it directly" in str(report)


class Scaling(L.Layer):
    """Has a factor of which its config says nothing."""

    def build(self, shape):
        self.dense = L.Dense(WIDTH)
        self.dense.build(shape)

    def call(self, x):
        return self.factor * self.dense(x)


def factored(kind, *factors):
    left = iter(factors)

    def make(name):
        layer = kind(name=name)
        layer.factor = next(left)
        return layer

    return row(len(factors), make)


def test_a_function_of_the_user_may_have_the_name_of_a_block():
    @jax.jit
    def equal_block_0(x):
        return checkpoint_name(2 * x, "equal_block_1")

    class After(Looping):
        def call(self, x):
            return super().call(equal_block_0(x))

    model = After()
    model.build((None, WIDTH))
    expected = model.predict(rows(), verbose=0)
    assert len(ktd.scan_blocks(model, inputs=rows()).runs[0].paths) == 4
    assert loops(model, rows()) == 1
    assert_close(model.predict(rows(), verbose=0), expected)


def test_blocks_that_compute_something_else_are_told_apart():
    report = ktd.scan_blocks(factored(Scaling, 1.0, 1.0, 0.5, 0.5, 0.25))
    assert [run.paths for run in report.runs] == [
        ("model/block_0", "model/block_1"),
        ("model/block_2", "model/block_3"),
    ]
    ((path, why),) = report.left_out
    assert path == "model/block_4"
    assert "computes something else" in why


def turned(x, factor):
    """What it is given; its gradient is multiplied by a factor that no program shows."""

    @jax.custom_vjp
    def identity(x):
        return x * 1.0

    identity.defvjp(lambda x: (identity(x), None), lambda _, gradient: (gradient * factor,))
    return identity(x)


class Turning(Scaling):
    def call(self, x):
        return keras.ops.silu(turned(self.dense(x), self.factor))


class TurningByItself(Scaling):
    """Its rule reads the factor off the layer."""

    def call(self, x):
        identity = jax.custom_vjp(lambda x: x * 1.0)
        identity.defvjp(lambda x: (identity(x), None), lambda _, g: (g * self.factor,))
        return identity(self.dense(x))


class WithoutConfig(TurningByItself):
    def get_config(self):
        raise NotImplementedError


def test_rules_for_gradients_that_differ_are_told_apart():
    report = ktd.scan_blocks(factored(Turning, 1.0, 1.0, -1.0, -1.0))
    assert [run.paths for run in report.runs] == [
        ("model/block_0", "model/block_1"),
        ("model/block_2", "model/block_3"),
    ]


def test_rules_that_refer_to_layers_are_told_apart_by_what_those_hold():
    report = ktd.scan_blocks(factored(TurningByItself, 1.0, 1.0, -1.0))
    assert [run.paths for run in report.runs] == [("model/block_0", "model/block_1")]
    arrays = np.float32(1.0), np.float32(-1.0)
    assert ktd.scan_blocks(factored(TurningByItself, *arrays)).runs == ()
    assert ktd.scan_blocks(factored(WithoutConfig, 1.0, -1.0)).runs == ()


class Masking(Scaling):
    """Multiplies by an array of its own; a program's text has only the array's shape."""

    def call(self, x):
        table = np.ones((400, WIDTH), "float32")
        table[200] = self.factor
        return self.dense(x) * keras.ops.sum(table, 0)


class Calling(Scaling):
    """Calls Python, of which a program has only the function's address."""

    def call(self, x):
        y = self.dense(x)
        jax.debug.callback(lambda value: value * self.factor, y)
        return y


class Waiting(Scaling):
    """Has no gradients."""

    def call(self, x):
        return jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y + self.factor, self.dense(x))


def test_what_a_text_does_not_say_tells_blocks_apart():
    report = ktd.scan_blocks(factored(Masking, 1.0, 1.0, 2.0))
    assert [run.paths for run in report.runs] == [("model/block_0", "model/block_1")]
    report = ktd.scan_blocks(factored(Calling, 1.0, 1.0))
    assert report.runs == ()
    assert "calls Python functions" in str(report)
    report = ktd.scan_blocks(factored(Waiting, 1.0, 1.0))
    assert report.runs == ()
    assert "its gradients cannot be traced (ValueError)" in str(report)


def test_other_configs_and_trainability_end_a_run():
    kinds = iter(["relu", "relu", "tanh", "relu", "relu"])
    model = row(5, lambda name: block(name, activation=next(kinds)))
    report = ktd.scan_blocks(model)
    assert [len(run.paths) for run in report.runs] == [2, 2]
    assert report.left_out == (
        ("model/block_2", "its config or weights differ from those of the blocks beside it"),
    )
    model.get_layer("block_0").trainable = False
    assert [len(run.paths) for run in ktd.scan_blocks(model).runs] == [2]


def test_blocks_fed_by_several_are_left_out():
    x = inputs = keras.Input((WIDTH,))
    first = [x := block(f"down_{i}")(x) for i in range(3)]
    for i, each in enumerate(reversed(first)):
        x = Joining(name=f"up_{i}")(x, each)
    report = ktd.scan_blocks(keras.Model(inputs, x, name="model"))
    assert [run.paths for run in report.runs] == [("model/down_0", "model/down_1", "model/down_2")]
    assert "neither the block before's output nor the same for both" in str(report)


class Joining(L.Layer):
    """Takes two inputs."""

    def build(self, x_shape, other_shape):
        self.dense = L.Dense(WIDTH)
        self.dense.build(x_shape)

    def call(self, x, other):
        return self.dense(x) + other


def test_models_that_cannot_be_looked_into():
    with pytest.raises(ValueError, match=r"model that is built\. Received: model='model'"):
        ktd.scan_blocks(keras.Sequential([block("a"), block("b")], name="model"))
    with pytest.raises(ValueError, match=r"equal blocks in a model\. Received: model=3"):
        ktd.scan_blocks(3)
    model = Looping()
    model.build((None, WIDTH))
    with pytest.raises(ValueError, match=r"Give the model's inputs"):
        ktd.scan_blocks(model, inputs=np.zeros((2, WIDTH + 1), "float32"))


def test_calls_that_are_not_compiled_run_block_by_block(caplog):
    model = row()
    before = model(rows())
    ktd.scan_blocks(model)
    with caplog.at_level(logging.INFO, "keras_tpu_dist"):
        assert_close(model(rows()), before, 0.0)
        model(rows())
    assert [r.message for r in caplog.records if "outside of compiled code" in r.message] == [
        "scan_blocks: model 'model' is called outside of compiled code, so its blocks run one "
        "by one"
    ]


def test_copies_and_files_keep_it(tmp_path):
    model = row()
    ktd.scan_blocks(model)
    model.save(tmp_path / "model.keras")
    copies = {
        "file": keras.models.load_model(tmp_path / "model.keras"),
        "copy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "config": type(model).from_config(model.get_config()),
    }
    for name, each in copies.items():
        assert is_scanned(each), name
        assert loops(each, rows()) == 1, name
    assert not is_scanned(keras.models.clone_model(model))


def test_weights_files_are_those_of_the_plain_model(tmp_path):
    model, plain = row(), row()
    ktd.scan_blocks(model)
    model.save_weights(tmp_path / "model.weights.h5")
    plain.load_weights(tmp_path / "model.weights.h5")
    assert_close(plain.get_weights(), model.get_weights(), 0.0)
    assert_close(model.predict(rows(), verbose=0), plain.predict(rows(), verbose=0), 1e-6)
