"""Texts for results: sizes, durations and tables, for terminals and notebooks."""

import html
import re
import shutil
from collections.abc import Callable, Iterator, Sequence

# A number with or without a unit or sign, such as "1.5 KiB", "12%", "1,024", or a range of numbers.
_ONE = r"-?[\d.,]+(?: ?(?:[KMGT]i?)?B| ?[mu]?s|%)?"
_NUMBER = re.compile(f"{_ONE}(?: to {_ONE})?")


# Unit, its bytes, digits after the point, and half of the last digit of the next smaller unit.
_BYTE_UNITS = (
    ("TiB", 2**40, 2, 0.005 * 2**30),
    ("GiB", 2**30, 2, 0.05 * 2**20),
    ("MiB", 2**20, 1, 0.05 * 2**10),
    ("KiB", 2**10, 1, 0.5),
)

# The smallest widths: of a line, of wrapped words beside other columns, and of a cell.
_NARROWEST, _LEAST_WORDS, _LEAST_CELL = 60, 30, 14
# Tables with at most this many columns fit on a narrow screen.
_FEW_COLUMNS = 3
# A word that is long enough to break on a page.
_LONG_WORD = re.compile(r"(\S{25,})")
# The indentation of words below their row, and the spaces between columns.
_BELOW, _GAP = "    ", 2


def size_text(count: float) -> str:
    """Bytes in readable units, those of the compiler (1 GiB is 2^30).

    Args:
        count: The number of bytes; a negative one keeps its sign.

    Example:

    >>> size_text(1536), size_text(15.75 * 2**30)
    ('1.5 KiB', '15.75 GiB')
    """
    for unit, scale, digits, rounding in _BYTE_UNITS:
        # A size that would round up to 1024 of the smaller unit uses this unit.
        if abs(count) >= scale - rounding:
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count:.0f} B"


def duration_text(seconds: float) -> str:
    """Seconds in readable units.

    Args:
        seconds: The duration in seconds, not negative.
    """
    if not seconds:
        return "0"
    for unit, scale, least in (("h", 3600.0, 7200.0), ("min", 60.0, 120.0)):
        if seconds >= least:
            return f"{seconds / scale:.1f} {unit}"
    for unit, scale, rounding in (("s", 1.0, 5e-6), ("ms", 1e-3, 5e-8)):
        if seconds >= scale - rounding:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def span_text(low: float, high: float, text: Callable[[float], str]) -> str:
    """A range in words; one number if both ends have the same text.

    Args:
        low: The lower end.
        high: The upper end.
        text: A function from a number to its text.

    Example:

    >>> span_text(0.0042, 0.0061, duration_text), span_text(1.0, 1.0, duration_text)
    ('4.20 to 6.10 ms', '1.00 s')
    """
    first, last = text(low), text(high)
    if first == last:
        return first
    number, _, unit = first.partition(" ")
    same = unit and last.endswith(f" {unit}")
    return f"{number if same else first} to {last}"


def text_width() -> int:
    """The width of a line of text: the terminal's, at least 60, or 100 without a terminal."""
    return max(_NARROWEST, shutil.get_terminal_size((100, 24)).columns)


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    indent: str = "  ",
    width: int | None = None,
) -> str:
    """A table of aligned columns, no wider than the terminal; numbers are aligned to the right.

    Words wrap, numbers do not, and the widest column of words wraps first. If that is the last
    column, and the others leave too little space, its words go below the row, indented;
    consecutive rows with the same words share them. A path breaks after a slash.

    Args:
        header: Its first line, or `()` for none.
        rows: Its other lines, with the same number of cells; a `str` is a line across the table.
        indent: The start of every line.
        width: The largest width of a line. Defaults to `text_width()`.
    """
    cells = [row for row in rows if not isinstance(row, str)]
    lines = [*([header] if header else []), *cells]
    columns = list(zip(*lines, strict=True))
    numeric = [_is_numeric(column[1 if header else 0 :]) for column in columns]
    room = (text_width() if width is None else width) - len(indent)
    longest = [max(map(len, column)) for column in columns]
    widths = _fitted(longest, numeric, room)
    order = [*([header] if header else []), *rows]
    text: list[str] = []
    for n, row in enumerate(order):
        if isinstance(row, str):
            text += wrapped(row, room)
            continue
        text += _drawn(row, widths, numeric)
        following = order[n + 1] if n + 1 < len(order) else ""
        below = len(widths) < len(row) and row[-1]
        if below and (isinstance(following, str) or following[-1] != row[-1]):
            text += (_BELOW + line for line in wrapped(row[-1], room - len(_BELOW)))
    return "\n".join((indent + line).rstrip() for line in text)


def wrapped(text: str, width: int) -> list[str]:
    """Wraps words into lines, all indented like the first; words that are too long break.

    Args:
        text: The words.
        width: The largest number of letters in a line.

    Returns:
        The lines. Long words break after a slash or an underscore, or anywhere if necessary.
    """
    if len(text) <= width:
        return [text]
    inner = text.lstrip()
    indent = text[: min(len(text) - len(inner), width // 2)]
    room = width - len(indent)
    lines = [""]
    for word in inner.split():
        before = f"{lines[-1]} " if lines[-1] else ""
        if len(before + word) <= room:
            lines[-1] = before + word
            continue
        broken = list(_broken(word, room))
        if len(broken) > 1 and len(before + broken[0]) <= room:
            lines[-1] = before + broken.pop(0)
        elif not lines[-1]:
            lines.pop()
        lines += broken
    return [indent + line for line in lines]


def _broken(word: str, width: int) -> Iterator[str]:
    """Breaks a word into parts no longer than a line."""
    part = ""
    for piece in re.findall(r"[^/_]*[/_]+|[^/_]+", word):
        if part and len(part + piece) > width:
            yield part
            part = ""
        part += piece
        while len(part) > width:
            yield part[:width]
            part = part[width:]
    if part:
        yield part


def _fitted(widths: list[int], numeric: list[bool], room: int) -> list[int]:
    """The widths of the columns; none for the last column if it goes below its row."""

    def needed(of: list[int]) -> int:
        return sum(of) + _GAP * max(0, len(of) - 1)

    fitted, last = list(widths), len(widths) - 1
    while needed(fitted) > room:
        words = [n for n, right in enumerate(numeric[: len(fitted)]) if not right]
        widest = max(words, key=lambda n: fitted[n], default=None)
        if widest is None or fitted[widest] <= _LEAST_CELL:
            break
        if widest == last > 0 and room - needed(fitted[:-1]) - _GAP < _LEAST_WORDS:
            fitted = list(widths[:-1])
        else:
            fitted[widest] -= 1
    return fitted


def _drawn(line: Sequence[str], widths: list[int], numeric: list[bool]) -> list[str]:
    """One row: as many lines as its longest cell needs."""
    # The last column has no width if it goes below its row.
    line, numeric = line[: len(widths)], numeric[: len(widths)]
    cells = [
        [cell] if right else wrapped(cell, width)
        for cell, width, right in zip(line, widths, numeric, strict=True)
    ]
    parts = [[c[n] if n < len(c) else "" for c in cells] for n in range(max(map(len, cells)))]
    return [
        (" " * _GAP).join(
            part.rjust(width) if right else part.ljust(width)
            for part, width, right in zip(row, widths, numeric, strict=True)
        )
        for row in parts
    ]


def html_table(header: Sequence[str], rows: Sequence[Sequence[str] | str]) -> str:
    """An HTML table; columns of numbers have the class `n`.

    On a narrow screen, a last column of words goes below its row, as in `text_table`.

    Args:
        header: The cells of its first line, or `()` for none.
        rows: The cells of its other lines, as plain text, which is escaped here; a `str` is a row
            across the table.
    """
    columns = zip(*(row for row in rows if not isinstance(row, str)), strict=True)
    marks = [' class="n"' if _is_numeric(column) else "" for column in columns]
    marks = marks or [""] * len(header)
    head = "".join(
        f"<th{m}>{cell_html(cell)}</th>" for cell, m in zip(header, marks, strict=bool(header))
    )
    lines = [
        f'<td colspan="{len(marks)}"><b>{cell_html(row)}</b></td>'
        if isinstance(row, str)
        else "".join(f"<td{m}>{cell_html(c)}</td>" for c, m in zip(row, marks, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    below = ' class="below"' if len(marks) > _FEW_COLUMNS and not marks[-1] else ""
    return f"<table{below}>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def cell_html(text: str) -> str:
    """The text of a cell, in which a long path may break behind a slash.

    Args:
        text: The words, as plain text.

    Example:

    >>> cell_html("decoder/block_0/attention/query")
    'decoder/<wbr>block_0/<wbr>attention/<wbr>query'
    >>> cell_html("a/short <name>")
    'a/short &lt;name&gt;'
    """
    pieces = map(html.escape, _LONG_WORD.split(text))
    return "".join(p.replace("/", "/<wbr>") if n % 2 else p for n, p in enumerate(pieces))


def _is_numeric(cells: Sequence[str]) -> bool:
    written = [cell for cell in cells if cell not in ("", "-")]
    return bool(written) and all(_NUMBER.fullmatch(cell) for cell in written)
