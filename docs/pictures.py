"""Draws the picture on the first screen: memory of one step on each chip, by dry runs.

    python docs/pictures.py               # writes docs/pictures/memory.svg

The sizes are read from docs/keras_hub.md, whose code prints them.
`python examples/layouts.py docs/pictures` draws the other pictures.
"""

import html
import pathlib
import re

from keras_tpu_dist.hardware.topology import Topology

DOCS = pathlib.Path(__file__).parent
PAGE = DOCS / "keras_hub.md"
PICTURE = DOCS / "pictures" / "memory.svg"
TOPOLOGY, SLICE = "v5e:2x4", "v5e-8"
_ROW = re.compile(r"^(TPUStrategy\(.*?) +([\d.]+) GiB: (fits|too much)$", re.MULTILINE)
GIB = 2.0**30
WIDTH, LEFT, CODE, TOP, ROW = 760, 20, 282, 82, 40
STYLE = (
    "text{fill:#1b1f24;font:14px system-ui,sans-serif}"
    ".code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;white-space:pre}"
    ".muted{fill:#57606a}.bar{fill:#4c5fd0}.over{fill:#c8452f}.room{fill:#e8eaf3}.line{stroke:#1b1f24;stroke-width:2}"
    ".ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e7eb}.muted{fill:#9aa4af}.bar{fill:#8b9bff}.over{fill:#ff8a70}"
    ".room{fill:#2a2f3a}.line{stroke:#e4e7eb}.ground{fill:#14171b}}"
)


def sizes() -> dict[str, float]:
    """From what you write to GiB on each chip, as the page has them."""
    return {code: float(size) for code, size, _ in _ROW.findall(PAGE.read_text())}


def svg(found: dict[str, float]) -> str:
    """The bars.

    Args:
        found: From what you write to GiB on each chip.
    """
    limit = Topology.parse(TOPOLOGY).hbm_bytes / GIB
    scale = (WIDTH - CODE - 170) / max(limit, *found.values())
    end = TOP + ROW * len(found)
    at, right = CODE + limit * scale, WIDTH - 160
    title = f"Does it fit? A training step of Gemma 2B (bfloat16, 8 x 512 tokens) on a {SLICE}"
    out = [
        f'<rect class="ground" width="{WIDTH}" height="{end + 14}" rx="8"/>',
        text(LEFT, 28, title, "b"),
        text(LEFT, 50, "Memory on each chip, by dry runs on a laptop", "muted"),
        text(at, TOP - 10, f"each chip has {limit:.2f} GiB", "muted", "end"),
    ]
    for n, (code, size) in enumerate(found.items()):
        y = TOP + ROW * n
        out += [
            text(LEFT, y + 19, code, "code"),
            f'<rect class="room" x="{CODE}" y="{y}" width="{limit * scale:.1f}" height="28"/>',
            f'<rect class="{"bar" if size <= limit else "over"}" x="{CODE}" y="{y}" '
            f'width="{size * scale:.1f}" height="28"/>',
            text(right, y + 19, f"{size:.2f} GiB: {'fits' if size <= limit else 'too much'}", ""),
        ]
    out.append(f'<path class="line" d="M{at:.1f} {TOP - 4}V{end - 8}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 14}" '
        f'width="{WIDTH}" height="{end + 14}"><style>{STYLE}</style>{"".join(out)}</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """A line of text.

    Args:
        x: Where it begins, or ends.
        y: Its base line.
        words: The line.
        kind: Its class in the style; `"b"` is bold.
        anchor: What of it is at `x`.
    """
    bold = ' font-weight="bold"' if kind == "b" else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}"{bold} '
        f'xml:space="preserve">{html.escape(words)}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(svg(sizes()))
