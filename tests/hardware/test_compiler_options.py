"""What the compiler is told: on TPUs that it computes while it sums gradients."""

import pickle

import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, mlp

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.compiler_options import OVERLAP, WHOLE_PRODUCTS, options_for

X, Y = data(29)
FAST = {"xla_cpu_enable_fast_math": False}


LARGE = {**OVERLAP, **WHOLE_PRODUCTS}


@pytest.mark.parametrize(
    ("given", "platform", "devices", "expected"),
    [
        ("auto", "tpu", 8, OVERLAP),
        ("auto", "tpu", 16, LARGE),
        ("auto", "cpu", 16, None),
        (None, "tpu", 16, None),
        (FAST, "cpu", 8, FAST),
        ({}, "cpu", 8, None),
        ({}, "tpu", 16, LARGE),
        ({"a": 1}, "tpu", 8, {**OVERLAP, "a": 1}),
        (dict.fromkeys(LARGE, 0), "tpu", 16, dict.fromkeys(LARGE, 0)),
    ],
)
def test_what_is_given_comes_on_top_of_what_is_chosen(given, platform, devices, expected):
    assert options_for(given, platform, devices) == expected


@pytest.mark.parametrize("bad", ["fast", 3, ["xla_foo"], {1: True}, {"xla_foo": None}])
def test_what_can_be_no_options_is_refused(bad):
    with pytest.raises(ValueError, match="compiler_options is 'auto', None, or a dict") as error:
        ktd.TPUStrategy(compiler_options=bad)
    assert '{"xla_enable_async_all_reduce": False}' in str(error.value)


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


@pytest.mark.parametrize("steps", [1, 3])
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
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_tpu_no_such'"):
        ktd.dry_run(_dense, strategy, batch_size=16)


def _dense():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model
