"""The page of a dry run: memory by kind, times, layers, collectives."""

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from keras_tpu_dist.show.colours import (
    BACKWARD,
    FORWARD,
    MEMORY,
    NONE,
)
from keras_tpu_dist.show.page import TableCell, bar, definitions, document, legend, table_of_cells
from keras_tpu_dist.show.text import duration_text, html_table, size_text
from keras_tpu_dist.tools.dryrun.figures import BOUNDS, EFFORTS
from keras_tpu_dist.tools.dryrun.folded import amount_of, exchanges_by_kind, layers_by_kind

if TYPE_CHECKING:
    from keras_tpu_dist.tools.dryrun.report import DryRun

_ESTIMATE = "computed from the compiled program by the compiler's cycles, not measured"
_WORDS_OF_TILES = (
    ("matrix units busy", "the time of the matrix products at the chip's peak, over the step"),
    (
        "model FLOPs utilisation",
        "the operations of the model's formula over what all chips could do in the step; attention "
        "counts in full, and below it half of attention with `use_causal_mask`",
    ),
)
_WORDS_OF_TIMES = (
    (
        "at peak, at full speed",
        "as fast as the chip's specification says; collectives at least a microsecond for each hop",
    ),
    ("not overlapped", "collectives for which the chips wait, as nothing else runs meanwhile"),
    ("compiler's cycles", "what the compiler says that each kernel takes, one after the other"),
)
# The class in the page's style, and the words.
VERDICTS = {
    True: ("good", "fits"),
    False: ("bad", "does NOT fit"),
    None: ("muted", "memory limit unknown"),
}


def page_of(run: "DryRun") -> str:
    """The page of a dry run."""
    return document(run._subject(), [*_head(run), *_sections(run)])


def kinds_of_memory(run: "DryRun") -> list[tuple[str, int]]:
    """The contents of one device's HBM, in bytes by kind.

    Args:
        run: The dry run. If it does not fit, the kinds are those on the slice that it was sized on,
            or of the state alone.
    """
    s, m = run.state, run.memory
    kinds = [("weights", s.weights), ("optimizer", s.optimizer), ("batch", s.inputs)]
    if m:
        rest = m["arguments"] - sum(size for _, size in kinds)
        kinds += [
            ("other state, padding", max(0, rest)),
            ("temporaries and activations", m["temporaries"]),
            ("new state and outputs", max(0, m["outputs"] - m["aliased"])),
            ("program", m["code"]),
        ]
    return [(name, size) for name, size in kinds if size]


def memory_bars(run: "DryRun") -> Iterator[str]:
    """A bar with all kinds of memory against the HBM, and the meaning of its colours.

    Args:
        run: The dry run.
    """
    kinds = kinds_of_memory(run)
    whole = max(sum(size for _, size in kinds), run.total_bytes, run.limit_bytes or 0, 1)
    parts = [(size / whole, MEMORY[name], f"{name}: {size_text(size)}") for name, size in kinds]
    missing = run.total_bytes - sum(size for _, size in kinds)
    if missing > 0:
        parts.append((missing / whole, NONE, f"of no known kind: {size_text(missing)}"))
    limit = run.limit_bytes
    yield bar(parts, None if limit is None else limit / whole)
    words = [(colour, text) for _, colour, text in parts]
    yield legend(words)
    against = f" of {size_text(limit)} (the line)" if limit is not None else ""
    where = f"; by kind as on {run.sized_on}" if run.sized_on else ""
    yield f"<p>{html.escape(f'{size_text(run.total_bytes)}{against} on each device{where}')}</p>"


def _head(run: "DryRun") -> Iterator[str]:
    verdict, words = VERDICTS[run.fits]
    yield f'<h1>{html.escape(run._subject())}: <span class="{verdict}">{words}</span></h1>'
    yield from html_lines(run._first_lines())
    limit = f" of {size_text(run.limit_bytes)}" if run.limit_bytes is not None else ""
    tiles = [("HBM on each device", f"{size_text(run.total_bytes)}{limit}")]
    if run.estimate is not None:
        e = run.estimate
        tiles += [
            (f"{run._of}, estimate of effort {run.effort}", e.span_words),
            ("bound by", e.bound),
            *run._rates(),
        ]
    inner = "".join(f"<div><b>{html.escape(b)}</b>{html.escape(a)}</div>" for a, b in tiles)
    yield f'<div class="tiles">{inner}</div>'
    yield _explained(run, (name for name, _ in tiles))


def _sections(run: "DryRun") -> Iterator[str]:
    yield "<h2>Memory on each device</h2>"
    yield from memory_bars(run)
    yield html_table((), run._memory_rows())
    if run.estimate is not None:
        yield f"<h2>Time of a {run._of}</h2>{html_table((), run._time_rows())}"
        yield definitions(_WORDS_OF_TIMES)
    if run.cost is not None:
        yield f"<h2>Layers by {'cycles' if run.cost.cycles else 'operations'}</h2>"
        yield from _layers(run)
        yield "<h2>Collectives</h2>"
        yield from _collectives(run)
    for table in run._tables():
        if table.title.startswith(("largest", "gathered")) or table.title.endswith("hosts"):
            yield table.section()
    yield from ["<h2>Notes</h2>", *remarks(run)] if run._remarks() else []
    yield from html_lines(run._last_lines())
    yield from said(run)


def _explained(run: "DryRun", tiles: Iterable[str]) -> str:
    """What the words of the tiles mean."""
    e, shown = run.estimate, set(tiles)
    if e is None:
        return ""
    words = [
        (f"effort {run.effort}", EFFORTS[run.effort]),
        ("estimate", _ESTIMATE),
        (f"bound by {e.bound}", BOUNDS[e.bound]),
        *((word, meaning) for word, meaning in _WORDS_OF_TILES if word in shown),
    ]
    return definitions([*words, ("when measured", run._when_measured(e))])


def _layers(run: "DryRun") -> Iterator[str]:
    cost = run.cost
    if cost is None:
        return
    layers = layers_by_kind(cost)
    amounts = [amount_of(cost, layer) for layer in layers]
    largest = max([*amounts, 1])
    if cost.cycles:
        yield legend([(FORWARD, "forward and update"), (BACKWARD, "backward")])
    rows = []
    for c, amount in zip(layers, amounts, strict=True):
        back = c.backward_cycles if cost.cycles else 0
        parts = [
            ((amount - back) / largest, FORWARD, f"{amount - back:,}"),
            (back / largest, BACKWARD, f"backward {back:,}"),
        ]
        rows.append(
            (
                c.layer,
                TableCell("", amount, bar(parts)),
                TableCell(f"{c.cycles:,}" if cost.cycles else "-", c.cycles),
                TableCell(f"{back / c.cycles:.0%}" if c.cycles else "-", back / max(1, c.cycles)),
                TableCell(f"{c.flops / 1e9:,.3f}", c.flops),
                TableCell(size_text(c.hbm_bytes), c.hbm_bytes),
                TableCell(duration_text(c.link_seconds) if c.link_seconds else "-", c.link_seconds),
            )
        )
    header = ("layer", "share", "cycles", "backward", "GFLOP", "HBM traffic", "collectives")
    yield table_of_cells(header, rows)


def _collectives(run: "DryRun") -> Iterator[str]:
    groups = [] if run.cost is None else exchanges_by_kind(run.cost)
    if not groups:
        yield "<p>none: no device waits for another</p>"
        return
    rows = [
        (
            e.kind,
            ", ".join(e.axes) or "-",
            e.network,
            TableCell(size_text(e.bytes), e.bytes),
            TableCell(f"{e.times:g}", e.times),
            TableCell(duration_text(e.seconds) if e.seconds else "-", e.seconds),
            "yes" if e.overlapped else "no",
            e.layer,
        )
        for e in groups
    ]
    header = ("collective", "axes", "network", "bytes", "per step", "time", "overlapped", "layer")
    yield table_of_cells(header, rows)


def html_lines(lines: Sequence[str]) -> list[str]:
    """Lines of a report as one paragraph, none if there are none."""
    return [f"<p>{'<br>'.join(map(html.escape, lines))}</p>"] if lines else []


def said(run: "DryRun") -> list[str]:
    """The compiler's whole message, folded."""
    if not run.error:
        return []
    summary = "<summary>all that the compiler says</summary>"
    return [f"<details>{summary}<pre>{html.escape(run.error)}</pre></details>"]


def remarks(run: "DryRun") -> list[str]:
    """The remarks of a dry run, as paragraphs."""
    return [f"<p>{html.escape(remark)}</p>" for remark in run._remarks()]
