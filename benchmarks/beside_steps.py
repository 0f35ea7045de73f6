"""CPU seconds of what stands beside the steps of `fit`, next to the same thing in stock Keras.

    python benchmarks/beside_steps.py                       # all rows
    python benchmarks/beside_steps.py save_tiny adoption    # some of them
    python benchmarks/beside_steps.py --list

Both sides of a row run in one process on the same simulated devices, in turns: CPU seconds of all
threads (`time.process_time`), the median of several turns, and the median of their ratios, since
other work on the machine slows both sides. `main` is the share of the thread that calls. A row
without a stock side is compared with a named anchor, or with nothing. A row above 1.1 is followed
by its reason, and by what would have to go.
"""

import argparse
import contextlib
import ctypes
import logging
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np

import keras_tpu_dist as ktd

ROWS: dict[str, Callable] = {}


def row(function):
    """A row of the table; its docstring's first line is its title."""
    ROWS[function.__name__] = function
    return function


# Why a row takes more than 1.1 times stock's, and what would have to go, by the end of its title.
REASONS = {
    "in 100 variables: main thread": "the state is copied to the host once in a fit, to survive a "
    "launch that fails after it consumed it: that guarantee would have to go",
    "fsdp: main thread": "the same copy, of 800 parts: that guarantee would have to go",
    "the first fit of 100 MB: peak": "the same copy, and 8 MiB of the state at a time, which is "
    "copied on the devices before it is consumed: arrays that a user refers to would be lost",
    "195 variables: main thread": "the same copy, of 195 small arrays: that guarantee would have "
    "to go",
    "on_train_batch_end": "the state before each step stays alive until its launch has succeeded, "
    "so every step allocates and frees a state: donate_state=True gives that up",
    "on_train_batch_end: main thread": "the same allocations, in the thread that launches",
    "(TerminateOnNaN)": "every variable is read in every step (TerminateOnNaN reads the loss), "
    "and the state before stays alive: the weights of the last finite step would have to go",
    "(TerminateOnNaN): main thread": "the same state that stays alive",
    "a small model's step: main thread": "the same state that stays alive",
    "(by hand)": "the loop by hand has no callbacks, metrics, shuffling or guarded state",
    "(by hand): main thread": "the same: Keras's own fit takes as long",
    "PyDataset: main thread": "the same state that stays alive",
    "generator: main thread": "the same state that stays alive",
    "a save of 200 MB (Orbax)": "fingerprints of all arrays, which show damage: those would have "
    "to go",
    "a save of 200 MB (Orbax): peak": "not known: without fingerprints it is the same",
    "a restore of 200 MB (Orbax)": "the same fingerprints, read again",
}


class Cpu:
    """CPU seconds of several runs: of the process, and of the calling thread."""

    def __init__(self):
        self.processes, self.mains = [], []

    @contextlib.contextmanager
    def timed(self):
        process, main = time.process_time(), time.thread_time()
        yield
        self.mains.append(time.thread_time() - main)
        self.processes.append(time.process_time() - process)

    @property
    def process(self):
        return float(np.median(self.processes))

    @property
    def main(self):
        return float(np.median(self.mains))


def in_turns(contenders, times):
    """Runs each contender `times` times, in turns, and once before that does not count."""
    found = {name: Cpu() for name in contenders}
    for turn in range(times + 1):
        for name, run in contenders.items():
            with found[name].timed() if turn else contextlib.nullcontext():
                run()
    return found


def show(title, found, per=1, unit="ms", main=True):
    """Prints a row of a comparison of stock, the first contender, and ours, the second."""
    factor = {"s": 1, "ms": 1e3, "us": 1e6}[unit] / per
    stock, ours = found.values()
    ratio = float(np.median(np.divide(ours.processes, stock.processes)))
    line(title, stock.process * factor, ours.process * factor, unit, ratio)
    if main:
        ratio = float(np.median(np.divide(ours.mains, stock.mains)))
        line(f"{title}: main thread", stock.main * factor, ours.main * factor, unit, ratio)


def line(title, stock, ours, unit, ratio=None):
    """Prints a row; `stock` is `None` if nothing stands beside it."""
    if stock is not None and ratio is None:
        ratio = ours / stock
    beside = f"{'':>10} {'':>6}" if stock is None else f"{stock:10.3f} {ratio:5.2f}x"
    print(f"{title:64} {ours:10.3f} {beside} {unit}", flush=True)
    if ratio is not None and ratio > 1.1:
        known = [end for end in REASONS if title.endswith(end)]
        reason = REASONS[max(known, key=len)] if known else "no reason is known"
        print(f"    above 1.1: {reason}", flush=True)


def both(build, mesh=None, layout=None):
    """The same model under stock's DataParallel and under a `TPUStrategy`."""
    import keras

    models = {}
    for name, scope in {
        "stock": keras.distribution.DataParallel(auto_shard_dataset=False).scope,
        "ours": ktd.TPUStrategy(mesh, layout).scope,
    }.items():
        keras.utils.set_random_seed(0)
        with scope():
            models[name] = build(), scope
    return models


def tiny_layers(variables, side=4):
    import keras

    ends, inputs = [], keras.Input((side,))
    for start in range(0, variables // 2, 100):  # Keras follows a chain by recursion
        ends.append(inputs)
        for _ in range(start, min(start + 100, variables // 2)):
            ends[-1] = keras.layers.Dense(side)(ends[-1])
    return keras.Model(inputs, keras.layers.add(ends) if len(ends) > 1 else ends[0])


def adopted(variables):
    import keras

    from keras_tpu_dist.training import adoption

    strategy = ktd.TPUStrategy({"data": 2, "model": 4}, "tensor_parallel")
    with strategy.scope():
        model = tiny_layers(variables // 3)
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        model.optimizer.build(model.trainable_variables)
        cpu, again = Cpu(), Cpu()
        with cpu.timed():
            adoption.adopt(model, strategy)
        with again.timed():
            adoption.adopt(model, strategy)
    return cpu.process, again.process


@row
def adoption():
    """adoption of 2,000 and 10,000 variables, a third of them weights"""
    adopted(300)  # what is imported and compiled once
    few, _ = adopted(2_000)
    line("adoption of 2,000 variables", None, few, "s")
    many, again = adopted(10_000)
    line("adoption of 10,000 variables", None, many, "s")
    line("the same again", None, again, "s")
    line("exponent", None, float(np.log(many / few) / np.log(5)), "")


def of_100_mb():
    import keras

    layers = [keras.layers.Dense(512, use_bias=False) for _ in range(100)]
    model = keras.Sequential([keras.Input((512,)), *layers])
    model.compile("sgd", "mse")
    return model


def epochs_of(layout):
    x = np.ones((8, 512), "float32")
    runs = {}
    for name, (model, scope) in both(of_100_mb, layout=layout).items():

        def run(model=model, scope=scope):
            with scope():
                model.fit(x, x, batch_size=8, epochs=3, verbose=0)

        runs[name] = run
    title = f"3 epochs of a step, 100 MB in 100 variables{f', {layout}' if layout else ''}"
    show(title, in_turns(runs, 3))


@row
def epoch():
    """three epochs of one step, 100 MB in 100 variables"""
    epochs_of(None)


@row
def epoch_fsdp():
    """the same under fsdp, beside stock's DataParallel"""
    epochs_of("fsdp")


@row
def first_peak():
    """the peak memory of the first fit of 100 MB in 100 variables"""
    x, peaks = np.ones((8, 512), "float32"), {}
    for name, (model, scope) in both(of_100_mb).items():
        with scope(), Peak() as peak:
            model.fit(x, x, batch_size=8, verbose=0)
        peaks[name] = peak.mb
    line("the first fit of 100 MB: peak", *peaks.values(), "MB")


@row
def second_fit():
    """a second fit of 2 steps, 195 variables"""
    import keras

    def build():
        model = tiny_layers(64, 16)
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        return model

    x = np.ones((16, 16), "float32")
    runs = {}
    for name, (model, scope) in both(build).items():

        def run(model=model, scope=scope):
            with scope():
                model.fit(x, x, batch_size=8, verbose=0)

        runs[name] = run
    show("a second fit of 2 steps, 195 variables", in_turns(runs, 10))


def one_step_each(title, callbacks=None, compile_=None, width=32, inputs=None, steps=200):
    """CPU of a step of `fit` on both sides."""
    import keras

    def build():
        dense = [keras.layers.Dense(width, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((16,)), *dense, keras.layers.Dense(1)])
        model.compile("sgd", "mse", **(compile_ or {}))
        return model

    x = np.random.default_rng(0).normal(size=(steps * 32, 16)).astype("float32")
    data = inputs or (lambda x: (x, x[:, :1]))
    runs = {}
    for name, (model, scope) in both(build).items():

        def run(name=name, model=model, scope=scope):
            with scope():
                given = data(x)
                x_y = given if isinstance(given, tuple) else (given,)
                sizes = {"batch_size": 32} if len(x_y) == 2 else {"steps_per_epoch": steps}
                own = [callbacks[name]()] if callbacks else []
                model.fit(*x_y, **sizes, verbose=0, callbacks=own)

        runs[name] = run
    show(title, in_turns(runs, 11), per=steps, unit="us")


@row
def step():
    """a small model's step"""
    one_step_each("a small model's step")


@row
def batch_end():
    """one user's on_train_batch_end"""
    import keras

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.last = (logs or {}).get("loss")

    one_step_each(
        "a step with a user's on_train_batch_end", dict.fromkeys(("stock", "ours"), Counts)
    )


@row
def name_nan():
    """NameNaN beside TerminateOnNaN"""
    import keras

    pair = {"stock": keras.callbacks.TerminateOnNaN, "ours": ktd.callbacks.NameNaN}
    one_step_each("a step with NameNaN (TerminateOnNaN)", pair)


def of_three_layers():
    import keras

    dense = [keras.layers.Dense(32, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((16,)), *dense, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@row
def many_rows():
    """a million rows: fit, evaluate and predict by 8,192, and 64,000 rows by 32"""
    x = np.random.default_rng(0).normal(size=(1_000_000, 16)).astype("float32")
    models = both(of_three_layers)
    few = x[:64_000]
    for title, act in {
        "fit of a million rows by 8,192": lambda model: model.fit(
            x, x[:, :1], batch_size=8192, verbose=0
        ),
        "evaluate": lambda model: model.evaluate(x, x[:, :1], batch_size=8192, verbose=0),
        "predict": lambda model: model.predict(x, batch_size=8192, verbose=0),
        "predict of 64,000 rows by 32": lambda model: model.predict(few, verbose=0),
    }.items():
        runs = {}
        for name, (model, scope) in models.items():

            def run(model=model, scope=scope, act=act):
                with scope():
                    act(model)

            runs[name] = run
        show(title, in_turns(runs, 3))


@row
def by_hand():
    """a small model's step beside a loop by hand in JAX"""
    import jax
    import jax.numpy as jnp

    strategy, steps = ktd.TPUStrategy(), 200
    x = np.random.default_rng(0).normal(size=(steps * 32, 16)).astype("float32")
    with strategy.scope():
        model = of_three_layers()
    whole = jax.sharding.NamedSharding(strategy.mesh, jax.P())
    rows = jax.sharding.NamedSharding(strategy.mesh, jax.P("data"))
    state = jax.device_put([np.asarray(v) for v in model.trainable_variables], whole)

    def loss(weights, x, y):
        for i in range(0, 4, 2):
            x = jax.nn.relu(x @ weights[i] + weights[i + 1])
        return jnp.mean((x @ weights[4] + weights[5] - y) ** 2)

    @jax.jit
    def update(weights, x, y):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return [w - 0.01 * g for w, g in zip(weights, gradients)], value

    def loop():
        weights = state
        for start in range(0, len(x), 32):
            batch = x[start : start + 32]
            weights, value = update(weights, *jax.device_put((batch, batch[:, :1]), rows))
        float(value)

    def fit():
        with strategy.scope():
            model.fit(x, x[:, :1], shuffle=False, verbose=0)

    found = in_turns({"by hand": loop, "ours": fit}, 11)
    show("a small model's step (by hand)", found, per=steps, unit="us")


def dataset_of(x):
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(x) // 32

        def __getitem__(self, index):
            rows = x[32 * index : 32 * (index + 1)]
            return rows, rows[:, :1]

    return Batches()


def generator_of(x):
    while True:
        for start in range(0, len(x), 32):
            yield x[start : start + 32], x[start : start + 32, :1]


@row
def py_dataset():
    """a step whose input is a PyDataset"""
    one_step_each("a step, PyDataset", inputs=dataset_of)


@row
def generator():
    """a step whose input is a generator"""
    one_step_each("a step, generator", inputs=generator_of)


@row
def weights():
    """set_weights(get_weights()) of 190 variables"""
    runs = {}
    for name, (model, scope) in both(lambda: tiny_layers(190, 16)).items():

        def run(model=model, scope=scope):
            with scope():
                model.set_weights(model.get_weights())

        runs[name] = run
    show("set_weights(get_weights()), 190 variables", in_turns(runs, 10), main=False)


def trained(variables, side):
    """A model with Adam's slots, under a strategy."""
    import keras

    with ktd.TPUStrategy().scope():
        model = tiny_layers(variables, side)
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


class Peak:
    """The peak memory of this process above its memory before, sampled every millisecond."""

    def __enter__(self):
        # What earlier runs have freed must not hide what this one takes.
        ctypes.CDLL(None).malloc_trim(0)
        self._before = self._most = _memory_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ends.set()
        self._thread.join()
        self.mb = (self._most - self._before) / 1e6

    def _watch(self):
        while not self._ends.wait(0.001):
            self._most = max(self._most, _memory_bytes())


def _memory_bytes():
    # What the process itself holds, not the files that the kernel keeps for it.
    with open("/proc/self/status") as file:
        found = next(line for line in file if line.startswith("RssAnon"))
    return int(found.split()[1]) * 1024


def saves_of(model, folder):
    """Writes checkpoints of a model, as `callbacks.Checkpoint` does."""
    from keras_tpu_dist.checkpoint.keeping import Keep
    from keras_tpu_dist.checkpoint.snapshot import snapshot
    from keras_tpu_dist.checkpoint.store import Store

    store, steps = Store(folder, keep=Keep(1)), iter(range(1, 1000))

    def save():
        step = next(steps)
        store.save(step, *snapshot(model, {"run": "a", "step": step}, {}))

    return store, save


@row
def save_tiny():
    """a save of 100 tiny variables with Adam, beside ModelCheckpoint's"""
    model = trained(100, 4)
    with tempfile.TemporaryDirectory() as folder:
        store, save = saves_of(model, os.path.join(folder, "ours"))
        file = os.path.join(folder, "stock.keras")
        found = in_turns({"stock": lambda: model.save(file), "ours": save}, 5)
        store.close()
    show("a save, 100 tiny variables with Adam", found)


@row
def first_save():
    """the first save of 5,000 variables, and their loading"""
    model = trained(5_000 // 3 + 1, 4)
    with tempfile.TemporaryDirectory() as folder:
        store, save = saves_of(model, folder)
        first, second, loaded = Cpu(), Cpu(), Cpu()
        with first.timed():
            save()
        with second.timed():
            save()
        store.close()
        line("the first save of 5,000 variables", None, first.process, "s")
        line("the first save of 5,000 variables: main thread", None, first.main, "s")
        line("the second one", None, second.process, "s")
        with loaded.timed():
            ktd.restore(model, folder)
    line("restore of 5,000 variables", None, loaded.process, "s")


def large_arrays():
    return trained(2 * 17, 1024)  # 200 MB with Adam's slots


def orbax_of(model):
    return {
        f"{i:05}": v.value for i, v in enumerate([*model.variables, *model.optimizer.variables])
    }


@row
def save_large():
    """a save of 200 MB, beside Orbax's: CPU and peak memory"""
    import orbax.checkpoint as ocp

    model = large_arrays()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(ocp.PyTreeCheckpointer()) as orbax,
    ):
        store, save = saves_of(model, os.path.join(folder, "ours"))
        other = os.path.join(folder, "orbax")
        runs = {"Orbax": lambda: orbax.save(other, orbax_of(model), force=True), "ours": save}
        show("a save of 200 MB (Orbax)", in_turns(runs, 5), main=False)
        peaks = {}
        for name, run in runs.items():
            with Peak() as peak:
                run()
            peaks[name] = peak.mb
        line("a save of 200 MB (Orbax): peak", *peaks.values(), "MB")
        store.close()


@row
def restore_large():
    """a restore of 200 MB, beside Orbax's: CPU and peak memory"""
    import jax
    import orbax.checkpoint as ocp

    model = large_arrays()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(ocp.PyTreeCheckpointer()) as orbax,
    ):
        store, save = saves_of(model, os.path.join(folder, "ours"))
        save()
        store.close()
        other = os.path.join(folder, "orbax")
        orbax.save(other, orbax_of(model))
        target = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), orbax_of(model)
        )
        how = ocp.checkpoint_utils.construct_restore_args(target)
        runs = {
            "Orbax": lambda: orbax.restore(other, item=target, restore_args=how),
            "ours": lambda: ktd.restore(model, os.path.join(folder, "ours")),
        }
        show("a restore of 200 MB (Orbax)", in_turns(runs, 5), main=False)
        peaks = {}
        for name, run in runs.items():
            with Peak() as peak:
                run()
            peaks[name] = peak.mb
        line("a restore of 200 MB (Orbax): peak", *peaks.values(), "MB")


class OwnShare:
    """The share of this process's CPU in this package's own code, by samples of the main thread.

    A sample belongs to the innermost frame of this package, JAX or Keras: Python's own modules and
    NumPy work for their caller.
    """

    def __enter__(self):
        self._own = self._all = 0
        self._before = signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, 0.002, 0.002)
        return self

    def __exit__(self, *exception):
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)
        self.share = self._own / max(self._all, 1)

    def _sample(self, number, frame):
        self._all += 1
        while frame is not None:
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package in ("keras_tpu_dist", "jax", "jaxlib", "keras"):
                self._own += package == "keras_tpu_dist"
                return
            frame = frame.f_back


def of_12_layers():
    import keras

    x = inputs = keras.Input((128, 256))
    for _ in range(12):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 64)(y, y)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(256)(keras.layers.Dense(1024, activation="gelu")(y))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


@row
def dry_run_share():
    """a dry run's own share of its CPU: a transformer of 12 layers for v5e:2x4"""
    total, children = Cpu(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with total.timed(), OwnShare() as own:
        ktd.dry_run(of_12_layers, ktd.TPUStrategy(topology="v5e:2x4"), batch_size=16)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    compiler = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    line("a dry run, 12 layers", None, total.process + compiler, "s")
    line("a dry run, 12 layers: this package", None, total.process * own.share, "s")
    share = total.process * own.share / (total.process + compiler)
    line("a dry run, 12 layers: share of this package", None, 100 * share, "%")


def main():
    arguments = argparse.ArgumentParser(description="CPU seconds beside the steps of fit")
    arguments.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW")
    arguments.add_argument("--list", action="store_true", help="print the names of all rows")
    arguments.add_argument("--devices", type=int, default=8)
    arguments = arguments.parse_args()
    if arguments.list:
        for name, function in ROWS.items():
            print(f"{name:14} {function.__doc__}")
        return
    ktd.simulate(arguments.devices)
    logging.getLogger("keras_tpu_dist").setLevel(logging.ERROR)
    print(f"{arguments.devices} simulated devices, CPU of all threads; medians of several turns")
    print(f"{'':64} {'ours':>10} {'stock':>10} {'ratio':>6}")
    for name in arguments.rows or ROWS:
        ROWS[name]()


if __name__ == "__main__":
    main()
