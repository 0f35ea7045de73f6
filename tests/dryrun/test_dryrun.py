import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from itertools import chain

import jax
import keras
import numpy as np
import pytest
from compile_only import lower
from laws import catalogue

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.show.progress import listening, stages
from keras_tpu_dist.tools.dryrun import compile as dryrun_compile
from keras_tpu_dist.tools.dryrun import run as dryrun
from keras_tpu_dist.tools.dryrun import worker as dryrun_worker
from keras_tpu_dist.tools.dryrun.diff import diff
from keras_tpu_dist.tools.dryrun.inputs import check_asked
from keras_tpu_dist.tools.dryrun.run import dry_run
from keras_tpu_dist.tools.hlo import parse
from keras_tpu_dist.tools.searches import search as searching
from keras_tpu_dist.tools.shell.main import main
from keras_tpu_dist.training import guard
from keras_tpu_dist.training.step import jitted_step

TP = [("up/kernel", (None, "model")), ("up/bias", ("model",)), ("down/kernel", ("model", None))]


def mlp(optimizer="adam", **compile_options):
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu", name="up"),
            keras.layers.Dropout(0.1, seed=1),
            keras.layers.Dense(8, name="down"),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"], **compile_options)
    return model


def lstm(**compile_options):
    model = keras.Sequential([keras.Input((12, 8)), keras.layers.LSTM(8), keras.layers.Dense(2)])
    model.compile("adam", "mse", **compile_options)
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(50, 16, name="embed")
        self.rnn = keras.layers.GRU(8, name="rnn")
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.head = keras.layers.Dense(3, name="head")

    def call(self, inputs, training=False):
        x = self.rnn(self.embed(inputs["tokens"]))
        return self.head(self.norm(x, training=training))


def subclassed():
    model = Subclassed()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def _mesh_of_cpus():
    return ktd.TPUStrategy({"data": 4, "model": 2}, TP)


def _slice(layout=TP):
    return ktd.TPUStrategy({"data": 4, "model": 2}, layout, topology="v5e:2x4")


# --- building without memory -----------------------------------------------------------------


@pytest.mark.slow
def test_billions_of_parameters_take_no_memory():
    code = """
import resource
import keras_tpu_dist as ktd, keras
from keras_tpu_dist.tools.dryrun.build import Subject, lower
def build():
    layers = [keras.layers.Dense(2**16, name=f"d{i}") for i in range(2)]
    model = keras.Sequential([keras.Input((2**16,)), *layers])
    model.compile("adam", "mse")
    return model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
strategy = ktd.TPUStrategy({"data": 64, "model": 4}, topology="v5litepod-256")
lowered = lower(Subject(build, strategy, 64))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(lowered.parameters, (after - before) // 1024)
"""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    env.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # not even where libtpu is installed and no TPU is
    parameters, megabytes = map(int, done.stdout.split())
    assert parameters == 2 * (2**32 + 2**16)
    assert megabytes < 200  # the weights alone would take 34 GB


@pytest.mark.slow
def test_state_bytes_are_those_of_the_real_arrays():
    strategy = _mesh_of_cpus()
    lowered = lower(mlp, strategy, batch_size=30, platform="cpu")
    with strategy.scope():
        model = mlp()
    model.fit(np.zeros((30, 64)), np.zeros((30, 8)), batch_size=30, verbose=0)

    def on_one_device(variables):
        return sum(v.value.addressable_shards[0].data.nbytes for v in variables)

    weights = [*model.trainable_variables, *model.non_trainable_variables]
    assert lowered.state.weights == on_one_device(weights)
    assert lowered.state.optimizer == on_one_device(model.optimizer.variables)
    assert lowered.state.metrics == on_one_device(model.metrics_variables)
    assert lowered.state.inputs == 32 // 4 * (64 + 8) * 4  # 30 rows, padded to 8 on each part
    assert lowered.parameters == model.count_params()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("donate_state", "optimizer"), [(True, "adam"), ("auto", "adam"), (True, "adafactor")]
)
def test_the_lowered_program_is_that_of_a_real_model(donate_state, optimizer):
    """Adafactor writes a slot that it does not read."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, TP, donate_state=donate_state)
    run = dry_run(lambda: mlp(optimizer), strategy, batch_size=32)
    with strategy.scope():
        model = mlp(optimizer)
        model.fit(np.zeros((32, 64)), np.zeros((32, 8)), batch_size=32, verbose=0)
        placer = strategy.placer
        batch = placer.describe(
            (jax.ShapeDtypeStruct((32, 64), "float32"), jax.ShapeDtypeStruct((32, 8), "float32"))
        )
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        state = tuple(
            [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.value.sharding) for v in group]
            for group in groups
        )
        kept = guard.states_to_keep(donate_state, list(chain.from_iterable(groups)))
        step = jitted_step(model, "train", placer, donate=kept == 0)
        real = step.lower(state, batch).compile()
    memory = real.memory_analysis()
    assert run.memory["arguments"] == memory.argument_size_in_bytes
    assert run.memory["outputs"] == memory.output_size_in_bytes
    assert run.memory["aliased"] == memory.alias_size_in_bytes
    # Scalars share temporaries in another way within a call, of which Adafactor has many.
    exact = 0.01 if optimizer == "adafactor" else 0.0
    assert run.memory["temporaries"] == pytest.approx(memory.temp_size_in_bytes, rel=exact)

    def opcodes(text):
        return sorted(i.opcode for c in parse(text) for i in c if i.opcode != "call")

    lowered = lower(lambda: mlp(optimizer), strategy, batch_size=32, platform="cpu")
    compiled = dryrun_compile.compile_lowered(lowered, timeout=120)
    assert opcodes(compiled.text).count("all-reduce") == opcodes(real.as_text()).count("all-reduce")
    assert run.compiled_for == "CPU"
    assert (run.fits, run.estimate) == (None, None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if "Ada" in name else pytest.mark.slow)
        for name in sorted(catalogue.subjects())
        if name.startswith("optimizers/")
    ],
)
def test_every_optimizer_lowers(name):
    """With a layout for each value, also for one that no step reads."""
    subject = catalogue.subjects()[name]
    strategy = _slice()
    lowered = lower(lambda: mlp(subject.options()["optimizer"]), strategy, batch_size=8)
    assert lowered.state.weights > 0
    program = pickle.loads(lowered.program)
    assert len(program.module_kept_var_idx) == len(program.in_avals)
    assert None not in program.in_shardings_jax(strategy.mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
def test_subclassed_models_lower_in_every_mode(mode):
    x = {"tokens": np.zeros((1, 12), "int64")}
    y = None if mode == "predict" else np.zeros((1,), "int32")
    lowered = lower(subclassed, _slice(None), x=x, y=y, batch_size=16, mode=mode)
    assert (lowered.state.optimizer > 0) == (mode == "train")
    assert (lowered.state.metrics > 0) == (mode != "predict")
    assert {"embed", "rnn", "norm", "head"} <= lowered.layer_names
    assert lowered.tokens == 16 * 12


def test_own_recurrent_layers_lower():
    def build():
        x = keras.Input((6, 8, 8, 3))
        h = ktd.layers.TimeDistributed(keras.layers.Conv2D(4, 3), name="frames")(x)
        h = keras.layers.Reshape((6, 144))(h)
        h = ktd.layers.Bidirectional(ktd.layers.GRU(8, return_sequences=True), name="both")(h)
        h = ktd.layers.LSTM(8, name="last")(h)
        model = keras.Model(x, keras.layers.Dense(2)(h))
        model.compile("adam", "mse")
        return model

    lowered = lower(build, _slice("tensor_parallel"), batch_size=8)
    assert {"frames", "both", "last"} <= lowered.layer_names
    assert lowered.overstated


def test_options_of_compile_lower():
    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        optimizer = keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(1e-3, 100),
            gradient_accumulation_steps=2,
            use_ema=True,
            global_clipnorm=1.0,
        )
        return mlp(optimizer, steps_per_execution=4)

    lowered = lower(build, _slice(), batch_size=8)
    assert lowered.steps == 4
    # weights, two moments, accumulator, average
    assert lowered.state.optimizer > 4 * 4 * (64 * 256 + 256 * 8) // 2


@pytest.mark.parametrize(
    "on",
    [
        pytest.param(
            ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel"), marks=pytest.mark.slow
        ),
        pytest.param(
            ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel", topology="v5e:2x4"),
            marks=pytest.mark.tpu_compiler,
        ),
    ],
    ids=["cpu", "libtpu"],
)
def test_a_launch_of_several_steps_is_compiled_and_its_costs_are_of_one_step(on):
    def build(steps):
        return mlp("adam", steps_per_execution=steps)

    one, four = (dry_run(lambda n=n: build(n), on, batch_size=61) for n in (1, 4))
    assert four.state.inputs == 4 * one.state.inputs
    assert four.state.lasting == one.state.lasting
    assert four.memory["arguments"] - one.memory["arguments"] >= 3 * one.state.inputs
    assert four.cost.flops == one.cost.flops
    moved = [sum(c.bytes * c.times for c in run.cost.collectives) for run in (one, four)]
    assert moved[1] == pytest.approx(moved[0], rel=0.05)
    assert "a launch of 4 steps was compiled, as fit makes it" in str(four)
    if one.estimate is not None:
        assert four.estimate.step == pytest.approx(one.estimate.step, rel=0.5)


@pytest.mark.parametrize("kind", ["one", "list", "dict", "function"])
def test_targets_are_assumed_from_each_outputs_loss(kind):
    cross_entropy = keras.losses.sparse_categorical_crossentropy
    losses = {
        "one": "mse",
        "list": [keras.losses.SparseCategoricalCrossentropy(), "mse"],
        "dict": {"regression": "mse", "classes": "sparse_categorical_crossentropy"},
        "function": [cross_entropy, "mse"],
    }

    def build():
        x = keras.Input((8,))
        classes = keras.layers.Dense(4, activation="softmax", name="classes")(x)
        model = keras.Model(x, [classes, keras.layers.Dense(2, name="regression")(x)])
        model.compile("sgd", losses[kind])
        return model

    lowered = lower(build, _slice(None), batch_size=8)
    first = "float32(8, 4)" if kind == "one" else "int32(8,)"
    assert f"{first}, float32(8, 2) is assumed" in lowered.notes[0]


def _of_two(names, open_size=False):
    x = keras.Input((None, 8) if open_size else (8,))
    classes, regression = (keras.layers.Dense(n, name=f"head_{n}")(x) for n in (4, 2))
    return keras.Model(x, dict(zip(names, (classes, regression))))


class Encoder(keras.Model):
    """Declares no inputs."""

    def __init__(self):
        super().__init__()
        self.of_two = _of_two(("z", "a"))

    def call(self, x):
        return self.of_two(x)["z"]


@pytest.mark.parametrize(
    ("make", "loss", "shape", "expected"),
    [
        (
            lambda: _of_two(("z", "a")),
            {"z": "sparse_categorical_crossentropy", "a": "mse"},
            None,
            "float32(8, 2), int32(8,)",
        ),
        (lambda: _of_two(("z", "a")), {"z": "mse"}, None, "float32(8, 2), float32(8, 4)"),
        (lambda: _of_two(("z", "a"), True), "mse", (1, 3, 8), "float32(8, 3, 2), float32(8, 3, 4)"),
        (Encoder, "sparse_categorical_crossentropy", (1, 8), "int32(8,)"),
        (Encoder, "mse", (1, 8), "float32(8, 4)"),
    ],
)
def test_targets_of_named_open_and_undeclared_outputs(make, loss, shape, expected):
    def build():
        model = make()
        model.compile("sgd", loss)
        return model

    x = None if shape is None else np.zeros(shape, "float32")
    lowered = lower(build, _slice(None), x=x, batch_size=8)
    assert f"{expected} is assumed" in lowered.notes[0]


class OwnStep(keras.Model):
    """As in Keras's guide to training steps in JAX; its network is a part of it."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        self.built = True

    def train_step(self, state, data):
        x, y = data
        trainable, non_trainable, slots, metrics = state

        def loss(trainable):
            outputs, _ = self.network.stateless_call(trainable, [], x, training=True)
            return keras.ops.mean((outputs - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": value}, (trainable, non_trainable, slots, metrics)


def test_a_step_of_ones_own_gets_what_fit_gives_it():
    def build():
        model = OwnStep()
        model.compile("adam")
        return model

    x, y = np.ones((8, 8), "float32"), np.ones((8, 4), "float32")
    build().fit(x, y, verbose=0)
    lowered = lower(build, _slice(None), x=x, y=y, batch_size=8)
    assert lowered.state.weights == 4 * (8 * 4 + 4)
    assert lowered.model_flops == 0
    assert "the model has no call()" in lowered.notes[0]


@pytest.mark.parametrize(
    ("x", "itemsize"),
    [
        (np.ones((8, 8), "float16"), 4),
        (np.ones((8, 8), "float64"), 4),
        (np.ones((8, 8), "uint64"), 4),
        (np.ones((8, 8), "bool"), 1),
        (jax.ShapeDtypeStruct((1, 8), "bfloat16"), 2),
    ],
)
def test_batches_have_the_dtypes_of_fit(x, itemsize):
    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    lowered = lower(build, _slice(None), x=x, batch_size=8)
    assert lowered.state.inputs == 2 * (8 * itemsize + 4 * 4)


class Spare(keras.Model):
    """Has a layer that it never calls."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = keras.layers.Dense(4, "gelu"), keras.layers.Dense(3)

    def build(self, shape):
        self.used.build(shape)

    def call(self, x):
        return self.used(x)


def test_a_layer_that_is_never_called():
    x = np.ones((8, 8), "float32")
    model = Spare()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"must be built.*call the model on data first"):
        lower(model, _slice(None), x=x, batch_size=8)
    model(x)
    assert lower(model, _slice(None), x=x, batch_size=8).state.weights == 4 * (8 * 4 + 4)
    assert not model.spare.built


@pytest.mark.parametrize("own", [True, False])
def test_remat_reaches_models_with_a_layer_that_is_never_called(own):
    def build():
        inputs = keras.Input((8,))
        outputs = keras.layers.Dense(4, "gelu")(inputs)
        model = Spare() if own else keras.Model(inputs, outputs)
        model.spare = keras.layers.Dense(3)
        model.compile("sgd", "mse")
        return model

    strategy = ktd.TPUStrategy({"data": 8}, topology="v5e:2x4", remat="full")
    lowered = lower(build, strategy, x=np.ones((8, 8), "float32"), batch_size=8)
    assert b"remat" in lowered.program


class OnHost(keras.layers.Layer):
    """Asks this process, for a result or for what it does."""

    def __init__(self, prints):
        super().__init__()
        self.prints = prints

    def call(self, x):
        if self.prints:
            jax.debug.print("{}", x.sum())
            return x
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + jax.pure_callback(lambda a: 2 * a, kind, jax.lax.stop_gradient(x))


@pytest.mark.parametrize("prints", [True, False])
@pytest.mark.parametrize("where", [_slice, _mesh_of_cpus])
def test_code_of_the_host_within_a_step(where, prints):
    def build():
        model = keras.Sequential([keras.Input((8,)), OnHost(prints), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    words = r"another process, which cannot call Python.*jax\.debug\.print.*Leave it out"
    with pytest.raises(ValueError, match=words):
        dry_run(build, where(), batch_size=8)


@pytest.mark.slow
def test_numbers_of_64_bits():
    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, dtype="float64")])
        model.compile("sgd", "mse")
        return model

    with jax.enable_x64(True):
        run = dry_run(build, _mesh_of_cpus(), batch_size=8)
    assert run.state.weights == 8 * (8 * 4 + 4)


def test_a_users_own_model_is_left_as_it_was():
    model = mlp()
    layouts = [_keras.variable_layout(v) for v in model.variables]
    optimizer = model.optimizer
    first = lower(model, _slice(), batch_size=16)
    assert model.optimizer is optimizer
    assert not optimizer.built
    kept = [_keras.variable_layout(v) for v in model.variables]
    assert kept[: len(layouts)] == layouts
    x, y = np.ones((16, 64), "float32"), np.ones((16, 8), "float32")
    history = model.fit(x, y, verbose=0).history
    second = lower(model, _slice(), batch_size=16)
    assert first.state == second.state == lower(mlp, _slice(), batch_size=16).state
    assert np.isfinite(history["loss"][0])
    model.fit(x, y, verbose=0)


class Scaled(keras.optimizers.SGD):
    """An optimizer that its config does not make again."""

    def __init__(self, scale, model):
        super().__init__(0.1 * scale, momentum=0.9)
        self.model = model


@pytest.mark.parametrize("scaled", [True, False])
def test_a_users_optimizer_is_built_only_by_fit(scaled):
    strategy = _mesh_of_cpus()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        optimizer = Scaled(2, model)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse")
    before = optimizer.variables
    first = lower(model, _slice(), batch_size=8).state
    assert not optimizer.built
    assert list(map(id, optimizer.variables)) == list(map(id, before))
    model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
    assert lower(model, _slice(), batch_size=8).state == first


def test_a_dry_run_does_not_choose_a_users_metrics():
    def classifier():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile(
            "sgd", lambda y, p: cross_entropy(y, p, from_logits=True), metrics=["accuracy"]
        )
        return model

    cross_entropy = keras.losses.sparse_categorical_crossentropy
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    y = np.arange(8, dtype="int32") % 4
    expected = classifier().fit(x, y, verbose=0).history
    model = classifier()
    # the loss does not say that its targets are numbers of classes
    with pytest.raises(ValueError, match="same shape"):
        lower(model, _slice(None), batch_size=8)
    assert model.fit(x, y, verbose=0).history == expected


def test_random_numbers_without_a_seed_go_on_after_a_slice():
    def build():
        keras.random.normal((2,))
        return mlp()

    keras.utils.set_random_seed(0)
    keras.random.normal((2,))
    expected = np.asarray(keras.random.normal((2,)))
    for build_first in (True, False):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        if build_first:
            lower(build, _slice(), batch_size=8)
        keras.random.normal((2,))
        with _slice().scope():
            build()
        np.testing.assert_array_equal(np.asarray(keras.random.normal((2,))), expected)


def test_a_model_built_in_the_scope_of_a_slice():
    strategy = _slice()
    with strategy.scope():
        model = mlp()
    assert lower(model, strategy, batch_size=16).state == lower(mlp, strategy, batch_size=16).state
    with pytest.raises(RuntimeError, match=r"can compile a model, not run it.*fit with topology"):
        model.fit(np.zeros((8, 64)), np.zeros((8, 8)))


def test_automatic_names_do_not_depend_on_what_was_built_before():
    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("adam", "mse")
        return model

    strategy = _slice([("dense/kernel", (None, "model"))])
    first = lower(build, strategy, batch_size=8)
    second = lower(build, strategy, batch_size=8)
    assert first.layer_names == second.layer_names == {"input_layer", "dense", "adam"}
    assert first.state == second.state
    assert keras.layers.Dense(1).name == "dense"


def test_variables_are_themselves_again_afterwards():
    with _keras.abstract_variables(), pytest.raises(KeyError):
        raise KeyError
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert layer.kernel.value.shape == (3, 2)
    layer.kernel.assign(np.ones((3, 2)))
    assert float(layer.kernel.value.sum()) == 6


# --- wrong input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]),
            {},
            r"needs a compiled model.*compile\(\) was not called.*mode=\"predict\"",
        ),
        (mlp, {"batch_size": 3}, r"at least one row for every part.*batch_size=3 with 4 part"),
        (
            mlp,
            {"x": object()},
            r"numeric arrays.*object.*dtype object.*one batch",
        ),
        (mlp, {"x": np.array([["a"]])}, r"numeric arrays.*dtype <U1"),
        (subclassed, {}, r"needs to know the input.*declares no inputs.*ShapeDtypeStruct"),
        (
            mlp,
            {"x": keras.KerasTensor((None, None), "float32")},
            r"a size of an input is open.*x of shape \(None, None\)",
        ),
    ],
)
def test_wrong_input_is_said(build, options, words):
    with pytest.raises(ValueError, match=words):
        dry_run(build, _slice(None), **{"batch_size": 8, **options})


def test_an_unbuilt_model_is_refused():
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("adam", "mse")
    x = np.zeros((1, 4))
    with pytest.raises(ValueError, match=r"must be built.*function that builds"):
        dry_run(model, _slice(None), x=x, y=x, batch_size=8)


def test_what_build_raises_comes_through():
    def build():
        raise KeyError("my own mistake")

    with pytest.raises(KeyError, match="my own mistake") as raised:
        dry_run(build, _slice(), batch_size=8)
    assert "the build function given to dry_run" in raised.value.__notes__[0]
    assert keras.distribution.distribution() is None


# --- the compiling process -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    keras.distribution.set_distribution(None)
    return lower(mlp, _mesh_of_cpus(), batch_size=8, platform="cpu")


def _worker(monkeypatch, tmp_path, code):
    script = tmp_path / "worker.py"
    script.write_text(code)
    monkeypatch.setattr(dryrun_worker, "__file__", str(script))


def test_an_abort_of_the_compiler_is_an_error(tiny, monkeypatch, tmp_path):
    _worker(
        monkeypatch,
        tmp_path,
        "import os, sys; print('F0000 check failed', file=sys.stderr, flush=True); os.abort()",
    )
    with pytest.raises(RuntimeError, match=r"exit code -6, compiling for CPU.*F0000 check failed"):
        dryrun_compile.compile_lowered(tiny, timeout=30)


def test_a_compiler_that_hangs_is_stopped(tiny, monkeypatch, tmp_path):
    _worker(monkeypatch, tmp_path, "import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match=r"within the timeout.*timeout=0.5 seconds"):
        dryrun_compile.compile_lowered(tiny, timeout=0.5)


class Endless:
    """A job that says which process reads it, and never comes to an end."""

    def __init__(self, file, forever):
        self.file, self.forever = str(file), forever

    def __reduce__(self):
        said = f"import os; open({self.file!r} + '.part', 'w').write(str(os.getpid()))"
        return exec, (f"{said}; os.rename({self.file!r} + '.part', {self.file!r}); {self.forever}",)


_PARENT = """
import os, runpy, sys
run = runpy.run_path(sys.argv[1])["run"]
run(*sys.argv[2:4], env=os.environ, log=os.devnull, timeout=60)
"""
_SLEEP = "import time; time.sleep(300)"
_HOLD_THE_LOCK = "sum(iter(int, 1))"  # lets no other thread of Python run


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _until(condition, seconds):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("sent", "forever"), [(signal.SIGTERM, _HOLD_THE_LOCK), (signal.SIGINT, _SLEEP)]
)
def test_the_compiler_ends_with_whoever_asked(tmp_path, sent, forever):
    said, job, result = tmp_path / "pid", tmp_path / "job", tmp_path / "result"
    job.write_bytes(pickle.dumps(Endless(said, forever)))
    command = [sys.executable, "-c", _PARENT, dryrun_worker.__file__, str(job), str(result)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as parent:
        assert _until(said.exists, 60)
        worker = int(said.read_text())
        assert _alive(worker)
        parent.send_signal(sent)
        words = parent.communicate(timeout=20)[1].decode()
    assert _until(lambda: not _alive(worker), 10)
    assert ("KeyboardInterrupt" in words) == (sent == signal.SIGINT)


def test_the_compiler_ends_with_the_pipe_it_was_given(tmp_path):
    said, job, result = tmp_path / "pid", tmp_path / "job", tmp_path / "result"
    job.write_bytes(pickle.dumps(Endless(said, _SLEEP)))
    command = [sys.executable, "-P", dryrun_worker.__file__, str(job), str(result)]
    with subprocess.Popen([*command, str(os.getpid())], stdin=subprocess.PIPE) as worker:
        assert _until(said.exists, 60)
        worker.stdin.close()
        assert worker.wait(10) == 1
    # one whose parent is gone already does not begin
    with subprocess.Popen([*command, "1234567"], stdin=subprocess.PIPE) as worker:
        assert worker.wait(10) == 1
    assert not result.exists()


_FAKE = """
import pickle, sys
pickle.dump({{"error": {error!r}, "seconds": 1.0, "cpu_seconds": 1.0, "peak_bytes": 1}},
    open(sys.argv[2], "wb"))
"""


def test_a_refusal_is_worded(tiny, monkeypatch, tmp_path):
    _worker(monkeypatch, tmp_path, _FAKE.format(error="XlaRuntimeError: INVALID_ARGUMENT: no"))
    with pytest.raises(RuntimeError, match=r"compiler refused the program.*INVALID_ARGUMENT"):
        dryrun_compile.compile_lowered(tiny, timeout=30)


def test_sizes_in_an_overflow_message():
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (23.88G) exceeds available HBM (15.75G)."
    )
    limit = int(15.75 * 2**30)
    read = functools.partial(dryrun_compile.bytes_in_message, argument_bytes=2**34)
    assert read(text) == (int(23.88 * 2**30), limit)
    old = "Ran out of memory in memory space hbm. Used 16.05G of 15.75G hbm. Exceeded by 306.05M.\n"
    table = "Total hbm usage >= 16.30G:\n    reserved        258.00M \n    arguments       {} \n"
    alone = int(16.05 * 2**30)
    assert read(old + table.format("0B")) == (alone + 2**34, limit)
    assert read(old + table.format("2.00G") + "Unpadded (1.00G)") == (alone, limit)
    assert read("no size at all") == ()


# --- reports ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_tpu():
    """One dry run of the real TPU compiler, ragged batch, tensor parallel."""
    pytest.importorskip("libtpu")
    keras.distribution.set_distribution(None)
    return dry_run(mlp, _slice(), batch_size=62)


@pytest.fixture(scope="module")
def without_libtpu():
    keras.distribution.set_distribution(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dryrun, "has_libtpu", lambda: False)
        return dry_run(mlp, _slice(), batch_size=62)


@pytest.mark.tpu_compiler
def test_a_report_from_the_tpu_compiler(on_tpu):
    assert on_tpu.fits is True
    assert on_tpu.compiled_for == "v5e:2x4"
    m = on_tpu.memory
    total = m["arguments"] + m["outputs"] - m["aliased"] + m["temporaries"] + m["code"]
    assert on_tpu.total_bytes == total < on_tpu.limit_bytes
    state = on_tpu.state
    assert m["arguments"] >= state.weights + state.optimizer + state.metrics + state.inputs
    # forward, and backward without the gradient of the input; 16 rows on each of 4 parts
    rows = 16
    flops = 2 * rows * (64 * 128 * 2 + 128 * 8 * 3)
    assert on_tpu.cost.flops == flops
    e = on_tpu.estimate
    assert e.step >= max(e.compute, e.hbm, e.link, e.kernels)
    assert on_tpu.samples_per_second == pytest.approx(62 / e.step)
    layers = {c.layer for c in on_tpu.cost.layers}
    assert {"up", "down", "adam"} <= layers
    assert {axis for c in on_tpu.cost.collectives for axis in c.axes} == {"data", "model"}
    assert all(c.seconds > 0 and c.network == "ICI" for c in on_tpu.cost.collectives)


def two_towers():
    """A CNN on images and a causal transformer on tokens, in one compilation."""
    layers = keras.layers
    images = x = keras.Input((33, 33, 8), name="images")
    x = layers.Conv2D(16, 3, strides=2, name="conv_a")(x)
    x = layers.Conv2D(32, 3, name="conv_b")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    tokens = keras.Input((768,), dtype="int32", name="tokens")
    h = layers.Embedding(64, 128, name="embedding")(tokens)
    h = layers.Add()([h, layers.MultiHeadAttention(2, 64, name="mha")(h, h, use_causal_mask=True)])
    h = layers.Dense(256, activation="gelu", name="up")(h)
    h = layers.Dense(128, name="down")(h)
    h = layers.Dense(64, dtype="float32", name="logits")(h)
    model = keras.Model((images, tokens), (layers.Dense(4, name="classes")(x), h))
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", [cross_entropy, cross_entropy])
    return model


def test_attention_lowers_for_the_cpu_compiler_too():
    def build():
        x = keras.Input((256, 32))
        attention = keras.layers.MultiHeadAttention(2, 16, flash_attention=True)
        model = keras.Model(x, attention(x, x, use_causal_mask=True))
        model.compile("sgd", "mse")
        return model

    kernels = {}
    for platform in ("tpu", "cpu"):
        program = lower(build, _slice(None), batch_size=8, platform=platform).program
        kernels[platform] = b"tpu_custom_call" in pickle.loads(program).mlir_module_serialized
    assert kernels == {"tpu": True, "cpu": False}


class Block(keras.layers.Layer):
    """Attention inside a layer of one's own, whose shapes Keras infers with symbolic sizes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(2, 16)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=True)


@pytest.mark.parametrize("length", [256, None])
def test_attention_inside_a_layer_of_ones_own(length):
    def build():
        x = keras.Input((length, 32))
        model = keras.Model(x, keras.layers.Dense(4)(Block(name="block")(x)))
        model.compile("sgd", "mse")
        return model

    x, y = (jax.ShapeDtypeStruct((1, 256, width), "float32") for width in (32, 4))
    lowered = lower(build, _slice(None), x=x, y=y, batch_size=10)
    assert b"tpu_custom_call" in pickle.loads(lowered.program).mlir_module_serialized


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_operations_of_a_cnn_and_a_transformer_are_those_of_the_formula():
    strategy = ktd.TPUStrategy({"data": 8}, topology="v5e:2x4")
    # eight rows on each chip: of a single image the compiler makes a batch of overlapping parts
    rows, length = 8, 768
    run = dry_run(two_towers, strategy, batch_size=8 * rows)
    got = {c.layer: c.flops for c in run.cost.layers}
    dense = {"up": 128 * 256, "down": 256 * 128, "logits": 128 * 64}
    dense |= {f"mha/{n}": 128 * 128 for n in ("query", "key", "value", "attention_output")}
    # forward, gradient of the input, gradient of the weights
    wanted = {name: 3 * 2 * rows * length * size for name, size in dense.items()}
    # nine products of heads, of which the causal mask leaves three of the four blocks of 384
    wanted["mha"] = 9 * 2 * rows * length * length * 2 * 64 * 3 // 4
    wanted["conv_a"] = 2 * 2 * rows * 16 * 16 * 16 * 9 * 8  # the images need no gradient
    wanted["conv_b"] = 3 * 2 * rows * 14 * 14 * 32 * 9 * 16
    assert {name: got.get(name) for name in wanted} == pytest.approx(wanted, rel=0.03)
    assert run.cost.flops == pytest.approx(sum(wanted.values()), rel=0.03)
    assert run.cost.kernel_flops == wanted["mha"]
    assert (run.cost.whole_kernels, run.cost.unestimated_kernels) == ((), ())


@pytest.mark.tpu_compiler
def test_a_report_reads_well(on_tpu):
    text = str(on_tpu)
    assert (
        "train step, 18,696 parameters, batch 62 on v5e-8 (v5e:2x4), data 4 x model 2: fits" in text
    )
    for words in ("weights", "limit", "15.75 GiB", "step, estimate", "all-reduce", "up", "note:"):
        assert words in text
    data = json.loads(on_tpu.to_json())
    assert data["mesh"] == {"data": 4, "model": 2}
    assert data["cost"]["collectives"][0]["axes"]
    assert "<table>" in on_tpu._repr_html_()
    page = on_tpu.to_html()
    for each in on_tpu.cost.collectives:
        assert f"<td>{', '.join(each.axes)}</td>" in page


def test_recurrent_layers_without_libtpu(monkeypatch):
    monkeypatch.setattr(dryrun, "has_libtpu", lambda: False)

    def build():
        layers = [keras.Input((4, 128)), ktd.layers.LSTM(128), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    run = dry_run(build, ktd.TPUStrategy(topology="v5e:2x2"), batch_size=8)
    assert run.compiled_for == "CPU"
    assert not run.cost.kernel_flops


def test_without_libtpu_the_cpu_compiler_stands_in(without_libtpu, on_tpu):
    run = without_libtpu
    assert run.compiled_for == "CPU"
    assert (run.fits, run.limit_bytes, run.estimate) == (None, None, None)
    assert run.state == on_tpu.state
    assert {a for c in run.cost.collectives for a in c.axes} == {"data", "model"}
    assert any("pip install 'jax[tpu]'" in note for note in run.notes)
    assert "memory limit unknown" in str(run)
    assert run.cost.flops == on_tpu.cost.flops


def test_two_plans_side_by_side(on_tpu, without_libtpu):
    text = str(diff(on_tpu, without_libtpu))
    assert "v5e:2x4" in text
    assert "CPU" in text
    assert "memory per device" in text
    same = {row[0]: row for row in diff(on_tpu, on_tpu).rows}
    assert same["step"][3] == "1.00"


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_a_program_that_does_not_fit():
    def build():
        model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(2**22, name="wide")])
        model.compile("sgd", "mse")
        return model

    strategy = ktd.TPUStrategy({"data": 8}, topology="v5e:2x4")
    run = dry_run(build, strategy, batch_size=8)
    assert run.fits is False
    assert "RESOURCE_EXHAUSTED" in run.error
    assert run.sized_on == "v5p:2x2x2"
    assert run.overflow_bytes == run.total_bytes - run.limit_bytes > 2**30
    # what the compiler states includes the arguments, as the figures of the larger slice do
    assert run.total_bytes == pytest.approx(run.breakdown_bytes, rel=0.01)
    assert run.estimate is None
    assert any("wide" in b.layer or b.layer == "(input)" for b in run.largest_buffers)
    assert "does NOT fit" in str(run)
    assert str(run).splitlines()[1].startswith("why: ")
    assert next(change for change in run.changes).line == 'TPUStrategy(..., layout="fsdp")'


class Shuffled(keras.layers.Layer):
    """Asks for one layout after the other that cannot be reached directly."""

    def __init__(self, mesh):
        super().__init__(name="shuffled")
        self.mesh = mesh

    def _lay(self, x, *axes):
        sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(x, sharding)

    def call(self, x):
        y = self._lay(jax.numpy.sin(self._lay(x, "data", None, "model")), "model", "data", None)
        y = self._lay(y.reshape(x.shape[0] * x.shape[1], -1), None, ("model", "data"))
        return y.reshape(x.shape).sum(1)


@pytest.mark.tpu_compiler
def test_slices_joined_by_the_data_centre_network():
    strategy = ktd.TPUStrategy({"data": 4, "model": 4}, TP, topology="2*v5e:2x4")
    grid = strategy.mesh.devices
    assert all(len({d.slice_index for d in row}) == 1 for row in grid)
    assert [d.slice_index for d in grid[:, 0]] == [0, 0, 1, 1]
    run = dry_run(mlp, strategy, batch_size=16)
    assert run.compiled_for == "2*v5e:2x4"
    networks = {(c.axes, c.network) for c in run.cost.collectives}
    assert (("model",), "ICI") in networks
    assert any(axes == ("data",) and network == "DCN" for axes, network in networks)


@pytest.mark.tpu_compiler
def test_arrays_gathered_whole_are_found_and_named():
    strategy = _slice(None)

    def build():
        model = keras.Sequential([keras.Input((16, 64)), Shuffled(strategy.mesh)])
        model.add(keras.layers.Dense(4, name="head"))
        model.compile("sgd", "mse")
        return model

    run = dry_run(build, strategy, batch_size=32, mode="evaluate")
    assert run.rematerialized == ("shuffled",)
    assert "gathered whole between two layouts" in str(run)


@pytest.mark.parametrize(
    ("build", "share", "gigabytes", "efforts"),
    [
        (mlp, 0.80, None, ["quick"]),
        (mlp, 0.95, None, ["quick", "exact"]),
        (mlp, None, 16.5, ["quick", "exact"]),
        (mlp, None, 40.0, ["quick"]),
        (lstm, None, 40.0, ["quick", "exact"]),
        (lstm, None, 80.0, ["quick"]),
    ],
)
def test_quick_becomes_exact_near_the_limit(monkeypatch, build, share, gigabytes, efforts):
    error = (
        f"RESOURCE_EXHAUSTED: temporaries ({gigabytes}G) exceeds (15.75G)" if gigabytes else None
    )
    tried = []

    def compile_lowered(lowered, *, effort, timeout, topology=None, cache=None):
        if topology is None:
            tried.append(effort)
        used = int((share or 1.5) * lowered.topology.hbm_bytes)
        memory = dict.fromkeys(("arguments", "outputs", "aliased", "code"), 0)
        return dryrun_compile.Compiled(
            text="",
            memory={} if error and topology is None else {**memory, "temporaries": used},
            error=error if topology is None else None,
            rematerialized=(),
            effort=effort,
            compiled_for=lowered.topology.name,
            seconds=1.0,
            cpu_seconds=2.0,
            peak_process_bytes=3,
        )

    monkeypatch.setattr(dryrun, "has_libtpu", lambda: True)
    monkeypatch.setattr(dryrun, "compile_lowered", compile_lowered)
    run = dry_run(lambda: build(steps_per_execution=4), _slice(None), batch_size=8)
    assert tried == efforts
    assert run.effort == efforts[-1]
    assert run.fits is (error is None)
    assert ("this is the exact one" in str(run)) == (len(efforts) == 2)
    assert "a launch of 4 steps was compiled, as fit makes it" in str(run)
    assert run.compile_cpu_seconds == 2.0 * (len(efforts) + bool(error))


# --- searches, on a model of the compiler ----------------------------------------------------


class _Compiler:
    """Memory affine in the batch, with the padding of small batches."""

    def __init__(self, template, fixed, per_row):
        self.template, self.fixed, self.per_row = template, fixed, per_row
        self.batches = []

    def __call__(self, subject, how):
        strategy, batch_size = subject.strategy, subject.batch_size
        self.batches.append(batch_size)
        total = int(self.fixed + self.per_row * (batch_size + 0.5))
        limit = strategy.topology.hbm_bytes
        return self.template(total_bytes=total, fits=total <= limit, batch_size=batch_size)


@pytest.fixture
def template(without_libtpu):
    import dataclasses

    def make(**changes):
        return dataclasses.replace(
            without_libtpu, **{"compiled_for": "v5e:2x4", "limit_bytes": 15 * 2**30, **changes}
        )

    return make


def _with(monkeypatch, compiler):
    monkeypatch.setattr(dryrun, "has_libtpu", lambda: True)
    monkeypatch.setattr(dryrun, "run_once", compiler)


@pytest.mark.parametrize("per_row", [2**18, 3 * 2**20, 2**27, 2**30])
@pytest.mark.parametrize("fixed", [0, 2**30, 15 * 2**30])
def test_the_largest_batch_takes_few_compilations(template, monkeypatch, fixed, per_row):
    compiler = _Compiler(template, fixed, per_row)
    _with(monkeypatch, compiler)
    strategy = _slice()
    run = dry_run(mlp, strategy)
    limit = strategy.topology.hbm_bytes
    true = int((limit - fixed) / per_row - 0.5) // 4 * 4
    assert len(compiler.batches) <= 8
    largest = run.batch_size if run.fits else 0
    assert largest <= max(true, 0)
    assert largest >= min(true, true * 0.9 - 4)
    which = f"{largest} is the largest that fits" if run.fits else "not even 4, the smallest, fits"
    assert f"{which}, found with {len(compiler.batches)} compilation(s)" in run.notes[0]


def test_nothing_fits(template, monkeypatch):
    _with(monkeypatch, _Compiler(template, 2**40, 1))
    heard = []
    with listening(heard.append):
        run = dry_run(mlp, _slice())
    assert [(s.words, s.done, s.of) for s in heard] == [("does 4 fit?", 0, 8), (None, 1, 8)]
    assert run.fits is False
    with pytest.raises(ValueError, match="a slice, whose memory is known"):
        dry_run(mlp, _mesh_of_cpus())


def test_candidates_are_ranked(template, monkeypatch, on_tpu):
    import dataclasses

    def compile_once(strategy, how):
        data = strategy.mesh.shape["data"]
        step = dataclasses.replace(on_tpu.estimate, step=1.0 / data)
        return template(estimate=step, fits=data < 8, total_bytes=2**20)

    monkeypatch.setattr(searching, "lower_once", lambda subject, cache: subject.strategy)
    monkeypatch.setattr(searching, "compile_once", compile_once)
    meshes = [{"data": d, "model": 8 // d} for d in np.array((1, 2, 4, 8))] + [{"data": 3}]
    heard = []
    with listening(heard.append):
        among = [{"mesh": mesh} for mesh in meshes]
        ranked = ktd.search(mlp, "v5e:2x4", 8, among=among, exact=0, cache=False)
    stages_of = [(s.work, s.words, s.done) for s in heard if "TPUStrategy" in (s.words or "")]
    assert [(work, done) for work, _, done in stages_of] == [("compiling", n) for n in range(4)]
    assert ("compiling", 'ktd.TPUStrategy({"data": 8, "model": 1})') in [s[:2] for s in stages_of]
    assert [dict(c.mesh)["data"] for c in ranked.candidates] == [4, 2, 1, 8, 3]
    assert dict(ranked.best.mesh) == {"data": 4, "model": 2}
    assert "multiply to 3, on 8" in ranked.candidates[-1].error
    assert "too large" in str(ranked)
    for page in (ranked.to_html(), ranked._repr_html_()):
        assert page.count("<circle") == 4  # the fifth could not be built
        assert "multiply to 3, on 8" in page
    assert json.dumps(ranked.to_dict())


# --- the shell -------------------------------------------------------------------------------


def _shell(*arguments):
    return main(arguments)


def test_topologies_in_the_shell(capsys):
    assert _shell("topologies", "v5e") == 0
    assert "v5litepod-256" in capsys.readouterr().out
    assert _shell("topologies", "v4", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "v4:2x2x1"


def test_a_dry_run_in_the_shell(capsys, monkeypatch, tmp_path, template):
    module = tmp_path / "my_model.py"
    module.write_text("def build(): raise AssertionError('never called here')")
    monkeypatch.chdir(tmp_path)
    seen = {}

    def fake(build, strategy, **options):
        seen.update(options, build=build, strategy=strategy)
        with stages("dry run", 1) as begin:
            begin("compiling")
        return template(fits=False)

    monkeypatch.setattr(dryrun, "dry_run", fake)
    arguments = ["dry-run", "my_model:build", "--topology", "v5litepod-8", "--mesh"]
    arguments += ["data=4,model=2", "--batch-size", "64", "--x", "int32:512", "--json"]
    assert _shell(*arguments) == 1
    streams = capsys.readouterr()
    assert json.loads(streams.out)["fits"] is False
    assert streams.err == ""  # no terminal, no progress
    assert seen["x"].shape == (1, 512)
    assert dict(seen["strategy"].mesh.shape) == {"data": 4, "model": 2}
    assert seen["build"].__name__ == "build"
    assert _shell(*arguments[:-1], "--html", "report.html") == 1
    assert "does NOT fit" in (tmp_path / "report.html").read_text()
    for bad, words in (
        ([*arguments[1:], "--html", "no/report.html"], "in a folder that exists"),
        (["my_model", *arguments[2:]], "module:function"),
        (["my_model:nope", *arguments[2:]], "has no function 'nope'"),
        (["my_model:build", "--topology", "v5e:9x9", "--batch-size", "8"], "that exists"),
        (["my_model:build", *arguments[2:5], "data", *arguments[6:]], "data=64,model=4"),
        ([*arguments[1:-2], "int32:a"], "dtype:sizes"),
        ([*arguments[1:-2], "int32:-5"], "dtype:sizes"),
        ([*arguments[1:-2], "str:5"], "dtype:sizes"),
        ([*arguments[1:-2], "bfloat16:4", "--remat", "up=full,down"], "block_*=dots,head=full"),
    ):
        assert _shell("dry-run", *bad) == 2, bad
        assert words in capsys.readouterr().err


def test_predict_of_a_model_that_is_not_compiled():
    def build():
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    for given in (build, build()):
        lowered = lower(given, strategy, batch_size=8, mode="predict", platform="cpu")
        assert lowered.parameters == 36


def test_without_a_strategy_it_is_the_models_or_the_one_in_scope():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    with strategy.scope():
        model = mlp()
    alone = mlp()
    assert check_asked(model, None) is strategy
    with strategy.scope():
        assert check_asked(alone, None) is strategy
        assert check_asked(mlp, None, "verify") is strategy
    for ask in (ktd.dry_run, ktd.verify):
        with pytest.raises(ValueError, match=rf"^{ask.__name__} takes .*strategy=None\. Write "):
            ask(alone, batch_size=8)
