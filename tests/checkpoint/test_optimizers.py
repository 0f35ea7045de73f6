"""Optimizers that hold others: which saved one is which, in the same process and another."""

import logging

import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint import manifest as manifests
from keras_tpu_dist.checkpoint import snapshot

opt = keras.optimizers
X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = X[:, :6]


def several(default, others):
    return opt.MultiOptimizer(opt.OptimizerMap(default, others))


def by_callable(one, other):
    return opt.MultiOptimizer(lambda variable: one if "/a/" in variable.path else other)


# Each makes the same optimizer twice, written in two ways.
SAME = {
    "same": [lambda: several(opt.Adam(0.1), {"m/b/.*": opt.Adam(1e-3)})] * 2,
    "three": [
        lambda: several(opt.Adam(0.1), {"m/b/.*": opt.Adam(1e-3), "m/c/.*": opt.SGD(0.02, 0.9)})
    ]
    * 2,
    "without slots": [lambda: several(opt.SGD(0.1), {"m/b/.*": opt.SGD(1e-3)})] * 2,
    "made in another order": [
        lambda: several(opt.Adam(0.1), {"m/b/.*": opt.Adam(1e-3)}),
        lambda: several(others={"m/b/.*": opt.Adam(1e-3)}, default=opt.Adam(0.1)),
    ],
    "map in another order": [
        lambda: several(opt.SGD(0.5), {"m/a/.*": opt.Adam(0.1), "m/(b|c)/.*": opt.Adam(1e-3)}),
        lambda: several(opt.SGD(0.5), {"m/(b|c)/.*": opt.Adam(1e-3), "m/a/.*": opt.Adam(0.1)}),
    ],
    "named, in another order": [
        lambda: several(
            opt.SGD(0.5), {"m/a/.*": opt.SGD(0.1, name="p"), "m/[bc]/.*": opt.SGD(1e-3, name="q")}
        ),
        lambda: several(
            opt.SGD(0.5), {"m/[bc]/.*": opt.SGD(1e-3, name="q"), "m/a/.*": opt.SGD(0.1, name="p")}
        ),
    ],
    "equal names": [lambda: several(opt.Adam(0.1, name="p"), {"m/b/.*": opt.Adam(1e-3, name="p")})]
    * 2,
    "callable": [
        lambda: by_callable(opt.Adam(0.1), opt.Adam(1e-3)),
        lambda: several(opt.Adam(0.1), {"m/[bc]/.*": opt.Adam(1e-3)}),
    ],
    "loss scale": [
        lambda: opt.LossScaleOptimizer(
            several(opt.Adam(0.1), {"m/b/.*": opt.Adam(1e-3)}), initial_scale=8.0
        )
    ]
    * 2,
}


# Older checkpoints do not say which of two of one class trains what.
UNCLEAR = ("map in another order", "made in another order", "callable")


def made(optimizer, seed=1):
    keras.utils.set_random_seed(seed)
    with ktd.TPUStrategy().scope():
        model = keras.Sequential(
            [keras.Input((6,))] + [keras.layers.Dense(6, "tanh", name=name) for name in "abc"],
            name="m",
        )
        model.compile(optimizer, "mse")
    return model


def fit(model, epochs, first=0, *callbacks):
    model.fit(
        X, Y, 8, epochs, initial_epoch=first, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


def close(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def inner(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return optimizer.optimizers


def rates(model):
    """The rate and count of the optimizer of each layer."""
    found = {}
    for one in inner(model):
        for weight in one._trainable_variables:
            found[weight.path] = float(one.learning_rate), int(one.iterations)
    return found


def write_as_before(monkeypatch):
    """Checkpoints as an older version wrote them, which did not tell optimizers apart."""
    row = manifests._row
    monkeypatch.setattr(
        manifests, "_row", lambda saved: {k: v for k, v in row(saved).items() if k != "optimizer"}
    )
    monkeypatch.setattr(snapshot, "kinds_of_optimizers", lambda objects: {})


@pytest.mark.parametrize("new_process", [False, True], ids=["", "numbers from 0"])
@pytest.mark.parametrize("by", ["fit", "restore", "old format"])
@pytest.mark.parametrize("name", SAME)
def test_each_goes_on(name, by, new_process, tmp_path, caplog, monkeypatch):
    make, again = SAME[name]
    if by == "old format":
        if name in UNCLEAR:
            pytest.skip("see below")
        write_as_before(monkeypatch)
    whole = fit(fit(made(make()), 2), 3, 2)
    keras.utils.clear_session(free_memory=False)
    made(make())  # so that numbers differ
    first = fit(made(make()), 2, 0, ktd.callbacks.Checkpoint(tmp_path))
    if new_process:
        keras.utils.clear_session(free_memory=False)
    model = made(again(), seed=5)
    with caplog.at_level(logging.WARNING):
        if by == "fit":
            fit(model, 3, 0, ktd.callbacks.Checkpoint(tmp_path))
        else:
            assert ktd.restore(model, tmp_path).optimizer
            assert rates(model) == rates(first)
            fit(model, 3, 2)
    assert rates(model) == rates(whole)
    close(model.get_weights(), whole.get_weights())
    assert "optimizer" not in caplog.text.replace("has_optimizer", "")


# In the first, all orders are the same, and nothing tells.
@pytest.mark.parametrize("name", UNCLEAR[1:])
def test_what_an_older_checkpoint_does_not_tell_begins_anew(name, tmp_path, caplog, monkeypatch):
    make, again = SAME[name]
    write_as_before(monkeypatch)
    fit(made(make()), 2, 0, ktd.callbacks.Checkpoint(tmp_path))
    model = made(again(), seed=5)
    with caplog.at_level(logging.WARNING):
        ktd.restore(model, tmp_path)
    assert caplog.text.count("the optimizer differs from the saved one") == 1
    expected = made(again())
    expected.optimizer.build(expected.trainable_variables)
    assert rates(model) == rates(expected)


@pytest.mark.parametrize("name", ["same", "three", "map in another order"])
def test_loops(name, tmp_path):
    make, again = SAME[name]

    def loop(make):
        with ktd.TPUStrategy().scope():
            optimizer = make()
            model = made(optimizer)
            optimizer.build(model.trainable_variables)
        return model, ktd.LoopCheckpoint(tmp_path, model, optimizer)

    def steps(model):
        for _ in range(2):
            gradients = [np.full(v.shape, 0.1, "float32") for v in model.trainable_variables]
            model.optimizer.apply(gradients, model.trainable_variables)

    first, saved = loop(make)
    steps(first)
    with saved:
        saved.save(2)
    model, saved = loop(again)
    with saved:
        saved.restore()
    assert rates(model) == rates(first)
    steps(first)
    steps(model)
    close(model.get_weights(), first.get_weights())


def test_another_class_within_is_one_warning(tmp_path, caplog):
    first = fit(
        made(several(opt.Adam(0.1), {"m/b/.*": opt.SGD(1e-3, 0.9)})),
        2,
        0,
        ktd.callbacks.Checkpoint(tmp_path),
    )
    model = made(several(opt.Adam(0.1), {"m/b/.*": opt.Lion(1e-3)}), seed=5)
    with caplog.at_level(logging.WARNING):
        assert ktd.restore(model, tmp_path).optimizer
    lines = [line for line in caplog.messages if "optimizer" in line]
    assert len(lines) == 1
    assert "the optimizer differs from the saved one (MultiOptimizer, saved by" in lines[0]
    assert "momentums begin anew, and momentums of the checkpoint are not used" in lines[0]
    assert "The counts and rates of lion" in lines[0]
    lion, adam = inner(model)
    # Both call a slot "momentum", and mean another thing.
    assert int(lion.iterations) == 0
    assert all((np.asarray(v) == 0).all() for v in lion.variables[2:])
    for own, other in zip(adam.variables, inner(first)[1].variables, strict=True):
        np.testing.assert_array_equal(own, other)


def test_another_rate_within_is_one_warning(tmp_path, caplog):
    fit(
        made(several(opt.Adam(0.1), {"m/b/.*": opt.SGD(1e-3, 0.9)})),
        2,
        0,
        ktd.callbacks.Checkpoint(tmp_path),
    )
    model = made(several(opt.Adam(0.1), {"m/b/.*": opt.SGD(0.05, 0.9)}), seed=5)
    with caplog.at_level(logging.WARNING):
        assert ktd.restore(model, tmp_path).optimizer
    lines = [line for line in caplog.messages if "learning rate" in line]
    assert len(lines) == 1
    assert (
        "in the MultiOptimizer is 0.001, as it was saved, and not 0.05, as you compiled"
        in (lines[0])
    )
    assert float(inner(model)[0].learning_rate) == pytest.approx(1e-3)


def test_a_scaled_loss_is_put_around(tmp_path, caplog):
    """As mixed_float16 does it: the moments stay those of Adam."""
    first = fit(made(opt.Adam(1e-2)), 2, 0, ktd.callbacks.Checkpoint(tmp_path))
    model = made(opt.LossScaleOptimizer(opt.Adam(1e-2), initial_scale=4.0), seed=5)
    with caplog.at_level(logging.WARNING):
        assert ktd.restore(model, tmp_path).optimizer
    own = model.optimizer.inner_optimizer
    for one, other in zip(own.variables, first.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(model.optimizer.dynamic_scale) == 4.0
    assert "The counts and rates of loss_scale_optimizer" in caplog.text


def test_a_scaled_loss_around_another_class(tmp_path):
    """The outer class is the same: Lion's momentum was loaded as that of SGD."""
    fit(made(opt.LossScaleOptimizer(opt.Lion(1e-2))), 2, 0, ktd.callbacks.Checkpoint(tmp_path))
    model = made(opt.LossScaleOptimizer(opt.SGD(1e-2, 0.9)), seed=5)
    ktd.restore(model, tmp_path)
    sgd = model.optimizer.inner_optimizer
    assert int(sgd.iterations) == 0
    assert all((np.asarray(v) == 0).all() for v in sgd.variables[2:])


@pytest.mark.parametrize("form", [".keras", ".weights.h5"])
def test_files_of_keras(form, tmp_path, caplog):
    make = SAME["three"][0]
    first = fit(made(make()), 2)
    path = tmp_path / f"m{form}"
    {".keras": first.save, ".weights.h5": first.save_weights}[form](path)
    model = made(make(), seed=5)
    with caplog.at_level(logging.WARNING):
        assert ktd.restore(model, path).optimizer
    assert not [line for line in caplog.messages if "optimizer" in line]
    assert rates(model) == rates(first)
    close(fit(model, 3, 2).get_weights(), fit(first, 3, 2).get_weights())


def test_a_file_of_keras_with_other_optimizers_within_is_said(tmp_path, caplog):
    """All shapes are the same: a file has the variables in their order only."""
    orders = SAME["named, in another order"]
    fit(made(orders[0]()), 2).save(tmp_path / "m.keras")
    model = made(orders[1](), seed=5)
    assert not ktd.restore(model, tmp_path / "m.keras").optimizer
    assert caplog.text.count("the optimizer's state is not loaded: that in") == 1
    assert {count for _, count in rates(model).values()} == {0}
