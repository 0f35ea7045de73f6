"""Ids of errors, by which the troubleshooting page lists them; the standard library alone.

`docs/hooks.py` runs this file by its path, where the package is not installed.
"""

import ast
import functools
import itertools
import linecache
import threading
import zlib
from types import FrameType

_parsing = threading.Lock()


def identifier(rule: str) -> str:
    """An id that stays as long as the words of the rule do.

    Args:
        rule: The rule, as `text` gives it.

    Example:

    >>> identifier("A count must be positive.")
    'e55cc2752'
    """
    return f"e{zlib.crc32(rule.encode()):08x}"


def text(node: ast.expr | None) -> str:
    """The words of an expression, with "…" for all that is filled in.

    Args:
        node: The expression.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return "…"


def rule_of(call: ast.Call) -> str:
    """The rule that a call of `message` states, or nothing where it is filled in as a whole.

    Args:
        call: The call.
    """
    rule = text(call.args[0]) if call.args else "…"
    return rule if rule.strip("… ") else ""


def id_of_call(frame: FrameType | None) -> str:
    """The id of the error that a frame is making by a call of `message`.

    The words alone do not tell: names and sizes are filled in. So the call is found in the source.

    Args:
        frame: The frame.

    Returns:
        The id, or nothing where there is no source to look into, or no rule in it.
    """
    if frame is None:
        return ""
    code = frame.f_code
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    try:
        with _parsing:
            ids = _ids(code.co_filename)
    except SystemError:
        return ""  # Python 3.11 counts a tree's depth in all threads: a user's may be parsing too
    return ids.get((place[0], place[2]), "")


@functools.cache
def _ids(path: str) -> dict[tuple[int | None, int | None], str]:
    source = "".join(linecache.getlines(path))
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    found = [call for call in calls if getattr(call.func, "id", "") == "message"]
    rules = {(call.lineno, call.col_offset): rule_of(call) for call in found}
    return {place: identifier(rule) for place, rule in rules.items() if rule}
