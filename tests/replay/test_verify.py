"""What the TPU compiler makes of a model computes what one device does, or is found out."""

import json

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.versions import TPU_FAULTS, libtpu_version
from keras_tpu_dist.tools.replay import report
from keras_tpu_dist.tools.shell.main import main

pytestmark = pytest.mark.tpu_compiler
layers, ops = keras.layers, keras.ops
CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Counts(layers.Layer):
    """How often each id came: a sum of scattered rows in the carry of a launch's loop."""

    def build(self, shape):
        self.n = self.add_weight(shape=(96,), initializer="zeros", trainable=False, name="n")

    def call(self, ids):
        flat = ops.reshape(ids, (-1,))
        ones = ops.ones_like(flat, dtype="float32")
        self.n.assign(self.n + ops.segment_sum(ones, flat, num_segments=96))
        return ids


def counts():
    ids = keras.Input((8,), dtype="int32")
    features = layers.GlobalAveragePooling1D()(layers.Embedding(96, 32)(Counts()(ids)))
    model = keras.Model(ids, layers.Dense(4)(features), name="counts")
    model.compile("adam", CLASSES, steps_per_execution=4)
    return model


def mlp():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(4)])
    model.compile("adam", CLASSES, metrics=["accuracy"])
    return model


def cnn():
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(image)
    x = layers.DepthwiseConv2D(3)(layers.BatchNormalization()(layers.MaxPooling2D()(x)))
    model = keras.Model(image, layers.Dense(10)(layers.Dropout(0.3)(layers.Flatten()(x))))
    model.compile(
        keras.optimizers.SGD(0.1, 0.9), CLASSES, steps_per_execution=3, metrics=["accuracy"]
    )
    return model


def lstm():
    """Under "tensor_parallel", tpu7x hands its collectives to a SparseCore."""
    rows = keras.Input((12, 16))
    model = keras.Model(rows, layers.Dense(4)(layers.LSTM(32)(rows)))
    model.compile("sgd", "mse", steps_per_execution=4)
    return model


def kernel_lstm():
    rows = keras.Input((16, 128))
    model = keras.Model(rows, layers.Dense(4)(ktd.layers.LSTM(128)(rows)))
    model.compile("sgd", "mse", steps_per_execution=2)
    return model


def kernel_attention():
    ids = keras.Input((256,), dtype="int32")
    x = layers.Embedding(64, 64)(ids)
    x = x + layers.MultiHeadAttention(2, 64)(x, x, use_causal_mask=True)
    model = keras.Model(ids, layers.Dense(64)(layers.LayerNormalization()(x)))
    model.compile("sgd", CLASSES, steps_per_execution=2)
    return model


def tables():
    ids = keras.Input((4,), dtype="int32")
    table = layers.Embedding(4096, 32, name="table")
    model = keras.Model(ids, layers.Dense(3)(layers.Flatten()(table(ids))))
    model.compile("adagrad", CLASSES, steps_per_execution=2)
    return model


def two_trained_against_each_other():
    class Gan(keras.Model):
        """A generator and a discriminator in one loss, with random numbers of its own."""

        def __init__(self):
            super().__init__(name="gan")
            self.judge = keras.Sequential(
                [keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)]
            )
            self.maker = keras.Sequential(
                [keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(8)]
            )
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x):
            return self.judge(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            noise = keras.random.normal((ops.shape(x)[0], 4), seed=self.seed)
            made = ops.sigmoid(self.judge(self.maker(noise)))
            real = ops.sigmoid(y_pred)
            return -ops.mean(ops.log(real + 1e-3) + ops.log(1 - made + 1e-3) + ops.log(made + 1e-3))

    model = Gan()
    model.build((None, 8))
    return compiled(model, "sgd", "mse", steps_per_execution=4)


def large_table():
    """On v5e, libtpu fetches its parts one by one (`ConcatBitcast`)."""
    ids = keras.Input((4,), dtype="int32")
    table = layers.Embedding(65536, 64, name="table")
    model = keras.Model(ids, layers.Dense(3)(layers.Flatten()(table(ids))))
    model.compile("adagrad", CLASSES, steps_per_execution=2)
    return model


def backbone(mixture=False):
    hub = pytest.importorskip("keras_hub", reason="there is no KerasHub here")
    kind = hub.models.MixtralBackbone if mixture else hub.models.LlamaBackbone
    sizes = {"num_experts": 4, "top_k": 2} if mixture else {}
    inner = kind(
        vocabulary_size=128,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=128,
        dtype="float32",
        **sizes,
    )
    names = ("token_ids", "padding_mask")
    inputs = {name: keras.Input((32,), dtype="int32", name=name) for name in names}
    model = keras.Model(inputs, layers.Dense(128)(inner(inputs)))
    model = ktd.convert(model) if mixture else model
    return compiled(model, "sgd", CLASSES, steps_per_execution=2)


def mixture_of_experts():
    return backbone(mixture=True)


def half():
    rows = keras.Input((16,))
    x = layers.Dense(32, "gelu", dtype="mixed_bfloat16")(rows)
    return compiled(keras.Model(rows, layers.Dense(4)(x)), "sgd", "mse", steps_per_execution=2)


_MODEL = """
import keras


def build():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile('adam', 'mse', steps_per_execution=2)
    return model
"""


def strategy(mesh=None, layout=None, topology="v5e:2x2", **options):
    return ktd.TPUStrategy(mesh, layout, topology=topology, **options)


FSDP = {"data": 2, "fsdp": 2}
MODEL = {"data": 2, "model": 2}
THREE = {"data": 2, "fsdp": 2, "model": 2}


def test_a_launch_of_four_steps_is_equal():
    found = ktd.verify(counts, strategy({"data": 4}), batch_size=13)
    assert found.equal, found
    assert found.largest_difference < 1e-6
    assert (found.steps, found.launches) == (4, 1)
    names = [row.name for row in found.rows]
    assert "counts/n" in names
    assert "embedding/embeddings" in names
    assert any(name.startswith("adam/") for name in names)
    assert "result ['loss']" in names


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4}, MODEL, FSDP], ids=str)
def test_sums_that_libtpu_loses_are_found_with_the_pass(mesh, capsys):
    """openxla/xla 49143, with our guard switched off; a libtpu without it computes right."""
    (fault,) = (f for f in TPU_FAULTS if f.program == "counts")
    off = strategy(mesh, compiler_options={"xla_disable_hlo_passes": ""})
    found = ktd.verify(counts, off, batch_size=16)
    assert found.equal == (not fault.is_in(libtpu_version()))
    if found.equal:
        return
    assert [row.name for row in found.wrong] == ["counts/n"]
    wrong = found.first_wrong_pass
    assert wrong.name == "while-loop-all-reduce-code-motion"
    assert fault.report in wrong.known
    assert found.upstream_report == ""  # it is known
    for words in ("NOT equal", "counts/n", "while-loop-all-reduce-code-motion", fault.report):
        assert words in str(found)
        assert words in found.to_html()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "mesh", "layout", "topology", "rows", "mode"),
    [
        (mlp, {"data": 4}, None, "v5e:2x2", 13, "train"),
        (mlp, MODEL, "tensor_parallel", "v5e:2x2", 13, "evaluate"),
        (mlp, THREE, "auto", "v6e:2x4", 13, "predict"),
        (cnn, THREE, "fsdp", "v5e:2x4", 13, "train"),
        (cnn, FSDP, "fsdp", "v5e:2x2", 16, "evaluate"),
        (cnn, MODEL, "tensor_parallel", "v4:2x2x1", 13, "train"),
        (kernel_lstm, MODEL, "tensor_parallel", "v5e:2x2", 13, "train"),
        (kernel_attention, {"data": 4}, None, "v5e:2x2", 13, "train"),
        (kernel_lstm, {"data": 4}, None, "v5p:2x2x1", 16, "train"),
        (tables, MODEL, "auto", "v5e:2x2", 13, "train"),
        (half, FSDP, "fsdp", "v5e:2x2", 13, "train"),
        (large_table, {"data": 4, "model": 2}, "auto", "v5e:2x4", 13, "train"),
        (backbone, THREE, "auto", "v5e:2x4", 13, "train"),
        (mixture_of_experts, {"data": 2, "fsdp": 4}, "fsdp", "v5e:2x4", 13, "train"),
        (mixture_of_experts, {"data": 8}, None, "v6e:2x4", 13, "train"),
        (lstm, {"data": 4, "model": 2}, "tensor_parallel", "tpu7x:2x2x1", 13, "train"),
        (counts, {"data": 8}, None, "tpu7x:2x2x1", 13, "train"),
    ],
)
def test_models_are_equal(build, mesh, layout, topology, rows, mode):
    found = ktd.verify(
        build, strategy(mesh, layout, topology), batch_size=rows, mode=mode, timeout=300
    )
    assert found.equal, found
    assert bool(found.kernels) == build.__name__.startswith("kernel")


@pytest.mark.slow
def test_a_program_that_would_exchange_rows_in_a_branch_is_not_the_one_that_is_verified():
    """libtpu's loops of products send rows around in the second layer's branch: a hang."""

    def assigned():
        x = keras.Input((7,))
        one = ktd.assign(layers.Dense(16, "relu"), 0)(x)
        other = ktd.assign(keras.Sequential([layers.Dense(8), layers.Dense(16)]), 1)(x)
        model = keras.Model(x, layers.Dense(4)(layers.Add()([one, other])))
        model.compile("adam", "mse")
        return model

    mesh = {"data": 2, "sequence": 2, "model": 2}
    found = ktd.verify(assigned, strategy(mesh, None, "v5e:2x4"), batch_size=8, timeout=300)
    assert found.equal, found
    run = ktd.dry_run(assigned, strategy(mesh, None, "v5e:2x4"), batch_size=8)
    assert not [c for c in run.cost.collectives if c.kind == "collective-permute"]


@pytest.mark.slow
def test_a_built_model_is_verified_with_its_own_values_and_not_changed():
    model = mlp()
    x = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
    y = np.arange(40) % 4
    model.fit(x, y, verbose=0)
    before = model.get_weights()
    slots = [np.array(v) for v in model.optimizer.variables]
    found = ktd.verify(model, strategy({"data": 4}), batch_size=13, x=x, y=y)
    assert found.equal, found
    for one, other in zip((*before, *slots), (*model.get_weights(), *model.optimizer.variables)):
        np.testing.assert_array_equal(one, np.array(other))
    model.fit(x, y, verbose=0)


@pytest.mark.slow
def test_a_model_with_a_loss_of_its_own():
    rows = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    found = ktd.verify(
        two_trained_against_each_other,
        strategy({"data": 4, "model": 2}, "tensor_parallel", "v5e:2x4"),
        batch_size=13,
        x=rows,
        y=np.zeros((64, 1), "float32"),
    )
    assert found.equal, found


@pytest.mark.slow
def test_numbers_as_on_the_chip_differ_by_what_bfloat16_explains():
    exact = ktd.verify(mlp, strategy({"data": 4}), batch_size=16)
    rounded = ktd.verify(mlp, strategy({"data": 4}), batch_size=16, as_on_chip=True)
    assert exact.largest_difference < 1e-5 < rounded.largest_difference
    assert rounded.equal, rounded
    assert "rounded as on the chip, results differ from float32 on one device by" in str(rounded)


@pytest.mark.slow
def test_a_dry_run_is_verified(tmp_path, monkeypatch, capsys):
    run = ktd.dry_run(mlp, strategy({"data": 4}), batch_size=13, verify=True)
    assert run.verification.equal
    assert "verified: equal: what the TPU compiler makes of it computes the same" in str(run)
    assert run.to_dict()["verification"]["equal"] is True
    assert "verified: equal" in run.to_html()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(_MODEL)
    words = ["dry-run", "model.py:build", "--topology", "v5e:2x2", "--batch-size", "10"]
    assert main([*words, "--verify"]) == 0
    assert "verified: equal" in capsys.readouterr().out


@pytest.mark.slow
def test_in_a_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(_MODEL)
    words = ["verify", "model.py:build", "--topology", "v5e:2x2", "--batch-size", "10"]
    assert main([*words, "--json", "--html", "page.html"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True
    assert (found["steps"], found["topology"]) == (2, "v5e:2x2")
    assert "equal" in (tmp_path / "page.html").read_text()


def against_each_other(strategy):
    """A step of a loop that trains two networks with two optimizers, and counts ids."""
    with strategy.scope():
        networks = [
            keras.Sequential(
                [keras.Input((n,)), layers.Dense(16, "relu"), layers.Dense(8)], name=n_
            )
            for n, n_ in ((4, "maker"), (8, "judge"))
        ]
        optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.Adagrad(0.01)]
        mean, seed = keras.metrics.Mean(name="mean"), keras.random.SeedGenerator(3)
        counts = keras.Variable(np.zeros(96, "float32"), name="counts", aggregation="sum")
    maker, judge = networks

    def step(batch):
        x, ids = batch
        context = ktd.get_replica_context()
        noise = keras.random.normal((x.shape[0], 4), seed=seed)

        def judged(made, judging):
            real, fake = (
                judge.stateless_call(judging, [], of)[0].mean(-1)
                for of in (x, maker.stateless_call(made, [], noise)[0])
            )
            return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

        for network, sign, optimizer in ((1, 1, optimizers[0]), (0, -1, optimizers[1])):
            weights = [[v.value for v in n.trainable_variables] for n in networks]
            loss, gradients = jax.value_and_grad(judged, network)(*weights)
            gradients = [sign * g for g in context.all_reduce("mean", gradients)]
            optimizer.apply(gradients, networks[network].trainable_variables)
        counts.assign(counts + ops.segment_sum(ops.ones_like(ids, "float32"), ids, 96))
        mean.update_state(loss)
        return context.all_reduce("mean", loss)

    return step, [*maker.variables, *judge.variables, counts]


def rows_and_ids(strategy):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 96, 64, "int32")
    return iter(strategy.distribute_dataset(rows, batch_size=16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout", "steps"),
    [
        ({"data": 4, "model": 2}, "tensor_parallel", 4),
        ({"data": 2, "fsdp": 2, "model": 2}, "fsdp", 1),
    ],
)
def test_a_loop_is_equal_and_changes_nothing(mesh, layout, steps):
    here = ktd.TPUStrategy(mesh, layout)
    step, variables = against_each_other(here)
    before = [np.array(v) for v in variables]
    dataset = rows_and_ids(here)
    found = here.verify_run(step, (dataset,), steps=steps, topology="v5e:2x4")
    assert found.equal, found
    assert found.largest_difference < 1e-5
    assert (found.mode, found.model, found.steps) == ("run", "step", steps)
    # A variable is judged by what the launch changes.
    allowed = {row.name: row.allowed for row in found.rows}
    assert (
        allowed["maker/dense/kernel"]
        < 1e-5
        <= min(allowed[name] for name in allowed if "result" in name)
    )
    names = [row.name for row in found.rows]
    for name in ("counts", "maker/dense/kernel", "mean/total", "result"):
        assert any(name in row for row in names), names
    for value, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value, np.array(variable))
    assert "computes the same as simulated devices" in str(found)
    here.run(step, (rows_and_ids(here),))


@pytest.mark.slow
def test_a_loop_in_half_precision_is_judged_as_such():
    """Its variables are float32, as a mixed policy has them."""
    here = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    with here.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16, dtype="mixed_bfloat16")])

    def step(x):
        outputs = model.stateless_call([v.value for v in model.trainable_variables], [], x)[0]
        return ktd.get_replica_context().all_reduce("mean", outputs.astype("float32").mean())

    found = here.verify_run(step, (np.ones((2, 8), "float32"),), topology="v5e:2x4")
    assert found.equal, found
    assert min(row.allowed for row in found.rows) >= 5e-2


@pytest.mark.slow
def test_a_loop_without_the_guard_is_found_wrong_where_libtpu_is():
    """Still in 0.0.50.1, where `fit` is right without it."""
    off = {"xla_disable_hlo_passes": ""}
    here = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel", compiler_options=off)
    step, _ = against_each_other(here)
    found = here.verify_run(step, (rows_and_ids(here),), steps=4, topology="v5e:2x4")
    if not found.equal:
        assert [row.name for row in found.wrong] == ["counts"]
        assert found.first_wrong_pass.name == "while-loop-all-reduce-code-motion"
        assert "openxla/xla 49143" in str(found)
    assert found.equal or libtpu_version() >= (0, 0, 36)


def test_a_run_needs_simulated_devices():
    there = ktd.TPUStrategy({"data": 4}, topology="v5e:2x2")
    with pytest.raises(ValueError, match=r"ktd.simulate\(4\) first"):
        there.verify_run(lambda x: x, (1.0,), topology="v5e:2x2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "generate"}, 'mode of verify is "train", "evaluate" or "predict"'),
        ({"x": [["a"]]}, "numeric"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        ktd.verify(mlp, strategy({"data": 4}), **{"batch_size": 8} | options)


def test_it_needs_a_slice():
    with pytest.raises(ValueError, match="verify needs a slice to compile for") as error:
        ktd.verify(mlp, ktd.TPUStrategy({"data": 8}), batch_size=8)
    assert 'topology="v5e:2x4"' in str(error.value)


def test_a_report_of_a_new_fault_can_be_sent():
    rows = (
        report.Row("result ['loss']", (), "float32", 1e-7, 1e-5),
        report.Row("dense/kernel", (8, 4), "float32", 0.3, 1e-5),
    )
    found = report.Verification(
        rows,
        "train",
        "mlp",
        "v5e:2x2",
        {"data": 4},
        16,
        4,
        1,
        "0.0.99",
        first_wrong_pass=report.WrongPass("some-pass", "one-before", "some-pass", 7, ""),
    )
    assert not found.equal
    assert found.to_dict()["equal"] is False
    for words in ("libtpu 0.0.99", "'some-pass'", "dense/kernel float32[8, 4]", "3.0e-01"):
        assert words in found.upstream_report
    assert found.upstream_report in str(found)
    assert "not a fault that we know" in str(found)
    assert "dense/kernel" in found._repr_html_()
