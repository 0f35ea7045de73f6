"""Shows equal blocks of a model once: finds repetitions in a list of paths."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.show.text import text_table, text_width

# Nobody reads longer tables; beyond this number of lines, similar rows share a line.
MOST_LINES = 48
# Repetitions are folded only if this saves at least so many lines.
_LEAST_SAVED = 4
# The largest number of layers in a repeated block.
_LONGEST_BLOCK = 200
# The largest number of names in braces.
_MOST_NAMES = 6


@dataclass(frozen=True)
class Repeated:
    """A block of consecutive layers, repeated with equal rows.

    Attributes:
        last: The path of the last layer in the last repetition.
        entries: The same rows, with repetitions within the block folded in turn.
    """

    first: str
    last: str
    times: int
    rows: tuple[Any, ...]
    entries: tuple[Any, ...]

    @property
    def words(self) -> str:
        """The layers that it represents."""
        if self.first == self.last:
            return self.first
        return f"{self.first} .. {self.last}"


@dataclass(frozen=True)
class Alike:
    """Rows that share a line.

    Attributes:
        pattern: A pattern that all of their paths match, with `*` for the parts that differ, if
            they come from anywhere in the model; `""` if they are consecutive in one layer.
    """

    rows: tuple[Any, ...]
    pattern: str = ""

    def name(self, path: Callable[[Any], str], within: str = "") -> str:
        """A short form of the paths of its rows.

        Args:
            path: A function from a row to its path.

        Example:

        >>> Alike(("norm/gamma", "norm/beta")).name(str)
        'norm/{gamma, beta}'
        >>> Alike(("block/up_dense/kernel", "block/gate_dense/kernel")).name(str, "block/")
        '{up, gate}_dense/kernel'
        """
        return self.pattern or _braced([path(row).removeprefix(within) for row in self.rows])


def short_rows(
    rows: Sequence[Any],
    path: Callable[[Any], str],
    key: Callable[[Any], Any],
    alike: Callable[[Any], tuple[Any, str]],
    cells: Callable[[Sequence[Any], str, str], tuple[str, ...]],
    size: Callable[[Sequence[Any]], str] = lambda rows: "",
) -> list[tuple[str, ...] | str]:
    """Rows for `text_table` and `html_table`, few enough to read.

    It folds equal blocks. If there are still more than `MOST_LINES` lines, rows from anywhere in
    the model share a line: those of layers that differ only in numbers; if that is not enough,
    those with the same last name; then all with the same layout.

    Args:
        path: A function from a row to its path, with `/` between names.
        key: A function from a row to the data that must be equal in equal blocks.
        alike: A function from a row to the data that must be equal in a shared line, and to a
            sentence in which numbers and quoted names may differ.
        cells: A function from the rows of a line, their name and the path above them to the cells.
        size: A function from the rows of a block to a text about one block.
    """
    found: list[tuple[str, ...] | str] = []
    for entries in _shorter_and_shorter(rows, path, key, alike):
        found = list(table_rows(entries, path, cells, size))
        if len(text_table((), found, indent="").splitlines()) <= MOST_LINES:
            break
    return found


def _shorter_and_shorter(rows, path, key, alike) -> Iterator[tuple[Any, ...]]:
    yield _joined(folded(rows, path, key), path, key)
    # Weights that do not train are listed with their layer.
    layers = children_of(rows, lambda row: path(row).rpartition("/")[0] + "/")
    ordered = [row for those in layers.values() for row in those]
    yield _of_one_kind(families(ordered, path, alike, kind_of), path, key)
    for label in (lambda name: name.rpartition("/")[2], lambda name: ""):
        yield families(ordered, path, alike, label)


def families(
    rows: Iterable[Any],
    path: Callable[[Any], str],
    alike: Callable[[Any], tuple[Any, str]],
    label: Callable[[str], str],
) -> tuple[Alike, ...]:
    """Groups similar rows from anywhere in the model, in the order of their first rows.

    Args:
        alike: A function from a row to the data that must be equal, and to a sentence in which
            numbers and quoted names may differ.
        label: A function from a path to the part of it that must be equal.
    """
    found: dict[tuple, list[Any]] = {}
    for row in rows:
        equal, sentence = alike(row)
        kind = label(path(row)), equal, re.sub(r"'[^']*'|\d+", "#", sentence)
        found.setdefault(kind, []).append(row)
    return tuple(Alike(tuple(those), pattern_of(map(path, those))) for those in found.values())


def _of_one_kind(those: Iterable[Alike], path, key) -> tuple[Alike, ...]:
    """Joins neighbours that are equal, weight by weight, in layers of the same kind."""
    found: list[Alike] = []
    for one in those:
        last = found[-1] if found else one
        layers = [[kind_of(path(row).rpartition("/")[0]) for row in a.rows] for a in (last, one)]
        rows = len(one.rows)
        equal = [*map(key, last.rows[-rows:])] == [*map(key, one.rows)]
        if last is not one and layers[0][-rows:] == layers[1] and equal:
            together = (*last.rows, *one.rows)
            found[-1] = Alike(together, pattern_of(map(path, together)))
        else:
            found.append(one)
    return tuple(found)


def kind_of(name: str) -> str:
    """A path with `#` for the numbers, and for numbers with a letter, that distinguish layers.

    Example:

    >>> kind_of("block2a_conv/kernel"), kind_of("dense_12/bias")
    ('block#_conv/kernel', 'dense/bias')
    """
    return re.sub(r"\d+[a-z]?(?![a-z0-9])|\d+", "#", re.sub(r"_\d+(?![A-Za-z0-9_])", "", name))


def pattern_of(paths: Iterable[str]) -> str:
    """A pattern that paths match, with `*` for numbers, layers or names that differ.

    Example:

    >>> pattern_of(["block2a_conv/kernel", "block2b_conv/kernel"])
    'block*_conv/kernel'
    >>> pattern_of(["a/gamma", "b/beta"])
    '*/{gamma, beta}'
    """
    known = list(dict.fromkeys(paths))
    if len(known) == 1:
        return known[0]
    if len({kind_of(name) for name in known}) == 1:
        numbers = [re.split(r"(\d+[a-z]?(?![a-z0-9])|\d+)", name) for name in known]
        if len({len(number) for number in numbers}) == 1:
            return "".join(level[0] if len({*level}) == 1 else "*" for level in zip(*numbers))
        # The first of Keras's automatic names has no number.
        return kind_of(known[0]).replace("#", "*").replace("/", "*/")
    layers, names = zip(*(name.rpartition("/")[::2] for name in known))
    above = pattern_of(layers) if len({*map(kind_of, layers)}) == 1 else "*"
    return f"{above}/{_braced(names)}" if above else _braced(names)


def shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """A short form of shapes: their number, and the smallest and the largest if they differ.

    Example:

    >>> shapes_text([(8,)]), shapes_text([(8,), (8,)]), shapes_text([(8, 4), (2, 2), (4, 4)])
    ('(8,)', '2 x (8,)', '3 x (2, 2) to (8, 4)')
    """
    low, high = min(shapes, key=math.prod), max(shapes, key=math.prod)
    times = f"{len(shapes)} x " if len(shapes) > 1 else ""
    return f"{times}{low}" if low == high else f"{times}{low} to {high}"


def merged(texts: Iterable[str]) -> str:
    """Joins sentences that differ in numbers and quoted names."""
    known = list(dict.fromkeys(texts))
    if len(known) == 1:
        return known[0]
    parts = [re.split(r"('[^']*'|\d+)", text) for text in known]
    if len({len(part) for part in parts}) > 1:
        return f"{known[0]}, and the like"
    return "".join(_merged_part([*dict.fromkeys(level)]) for level in zip(*parts))


def _merged_part(those: list[str]) -> str:
    if len(those) == 1:
        return those[0]
    if all(text.isdecimal() for text in those):
        numbers = sorted(map(int, those))
        return f"{numbers[0]} to {numbers[-1]}"
    if len({kind_of(text) for text in those}) == 1:
        return pattern_of(those)
    return "'...'"


def _braced(names: Sequence[str]) -> str:
    """Names that differ in one part, with the parts in braces."""
    levels = zip(*(name.split("/") for name in names))
    return "/".join(level[0] if len({*level}) == 1 else _choice(level) for level in levels)


def _choice(names: Iterable[str]) -> str:
    """Names in braces, with their common start and end outside of the braces."""
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(kind_of(name), []).append(name)
    known = [pattern_of(those) if len(those) > _MOST_NAMES else those for those in kinds.values()]
    words = [word for those in known for word in ([those] if isinstance(those, str) else those)]
    if len(words) == 1:
        return words[0]
    parts = [re.findall(r"[^_]+_?", word) for word in words]
    start, end = _shared(parts), _shared([part[::-1] for part in parts])
    shortest = min(map(len, parts))
    end = min(end, shortest - start)
    before = "".join(parts[0][:start])
    after = "".join(parts[0][len(parts[0]) - end :])
    inner = [word[len(before) : len(word) - len(after)].rstrip("_") for word in words]
    if after and all(inner):
        after = f"_{after}"
    elif not all(inner):
        before, after, inner = "", "", words
    more = len(inner) - _MOST_NAMES
    shown = inner if more <= 0 else [*inner[:_MOST_NAMES], f"{more} more"]
    return f"{before}{{{', '.join(shown)}}}{after}"


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """The length of the common start."""
    count = 0
    for level in zip(*parts):
        if len({*level}) > 1:
            break
        count += 1
    return count


def _joined(entries: Iterable[Any], path, key) -> tuple[Any, ...]:
    """Joins neighbours in a layer into one line if they are equal except for one name."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, Repeated):
            found.append(dataclasses.replace(entry, entries=_joined(entry.entries, path, key)))
        elif found and isinstance(found[-1], Alike) and _joins(found[-1], entry, path, key):
            found[-1] = Alike((*found[-1].rows, entry))
        else:
            found.append(Alike((entry,)))
    return tuple(found)


def _joins(those: Alike, row: Any, path, key) -> bool:
    if key(those.rows[0]) != key(row):
        return False
    names = [path(line).split("/") for line in (*those.rows, row)]
    if len({*map(len, names)}) > 1:
        return False
    differ = [n for n, level in enumerate(zip(*names)) if len({*level}) > 1]
    # Parts of a layer share a line; layers side by side do not.
    return len(differ) == 1 and differ[0] > 0


def folded(
    rows: Sequence[Any],
    path: Callable[[Any], str],
    key: Callable[[Any], Any],
    within: str = "",
) -> tuple[Any, ...]:
    """Folds rows: returns them in the order of their layers, with a `Repeated` for equal blocks.

    Blocks are equal if their rows are equal except for numbers in names: `decoder_0/up/kernel`
    equals `decoder_1/up/kernel` if both have the same key.

    Args:
        key: A function from a row to the data that must be equal; numbers in strings may differ.
    """
    children = children_of(rows, path, within)
    keys = [tuple((unnumbered(path(r)), _masked(key(r))) for r in c) for c in children.values()]
    names = list(children)
    entries: list[Any] = []
    for start, period, times in _repetitions(keys):
        firsts = names[start : start + period]
        first_rows = tuple(row for name in firsts for row in children[name])
        inner = tuple(
            entry for name in firsts for entry in _inner(children[name], path, key, within, name)
        )
        if times > 1 and (times - 1) * len(first_rows) >= _LEAST_SAVED:
            last = names[start + period * times - 1]
            entries.append(
                Repeated(f"{within}{firsts[0]}", f"{within}{last}", times, first_rows, inner)
            )
            continue
        for name in names[start : start + period * times]:
            entries += _inner(children[name], path, key, within, name)
    return tuple(entries)


def table_rows(
    entries: Sequence[Any],
    path: Callable[[Any], str],
    cells: Callable[[Sequence[Any], str, str], tuple[str, ...]],
    size: Callable[[Sequence[Any]], str] = lambda rows: "",
    within: str = "",
    indent: str = "",
) -> Iterator[tuple[str, ...] | str]:
    """Folded rows for `text_table` and `html_table`: a line for every block, its rows below it.

    Args:
        entries: `Alike` and `Repeated`.
        within: The path above all entries, with a slash at its end, or `""`.
    """
    for entry in entries:
        if isinstance(entry, Alike):
            yield cells(entry.rows, f"{indent}{entry.name(path, within)}", within)
            continue
        # In a block of one layer, paths are relative to the layer.
        alone = all(path(row).startswith(f"{entry.first}/") for row in entry.rows)
        name = entry.words if alone else f"from {entry.first} to {entry.last}"
        each = size(entry.rows)
        words = f"  x {entry.times}{f', each {each}' if each else ''}"
        if alone and len(indent + name + words) > text_width():
            name = f"{entry.first} .. {entry.last.removeprefix(entry.first.rstrip('0123456789'))}"
        yield indent + name + words
        inner = f"{entry.first}/" if alone else within
        yield from table_rows(entry.entries, path, cells, size, inner, f"{indent}  ")


def relative(text: str, within: str) -> str:
    """Makes the quoted paths in a sentence relative to a layer.

    Args:
        within: The layer's path with a slash at its end, or `""`.

    Example:

    >>> relative("row: fed by 'decoder_0/gate'", "decoder_0/")
    "row: fed by 'gate'"
    """
    return text.replace(f"'{within}", "'") if within else text


def children_of(
    rows: Iterable[Any], path: Callable[[Any], str], within: str = ""
) -> dict[str, list[Any]]:
    """Groups rows by the next name in their paths, in the order of their first rows.

    Args:
        within: The path above all rows, with a slash at its end, or `""`.
    """
    children: dict[str, list[Any]] = {}
    for row in rows:
        name = path(row)[len(within) :].partition("/")[0]
        children.setdefault(name, []).append(row)
    return children


def unnumbered(text: str) -> str:
    """A path or a sentence without the numbers that distinguish equal layers."""
    return re.sub(r"\d+", "#", re.sub(r"_\d+(?![A-Za-z0-9_])", "", text))


def _inner(rows, path, key, within, name) -> Iterator[Any]:
    """The entries of one layer: its own rows, and the folded rows below it."""
    below = [row for row in rows if path(row) != f"{within}{name}"]
    yield from (row for row in rows if path(row) == f"{within}{name}")
    if below:
        yield from folded(below, path, key, f"{within}{name}/")


def _masked(key: Any) -> Any:
    if isinstance(key, str):
        return unnumbered(key)
    return tuple(map(_masked, key)) if isinstance(key, tuple) else key


def _repetitions(keys: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Start, period and times of the repetitions; at every position, the longest one."""
    numbers: dict[Any, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in keys]
    start = 0
    while start < len(ids):
        period, times = 1, 1
        for p in range(1, min((len(ids) - start) // 2, _LONGEST_BLOCK) + 1):
            n = _times(ids, start, p) if ids[start] == ids[start + p] else 1
            if n > 1 and n * p > period * times:
                period, times = p, n
        yield start, period, times
        start += period * times


def _times(ids: Sequence[int], start: int, period: int) -> int:
    times, block = 1, ids[start : start + period]
    while ids[start + times * period : start + (times + 1) * period] == block:
        times += 1
    return times
