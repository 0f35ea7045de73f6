"""Draws the picture on the first screen: memory of one step on each chip, by dry runs.

    python docs/pictures.py               # writes docs/pictures/memory.svg

The sizes are read from docs/numbers.md, where `python benchmarks/scan_blocks.py` has its table.
`python examples/layouts.py docs/pictures` draws the other pictures.
"""

import html
import pathlib
import re

from keras_tpu_dist.hardware.topology import Topology

DOCS = pathlib.Path(__file__).parent
NUMBERS = DOCS / "numbers.md"
PICTURE = DOCS / "pictures" / "memory.svg"
TOPOLOGY, SLICE, LAYERS = "v5e:4x4", "v5e-16", 48
# What you write, and the row of the table.
STRATEGIES = (
    ('TPUStrategy(layout="fsdp")', "unrolled"),
    ("  and ktd.scan_blocks(model)", "scanned"),
    ('  and remat="full"', "scanned, full"),
)
GIB = 2.0**30
WIDTH, LEFT, CODE, TOP, ROW = 760, 20, 256, 82, 40
STYLE = (
    "text{fill:#1b1f24;font:14px system-ui,sans-serif}"
    ".code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;white-space:pre}"
    ".muted{fill:#57606a}.bar{fill:#4c5fd0}.room{fill:#e8eaf3}.line{stroke:#1b1f24;stroke-width:2}"
    ".ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e7eb}.muted{fill:#9aa4af}.bar{fill:#8b9bff}"
    ".room{fill:#2a2f3a}.line{stroke:#e4e7eb}.ground{fill:#14171b}}"
)


def sizes() -> list[float]:
    """GiB on each chip, in the order of `STRATEGIES`, as the table has them."""
    text = NUMBERS.read_text()
    rows = dict(re.findall(rf"^\| {LAYERS} \| ([\w, ]+) \| \d+ \| ([\d.]+) GiB \|", text, re.M))
    return [float(rows[name]) for _, name in STRATEGIES]


def svg(found: list[float]) -> str:
    """The bars.

    Args:
        found: GiB on each chip, in the order of `STRATEGIES`.
    """
    limit = Topology.parse(TOPOLOGY).hbm_bytes / GIB
    scale = (WIDTH - CODE - 120) / limit
    end = TOP + ROW * len(found)
    at = CODE + limit * scale
    title = f"Does it fit? One training step of a decoder with {LAYERS} layers on a {SLICE}"
    out = [
        f'<rect class="ground" width="{WIDTH}" height="{end + 14}" rx="8"/>',
        text(LEFT, 28, title, "b"),
        text(LEFT, 50, "Memory on each chip, by dry runs on a laptop", "muted"),
        text(at, TOP - 10, f"each chip has {limit:.2f} GiB", "muted", "end"),
    ]
    for n, ((code, _), size) in enumerate(zip(STRATEGIES, found, strict=True)):
        y = TOP + ROW * n
        out += [
            text(LEFT, y + 19, code, "code"),
            f'<rect class="room" x="{CODE}" y="{y}" width="{limit * scale:.1f}" height="28"/>',
            f'<rect class="bar" x="{CODE}" y="{y}" width="{size * scale:.1f}" height="28"/>',
            text(at + 10, y + 19, f"{size:.2f} GiB: {'fits' if size <= limit else 'too much'}", ""),
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
