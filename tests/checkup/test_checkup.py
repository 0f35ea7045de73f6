"""A check of the devices: right is said to be right, and each fault is named."""

import concurrent.futures
import functools
import json
import logging
import pathlib
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from checkup.faults import (
    DropsAPart,
    DropsItsBatch,
    FlipsABit,
    Hangs,
    RoundsOperands,
    SwapsTwo,
)
from helpers import compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.hardware import versions
from keras_tpu_dist.tools.checkup import bounds, products, run
from keras_tpu_dist.tools.checkup import programs as checkup_programs
from keras_tpu_dist.tools.checkup.aside import aside, in_float32
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.bench import Bench, Job, Launcher, odd_ones
from keras_tpu_dist.tools.checkup.collectives import MOVES, SUMS
from keras_tpu_dist.tools.checkup.programs import MODELS, programs

MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}]


def checked(mesh, *only, launches=None, model=None, layout=None, given=None):
    strategy = ktd.TPUStrategy(mesh, layout)
    todo = run.steps(model, given or Given())
    return run.run_check(strategy, todo, 30.0, launches, only)


def classifier():
    layers = [
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(16, "relu", name="wide"),
        keras.layers.Dense(4, name="head"),
    ]
    model = keras.Sequential([keras.Input((8, 8, 2)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, "adam", loss, metrics=["accuracy"])


@pytest.mark.parametrize("mesh", MESHES)
def test_right_devices_are_right(mesh):
    check = checked(mesh, "products", "collectives")
    assert check.ok, str(check)
    assert not check.left_out
    names = [part.name for part in check.parts]
    assert names == ["products", "collectives"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout"), [*zip(MESHES, (None, "tensor_parallel", "auto"))], ids=str
)
def test_launches_of_small_models_are_right(mesh, layout):
    numbers = np.random.get_state()[1].copy()
    check = checked(mesh, "programs", layout=layout)
    assert check.ok, str(check)
    assert not check.left_out
    words = "convolutions, recurrent layers, attention, counts of ids: the same as on one device"
    assert words in check.part("programs").words
    assert np.array_equal(numbers, np.random.get_state()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "floatx"), [("mixed_bfloat16", "float32"), ("float16",) * 2])
def test_a_program_s_own_precision_is_no_problem(policy, floatx):
    """The check's own models compute in float32."""
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    try:
        check = checked({"data": 4, "model": 2}, "programs")
        assert check.ok, str(check)
        assert (keras.config.dtype_policy().name, keras.config.floatx()) == (policy, floatx)
    finally:
        keras.config.set_floatx("float32")


def in_thread(act):
    """The result of a function in another thread, which must end."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result(60)


def test_another_thread_builds_its_models_as_it_wants_meanwhile(monkeypatch):
    def dtypes(policy):
        keras.config.set_dtype_policy(policy)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        return model.layers[0].compute_dtype, model.inputs[0].dtype

    keras.config.set_dtype_policy("float16")
    # What would change for all threads.
    monkeypatch.setattr(keras.config, "set_floatx", None)
    try:
        with in_float32():
            assert in_thread(lambda: dtypes("mixed_bfloat16")) == ("bfloat16", "float32")
            assert keras.config.dtype_policy().name == "float32"
        assert keras.config.dtype_policy().name == "float16"
    finally:
        keras.config.set_dtype_policy("float32")


def test_one_device():
    check = run.run_check(
        ktd.TPUStrategy(devices=jax.devices()[:1]), run.steps(), 30.0, None, ["collectives"]
    )
    assert check.ok
    assert "one device" in check.part("collectives").left_out
    assert "left out: collectives: one device exchanges nothing" in str(check)


# --- each fault is named -------------------------------------------------------------------------


@pytest.mark.parametrize("sometimes", [False, True])
def test_a_flipped_bit_in_a_product(sometimes):
    check = checked(
        {"data": 4, "model": 2},
        "products",
        launches=FlipsABit(kinds=("product",), device=5, sometimes=sometimes),
    )
    assert not check.ok
    assert {p.devices for p in check.problems} == {(5,)}
    assert all("device 5" in p.what for p in check.problems)
    if sometimes:
        assert "twice, has different bits" in check.problems[0].what
        assert "Silent data corruption" in check.problems[0].means
    for dtype in ("float32", "bfloat16", "int8"):
        assert any(dtype in p.what for p in check.problems), dtype


def test_a_product_in_the_wrong_precision():
    faulty = RoundsOperands(kinds=("product",), devices=[3])
    (problem,) = checked({"data": 8}, "products", launches=faulty).problems
    assert "device 3: the product in float32" in problem.what
    assert "rounded to bfloat16" in problem.what
    assert problem.devices == (3,)
    faulty = RoundsOperands(kinds=("product",), devices=range(8))
    (problem,) = checked({"data": 8}, "products", launches=faulty).problems
    assert "a setting or the compiler, not a chip" in problem.means
    assert "jax_default_matmul_precision" in problem.fix


@pytest.mark.parametrize("kind", [*SUMS, *MOVES])
@pytest.mark.parametrize("axis", ["data", "model"])
def test_a_part_that_is_dropped(kind, axis):
    faulty = DropsAPart(kinds=(kind,), axis=axis, device=6)
    check = checked({"data": 4, "model": 2}, "collectives", launches=faulty)
    assert check.problems
    for problem in check.problems:
        assert problem.axis == axis
        assert problem.devices == (6,)
        assert f"{kind} over {axis!r}" in problem.what
        assert "device 6" in problem.what


@pytest.mark.parametrize("mesh", MESHES)
def test_two_devices_that_are_swapped(mesh):
    check = checked(mesh, "collectives", launches=SwapsTwo(devices=(2, 7)))
    assert check.problems
    axes = {p.axis for p in check.problems}
    assert axes == {name for name, size in mesh.items() if size > 1}
    moved = [p for p in check.problems if "permute" in p.what]
    assert moved
    for problem in moved:
        assert set(problem.devices) <= {2, 7}
        assert "instead of those of device" in problem.what


def counting(launches=None):
    """The part of the check with the smallest of its models."""
    step = run.Planned("programs", functools.partial(programs, models=MODELS[-1:]), 0.0)
    return run.run_check(ktd.TPUStrategy({"data": 4, "model": 2}), [step], 30.0, launches)


def test_a_device_that_corrupts_a_launch_of_several_steps_is_named():
    check = counting()
    assert check.ok, str(check)
    assert "4 steps a launch, uneven batches: counts of ids: the same" in check.parts[0].words
    (problem,) = counting(FlipsABit(kinds=("step",), device=4)).problems
    assert problem.devices == (4,)
    assert problem.what.startswith("counts of ids: device 4: after the step, the copy of ")


def test_faults_of_the_compiler_that_nothing_avoids_are_problems(monkeypatch):
    avoided, *others = versions.TPU_FAULTS
    monkeypatch.setattr(checkup_programs, "tpu_faults", lambda version: (avoided, others[0]))
    monkeypatch.setattr(Bench, "platform", "tpu")
    small = [lambda kernels: MODELS[-1](False)]
    (problem,) = programs(Bench(ktd.TPUStrategy(), Launcher(), 30.0), small).problems
    assert others[0].what in problem.what
    assert "pip install --upgrade 'jax[tpu]'" in problem.fix


def test_a_launch_that_hangs_ends_the_check():
    faulty = Hangs(kinds=("all-gather",), axis="model", patience_s=0.3)
    check = checked({"data": 4, "model": 2}, "collectives", "programs", launches=faulty)
    (problem,) = check.problems
    assert problem.what == "all-gather over 'model' in int32 did not finish within 0 s"
    assert "collectives hangs" in check.part("programs").left_out


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [(v.path, np.array(v), v.value.sharding, id(v)) for v in variables]


def test_a_step_of_a_model_that_is_left_as_it_is():
    mesh = {"data": 4, "model": 2}
    strategy = ktd.TPUStrategy(mesh, "tensor_parallel")
    with strategy.scope():
        model = classifier()
    optimizer, before, weights = model.optimizer, state_of(model), model.get_weights()
    numbers = np.random.get_state()[1].copy()
    check = checked(mesh, "step", model=model, layout="tensor_parallel")
    assert check.ok, str(check)
    assert not check.left_out
    assert "8 gradients the same as on one device" in check.part("step").words
    assert model.optimizer is optimizer
    assert not optimizer.built
    for (path, value, layout, number), (path2, value2, layout2, number2) in zip(
        before, state_of(model), strict=True
    ):
        assert (path, layout, number) == (path2, layout2, number2)
        assert value.tobytes() == value2.tobytes()
    assert np.array_equal(numbers, np.random.get_state()[1])
    # Its training goes as without a check.
    x, y = np.ones((13, 8, 8, 2), "float32"), np.arange(13) % 4
    found = model.fit(x, y, batch_size=5, verbose=0).history["loss"]
    keras.utils.set_random_seed(0)
    keras.utils.clear_session(free_memory=False)
    with ktd.TPUStrategy(mesh, "tensor_parallel").scope():
        other = classifier()
    other.set_weights(weights)
    assert found == other.fit(x, y, batch_size=5, verbose=0).history["loss"]


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        (FlipsABit(kinds=("step",), device=6), "differs from the copies on the other devices"),
        (FlipsABit(kinds=("step",), device=6, sometimes=True), "twice, has different bits"),
    ],
)
def test_a_device_that_corrupts_a_step_is_named(faulty, words):
    mesh = {"data": 4, "model": 2}
    with ktd.TPUStrategy(mesh).scope():
        model = classifier()
    before = state_of(model)
    check = checked(mesh, "step", model=model, launches=faulty)
    assert [p.devices for p in check.problems] == [(6,)]
    assert words in check.problems[0].what
    assert [v.tobytes() for _, v, _, _ in before] == [v.tobytes() for _, v, _, _ in state_of(model)]


def test_a_batch_that_does_not_arrive_in_a_step():
    mesh = {"data": 8}
    with ktd.TPUStrategy(mesh).scope():
        model = classifier()
    check = checked(mesh, "step", model=model, launches=DropsItsBatch(kinds=("step",), device=2))
    (problem,) = check.problems
    assert problem.what.startswith("all devices: ")
    assert "differs from one device by" in problem.what
    check = checked(mesh, "step", model=model, launches=DropsAPart(kinds=("step",), device=2))
    assert [p.devices for p in check.problems] == [(2,)]


def test_gradients_that_are_all_small_hide_nothing():
    """Those of a mean over many outputs; here all are below 1e-7."""
    with ktd.TPUStrategy({"data": 8}).scope():
        model = classifier()
        model.compile("adam", model.loss, loss_weights=[1e-8])
    check = checked({"data": 8}, "step", model=model)
    assert check.ok, str(check)
    check = checked({"data": 8}, "step", model=model, launches=DropsItsBatch(kinds=("step",)))
    assert "the gradient of " in check.problems[0].what


def test_a_step_that_raises_leaves_the_model():
    class Raises(Launcher):
        def run(self, job, program, *args):
            raise RuntimeError("INTERNAL: gone")

    with ktd.TPUStrategy({"data": 8}).scope():
        model = classifier()
    optimizer, before = model.optimizer, state_of(model)
    check = checked({"data": 8}, "step", model=model, launches=Raises())
    assert "INTERNAL: gone" in check.problems[0].what
    assert model.optimizer is optimizer
    assert keras.distribution.distribution() is None
    assert [v.tobytes() for _, v, _, _ in before] == [v.tobytes() for _, v, _, _ in state_of(model)]


def test_a_step_with_data_of_the_user():
    with ktd.TPUStrategy({"data": 8}).scope():
        ids = keras.Input((6,), dtype="int32", name="ids")
        x = keras.layers.Embedding(11, 8)(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalMaxPooling1D()(x)))
        model.compile("sgd", "mse")
    given = Given(np.arange(60).reshape(10, 6) % 11, np.linspace(0, 1, 10)[:, None])
    check = checked({"data": 8}, "step", model=model, given=given)
    assert check.ok, str(check)
    assert "10 rows" in check.part("step").words
    assert checked({"data": 8}, "step", model=model).ok


@pytest.mark.parametrize(
    ("layers", "options", "why"),
    [
        ([keras.Input((4,))], None, "not compiled"),
        ([keras.Input((4,))], {"run_eagerly": True}, "run_eagerly"),
        ([], {}, "not built"),
    ],
)
def test_a_model_that_cannot_be_checked_is_an_error_at_once(layers, options, why):
    """Otherwise all is "right" after minutes, and its step was left out."""
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    if options is not None:
        model.compile("sgd", "mse", **options)
    with pytest.raises(ValueError, match=why):
        ktd.TPUStrategy().check(model)


def test_a_step_that_is_not_finite_is_not_compared():
    with ktd.TPUStrategy({"data": 8}).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", lambda y, p: keras.ops.log(-keras.ops.abs(p) - 1.0))
    part = checked({"data": 8}, "step", model=model).part("step")
    assert part.ok
    assert "not compared with one device: its results are not finite" in part.words


# --- several processes ---------------------------------------------------------------------------


def test_two_processes_end_with_the_same_verdict(tmp_path):
    job = pathlib.Path(__file__).with_name("job.py")
    command = [sys.executable, "-m", "keras_tpu_dist", "launch", "--processes", "2"]
    command += ["--devices", "4", str(job), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    one, other = (json.loads((tmp_path / f"{n}.json").read_text()) for n in range(2))
    for each in one, other:
        for check in each.values():
            check.pop("seconds")
    assert one == other
    assert one["right"]["ok"], one["right"]
    assert one["right"]["processes"] == 2
    assert all(not part["left_out"] for part in one["right"]["parts"])
    problems = [p for part in one["faulty"]["parts"] for p in part["problems"]]
    assert {part["name"] for part in one["faulty"]["parts"] if part["problems"]} == {
        *("products", "collectives", "step")
    }
    # An error in one process is known in both, and what follows runs.
    products, numbers = one["raised"]["parts"]
    assert [p["what"] for p in products["problems"]] == [
        "process 1: RuntimeError: INTERNAL: broken"
    ]
    assert numbers["ok"]
    # The fault is on a device of process 1, and process 0 knows of it.
    (drew,) = one["drew"]["parts"][0]["problems"]
    assert drew["what"].startswith("process 1: the model's weights differ from those of process 0")
    assert "set_random_seed" in drew["fix"]
    faulty = int((tmp_path / "device").read_text())
    assert all(faulty in p["devices"] for p in problems)
    assert [faulty] in [p["devices"] for p in problems]


# --- the report, the time, the words -------------------------------------------------------------


def test_the_method_and_what_it_takes():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    check = strategy.check(minutes=1e-6)
    assert [part.name for part in check.left_out] == ["products", "collectives", "programs"]
    assert all("remained" in part.left_out for part in check.parts)
    assert check.ok
    with pytest.raises(ValueError, match="attached"):
        ktd.TPUStrategy(topology="v5e:2x4").check()


@pytest.mark.parametrize(
    ("seconds", "verdict", "style"),
    [
        ({}, "all correct", "good"),
        ({"step": 1e9}, "nothing wrong so far, no time for step", "muted"),
        (
            {"step": 1e9, "programs": 1e9},
            "nothing wrong so far, no time for step, programs",
            "muted",
        ),
        (
            dict.fromkeys(("products", "step", "collectives", "programs"), 1e9),
            "nothing checked, no time for products, step, collectives and 1 more",
            "muted",
        ),
        (
            {"step": 1e9, "collectives": None},
            "1 problem, no time for step",
            "bad",
        ),
    ],
)
def test_the_verdict_says_what_found_no_time(seconds, verdict, style, tmp_path):
    def raises(bench):
        raise RuntimeError("INTERNAL: broken")

    def right(name, bench):
        return run.CheckPart(name, "right")

    todo = [
        run.Planned(name, functools.partial(right, name), seconds.get(name, 0.0))
        if seconds.get(name, 0.0) is not None
        else run.Planned(name, raises, 0.0)
        for name in ("products", "step", "collectives", "programs")
    ]
    check = run.run_check(ktd.TPUStrategy(), todo, 1.0)
    assert f": {verdict}, " in str(check).splitlines()[0]
    check.to_html(tmp_path / "check.html")
    assert f'<span class="{style}">{verdict}</span>' in (tmp_path / "check.html").read_text()


def test_a_report_can_be_sent_and_fits_on_a_screen(tmp_path):
    check = checked(
        {"data": 4, "model": 2}, "products", launches=FlipsABit(kinds=("product",), device=5)
    )
    plain = json.loads(json.dumps(check.to_dict()))
    assert plain["ok"] is False
    assert plain["parts"][0]["problems"][0]["devices"] == [5]
    assert run.CheckPart.of_dict(plain["parts"][0]) == check.parts[0]
    text = str(check)
    assert "  means: " in text
    assert "  do: " in text
    assert len(text.splitlines()) < 25
    check.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<br>  means: " in page
    assert "device 5" in page
    assert "device 5" in check._repr_html_()


def test_precisions_of_a_tpu():
    kinds = {kind.words: kind for kind in products.kinds("tpu")}
    assert list(kinds) == [
        *("float32 (1 bfloat16 pass)", "float32 (highest)", "bfloat16", "int8"),
    ]
    with jax.default_matmul_precision("high"):
        assert products.kinds("tpu")[0].words == "float32 (3 passes)"
    allowed = [kind.allowed(512) for kind in kinds.values()]
    assert 5e-3 < allowed[0] < 1e-2
    assert allowed[1] < 4e-5
    assert allowed[2] < 4e-5
    assert allowed[3] == 0
    # Operands rounded to bfloat16 are within what one pass may be off, and beyond all others.
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(512, 512)).astype("float32") for _ in range(2))
    short = [np.asarray(x.astype(jax.numpy.bfloat16), np.float64) for x in (a, b)]
    off = abs(short[0] @ short[1] - a.astype(float) @ b) / (abs(a).astype(float) @ abs(b))
    assert allowed[1] < off.max() < allowed[0]
    assert bounds.tolerance("cpu") == 1e-5


def test_who_is_odd():
    assert odd_ones({3: 1, 4: 1, 5: 2}) == [5]
    assert odd_ones({3: 1, 4: 2}) == [3, 4]
    assert odd_ones({3: 1, 4: 1, 5: 2, 6: 2}) == [3, 4, 5, 6]
    assert odd_ones({}) == []


def test_a_notice_is_still_given_of_the_users_own_layers(caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    with aside():
        log_once("a notice of no model of the user's")
    assert "notice" not in caplog.text
    log_once("a notice of no model of the user's")
    assert "notice" in caplog.text


def test_words_of_a_job():
    assert str(Job("all-reduce", "data", "float32")) == "all-reduce over 'data' in float32"
