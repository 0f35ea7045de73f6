"""A hook of MkDocs: long names in tables and long lines of output wrap where they may.

A table of output scrolls sideways as one piece; a sentence in it wraps, as in a terminal.
"""

import re

# Longer names in a table may break behind a dot or a slash, or before an underscore.
_LONGEST_NAME = 24
# Lines of code and of reports are no longer than this.
_LONGEST_LINE = 100
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_BREAK = re.compile(r"([./]+)(?=\w)|(?<=[a-z])(?=_+[a-z])")
_BLOCK = re.compile(r"(<pre>.*?<code>)(.*?)(</code></pre>)", re.DOTALL)
_ENTITY = re.compile(r"&#?\w+;")
_TAG = re.compile(r"<[^>]*>")
# A gap within a line is one between columns.
_COLUMNS = re.compile(r"\S {2,}\S")


def on_page_content(html: str, **_) -> str:
    """Marks where a page may wrap.

    Args:
        html: What MkDocs made of the page's Markdown.
    """
    html = _TABLE.sub(_with_breaks, html)
    return _BLOCK.sub(lambda block: block[1] + _sentences(block[2]) + block[3], html)


def _with_breaks(table: re.Match) -> str:
    pieces = re.split(r"(<[^>]*>)", table[0])
    return "".join(p if p.startswith("<") else re.sub(r"\S+", _word, p) for p in pieces)


def _word(word: re.Match) -> str:
    if len(_ENTITY.sub("x", word[0])) <= _LONGEST_NAME:
        return word[0]
    return _BREAK.sub(lambda mark: f"{mark[1] or ''}<wbr>", word[0])


def _sentences(code: str) -> str:
    return "\n".join(map(_sentence, code.split("\n")))


def _sentence(line: str) -> str:
    text = _ENTITY.sub("x", _TAG.sub("", line))
    whole = line.count("<span") == line.count("</span")
    if len(text) <= _LONGEST_LINE or _COLUMNS.search(text) or not whole:
        return line
    return f'<span class="sentence">{line}</span>'
