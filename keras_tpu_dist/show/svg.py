"""SVG drawings that are readable on light and dark backgrounds."""

import html
from collections.abc import Sequence


def svg_document(width: float, height: float, parts: Sequence[str]) -> str:
    """An SVG of some parts.

    Args:
        width: The width of the drawing in pixels.
        height: Its height in pixels.
        parts: SVG elements as text, later ones drawn on top of earlier ones.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def svg_text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    bold: bool = False,
    colour: str = "currentColor",
) -> str:
    """A line of text in an SVG.

    Args:
        x: The position of the anchor, in pixels from the left.
        y: Its baseline, in pixels from the top.
        text: The line as plain text; it is escaped here.
        anchor: The part of the text at `x`: `"start"`, `"middle"` or `"end"`.
        bold: Whether it is bold.
        colour: Its colour; by default that of the text around the picture.
    """
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}"{weight}>{html.escape(text)}</text>'


def svg_box(
    x: float, y: float, width: float, height: float, fill: str, title: str = "", more: str = ""
) -> str:
    """A rectangle in an SVG.

    Args:
        x: Its left side, in pixels.
        y: Its top.
        width: Its width.
        height: Its height.
        fill: Its colour.
        title: The tooltip, as plain text; it is escaped here.
        more: Further SVG attributes.
    """
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    inner = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect {place} rx="3" fill="{fill}"{more}>{inner}</rect>'


def svg_line(
    start: tuple[float, float], end: tuple[float, float], colour: str, width: float, more: str = ""
) -> str:
    """A straight line in an SVG.

    Args:
        start: Its start, in pixels.
        end: Its end, in pixels.
        colour: Its colour.
        width: Its width, in pixels.
        more: Further SVG attributes.
    """
    (x1, y1), (x2, y2) = start, end
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width:.1f}"{more}/>'
