"""Marks on Keras objects; those on layers are also kept by `from_config`, clones and files."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from keras_tpu_dist._keras.seam import Replacement, declare

# The key in `.keras` files, next to a layer's class and config. Keras ignores it, so the file also
# loads without this package.
_SAVED = "keras_tpu_dist"


class Mark:
    """An attribute of this package on variables, layers or models; copies and pickles keep it.

    Public replacement: none; a dictionary with weak keys is not copied along with its objects.

    Args:
        attribute: The name of the attribute.
    """

    def __init__(self, attribute: str):
        self.attribute = attribute

    def of(self, target: Any, default: Any = None) -> Any:
        """The value of the mark on an object.

        Args:
            target: A variable, layer or model.
            default: The result if there is none.
        """
        return getattr(target, self.attribute, default)

    def write(self, target: Any, value: Any) -> None:
        """Sets the mark on an object.

        Args:
            target: A variable, layer or model.
            value: The value.
        """
        # Not with the object's own `__setattr__`: that of layers tracks its values.
        object.__setattr__(target, self.attribute, value)


class LayerMark(Mark):
    """A mark that users set on layers; layers created from their configs keep it.

    Public replacement: attributes that `get_config` may add to.

    Args:
        attribute: The name of the attribute.
        saved: Whether its values are plain enough for JSON, and files keep it.

    Attributes:
        version: Counts changes, after which derived values are stale.
        restore: Called as `restore(layer, value)`; sets it on another layer.
    """

    def __init__(self, attribute: str, *, saved: bool = False):
        super().__init__(attribute)
        self.saved = saved
        self.version = 0
        self._versions = itertools.count(1)
        self.restore: Callable[[Any, Any], object] = self.write
        _marks[attribute] = self

    def write(self, target: Any, value: Any) -> None:
        """Sets the mark on a layer.

        Args:
            target: A layer or model.
            value: The value; `None` removes it.
        """
        self.version = next(self._versions)
        super().write(target, value)
        _carry_through_configs(type(target))

    def restored_by(self, restore: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Decorates the function that sets a value from a config on a layer.

        Args:
            restore: Called as `restore(layer, value)`.
        """
        self.restore = restore
        return restore


class _MarkedConfig(dict):
    """A layer's config that passes the layer's marks to the layer created from it."""

    marks: dict[str, Any]


_marks: dict[str, LayerMark] = {}


def copy_marks(layers: Iterable[tuple[Any, Any]]) -> None:
    """Copies the marks of a model's layers to their counterparts in another one.

    Args:
        layers: Pairs of layers. See `paired_layers`.

    Public replacement: not needed if Keras's own clones kept marks.
    """
    for one, other in layers:
        for attribute, value in _marks_of(one).items():
            _marks[attribute].restore(other, value)


def _marks_of(layer: Any) -> dict[str, Any]:
    found = {attribute: mark.of(layer) for attribute, mark in _marks.items()}
    return {attribute: value for attribute, value in found.items() if value is not None}


def _carry_through_configs(kind: type) -> None:
    """Makes `kind.from_config(layer.get_config())`, which is how Keras clones, keep marks."""
    if "_keras_tpu_dist_carries" in vars(kind):
        return
    get_config, from_config = kind.get_config, kind.from_config

    @functools.wraps(get_config)
    def get_marked_config(self):
        config = _MarkedConfig(get_config(self))
        config.marks = _marks_of(self)
        return config if config.marks else dict(config)

    @functools.wraps(from_config)
    def from_marked_config(cls, config, *args, **kwargs):
        marks = dict(config.marks) if isinstance(config, _MarkedConfig) else {}
        if isinstance(config, dict):
            marks |= _of_file(config.pop(_SAVED, {}))
        layer = from_config.__func__(cls, config, *args, **kwargs)
        for attribute, value in marks.items():
            _marks[attribute].restore(layer, value)
        return layer

    kind.get_config = get_marked_config
    kind.from_config = classmethod(from_marked_config)
    kind._keras_tpu_dist_carries = True


def _of_file(marks: Any) -> dict[str, Any]:
    """The marks of a file that files may have; other names and values are ignored."""
    found = marks if isinstance(marks, dict) else {}
    return {n: v for n, v in found.items() if n in _marks and _marks[n].saved and v is not None}


def _save_marks(stock, obj, config):
    stock(obj, config)
    marks = {name: value for name, value in _marks_of(obj).items() if _marks[name].saved}
    if marks:
        config[_SAVED] = marks


def _class_of_saved(stock, *args, **kwargs):
    """The class of a saved object; the marks saved next to its config are added to the config.

    `from_config` removes them before the class sees the config.
    """
    kind, saved = stock(*args, **kwargs), kwargs.get("full_config")
    saved = saved if isinstance(saved, dict) else {}
    marks, config = _of_file(saved.get(_SAVED)), saved.get("config")
    if marks and isinstance(kind, type) and isinstance(config, dict):
        _carry_through_configs(kind)
        config[_SAVED] = marks
    return kind


_SERIALIZATION = "keras.src.saving.serialization_lib"
declare(
    Replacement(
        _SERIALIZATION,
        "get_build_and_compile_config",
        _save_marks,
        why="a saved model has the `remat` and `scan_blocks` of its layers, and loads without this "
        "package",
        hook="extra keys in a layer's saved config",
        parameters=("obj", "config"),
    ),
    Replacement(
        _SERIALIZATION,
        "_retrieve_class_or_fn",
        _class_of_saved,
        why="a loaded model has the `remat` and `scan_blocks` that were saved with it",
        hook="extra keys in a layer's saved config",
        parameters=("full_config",),
    ),
)
