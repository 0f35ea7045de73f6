"""Which saved array belongs to which variable: by name, or by order where only numbers differ."""

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_tpu_dist.checkpoint.names import (
    Entry,
    automatic_names,
    canonical,
    in_order_of_numbers,
    match,
    named_state,
    without_numbers,
)


def entries(*paths, shape=(2,)):
    return [Entry(path, shape, "float32") for path in paths]


def parts(paths):
    return {part for path in paths for part in path.split("/")}


def matched(here, saved, **options):
    """As if Keras had given all names."""
    names = {"automatic": parts(here), "automatic_there": parts(saved)}
    found = match(entries(*here), entries(*saved), **names | options)
    return {here[i]: saved[j] for i, j in found.pairs.items()}, found


def test_numbers_in_names_of_the_user_are_part_of_them():
    """`task_1` was put into `task_2`, also with strict=True."""
    here = ["m_1/task_2/kernel", "m_1/task_3/kernel", "m_1/dense_4/kernel"]
    saved = ["m/task_1/kernel", "m/task_2/kernel", "m/dense/kernel"]
    automatic = {"m", "m_1", "dense", "dense_4"}
    pairs, found = matched(here, saved, automatic=automatic, automatic_there=automatic)
    assert pairs == {here[0]: saved[1], here[2]: saved[2]}
    assert (found.missing, found.unexpected) == ((here[1],), (saved[0],))
    # What has the same path is the same, whoever gave the name.
    pairs, found = matched(
        ["m/dense_1/w"], ["m/dense_1/w"], automatic=(), automatic_there=["dense_1"]
    )
    assert found.complete


def test_which_names_keras_gave():
    keras.utils.clear_session(free_memory=False)
    layers = keras.layers

    class Task(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.inner = layers.Dense(2)

        def build(self, shape):
            self.inner.build(shape)
            self.w = self.add_weight(shape=(2,))

        def call(self, x):
            return self.inner(x)

    model = keras.Sequential(
        [
            keras.Input((4, 3)),
            layers.Dense(3),
            layers.Dense(3, name="task_1"),
            Task(),
            layers.Dense(2, name="my_dense_2"),
            layers.Dropout(0.1),
            layers.Bidirectional(layers.LSTM(2)),
            layers.Dense(2, name="layer_3"),
        ]
    )
    metrics = [keras.metrics.AUC(), keras.metrics.AUC(), keras.metrics.Mean(name="mean_9")]
    found = automatic_names([model, *metrics, keras.optimizers.Adam(), keras.optimizers.Adam()])
    assert {"sequential", "dense", "task", "dense_1", "bidirectional"} <= found
    assert {"auc", "auc_1", "adam", "adam_1"} <= found
    assert not {"task_1", "my_dense_2", "layer_3"} & found
    paths = {without_numbers(v.path, found) for v in model.variables}
    for path in (
        "sequential/dense/kernel",
        "sequential/task/variable",
        "sequential/task/dense/kernel",
        "sequential/task_1/kernel",
        "sequential/my_dense_2/kernel",
        "sequential/bidirectional/forward_lstm/lstm_cell/kernel",
        "sequential/layer_3/kernel",
        "seed_generator/seed_generator_state",
    ):
        assert path in paths, paths
    # A name that the user gave to one layer is not Keras's, though another has it of Keras.
    both = [Task(name="task_5"), layers.Dense(2, name="task_5")]
    assert "task_5" in automatic_names(both[:1])
    assert "task_5" not in automatic_names(both)


def test_the_same_names_in_another_order_are_matched_by_name():
    pairs, found = matched(["block_2/w", "block_1/w"], ["block_1/w", "block_2/w"])
    assert pairs == {"block_2/w": "block_2/w", "block_1/w": "block_1/w"}
    assert not found.renamed


def test_what_is_missing_unexpected_and_of_another_shape():
    here = [*entries("a/kernel", "b/kernel"), *entries("head/kernel", shape=(3,))]
    saved = entries("a/kernel", "bb/kernel", "head/kernel")
    found = match(here, saved, automatic=())
    assert (found.missing, found.unexpected) == (("b/kernel",), ("bb/kernel",))
    assert found.reshaped == ("head/kernel (3,), saved as (2,)",)
    assert found.misfits == [
        "missing 'b/kernel' Did you mean 'bb/kernel'?",
        "unexpected 'bb/kernel' Did you mean 'b/kernel'?",
        "of another shape or dtype: head/kernel (3,), saved as (2,)",
    ]


def test_exclude_and_rename():
    here, saved = ["encoder/a/w", "head/w"], ["old/a/w", "head/w"]
    pairs, found = matched(here, saved, exclude=["*head*"], rename=[("^old/", "encoder/")])
    assert pairs == {"encoder/a/w": "old/a/w"}
    assert found.complete
    assert found.kept == ("head/w",)


@given(st.lists(st.sampled_from(["a", "b", "a_1", "a_2", "b_7"]), max_size=6), st.integers(1, 9))
def test_a_model_made_again_is_matched_one_to_one(names, later):
    saved = [f"{name}/w" for name in names]
    here = [f"{canonical(name)}_{i + later}/w" for i, name in enumerate(names)]
    _, found = matched(here, saved)
    assert found.complete
    assert sorted(found.pairs.values()) == list(range(len(saved)))
    for name in {canonical(path) for path in saved}:
        pairs = [(here[i], saved[j]) for i, j in found.pairs.items() if canonical(saved[j]) == name]
        if {path for path, _ in pairs} != {path for _, path in pairs}:
            in_order = in_order_of_numbers(pairs, lambda pair: pair[0])
            paths = [path for _, path in in_order]
            assert paths == in_order_of_numbers(paths, str)


def test_frozen_weights_which_stand_last_are_matched_by_their_numbers():
    here = ["m_1/dense_11/kernel", "m_1/dense_9/kernel", "m_1/dense_10/kernel"]
    saved = ["m/dense/kernel", "m/dense_2/kernel", "m/dense_1/kernel"]
    pairs, _ = matched(here, saved)
    assert pairs == {here[0]: saved[1], here[1]: saved[0], here[2]: saved[2]}
    # Those of one path by their place in the model.
    here = [Entry("m_1/kernel", (2,), "float32", nth=n) for n in (1, 0, 2)]
    saved = [Entry("m/kernel", (2,), "float32", nth=n) for n in (1, 2, 0)]
    found = match(here, saved, automatic={"m_1"}, automatic_there={"m"})
    assert found.pairs == {0: 0, 1: 2, 2: 1}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lion", "ftrl"])
def test_every_variable_of_the_state_has_an_entry(optimizer):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    state = named_state(model)
    found = [id(v) for pairs in state.values() for _, v in pairs]
    assert len(found) == len(set(found))
    everything = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    assert {id(v) for v in everything} == set(found)
    for entry, variable in state["slots"]:
        assert entry.slot
        assert entry.path in {v.path for v in model.trainable_variables}
        assert entry.shape == tuple(variable.shape)
