"""Shows equal blocks of a model once: finds repetitions in a list of paths."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.show.text import text_width

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
    """Consecutive rows of one layer that are equal except for one name: they share a line."""

    rows: tuple[Any, ...]

    def name(self, path: Callable[[Any], str], within: str = "") -> str:
        """A short form of the paths of its rows.

        Args:
            path: A function from a row to its path.
            within: The path above all rows, with a slash at its end, or `""`.

        Example:

        >>> Alike(("norm/gamma", "norm/beta")).name(str)
        'norm/{gamma, beta}'
        >>> Alike(("block/up_dense/kernel", "block/gate_dense/kernel")).name(str, "block/")
        '{up, gate}_dense/kernel'
        """
        return _braced([path(row).removeprefix(within) for row in self.rows])


def short_rows(
    rows: Sequence[Any],
    path: Callable[[Any], str],
    key: Callable[[Any], Any],
    cells: Callable[[Sequence[Any], str, str], tuple[str, ...]],
    size: Callable[[Sequence[Any]], str] = lambda rows: "",
) -> list[tuple[str, ...] | str]:
    """Rows for `text_table` and `html_table`, in which equal blocks are folded.

    Args:
        rows: The rows of all weights.
        path: A function from a row to its path, with `/` between names.
        key: A function from a row to the data that must be equal in equal blocks.
        cells: A function from the rows of a line, their name and the path above them to the cells.
        size: A function from the rows of a block to a text about one block.
    """
    entries = _joined(folded(rows, path, key), path, key)
    return list(table_rows(entries, path, cells, size))


def families(
    rows: Iterable[Any],
    path: Callable[[Any], str],
    key: Callable[[Any], Any],
    label: Callable[[str], str],
) -> list[tuple[str, tuple[Any, ...]]]:
    """Groups rows from anywhere in the model, in the order of their first rows.

    Args:
        rows: The rows of all layers.
        path: A function from a row to its path, with `/` between names.
        key: A function from a row to the data that must be equal.
        label: A function from a path to the part of it that must be equal.

    Returns:
        For every group, a pattern that all of its paths match, and its rows.
    """
    groups: dict[tuple, list[Any]] = {}
    for row in rows:
        groups.setdefault((label(path(row)), key(row)), []).append(row)
    return [(pattern_of(map(path, group)), tuple(group)) for group in groups.values()]


def kind_of(name: str) -> str:
    """A path with `#` for the numbers, and for numbers with a letter, that distinguish layers.

    Args:
        name: The path.

    Example:

    >>> kind_of("block2a_conv/kernel"), kind_of("dense_12/bias")
    ('block#_conv/kernel', 'dense/bias')
    """
    return re.sub(r"\d+[a-z]?(?![a-z0-9])|\d+", "#", re.sub(r"_\d+(?![A-Za-z0-9_])", "", name))


def pattern_of(paths: Iterable[str]) -> str:
    """A pattern that paths match, with `*` for numbers, layers or names that differ.

    Args:
        paths: The paths, at least one.

    Example:

    >>> pattern_of(["block2a_conv/kernel", "block2b_conv/kernel"])
    'block*_conv/kernel'
    >>> pattern_of(["a/gamma", "b/beta"])
    '*/{gamma, beta}'
    """
    different = list(dict.fromkeys(paths))
    if len(different) == 1:
        return different[0]
    if len({kind_of(name) for name in different}) == 1:
        numbers = [re.split(r"(\d+[a-z]?(?![a-z0-9])|\d+)", name) for name in different]
        if len({len(number) for number in numbers}) == 1:
            return "".join(
                level[0] if len({*level}) == 1 else "*" for level in zip(*numbers, strict=True)
            )
        # The first of Keras's automatic names has no number.
        return kind_of(different[0]).replace("#", "*").replace("/", "*/")
    layers, names = zip(*(name.rpartition("/")[::2] for name in different), strict=True)
    above = pattern_of(layers) if len({*map(kind_of, layers)}) == 1 else "*"
    return f"{above}/{_braced(names)}" if above else _braced(names)


def shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """A short form of shapes: their number, and the smallest and the largest if they differ.

    Args:
        shapes: The shapes, at least one.

    Example:

    >>> shapes_text([(8,)]), shapes_text([(8,), (8,)]), shapes_text([(8, 4), (2, 2), (4, 4)])
    ('(8,)', '2 x (8,)', '3 x (2, 2) to (8, 4)')
    """
    low, high = min(shapes, key=math.prod), max(shapes, key=math.prod)
    times = f"{len(shapes)} x " if len(shapes) > 1 else ""
    return f"{times}{low}" if low == high else f"{times}{low} to {high}"


def _braced(names: Sequence[str]) -> str:
    """Names that differ in one part, with the parts in braces."""
    levels = zip(*(name.split("/") for name in names), strict=True)
    return "/".join(level[0] if len({*level}) == 1 else _choice(level) for level in levels)


def _choice(names: Iterable[str]) -> str:
    """Names in braces, with their common start and end outside of the braces."""
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(kind_of(name), []).append(name)
    of_kinds = [
        pattern_of(those) if len(those) > _MOST_NAMES else those for those in kinds.values()
    ]
    words = [word for those in of_kinds for word in ([those] if isinstance(those, str) else those)]
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
    for level in zip(*parts, strict=False):
        if len({*level}) > 1:
            break
        count += 1
    return count


def _joined(entries: Iterable[Any], path, key) -> tuple[Any, ...]:
    """Joins neighbours in a layer into one line if they are equal except for one name."""
    joined: list[Any] = []
    for entry in entries:
        if isinstance(entry, Repeated):
            joined.append(dataclasses.replace(entry, entries=_joined(entry.entries, path, key)))
        elif joined and isinstance(joined[-1], Alike) and _joins(joined[-1], entry, path, key):
            joined[-1] = Alike((*joined[-1].rows, entry))
        else:
            joined.append(Alike((entry,)))
    return tuple(joined)


def _joins(those: Alike, row: Any, path, key) -> bool:
    if key(those.rows[0]) != key(row):
        return False
    names = [path(line).split("/") for line in (*those.rows, row)]
    if len({*map(len, names)}) > 1:
        return False
    differ = [n for n, level in enumerate(zip(*names, strict=True)) if len({*level}) > 1]
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
        rows: The rows.
        path: A function from a row to its path, with `/` between names.
        key: A function from a row to the data that must be equal; numbers in strings may differ.
        within: The path above all rows.
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
        path: A function from a row to its path.
        cells: A function from the rows of a line, their name and the path above them to the cells.
        size: A function from the rows of a block to a text about one block.
        within: The path above all entries, with a slash at its end, or `""`.
        indent: The indentation of the first cells.
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
        text: The sentence.
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
        rows: The rows.
        path: A function from a row to its path.
        within: The path above all rows, with a slash at its end, or `""`.
    """
    children: dict[str, list[Any]] = {}
    for row in rows:
        name = path(row)[len(within) :].partition("/")[0]
        children.setdefault(name, []).append(row)
    return children


def unnumbered(text: str) -> str:
    """A path or a sentence without the numbers that distinguish equal layers.

    Args:
        text: The text.
    """
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
