"""The colours of all pictures: each has one meaning, wherever it is drawn."""

from collections.abc import Iterable, Sequence

# A mesh axis, by its place in the mesh (six of Okabe and Ito, which colour-blind readers
# tell apart, in an order that stays apart side by side; then the axes after them, all in one).
AXES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#dd6610", "#f0e442")
FURTHER_AXES = "#7f95ab"
# Not split over any axis; a link that is no group's; memory whose kind is unknown.
NONE = "#999999"
# From the least of a range to its most.
FAINT = "rgba(153,153,153,.45)"
# What is empty: seen on white and on black; and in figures of matplotlib.
EMPTY, EMPTY_FIGURE = "rgba(128,128,128,.22)", "#e3e3e3"
# What a device's memory holds.
MEMORY = {
    "weights": "#5b5bd6",
    "optimizer": "#9a98f2",
    "other state, padding": "#cccbfb",
    "batch": "#b07d4f",
    "temporaries and activations": "#8fb82f",
    "new state and outputs": "#cfe3a0",
    "program": "#7a6f64",
}
# When a step spends its time.
FORWARD, BACKWARD = "#a9bcd6", "#6583ad"
# Things of one picture that are told apart, with words beside them: pieces of a tensor, groups of
# chips, layouts in a chart. They come again from the start if there are more.
APART = ("#f2a69e", "#8fc7c2", "#c9b1e8", "#b9cf8b", "#9db8f0", "#e8c48a", "#e6a3cf", "#b8b2a7")
# Text on any of these, whatever the ground around it.
ON_COLOUR = "#1a1a1a"


def axis_colours(names: Sequence[str]) -> dict[str, str]:
    """The colour of each axis of a mesh.

    Args:
        names: The mesh axes, in the order of the mesh.

    Example:

    >>> axis_colours(("data", "model"))
    {'data': '#e69f00', 'model': '#56b4e9'}
    """
    return {name: AXES[n] if n < len(AXES) else FURTHER_AXES for n, name in enumerate(names)}


def axis_colour(axes: Iterable[str], names: Sequence[str]) -> str:
    """The colour of what some axes split: that of the first of them.

    Args:
        axes: The axes that split it; none if it is replicated.
        names: The mesh axes, in the order of the mesh; an axis that is none of them has no colour.
    """
    colours = axis_colours(names)
    return next((colours[each] for each in axes if each in colours), NONE)


def axis_legend(mesh: dict[str, int]) -> list[tuple[str, str]]:
    """What the colours of axes mean.

    Args:
        mesh: Axis names and sizes.

    Returns:
        Colours with their words: each axis, those without a colour of their own together, and what
        is replicated.
    """
    named = [(AXES[n], f"{name} {mesh[name]}") for n, name in enumerate(list(mesh)[: len(AXES)])]
    rest = ", ".join(f"{name} {mesh[name]}" for name in list(mesh)[len(AXES) :])
    further = [(FURTHER_AXES, f"further axes: {rest}")] if rest else []
    return [*named, *further, (NONE, "replicated: whole on every device")]


def apart(number: int) -> str:
    """The colour of one of the things that a picture tells apart.

    Args:
        number: Its number, from 0.
    """
    return APART[number % len(APART)]


def colours_left_out(count: int, what: str) -> str:
    """What to say if things share a colour, or `""`.

    Args:
        count: How many things there are.
        what: What they are, in the plural.
    """
    if count <= len(APART):
        return ""
    return f"{count} {what} share {len(APART)} colours"
