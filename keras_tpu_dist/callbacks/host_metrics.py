"""Metrics in plain Python, on the outputs for the whole evaluation set."""

import inspect
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.monitored import is_validated
from keras_tpu_dist.common.checks import PositiveInt, check_model, checked_arguments
from keras_tpu_dist.common.errors import message, value_error

# Callbacks that read all of `logs` instead of one monitored name.
_READERS = ("CSVLogger", "History", "ProgbarLogger", "RemoteMonitor", "TensorBoard")


class HostMetrics(keras.callbacks.Callback):
    """Adds any Python metric of the whole evaluation set to the logs of every epoch.

    At the end of an epoch the model predicts the evaluation set. Every function gets all targets
    and all outputs at once, as NumPy arrays, as scikit-learn's metrics expect; averages over
    batches cannot give such metrics. The values are in `logs` for the callbacks after this one,
    such as `EarlyStopping("val_f1", mode="max")` or `ModelCheckpoint(monitor="val_f1")`, and in the
    history.

    It works under a `TPUStrategy`, with several steps in a launch if you compile the model so, and
    under stock Keras. It also works over several processes: with `input="per_process"` every
    process provides its part of the evaluation set, and the functions get all of it.

    Args:
        metrics: Functions by name, called as `fn(y_true, y_pred)`, or as
            `fn(y_true, y_pred, sample_weight=...)` if the data has sample weights. If the model has
            several outputs, the functions get the structures of targets and outputs;
            `{"output name": {"name": fn}}` passes one output.
        validation_data: The evaluation set: arrays `(x, y)` or `(x, y, sample_weight)`, a
            `keras.utils.PyDataset`, any iterable over such batches that can be read again
            (`tf.data.Dataset`, torch `DataLoader`), a function that returns one, or a generator
            together with `steps`, of which every epoch reads the next `steps` batches. Defaults to
            the `validation_data` of `fit`, with its `validation_freq`.
        batch_size: Rows in a batch, for arrays. Defaults to that of `fit`'s validation.
        steps: The number of batches to read.
        prefix: A prefix for the names in `logs`.

    Raises:
        ValueError: If `metrics` are not functions by name; in `fit`, if there is no data, if it can
            be read only once, or if a callback that needs the values comes before this one.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd
    >>> from sklearn.metrics import r2_score
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> x, y = np.random.rand(100, 4), np.random.rand(100, 1)
    >>> r2 = ktd.callbacks.HostMetrics({"r2": r2_score})
    >>> history = model.fit(x, y, validation_data=(x[:13], y[:13]), verbose=0, callbacks=[r2])
    >>> sorted(history.history)
    ['loss', 'val_loss', 'val_r2']
    """

    @checked_arguments
    def __init__(
        self,
        metrics: Mapping[str, Any],
        validation_data: Any = None,
        *,
        batch_size: PositiveInt | None = None,
        steps: PositiveInt | None = None,
        prefix: str = "val_",
    ):
        super().__init__()
        _keras.install()  # for `before_fit`, also without a strategy
        self._functions = _checked_metrics(metrics)
        self._prefix = prefix
        self._given = None if validation_data is None else (validation_data, batch_size, steps)
        self._source = self._given
        self._frequency: Any = 1
        if _read_once(validation_data) and steps is None:
            raise ValueError(_one_reading("validation_data"))

    @property
    def names(self) -> list[str]:
        """The names of the metrics in `logs`."""
        return [self._prefix + "_".join(key) for key in self._functions]

    def before_fit(self, arguments: Mapping[str, Any]) -> None:
        """Looks at the arguments of `fit`: its validation data and its other callbacks.

        Args:
            arguments: The arguments of `fit`, by name; `"callbacks"` is a flat list of all
                callbacks.

        Raises:
            ValueError: If there is no evaluation set, if that of `fit` can be read only once, or if
                a callback that needs the values comes before this one.
        """
        callbacks = list(arguments["callbacks"])
        for callback in callbacks[: callbacks.index(self)]:
            self._check_earlier(callback)
        self._frequency = arguments.get("validation_freq", 1)
        if self._given is None:
            data = arguments.get("validation_data")
            if data is None:
                raise ValueError(_no_data(arguments))
            steps = arguments.get("validation_steps")
            if _read_once(data):
                raise ValueError(_one_reading("fit's validation_data"))
            batch_size = arguments.get("validation_batch_size") or arguments.get("batch_size")
            self._source = (data, batch_size, steps)

    def on_epoch_end(self, epoch, logs=None):
        """Computes the metrics and adds them to the logs."""
        if not is_validated(epoch, self._frequency):
            return
        values = self.compute(self.model)
        if logs is None:
            return
        taken = [name for name in values if name in logs]
        if taken:
            raise value_error(
                "The name of a host metric must not be in the logs already.",
                received={"names": taken, "logs": sorted(logs)},
                fix="Rename it, or give another prefix=.",
            )
        logs.update(values)

    def compute(self, model: Any) -> dict[str, float]:
        """Computes the metrics of a model.

        Args:
            model: A model.

        Returns:
            The values by their names in `logs`.
        """
        check_model(model, "compute")
        if self._source is None:
            raise ValueError(_no_data({}))
        three = _outputs(model, *self._source)
        strategy = _keras.active_strategy()
        if strategy is not None and strategy.runner.own_input is not None:
            # Every process has its own rows.
            three = strategy.runner.own_input.joined(three)
        y_true, y_pred, weights = (keras.tree.map_structure(_of_numpy, rows) for rows in three)
        values = {}
        for (*output, _), name, function in zip(
            self._functions, self.names, self._functions.values(), strict=True
        ):
            arguments = [y_true, y_pred, weights]
            if output:
                arguments = [_of_output(argument, output[0], model) for argument in arguments]
            values[name] = _value(name, function, *arguments)
        return values

    def _check_earlier(self, callback) -> None:
        names = self.names
        monitored = getattr(callback, "monitor", None)
        written = _names_in(str(getattr(callback, "filepath", "")))
        reads_all = type(callback).__name__ in _READERS
        if monitored in names or reads_all or not written.isdisjoint(names):
            raise value_error(
                "HostMetrics must come before the callbacks that read its values.",
                received=f"{type(callback).__name__} before HostMetrics({names}).",
                fix="Write HostMetrics first in callbacks=[...].",
            )


def _names_in(path: str) -> set[str]:
    """The names of logs in the path of a file, such as `"{epoch:02d}-{val_f1:.2f}.keras"`."""
    try:
        return {name for _, name, *_ in string.Formatter().parse(path) if name}
    except ValueError:
        return set()  # Keras raises its own error when it writes the file


def _checked_metrics(metrics) -> dict[tuple[str, ...], Callable]:
    """Functions by `(name,)` or `(output, name)`."""
    functions = {}
    if isinstance(metrics, Mapping):
        for name, entry in metrics.items():
            inner = entry if isinstance(entry, Mapping) else {None: entry}
            functions |= {(name, key) if key else (name,): fn for key, fn in inner.items()}
    named = all(isinstance(part, str) for key in functions for part in key)
    strange = [key for key, function in functions.items() if not callable(function)]
    if not functions or strange or not named:
        raise value_error(
            "HostMetrics takes functions by name.",
            received={"metrics": metrics},
            fix='Write for example HostMetrics({"f1": sklearn.metrics.f1_score}).',
        )
    names = Counter("_".join(key) for key in functions)
    twice = sorted(name for name, times in names.items() if times > 1)
    if twice:
        raise value_error(
            "Every host metric needs a different name in the logs.",
            received={"metrics": metrics, "twice": twice},
            fix="Rename one of them.",
        )
    return functions


def _read_once(data) -> bool:
    return isinstance(data, Iterator)


def _one_reading(name: str) -> str:
    return message(
        "HostMetrics reads its data at the end of each epoch.",
        received=f"a generator as {name}, which can be read only once.",
        fix="Pass HostMetrics(..., validation_data=) arrays, a function that returns a fresh "
        "generator, or a generator of its own and steps=.",
    )


def _no_data(arguments) -> str:
    split = arguments.get("validation_split")
    return message(
        "HostMetrics needs an evaluation set.",
        received=f"validation_split={split}." if split else "no validation_data.",
        fix="Pass validation_data=(x, y) to fit, or to HostMetrics.",
    )


def _outputs(model, data, batch_size, steps) -> tuple[Any, Any, Any]:
    """Targets, outputs and sample weights of all rows."""
    if isinstance(data, (tuple, list)) and steps is None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(tuple(data))
        y_pred = model.predict(x, batch_size=batch_size, verbose=0)
        targets = [(_arrays(y), _arrays(weights))]
    else:
        targets = []
        y_pred = _predict(model, _batches(data, batch_size, steps), targets)
    y_true = _joined([y for y, _ in targets])
    if y_true is None:
        raise value_error(
            "HostMetrics compares outputs with targets.",
            received="an evaluation set without y.",
            fix="Pass validation_data=(x, y).",
        )
    return y_true, y_pred, _joined([weights for _, weights in targets])


def _predict(model, batches: Iterable, targets: list) -> Any:
    """Predicts all batches, as the model is compiled, and collects the targets."""

    def inputs():
        for batch in batches:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
            targets.append((_arrays(y), _arrays(weights)))
            yield (_arrays(x),)

    with warnings.catch_warnings():
        # The input ends where the evaluation set ends.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        return model.predict(inputs(), verbose=0)


def _batches(data: Any, batch_size: int | None, steps: int | None) -> Iterator:
    if isinstance(data, (tuple, list)):
        rows = len(keras.tree.flatten(data)[0])
        size = batch_size or 32
        starts = range(0, rows, size)[:steps]
        return (_rows(tuple(data), slice(start, start + size)) for start in starts)
    if callable(data) and not isinstance(data, (Iterable, keras.utils.PyDataset)):
        data = data()
    if isinstance(data, keras.utils.PyDataset):
        count = steps or data.num_batches
        if count is None:
            raise ValueError(_one_reading("validation_data"))
        return (data[i] for i in range(count))
    batches = iter(data)
    if steps is None:
        return batches
    return (batch for _, batch in zip(range(steps), batches, strict=False))  # at most so many


def _rows(arrays, rows: slice):
    return keras.tree.map_structure(lambda a: None if a is None else a[rows], arrays)


def _arrays(structure):
    return keras.tree.map_structure(lambda a: None if a is None else np.asarray(a), structure)


def _joined(structures: list) -> Any:
    if not structures or structures[0] is None:
        return None
    return keras.tree.map_structure(
        lambda *parts: None if parts[0] is None else np.concatenate(parts), *structures
    )


def _of_numpy(array: Any) -> Any:
    """Converts floats that NumPy lacks to `float32`: sums in bfloat16 are wrong, scikit-learn
    fails."""
    if array is None or np.issubdtype(array.dtype, np.number):
        return array
    return array.astype("float32") if jnp.issubdtype(array.dtype, jnp.floating) else array


def _of_output(structure: Any, name: str, model: Any) -> Any:
    """The part of a structure of targets, outputs or sample weights for one output."""
    names = list(structure) if isinstance(structure, Mapping) else model.output_names
    if isinstance(structure, (Mapping, list, tuple)):
        if name not in names:
            raise value_error(
                "A host metric for one output needs the name of that output.",
                received={"name": name, "outputs": names},
                fix="Use one of these.",
                name=name,
                choices=names,
            )
        if isinstance(structure, Mapping):
            return structure[name]
        return structure[names.index(name)]
    return structure


def _value(name: str, function: Callable, y_true, y_pred, weights) -> float:
    if weights is None:
        value = function(y_true, y_pred)
    else:
        if not _takes_weights(function):
            raise value_error(
                "If the evaluation set has sample weights, a host metric must take them.",
                received=f"{name}, whose function has no sample_weight argument.",
                fix="Give it one, or pass HostMetrics(..., validation_data=(x, y)) without.",
            )
        value = function(y_true, y_pred, sample_weight=weights)
    value = np.asarray(value)
    if value.size != 1:
        raise value_error(
            "A host metric must return one number.",
            received=f"{name} of shape {value.shape}.",
            fix="Average it, for example f1_score(..., average='macro').",
        )
    return float(value.reshape(()))


def _takes_weights(function: Callable) -> bool:
    parameters = inspect.signature(function).parameters
    return "sample_weight" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
