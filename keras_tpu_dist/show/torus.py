"""Draws collectives on the torus: the groups of chips that exchange data, and their links."""

import math
from collections.abc import Sequence

from keras_tpu_dist.hardware.torus import Link, Place, Torus
from keras_tpu_dist.show.colours import NONE, distinct
from keras_tpu_dist.show.svg import svg_box, svg_document, svg_line, svg_text

# A drawing of more chips would be unreadable, so only a part of a larger torus is drawn.
MOST_CHIPS = 1024
_NARROWEST, _WIDEST, _WIDTH = 26, 64, 450


def torus_svg(
    torus: Torus, mesh: Sequence[tuple[str, int]], axes: Sequence[str], weight: float
) -> str:
    """Draws the chips of a slice and the links they use; a group of chips has one colour.

    Args:
        weight: Their bytes as a share of the largest of all axes: the thickness of the links.

    Returns:
        An SVG. The planes of a torus of three dimensions are drawn behind each other; links that
        lead through chips of other groups are grey.
    """
    plan = _Paper(shown_sides(torus.sides))
    idle = [plan.link(link, NONE, 1.0, ' opacity=".45"') for link in torus.all_links()]
    cores = 1 + max(place[4] for place in torus.places)
    thick = (2.0 + 4.0 * weight) * (0.5 if plan.behind else 1.0)
    shared, own, chips = [], [], []
    for number, group in enumerate(torus.groups(mesh, axes)):
        colour, mark = distinct(number), f' data-group="{number}"'
        members = {torus.places[i][1:4] for i in group}
        for link in torus.links(group):
            if members.issuperset(link[:2]):
                own.append(plan.link(link, colour, thick, mark))
            else:
                shared.append(plan.link(link, NONE, thick, ""))
        for i in group:
            words = _words(torus, mesh, i)
            chips.append(
                (torus.places[i][3], plan.chip(torus.places[i], cores, colour, words, mark))
            )
    # Planes further back are drawn first.
    drawn = [svg for _, svg in sorted(chips, key=lambda chip: -chip[0])]
    return svg_document(*plan.size, [*idle, *dict.fromkeys(shared), *own, *drawn, *plan.ticks()])


def shown_sides(sides: Place) -> Place:
    """The sides of the drawn part of a torus."""
    shown = list(sides)
    while math.prod(shown) > MOST_CHIPS:
        longest = shown.index(max(shown))
        shown[longest] = -(-shown[longest] // 2)
    return (shown[0], shown[1], shown[2])


def _words(torus: Torus, mesh: Sequence[tuple[str, int]], number: int) -> str:
    _, x, y, z, core = torus.places[number]
    at = []
    rest = number
    for name, size in reversed(mesh):
        rest, index = divmod(rest, size)
        at.append(f"{name}={index}")
    chip = ",".join(map(str, (x, y, z)[: 3 if torus.sides[2] > 1 else 2]))
    return f"chip {chip}" + (f" core {core}" if core else "") + f": {' '.join(reversed(at))}"


class _Paper:
    """The positions of chips in the drawing: x to the right, y downwards, z backwards."""

    def __init__(self, sides: Place):
        self.sides = sides
        self.behind = 13 if sides[2] > 1 else 0
        wanted = max(_NARROWEST, min(_WIDEST, _WIDTH // max(sides[:2])))
        self.step = max(wanted, self.behind * sides[2] + 14)
        self.chip_size = 15 if sides[2] == 1 else 9
        self.depth = self.behind * (sides[2] - 1)
        self.size = (
            (sides[0] - 0.4) * self.step + self.depth + 46,
            (sides[1] - 0.4) * self.step + self.depth + (78 if self.behind else 48),
        )

    def at(self, chip: Place) -> tuple[float, float]:
        x, y, z = chip
        return (
            40 + (x + 0.3) * self.step + self.behind * z,
            38 + (y + 0.3) * self.step + self.depth - self.behind * z,
        )

    def has(self, *chips: Sequence[int]) -> bool:
        return all(c < n for chip in chips for c, n in zip(chip, self.sides))

    def link(self, link: Link, colour: str, width: float, more: str) -> str:
        one, other, closes = link
        if not self.has(one, other):
            return ""
        if not closes:
            return svg_line(self.at(one), self.at(other), colour, width, more)
        # A link that closes a ring leaves the drawing on both sides.
        side = next(d for d in range(3) if one[d] != other[d])
        reach = 0.3 * self.step if side < 2 else 8.0
        way = ((1.0, 0.0), (0.0, 1.0), (0.7, -0.7))[side]
        dashed = f'{more} stroke-dasharray="3 2"'
        ends = ((one, 1), (other, -1))
        return "".join(
            svg_line(
                self.at(chip),
                (
                    self.at(chip)[0] + sign * reach * way[0],
                    self.at(chip)[1] + sign * reach * way[1],
                ),
                colour,
                width,
                dashed,
            )
            for chip, sign in ends
        )

    def chip(self, place: Sequence[int], cores: int, colour: str, words: str, mark: str) -> str:
        if not self.has(place[1:4]):
            return ""
        x, y = self.at((place[1], place[2], place[3]))
        part = self.chip_size / cores
        left = x - self.chip_size / 2 + place[4] * part
        size = (part - (1 if cores > 1 else 0), self.chip_size)
        return svg_box(left, y - self.chip_size / 2, *size, colour, words, mark)

    def ticks(self) -> list[str]:
        lines = [svg_text(6, 14, "y ↓  x →" + ("  z ↗" if self.behind else ""))]
        every = 1 if max(self.sides) <= 16 else 4
        for x in range(0, self.sides[0], every):
            place = self.at((x, self.sides[1] - 1 if self.behind else 0, 0))
            below = 0.3 * self.step + 18 if self.behind else -16
            lines.append(svg_text(place[0], place[1] + below, str(x), "middle"))
        for y in range(0, self.sides[1], every):
            lines.append(svg_text(24, self.at((0, y, 0))[1] + 4, str(y), "end"))
        return lines
