"""Names of a training state's arrays, and which saved one belongs to which here."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax.numpy as jnp

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import did_you_mean
from keras_tpu_dist.common.patterns import matches

T = TypeVar("T")
WEIGHTS, SLOTS, OPTIMIZER, METRICS = "weights", "slots", "optimizer", "metrics"


@dataclass(frozen=True)
class Entry:
    """An array of a training state.

    Attributes:
        path: The variable's path; of an optimizer's slot, that of its weight.
        shape: Its shape.
        dtype: Its dtype.
        slot: The name of the optimizer's slot, else `""`.
        nth: How many weights of the same path the model has before it, whether they train or not;
            of a slot, that of its weight.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    slot: str = ""
    nth: int = 0


@dataclass(frozen=True)
class Matching:
    """Which saved arrays belong to which variables.

    Attributes:
        pairs: From the index of a variable to that of a saved array.
        missing: Paths of variables for which nothing was saved.
        unexpected: Saved paths for which there is no variable.
        reshaped: Pairs of the same name whose shapes differ, in words; or of which one holds
            integers, as a quantized kernel does.
        renamed: From saved path to path here, where only numbers that Keras gave differ.
        kept: Paths of variables that were left out on purpose.
    """

    pairs: dict[int, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything has its counterpart."""
        return not (self.missing or self.unexpected or self.reshaped)


def named_state(model: Any) -> dict[str, list[tuple[Entry, Any]]]:
    """The variables of a model's training state, by kind, each with its entry.

    Args:
        model: A model; of what is not built yet there are none.
    """
    trainable, non_trainable, optimizer, metrics = _keras.state_groups(model)
    slots = {id(slot): (name, weight) for name, slot, weight in _keras.optimizer_slots(model)}
    # Not in the order of the state, in which frozen weights stand last.
    in_model = told_apart(v.path for v in model.variables)
    nth = {id(v): n for v, (_, n) in zip(model.variables, in_model)}
    state = {
        WEIGHTS: [(_with_nth(entry(v), v, nth), v) for v in (*trainable, *non_trainable)],
        SLOTS: [(_slot_entry(v, *slots[id(v)], nth), v) for v in optimizer if id(v) in slots],
        OPTIMIZER: [(entry(v), v) for v in optimizer if id(v) not in slots],
        METRICS: [(entry(v), v) for v in metrics],
    }
    return state


def entry(variable: Any) -> Entry:
    """The entry of a variable that is no slot.

    Args:
        variable: A `keras.Variable`.
    """
    return Entry(variable.path, tuple(variable.shape), str(variable.dtype))


def match(
    here: Sequence[Entry],
    saved: Sequence[Entry],
    *,
    exclude: Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
) -> Matching:
    """Finds the saved array of each variable: by path, or by order where only numbers differ.

    Keras numbers what the user does not name, anew in each process: the second model of a process
    has `dense_2` where the first has `dense`. So among paths that differ in such numbers alone,
    either all are the same here and there, or they are taken in the order of the numbers.

    Args:
        here: The entries of the variables.
        saved: Those of the saved arrays.
        exclude: Patterns (`fnmatch`) of paths to leave out, here and there.
        rename: Pairs of a regular expression and what replaces it in saved paths.
    """
    wanted = {i: each for i, each in enumerate(here) if not matches(each.path, exclude)}
    kept = tuple(each.path for i, each in enumerate(here) if i not in wanted)
    paths = [_renamed(each.path, rename) for each in saved]
    offered = {i: path for i, path in enumerate(paths) if not matches(path, exclude)}
    groups_here = _grouped({i: each.path for i, each in wanted.items()})
    groups_saved = _grouped(offered)
    pairs: dict[int, int] = {}
    for name, indices in groups_here.items():
        pairs |= _paired(indices, groups_saved.get(name, []), here, saved, paths)
    reshaped = {i: j for i, j in pairs.items() if not _fits(here[i], saved[j])}
    pairs = {i: j for i, j in pairs.items() if i not in reshaped}
    used = {*pairs.values(), *reshaped.values()}
    return Matching(
        pairs,
        tuple(here[i].path for i in wanted if i not in pairs and i not in reshaped),
        tuple(paths[j] for j in offered if j not in used),
        tuple(
            f"{here[i].path} {_form(here[i], saved[j])}, saved as {_form(saved[j], here[i])}"
            for i, j in reshaped.items()
        ),
        {paths[j]: here[i].path for i, j in pairs.items() if paths[j] != here[i].path},
        kept,
    )


def follow(
    here: Sequence[Entry],
    saved: Sequence[Entry],
    weights: Mapping[tuple[str, int], tuple[str, int]],
) -> dict[int, int]:
    """Finds the saved slot of each slot, by the weight that it belongs to.

    Args:
        here: The entries of the slots.
        saved: Those of the saved ones.
        weights: From a weight here to the saved one, each by its path and its `nth`.

    Returns:
        From the index of a slot to that of the saved one, without those that have none.
    """
    by_name = {(each.slot, each.path, each.nth): j for j, each in enumerate(saved)}
    pairs = {}
    for i, each in enumerate(here):
        j = by_name.get((each.slot, *weights.get((each.path, each.nth), ("", 0))))
        if j is not None and saved[j].shape == each.shape:
            pairs[i] = j
    return pairs


def told_apart(names: Iterable[T]) -> list[tuple[T, int]]:
    """Names, each with how many of the same name came before: Keras lets weights share a path.

    Args:
        names: The names.

    Example:

    >>> told_apart(["proj/kernel", "proj/kernel", "out/kernel"])
    [('proj/kernel', 0), ('proj/kernel', 1), ('out/kernel', 0)]
    """
    seen: Counter = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def canonical(path: str) -> str:
    """A path without the numbers that Keras gives to what has no name of its own.

    Args:
        path: A variable's path.

    Example:

    >>> canonical("sequential_3/dense_12/kernel")
    'sequential/dense/kernel'
    """
    return "/".join(re.sub(r"_\d+$", "", part) for part in path.split("/"))


def in_order_of_numbers(items: Iterable[T], path: Callable[[T], str]) -> list[T]:
    """Items in the order in which Keras made the layers of their paths, as far as names tell.

    Args:
        items: Anything that has a path.
        path: Gives that of an item.

    Example:

    >>> in_order_of_numbers(["dense_10/kernel", "dense_2/kernel", "dense/kernel"], str)
    ['dense/kernel', 'dense_2/kernel', 'dense_10/kernel']
    """

    def key(item: T) -> list[tuple[str, int]]:
        parts = path(item).split("/")
        return [(canonical(part), int(part[len(canonical(part)) + 1 :] or -1)) for part in parts]

    return sorted(items, key=key)


def said_of(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """Missing and unexpected paths in words, each with the nearest path of the other side.

    Args:
        missing: Paths of variables for which nothing was saved.
        unexpected: Saved paths for which there is no variable.
    """
    return [
        *(f"missing {path!r}{did_you_mean(path, unexpected)}" for path in missing),
        *(f"unexpected {path!r}{did_you_mean(path, missing)}" for path in unexpected),
    ]


def _with_nth(entry: Entry, weight: Any, nth: Mapping[int, int]) -> Entry:
    return replace(entry, nth=nth.get(id(weight), 0))


def _slot_entry(variable: Any, name: str, weight: Any, nth: Mapping[int, int]) -> Entry:
    return _with_nth(replace(entry(variable), path=weight.path, slot=name), weight, nth)


def same_kind(one: Any, other: Any) -> bool:
    """Whether both of two dtypes are integers, or neither: a float kernel as `int8` is zeros.

    Args:
        one: A dtype, or its name.
        other: Another.

    Example:

    >>> same_kind("float32", "bfloat16"), same_kind("float32", "int8")
    (True, False)
    """
    return jnp.issubdtype(one, jnp.integer) == jnp.issubdtype(other, jnp.integer)


def _fits(here: Entry, saved: Entry) -> bool:
    return here.shape == saved.shape and same_kind(here.dtype, saved.dtype)


def _form(entry: Entry, other: Entry) -> str:
    return f"{entry.shape}" + ("" if same_kind(entry.dtype, other.dtype) else f" {entry.dtype}")


def _renamed(path: str, rename: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rename:
        path = re.sub(pattern, replacement, path)
    return path


def _grouped(paths: Mapping[int, str]) -> dict[str, list[int]]:
    groups = defaultdict(list)
    for i, path in paths.items():
        groups[canonical(path)].append(i)
    return groups


def _paired(
    indices: list[int],
    candidates: list[int],
    here: Sequence[Entry],
    saved: Sequence[Entry],
    paths: Sequence[str],
) -> dict[int, int]:
    indices = sorted(indices, key=lambda i: here[i].nth)
    candidates = sorted(candidates, key=lambda j: saved[j].nth)
    mine, theirs = [here[i].path for i in indices], [paths[j] for j in candidates]
    if Counter(mine) == Counter(theirs) or len(mine) != len(theirs):
        # The same names: by name, one of several of one name by order. Or more here than there.
        left = defaultdict(list)
        for j in candidates:
            left[paths[j]].append(j)
        return {i: left[here[i].path].pop(0) for i in indices if left[here[i].path]}
    return dict(
        zip(
            in_order_of_numbers(indices, lambda i: here[i].path),
            in_order_of_numbers(candidates, lambda j: paths[j]),
        )
    )
