"""Which saved optimizer is which of a model's, if one holds several, and what of it fits."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras_tpu_dist.checkpoint.compiled import one_family, same_class
from keras_tpu_dist.checkpoint.manifest import Manifest
from keras_tpu_dist.checkpoint.names import (
    OPTIMIZER,
    SLOTS,
    Entry,
    Matching,
    canonical,
    follow,
    in_order_of_numbers,
    places_of_optimizers,
    without_numbers,
)


@dataclass(frozen=True)
class OptimizerPart:
    """One of the optimizers that are one in another.

    Attributes:
        name: The optimizer's name.
        kind: Its name without a number, if Keras gave it; so it tells the class.
        indices: Its variables that are not slots.
    """

    name: str
    kind: str | None
    indices: tuple[int, ...]


def kinds_of_optimizers(objects: Iterable[Any]) -> dict[str, str]:
    """The classes of the optimizers among objects, and of those in them, by their places."""
    return {
        place: type(optimizer).__name__
        for place, optimizer in places_of_optimizers(objects).items()
    }


def parts_of(entries: Sequence[Entry], automatic: Collection[str]) -> dict[str, OptimizerPart]:
    """The optimizers whose variables these are, by their places.

    Older checkpoints say no places. There, each optimizer's variables begin with its count of
    steps, and the places are numbers in the order of saving.
    """
    are_named = any(entry.optimizer for entry in entries)
    indices: dict[str, list[int]] = defaultdict(list)
    place = ""
    for i, entry in enumerate(entries):
        if not are_named and i and _last(entry.path) == "iteration":
            place = f"#{i}"
        indices[entry.optimizer if are_named else place].append(i)
    parts = {}
    for place, numbers in indices.items():
        name = entries[numbers[0]].path.rpartition("/")[0].rpartition("/")[2]
        parts[place] = OptimizerPart(
            name, canonical(name) if name in automatic else None, tuple(numbers)
        )
    return parts


def pair(
    here: Mapping[str, OptimizerPart],
    saved: Mapping[str, OptimizerPart],
    trained: Iterable[tuple[str, str]],
) -> dict[str, str]:
    """Finds the saved optimizer of every optimizer.

    The user's names come first. Those with one name of Keras's are identified by the weights that
    they train. If that is not known, or they train none, as many on each side are paired in
    their order, which is that of the user's `OptimizerMap`, if Keras's numbers, which tell the
    order in which they were made, say the same. What is still left is paired by weights, or if it
    is one on each side.

    Args:
        trained: For each pair of a weight and a saved weight, the places of the optimizers that
            train them.

    Returns:
        A dict from places to places; those that are unclear are left out.
    """
    by_weights = _one_to_one(trained)
    pairs: dict[str, str] = {}
    groups = _grouped(here), _grouped(saved)
    for key, mine in groups[0].items():
        theirs = groups[1].get(key, [])
        if len(mine) > 1 or len(theirs) > 1:
            pairs |= {p: q for p in mine if (q := by_weights.get(p)) in theirs}
        left = [p for p in mine if p not in pairs]
        left_there = [q for q in theirs if q not in pairs.values()]
        if _order(here, left) == _order(saved, left_there):
            pairs |= dict(zip(left, left_there, strict=True))
    free = [q for q in saved if q not in pairs.values()]
    pairs |= {p: q for p in here if p not in pairs and (q := by_weights.get(p)) in free}
    left = [p for p in here if p not in pairs]
    left_there = [q for q in saved if q not in pairs.values()]
    if len(left) == len(left_there) == 1:
        pairs[left[0]] = left_there[0]
    return pairs


@dataclass(frozen=True)
class Fitting:
    """What of the saved optimizers fits those that are here.

    Attributes:
        slots: A dict from the index of a slot to the index of the saved one.
        rest: The same for the optimizers' other variables.
        whole: Whether all of the optimizers here is there, from ones of the same classes.
    """

    slots: dict[int, int]
    rest: Matching
    whole: bool


def fitting(
    here: Mapping[str, Sequence[Entry]],
    manifest: Manifest,
    kinds: Mapping[str, str],
    weights: Sequence[tuple[Entry, Entry]],
    automatic: Collection[str],
    automatic_there: Collection[str],
) -> Fitting:
    """Finds what of the saved optimizers fits those that are here.

    If not all of the optimizers here is there, only optimizers of one family are paired, whose
    slots mean the same.

    Args:
        here: The entries of slots and of the optimizers' other variables.
        kinds: The classes of the optimizers here, by their places.
        weights: Pairs of a weight of the model and the saved one.
        automatic: The names that Keras gave here.
        automatic_there: The names that Keras gave in the program that saved.
    """
    saved = {kind: manifest.entries(kind) for kind in (SLOTS, OPTIMIZER)}
    parts = parts_of(here[OPTIMIZER], automatic), parts_of(saved[OPTIMIZER], automatic_there)
    saved[SLOTS], owners_there = _with_owners(saved[SLOTS], parts[1], manifest)
    pairs = pair(*parts, ((weight.optimizer, source.optimizer) for weight, source in weights))

    def kinds_of(place: str) -> tuple[str | None, str | None]:
        there = pairs[place]
        return kinds.get(place), manifest.optimizers.get(there) or parts[1][there].kind

    def fitting_of(pairs: dict[str, str]) -> Fitting:
        owners = {place: owners_there[there] for place, there in pairs.items()}
        slots = follow(here[SLOTS], saved[SLOTS], weights, owners)
        rest = _matched((here[OPTIMIZER], saved[OPTIMIZER]), parts, pairs, weights)
        whole = len(slots) == len(here[SLOTS]) and rest.complete
        return Fitting(slots, rest, whole and not any(map(differ, pairs)))

    def differ(place: str) -> bool:
        kind, kind_there = kinds_of(place)
        return kind is not None and kind_there is not None and not same_class(kind, kind_there)

    def alike(place: str, *, unknown: bool) -> bool:
        kind, kind_there = kinds_of(place)
        return unknown if kind is None or kind_there is None else one_family(kind, kind_there)

    all_of_it = fitting_of({p: q for p, q in pairs.items() if alike(p, unknown=True)})
    if all_of_it.whole:
        return all_of_it
    # Names are less than classes: in a checkpoint that notes none, all of it fits or nothing.
    named_pairs = pairs if manifest.optimizers else {}
    return fitting_of({p: q for p, q in named_pairs.items() if alike(p, unknown=False)})


def _with_owners(
    slots: Sequence[Entry], parts: Mapping[str, OptimizerPart], manifest: Manifest
) -> tuple[list[Entry], dict[str, str]]:
    """Slots with what tells of which optimizer they are, and that for each saved optimizer.

    Older checkpoints say of which weight a slot is, and loops of which of their objects.
    """
    if len(parts) < 2 or any(slot.optimizer for slot in slots):
        return list(slots), {place: place for place in parts}
    counts = [[count for _, count in manifest.objects(kind)] for kind in (SLOTS, OPTIMIZER)]
    if not all(counts):
        return list(slots), dict.fromkeys(parts, "")
    of_slots, of_rest = (
        [str(n) for n, c in enumerate(sizes) for _ in range(c)] for sizes in counts
    )
    labelled = [replace(slot, optimizer=n) for slot, n in zip(slots, of_slots, strict=True)]
    return labelled, {place: of_rest[part.indices[0]] for place, part in parts.items()}


def _matched(
    entries: tuple[Sequence[Entry], Sequence[Entry]],
    parts: tuple[Mapping[str, OptimizerPart], Mapping[str, OptimizerPart]],
    pairs: Mapping[str, str],
    weights: Iterable[tuple[Entry, Entry]],
) -> Matching:
    """Matches variables that are no slots, by their names in their optimizer."""
    here, saved = entries
    # Of the paths of weights, Keras makes names.
    paths = {_joined(weight.path): _joined(source.path) for weight, source in weights}

    def name_there(entry: Entry) -> str:
        name = _own_name(entry)
        weight = max((path for path in paths if name.startswith(path)), key=len, default="")
        return paths.get(weight, "") + name[len(weight) :]

    fitted: dict[int, int] = {}
    reshaped: dict[int, int] = {}
    for place, other in pairs.items():
        there = _numbered((_own_name(saved[j]), j) for j in parts[1][other].indices)
        mine = _numbered((name_there(here[i]), i) for i in parts[0][place].indices)
        for key, i in mine.items():
            if key in there:
                same = here[i].shape == saved[there[key]].shape
                (fitted if same else reshaped)[i] = there[key]
    used = {*fitted.values(), *reshaped.values()}
    return Matching(
        fitted,
        tuple(entry.path for i, entry in enumerate(here) if i not in {*fitted, *reshaped}),
        tuple(entry.path for j, entry in enumerate(saved) if j not in used),
        tuple(
            f"{here[i].path} {here[i].shape}, saved as {saved[j].shape}"
            for i, j in reshaped.items()
        ),
        {saved[j].path: here[i].path for i, j in fitted.items() if saved[j].path != here[i].path},
    )


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _own_name(entry: Entry) -> str:
    """The name of a variable in its optimizer, without the number that Keras gives one without."""
    return without_numbers(_last(entry.path), ())


def _joined(path: str) -> str:
    """What Keras puts before the name of a variable that an optimizer makes for a weight."""
    return path.replace("/", "_") + "_"


def _numbered(named: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Indices by their names, and the number of equal names before."""
    seen: dict[str, int] = defaultdict(int)
    by_count = {}
    for name, i in named:
        by_count[name, seen[name]] = i
        seen[name] += 1
    return by_count


def _grouped(parts: Mapping[str, OptimizerPart]) -> dict[tuple[str, bool], list[str]]:
    groups = defaultdict(list)
    for place, part in parts.items():
        groups[part.kind or part.name, part.kind is None].append(place)
    return groups


def _order(parts: Mapping[str, OptimizerPart], places: list[str]) -> list[int]:
    """In which order optimizers were made, as far as their names tell."""
    names = [parts[place].name for place in places]
    return in_order_of_numbers(range(len(names)), lambda i: names[i])


def _one_to_one(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Those pairs of which neither side has another partner."""
    of_each: tuple[dict, dict] = (defaultdict(set), defaultdict(set))
    for place, other in pairs:
        of_each[0][place].add(other)
        of_each[1][other].add(place)
    return {
        place: next(iter(others))
        for place, others in of_each[0].items()
        if len(others) == 1 and len(of_each[1][next(iter(others))]) == 1
    }
