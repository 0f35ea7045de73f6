"""What the compiler is told: on TPUs that it computes while it sums gradients."""

import pickle
from importlib import metadata

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, data, mlp

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware import compiler_options, versions
from keras_tpu_dist.hardware.compiler_options import (
    OVERLAP,
    WHOLE_PRODUCTS,
    chosen_names,
    for_replicas,
    options_for,
)
from keras_tpu_dist.hardware.topology import CHIPS
from keras_tpu_dist.hardware.versions import DISABLED_PASSES

X, Y = data(29)
FAST = {"xla_cpu_enable_fast_math": False}


LARGE = {**OVERLAP, **WHOLE_PRODUCTS}
# Every libtpu that this package supports gets it on every chip.
RIGHT = {DISABLED_PASSES: "while-loop-all-reduce-code-motion"}


@pytest.fixture(autouse=True)
def libtpu_without_faults(request, monkeypatch):
    """Choices of other options are tested without those for the installed libtpu's faults."""
    if "version" not in request.fixturenames:
        monkeypatch.setattr(compiler_options, "libtpu_version", lambda: (0, 0, 1))


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ((0, 0, 41), True),
        ((0, 0, 42, 1), True),
        ((0, 0, 49), True),
        ((0, 0, 50), True),
        ((0, 0, 50, 1), True),
        ((0, 1), True),
        ((0, 0, 35), False),
        (None, True),
    ],
)
def test_a_pass_that_loses_sums_does_not_run(version, wrong, monkeypatch):
    """openxla/xla 49143."""
    monkeypatch.setattr(compiler_options, "libtpu_version", lambda: version)
    right = RIGHT if wrong else {}
    for device in (V5E, V6E):
        for options in ("auto", {}, None):
            found = options_for(options, device, 8) or {}
            assert {k: v for k, v in found.items() if k == DISABLED_PASSES} == right
            assert (DISABLED_PASSES in chosen_names(options, device, 8)) == wrong
    assert options_for(None, CPU, 8) is None
    # What is given stays in force, and an empty value switches it off.
    given = options_for({DISABLED_PASSES: "dce"}, V5E, 8)
    assert given[DISABLED_PASSES] == ("dce," + RIGHT[DISABLED_PASSES] if wrong else "dce")
    assert options_for({DISABLED_PASSES: ""}, V6E, 8) == {DISABLED_PASSES: ""}


def test_passes_that_the_process_leaves_out_stay_left_out(version, monkeypatch):
    monkeypatch.setattr(compiler_options, "libtpu_version", lambda: version)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1 --xla_disable_hlo_passes=dce,cse --xla_b=2")
    found = options_for("auto", V6E, 8)
    assert found == {DISABLED_PASSES: "dce,cse,while-loop-all-reduce-code-motion"}


@pytest.fixture
def version():
    return 0, 0, 41


@pytest.mark.parametrize(
    ("version", "reports"),
    [
        ((0, 0, 41), []),
        ((0, 0, 42, 1), ["jax-ml/jax 39025"]),
        ((0, 0, 43), []),
        ((0, 0, 45), ["vllm-project/tpu-inference 3329"]),
        ((0, 0, 50, 1), []),
        (None, []),
    ],
)
def test_a_libtpu_that_nothing_helps_is_a_warning(version, reports, monkeypatch, caplog):
    """Also beside a jaxlib that is right: the two are released apart."""
    for module in (compiler_options, versions):
        monkeypatch.setattr(module, "libtpu_version", lambda: version)
    for _ in range(2):
        options_for("auto", V5E, 8)
    assert len(caplog.records) == len(reports)
    for report, record in zip(reports, caplog.records):
        assert record.levelname == "WARNING"
        said = record.getMessage()
        assert report in said
        assert f"libtpu {'.'.join(map(str, version))} is known to compute wrongly" in said
        assert "pip install --upgrade 'jax[tpu]'" in said


def test_the_installed_libtpu_has_a_version():
    found = [d.version for d in metadata.distributions() if d.metadata["Name"] == "libtpu"]
    expected = tuple(int(n) for n in found[0].split(".")) if found else None
    assert versions.libtpu_version() == expected


V5E, V6E = (ktd.Topology.parse(f"{chip}:2x4").devices()[0] for chip in ("v5e", "v6e"))
CPU = jax.devices()[0]


@pytest.mark.parametrize(
    ("given", "device", "devices", "expected", "optional"),
    [
        ("auto", V5E, 8, OVERLAP, [*OVERLAP]),
        ("auto", V5E, 16, LARGE, [*LARGE]),
        ("auto", V6E, 8, None, []),
        ("auto", V6E, 16, WHOLE_PRODUCTS, [*WHOLE_PRODUCTS]),
        ("auto", CPU, 16, None, []),
        (None, V5E, 16, None, []),
        (FAST, CPU, 8, FAST, []),
        ({}, CPU, 8, None, []),
        ({}, V5E, 16, LARGE, [*LARGE]),
        ({"a": 1}, V5E, 8, {**OVERLAP, "a": 1}, [*OVERLAP]),
        (dict.fromkeys(LARGE, 0), V5E, 16, dict.fromkeys(LARGE, 0), []),
    ],
)
def test_what_is_given_comes_on_top_of_what_is_chosen(given, device, devices, expected, optional):
    assert options_for(given, device, devices) == expected
    assert [*chosen_names(given, device, devices)] == optional


@pytest.mark.parametrize(
    ("version", "whole"), [((0, 0, 41), False), ((0, 0, 50), True), ((0, 1), True), (None, True)]
)
def test_products_in_replicas_are_whole_where_rings_abort_the_compiler(version, whole, monkeypatch):
    """`tests/replica/test_replica_tpu.py` compiles such a step."""
    monkeypatch.setattr(compiler_options, "libtpu_version", lambda: version)
    assert for_replicas(OVERLAP, V5E) == (LARGE if whole else OVERLAP)
    assert for_replicas(None, V5E) == (WHOLE_PRODUCTS if whole else None)
    own = dict.fromkeys(WHOLE_PRODUCTS, 0)
    assert for_replicas(own, V5E) == own
    assert for_replicas(None, CPU) is None


@pytest.mark.parametrize(
    ("mesh", "options", "whole"),
    [
        ({"data": 16}, {}, False),
        ({"data": 16}, {"shard_optimizer": True}, True),
        ({"data": 16}, {"layout": "fsdp"}, True),
        ({"data": 4, "model": 4}, {"layout": "tensor_parallel"}, True),
        ({"data": 8}, {"topology": "v6e:2x4", "layout": "fsdp"}, False),
    ],
)
def test_products_stay_whole_if_weights_may_be_split(mesh, options, whole):
    strategy = ktd.TPUStrategy(mesh, **{"topology": "v6e:4x4"} | options)
    chosen = strategy.runner.compiler_options or {}
    optional = strategy.options.optional_for_compiler(strategy.mesh, strategy.layouts.layout)
    assert (WHOLE_PRODUCTS.keys() <= chosen.keys()) == whole
    assert {*optional} == chosen.keys()


@pytest.mark.parametrize("chip", CHIPS)
def test_only_v5e_fuses_all_reduces(chip):
    """libtpu refuses it elsewhere: "incorrect results, hang, SDC"."""
    device = ktd.Topology.parse(f"{chip}-8").devices()[0]
    found = options_for("auto", device, 256) or {}
    assert (OVERLAP.keys() <= found.keys()) == (chip == "v5e")


def test_what_a_compiler_refuses_is_left_out_one_by_one(monkeypatch, caplog):
    """CPU's compiler stands for a TPU's that knows two of five options."""
    chosen = {"xla_none_such": 1, **FAST, "xla_nor_this": True}
    monkeypatch.setattr(compiler_options, "_chosen_for", lambda *_: chosen)
    strategy = ktd.TPUStrategy({"data": 8}, compiler_options={"xla_cpu_enable_fast_min_max": True})
    assert strategy.runner.compiler_options == {**FAST, "xla_cpu_enable_fast_min_max": True}
    for name in ("xla_none_such", "xla_nor_this"):
        assert f"compiler option {name} is left out: the compiler for cpu refuses it" in caplog.text
        assert f"No such compile option: '{name}'" in caplog.text
    assert "compiler_options=None leaves all options to the compiler" in caplog.text
    assert all(r.levelname == "WARNING" for r in caplog.records)
    messages = len(caplog.records)
    ktd.TPUStrategy({"data": 8})
    assert len(caplog.records) == messages == 2


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"xla_cpu_fast": True}, "No such compile option: 'xla_cpu_fast'"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "'maybe' is not a valid bool value"),
    ],
)
def test_an_option_that_the_compiler_does_not_know_is_refused_before_anything_runs(bad, said):
    with pytest.raises(ValueError, match="options of XLA that the devices' compiler") as error:
        ktd.TPUStrategy({"data": 8}, compiler_options=bad)
    assert said in str(error.value)
    assert "for 'cpu'" in str(error.value)


@pytest.mark.parametrize("steps", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_model_trains_with_options_as_without(steps):
    def build():
        model = mlp()
        model.steps_per_execution = steps
        return model

    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    found = []
    for options in ("auto", FAST):
        strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "fsdp", compiler_options=options)
        assert strategy.runner.compiler_options == (None if options == "auto" else FAST)
        model = built(build, strategy)
        history = model.fit(X, Y, **fit).history
        found.append([history["loss"], model.get_weights(), model.predict(X, verbose=0)])
    assert_close(found[0], found[1])


def test_replica_code_and_pickles_and_dry_runs_are_told_too():
    strategy = ktd.TPUStrategy({"data": 8}, compiler_options=FAST)
    (doubled,) = strategy.run(lambda x: (2 * x,), (np.arange(8.0),))
    assert strategy.gather(doubled, 0)[:8].tolist() == (2 * np.arange(8.0)).tolist()
    assert pickle.loads(pickle.dumps(strategy)).runner.compiler_options == FAST
    run = ktd.dry_run(_dense, strategy, batch_size=16)
    assert run.memory


@pytest.mark.tpu_compiler
def test_the_tpu_compiler_knows_what_it_is_told_and_refuses_the_rest():
    strategy = ktd.TPUStrategy(topology="v5e:2x4", compiler_options={"xla_tpu_no_such": True})
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_tpu_no_such'") as error:
        ktd.dry_run(_dense, strategy, batch_size=16)
    assert "compiler_options are {'xla_tpu_no_such': True}; leave out" in str(error.value)
    assert "compiler_options=None" in str(error.value)
    assert "smaller mesh" not in str(error.value)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "chip", [c if c in ("v5e", "v6e") else pytest.param(c, marks=pytest.mark.slow) for c in CHIPS]
)
def test_every_chip_compiles_at_the_defaults(chip, caplog):
    run = ktd.dry_run(_dense, ktd.TPUStrategy(topology=f"{chip}-8"), batch_size=64)
    assert run.fits
    assert not caplog.records


@pytest.mark.tpu_compiler
def test_a_dry_run_leaves_out_what_the_compiler_of_a_slice_refuses(monkeypatch, caplog):
    monkeypatch.setitem(compiler_options.OVERLAP, "xla_tpu_no_such", True)
    run = ktd.dry_run(_dense, ktd.TPUStrategy(topology="v5e:2x4"), batch_size=64)
    assert run.fits
    (said,) = caplog.messages
    assert said.startswith("compiler option xla_tpu_no_such is left out: the compiler for v5e:2x4")


def _dense():
    return compiled(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]), "sgd", "mse")
