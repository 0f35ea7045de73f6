"""Training that goes on under Keras 3.16, whose data adapters count epochs and shuffle by that.

The rules are those of tests/_keras/fake_keras316.py where Keras is older; `python
tests/_keras/versions.py PATH` makes every case with a Keras of another version.
"""

import pathlib

import keras
import pytest
from helpers import loaded

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras

HERE = pathlib.Path(__file__).parents[1] / "_keras"
resume = loaded(HERE / "resume.py", "resume")
NEWER = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)
slow = pytest.mark.slow


@pytest.fixture
def shuffling():
    if NEWER:
        yield
        return
    fake = loaded(HERE / "fake_keras316.py", "fake_keras316")
    with fake.shuffling():
        yield


@pytest.mark.parametrize(
    ("feed", "stop", "steps"),
    [
        ("arrays", "after several epochs", 1),
        pytest.param("arrays", "in a later epoch", 4, marks=slow),
        pytest.param("arrays in parts", "in a later epoch", 1, marks=slow),
        pytest.param("arrays in parts", "after an epoch", 4, marks=slow),
        pytest.param("rows of batches", "in a later epoch", 1, marks=slow),
        pytest.param("pydataset", "in a later epoch", 1, marks=slow),
        pytest.param("pydataset", "after several epochs", 4, marks=slow),
        pytest.param("pydataset of workers", "in a later epoch", 1, marks=slow),
        pytest.param("generator", "after several epochs", 1, marks=slow),
    ],
)
def test_training_goes_on_with_the_rows_it_would_have_had(shuffling, feed, stop, steps):
    assert resume.difference(feed, stop, steps=steps) < 1e-5


@slow
@pytest.mark.parametrize("feed", ["arrays", "pydataset"])
def test_training_goes_on_without_a_strategy(shuffling, feed):
    assert resume.difference(feed, "after several epochs", stock=True) < 1e-5


@slow
@pytest.mark.skipif(NEWER, reason="the rules of Keras 3.15")
@pytest.mark.parametrize("stop", ["in the first epoch", "after several epochs"])
def test_workers_that_shuffle_by_global_numbers_go_on(stop, request):
    resume.whole_training.cache_clear()
    request.addfinalizer(resume.whole_training.cache_clear)
    assert resume.difference("pydataset of workers", stop) < 1e-5


class Epochs(keras.callbacks.Callback):
    """Notes by which epoch Keras shuffles."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        iterator = _keras.epoch_iterator_of_fit()
        self.seen.append(_keras.shuffling_epoch(iterator.data_adapter))


@slow
@pytest.mark.skipif(NEWER, reason="needs both rules")
def test_a_checkpoint_of_the_other_rules_goes_on_in_an_order_of_its_own(tmp_path, caplog):
    fake = loaded(HERE / "fake_keras316.py", "fake_keras316")

    def fit(*callbacks):
        saved = ktd.callbacks.Checkpoint(tmp_path, every_epochs=1)
        return resume.trained("arrays", ktd.TPUStrategy(), saved, *callbacks)

    with pytest.raises(resume.Stop):
        fit(resume.StopAfter(13))
    epochs = Epochs()
    with fake.shuffling():
        # The first two of the five epochs had 1 and 2, as Keras 3.16 would have counted.
        with pytest.raises(resume.Stop):
            fit(epochs, resume.StopAfter(9))
    assert epochs.seen == [3] * 6 + [4] * 3
    assert "the checkpoint is from another version of Keras" in caplog.text
    caplog.clear()
    fit()
    assert "the checkpoint is from another version of Keras" in caplog.text


@slow
def test_an_epoch_that_was_cut_goes_on(shuffling, tmp_path):
    """With its own rows, and then those of the next."""

    def fit(*callbacks):
        saved = ktd.callbacks.Checkpoint(tmp_path)
        resume.trained("arrays", ktd.TPUStrategy(), saved, *callbacks)

    fit(ktd.callbacks.StopAtStep(8))
    epochs = Epochs()
    fit(epochs, ktd.callbacks.StopAtStep(14))
    assert epochs.seen == [2] * 4 + [3] * 2
