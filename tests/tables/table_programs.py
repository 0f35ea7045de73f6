"""Models with tables, and what one gives on one device or on a mesh."""

import contextlib
import importlib
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from drawing import Program
from keras import ops
from pydatasets import in_batches

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.tables import step as tables_step
from keras_tpu_dist.programs.tables import width
from keras_tpu_dist.programs.tables.step import uses

L = keras.layers
ROWS, EPOCHS = 64, 2
TWO, THREE = {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}
# A mesh, and how the table lies on it: axes, or a plan.
PLACES: dict[str, tuple[dict, Any]] = {
    "8 rows": ({"data": 8}, ("data", None)),
    "8 columns": ({"data": 8}, (None, "data")),
    "8 fsdp": ({"data": 8}, "fsdp"),
    "4x2 rows": (TWO, ("data", None)),
    "4x2 columns": (TWO, (None, "data")),
    "4x2 rows by model": (TWO, ("model", None)),
    "4x2 rows by both": (TWO, (("data", "model"), None)),
    "4x2 tensor_parallel": (TWO, "tensor_parallel"),
    "4x2 auto": (TWO, "auto"),
    "2x2x2 rows": (THREE, ("fsdp", None)),
    "2x2x2 rows by two": (THREE, (("data", "fsdp"), None)),
    "2x2x2 rows by two, otherwise": (THREE, (("fsdp", "data"), None)),
    "2x2x2 rows and columns": (THREE, ("fsdp", "data")),
    "2x2x2 rows by two, columns": (THREE, (("data", "fsdp"), "model")),
    "2x2x2 columns by two": (THREE, (None, ("data", "fsdp"))),
    "2x2x2 fsdp": (THREE, "fsdp"),
}
_o = keras.optimizers
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **k: _o.SGD(0.1, **k),
    "adagrad": lambda **k: _o.Adagrad(0.1, **k),
    "schedule": lambda **k: _o.Adagrad(_o.schedules.ExponentialDecay(0.1, 2, 0.5), **k),
    "momentum": lambda **k: _o.SGD(0.1, momentum=0.9, **k),
    "nesterov": lambda **k: _o.SGD(0.1, momentum=0.9, nesterov=True, **k),
    "adam": lambda **k: _o.Adam(0.01, epsilon=1e-3, **k),
    "amsgrad": lambda **k: _o.Adam(0.01, epsilon=1e-3, amsgrad=True, **k),
    "adamw": lambda **k: _o.AdamW(0.01, epsilon=1e-3, weight_decay=0.1, **k),
    "rmsprop": lambda **k: _o.RMSprop(0.01, epsilon=1e-3, **k),
    "lamb": lambda **k: _o.Lamb(0.01, epsilon=1e-3, **k),
    "ftrl": lambda **k: _o.Ftrl(0.1, **k),
    "adadelta": lambda **k: _o.Adadelta(1.0, epsilon=1e-3, **k),
    "adafactor": lambda **k: _o.Adafactor(0.1, **k),
    "loss scale": lambda **k: _o.LossScaleOptimizer(_o.Adagrad(0.1, **k), initial_scale=8.0),
}
_LIMITS = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "ema": {"use_ema": True, "ema_overwrite_frequency": 2},
    "ema at end": {"use_ema": True, "ema_momentum": 0.7},
    "accumulation": {"gradient_accumulation_steps": 2},
    "decay": {"weight_decay": 0.01},
}


def results_of(program: Program, on_mesh: bool) -> dict[str, Any]:
    """Histories, weights, evaluation and predictions, and how tables were used."""
    keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(program.seed)
    keras.config.set_dtype_policy(program.choices["policy"])
    try:
        with _choice_of(program), tempfile.TemporaryDirectory() as folder:
            return _Run(program, on_mesh, Path(folder)).all()
    finally:
        keras.config.set_dtype_policy("float32")
        keras.distribution.set_distribution(None)


_NAMES = ("x", "y", "sample_weight")


@contextlib.contextmanager
def _choice_of(program: Program):
    """Small tables too; and by width, whatever takes longer."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tables_step, "LEAST_BYTES", 1))
        if program.choices["tables"] == "width":
            stack.enter_context(mock.patch.multiple(width, BYTES_PER_ROW=0, _EXCHANGE_FACTOR=0))
        yield


def _strategy(choices: dict[str, Any], place: str) -> ktd.TPUStrategy:
    mesh, layout = PLACES[place]
    tables = "auto" if choices["tables"] == "width" else choices["tables"]
    return ktd.TPUStrategy(
        mesh,
        layout if isinstance(layout, str) else [("table/(embeddings|rows)", layout)],
        tables=tables,
        donate_state=choices["donate_state"],
        remat=choices["remat"],
        shard_optimizer=choices["shard_optimizer"],
    )


def _path(variable: Any) -> str:
    """A variable's path without Keras's numbers, which go on if a model is built again."""
    return re.sub(r"_\d+(?=_|\b)", "", variable.path)


class _Run:
    """One run of a program."""

    def __init__(self, program: Program, on_mesh: bool, folder: Path):
        self._program, self._choices = program, program.choices
        self._on_mesh, self._folder = on_mesh, folder
        self._place = self._choices["place"]

    def all(self) -> dict[str, Any]:
        """What it gives."""
        with self._scope():
            model = self._built()
        found = self._trained(model)
        then = self._choices["then"]
        if then == "nothing":
            return found
        keras.utils.set_random_seed(self._program.seed + 1)
        model = self._changed(model, then)
        again = self._trained(model, callbacks=self._checkpoint(then), epochs=self._epochs(then))
        return found | {f"then {name}": value for name, value in again.items()}

    def _scope(self) -> contextlib.AbstractContextManager:
        if not self._on_mesh:
            return contextlib.nullcontext()
        return _strategy(self._choices, self._place).scope()

    def _built(self) -> keras.Model:
        model = MODELS[self._choices["model"]](self._choices["width"])
        self._compile(model)
        return model

    def _compile(self, model: keras.Model) -> None:
        extra = _LIMITS.get(self._choices["extra"], {})
        # Stock Keras loses steps where launches of several do not fill an epoch.
        steps = self._choices["steps"] if self._on_mesh else 1
        loss = "mse"
        if self._choices["model"].startswith("tied"):
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = OPTIMIZERS[self._choices["optimizer"]](**extra)
        model.compile(optimizer, loss, metrics=[loss], steps_per_execution=steps)

    def _epochs(self, then: str) -> int:
        return 2 * EPOCHS if then == "resumed elsewhere" and self._on_mesh else EPOCHS

    def _checkpoint(self, then: str) -> list:
        if then != "resumed elsewhere" or not self._on_mesh:
            return []
        return [ktd.callbacks.Checkpoint(self._folder / "run", asynchronous=False)]

    def _changed(self, model: keras.Model, then: str) -> keras.Model:
        if then == "frozen":
            _layer_of_table(model).trainable = False
            self._compile(model)
        elif then == "reloaded":
            path = self._folder / "of.weights.h5"
            model.save_weights(path)
            with self._scope():
                model = self._built()
            model.load_weights(path)
        elif then == "resumed elsewhere" and self._on_mesh:
            places = list(PLACES)
            self._place = places[(places.index(self._place) + 5) % len(places)]
            with self._scope():
                model = self._built()
        return model

    def _trained(self, model: keras.Model, callbacks: list = (), epochs: int = EPOCHS) -> dict:
        arrays = _data(self._program, model)
        choices = self._choices
        if choices["trainer"] == "on_batch":
            found = self._on_batches(model, arrays)
        else:
            saves = callbacks or self._checkpoint(choices["then"])
            history = self._fit(model, arrays, [*saves, *self._callbacks(model, arrays)], epochs)
            found = {f"history {name}": v[-EPOCHS:] for name, v in history.items()}
        if not self._on_mesh and choices["extra"] in ("ema", "ema at end"):
            # A fit ends with averages as weights, of which stock Keras then holds one array twice.
            for variable in model.variables:
                variable.assign(np.array(variable.value))
        found |= {f"{i} {_path(v)}": v.numpy() for i, v in enumerate(model.weights)}
        slots = [v for v in model.optimizer.variables if "seed" not in v.path]
        found |= {f"slot {i} {_path(v)}": v.numpy() for i, v in enumerate(slots)}
        size = choices["batch_size"]
        named = dict(zip(_NAMES, arrays))
        found["evaluate"] = model.evaluate(**named, batch_size=size, verbose=0)
        found["predict"] = model.predict(arrays[0], batch_size=size, verbose=0)
        found["uses"] = dict(uses.of(model) or {}) if self._on_mesh else {}
        return found

    def _fit(self, model: keras.Model, arrays: tuple, callbacks: list, epochs: int) -> dict:
        size = self._choices["batch_size"]
        kind = self._choices["input"]
        batches = in_batches(size, *arrays)
        if kind == "arrays":
            given = {**dict(zip(_NAMES, arrays)), "batch_size": size, "shuffle": False}
        elif kind == "generator":
            given = {"x": batches.endless(), "steps_per_epoch": len(batches)}
        else:
            given = {"x": _tf_data(arrays, size) if kind == "tf.data" else batches}
            given["shuffle"] = False
        return model.fit(**given, callbacks=callbacks, epochs=epochs, verbose=0).history

    def _callbacks(self, model: keras.Model, arrays: tuple) -> list:
        kind = self._choices["callbacks"]
        if kind == "name_nan" and self._on_mesh:
            return [ktd.callbacks.NameNaN()]
        if kind == "assigns":
            return [_Assigns(stock=not self._on_mesh)]
        if kind == "predicts beside" and self._on_mesh:
            return [_PredictsBeside(arrays[0])]
        return []

    def _on_batches(self, model: keras.Model, arrays: tuple) -> dict[str, Any]:
        batches = in_batches(self._choices["batch_size"], *arrays)
        return {f"batch {n}": model.train_on_batch(*batch) for n, batch in enumerate(batches)}


class _Assigns(keras.callbacks.Callback):
    """Halves the table after each epoch."""

    def __init__(self, stock: bool):
        super().__init__()
        self._stock = stock

    def on_epoch_end(self, epoch, logs=None):
        if self._stock:
            self.model.jax_state_sync()
        table = _layer_of_table(self.model).weights[0]
        table.assign((0.5 * table.numpy()).astype(table.dtype))


class _PredictsBeside(keras.callbacks.Callback):
    """Predicts in another thread while the model trains."""

    def __init__(self, x: Any):
        super().__init__()
        self._x, self._errors, self._thread = x, [], None

    def on_epoch_begin(self, epoch, logs=None):
        self._thread = threading.Thread(target=self._predict)
        self._thread.start()

    def _predict(self):
        try:
            assert np.isfinite(self.model.predict(self._x, batch_size=7, verbose=0)).all()
        except Exception as error:
            self._errors.append(error)

    def on_epoch_end(self, epoch, logs=None):
        self._thread.join()
        if self._errors:
            raise self._errors[0]


def _layer_of_table(model: keras.Model) -> keras.Layer:
    return next(each for each in model._flatten_layers() if each.name == "table")


# --- data ---------------------------------------------------------------------------------------


def _data(program: Program, model: keras.Model) -> tuple:
    """Inputs, targets and perhaps sample weights."""
    choices, rng = program.choices, np.random.default_rng(program.seed)
    rows = choices["rows"]
    ids = {
        "random": lambda shape: rng.integers(0, ROWS, shape),
        "equal": lambda shape: np.full(shape, 5),
        "one owner": lambda shape: rng.integers(0, 8, shape),
        "distinct": lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape) % ROWS,
    }[choices["ids"]]
    dtype = choices["ids_dtype"]
    x = keras.tree.map_structure(lambda i: ids((rows, *i.shape[1:])).astype(dtype), model.input)
    if choices["model"].startswith("tied"):
        y = rng.integers(0, ROWS, (rows, *model.output.shape[1:-1]))
    else:
        y = rng.normal(size=(rows, 1)).astype("float32")
    weights = rng.uniform(0.5, 1.5, rows).astype("float32")
    return (x, y, weights) if choices["weighted"] else (x, y)


def _tf_data(arrays: tuple, size: int) -> Any:
    if importlib.util.find_spec("tensorflow") is None:
        return in_batches(size, *arrays)
    data = importlib.import_module("tensorflow").data
    arrays = keras.tree.map_structure_up_to(arrays, lambda a: a, arrays)
    return data.Dataset.from_tensor_slices(_tuples(arrays)).batch(size)


def _tuples(structure: Any) -> Any:
    """TensorFlow makes one tensor of a list."""
    if isinstance(structure, (list, tuple)):
        return tuple(map(_tuples, structure))
    return structure


# --- models -------------------------------------------------------------------------------------


def _head(x: Any) -> Any:
    return L.Dense(1, dtype="float32")(L.Dense(8, activation="tanh")(x))


def _one(width: int, after: Callable | None = None, **table: Any) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    x = L.Embedding(ROWS, width, name="table", **table)(ids)
    return keras.Model(ids, _head(L.Flatten()(x if after is None else after(x))))


def _masked(width: int) -> keras.Model:
    ids = keras.Input((4,), dtype="int32")
    x = L.Embedding(ROWS, width, mask_zero=True, name="table")(ids)
    return keras.Model(ids, _head(L.GRU(6)(x)))


def _two_lookups(width: int) -> keras.Model:
    first, second = keras.Input((3,), dtype="int32"), keras.Input((2, 3), dtype="int32")
    table = L.Embedding(ROWS, width, name="table")
    x = L.Concatenate()([L.Flatten()(table(first)), L.GlobalAveragePooling2D()(table(second))])
    return keras.Model([first, second], _head(x))


def _two_tables(width: int) -> keras.Model:
    first, second = keras.Input((3,), dtype="int32"), keras.Input((2,), dtype="int32")
    # Of one shape: which slot belongs to which table?
    a = L.Flatten()(L.Embedding(ROWS, width, name="table")(first))
    b = L.Flatten()(L.Embedding(ROWS, width, name="other_table")(second))
    return keras.Model([first, second], _head(L.Concatenate()([a, b])))


class _Logits(L.Layer):
    """Logits from the table that ids were looked up in."""

    def __init__(self, table: keras.Layer, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        table = ops.cast(self.table.embeddings, self.compute_dtype)
        return ops.matmul(x, ops.transpose(table))


def _tied(width: int, flat: bool = False) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    table = L.Embedding(ROWS, width, name="table")
    x = table(ids)
    if flat:
        x = L.Flatten()(x)
    x = L.LayerNormalization()(L.Dense(width)(x))
    return keras.Model(ids, L.Activation("linear", dtype="float32")(_Logits(table)(x)))


def _scalar(width: int) -> keras.Model:
    ids = keras.Input((), dtype="int32")
    return keras.Model(ids, _head(L.Embedding(ROWS, width, name="table")(ids)))


def _nested(width: int) -> keras.Model:
    layers = [keras.Input((3,), dtype="int32"), L.Embedding(ROWS, width, name="table")]
    tower = keras.Sequential([*layers, L.Flatten(), L.Dense(6)], name="tower")
    first, second = keras.Input((3,), dtype="int32"), keras.Input((3,), dtype="int32")
    return keras.Model([first, second], _head(L.Multiply()([tower(first), tower(second)])))


class _Take(L.Layer):
    """A table of the user's own, looked up otherwise than `Embedding` does."""

    def __init__(self, width: int, how: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.how = width, how

    def build(self, shape):
        self.rows = self.add_weight(shape=(ROWS, self.width), name="rows")

    def call(self, ids):
        ids = ops.cast(ids, "int32")
        rows = ops.cast(self.rows, self.compute_dtype)
        if self.how == "one_hot":
            return ops.matmul(ops.one_hot(ids, ROWS, dtype=self.compute_dtype), rows)
        if self.how == "positions":
            return ops.take(rows, ops.arange(ids.shape[1]), axis=0) + ops.take(rows, ids, axis=0)
        if self.how == "sliced":
            return ops.take(rows[: ROWS // 2], ids % (ROWS // 2), axis=0)
        if self.how == "twice in turn":
            first = ops.take(rows, ids, axis=0)
            # Ids that depend on what was looked up.
            best = ops.argmax(ops.stop_gradient(first), axis=-1) * 3
            return first + ops.take(rows, best, axis=0)
        found = ops.take(rows * ops.sqrt(ops.cast(self.width, rows.dtype)), ids, axis=0)
        return found


def _take(how: str) -> Callable[[int], keras.Model]:
    def build(width: int) -> keras.Model:
        ids = keras.Input((3,), dtype="int32")
        return keras.Model(ids, _head(L.Flatten()(_Take(width, how, name="table")(ids))))

    return build


class _Penalized(L.Layer):
    """Adds a loss of the whole table."""

    def __init__(self, table: keras.Layer, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(self.table.embeddings)))
        return x


def _penalized(width: int) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    table = L.Embedding(ROWS, width, name="table")
    return keras.Model(ids, _head(L.Flatten()(_Penalized(table)(table(ids)))))


def _int8(width: int) -> keras.Model:
    model = _one(width)
    _layer_of_table(model).quantize("int8")
    return model


MODELS: dict[str, Callable[[int], keras.Model]] = {
    "one": _one,
    "masked": _masked,
    "two lookups": _two_lookups,
    "two tables": _two_tables,
    "tied": _tied,
    "tied and flat": lambda width: _tied(width, flat=True),
    "scalar": _scalar,
    "nested": _nested,
    "regularized": lambda width: _one(width, embeddings_regularizer=keras.regularizers.L2(0.1)),
    "constrained": lambda width: _one(
        width, embeddings_constraint=keras.constraints.MaxNorm(0.1, axis=1)
    ),
    "frozen": lambda width: _one(width, trainable=False),
    "lora": lambda width: _one(width, lora_rank=2),
    "int8": _int8,
    "taken": _take("taken"),
    "positions": _take("positions"),
    "one_hot": _take("one_hot"),
    "sliced": _take("sliced"),
    "twice in turn": _take("twice in turn"),
    "penalized": _penalized,
    "dropout": lambda width: _one(width, L.Dropout(0.3)),
    "normalized": lambda width: _one(width, L.BatchNormalization()),
}
