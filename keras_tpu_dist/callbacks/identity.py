"""Which of several callbacks of one class a saved state belongs to: by what they were made with.

Their order in `callbacks=[...]` says nothing: two `EarlyStopping` that change places would swap
what they know.
"""

import functools
import hashlib
import inspect
import json
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.printed import Printed

# Names in logs are shorter; a longer text identifies nothing that is monitored.
_LONGEST = 200
_MOST_NAMES = 64


@dataclass(frozen=True, repr=False)
class Identity(Printed):
    """What a callback was made with, as far as it is plain.

    Attributes:
        monitor: The name in the logs that it follows; one that follows another is another callback.
        config: Digests of other settings, by attribute: a setting may be a secret. `None` if the
            checkpoint was written before identities were.
    """

    kind: str
    monitor: str | None = None
    config: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name; plain data."""
        return {"class": self.kind, "monitor": self.monitor, "config": dict(self.config or {})}

    @classmethod
    def of_saved(cls, state: Mapping[str, Any]) -> "Identity":
        """The identity in a checkpoint."""
        return cls(state["class"], state.get("monitor"), state.get("config"))

    def may_be(self, saved: "Identity") -> bool:
        """Whether the state of a saved callback has the same meaning for this one."""
        if saved.config is None:
            return self.kind == saved.kind
        return (self.kind, self.monitor) == (saved.kind, saved.monitor)

    def likeness(self, saved: "Identity") -> int:
        """How many settings are equal."""
        theirs = saved.config or {}
        return sum(theirs.get(name) == digest for name, digest in (self.config or {}).items())

    def __str__(self) -> str:
        return self.kind if self.monitor is None else f"{self.kind} of {self.monitor!r}"


def identity_of(callback: Any, changing: Sequence[str]) -> Identity:
    """The identity of a callback.

    Its settings are the attributes with the names of arguments of its constructor, and those that
    are texts.

    Args:
        changing: The attributes that change while it runs.
    """
    arguments, attributes = _arguments(type(callback)), getattr(callback, "__dict__", {})
    digests = {}
    for name, value in attributes.items():
        text = isinstance(value, (str, os.PathLike)) and not name.startswith("_")
        if name not in changing and (text or name.lstrip("_") in arguments):
            digest = _digest(value)
            if digest is not None:
                digests[name] = digest
    monitor = attributes.get("monitor")
    is_name = isinstance(monitor, str) and len(monitor) <= _LONGEST
    config = dict(sorted(digests.items())[:_MOST_NAMES])
    return Identity(type(callback).__name__, monitor if is_name else None, config)


@functools.lru_cache(maxsize=256)
def _arguments(kind: type) -> frozenset[str]:
    """The names of arguments of a class's constructor, and of those that it calls."""
    names = set()
    for each in kind.__mro__:
        if inspect.isfunction(vars(each).get("__init__")):
            names |= set(inspect.signature(each.__init__).parameters)
    return frozenset(names - {"self"})


def _digest(value: Any) -> str | None:
    """A digest of a plain value, or `None` of another one."""
    plain = _plain(value)
    return None if plain is None else _hashed(json.dumps(plain))


@functools.lru_cache(maxsize=1024)
def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, (str, bool)):
        return [value]
    if isinstance(value, numbers.Real):
        # Keras changes the sign of `min_delta` after the first epoch.
        return [f"{abs(value):.9e}"]
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_NAMES:
        items = [_plain(item) for item in value]
        return None if None in items else items
    return None


@dataclass(frozen=True)
class Pairing:
    """Which saved state each callback gets.

    Attributes:
        saved: For every callback the number of its saved state, or `None` if it begins anew.
        by_order: The callbacks that nothing but their order identifies.
        changed: Those that get the state of one with other texts among its settings, with their
            names.
    """

    saved: list[int | None]
    by_order: list[int]
    changed: dict[int, list[str]]


def paired(here: Sequence[Identity], there: Sequence[Identity]) -> Pairing:
    """Pairs callbacks with saved ones: of one class and one monitor, the most alike first."""
    alike = {
        (i, j): identity.likeness(saved)
        for i, identity in enumerate(here)
        for j, saved in enumerate(there)
        if identity.may_be(saved)
    }
    exact = {(i, j) for i, j in alike if here[i].config == there[j].config}
    pairs: dict[int, int] = {}
    for i, j in sorted(alike, key=lambda pair: (pair not in exact, -alike[pair], *pair)):
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    sure = {(i, j) for i, j in pairs.items() if (i, j) in exact}
    rows, columns = {i for i, _ in sure}, {j for _, j in sure}
    open_pairs = {(i, j): n for (i, j), n in alike.items() if i not in rows and j not in columns}
    by_order, changed = [], {}
    for i, j in pairs.items():
        if (i, j) in sure:
            continue
        config, saved = here[i].config or {}, there[j].config
        rivals = [(a, b) for a, b in open_pairs if (a == i) != (b == j)]
        if any(open_pairs[rival] >= alike[i, j] for rival in rivals):
            by_order.append(i)
        if saved is not None:
            names = sorted({*config, *saved})
            changed[i] = [name for name in names if config.get(name) != saved.get(name)]
    return Pairing([pairs.get(i) for i in range(len(here))], by_order, changed)
