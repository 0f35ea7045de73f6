"""A program's data, through every library that Keras reads."""

import functools
import importlib
import importlib.util
import math
from typing import Any

import keras
import numpy as np
import small_models
import table_models
from drawing import Program
from options import LIBRARIES
from pydatasets import in_batches

_CLASS_WEIGHTS = {0: 0.5, 1: 1.0, 2: 2.0, 3: 0.25}


class Data:
    """What fit, evaluate and predict are called with."""

    def __init__(self, program: Program, model: keras.Model, rows: int | None = None):
        choices = program.choices
        self._choices = choices
        rng = np.random.default_rng(program.seed)
        rows = choices["rows"] if rows is None else rows
        values = functools.partial(_values, choices, rng, rows)
        self._x = keras.tree.map_structure(values, model.input)
        classes = [] if isinstance(model.output, dict) else model.output.shape
        per_token = tuple(classes[1:-1])
        self._y = rng.integers(0, small_models.CLASSES, (rows, *per_token)).astype("int32")
        self._weights = rng.uniform(0.5, 1.5, (rows, *per_token)).astype("float32")
        if isinstance(model.output, dict):
            value = rng.normal(size=(rows, 1)).astype("float32")
            self._y = {"class": self._y, "value": value}
            # Of a dict of outputs each takes its own.
            self._weights = {"class": self._weights, "value": self._weights[::-1].copy()}
        kind = choices["input"]
        library = LIBRARIES.get(kind)
        missing = library is not None and importlib.util.find_spec(library) is None
        self._kind = "arrays" if missing else kind

    def of_fit(self) -> dict[str, Any]:
        """Keyword arguments of `fit`."""
        arrays, keywords = self._weighted()
        keywords["steps_per_epoch"] = self._choices["steps_per_epoch"]
        if self._kind == "generator" and keywords["steps_per_epoch"] is None:
            keywords["steps_per_epoch"] = self._batches
        keywords |= self._fed(arrays, endless=keywords["steps_per_epoch"] is not None)
        if self._choices["validation"] != "none":
            keywords["validation_data"] = (self._x, self._y)
            keywords["validation_batch_size"] = self._choices["batch_size"]
        if self._choices["validation"] == "steps":
            keywords["validation_steps"] = 1
        return keywords

    def of_evaluate(self) -> dict[str, Any]:
        """Keyword arguments of `evaluate`."""
        steps = {"steps": self._batches} if self._kind == "generator" else {}
        return {**self._fed([self._x, self._y], endless=False), **steps}

    def of_predict(self) -> dict[str, Any]:
        """Keyword arguments of `predict`."""
        return {"x": self._x, "batch_size": self._choices["batch_size"]}

    def of_replicas(self) -> tuple[Any, np.ndarray]:
        """Inputs and targets of a loop of replica code."""
        return self._x, self._y

    def of_train_on_batch(self) -> list[dict[str, Any]]:
        """Keyword arguments of `train_on_batch`, for each batch."""
        arrays, keywords = self._weighted()
        names, size = ("x", "y", "sample_weight"), self._choices["batch_size"]
        batches = in_batches(size, *arrays)
        return [{**dict(zip(names, batch)), **keywords} for batch in batches]

    def _weighted(self) -> tuple[list, dict[str, Any]]:
        """The arrays to train on, and the class weights as a keyword argument."""
        arrays, kind = [self._x, self._y], self._choices["weighted"]
        if kind == "sample_weight":
            arrays.append(self._weights)
        return arrays, {"class_weight": _CLASS_WEIGHTS} if kind == "class_weight" else {}

    @property
    def _batches(self) -> int:
        return math.ceil(self._choices["rows"] / self._choices["batch_size"])

    def _fed(self, arrays: list, endless: bool) -> dict[str, Any]:
        if self._kind == "arrays":
            names = ("x", "y", "sample_weight")
            return {**dict(zip(names, arrays)), "batch_size": self._choices["batch_size"]}
        size = self._choices["batch_size"]
        return {"x": _FEEDS[self._kind](tuple(arrays), size, endless)}


def _values(choices: dict[str, Any], rng, rows: int, tensor: Any) -> np.ndarray:
    shape = (rows, *tensor.shape[1:])
    if choices["model"] == "tables":
        return table_models.ids(choices, rng, shape)
    if "int" not in tensor.dtype:
        return rng.normal(size=shape).astype(keras.config.floatx())
    ids = rng.integers(1, small_models.VOCAB, shape)
    # Padding at the end of each row, and at least one token.
    lengths = rng.integers(1, shape[1] + 1, (rows, 1))
    return (ids * (np.arange(shape[1]) < lengths)).astype("int32")


def _generator(arrays, size, endless):
    batches = in_batches(size, *arrays)
    return batches.endless() if endless else (batch for batch in batches)


def _tuples(structure):
    """TensorFlow makes one tensor of a list."""
    is_list = isinstance(structure, (list, tuple))
    return tuple(map(_tuples, structure)) if is_list else structure


def _tf_data(arrays, size, endless):
    tf = importlib.import_module("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices(_tuples(arrays)).batch(size)
    return dataset.repeat() if endless else dataset


def _torch(arrays, size, endless):
    torch = importlib.import_module("torch")
    return torch.utils.data.DataLoader(_rows(arrays), batch_size=size)


def _grain(arrays, size, endless):
    grain = importlib.import_module("grain")
    return grain.MapDataset.source(_rows(arrays)).to_iter_dataset().batch(size)


def _rows(arrays) -> list:
    count = len(keras.tree.flatten(arrays)[0])
    return [keras.tree.map_structure(lambda a, i=i: a[i], arrays) for i in range(count)]


_FEEDS = {
    "generator": _generator,
    "pydataset": lambda arrays, size, endless: in_batches(size, *arrays),
    "tf.data": _tf_data,
    **{"torch": _torch, "grain": _grain},
}
