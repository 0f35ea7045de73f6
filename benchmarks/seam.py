"""What breaks, or gets slower, without each name that the package replaces in Keras.

    python benchmarks/seam.py                  # every name: the table of docs/keras_changes.md
    python benchmarks/seam.py fit compile      # names that end so
    python benchmarks/seam.py --write          # puts the table, or the rows made, into the page

For each name a process puts all the others in place and tries a few promises, in turn, until one
breaks (`--all` goes on); so does a pair of processes with those of several hosts. Promises that are
about the name come first. One breaks if it raises, or takes longer than two minutes. If none does,
times are taken. "Nothing" says that the name can go.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
# The programs are small: compiling them takes longer than running them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist._keras import seam

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "keras_changes.md"
SECONDS = 120
RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 4)).astype("float32")
Y = RNG.normal(size=(13, 2)).astype("float32")

_PROMISES: dict[str, Callable] = {}
# The ends of the names that a promise is tried first for.
_ABOUT: dict[str, str] = {}


def promise(words: str, about: str = "") -> Callable[[Callable], Callable]:
    """Notes a function that raises if a promise is broken.

    Args:
        words: The promise.
        about: The ends of names without which it is tried first.
    """

    def note(function: Callable) -> Callable:
        _PROMISES[words], _ABOUT[words] = function, about
        return function

    return note


def in_turn(name: str) -> list[str]:
    """The promises, those about a name first."""
    return sorted(_PROMISES, key=lambda words: not name.endswith(tuple(_ABOUT[words].split())))


def small(**compiled: Any) -> keras.Model:
    """A compiled model with the same weights each time."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **compiled)
    return model


def under(strategy: ktd.TPUStrategy | None, **compiled: Any) -> keras.Model:
    """`small`, made in a strategy's scope and used outside of it."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        return small(**compiled)


def same(found: Any, expected: Any) -> None:
    """Raises if two structures of arrays differ."""
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def on_all_devices(model: keras.Model) -> None:
    """Raises if a weight does not lie on all 8 devices."""
    found = {len(weight.value.sharding.device_set) for weight in model.weights}
    assert found == {8}, f"weights lie on {found} devices"


class At(keras.callbacks.Callback):
    """Calls a function at a train batch."""

    def __init__(self, batch: int, function: Callable[[], None]):
        super().__init__()
        self.batch, self.function, self.heard = batch, function, []

    def on_train_batch_end(self, batch, logs=None):
        """Calls it."""
        self.heard.append(batch)
        if len(self.heard) == self.batch:
            self.function()


class StopError(Exception):
    """Ends a training."""


def stop() -> None:
    """Raises a `StopError`."""
    raise StopError


@promise(
    "fit, evaluate and predict of 13 rows on 8 devices",
    about="fit EpochIterator.__init__ _make_function",
)
def rows() -> None:
    """As without a strategy, one and two steps at a time."""
    for steps in (1, 2):
        found = []
        for strategy in (None, ktd.TPUStrategy()):
            model = under(strategy, steps_per_execution=steps)
            history = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
            outputs = model.predict(X, batch_size=5, verbose=0)
            loss = model.evaluate(X, Y, batch_size=5, verbose=0)
            found.append([history["loss"], outputs, loss, model.get_weights()])
        on_all_devices(model)
        same(found[1], found[0])


@promise("train, test and predict on a batch of 13 rows", about="_distribute_data")
def on_batch() -> None:
    """As without a strategy."""
    found = []
    for strategy in (None, ktd.TPUStrategy()):
        model = under(strategy)
        found.append([model.train_on_batch(X, Y), model.test_on_batch(X, Y)])
        found[-1] += [model.predict_on_batch(X), model.get_weights()]
    same(found[1], found[0])


@promise(
    "predict alone, or evaluate alone, of a model outside of its scope",
    about="evaluate predict _on_batch JaxLayer.__init__",
)
def alone() -> None:
    """The model is unbuilt; its layer sees the strategy when it is called."""
    seen: list[Any] = []

    class Sees(keras.layers.Layer):
        def call(self, x):
            seen.append(keras.distribution.distribution())
            return x

    for name in ("predict", "evaluate", "predict_on_batch", "test_on_batch", "train_on_batch"):
        strategy = ktd.TPUStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(2), Sees()])
            if "predict" not in name:
                model.compile("sgd", "mse")
        arguments = (X,) if "predict" in name else (X, Y)
        options = {} if name.endswith("batch") else {"batch_size": 5, "verbose": 0}
        getattr(model, name)(*arguments, **options)
        assert seen[-1] is strategy, f"{name} ran under {seen[-1]}"


@promise("a model that is compiled in a scope, and made before it", about="compile")
def compiled_in_scope() -> None:
    """It runs on all devices outside of the scope."""
    model, strategy = (
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]),
        ktd.TPUStrategy(),
    )
    with strategy.scope():
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=5, verbose=0)
    assert strategy.input_wait is not None, "the strategy has trained nothing"


@promise("a step function that a user's class wraps")
def wrapped() -> None:
    """An exception in a fit of it leaves the weights."""

    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            super().make_train_function(force)
            made = self.train_function
            self.train_function = lambda state, iterator: made(state, iterator)

    with ktd.TPUStrategy().scope():
        model = Own([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    with contextlib.suppress(StopError):
        model.fit(X, Y, batch_size=5, verbose=0, callbacks=[At(2, stop)])
    assert np.isfinite(model.predict(X, verbose=0)).all()


@promise("an exception in fit loses nothing", about="_get_jax_state")
def exception() -> None:
    """Neither one of a callback, nor one of the input at the start of an epoch."""

    def failing() -> Iterator:
        for i in (0, 5, 0, 5, 0):
            yield X[i : i + 5], Y[i : i + 5]
        stop()

    for donate in (False, True):
        found = []
        for strategy in (None, ktd.TPUStrategy(donate_state=donate)):
            model = under(strategy)
            if strategy is None:
                for i in (0, 5, 0, 5):
                    model.train_on_batch(X[i : i + 5], Y[i : i + 5])
            else:
                with contextlib.suppress(StopError):
                    at = {"steps_per_epoch": 2, "epochs": 3, "verbose": 0}
                    model.fit(failing(), callbacks=[At(4, stop)], **at)
            found.append(model.get_weights())
        same(found[1], found[0])

    def fails_at_once() -> Iterator:
        yield X[:5], Y[:5]
        yield X[:5], Y[:5]
        stop()

    model = under(ktd.TPUStrategy())
    with contextlib.suppress(StopError):
        model.fit(fails_at_once(), steps_per_epoch=2, epochs=3, verbose=0)
    same(np.isfinite(np.concatenate([w.ravel() for w in model.get_weights()])), np.ones(23, bool))
    assert np.abs(model.get_weights()[1]).max() > 0, "the weights are those of the start"


@promise("what a callback assigns counts from the next step on")
def assigned() -> None:
    """Zeros that are assigned after the last batch of an epoch are what is left of it."""
    model = under(ktd.TPUStrategy())

    def assign() -> None:
        for weight in model.weights:
            weight.assign(np.zeros(weight.shape))

    model.fit(X, Y, batch_size=5, verbose=0, callbacks=[At(3, assign)])
    same(model.get_weights(), [np.zeros(w.shape) for w in model.weights])


@promise("training that stopped goes on as if it had not", about="CallbackList.__init__")
def resumed() -> None:
    """From a checkpoint within an epoch; callbacks hear each batch once."""

    def fitted(folder: str, *others: Any) -> keras.Model:
        model = under(ktd.TPUStrategy())
        saved = ktd.callbacks.Checkpoint(folder, every_steps=2)
        options = {"batch_size": 2, "epochs": 2, "verbose": 0}
        model.fit(X, Y, callbacks=[saved, *others], **options)
        return model

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole = fitted(one).get_weights()
        with contextlib.suppress(StopError):
            fitted(other, At(3, stop))
        hears = At(0, stop)
        same(fitted(other, hears).get_weights(), whole)
    assert len(hears.heard) < 14, f"callbacks heard {hears.heard}"


@promise("replicas' additions are summed")
def additions() -> None:
    """A branch of `LossScaleOptimizer` assigns, too."""
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        counter = keras.Variable(0.0, dtype="float32", aggregation="sum")
    strategy.run(lambda: counter.assign_add(1.0))
    assert float(counter.value) == 8, counter


@promise("a scope in replica code reads what the replica wrote", about="get_current_value")
def scopes() -> None:
    """Also of a variable that was made outside."""
    strategy = ktd.TPUStrategy()
    variable = keras.Variable(0.0, dtype="float32")

    def fn() -> Any:
        variable.assign(5.0)
        with keras.StatelessScope():
            return keras.ops.reshape(variable + 0.0, (1,))

    same(strategy.gather(strategy.run(fn), axis=0), np.full(8, 5.0))


@promise("every replica draws numbers of its own", about="SeedGenerator.next")
def seeds() -> None:
    """From one generator."""
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        generator = keras.random.SeedGenerator(3)
    drawn = strategy.gather(strategy.run(lambda: keras.random.uniform((1,), seed=generator)), 0)
    assert len(set(np.ravel(drawn).tolist())) == 8, drawn


@promise("LossScaleOptimizer in replica code", about="apply")
def scaled() -> None:
    """It assigns in a branch."""
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        weight = keras.Variable(np.ones(3), dtype="float32")
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build([weight])
    strategy.run(lambda: optimizer.apply([weight.value * 0 + 2.0**15]))
    assert (np.asarray(weight.value) < 1).all(), weight


@promise("predict in a thread beside fit", about="_jax_state_synced")
def beside() -> None:
    """The thread asks for its state while a step runs."""
    model, steps = under(ktd.TPUStrategy()), []
    went_on = threading.Event()

    class Waits(keras.callbacks.Callback):
        def on_predict_batch_begin(self, batch, logs=None):
            went_on.clear()
            went_on.wait(20)

    failed: list[BaseException] = []

    def predict() -> None:
        try:
            model.predict(X, batch_size=13, verbose=0, callbacks=[Waits()])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=predict)

    def each_step(batch, logs) -> None:
        steps.append(batch)
        if len(steps) == 2:
            thread.start()
        if len(steps) > 4:
            went_on.set()
            time.sleep(0.05)

    hears = keras.callbacks.LambdaCallback(on_train_batch_end=each_step)
    model.fit(X, Y, batch_size=2, epochs=6, verbose=0, callbacks=[hears])
    thread.join(30)
    if failed:
        raise failed[0]


@promise(
    "weights that are read beside a fit are of one step",
    about="get_weights save_model save_weights_only save_model_to_hdf5",
)
def of_one_step() -> None:
    """Two branches that learn alike are alike whenever they are read, or saved."""
    with ktd.TPUStrategy(donate_state=True).scope():
        inputs = keras.Input((4,))
        layers = [keras.layers.Dense(16, kernel_initializer="zeros") for _ in range(8)]
        model = keras.Model(inputs, [layer(inputs) for layer in layers])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    done = threading.Event()
    targets = [np.ones((13, 16), "float32")] * len(layers)
    options = {"batch_size": 1, "epochs": 20, "verbose": 0}
    failed: list[BaseException] = []

    def fit() -> None:
        try:
            model.fit(X, targets, **options)
        except BaseException as error:
            failed.append(error)
        done.set()

    thread = threading.Thread(target=fit)
    thread.start()
    folder = tempfile.mkdtemp()
    saves = [
        (lambda: model.save_weights(f"{folder}/one.weights.h5"), "one.weights.h5"),
        (lambda: model.save(f"{folder}/one.keras"), "one.keras"),
        (lambda: model.save(f"{folder}/one.h5"), "one.h5"),
    ]
    different, other = set(), keras.models.clone_model(model)
    while not done.is_set():
        weights = model.get_weights()
        different |= {"get_weights"} if differ(weights) else set()
        for save, name in saves:
            save()
            other.load_weights(f"{folder}/{name}")
            different |= {name} if differ([np.asarray(w.value) for w in other.weights]) else set()
    thread.join()
    if failed:
        raise failed[0]
    assert not different, f"of several steps: {sorted(different)}"


def differ(weights: list[np.ndarray]) -> bool:
    """Whether kernels, or biases, differ."""
    return any((weight != weights[i % 2]).any() for i, weight in enumerate(weights))


@promise("batches are placed ahead of the step")
def ahead() -> None:
    """The input is read further than the step is."""
    model, read = None, []

    def batches() -> Iterator:
        for i in range(8):
            read.append(i)
            yield X[:8], Y[:8]

    model, lags = under(ktd.TPUStrategy(prefetch=2)), []
    hears = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: lags.append(len(read) - batch - 1)
    )
    model.fit(batches(), verbose=0, callbacks=[hears])
    assert max(lags[:4]) >= 2, f"read ahead: {lags}"


@promise("layers made within strategy.logical_device are assigned to it")
def logical() -> None:
    """As `assign` does."""
    from keras_tpu_dist.layout.annotations import annotation_of

    strategy = ktd.TPUStrategy({"data": 4, "logical": 2})
    with strategy.scope(), strategy.logical_device(1):
        layer = keras.layers.Dense(2)
    found = annotation_of(layer)
    assert getattr(found, "logical_device", None) == 1, found


@promise(
    "what is written on layers is in saved models",
    about="get_build_and_compile_config _retrieve_class_or_fn",
)
def marks() -> None:
    """Also in a process where nothing is written on layers of the class."""
    from keras_tpu_dist.memory.remat import mark

    class Mine(keras.layers.Dense):
        """The class as it is saved."""

    ktd.TPUStrategy()
    with tempfile.TemporaryDirectory() as folder:
        layer = ktd.remat(Mine(2), "full")
        keras.Sequential([keras.Input((4,)), layer]).save(f"{folder}/one.keras")
        given = {"custom_objects": {"Mine": type("Mine", (keras.layers.Dense,), {})}}
        found = mark.of(keras.saving.load_model(f"{folder}/one.keras", **given).layers[0])
    assert found is not None, "nothing is written on the loaded layer"


@promise(
    "outputs that are a structure, or of uneven rows, have a layout", about="distribute_tensor"
)
def outputs() -> None:
    """As a rule says."""

    class Two(keras.layers.Layer):
        def call(self, x):
            return {"a": x, "b": x * 2}

    strategy = ktd.TPUStrategy({"data": 8})
    with strategy.scope():
        inputs = keras.Input((4,))
        layer = ktd.split(Two(name="two"), output={"a": ("data", None), "b": None})
        model = keras.Model(inputs, layer(inputs))
        model(X)
    model.predict(X, verbose=0)


class Hosts:
    """Promises of two processes, each of which has 4 devices."""

    @staticmethod
    def one_writes(folder: pathlib.Path, process: int) -> None:
        """Each saves to a folder of its own, to see who writes."""
        own = folder / str(process)
        own.mkdir()
        model = under(ktd.TPUStrategy())
        with contextlib.chdir(own):
            model.save_weights("one.weights.h5")
            keras.saving.save_model(model, "one.keras")
            model.save("one.h5")
        wrote = sorted(path.name for path in own.iterdir())
        assert not process or not wrote, f"process {process} wrote {wrote}"

    @staticmethod
    def slots(folder: pathlib.Path, process: int) -> None:
        """They can be read before anything runs."""
        del folder, process
        with ktd.TPUStrategy({"data": 2, "model": 4}, [("wide/kernel", ("data", None))]).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="wide")])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            model.optimizer.build(model.trainable_variables)
        same(model.optimizer.variables[2].numpy(), np.zeros((4, 2)))

    @staticmethod
    def own_rows(folder: pathlib.Path, process: int) -> None:
        """One process has less of them than the other."""
        del folder
        model = under(ktd.TPUStrategy(input="per_process"))
        mine = X[:9] if process == 0 else X[9:]
        model.fit(mine, mine[:, :2], batch_size=8, epochs=2, verbose=0)
        assert np.isfinite(model.get_weights()[0]).all()


_HOSTS = {
    "one of several processes writes": Hosts.one_writes,
    "slots are read on several processes": Hosts.slots,
    "processes bring rows of their own, one of them fewer": Hosts.own_rows,
}


def step_ms() -> float:
    """Milliseconds of a step of a small fit, the fastest of some."""
    model = under(ktd.TPUStrategy())
    x, y = np.repeat(X[:8], 100, 0), np.repeat(Y[:8], 100, 0)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        times.append(time.perf_counter() - start)
    return min(times) * 10


def epoch_ms() -> float:
    """Milliseconds of an epoch of one step with its validation, the fastest of some."""
    model = under(ktd.TPUStrategy(), metrics=["mae", "mape"])
    times = []
    for _ in range(6):
        start = time.perf_counter()
        options = {"batch_size": 8, "verbose": 0, "validation_data": (X[:8], Y[:8])}
        model.fit(X[:8], Y[:8], epochs=5, **options)
        times.append(time.perf_counter() - start)
    return min(times) * 200


def attention_ms(grouped: bool) -> float:
    """Milliseconds of a train step on eight TPUs, as their compiler sees it."""
    strategy = ktd.TPUStrategy(topology="v5e-8")

    def build() -> keras.Model:
        inputs = keras.Input((1024, 256))
        if grouped:
            y = keras.layers.GroupQueryAttention(64, 8, 1)(inputs, inputs)
        else:
            y = keras.layers.MultiHeadAttention(8, 64)(inputs, inputs, use_causal_mask=True)
        model = keras.Model(inputs, keras.layers.Dense(4)(y))
        model.compile("sgd", "mse")
        return model

    return ktd.dry_run(build, strategy, batch_size=32).estimate.step * 1e3


# With the ends of the names that they are taken for first, and whether only for those.
_TIMES: dict[str, tuple[Callable[[], float], str, bool]] = {
    "a step": (step_ms, "", False),
    "an epoch of one step": (epoch_ms, "get_metrics_result", False),
    "attention on TPUs": (lambda: attention_ms(False), "dot_product_attention", True),
    "grouped attention on TPUs": (lambda: attention_ms(True), "_compute_attention", True),
}


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises a `TimeoutError` after some seconds."""

    def late(signum, frame):
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def tried(function: Callable[..., Any], *args: Any) -> Any:
    """What a promise returns, or the words for how it breaks."""
    try:
        with limited(SECONDS):
            return function(*args)
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {next(filter(None, map(str.strip, lines)), '')[:110]}"
    finally:
        keras.distribution.set_distribution(None)


def take_away(name: str) -> None:
    """Leaves a name of Keras as it is; the others are replaced as ever.

    Args:
        name: As the table has it; the empty text takes none away.
    """
    for each in seam.table():
        if str(each) == name:
            stock = getattr(each.holder(), each.name, None)
            seam._installed[each.owner, each.name] = each, stock


def as_one_process(name: str, report: str, everything: bool) -> None:
    """Tries what one process can, and adds a line to a file for each."""
    ktd.simulate(8)
    take_away(name)
    for words in in_turn(name):
        broken = tried(_PROMISES[words])
        write(report, words, broken)
        if broken and not everything:
            return


def as_one_of_two(name: str, report: str) -> None:
    """Tries what takes two processes, and adds lines to a file."""
    ktd.initialize(timeout_s=60, peer_timeout_s=20)
    take_away(name)
    import jax

    for words, function in _HOSTS.items():
        folder = pathlib.Path(report + re.sub(r"\W", "_", words))
        folder.mkdir(exist_ok=True)
        write(report, words, tried(function, folder, jax.process_index()))


def as_clock(name: str, report: str, words: str) -> None:
    """Takes one time, and adds a line to a file."""
    ktd.simulate(8)
    take_away(name)
    write(report, words, tried(_TIMES[words][0]))


def write(report: str, words: str, found: Any) -> None:
    """Adds a line."""
    with open(report, "a") as file:
        file.write(json.dumps([words, found]) + "\n")


def read(report: str) -> dict[str, Any]:
    """What lines say; of two processes, that which failed."""
    found: dict[str, Any] = {}
    lines = pathlib.Path(report).read_text().splitlines() if os.path.exists(report) else []
    for words, what in map(json.loads, lines):
        found[words] = found.get(words) or what
    return found


def measured(name: str, everything: bool = False) -> Iterator[str]:
    """How each promise breaks without a name, and what gets slower."""
    about = [words for words, (_, ends, _) in _TIMES.items() if ends and name.endswith(ends)]
    others = [words for words, (_, _, only) in _TIMES.items() if words not in about and not only]
    turns = [(slower, about), (broken, ["promises"]), (broken, ["hosts"]), (slower, others)]
    if name.endswith("_initialize_layout"):
        turns.insert(0, turns.pop(2))
    for measure, kinds in turns:
        for kind in kinds:
            found = list(measure(name, kind, everything))
            yield from found
            if found and not everything:
                return


def broken(name: str, kind: str, everything: bool) -> Iterator[str]:
    """The promises that break without a name."""
    promises = {"promises": _PROMISES, "hosts": _HOSTS}[kind]
    found = in_process(name, kind, everything)
    yield from (f"{words}: {what}" for words, what in found.items() if what)
    if not any(found.values()) and len(found) < len(promises):
        yield "a process does not end"


def slower(name: str, words: str, everything: bool) -> Iterator[str]:
    """What takes longer without a name, as words, or nothing."""
    del everything
    here = in_process("", "clock", words=words)[words]
    there = in_process(name, "clock", words=words)[words]
    if isinstance(there, str):
        yield f"{words}: {there}"
    elif there > here * 1.15:
        yield f"{words} takes {there:.2f} ms, not {here:.2f}"


def in_process(name: str, kind: str, everything: bool = False, words: str = "") -> dict[str, Any]:
    """What a process, or a pair, reports."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report")
        launch = ["-m", "keras_tpu_dist", "launch", "--processes", "2", "--devices", "4"]
        command = [sys.executable, *(launch if kind == "hosts" else []), __file__]
        command += ["--without", name, "--kind", kind, "--report", report, "--words", words]
        command += ["--all"] if everything else []
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=1800, check=False)
        return read(report)


def put_in_page(rows: dict[str, str]) -> None:
    """Writes the rows into the page; those of other names stay."""
    start, end = "<!-- measured -->", "<!-- end of measured -->"
    before, rest = PAGE.read_text().split(start)
    middle, after = rest.split(end)
    known = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", middle, flags=re.MULTILINE)) | rows
    lines = ["| without | what breaks, or gets slower |", "|---|---|"]
    names = [str(each) for each in seam.table()]
    lines += [f"| `{name}` | {known[name]} |" for name in names if name in known]
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{start}\n\n{table}\n\n{end}{after}")


def main() -> None:
    """Measures, and prints a row for each name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--without", default="")
    parser.add_argument("--kind", choices=("promises", "hosts", "clock"))
    parser.add_argument("--report")
    parser.add_argument("--words")
    given = parser.parse_args()
    if given.kind:
        work = {"promises": as_one_process, "hosts": as_one_of_two, "clock": as_clock}
        last = {"promises": [given.all], "hosts": [], "clock": [given.words]}
        work[given.kind](given.without, given.report, *last[given.kind])
        os._exit(0)
    for name in ["", *map(str, seam.table())]:
        if given.names and not any(f".{name}".endswith(f".{each}") for each in given.names):
            continue
        found = "; ".join(measured(name, given.all)) or "nothing"
        print(f"| `{name}` | {found} |", flush=True)
        assert name or found == "nothing", "a promise breaks with all names in place"
        if given.write and name:
            put_in_page({name: found})


if __name__ == "__main__":
    main()
