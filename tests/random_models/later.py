"""What may happen to a model between two fits."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

Compile = Callable[[keras.Model], Any]


def changed(
    what: str,
    model: keras.Model,
    rebuild: Callable[[], keras.Model],
    compile_: Compile,
    folder: Path,
):
    """The model that is trained on, which may be another object, after a value of "then"."""
    if what == "frozen":
        weighty = list(_weighty(model))
        weighty[len(weighty) // 2].trainable = False
        compile_(model)
    elif what == "lora":
        next(each for each in _weighty(model) if hasattr(each, "enable_lora")).enable_lora(2)
        compile_(model)
    elif what == "recompiled":
        compile_(model)
    elif what == "pickled":
        return pickle.loads(pickle.dumps(model))
    elif what == "reloaded":
        path = folder / "of.weights.h5"
        model.save_weights(path)
        model = rebuild()
        model.load_weights(path)
    return model


def _weighty(layer: Any) -> Iterator[keras.Layer]:
    """The layers within that have weights of their own."""
    for each in layer.layers:
        if isinstance(each, keras.Model):
            yield from _weighty(each)
        elif each.trainable_weights:
            yield each
