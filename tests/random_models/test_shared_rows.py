"""Remainders in the program of a larger batch: models drawn at random equal what they were."""

import jax
import keras
import numpy as np
import pytest
from jax.extend import core
from shared_rows import BY_ROW, built, data, drawn

import keras_tpu_dist as ktd
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.programs.rows import Differs, shared
from keras_tpu_dist.training import rows

# `MeanIoU` asks for int64.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype")

CLOSE = 2e-6
MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}]
# A recurrent layer's step needs a loop with other numbers in it.
SHARED = set(BY_ROW) - {"recurrent"}


def largest_gap(found, expected):
    """The largest difference, of numbers above one relative to the largest of an array."""
    gaps = [0.0]
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(a, np.float64) for a in (one, other))
        assert one.shape == other.shape
        gaps.append(np.abs(one - other).max(initial=0) / max(1, np.abs(other).max(initial=0)))
    return max(gaps)


def steps(choices):
    """The steps of a model by kind, each with its state and a batch of 32 rows."""
    model = built(choices)
    x, y, options = data(choices, 32)
    weights = options.get("sample_weight", np.ones(32, "float32"))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=(x, y, weights))
    groups = [model.trainable_variables, model.non_trainable_variables]
    groups += [model.optimizer.variables, model.metrics_variables]
    state = tuple([variable.value for variable in group] for group in groups)
    yield "train", model.train_step, state, (x, y, weights)
    yield "predict", model.predict_step, state[:2], (x,)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 100)),
    ],
)
def test_steps_of_models_drawn(seed):
    """The further rows are anything: what they are changes nothing."""
    choices, fewer = drawn(seed), (20, 13, 1, 31)[seed % 4]
    for kind, step, state, batch in steps(choices):
        few = jax.tree.map(lambda array: array[:fewer], batch)
        own = jax.make_jaxpr(step)(state, few)
        try:
            found = shared(jax.make_jaxpr(step)(state, batch), own)
        except Differs:
            simple = set(choices["layers"]) <= SHARED
            assert kind == "train" or fewer == 1 or not simple
            continue
        arrays = jax.tree.leaves((state, batch))
        expected = jax.jit(core.jaxpr_as_fun(own))(*jax.tree.leaves((state, few)))
        given = jax.jit(found.run)(arrays, found.numbers)
        pairs = zip(given, found.outputs, strict=True)
        given = [a if of is None else a.take(np.arange(of[1]), of[0]) for a, of in pairs]
        assert largest_gap(given, expected) <= CLOSE, (kind, choices)


def results(choices, mesh):
    with ktd.TPUStrategy(mesh).scope():
        model = built(choices)
    x, y, options = data(choices)
    history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0, **options)
    found = [np.asarray(list(history.history.values()))]
    found += [np.asarray(model.evaluate(x[:45], y[:45], verbose=0))]
    found += [model.predict(x[:size], verbose=0) for size in (45, 3)]
    return [*found, *model.get_weights()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, 4, 14, 15, 17, 18, 20])
def test_models_under_a_strategy(seed, monkeypatch):
    choices, mesh = drawn(seed), MESHES[seed % len(MESHES)]
    taken = []

    def noted(more, fewer):
        found = shared(more, fewer)
        taken.append(found)
        return found

    monkeypatch.setattr(rows, "shared", noted)
    found = results(choices, mesh)
    # `MeanIoU` reshards its matrix, which is not known to treat rows one by one.
    is_known = set(choices["layers"]) <= SHARED and "iou" not in choices["metrics"]
    assert len(taken) == 4 or not is_known
    keras.utils.clear_session()
    monkeypatch.setattr(BatchPlacer, "pads_rows", False)
    assert largest_gap(found, results(choices, mesh)) <= CLOSE, choices
