"""TensorFlow names that this package does not have, and what to write instead."""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_tpu_dist.common.errors import message, type_error

_GUIDE = "Pass none of TensorFlow's objects: docs/migration.md says what to write for each."


@functools.cache
def answers() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """`tensorflow_names.toml`, read when a name is first asked for.

    Returns:
        For `"attributes"` and `"arguments"`: from an owner to its names and what to write instead.
    """
    kinds = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {
        kind: {
            owner: {name: text for names, text in entries.items() for name in names.split()}
            for owner, entries in owners.items()
        }
        for kind, owners in kinds.items()
    }


def of_attribute(owner: str, name: str) -> str | None:
    """What to write instead of a TensorFlow attribute, or `None` if it is not one.

    Args:
        owner: The class, or the name in TensorFlow that has the attribute.
        name: The attribute.
    """
    return answers()["attributes"].get(owner, {}).get(name)


def arguments_of(function: str) -> Mapping[str, str]:
    """TensorFlow's arguments of a callable, and what to write instead of each."""
    return answers()["arguments"].get(function, {})


def of_argument(function: str, name: str) -> str | None:
    """What to write instead of a TensorFlow argument, or `None` if it is not one.

    Args:
        function: The callable, as Python writes its name.
        name: The argument.
    """
    return arguments_of(function).get(name)


def of_value(value: Any) -> str | None:
    """What to write instead of a TensorFlow object, or `None` if it is not one.

    Args:
        value: Anything.
    """
    kind = type(value)
    if kind.__module__.partition(".")[0] != "tensorflow":
        return None
    name = kind.__name__
    if name == "DeviceAssignment":
        return "Write DeviceAssignment.from_order(assignment.core_assignment, topology)."
    if name == "RunOptions":
        return "Write keras_tpu_dist.RunOptions(dynamic_batch=, buckets=, axis=)."
    return of_attribute("keras_tpu_dist", name) or _GUIDE


def sentence_of(attribute: str, instead: str) -> str:
    """The error about a TensorFlow attribute.

    Args:
        attribute: The attribute and its owner, as the user wrote it.
        instead: What to write.
    """
    name = attribute.rpartition(".")[2]
    return message(
        f"{name} is TensorFlow's, and there is none here.", received=f"{attribute}.", fix=instead
    )


class TensorFlowNames:
    """A class whose TensorFlow attributes raise an error that says what to write instead."""

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name):
            for kind in type(self).__mro__:
                instead = of_attribute(kind.__name__, name)
                if instead is not None:
                    return absent(f"{_VARIABLES.get(kind.__name__, kind.__name__)}.{name}", instead)
            # Python's own error; also the one of a property that failed for such a reason.
            return super().__getattribute__(name)


class Absent:
    """A TensorFlow name with parts; using a part raises the error for that part.

    Args:
        name: The name, with its owner.
        instead: What to write.
    """

    def __init__(self, name: str, instead: str):
        self._name = name
        self._instead = instead

    def __call__(self, *_: Any, **arguments: Any) -> Any:
        """Raises a `TypeError` that says what to write instead of the arguments."""
        short = self._name.rpartition(".")[2]
        known = {name: of_argument(short, name) for name in arguments}
        fixes = [f"{name}: {instead}" for name, instead in known.items() if instead]
        raise type_error(
            f"{short} is TensorFlow's, and there is none here.",
            received=f"{self._name}({', '.join(f'{name}=' for name in arguments)}).",
            fix=" ".join([self._instead, *fixes]),
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            instead = of_attribute(self._name, name) or self._instead
            raise AttributeError(sentence_of(f"{self._name}.{name}", instead))

    def __repr__(self):
        return f"<{self._name}: {self._instead}>"


def absent(name: str, instead: str) -> Absent:
    """An object for a TensorFlow name that has parts or arguments with entries of their own.

    Args:
        name: The name, with its owner.
        instead: What to write.

    Raises:
        AttributeError: If it has neither.
    """
    if name in answers()["attributes"] or arguments_of(name.rpartition(".")[2]):
        return Absent(name, instead)
    raise AttributeError(sentence_of(name, instead))


_VARIABLES = {
    "TPUStrategy": "strategy",
    "ReplicaContext": "context",
    "PerReplica": "value",
    "DistributedDataset": "dataset",
    "DistributedIterator": "iterator",
    "RunOptions": "options",
    "DeviceAssignment": "assignment",
    "Topology": "topology",
}
