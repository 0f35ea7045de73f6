"""Draws the picture on the first screen: memory of one step on each chip, by dry runs.

    python docs/pictures.py               # writes docs/pictures/memory.svg; some minutes

Needs libtpu (`pip install 'jax[tpu]'`), no TPU. `python examples/layouts.py docs/pictures` draws
the others.
"""

import html
import pathlib
import sys

import keras_tpu_dist as ktd

ktd.simulate(8)

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from dry_run_pod import transformer  # noqa: E402

TOPOLOGY, BATCH = "v5e:2x4", 128
STRATEGIES = (
    ("TPUStrategy()", {}),
    ('TPUStrategy(layout="fsdp")', {"layout": "fsdp"}),
    ('TPUStrategy(layout="fsdp", remat="full")', {"layout": "fsdp", "remat": "full"}),
)
KINDS = (
    ("weights", "#56b4e9"),
    ("optimizer", "#e69f00"),
    ("activations and temporaries", "#009e73"),
    ("other", "#999999"),
)
GIB = 2.0**30
WIDTH, LEFT, RIGHT, ROW, TOP = 760, 20, 150, 62, 64
STYLE = (
    "text{fill:#1b1f24;font:14px system-ui,sans-serif}.code{font-family:ui-monospace,monospace}"
    ".muted{fill:#57606a}.good{fill:#0a7d4f}.bad{fill:#c2360a}.line{stroke:#1b1f24}"
    ".ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e7eb}.muted{fill:#9aa4af}.good{fill:#3ddc97}"
    ".bad{fill:#ff8a5c}.line{stroke:#e4e7eb}.ground{fill:#14171b}}"
)


def parts(run: ktd.DryRun) -> list[float]:
    """GiB on each chip by `KINDS`.

    Args:
        run: The dry run.
    """
    known = [run.state.weights, run.state.optimizer, run.memory.get("temporaries", 0)]
    return [size / GIB for size in (*known, max(0, run.total_bytes - sum(known)))]


def svg(runs: list[ktd.DryRun]) -> str:
    """The bars.

    Args:
        runs: The dry runs, in the order of `STRATEGIES`.
    """
    limit = (runs[0].limit_bytes or 0) / GIB
    scale = (WIDTH - LEFT - RIGHT) / max(limit, *(run.total_bytes / GIB for run in runs))
    height = TOP + ROW * len(runs) + 44
    out = [f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>']
    title = (
        f"One training step of a transformer with {runs[0].parameters / 1e9:.1f} billion "
        f"parameters, {BATCH} rows of 1,024 tokens"
    )
    out += [text(LEFT, 26, title, "b"), text(LEFT, 46, "Memory on each chip of a v5e-8", "muted")]
    for n, ((code, _), run) in enumerate(zip(STRATEGIES, runs, strict=True)):
        y, x = TOP + ROW * n, float(LEFT)
        out.append(text(LEFT, y + 16, code, "code"))
        for (_, colour), size in zip(KINDS, parts(run), strict=True):
            out.append(
                f'<rect x="{x:.1f}" y="{y + 24}" width="{size * scale:.1f}" height="24" '
                f'fill="{colour}"/>'
            )
            x += size * scale
        verdict = ("good", "fits") if run.fits else ("bad", "does not fit")
        words = f"{run.total_bytes / GIB:.1f} GiB: {verdict[1]}"
        out.append(text(x + 8, y + 41, words, verdict[0]))
    at, end = LEFT + limit * scale, TOP + ROW * len(runs)
    out.append(
        f'<path class="line" d="M{at:.1f} {TOP + 4}V{end}" stroke-width="2" '
        'stroke-dasharray="5 3"/>'
    )
    out.append(text(at, TOP - 2, f"{limit:.2f} GiB", "muted", "middle"))
    x = LEFT
    for name, colour in KINDS:
        out.append(f'<rect x="{x}" y="{end + 14}" width="12" height="12" fill="{colour}"/>')
        out.append(text(x + 18, end + 25, name, "muted"))
        x += 18 + 8 * len(name) + 16
    inner = "".join(out)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}"><style>{STYLE}</style>{inner}</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """A line of text.

    Args:
        x: Where it begins, or its middle.
        y: Its base line.
        words: The line.
        kind: Its class in the style.
        anchor: What of it is at `x`.
    """
    bold = ' font-weight="bold"' if kind == "b" else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}"{bold}>'
        f"{html.escape(words)}</text>"
    )


def main() -> None:
    """Runs the script."""
    plain, runs = transformer(width=2560, depth=12, heads=20), []

    def build():
        model = plain()
        ktd.scan_blocks(model)  # one block to compile instead of twelve
        return model

    for code, options in STRATEGIES:
        strategy = ktd.TPUStrategy(topology=TOPOLOGY, **options)
        runs.append(ktd.dry_run(build, strategy, batch_size=BATCH))
        sizes = zip(KINDS, parts(runs[-1]), strict=True)
        shown = ", ".join(f"{name} {size:.2f} GiB" for (name, _), size in sizes)
        whole = f"{runs[-1].total_bytes / GIB:.2f} GiB"
        print(f"{code}: fits {runs[-1].fits}, {whole}: {shown}", flush=True)
    (ROOT / "docs" / "pictures" / "memory.svg").write_text(svg(runs))


if __name__ == "__main__":
    main()
