"""Names the arrays of a training state, and matches saved arrays with a model's variables."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import did_you_mean
from keras_tpu_dist.common.patterns import check_matched, matches

T = TypeVar("T")
WEIGHTS, SLOTS, OPTIMIZER, METRICS = "weights", "slots", "optimizer", "metrics"
# Keras numbers them, too; they are no layers, and have no list.
_ALWAYS_AUTOMATIC = ("seed_generator", "variable")
_NUMBER = re.compile(r"_(\d+)(?=_|$)")


@dataclass(frozen=True)
class Entry:
    """An array of a training state.

    Attributes:
        path: The variable's path; for an optimizer's slot, the path of its weight.
        slot: The name of the optimizer's slot, else `""`.
        nth: The number of weights with the same path before it in the model, trainable or not; for
            a slot, the number of its weight.
        optimizer: If an optimizer holds others: the place of the one that the array belongs to, or
            that trains the weight; see `_keras.optimizers_in`. It says nothing but which are of the
            same one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    slot: str = ""
    nth: int = 0
    optimizer: str = ""


@dataclass(frozen=True)
class Matching:
    """Which saved arrays belong to which variables.

    Attributes:
        pairs: A dict from the index of a variable to the index of its saved array.
        reshaped: Pairs with the same name and different shapes, or with integers on one side only,
            such as a quantized kernel; as text.
        renamed: A dict from the saved path to the model's, if only Keras's numbers differ.
    """

    pairs: dict[int, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every array has its counterpart."""
        return not (self.missing or self.unexpected or self.reshaped)

    @property
    def misfits(self) -> list[str]:
        """What lacks a counterpart, with the nearest path of the other side, for an error."""
        return [
            *(f"missing {path!r}{did_you_mean(path, self.unexpected)}" for path in self.missing),
            *(f"unexpected {path!r}{did_you_mean(path, self.missing)}" for path in self.unexpected),
            *(f"of another shape or dtype: {words}" for words in self.reshaped),
        ]

    def moved(self, start: int, start_there: int) -> "Matching":
        """The same for arrays that are a part of more."""
        pairs = {start + i: start_there + j for i, j in self.pairs.items()}
        return replace(self, pairs=pairs)

    @staticmethod
    def joined(parts: Iterable["Matching"]) -> "Matching":
        """One for all parts."""
        every = list(parts)
        return Matching(
            {i: j for part in every for i, j in part.pairs.items()},
            tuple(path for part in every for path in part.missing),
            tuple(path for part in every for path in part.unexpected),
            tuple(words for part in every for words in part.reshaped),
            {old: new for part in every for old, new in part.renamed.items()},
            tuple(path for part in every for path in part.kept),
        )


def named_state(model: Any) -> dict[str, list[tuple[Entry, Any]]]:
    """The variables of a model's training state with their entries, by kind.

    Args:
        model: A model; parts that are not built have no variables.
    """
    trainable, non_trainable, optimizer, metrics = _keras.state_groups(model)
    # In the model's order: in the state's, frozen weights come last, and `nth` would change with
    # freezing.
    in_model = numbered(v.path for v in model.variables)
    nth = {id(v): n for v, (_, n) in zip(model.variables, in_model, strict=True)}
    weights, slots, rest = entries_of_optimizers([getattr(model, "optimizer", None)], nth)
    return {
        WEIGHTS: [
            (replace(entry_of(v), nth=nth.get(id(v), 0), optimizer=weights.get(id(v), "")), v)
            for v in (*trainable, *non_trainable)
        ],
        SLOTS: [(slots[id(v)], v) for v in optimizer if id(v) in slots],
        OPTIMIZER: [(rest.get(id(v), entry_of(v)), v) for v in optimizer if id(v) not in slots],
        METRICS: [(entry_of(v), v) for v in metrics],
    }


def places_of_optimizers(objects: Iterable[Any]) -> dict[str, Any]:
    """The optimizers among objects, and those in them, by their places."""
    places = {}
    optimizers = [item for item in objects if isinstance(item, keras.optimizers.Optimizer)]
    for number, optimizer in enumerate(optimizers):
        start = f"{number}:" if number else ""
        places |= {start + p: inside for p, inside in _keras.optimizers_in(optimizer).items()}
    return places


def entries_of_optimizers(
    objects: Iterable[Any], nth: Mapping[int, int]
) -> tuple[dict[int, str], dict[int, Entry], dict[int, Entry]]:
    """What the variables of the optimizers among objects, and of those in them, are called.

    Args:
        nth: For each weight of the model, by `id`, how many before it have its path.

    Returns:
        Dicts by `id`: from weights to the place of the optimizer that trains them, from slots to
        their entries, and from the other variables to theirs.
    """
    weights: dict[int, str] = {}
    slots: dict[int, Entry] = {}
    rest: dict[int, Entry] = {}
    for place, optimizer in places_of_optimizers(objects).items():
        # Those within come later, and have the last word.
        weights |= {id(weight): place for weight in _keras.weights_of(optimizer)}
        rest |= {
            id(v): replace(entry_of(v), optimizer=place)
            for v in _keras.variables_of_optimizer(optimizer)
        }
        slots |= {
            id(slot): replace(
                entry_of(slot), path=w.path, slot=name, nth=nth.get(id(w), 0), optimizer=place
            )
            for name, slot, w in _keras.slots_of_optimizer(optimizer)
        }
    return weights, slots, rest


def entry_of(variable: Any) -> Entry:
    """The entry of a variable that is not a slot.

    Args:
        variable: A `keras.Variable`.
    """
    return Entry(variable.path, tuple(variable.shape), str(variable.dtype))


def dtype_of(variable: Any) -> Any:
    """The dtype that a variable declares, as this JAX has it."""
    return jax.dtypes.canonicalize_dtype(variable.dtype)


def check_excluded(exclude: Iterable[str], paths: Iterable[str]) -> None:
    """Raises a `ValueError` if a pattern of `exclude` matches nothing.

    Args:
        exclude: The patterns.
        paths: The paths of the model's variables and of the saved arrays.
    """
    check_matched(
        exclude,
        paths,
        "Every pattern of exclude must match weights of the model or of the checkpoint.",
    )


def match(
    here: Sequence[Entry],
    saved: Sequence[Entry],
    *,
    automatic: Collection[str],
    automatic_there: Collection[str] = (),
    exclude: Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    models: Collection[str] = (),
) -> Matching:
    """Finds the saved array of every variable: by path, or by order if only Keras's numbers differ.

    Keras numbers layers without a name, from the start in every process: the second model of a
    process has `dense_2` instead of the first model's `dense`. So if the paths in the checkpoint
    and the model differ only in such numbers, they are paired in the order of the numbers. A number
    in a name that the user gave is part of the name.

    A `Sequential` that builds itself writes its name into the paths of its variables; one that is
    loaded, pickled or copied does not. So if paths do not fit, those without the names of models
    are tried: they must fit all, and differ.

    Args:
        here: The entries of the variables.
        saved: The entries of the saved arrays.
        automatic: The names that Keras gave; see `automatic_names`.
        automatic_there: The names that Keras gave in the program that saved.
        exclude: Patterns (`fnmatch`) of paths to leave out, in the model and the checkpoint.
        rename: Pairs of a regular expression and its replacement in saved paths.
        models: The names of models in the model; see `names_of_models`.
    """
    by_path = _match(here, saved, automatic, automatic_there, exclude, rename)
    if by_path.complete or not models or by_path.kept or tuple(rename):
        return by_path
    bases = {canonical(name) for name in models if name in automatic}

    def outside(entry: Entry) -> Entry:
        parts = entry.path.split("/")
        kept = [p for p in parts[:-1] if p not in models and canonical(p) not in bases]
        return replace(entry, path="/".join([*kept, parts[-1]]))

    inner, inner_saved = ([outside(entry) for entry in entries] for entries in (here, saved))
    again = _match(inner, inner_saved, automatic, automatic_there, (), ())
    if not again.complete or len({entry.path for entry in inner}) < len(inner):
        return by_path
    names = {saved[j].path: here[i].path for i, j in again.pairs.items()}
    return replace(again, renamed={old: new for old, new in names.items() if old != new})


def _match(
    here: Sequence[Entry],
    saved: Sequence[Entry],
    automatic: Collection[str],
    automatic_there: Collection[str],
    exclude: Iterable[str],
    rename: Iterable[tuple[str, str]],
) -> Matching:
    wanted = {i: entry for i, entry in enumerate(here) if not matches(entry.path, exclude)}
    kept = tuple(entry.path for i, entry in enumerate(here) if i not in wanted)
    paths = [renamed(entry.path, rename) for entry in saved]
    offered = {i: path for i, path in enumerate(paths) if not matches(path, exclude)}
    mine = _grouped({i: entry.path for i, entry in wanted.items()}, automatic)
    theirs = _grouped(offered, automatic_there)
    pairs: dict[int, int] = {}
    for name, indices in mine.items():
        if len(indices) == len(theirs.get(name, ())):
            pairs |= _paired(indices, theirs[name], here, saved, paths)
    # With different numbers of arrays, pairs by order would be wrong.
    left = [i for i in wanted if i not in pairs]
    taken = set(pairs.values())
    pairs |= _equal(left, [j for j in offered if j not in taken], here, saved, paths)
    reshaped = {
        i: j
        for i, j in pairs.items()
        if here[i].shape != saved[j].shape or not same_kind(here[i].dtype, saved[j].dtype)
    }
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
    weights: Iterable[tuple[Entry, Entry]],
    optimizers: Mapping[str, str],
) -> dict[int, int]:
    """Finds the saved slot of every slot, by its weight.

    Slots of one weight have different names in one optimizer, and equal paths of weights are
    counted, so each has at most one.

    Args:
        here: The entries of the slots.
        saved: The entries of the saved slots.
        weights: Pairs of a weight of the model and the saved one.
        optimizers: From the place of an optimizer to that of the saved one; slots of others are
            left out.

    Returns:
        A dict from the index of a slot to the index of the saved one; slots without one are left
        out.
    """
    sources = {(weight.path, weight.nth): (source.path, source.nth) for weight, source in weights}
    by_name = {(e.optimizer, e.slot, e.path, e.nth): j for j, e in enumerate(saved)}
    pairs = {}
    for i, entry in enumerate(here):
        weight = sources.get((entry.path, entry.nth), ("", 0))
        owner = optimizers.get(entry.optimizer)
        j = None if owner is None else by_name.get((owner, entry.slot, *weight))
        if j is not None and saved[j].shape == entry.shape:
            pairs[i] = j
    return pairs


def numbered(names: Iterable[T]) -> list[tuple[T, int]]:
    """Names with the number of equal names before them, because weights may share a path.

    Args:
        names: The names.

    Example:

    >>> numbered(["proj/kernel", "proj/kernel", "out/kernel"])
    [('proj/kernel', 0), ('proj/kernel', 1), ('out/kernel', 0)]
    """
    seen: Counter = Counter()
    with_counts = []
    for name in names:
        with_counts.append((name, seen[name]))
        seen[name] += 1
    return with_counts


def automatic_names(objects: Iterable[Any]) -> frozenset[str]:
    """The names that Keras gave to objects without one, and to what is in them.

    Keras makes them of the class: `dense_3` for a `Dense`. So `task_3` of a `Dense` is the user's.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2, name="task_1")])
    >>> sorted(canonical(name) for name in automatic_names([model]))
    ['dense', 'sequential']
    """
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    # What `Bidirectional` puts before the name of a layer, which it makes again: "forward_lstm_3".
    prefixes: dict[int, str] = {}
    for item in _named_in(objects):
        if isinstance(item, keras.layers.Bidirectional):
            prefixes[id(item.forward_layer)] = "forward_"
            prefixes[id(item.backward_layer)] = "backward_"
        name = str(getattr(item, "name", ""))
        base = canonical(name.removeprefix(prefixes.get(id(item), "")))
        kinds[base == _keras.to_snake_case(type(item).__name__)].add(name)
    return frozenset(kinds[True] - kinds[False])


def names_of_models(objects: Iterable[Any]) -> frozenset[str]:
    """The names of models among objects, and of models within these."""
    items = [item for item in objects if isinstance(item, keras.Model)]
    layers = [layer for item in items for layer in _keras.flatten_layers(item)]
    return frozenset(layer.name for layer in layers if isinstance(layer, keras.Model))


def _named_in(objects: Iterable[Any]) -> Iterator[Any]:
    """What has a name: those that hold others come before these."""
    for item in objects:
        if isinstance(item, keras.optimizers.Optimizer):
            yield from _keras.optimizers_in(item).values()
        elif not isinstance(item, keras.Layer):
            yield item
        else:
            yield from _keras.flatten_layers(item)
            yield from _named_in(filter(None, [getattr(item, "optimizer", None)]))
            for metric in getattr(item, "metrics", ()):
                yield from (metric, *getattr(metric, "metrics", ()))


def canonical(path: str) -> str:
    """A path without the numbers that Keras gives to layers without a name.

    Args:
        path: A variable's path.

    Example:

    >>> canonical("sequential_3/dense_12/kernel")
    'sequential/dense/kernel'
    """
    return "/".join(re.sub(r"_\d+$", "", part) for part in path.split("/"))


def in_order_of_numbers(items: Iterable[T], path: Callable[[T], str]) -> list[T]:
    """Items in the order of the numbers in their paths, which is the order of their creation.

    Args:
        items: Anything that has a path.
        path: A function from an item to its path.

    Example:

    >>> in_order_of_numbers(["dense_10/kernel", "dense_2/kernel", "dense/kernel"], str)
    ['dense/kernel', 'dense_2/kernel', 'dense_10/kernel']
    """

    def key(item: T) -> list[tuple[str, list[int]]]:
        parts = path(item).split("/")
        return [(_NUMBER.sub("", part), [*map(int, _NUMBER.findall(part))]) for part in parts]

    return sorted(items, key=key)


def same_kind(one: Any, other: Any) -> bool:
    """Whether both dtypes are integers, or neither: a float kernel cast to `int8` would be zeros.

    Args:
        one: A dtype, or its name.
        other: Another dtype, or its name.

    Example:

    >>> same_kind("float32", "bfloat16"), same_kind("float32", "int8")
    (True, False)
    """
    return jnp.issubdtype(one, jnp.integer) == jnp.issubdtype(other, jnp.integer)


def _form(entry: Entry, other: Entry) -> str:
    return f"{entry.shape}" + ("" if same_kind(entry.dtype, other.dtype) else f" {entry.dtype}")


def renamed(path: str, rename: Iterable[tuple[str, str]]) -> str:
    """A saved path as the user has renamed it."""
    for pattern, replacement in rename:
        path = re.sub(pattern, replacement, path)
    return path


def without_numbers(path: str, automatic: Collection[str]) -> str:
    """A path without the numbers in names that Keras gave.

    A name may begin with that of its owner: as `block_2_ffn` in a layer `block_2`, or as
    `dense_3_loss`, which Keras calls the loss of an output.

    Example:

    >>> without_numbers("sequential_3/task_12/kernel", {"sequential_3"})
    'sequential/task_12/kernel'
    >>> without_numbers("block_2/block_2_ffn_1/kernel", {"block_2"})
    'block/block_ffn_1/kernel'
    >>> without_numbers("compile_loss/dense_3_loss/total", {"dense_3"})
    'compile_loss/dense_loss/total'
    """
    parts = path.split("/")
    plain = []
    for i, part in enumerate(parts):
        if part in automatic or canonical(part) in _ALWAYS_AUTOMATIC:
            plain.append(canonical(part))
            continue
        owners = [owner for owner in parts[:i] if part.startswith(f"{owner}_")]
        start, _, end = part.rpartition("_")
        owners += [start] if end == "loss" else []
        owner = max((owner for owner in owners if owner in automatic), key=len, default="")
        plain.append(canonical(owner) + part[len(owner) :])
    return "/".join(plain)


def _grouped(paths: Mapping[int, str], automatic: Collection[str]) -> dict[str, list[int]]:
    groups = defaultdict(list)
    for i, path in paths.items():
        groups[without_numbers(path, automatic)].append(i)
    return groups


def _paired(
    indices: list[int],
    candidates: list[int],
    here: Sequence[Entry],
    saved: Sequence[Entry],
    paths: Sequence[str],
) -> dict[int, int]:
    """Pairs of as many variables as arrays, whose paths differ in Keras's numbers only."""
    if Counter(here[i].path for i in indices) == Counter(paths[j] for j in candidates):
        return _equal(indices, candidates, here, saved, paths)
    indices = sorted(indices, key=lambda i: here[i].nth)
    candidates = sorted(candidates, key=lambda j: saved[j].nth)
    return dict(
        zip(
            in_order_of_numbers(indices, lambda i: here[i].path),
            in_order_of_numbers(candidates, lambda j: paths[j]),
            strict=True,
        )
    )


def _equal(
    indices: Iterable[int],
    candidates: Iterable[int],
    here: Sequence[Entry],
    saved: Sequence[Entry],
    paths: Sequence[str],
) -> dict[int, int]:
    """Pairs of equal paths, in their order."""
    left = defaultdict(list)
    for j in sorted(candidates, key=lambda j: saved[j].nth):
        left[paths[j]].append(j)
    ordered = sorted(indices, key=lambda i: here[i].nth)
    return {i: left[here[i].path].pop(0) for i in ordered if left[here[i].path]}
