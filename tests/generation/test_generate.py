"""`generate` under a strategy gives the tokens of one device, and compiles our program."""

import threading

import keras
import numpy as np
import pytest
from language_model import Draw, LanguageModel, prompts

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.generation.in_place import IN_PLACE
from keras_tpu_dist.training.generation import Generation

MESHES = {
    "8": ({"data": 8}, None),
    "4x2": ({"data": 4, "model": 2}, "tensor_parallel"),
    "2x2x2": ({"data": 2, "fsdp": 2, "model": 2}, "tensor_parallel"),
    "fsdp": ({"data": 2, "fsdp": 4}, "fsdp"),
}


def built(sampler=None, **options):
    model = LanguageModel(**options)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **sampler)
    model(np.zeros((1, 12), "int32"))
    return model


def pair(mesh, seed=None, **options):
    """A stock model, and the same one under a strategy."""
    keras.utils.set_random_seed(1)
    stock = built({"sampler": Draw(seed)}, **options)
    axes, layout = MESHES[mesh]
    strategy = ktd.TPUStrategy(axes, layout)
    with strategy.scope():
        model = built({"sampler": Draw(seed)}, **options)
    model.set_weights(stock.get_weights())
    return stock, model, strategy


def assert_same(model, stock, inputs, **options):
    got, want = (each.generate(inputs, **options) for each in (model, stock))
    assert isinstance(model.generate_function, Generation)
    np.testing.assert_array_equal(got["token_ids"], want["token_ids"])


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MESHES if name != "4x2"]


@pytest.mark.parametrize("mesh", ["4x2", *SLOW])
def test_rows_that_do_and_do_not_divide(mesh):
    stock, model, _ = pair(mesh)
    for rows in (8, 13, 1):
        assert_same(model, stock, prompts(rows))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [64, 63])
@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_heads_and_vocabularies(shared, vocabulary, tied):
    options = {"shared": shared, "vocabulary": vocabulary, "tied": tied}
    stock, model, _ = pair("4x2", **options)
    inputs = prompts(5)
    inputs["token_ids"] %= vocabulary
    assert_same(model, stock, inputs)


@pytest.mark.slow
def test_stops_end_rows_and_are_programs_of_their_own():
    stock, model, _ = pair("4x2")
    for stops in ((3, 7), None, (3,)):
        assert_same(model, stock, prompts(6), stop_token_ids=stops)


def test_random_tokens_go_on_from_call_to_call():
    stock, model, _ = pair("2x2x2", seed=5)
    inputs = prompts(6)
    for _ in range(2):
        assert_same(model, stock, inputs)
    first, second = (model.generate(inputs)["token_ids"] for _ in range(2))
    assert (first != second).any()


def test_within_the_scope_and_beside_it():
    stock, model, strategy = pair("4x2")
    with strategy.scope():
        assert_same(model, stock, prompts(3))
    assert_same(model, stock, prompts(3))
    (said,) = (row for row in strategy.explain(model).passes if row.name == "generation")
    assert str(said) == f"otherwise, generation: {model.name}: {IN_PLACE}"


@pytest.mark.slow
def test_after_training_it_uses_the_new_weights():
    stock, model, _ = pair("4x2")
    x = prompts(8, given=12)["token_ids"]
    inputs = prompts(13)
    assert_same(model, stock, inputs)
    for each in (stock, model):
        each.fit(x, x, batch_size=8, epochs=2, verbose=0)
    assert_same(model, stock, inputs)


class _Generate(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.made = []

    def on_train_batch_end(self, batch, logs=None):
        self.made.append(self.model.generate(prompts(3))["token_ids"])


def test_in_a_callback_of_fit():
    stock, model, _ = pair("4x2")
    x = prompts(16, given=12)["token_ids"]
    seen = []
    for each in (stock, model):
        callback = _Generate()
        each.fit(x, x, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[callback])
        seen.append(np.stack(callback.made))
    np.testing.assert_array_equal(*seen)
    np.testing.assert_allclose(stock.get_weights()[0], model.get_weights()[0], atol=1e-5)


@pytest.mark.slow
def test_in_two_threads():
    stock, model, _ = pair("4x2")
    want = {rows: stock.generate(prompts(rows))["token_ids"] for rows in (3, 8)}
    got = {}

    def run(rows):
        got[rows] = [model.generate(prompts(rows))["token_ids"] for _ in range(3)]

    threads = [threading.Thread(target=run, args=(rows,)) for rows in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, tokens in want.items():
        for each in got[rows]:
            np.testing.assert_array_equal(each, tokens)


@pytest.mark.slow
def test_another_strategy_makes_a_function_of_its_own():
    stock, model, _ = pair("8")
    assert_same(model, stock, prompts(3))
    other = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    with other.scope():
        model.compile("sgd", "mse", sampler=Draw())
        assert_same(model, stock, prompts(3))


def test_another_layout_makes_a_function_of_its_own():
    stock, model, strategy = pair("4x2")
    assert_same(model, stock, prompts(3))
    before = model.generate_function
    with strategy.scope():
        ktd.replicate(model.embed)
    model.predict(prompts(8)["token_ids"], verbose=0)
    assert_same(model, stock, prompts(3))
    assert model.generate_function is not before


def test_run_eagerly_is_the_models_own():
    _, model, _ = pair("8")
    model.run_eagerly = True
    model.generate(prompts(3))
    assert not isinstance(model.generate_function, Generation)


def test_no_rows():
    _, model, _ = pair("8")
    empty = {name: value[:0] for name, value in prompts(2).items()}
    with pytest.raises(ValueError, match="at least one row"):
        model.generate(empty)


def test_models_that_do_not_generate_stay_as_they_are():
    with ktd.TPUStrategy({"data": 8}).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    assert not hasattr(model, "make_generate_function")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_bfloat16(mesh):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        stock, model, _ = pair(mesh)
        got, want = (each.generate(prompts(8))["token_ids"] for each in (model, stock))
    finally:
        keras.config.set_dtype_policy(before)
    # Rounded differently, two tokens may be equally likely; what follows then differs too.
    assert (got == want).mean() > 0.9
