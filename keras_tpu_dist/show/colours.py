"""The colours of all pictures. A colour has the same meaning in every picture."""

from collections.abc import Iterable, Sequence

# Mesh axes in the order of the mesh: six colours of Okabe and Ito, which colour-blind readers can
# distinguish, ordered so that neighbours differ; then one colour for all further axes.
AXES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#dd6610", "#f0e442")
FURTHER_AXES = "#7f95ab"
# Not split over any axis; a link outside of all groups; memory of unknown kind.
NONE = "#999999"
# Empty parts: visible on white and on black.
EMPTY = "rgba(128,128,128,.22)"
# The contents of a device's memory.
MEMORY = {
    "weights": "#5b5bd6",
    "optimizer": "#9a98f2",
    "other state, padding": "#cccbfb",
    "batch": "#b07d4f",
    "temporaries and activations": "#8fb82f",
    "new state and outputs": "#cfe3a0",
    "program": "#7a6f64",
}
# The passes of a step.
FORWARD, BACKWARD = "#a9bcd6", "#6583ad"
# To distinguish items within a picture, with labels: pieces of a tensor, groups of chips, layouts
# in a chart. With more items, the colours repeat.
DISTINCT = (
    "#f2a69e",
    "#8fc7c2",
    "#c9b1e8",
    "#b9cf8b",
    "#9db8f0",
    "#e8c48a",
    "#e6a3cf",
    "#b8b2a7",
)
# Text on any of these colours, on every background.
ON_COLOUR = "#1a1a1a"


def axis_colours(names: Sequence[str]) -> dict[str, str]:
    """The colours of a mesh's axes.

    Args:
        names: The mesh axes, in the order of the mesh.

    Example:

    >>> axis_colours(("data", "model"))
    {'data': '#e69f00', 'model': '#56b4e9'}
    """
    return {name: AXES[n] if n < len(AXES) else FURTHER_AXES for n, name in enumerate(names)}


def axis_colour(axes: Iterable[str], names: Sequence[str]) -> str:
    """The colour for an array: that of the first axis that splits it.

    Args:
        axes: The axes that split it; none if it is replicated.
        names: The mesh axes, in the order of the mesh; other axes have no colour.
    """
    colours = axis_colours(names)
    return next((colours[axis] for axis in axes if axis in colours), NONE)


def axis_legend(mesh: dict[str, int]) -> list[tuple[str, str]]:
    """A legend for the colours of axes.

    Args:
        mesh: Axis names and sizes.

    Returns:
        Colours with their words: the axes, one entry for all axes without a colour of their own,
        and one for replicated arrays.
    """
    named = [(AXES[n], f"{name} {mesh[name]}") for n, name in enumerate(list(mesh)[: len(AXES)])]
    rest = ", ".join(f"{name} {mesh[name]}" for name in list(mesh)[len(AXES) :])
    further = [(FURTHER_AXES, f"further axes: {rest}")] if rest else []
    return [*named, *further, (NONE, "replicated: whole on every device")]


def distinct(number: int) -> str:
    """The colour of an item that a picture distinguishes from others.

    Args:
        number: Its number, from 0.
    """
    return DISTINCT[number % len(DISTINCT)]


def colours_left_out(count: int, what: str) -> str:
    """A note if items share a colour, or `""`.

    Args:
        count: The number of items.
        what: Their name, in the plural.
    """
    if count <= len(DISTINCT):
        return ""
    return f"{count} {what} share {len(DISTINCT)} colours"
