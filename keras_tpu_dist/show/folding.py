"""Equal blocks of a model shown once: what repeats in a list of paths."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Fewer lines saved are not worth a reader's second look.
_LEAST_SAVED = 4
# The most layers of a block that is looked for among layers side by side.
_LONGEST_BLOCK = 200


@dataclass(frozen=True)
class Repeated:
    """Layers that follow one another, once or again and again with equal rows.

    Attributes:
        first: The path of the first of its layers.
        last: The path of the last one, of the last repetition.
        times: How often it repeats; 1 for what does not.
        rows: All rows of the first repetition.
        entries: The same, with what repeats within it folded in turn.
    """

    first: str
    last: str
    times: int
    rows: tuple[Any, ...]
    entries: tuple[Any, ...]

    @property
    def words(self) -> str:
        """Which layers it stands for."""
        if self.first == self.last:
            return self.first
        return f"{self.first} .. {self.last}"


def folded(
    rows: Sequence[Any],
    path: Callable[[Any], str],
    key: Callable[[Any], Any],
    within: str = "",
) -> tuple[Any, ...]:
    """Rows in the order of their layers, with equal ones that repeat as one `Repeated`.

    Blocks are equal if their rows are, but for numbers in names: `decoder_0/up/kernel` is the same
    weight as `decoder_1/up/kernel` if its key is the same.

    Args:
        rows: The rows.
        path: From a row to its path, with `/` between names.
        key: From a row to what has to be equal; numbers in texts are left out of it.
        within: The path above all rows.

    Returns:
        Rows, and blocks that repeat.

    Example:

    >>> paths = [f"block_{n}/{name}" for n in range(9) for name in ("up", "down")]
    >>> (block,) = folded(paths, str, lambda path: None)
    >>> block.words, block.times, block.rows
    ('block_0 .. block_8', 9, ('block_0/up', 'block_0/down'))
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
    cells: Callable[[Any, str, str], tuple[str, ...]],
    size: Callable[[Sequence[Any]], str] = lambda rows: "",
    within: str = "",
    indent: str = "",
) -> Iterator[tuple[str, ...] | str]:
    """Folded rows for `text_table` and `html_table`: a line for each block, its rows below it.

    Args:
        entries: What `folded` gives.
        path: From a row to its path.
        cells: From a row to its cells, given the path that stands above it and its indent.
        size: From the rows of a block to what is said of one of them.
        within: The path above all entries, with a slash at its end, or `""`.
        indent: What the first cells start with.
    """
    for entry in entries:
        if not isinstance(entry, Repeated):
            yield cells(entry, within, indent)
            continue
        # Of a block of one layer, paths are relative to it.
        alone = all(path(row).startswith(f"{entry.first}/") for row in entry.rows)
        name = entry.words if alone else f"from {entry.first} to {entry.last}"
        each = size(entry.rows)
        yield f"{indent}{name}  x {entry.times}{f', each {each}' if each else ''}"
        inner = f"{entry.first}/" if alone else within
        yield from table_rows(entry.entries, path, cells, size, inner, f"{indent}  ")


def relative(text: str, within: str) -> str:
    """A sentence whose quoted paths are relative to a layer.

    Args:
        text: The sentence.
        within: The layer's path with a slash at its end, or `""`.

    Example:

    >>> relative("row: consumes the features of 'decoder_0/gate'", "decoder_0/")
    "row: consumes the features of 'gate'"
    """
    return text.replace(f"'{within}", "'") if within else text


def children_of(
    rows: Iterable[Any], path: Callable[[Any], str], within: str = ""
) -> dict[str, list[Any]]:
    """Rows by the next name of their paths, in the order in which names first come.

    Args:
        rows: The rows.
        path: From a row to its path.
        within: The path above all rows, with a slash at its end, or `""`.
    """
    children: dict[str, list[Any]] = {}
    for row in rows:
        name = path(row)[len(within) :].partition("/")[0]
        children.setdefault(name, []).append(row)
    return children


def unnumbered(text: str) -> str:
    """A path or a sentence without the numbers that tell equal layers apart.

    Args:
        text: The text.

    Example:

    >>> unnumbered("decoder_1/dense/kernel") == unnumbered("decoder/dense_12/kernel")
    True
    """
    return re.sub(r"\d+", "#", re.sub(r"_\d+(?![A-Za-z0-9_])", "", text))


def _inner(rows, path, key, within, name) -> Iterator[Any]:
    """What one layer shows: its row, or its rows folded."""
    below = [row for row in rows if path(row) != f"{within}{name}"]
    yield from (row for row in rows if path(row) == f"{within}{name}")
    if below:
        yield from folded(below, path, key, f"{within}{name}/")


def _masked(key: Any) -> Any:
    if isinstance(key, str):
        return unnumbered(key)
    return tuple(map(_masked, key)) if isinstance(key, tuple) else key


def _repetitions(keys: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Start, period and times of each repetition, of which the longest is taken at each place."""
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
