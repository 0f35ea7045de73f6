"""Classifiers with tables: how these lie and are used, and what trains them."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers as kl
from keras import ops
from small_models import CLASSES

from keras_tpu_dist.programs.tables import step, width

ROWS = 64


@contextlib.contextmanager
def as_chosen(choices: dict[str, Any]):
    """Small tables count too; and by width, whatever takes longer."""
    with contextlib.ExitStack() as stack:
        if choices["model"] == "tables":
            stack.enter_context(mock.patch.object(step, "LEAST_BYTES", 1))
            if choices["use"] == "width":
                stack.enter_context(mock.patch.multiple(width, BYTES_PER_ROW=0, _EXCHANGE_FACTOR=0))
        yield


def options(choices: dict[str, Any], mesh: dict[str, int]) -> dict[str, Any]:
    """The strategy's arguments for tables: their layout, unless a plan has it, and their use."""
    first, *_, last = names = tuple(mesh)
    axes = {
        "rows": (first, None),
        "columns": (None, first),
        "rows by the last": (last, None),
        "rows by all": (names, None),
        "rows by all, otherwise": (names[::-1], None),
        "columns by all": (None, names),
        "rows and columns": (first, last if last != first else None),
    }
    use = choices["use"]
    found: dict[str, Any] = {"tables": "auto" if use == "width" else use}
    if choices["place"] is not None:
        found["layout"] = [("table/(embeddings|rows)", axes[choices["place"]])]
    return found


_o = keras.optimizers
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
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


def optimizer(choices: dict[str, Any]) -> keras.optimizers.Optimizer:
    """The optimizer."""
    return _OPTIMIZERS[choices["updates"]](**_LIMITS.get(choices["limit"], {}))


def ids(choices: dict[str, Any], rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Ids to look up."""
    drawn = {
        "random": lambda: rng.integers(0, ROWS, shape),
        "equal": lambda: np.full(shape, 5),
        "one owner": lambda: rng.integers(0, 8, shape),
        "distinct": lambda: np.arange(np.prod(shape, dtype=int)).reshape(shape) % ROWS,
    }[choices["ids"]]
    return drawn().astype(choices["ids_dtype"])


def tables(of: str, width: int, **_: Any) -> keras.Model:
    """A model with one or two tables of some width."""
    return _MODELS[of](width)


def _head(x: Any) -> Any:
    return kl.Dense(CLASSES, dtype="float32")(kl.Dense(8, activation="tanh")(x))


def _one(width: int, after: Callable | None = None, **table: Any) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    x = kl.Embedding(ROWS, width, name="table", **table)(ids)
    return keras.Model(ids, _head(kl.Flatten()(x if after is None else after(x))))


def _masked(width: int) -> keras.Model:
    ids = keras.Input((4,), dtype="int32")
    x = kl.Embedding(ROWS, width, mask_zero=True, name="table")(ids)
    return keras.Model(ids, _head(kl.GRU(6)(x)))


def _two_lookups(width: int) -> keras.Model:
    first, second = keras.Input((3,), dtype="int32"), keras.Input((2, 3), dtype="int32")
    table = kl.Embedding(ROWS, width, name="table")
    x = kl.Concatenate()([kl.Flatten()(table(first)), kl.GlobalAveragePooling2D()(table(second))])
    return keras.Model([first, second], _head(x))


def _two_tables(width: int) -> keras.Model:
    first, second = keras.Input((3,), dtype="int32"), keras.Input((2,), dtype="int32")
    # Of one shape: which slot belongs to which table?
    a = kl.Flatten()(kl.Embedding(ROWS, width, name="table")(first))
    b = kl.Flatten()(kl.Embedding(ROWS, width, name="other_table")(second))
    return keras.Model([first, second], _head(kl.Concatenate()([a, b])))


class _Logits(kl.Layer):
    """Logits from the table that ids were looked up in."""

    def __init__(self, table: keras.Layer, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        table = ops.cast(self.table.embeddings, self.compute_dtype)
        return ops.matmul(x, ops.transpose(table))


def _tied(width: int, flat: bool = False) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    table = kl.Embedding(ROWS, width, name="table")
    x = kl.Flatten()(table(ids)) if flat else table(ids)
    x = kl.LayerNormalization()(kl.Dense(width)(x))
    return keras.Model(ids, kl.Activation("linear", dtype="float32")(_Logits(table)(x)))


def _scalar(width: int) -> keras.Model:
    ids = keras.Input((), dtype="int32")
    return keras.Model(ids, _head(kl.Embedding(ROWS, width, name="table")(ids)))


def _nested(width: int) -> keras.Model:
    layers = [keras.Input((3,), dtype="int32"), kl.Embedding(ROWS, width, name="table")]
    tower = keras.Sequential([*layers, kl.Flatten(), kl.Dense(6)], name="tower")
    first, second = keras.Input((3,), dtype="int32"), keras.Input((3,), dtype="int32")
    return keras.Model([first, second], _head(kl.Multiply()([tower(first), tower(second)])))


class _Take(kl.Layer):
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
        return ops.take(rows * ops.sqrt(ops.cast(self.width, rows.dtype)), ids, axis=0)


def _take(how: str) -> Callable[[int], keras.Model]:
    def build(width: int) -> keras.Model:
        ids = keras.Input((3,), dtype="int32")
        return keras.Model(ids, _head(kl.Flatten()(_Take(width, how, name="table")(ids))))

    return build


class _Penalized(kl.Layer):
    """Adds a loss of the whole table."""

    def __init__(self, table: keras.Layer, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(self.table.embeddings)))
        return x


def _penalized(width: int) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    table = kl.Embedding(ROWS, width, name="table")
    return keras.Model(ids, _head(kl.Flatten()(_Penalized(table)(table(ids)))))


def _int8(width: int) -> keras.Model:
    model = _one(width)
    model.get_layer("table").quantize("int8")
    return model


_MODELS: dict[str, Callable[[int], keras.Model]] = {
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
    **{how: _take(how) for how in ("taken", "positions", "one_hot", "sliced", "twice in turn")},
    "penalized": _penalized,
    "dropout": lambda width: _one(width, kl.Dropout(0.3)),
    "normalized": lambda width: _one(width, kl.BatchNormalization()),
}
