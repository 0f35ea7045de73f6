"""For mkdocstrings: examples in docstrings as code.

Keras writes `Example:` and then `>>>` lines, not indented, which Markdown takes for quotations.
"""

import griffe


def fenced(text: str) -> str:
    """A docstring with its `>>>` examples, and what they print, as blocks of code.

    Args:
        text: The docstring, dedented.
    """
    lines, inside = [], False
    for line in text.splitlines():
        starts = line.lstrip().startswith(">>> ")
        if starts and not inside:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append(f"{indent}```")
            inside = False
        lines.append(
            "**Example**" if line == "Example:" else line.replace("  # doctest: +SKIP", "")
        )
    return "\n".join([*lines, f"{indent}```"] if inside else lines)


class Examples(griffe.Extension):
    """Rewrites every docstring that has examples."""

    def on_instance(self, *, obj: griffe.Object, **kwargs) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
