"""Self-contained HTML pages: tables, bars, styles."""

import contextlib
import html
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.show.colours import EMPTY, ON_COLOUR
from keras_tpu_dist.show.text import cell_html, html_table, text_table

# It inherits the colours of the page around it, so it is readable in a notebook of any theme. The
# class name is doubled to override the notebook's own rules.
_STYLE = (
    ".ktd{font:14px/1.45 system-ui,sans-serif;overflow-x:auto;overflow-wrap:anywhere}"
    # A table that is too wide scrolls by itself.
    ".ktd table{display:block;max-width:100%;overflow-x:auto;border-collapse:collapse;"
    "margin:.3em 0 1em;border:0;font-size:13px}"
    ".ktd.ktd th,.ktd.ktd td{padding:.25em .8em;border:0;"
    "border-bottom:1px solid rgba(128,128,128,.3);text-align:left;vertical-align:top;"
    "background:none;max-width:44em;overflow-wrap:break-word}"
    ".ktd.ktd th{overflow-wrap:normal;white-space:nowrap}"
    ".ktd.ktd :is(th,td):first-child{padding-left:0}"
    ".ktd.ktd .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".ktd p{margin:.6em 0 .2em}.ktd svg{max-width:100%;height:auto}"
    ".ktd .bar{display:flex;position:relative;height:1.1em;min-width:10em;margin:.15em 0;"
    f"background:{EMPTY};"
    "border-radius:2px}.ktd .bar i{display:block;height:100%;min-width:1px}"
    ".ktd .bar b{position:absolute;top:-3px;bottom:-3px;border-left:2px solid currentColor}"
    ".ktd .box{display:flex;height:2.2em;margin:.1em 0 .9em;border-radius:3px;overflow:hidden}"
    f".ktd .box.again{{overflow:visible;box-shadow:4px 4px 0 {EMPTY},8px 8px 0 {EMPTY}}}"
    ".ktd .boxes{padding-right:10px}"
    # A label that is wider than its box goes to a second line, which nobody sees.
    f".ktd .box i{{font:12px/2.2em system-ui,sans-serif;font-style:normal;color:{ON_COLOUR};"
    "display:flex;flex-wrap:wrap;justify-content:center;height:100%;"
    "min-width:2px;overflow:hidden;white-space:nowrap;"
    "border-right:1px solid rgba(255,255,255,.6);box-sizing:border-box}"
    ".ktd .box i:before{content:'';width:1px;height:100%}"
    ".ktd .drawing{overflow-x:auto}"
    "@media(max-width:600px){.ktd.ktd :is(th,td){padding:.25em .5em}"
    ".ktd.ktd th{white-space:normal}.ktd .bar{min-width:5em}.ktd .drawing svg{min-width:46em}"
    ".ktd.ktd td{max-width:20em}.ktd.ktd td:first-child:not([colspan]){max-width:12em}"
    ".ktd .below tr{display:flex;flex-wrap:wrap}"
    ".ktd.ktd .below :is(th,td){border:0;padding:.1em .5em .1em 0;max-width:100%;"
    "box-sizing:border-box;overflow-wrap:anywhere}"
    ".ktd.ktd .below tr{border-bottom:1px solid rgba(128,128,128,.3)}"
    ".ktd.ktd .below td:last-child{flex-basis:100%}"
    ".ktd.ktd .below td:first-child:not([colspan]){max-width:100%;font-weight:bold}}"
    ".ktd pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.6em 0}"
    ".ktd .key{white-space:nowrap;margin-right:1.2em}"
    ".ktd .key i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}"
)
_PAGE_STYLE = (
    ":root{color-scheme:light dark;--ground:#fff;--ink:#1b1f24;--muted:#57606a;--good:#0a7d4f;"
    "--bad:#c2360a;--panel:#f6f8fa}"
    "@media(prefers-color-scheme:dark){:root{--ground:#14171b;--ink:#e4e7eb;--muted:#9aa4af;"
    "--good:#3ddc97;--bad:#ff8a5c;--panel:#1d2127}}"
    "body{margin:0;background:var(--ground);color:var(--ink)}"
    "main.ktd{max-width:88em;margin:0 auto;padding:1.5em}"
    "@media(max-width:600px){main.ktd{padding:1em}}main>.muted{margin-bottom:1em}"
    "h1{font-size:1.5em;margin:0 0 .2em;overflow-wrap:anywhere}h1 span{white-space:nowrap}"
    "h2{font-size:1.15em;margin:1.8em 0 .4em}"
    ".muted{color:var(--muted)}.good{color:var(--good)}.bad{color:var(--bad)}"
    ".tiles{display:flex;flex-wrap:wrap;gap:.8em;margin:1em 0}"
    ".tiles div{background:var(--panel);border-radius:6px;padding:.6em 1em}"
    ".tiles b{display:block;font-size:1.25em}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.1em 1.2em;margin:.6em 0;"
    "font-size:13px}"
    "dd{margin:0}@media(max-width:40em){dl{display:block}dd{margin:0 0 .3em 1.2em}}"
)
# The page loads, runs and sends nothing, whatever the names in a model contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class TableCell:
    """A cell of a table.

    Attributes:
        value: The number that it shows, if any: columns with numbers are right-aligned.
        markup: HTML to show in place of the text, or `""`.
    """

    text: str
    value: float | None = None
    markup: str = ""


@dataclass(frozen=True, repr=False)
class Table(Printed):
    """A table of a report, as text, in a notebook, or on a page.

    Attributes:
        title: The line above it, or `""`.
        header: Its columns, or `()` for none.
        rows: Its rows, of texts and cells.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[TableCell | str]]

    def __str__(self) -> str:
        table = text_table(self.header, self._texts())
        return f"{self.title}\n{table}" if self.title else table

    def html(self) -> str:
        """The table for a notebook."""
        above = f"<p>{html.escape(self.title)}</p>" if self.title else ""
        return above + html_table(self.header, self._texts())

    def section(self) -> str:
        """The table for a page."""
        title = html.escape(self.title[:1].upper() + self.title[1:])
        table = (
            table_of_cells(self.header, self.rows) if self.header else html_table((), self._texts())
        )
        return f"<h2>{title}</h2>{table}" if title else table

    def _texts(self) -> list[list[str]]:
        return [[c.text if isinstance(c, TableCell) else c for c in row] for row in self.rows]


class Shown(Printed):
    """A result with an HTML form for notebooks: a title and HTML below it."""

    def _repr_html_(self) -> str:
        return fragment(self._title(), *self._blocks())

    def _title(self) -> str:
        raise NotImplementedError

    def _blocks(self) -> Iterable[str]:
        raise NotImplementedError


class Page(Shown):
    """A result that also has a page of its own."""

    def to_html(self, path: str | os.PathLike | None = None) -> str | None:
        """The full report as an HTML page.

        It has drawings and tables. It is one file that loads nothing else, runs no script, and uses
        the browser's light or dark colours.

        Args:
            path: The file to write. An existing file is replaced atomically. By default, the text
                is returned.

        Returns:
            The page, or `None` if it was written to a file.

        Raises:
            ValueError: If the file's folder is missing.

        Example:

        >>> run = ktd.dry_run(build, strategy, batch_size=1024)  # doctest: +SKIP
        >>> run.to_html("report.html")  # doctest: +SKIP
        """
        return delivered(self._page(), path)

    def _page(self) -> str:
        raise NotImplementedError


class Report(Page):
    """A result of tables, lines to copy and notes, alike as text, in a notebook and on a page."""

    def __str__(self) -> str:
        tables = map(str, self._tables())
        return "\n".join([self._title(), *tables, *self._code(), *self._lines()])

    def _blocks(self) -> list[str]:
        tables = (table.html() for table in self._tables())
        return [*self._drawing(), *tables, *map(code, self._code()), *self._paragraphs()]

    def _page(self) -> str:
        head = [self._heading(), *map(code, self._code()), *self._drawing()]
        tables = (table.section() for table in self._tables())
        return document(self._title(), [*head, *tables, *self._paragraphs(), *self._below()])

    def _paragraphs(self) -> list[str]:
        return [f"<p>{html.escape(line).replace(chr(10), '<br>')}</p>" for line in self._lines()]

    def _heading(self) -> str:
        return f"<h1>{html.escape(self._title())}</h1>"

    def _tables(self) -> Iterable[Table]:
        raise NotImplementedError

    def _code(self) -> Iterable[str]:
        """Lines of Python to copy."""
        return ()

    def _lines(self) -> Iterable[str]:
        """What is said below the tables, such as notes."""
        return ()

    def _drawing(self) -> Iterable[str]:
        """HTML above the tables."""
        return ()

    def _below(self) -> Iterable[str]:
        """HTML that only a page has, at its end."""
        return ()


def document(title: str, parts: Iterable[str]) -> str:
    """A complete page, with its style.

    Args:
        title: The page's title, as plain text.
        parts: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}{_PAGE_STYLE}</style></head>"
        f'<body><main class="ktd">{"".join(parts)}</main></body></html>\n'
    )


def fragment(title: str, *parts: str) -> str:
    """A part of a page, for the output of a notebook cell.

    Args:
        title: Its first line, as plain text, or `""`.
        parts: HTML.
    """
    head = f"<p><b>{html.escape(title)}</b></p>" if title else ""
    return f'<div class="ktd"><style>{_STYLE}</style>{head}{"".join(parts)}</div>'


def table_of_cells(header: Sequence[str], rows: Iterable[Sequence[TableCell | str]]) -> str:
    """An HTML table whose cells may have markup."""
    cells = [[c if isinstance(c, TableCell) else TableCell(c) for c in row] for row in rows]
    numeric = [any(_is_number(row[n]) for row in cells) for n in range(len(header))]
    heads = "".join(
        f'<th scope="col"{_numeric(n)}>{html.escape(name)}</th>'
        for name, n in zip(header, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in cells)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def bar(parts: Iterable[tuple[float, str, str]], mark: float | None = None) -> str:
    """A bar of coloured parts.

    Args:
        parts: For every part, its share of the bar's length, its colour, and its words as plain
            text.
        mark: The position of a line across the bar, as a share of its length.
    """
    inner = "".join(
        f'<i style="width:{100 * share:.2f}%;background:{colour}" title="{html.escape(words)}"></i>'
        for share, colour, words in parts
        if share > 0
    )
    line = "" if mark is None else f'<b style="left:calc({100 * mark:.2f}% - 2px)"></b>'
    return f'<span class="bar">{inner}{line}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A legend of colours.

    Args:
        entries: Colours with their words, as plain text.
    """
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{html.escape(words)}</span>'
        for colour, words in entries
    )
    return f"<p>{' '.join(keys)}</p>"


def definitions(words: Iterable[tuple[str, str]]) -> str:
    """A list of terms with their meanings.

    Args:
        words: Terms and meanings, as plain text.
    """
    items = (f"<dt>{html.escape(w)}</dt><dd>{html.escape(m)}</dd>" for w, m in words)
    return f'<dl class="muted">{"".join(items)}</dl>'


def code(line: str) -> str:
    """A line to copy.

    Args:
        line: The line, as plain text.
    """
    return f"<pre>{html.escape(line)}</pre>"


def delivered(text: str, path: str | os.PathLike | None) -> str | None:
    """Returns a page, or writes it to a file.

    Args:
        text: The page.
        path: The file; an existing file is replaced atomically. `None` to get the text.
    """
    if path is None:
        return text
    file = file_of(path)
    # A random name, so that nobody can place a link there beforehand.
    part = file.with_name(f".{file.name[:100]}.{secrets.token_hex(8)}.part")
    opened = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(opened, "w", encoding="utf-8") as whole:
            whole.write(text)
        os.replace(part, file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return None


def file_of(path: str | os.PathLike) -> Path:
    """The file for a page, a picture or a model, checked.

    Args:
        path: The user's path.
    """
    named = isinstance(path, (str, os.PathLike)) and os.fspath(path) != ""
    if not named:
        raise value_error(
            "A page needs the path of a file.",
            received={"path": path},
            fix='Write for example "report.html".',
        )
    file = Path(path).resolve()
    if file.parent.is_dir() and not file.is_dir():
        return file
    raise value_error(
        "The file to write must be in a folder that exists.",
        received={"path": os.fspath(path)},
        fix="Add the name of a file."
        if file.is_dir()
        else f"Create the folder {str(file.parent)!r} first.",
    )


def _cell(cell: TableCell, numeric: bool) -> str:
    inner = cell.markup or cell_html(cell.text)
    return f"<td{_numeric(numeric and not cell.markup)}>{inner}</td>"


def _is_number(cell: TableCell) -> bool:
    return cell.value is not None and not cell.markup


def _numeric(yes: bool) -> str:
    return ' class="n"' if yes else ""
