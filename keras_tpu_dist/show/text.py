"""How results read: sizes, durations and tables, for terminals and notebooks."""

import html
import re
from collections.abc import Sequence

# A number with a unit or sign behind it, such as "1.5 KiB", "12%", "1,024".
_NUMBER = re.compile(r"-?[\d.,]+(?: ?(?:[KMGT]i?)?B| ?[mu]?s|%)?")


# Unit, its bytes, digits behind the point, and half of the last digit of the next smaller unit.
_BYTE_UNITS = (
    ("TiB", 2**40, 2, 0.005 * 2**30),
    ("GiB", 2**30, 2, 0.05 * 2**20),
    ("MiB", 2**20, 1, 0.05 * 2**10),
    ("KiB", 2**10, 1, 0.5),
)


def size_text(count: float) -> str:
    """Bytes as people read them, in the compiler's units (1 GiB is 2^30).

    Args:
        count: The number of bytes; a negative one keeps its sign.

    Example:

    >>> size_text(1536), size_text(15.75 * 2**30)
    ('1.5 KiB', '15.75 GiB')
    """
    for unit, scale, digits, rounding in _BYTE_UNITS:
        # What would round up to 1024 of the smaller unit is one of this.
        if abs(count) >= scale - rounding:
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count:.0f} B"


def duration_text(seconds: float) -> str:
    """Seconds as people read them.

    Args:
        seconds: The duration in seconds, not negative.

    Example:

    >>> duration_text(0.0042)
    '4.20 ms'
    """
    if not seconds:
        return "0"
    for unit, scale, rounding in (("s", 1.0, 5e-6), ("ms", 1e-3, 5e-8)):
        if seconds >= scale - rounding:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """A table of aligned columns, numbers to the right.

    Args:
        header: Its first line, or `()` for none.
        rows: Its other lines, each of as many cells.
        indent: What each line starts with.

    Example:

    >>> print(text_table(("axis", "size"), [("data", "64"), ("model", "4")], indent=""))
    axis   size
    data     64
    model     4
    """
    lines = [*([header] if header else []), *rows]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    to_right = [_is_numeric(column[1 if header else 0 :]) for column in columns]
    return "\n".join(
        indent
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right)
        ).rstrip()
        for line in lines
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as an HTML table, columns of numbers with the class `n`.

    Args:
        header: The cells of its first line, or `()` for none.
        rows: The cells of its other lines, as plain text; they are escaped here.
    """
    marks = [' class="n"' if _is_numeric(column) else "" for column in zip(*rows, strict=True)]
    marks = marks or [""] * len(header)
    head = "".join(f"<th{m}>{html.escape(cell)}</th>" for cell, m in zip(header, marks))
    body = "".join(
        f"<tr>{''.join(f'<td{m}>{html.escape(c)}</td>' for c, m in zip(row, marks))}</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _is_numeric(cells: Sequence[str]) -> bool:
    written = [cell for cell in cells if cell not in ("", "-")]
    return bool(written) and all(_NUMBER.fullmatch(cell) for cell in written)
