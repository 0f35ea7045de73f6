"""A dry run as a page: bars of memory and time, collectives over the torus, tables that sort."""

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keras_tpu_dist.show.page import Cell, bar, document, fragment, legend, sortable
from keras_tpu_dist.show.svg import COLOURS, GREY
from keras_tpu_dist.show.text import duration_text, html_table, size_text
from keras_tpu_dist.dryrun.rows import Exchange, exchanges
from keras_tpu_dist.hardware.torus import Torus
from keras_tpu_dist.show.torus import shown_sides, torus_svg

if TYPE_CHECKING:
    from keras_tpu_dist.dryrun.report import DryRun

_FORWARD, _BACKWARD = COLOURS[1], COLOURS[0]
_VERDICT = {
    True: ("good", "fits"),
    False: ("bad", "does NOT fit"),
    None: ("muted", "memory limit unknown"),
}


def report_page(run: "DryRun") -> str:
    """A dry run as a whole page.

    Args:
        run: The dry run.
    """
    return document(run._subject(), [*_head(run), *_sections(run)])


def report_fragment(run: "DryRun") -> str:
    """A dry run as a notebook shows it: without what needs a script.

    Args:
        run: The dry run.
    """
    error = [f"<p>the compiler says: {html.escape(run.error)}</p>"] if run.error else []
    tables = [
        f"<p>{html.escape(title)}</p>{html_table(header, rows)}"
        for title, header, rows in run._tables()
    ]
    return fragment(run._headline(), *error, *memory_bars(run), *tables, *_remarks(run))


def kinds_of_memory(run: "DryRun") -> list[tuple[str, int]]:
    """What the HBM of one device holds, in bytes by kind.

    Args:
        run: The dry run; where it does not fit, the kinds are those of the slice that it was sized
            on, or of the state alone.
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
    """One bar of all kinds of memory against the HBM, with what its colours mean.

    Args:
        run: The dry run.
    """
    kinds = kinds_of_memory(run)
    whole = max(sum(size for _, size in kinds), run.total_bytes, run.limit_bytes or 0, 1)
    parts = [
        (size / whole, COLOURS[n % len(COLOURS)], f"{name}: {size_text(size)}")
        for n, (name, size) in enumerate(kinds)
    ]
    missing = run.total_bytes - sum(size for _, size in kinds)
    if missing > 0:
        parts.append((missing / whole, GREY, f"not told by kind: {size_text(missing)}"))
    limit = run.limit_bytes
    yield bar(parts, None if limit is None else limit / whole)
    words = [(colour, text) for _, colour, text in parts]
    yield legend(words)
    against = f" of {size_text(limit)} (the line)" if limit is not None else ""
    where = f"; by kind as on {run.sized_on}" if run.sized_on else ""
    yield f"<p>{html.escape(f'{size_text(run.total_bytes)}{against} on each device{where}')}</p>"


def _head(run: "DryRun") -> Iterator[str]:
    verdict, words = _VERDICT[run.fits]
    yield f'<h1>{html.escape(run._subject())}: <span class="{verdict}">{words}</span></h1>'
    if run.error:
        yield f'<p class="bad">the compiler says: {html.escape(run.error)}</p>'
    limit = f" of {size_text(run.limit_bytes)}" if run.limit_bytes is not None else ""
    tiles = [("HBM on each device", f"{size_text(run.total_bytes)}{limit}")]
    if run.estimate is not None:
        e = run.estimate
        tiles += [
            ("step, estimated", duration_text(e.step)),
            ("bound by", e.bound),
            ("matrix units busy", f"{e.compute / e.step:.1%}"),
            ("samples per second", f"{run.samples_per_second:,.0f}"),
        ]
    if run.mfu:
        tiles.append(("model FLOPs utilisation", f"{run.mfu:.1%}"))
    if run.tokens_per_second:
        tiles.append(("tokens per second", f"{run.tokens_per_second:,.0f}"))
    inner = "".join(f"<div><b>{html.escape(b)}</b>{html.escape(a)}</div>" for a, b in tiles)
    yield f'<div class="tiles">{inner}</div>'


def _sections(run: "DryRun") -> Iterator[str]:
    yield "<h2>Memory on each device</h2>"
    yield from memory_bars(run)
    yield from _kinds(run)
    if run.estimate is not None:
        yield "<h2>Time of a step</h2>"
        yield from _times(run)
    if run.cost is not None:
        yield f"<h2>Layers by {'cycles' if run.cost.cycles else 'operations'}</h2>"
        yield from _layers(run)
        yield "<h2>Collectives</h2>"
        yield from _collectives(run)
    for title, header, rows in run._tables():
        if title.startswith(("largest", "gathered")) or title.endswith("hosts"):
            yield f"<h2>{html.escape(title.capitalize())}</h2>{html_table(header, rows)}"
    yield from ["<h2>Notes</h2>", *_remarks(run)] if run._remarks() else []


def _kinds(run: "DryRun") -> Iterator[str]:
    kinds = kinds_of_memory(run)
    largest = max((size for _, size in kinds), default=1)
    limit = run.limit_bytes
    rows = [
        (
            name,
            Cell(size_text(size), size),
            Cell(f"{size / limit:.2%}", size) if limit else "-",
            Cell("", size, bar([(size / largest, COLOURS[n % len(COLOURS)], size_text(size))])),
        )
        for n, (name, size) in enumerate(kinds)
    ]
    yield sortable(("kind", "bytes", "of the HBM", "against the largest"), rows)


def _times(run: "DryRun") -> Iterator[str]:
    e = run.estimate
    if e is None:
        return
    times = [
        ("matrix operations at peak", e.compute),
        ("HBM traffic at full speed", e.hbm),
        ("collectives at full speed", e.link),
        ("of them not overlapped", e.exposed_link),
        ("of them between slices", e.dcn),
        ("compiler's cycles at the clock", e.kernels),
        ("step, estimated", e.step),
    ]
    rows = [
        (name, Cell(duration_text(s), s), Cell("", s, bar([(s / e.step, _FORWARD, name)])))
        for name, s in times
        if s or name != "of them between slices"
    ]
    yield sortable(("what", "time", "of the step"), rows)


def _layers(run: "DryRun") -> Iterator[str]:
    cost = run.cost
    if cost is None:
        return
    amounts = [c.cycles if cost.cycles else c.flops for c in cost.layers]
    largest = max([*amounts, 1])
    if cost.cycles:
        yield legend([(_FORWARD, "forward and update"), (_BACKWARD, "backward")])
    rows = []
    for c, amount in zip(cost.layers, amounts):
        back = c.backward_cycles if cost.cycles else 0
        parts = [
            ((amount - back) / largest, _FORWARD, f"{amount - back:,}"),
            (back / largest, _BACKWARD, f"backward {back:,}"),
        ]
        rows.append(
            (
                c.layer,
                Cell("", amount, bar(parts)),
                Cell(f"{c.cycles:,}" if cost.cycles else "-", c.cycles),
                Cell(f"{back / c.cycles:.0%}" if c.cycles else "-", back / max(1, c.cycles)),
                Cell(f"{c.flops / 1e9:,.3f}", c.flops),
                Cell(size_text(c.hbm_bytes), c.hbm_bytes),
                Cell(duration_text(c.link_seconds) if c.link_seconds else "-", c.link_seconds),
            )
        )
    header = ("layer", "share", "cycles", "backward", "GFLOP", "HBM traffic", "collectives")
    yield sortable(header, rows)


def _collectives(run: "DryRun") -> Iterator[str]:
    found = [] if run.cost is None else list(exchanges(run.cost))
    if not found:
        yield "<p>none: no device waits for another</p>"
        return
    if run.torus is not None:
        yield from _panels(run, run.torus, found)
    rows = [
        (
            e.kind,
            ", ".join(e.axes) or "-",
            e.network,
            Cell(size_text(e.bytes), e.bytes),
            Cell(str(e.times), e.times),
            Cell(duration_text(e.seconds) if e.seconds else "-", e.seconds),
            "yes" if e.overlapped else "no",
            e.layer,
        )
        for e in found
    ]
    header = ("collective", "axes", "network", "bytes", "per step", "time", "overlapped", "layer")
    yield sortable(header, rows)


def _panels(run: "DryRun", torus: Torus, found: list[Exchange]) -> Iterator[str]:
    """One drawing of the torus for each set of axes that collectives cross."""
    by_axes: dict[tuple[str, ...], list[Exchange]] = {}
    for each in found:
        if each.axes:
            by_axes.setdefault(each.axes, []).append(each)
    if not by_axes:
        return
    yield (
        '<p class="muted">Chips of one colour exchange with each other over links of that colour; '
        "thick grey ones lead past other chips, dashed ends close a ring. Rest the mouse on a chip "
        "to see its group.</p>"
    )
    most = max(sum(e.bytes for e in group) for group in by_axes.values())
    figures = []
    for axes, group in by_axes.items():
        svg = torus_svg(torus, run.mesh, axes, sum(e.bytes for e in group) / max(1, most))
        figures.append(f"<figure>{_caption(run, torus, axes, group)}{svg}</figure>")
    yield f'<div class="panels">{"".join(figures)}</div>'


def _caption(run: "DryRun", torus: Torus, axes: tuple[str, ...], group: list[Exchange]) -> str:
    size = dict(run.mesh)
    names = " x ".join(f"{a} {size.get(a, '')}".strip() for a in axes)
    kinds: dict[tuple[str, str], list] = {}
    for e in group:
        total = kinds.setdefault((e.kind, e.network), [0, 0, 0.0])
        total[0] += e.times
        total[1] += e.bytes
        total[2] += e.seconds
    lines = [
        f"{times} {kind} over {network}, {size_text(moved)} per step"
        + (f", {duration_text(seconds)} at full speed" if seconds else "")
        for (kind, network), (times, moved, seconds) in kinds.items()
    ]
    shown = shown_sides(torus.sides)
    if shown != torus.sides:
        part, whole = ("x".join(map(str, sides)) for sides in (shown, torus.sides))
        lines.append(f"drawn: {part} of {whole} chips")
    if torus.slices > 1:
        lines.append(f"drawn: one of {torus.slices} slices")
    inner = "".join(f"<br>{html.escape(line)}" for line in lines)
    return f"<figcaption><b>axis {html.escape(names)}</b>{inner}</figcaption>"


def _remarks(run: "DryRun") -> list[str]:
    return [f"<p>{html.escape(remark)}</p>" for remark in run._remarks()]
