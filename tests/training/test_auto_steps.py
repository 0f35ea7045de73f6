"""`steps_per_execution="auto"` under a strategy: few launches, the same results."""

import keras
import pytest
from helpers import assert_close, built, data, in_launches, results

import keras_tpu_dist as ktd
from keras_tpu_dist.input import batches
from keras_tpu_dist.training import auto_steps
from keras_tpu_dist.training.auto_steps import steps_of_a_launch, steps_that_fit


def _build(n):
    return in_launches(n, metrics=["accuracy"])


class Ends(keras.callbacks.Callback):
    """The last step of each launch."""

    def __init__(self):
        super().__init__()
        self.train, self.test = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.train.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.test.append(batch)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "tail", "n"), [(1, 0, 1), (40, 3, 20)])
def test_like_one_by_one_in_few_launches(steps, tail, n):
    x, y = data(4 * steps + tail)
    ends = Ends()
    fit = {"batch_size": 4, "epochs": 2, "validation_data": (x[:9], y[:9])}
    expected = results(built(_build(1), None), x, y, **fit)
    model = built(_build("auto"), ktd.TPUStrategy())
    assert_close(results(model, x, y, callbacks=[ends], **fit), expected)
    assert model.steps_per_execution == "auto"
    assert ends.train == [*range(n - 1, steps + n if tail else steps, n)] * 2
    # The validation set of 9 rows is two full batches and a tail, whatever the epochs have.
    assert ends.test == ([1, 3] if steps > 1 else [0]) * 2
    model.train_on_batch(x, y)


def test_generators_and_an_evaluation_within_the_epoch():
    x, y = data(4 * 30)

    def batches():
        while True:
            for start in range(0, 120, 4):
                yield x[start : start + 4], y[start : start + 4]

    def run(model):
        ends = Ends()
        peek = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: model.evaluate(x[:8], y[:8], verbose=0)
        )
        options = {"steps_per_epoch": 21, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(batches(), callbacks=[ends, peek], **options).history
        return [history, model.get_weights()], ends

    expected, _ = run(built(_build(1), None))
    found, ends = run(built(_build("auto"), ktd.TPUStrategy()))
    assert_close(found, expected)
    assert ends.train == [20] * 3


def test_an_unknown_number_of_batches():
    x, y = data(4 * 35)
    model = built(_build("auto"), ktd.TPUStrategy())
    batches = lambda: ((x[i : i + 4], y[i : i + 4]) for i in range(0, 140, 4))  # noqa: E731
    ends = Ends()
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(batches(), shuffle=False, verbose=0, callbacks=[ends])
    assert ends.train == [31, 63]
    assert int(model.optimizer.iterations) == 35


def test_another_model_in_a_callback_keeps_its_setting():
    x, y = data(40)
    other = built(_build(3), ktd.TPUStrategy())
    seen = []

    def look(epoch, logs):
        ends = Ends()
        other.evaluate(x, y, batch_size=4, verbose=0, callbacks=[ends])
        seen.append(ends.test)

    model = built(_build("auto"), ktd.TPUStrategy())
    look = keras.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[look])
    assert seen == [[2, 5, 8, 11]]
    assert other.steps_per_execution == 3


def test_big_batches_are_launched_in_smaller_parts(monkeypatch):
    x, y = data(4 * 12)
    bytes_of_a_batch = 4 * (6 * 4 + 8)
    monkeypatch.setattr(auto_steps, "_BYTES_WHERE_MEMORY_IS_UNKNOWN", 5 * bytes_of_a_batch / 8)
    calls = []
    real = batches.BatchPlacer.place_many
    monkeypatch.setattr(
        batches.BatchPlacer,
        "place_many",
        lambda self, batches: calls.append(len(batches)) or real(self, batches),
    )
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model, expected = built(_build("auto"), ktd.TPUStrategy()), built(_build(1), None)
    assert_close(model.fit(x, y, **fit).history, expected.fit(x, y, **fit).history)
    assert_close(model.get_weights(), expected.get_weights())
    assert calls == [4, 4, 4]


def test_auto_takes_the_fewest_launches_of_up_to_32_steps():
    for number in range(1, 200):
        for ragged in (False, True):
            n = steps_of_a_launch(number, ragged)
            assert 1 <= n <= min(32, number)
            equal = number - ragged
            launches = equal // n + equal % n
            assert all(launches <= equal // m + equal % m for m in range(1, min(32, equal) + 1))
    assert steps_of_a_launch(None, False) == 32
    for megabytes, steps, fitting in ((0.0004, 12, 12), (8, 32, 32), (64, 32, 4), (512, 32, 1)):
        assert steps_that_fit(megabytes * 2**20, steps) == fitting
