"""Which optimizers of Keras leave rows alone that a step does not look up: all of them, tried."""

import inspect

import keras
import numpy as np
import pytest
from helpers import assert_close
from test_by_rows import BATCH, IDS, ROWS, ranking, strategy_of, trained

from keras_tpu_dist.programs.answers import words_of
from keras_tpu_dist.programs.tables.optimizers import EXACT, why_every_row
from keras_tpu_dist.programs.tables.step import BY_ROWS

NOT_ALONE = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
KINDS = {
    name: kind
    for name, kind in vars(keras.optimizers).items()
    if inspect.isclass(kind) and name not in NOT_ALONE
}


def data():
    """Steps that look up 16 rows each, others from step to step; row 0 in none of them."""
    rng = np.random.default_rng(0)
    steps = [rng.integers(1 + 16 * n, 17 + 16 * n, (BATCH, IDS)) for n in (0, 1, 0, 2)]
    return np.concatenate(steps).astype("int32") % ROWS, rng.normal(size=(4 * BATCH, 1))


def model_of(optimizer):
    model = ranking(lambda: optimizer)()
    return model, model.get_layer("table").embeddings


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_optimizer_is_declared_if_and_only_if_other_rows_stay(kind):
    x, y = data()
    model, table = model_of(kind(learning_rate=0.1))
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    slots = [
        v for v in model.optimizer.variables if tuple(v.shape) == (ROWS, keras.ops.shape(table)[1])
    ]
    before = [np.asarray(v.value) for v in (table, *slots)]
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    others = ~np.isin(np.arange(ROWS), x[:BATCH])
    same = all(
        np.array_equal(old[others], np.asarray(v.value)[others])
        for old, v in zip(before, (table, *slots))
    )
    # A step of Ftrl keeps rows, but its first one replaces every row; others have slots of rows.
    assert (not why_every_row(model, table)) == (kind in EXACT)
    assert same or kind not in EXACT


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_used_rows_alone_give_what_every_row_gives(kind):
    results = []
    for tables in (None, "rows"):
        model, result = trained(ranking(lambda: kind(0.1)), strategy_of("data8", tables), *data())
        results.append(result)
    assert words_of(model, "tables") == {"table/embeddings": BY_ROWS}
    for part in results[0]:
        assert_close(*[result[part] for result in results], 1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"clipnorm": 0.1},
        {"global_clipnorm": 0.1},
        {"use_ema": True},
        {"gradient_accumulation_steps": 2},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_change_other_rows_are_refused(arguments):
    (name,) = arguments
    assert f"{name}=" in why_every_row(*model_of(keras.optimizers.SGD(0.1, **arguments)))


def test_what_leaves_other_rows_alone_is_not_refused():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    for optimizer in (
        keras.optimizers.SGD(schedule, clipvalue=0.1),
        keras.optimizers.Adagrad(0.1, loss_scale_factor=8.0),
    ):
        assert why_every_row(*model_of(optimizer)) == ""


class Own(keras.optimizers.SGD):
    """It may do anything."""


def test_classes_that_nobody_declared_are_refused():
    sgd = keras.optimizers.SGD(0.1)
    for optimizer in (
        Own(0.1),
        keras.optimizers.LossScaleOptimizer(sgd),
    ):
        words = why_every_row(*model_of(optimizer))
        assert words.startswith(f"{type(optimizer).__name__} also changes other rows")
