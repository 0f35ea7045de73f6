"""What callbacks know is saved as it is, or refused at once, and given back to its owner."""

import json
import logging
import random

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from helpers import At, Stop, sequential

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks import states
from keras_tpu_dist.common import once
from keras_tpu_dist.common.marked import NUMBERS, UnmarkableError, marked, unmarked

pytest.importorskip("orbax.checkpoint")

X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = X[:, :2]


@pytest.fixture(autouse=True)
def said(caplog):
    once.forget()
    caplog.set_level(logging.WARNING, "keras_tpu_dist")
    return caplog


def made(stock=False):
    keras.utils.set_random_seed(1)
    if stock:
        return sequential(6, keras.layers.Dense(2))
    with ktd.TPUStrategy().scope():
        return sequential(6, keras.layers.Dense(2))


def fit(directory, *callbacks, epochs=3, stock=False, first=(), **options):
    model = made(stock)
    saved = ktd.callbacks.Checkpoint(directory, **(options or {"every_epochs": 1}))
    given = [*first, saved, *callbacks]
    history = model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=given)
    return history, saved


class Knows(keras.callbacks.Callback):
    """A user's callback that knows one value, and saw each that was given back."""

    def __init__(self, value=None):
        super().__init__()
        self.value, self.given = value, []

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.given.append(state)


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, (np.ndarray, jax.Array)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one), list(other))
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        np.testing.assert_equal(one, other)


VALUES = {
    "a NumPy scalar": {"best": np.float32(0.1), "seen": np.int64(7), "done": np.bool_(True)},
    "a NumPy array": {"confusion": np.arange(9.0).reshape(3, 3), "none": np.zeros((0, 2))},
    "a large array": {"sums": np.linspace(0, 1e300, 3000).reshape(2, 1500), "n": 1},
    "JAX arrays": {
        "best": jnp.float32(0.3),
        "half": jnp.ones(3, jnp.bfloat16),
        "sums": jnp.arange(4000.0),
    },
    "integer keys": {0: "a", 1: {2.5: "b"}, None: 3, (1, "x"): []},
    "tuples": (1, [(2, 3), ()], {"pair": (None, float("inf"), float("-inf"))}),
    "sets and bytes": {"seen": {1, 2}, "raw": b"\x00\xff", "z": 1 + 2j},
    "Python's generator": random.Random(3).getstate(),
    "NumPy's generators": {
        "new": np.random.default_rng(3).bit_generator.state,
        "old": np.random.RandomState(3).get_state(),
    },
    "nothing": None,
    "a list": [1, "x", None, True, 2.5],
}


@pytest.mark.parametrize("value", VALUES)
def test_a_state_comes_back_as_it_was(value, tmp_path, said):
    fit(tmp_path, Knows(VALUES[value]), epochs=1)
    again = Knows()
    fit(tmp_path, again, epochs=2)
    assert_same(again.given[0], VALUES[value])
    assert "ERROR" not in said.text


@pytest.mark.parametrize("stock", [False, True])
def test_a_state_comes_back_within_an_epoch_too(stock, tmp_path, said):
    value = {1: (np.float32(0.5), np.arange(5000))}
    stop = At(9) if not stock else At(2, method="on_epoch_begin")
    options = {"every_epochs": 1} if stock else {"every_steps": 2}
    with pytest.raises(Stop):
        fit(tmp_path, Knows(value), stop, stock=stock, **options)
    again = Knows()
    fit(tmp_path, again, stock=stock, **options)
    for given in again.given:
        assert_same(given, value)
    assert again.given


@pytest.mark.parametrize("dtype", sorted(NUMBERS))
def test_every_dtype_is_carried(dtype):
    scalar = np.dtype(dtype).type(1)
    for value in (scalar, np.full((2, 3), scalar), np.full(3000, scalar)):
        arrays = []
        data = json.loads(json.dumps(marked(value, arrays)))
        assert_same(unmarked(data, arrays), value)
        assert_same(unmarked(json.loads(json.dumps(marked(value)))), value)


def test_an_array_that_changes_later_is_saved_as_it_was(tmp_path):
    class Sums(Knows):
        def __init__(self):
            super().__init__()
            self.sums = np.zeros(3)

        def on_train_batch_end(self, batch, logs=None):
            self.sums += 1

        def on_epoch_end(self, epoch, logs=None):
            self.sums *= 0

        def state_dict(self):
            return self.sums

    with pytest.raises(Stop):
        # Step 6 is the epoch's last: its end has come when it is saved in the background. A run
        # that resumes there begins with the end of batch 6.
        fit(tmp_path, Sums(), At(8), every_steps=6)
    again = Sums()
    fit(tmp_path, again, every_steps=6)
    assert_same(again.given[0], np.full(3, 5.0))


class Handle:
    pass


LOOP = []
LOOP.append(LOOP)
REFUSED = {
    "an object": (
        {"a": [1, {2: Handle()}]},
        r"Knows\.state_dict\(\)\['a'\]\[1\]\[2\], which is of "
        r"type Handle\.",
    ),
    "a key": ({Handle(): 1}, r"state_dict\(\)\[<.*Handle object.*\], which is of type Handle\."),
    "a date": (
        {"at": np.datetime64("2024-01-01")},
        r"\['at'\], which is a NumPy scalar of dtype date",
    ),
    "texts": (np.array(["x"]), r"state_dict\(\), which is an array of dtype <U1\."),
    "itself": ({"loop": LOOP}, "which is more than 32 levels deep"),
    "a key of JAX": ({"key": jax.random.key(0)}, r"\['key'\], which is an array of dtype key<fry>"),
    "too much": ({"all": np.zeros(2**20)}, "8,388,608 bytes, 4,194,304 at most"),
    "a long integer": ({"n": 10**9000}, r"\['n'\], which is an integer of 29,898 bits"),
    "a function": (len, "which is of type builtin_function_or_method"),
}


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_before_the_first_step(what, stock, tmp_path):
    value, words = REFUSED[what]
    seen = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_: seen.append(1))
    seen.append = lambda _: pytest.fail("a step was made")
    with pytest.raises(
        ValueError, match=r"(?s)A callback's state_dict\(\) returns None.* Rec.*" + words
    ):
        fit(tmp_path, Knows(value), seen, stock=stock)
    # The directory is free again, and empty.
    assert ktd.callbacks.Checkpoint(tmp_path).steps == []
    fit(tmp_path, stock=stock, epochs=1)


def test_a_state_may_become_another(tmp_path, said):
    class Best(Knows):
        def on_epoch_end(self, epoch, logs=None):
            self.value = (jnp.float32(0.5), np.zeros(2), {"x": epoch})[epoch]

    again = Best()
    fit(tmp_path, Best())
    fit(tmp_path, again, epochs=4 - 1)
    assert_same(again.given[-1], {"x": 2})
    assert "ERROR" not in said.text


def test_a_state_that_becomes_unsavable_costs_no_checkpoint(tmp_path, said):
    class Turns(Knows):
        def on_epoch_end(self, epoch, logs=None):
            self.value = {"model": self.model} if epoch else {"epoch": epoch}

    steady = Knows(np.float32(4))
    _, saved = fit(tmp_path, Turns(), steady)
    assert saved.steps == [6, 12, 18]
    errors = [record for record in said.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    for words in ("checkpoints have all but the state of Turns", "['model'], which is of type Seq"):
        assert words in errors[0].getMessage()
    assert "permissions" not in said.text
    said.clear()
    again, other = Turns(), Knows()
    fit(tmp_path, again, other, epochs=4)
    assert again.given == []
    assert_same(other.given[0], np.float32(4))
    assert "['Turns'] begin anew" in said.text


def stopping(monitor, **options):
    return keras.callbacks.EarlyStopping(monitor, mode="min", patience=9, **options)


def knows(*callbacks):
    """Callbacks that know their numbers."""
    for number, callback in enumerate(callbacks, 1):
        callback.best, callback.wait = number / 10, number
        if isinstance(callback, keras.callbacks.EarlyStopping):
            callback.stopped_epoch = callback.best_epoch = 0
    return list(callbacks)


def given_back(saved, again):
    """What callbacks know after the states of others were given to them."""
    described, arrays, lost = states.states_of(saved)
    assert not lost
    for callback in again:
        callback.best, callback.wait, callback.best_epoch = None, 0, 0
    states.give_back(again, json.loads(json.dumps(described)), arrays)
    return [round(10 * (callback.best or 0)) for callback in again]


PAIRS = {
    "EarlyStopping": (lambda: stopping("loss"), lambda: stopping("val_mae")),
    "ReduceLROnPlateau": (
        lambda: keras.callbacks.ReduceLROnPlateau("loss"),
        lambda: keras.callbacks.ReduceLROnPlateau("val_loss"),
    ),
    "ModelCheckpoint": (
        lambda: keras.callbacks.ModelCheckpoint("a.keras", "loss"),
        lambda: keras.callbacks.ModelCheckpoint("b.keras", "loss"),
    ),
    "patience": (
        lambda: keras.callbacks.EarlyStopping("loss", patience=3),
        lambda: keras.callbacks.EarlyStopping("loss", patience=5),
    ),
    "restore_best_weights": (
        lambda: stopping("loss"),
        lambda: stopping("loss", restore_best_weights=True),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_callbacks_in_another_order_get_what_they_knew(kind, said):
    one, other = PAIRS[kind]
    assert given_back(knows(one(), other()), [other(), one()]) == [2, 1]
    assert given_back(knows(one(), other()), [one(), other()]) == [1, 2]
    assert said.text == ""


def test_users_callbacks_in_another_order_get_what_they_knew(said):
    class Follows(Knows):
        def __init__(self, metric, rate=1):
            super().__init__()
            self.name, self._rate = metric, rate

    def run(again, *saved):
        for number, callback in enumerate(saved, 1):
            callback.value = number
        described, arrays, _ = states.states_of(saved)
        states.give_back(again, described, arrays)
        return [callback.given for callback in again]

    def two():
        return Follows("acc"), Follows("loss")

    assert run(two()[::-1], *two()) == [[2], [1]]
    assert run([Follows("x", 2), Follows("x", 1)], Follows("x", 1), Follows("x", 2)) == [[2], [1]]
    assert said.text == ""
    assert run([Follows("mae")], Follows("acc")) == [[1]]
    assert "other settings: here name='mae'" in said.text
    said.clear()
    assert run([Follows("mae"), Follows("mse")], *two()) == [[1], [2]]
    assert "nothing but the order" in said.text


def test_a_setting_that_was_changed_costs_no_state(said):
    one, other = stopping("loss"), stopping("val_loss")
    again = [keras.callbacks.EarlyStopping("val_loss", patience=2, mode="min"), stopping("loss")]
    assert given_back(knows(one, other), again) == [2, 1]
    changed = keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=7)
    assert given_back(knows(keras.callbacks.ReduceLROnPlateau("loss")), [changed]) == [1]
    assert said.text == ""
    # Three of which one was changed: the others are sure, so the rest is.
    three = [keras.callbacks.EarlyStopping("loss", patience=n) for n in (1, 2, 3)]
    again = [keras.callbacks.EarlyStopping("loss", patience=n) for n in (3, 9, 1)]
    assert given_back(knows(*three), again) == [3, 2, 1]
    assert said.text == ""


def test_a_callback_that_follows_another_name_begins_anew(said):
    assert given_back(knows(stopping("loss")), [stopping("val_loss")]) == [0]
    assert "the state of [\"EarlyStopping of 'loss'\"]" in said.text
    assert "[\"EarlyStopping of 'val_loss'\"] begin anew" in said.text


def test_equal_callbacks_go_by_their_order_and_changed_ones_say_so(said):
    assert given_back(knows(stopping("a"), stopping("a")), [stopping("a"), stopping("a")]) == [1, 2]
    assert said.text == ""
    again = [keras.callbacks.EarlyStopping("a", patience=n, mode="min") for n in (3, 4)]
    assert given_back(knows(stopping("a"), stopping("a")), again) == [1, 2]
    assert said.text.count("WARNING") == 1
    assert "nothing but the order in callbacks=[...] says which" in said.text


def test_a_state_of_ones_own_replaces_that_of_keras():
    class Own(keras.callbacks.EarlyStopping):
        def state_dict(self):
            return {"wait": self.wait}

    one = Own("loss", restore_best_weights=True)
    one.best_weights = [np.zeros(3)]
    described, arrays, _ = states.states_of([one])
    assert described[0]["state"] == {"wait": 0}
    assert arrays == {}


def test_states_without_identities_go_by_class(said):
    """As the version before this one wrote them."""

    def old(*callbacks):
        described, arrays, _ = states.states_of(callbacks)
        return [{n: s[n] for n in s if n not in ("monitor", "config")} for s in described], arrays

    one = stopping("val_mae")
    one.best, one.best_epoch = None, 0
    states.give_back([one], *old(*knows(stopping("loss"))))
    assert (one.wait, said.text) == (1, "")
    two = [stopping("val_mae"), stopping("loss")]
    for callback in two:
        callback.best, callback.best_epoch = None, 0
    states.give_back(two, *old(*knows(stopping("loss"), stopping("val_mae"))))
    assert [callback.wait for callback in two] == [1, 2]
    assert said.text.count("WARNING") == 1
    assert "nothing but the order" in said.text


def test_secrets_are_not_written(tmp_path):
    class Sends(Knows):
        def __init__(self, token):
            super().__init__(1)
            self.token = token

    fit(tmp_path, Sends("s3cr3t"), epochs=1)
    manifest = (tmp_path / "6" / "manifest" / "metadata").read_text()
    assert "token" in manifest
    assert "s3cr3t" not in manifest


class Adds(keras.callbacks.Callback):
    """Adds a value of some type to the logs of each epoch."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def on_epoch_end(self, epoch, logs=None):
        logs["val_f1"] = self.make([0.5, 0.4, 0.6, 0.55, 0.3, 0.2][epoch])


FOLLOW = {
    "EarlyStopping": lambda folder: keras.callbacks.EarlyStopping("val_f1", mode="max", patience=9),
    "ReduceLROnPlateau": lambda folder: keras.callbacks.ReduceLROnPlateau(
        "val_f1", mode="max", patience=1
    ),
    "ModelCheckpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "best.keras", "val_f1", mode="max", save_best_only=True
    ),
}
TYPES = {
    "JAX": jnp.float32,
    "a JAX bfloat16": jnp.bfloat16,
    "a JAX array of one": lambda value: jnp.full((1,), value),
    "a 0-d array": lambda value: np.array(value, "float32"),
    "a NumPy scalar": np.float32,
    "a variable": lambda value: keras.Variable(value),
    "Keras": lambda value: keras.ops.mean(keras.ops.array([value, value])),
}


# Keras's ModelCheckpoint refuses the rest itself.
REFUSED_BY_KERAS = [("ModelCheckpoint", "a JAX array of one"), ("ModelCheckpoint", "a variable")]


@pytest.mark.parametrize(
    ("name", "kind"), sorted({(n, k) for n in FOLLOW for k in TYPES} - set(REFUSED_BY_KERAS))
)
def test_the_best_value_of_the_logs_may_have_any_type(name, kind, tmp_path, said):
    make = TYPES[kind]
    whole = FOLLOW[name](tmp_path)
    fit(tmp_path / "whole", whole, epochs=5, first=[Adds(make)])
    part, again = FOLLOW[name](tmp_path), FOLLOW[name](tmp_path)
    fit(tmp_path / "part", part, epochs=3, first=[Adds(make)])
    fit(tmp_path / "part", again, epochs=5, first=[Adds(make)])
    assert float(np.asarray(again.best).item()) == float(np.asarray(whole.best).item())
    for attribute in ("wait", "best_epoch", "cooldown_counter"):
        assert getattr(again, attribute, 0) == getattr(whole, attribute, 0)
    assert "begin anew" not in said.text
    assert "state of" not in said.text


def test_a_best_value_that_cannot_be_saved_is_said_and_nothing_of_it_is_saved(tmp_path, said):
    class Number(float):
        """Compares as a number, and is one that no file has."""

    class Odd:
        def __init__(self, value):
            self.value = value

        def __gt__(self, other):
            return self.value > other.value

        def __sub__(self, other):
            return self

    stop = FOLLOW["EarlyStopping"](tmp_path)
    stop.monitor_op = lambda one, other: one > other
    fit(tmp_path, stop, Knows(1), epochs=2, first=[Adds(Odd)])
    lines = [r.getMessage() for r in said.records if "EarlyStopping" in r.getMessage()]
    assert len(lines) == 1
    assert "EarlyStopping['best'], which is of type Odd" in lines[0]
    assert "logs['val_f1'] is of type Odd" in said.text
    manifest = json.loads((tmp_path / "12" / "manifest" / "metadata").read_text())
    assert [each["class"] for each in manifest["training"]["callbacks"]] == ["Knows"]
    assert manifest["training"]["history"]["logs"]["val_f1"] == [None, None]
    fit(tmp_path, FOLLOW["EarlyStopping"](tmp_path), Knows(), epochs=3, first=[Adds(float)])
    assert "['EarlyStopping'] begin anew" in said.text


def test_logs_of_any_type_cost_no_checkpoint(tmp_path, said):
    values = {
        "matrix": np.eye(2, dtype="int32"),
        "half": ml_dtypes.bfloat16(0.5),
        "pair": (1, 2),
        "parts": {"a": np.float32(1), 3: [np.int64(2)]},
        "text": "good",
        "none": None,
        "z": 1j,
    }

    class All(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs.update(values)
            if not epoch:
                logs |= {"handle": Handle(), 7: 1.0}

    fit(tmp_path, first=[All()], epochs=1)
    history, saved = fit(tmp_path, first=[All()], epochs=2)
    assert saved.steps == [6, 12]
    for name in set(values) - {"half"}:
        assert_same(history.history[name][0], values[name])
    assert history.history["half"][0] == 0.5
    assert history.history["handle"] == [None]
    assert 7 not in history.history
    assert said.text.count("None for logs['handle']") == 1
    assert "logs[7]: names in the logs must be texts" in said.text
    assert "ERROR" not in said.text


@pytest.mark.parametrize("value", [[0.5, 0.4], "good", Handle()])
def test_what_decides_the_best_checkpoint_is_a_number(value, tmp_path):
    with pytest.raises(
        ValueError, match=r"is a number\. Received: logs\['val_f1'\]=.*Let the logs"
    ):
        fit(tmp_path, first=[Adds(lambda _: value)], monitor="val_f1")


HOSTILE = {
    "an array twice": [
        {"keras_tpu_dist type": "array", "dtype": "uint8", "shape": [4], "jax": False, "of": 0}
    ]
    * 2,
    "no such array": {
        "keras_tpu_dist type": "array",
        "dtype": "uint8",
        "shape": [4],
        "jax": False,
        "of": 1,
    },
    "a larger shape": {
        "keras_tpu_dist type": "array",
        "dtype": "uint8",
        "shape": [2**40],
        "jax": False,
        "of": 0,
    },
    "a shape below 0": {
        "keras_tpu_dist type": "array",
        "dtype": "uint8",
        "shape": [-2, -2],
        "jax": False,
        "of": 0,
    },
    "objects": {
        "keras_tpu_dist type": "array",
        "dtype": "object",
        "shape": [0],
        "jax": False,
        "of": "",
    },
    "another type": {"keras_tpu_dist type": "__import__", "of": "os"},
    "no type": {"keras_tpu_dist type": ["tuple"]},
    "a number of words": {"keras_tpu_dist type": "number", "dtype": "float32", "of": "1e9"},
    "a number out of range": {"keras_tpu_dist type": "number", "dtype": "int8", "of": 1000},
    "a list as a key": {"keras_tpu_dist type": "dict", "of": [[[], 1]]},
    "a set of lists": {"keras_tpu_dist type": "set", "of": [[]]},
    "a tuple of a text": {"keras_tpu_dist type": "tuple", "of": "abc"},
    "bytes of words": {"keras_tpu_dist type": "bytes", "of": "?"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_state_of_another_form_is_not_given_back(what, said):
    callback = Knows()
    saved = {"class": "Knows", "state": {"x": HOSTILE[what]}}
    states.give_back([callback], [saved], {"0/in_state/0": np.zeros(4, np.uint8)})
    assert callback.given == []
    assert "Knows begins anew, as its state in the checkpoint cannot be read" in said.text


@pytest.mark.parametrize(
    "attributes",
    [{"keras_tpu_dist type": "tuple", "of": [1]}, {"best": HOSTILE["objects"], "wait": 3}],
)
def test_attributes_of_another_form_are_left_out(attributes, said):
    callback = stopping("loss")
    callback.best, callback.best_epoch = 0.5, 0
    states.give_back([callback], [{"class": "EarlyStopping", "attributes": attributes}], {})
    assert (callback.wait, callback.best) == (0, 0.5)
    assert "begins anew" in said.text


def test_numbers_of_numpy_as_arguments_of_fit(tmp_path):
    model = made()
    one = np.int64(1)
    saved = ktd.callbacks.Checkpoint(tmp_path, every_steps=3 * one, keep=2 * one)
    options = {"batch_size": 4 * one, "epochs": 3 * one, "steps_per_epoch": 3 * one}
    model.fit(X, Y, initial_epoch=one, verbose=0, callbacks=[saved], **options)
    assert saved.steps


def test_a_mark_needs_its_key_alone():
    with pytest.raises(UnmarkableError, match=r"\['a'\] is of type object"):
        marked({"a": object()})
    assert unmarked(marked({"keras_tpu_dist type": "tuple"})) == {"keras_tpu_dist type": "tuple"}
