"""A hook of MkDocs: long names and lines wrap where they may, and notebooks are part of the site.

A table of output scrolls sideways as one piece; a sentence in it wraps, as in a terminal. Short
names and numbers with their units stay whole.
"""

import pathlib
import re

_NOTEBOOKS = pathlib.Path(__file__).parents[1] / "examples" / "notebooks"
# Longer names in a table may break behind a dot, a slash or a parenthesis, or before an underscore.
_LONGEST_NAME = 24
# Lines of code and of reports are no longer than this.
_LONGEST_LINE = 100
# Sentences in a table of more columns need room.
_MANY_COLUMNS = 5
_SENTENCE_CELL = re.compile(r"<td>(?=[^<]{40})")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_SHORT_CODE = re.compile(r"<code>(?=[^\s<]{1,16}</code>)")
_QUANTITY = re.compile(r"(?<=\d) (?=(?:s|ms|us|[kKMGT]i?B)\b)")
_BREAK = re.compile(r"([./(]+)(?=[\w&\[])|(?<=[a-z])(?=_+[a-z])")
_BLOCK = re.compile(r"(<pre>.*?<code>)(.*?)(</code></pre>)", re.DOTALL)
_ENTITY = re.compile(r"&#?\w+;")
_TAG = re.compile(r"<[^>]*>")
# A gap within a line is one between columns.
_COLUMNS = re.compile(r"\S {2,}\S")


def on_files(files, config):
    """Adds the notebooks, which are outside of the folder of pages.

    Args:
        files: The files of the site.
        config: MkDocs's configuration.
    """
    from mkdocs.structure.files import File  # tests read this module without MkDocs

    for path in sorted(_NOTEBOOKS.glob("*.ipynb")):
        name = f"notebooks/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    """Links to the notebooks as they are in the repository, for the site.

    Args:
        markdown: The page's text.
    """
    return markdown.replace("](../examples/notebooks/", "](notebooks/")


def on_page_content(html: str, **_) -> str:
    """Marks where a page may wrap.

    Args:
        html: What MkDocs made of the page's Markdown.
    """
    html = _TABLE.sub(_with_breaks, html)
    return _BLOCK.sub(lambda block: block[1] + _sentences(block[2]) + block[3], html)


def _with_breaks(table: re.Match) -> str:
    whole = _SHORT_CODE.sub('<code class="whole">', table[0])
    if whole.count("</th>") > _MANY_COLUMNS:
        whole = _SENTENCE_CELL.sub('<td class="words">', whole)
    pieces = re.split(r"(<[^>]*>)", whole)
    return "".join(p if p.startswith("<") else _text(p) for p in pieces)


def _text(text: str) -> str:
    return re.sub(r"\S+", _word, _QUANTITY.sub("&nbsp;", text))


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
