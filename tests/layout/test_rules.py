import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, data, mlp
from jax.sharding import Mesh, PartitionSpec

import keras_tpu_dist as ktd
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.layout.rules import LayoutRules


def test_patterns_match_whole_segments_from_the_right():
    rules = LayoutRules([("dense/kernel", ("model",))])
    assert rules.match("dense/kernel") == 0
    assert rules.match("sequential/dense/kernel") == 0
    assert rules.match("sequential/my_dense/kernel") is None
    assert rules.match("dense/kernel/part") is None


def test_flags_for_a_whole_pattern():
    rules = LayoutRules([("(?i)Dense/kernel", (None, "model")), ("(?s)^a.b$", ())])
    assert rules.match("m/dense/Kernel") == 0
    assert rules.match("m/my_dense/kernel") is None
    assert rules.matches("a\nb") == [1]
    assert rules.match("m/a\nb") is None
    mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"))
    stock = keras.distribution.LayoutMap(mesh)
    stock["(?i).*Dense/kernel"] = (None, "model")
    assert ktd.TPUStrategy(layout=stock).mesh.shape == {"data": 4, "model": 2}
    assert LayoutRules.from_layout_map(stock).match("m/dense/kernel") == 0
    assert LayoutRules.from_layout_map(stock).match("m/dense/kernel/x") is None


def test_the_first_rule_wins_and_the_others_are_told():
    rules = LayoutRules([(r"dense_\d+/kernel", ("a",)), ("kernel", ("b",)), (".*", ())])
    assert rules.matches("m/dense_1/kernel") == [0, 1, 2]
    assert rules.matches("m/dense/kernel") == [1, 2]


def test_json_there_and_back():
    rules = LayoutRules({"a/kernel": (None, ("data", "model")), "b": None})
    assert LayoutRules.from_json(rules.to_json()) == rules
    assert hash(LayoutRules.from_json(rules.to_json())) == hash(rules)


def test_from_layout_map_keeps_full_match():
    mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["dense/kernel"] = (None, "model")
    rules = LayoutRules.from_layout_map(layout_map)
    assert rules.match("dense/kernel") == 0
    assert rules.match("sequential/dense/kernel") is None


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (("kernel", "model"), r"tuple with one entry per dimension.*axes='model'"),
        (("ker(nel", ()), r"regular expression.*pattern='ker\(nel', which fails with"),
        (("kernel", (3,)), r"None, an axis name or a tuple.*entry=3"),
        (("kernel", ("data", "data")), r"only one dimension.*axes=\('data', 'data'\)"),
        (("kernel", (("data", "model"), "model")), r"only one dimension"),
    ],
)
def test_malformed_rules(rule, words):
    with pytest.raises(ValueError, match=words):
        LayoutRules([rule])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[["kernel", "model"]]', r"tuple with one entry per dimension.*axes='model'"),
        ('["kernel"]', r"A layout rule is a \(pattern, axes\) pair"),
        (
            "[nul",
            r"a list of \[pattern, axes\] pairs. Received: json='\[nul', error='Expecting val",
        ),
    ],
)
def test_malformed_json(text, words):
    with pytest.raises(ValueError, match=words):
        LayoutRules.from_json(text)


def test_a_path_that_is_no_pattern_and_has_a_layout_of_its_own(devices):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    with strategy.scope():
        layer = keras.layers.Dense(4, name="a(b")
        layer.build((None, 8))
    layer.kernel._layout = keras.distribution.TensorLayout((None, "model"), strategy.device_mesh)
    assert tuple(strategy.get_variable_layout(layer.kernel).spec) == (None, "model")


def test_unknown_axis_has_a_did_you_mean():
    with pytest.raises(ValueError, match=r"axes of the mesh.*modle.*Did you mean 'model'\?"):
        ktd.TPUStrategy({"data": 4, "model": 2}, [("kernel", (None, "modle"))])
    mesh = keras.distribution.DeviceMesh((8,), ("data",))
    stock = keras.distribution.DeviceMesh((4, 2), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(stock)
    layout_map["kernel"] = ("model",)
    with pytest.raises(ValueError, match="axes of the mesh"):
        ktd.TPUStrategy(mesh, layout_map)


def test_logical_beside_one_of_its_sub_axes(devices):
    assignment = ktd.DeviceAssignment.build(devices, computation_shape=(4,))
    with pytest.raises(ValueError, match=r"all logical sub-axes of the mesh.*'kernel'"):
        ktd.TPUStrategy(assignment, [("kernel", ("logical", "logical_0"))])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("bias", r"more entries.*'sequential/hidden/bias', shape=\(16,\).*rule 0 'bias'"),
        ("out/kernel", r"dimension 1 has 3 elements for 2 shards.*out/kernel.*Make it 2 or 4"),
    ],
)
def test_a_layout_that_a_variable_cannot_have_names_it(path, words):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [(path, (None, "model"))])
    with pytest.raises(ValueError, match=words):
        built(mlp, strategy)


def test_one_layout_has_one_spelling(devices):
    mesh = Mesh(np.array(devices), ("data",))
    assert named_sharding(mesh, (None, None)) == named_sharding(mesh)
    assert named_sharding(mesh, ("data", None)).spec == PartitionSpec("data")


def test_optimizer_slots_follow_their_weight():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    model = built(mlp, strategy)
    model.fit(np.ones((8, 6)), np.zeros(8), verbose=0)
    slots = [v for v in model.optimizer.variables if v.shape == (6, 16)]
    assert len(slots) == 2
    assert all(v.value.sharding.spec == PartitionSpec(None, "model") for v in slots)


@pytest.mark.slow
def test_slots_of_several_optimizers_follow_their_weights():
    kinds = keras.optimizers

    def several():
        model = mlp()
        each = kinds.OptimizerMap(kinds.SGD(0.1, momentum=0.9), {".*hidden/.*": kinds.Adam(0.01)})
        return compiled(model, kinds.MultiOptimizer(each), "sparse_categorical_crossentropy")

    def fit(model):
        model.fit(*data(26), batch_size=13, verbose=0)
        return model.get_weights()

    expected = fit(built(several, None))
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, shard_optimizer=True)
    model = built(several, strategy)
    assert_close(fit(model), expected)
    momentum = [v for v in model.optimizer.variables if v.shape == (6, 16)]
    assert len(momentum) == 2
    assert all(v.value.sharding.spec == PartitionSpec(None, "data") for v in momentum)
    # Twice for Adam's layer, once for the other.
    assert sum(r.slot_bytes for r in strategy.explain(model).rows) == 4 * (2 * 112 + 51)


def test_layouts_on_outputs():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/output", ("data", "model"))])
    assert strategy.get_tensor_layout("m/hidden/output").spec == PartitionSpec("data", "model")
    assert strategy.get_tensor_layout("m/out/output") is None
    model = built(mlp, strategy)
    model.fit(np.ones((13, 6)), np.zeros(13), verbose=0)


def test_a_layout_given_to_the_variable_itself_wins():
    mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"))
    own = keras.distribution.TensorLayout((None, "model"), mesh)
    strategy = ktd.TPUStrategy(mesh, [(".*", ())])
    with strategy.scope():
        variable = keras.Variable(np.ones((4, 4)), layout=own)
    assert variable.value.sharding.spec == PartitionSpec(None, "model")


def test_get_data_layout():
    strategy = ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2})
    assert strategy.get_data_layout((8, 3)).spec == PartitionSpec(("data", "fsdp"))
    assert strategy.get_data_layout(()).spec == PartitionSpec()
    assert ktd.TPUStrategy({"model": 8}).get_data_layout((8,)).spec == PartitionSpec()
    assert jax.device_count() == 8
