"""Rules that map a variable's path and shape to its layout on the mesh, with the reason."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from jax.sharding import Mesh

from keras_tpu_dist.common.axes import Axes, axis_size, names_in, spell_out
from keras_tpu_dist.common.checks import checked_arguments
from keras_tpu_dist.common.errors import message, value_error


@dataclass(frozen=True)
class View:
    """How a layer reshapes a weight that holds features of several kinds one after another.

    Attributes:
        shape: The weight's shape, with a dimension for each kind.
    """

    shape: tuple[int, ...]
    layer: str


@dataclass(frozen=True)
class Gathered:
    """Features that a layer computes in parts, as its weight is split, and returns whole.

    Attributes:
        sizes: The sizes of the features: the last dimensions of its outputs.
    """

    layer: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """How a tensor is split, and why.

    Attributes:
        axes: One entry per dimension; `()` means replicated.
        reason: The rule or default that decided, for `explain`.
        alternatives: The other layouts considered, with the reasons against them.
        used: The axes of the tensor in computations, if they differ; they need not split it evenly.
        view: The view that `used` refers to, if that is not the weight as stored.
        gathered: The features that a layer computes in parts with it, and returns whole.
    """

    axes: Axes
    reason: str
    alternatives: tuple[str, ...] = ()
    used: Axes = ()
    view: View | None = None
    gathered: Gathered | None = None


# Flags for a whole pattern, such as "(?i)dense/kernel", are only allowed at its very start.
_FLAGS = re.compile(r"(?:\(\?[aLimsux]+\))?")


class LayoutRules:
    """Ordered rules from variable paths to mesh axes; the first match wins.

    A pattern matches whole path segments from the right: `"dense/kernel"` matches both
    `dense/kernel` and `sequential/dense/kernel`, but not `my_dense/kernel`. It may be any regular
    expression. A rule for an activation ends in `/output` after the layer's path.

    Args:
        rules: `(pattern, axes)` pairs, or a mapping of them. `axes` has one entry per dimension:
            `None` (not split), a mesh axis, or a tuple of mesh axes that split it together. Missing
            entries at the end mean `None`.

    Raises:
        ValueError: If a rule is not a pair, a pattern is not a regular expression, an entry is
            neither `None` nor axis names, or an axis occurs twice in one rule.

    Example:

    >>> rules = LayoutRules([("dense/kernel", (None, "model")), ("kernel", ("data",))])
    >>> rules.match("sequential/dense/kernel")
    0
    >>> rules.match("sequential/conv2d/kernel")
    1
    """

    def __init__(self, rules: Iterable[tuple[str, Sequence]] | Mapping[str, Sequence]):
        if not isinstance(rules, Iterable):
            raise value_error(
                "LayoutRules takes (pattern, axes) pairs, or a mapping of them.",
                received={"rules": rules},
                fix='Write for example LayoutRules([("dense/kernel", (None, "model"))]).',
            )
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        self._rules = tuple(_checked_rule(rule) for rule in pairs)
        self._compiled = tuple(re.compile(_from_the_right(pattern)) for pattern, _ in self._rules)

    @property
    def rules(self) -> tuple[tuple[str, Axes], ...]:
        """The `(pattern, axes)` pairs, in order."""
        return self._rules

    @checked_arguments
    def matches(self, path: str) -> list[int]:
        """The indices of all rules that match `path`, the winner first.

        Args:
            path: The path of a variable, or of a layer's output (`".../output"`).
        """
        return [i for i, pattern in enumerate(self._compiled) if pattern.fullmatch(path)]

    def match(self, path: str) -> int | None:
        """The index of the rule that applies to `path`, or `None`.

        See `matches`.
        """
        return next(iter(self.matches(path)), None)

    def axis_names(self) -> set[str]:
        """Every mesh axis that a rule uses."""
        return {name for _, axes in self._rules for name in names_in(axes)}

    def to_json(self) -> str:
        """The rules as JSON, for `from_json`."""
        return json.dumps([[pattern, axes] for pattern, axes in self._rules], indent=1)

    @classmethod
    def from_json(cls, text: str) -> "LayoutRules":
        """Creates rules from the JSON of `to_json`.

        Args:
            text: A JSON list of `[pattern, axes]` pairs.

        Raises:
            ValueError: If it is not JSON, or a pattern or an entry in it is malformed.
        """
        received = {"json": text[:80] if isinstance(text, str) else text}
        rules = None
        try:
            if isinstance(text, str):
                rules = json.loads(text)
        except (ValueError, RecursionError) as error:
            received["error"] = str(error)
        if not isinstance(rules, list):
            raise value_error(
                "Layout rules in JSON are a list of [pattern, axes] pairs.",
                received=received,
                fix='Write for example [["dense/kernel", [null, "model"]]].',
            )
        return cls(rules)

    @classmethod
    def from_layout_map(cls, layout_map: keras.distribution.LayoutMap) -> "LayoutRules":
        """The rules of a stock `LayoutMap`, whose patterns must match the whole path.

        Args:
            layout_map: The map; its keys are the patterns.

        Raises:
            ValueError: If a key or its axes are malformed.
        """
        if not isinstance(layout_map, keras.distribution.LayoutMap):
            raise value_error(
                "from_layout_map takes a keras.distribution.LayoutMap.",
                received={"layout_map": layout_map},
                fix="Give (pattern, axes) pairs to LayoutRules itself.",
            )
        return cls((_within("^", key, "$"), layout.axes) for key, layout in layout_map.items())

    def __len__(self):
        return len(self._rules)

    def __eq__(self, other):
        return isinstance(other, LayoutRules) and self._rules == other._rules

    def __hash__(self):
        return hash(self._rules)

    def __repr__(self):
        return f"LayoutRules({list(self._rules)!r})"


class LayoutError(ValueError):
    """A layout that the mesh or a variable cannot have.

    Attributes:
        code: The code of the finding of `lint`.
    """

    code = "unknown-axis"


class TooManyEntriesError(LayoutError):
    """A layout has more entries than its variable has dimensions."""

    code = "too-long"


class IndivisibleError(LayoutError):
    """A dimension is not divisible by the mesh axes that split it."""

    code = "indivisible"


def check_axis_names(rules: Iterable[tuple[str, Axes]], axis_names: Sequence[str]) -> None:
    """Raises a `ValueError` if a rule names an axis that the mesh does not have.

    Args:
        rules: The rules; `"logical"` in them means all logical sub-axes of the mesh.
        axis_names: The mesh's axes.
    """
    for pattern, axes in rules:
        names = names_in(spell_out(axes, axis_names))
        if len(set(names)) != len(names):
            raise LayoutError(
                message(
                    'The axis "logical" means all logical sub-axes of the mesh, and a mesh axis '
                    "can split only one dimension of a tensor.",
                    received={"rule": (pattern, axes), "mesh axes": tuple(axis_names)},
                    fix="Use the sub-axes alone.",
                )
            )
        for name in names:
            if name not in axis_names:
                raise LayoutError(
                    message(
                        "A layout rule may only use axes of the mesh.",
                        received={"rule": (pattern, axes), "mesh axes": tuple(axis_names)},
                        fix=f"Use names among {', '.join(axis_names)}.",
                        name=name,
                        choices=axis_names,
                    )
                )


def decide(path: str, layout: LayoutRules | keras.distribution.LayoutMap | None) -> Decision | None:
    """Looks a path up in the rules or the stock layout map.

    Args:
        path: The path of a variable, or of a layer's output (`".../output"`).
        layout: The rules, in the form that the user gave.
    """
    if isinstance(layout, LayoutRules):
        index = layout.match(path)
        if index is None:
            return None
        pattern, axes = layout.rules[index]
        others = tuple(
            f"rule {i} {layout.rules[i][0]!r} also matches, but comes later"
            for i in layout.matches(path)[1:]
        )
        return Decision(axes, f"rule {index} {pattern!r}", others)
    if isinstance(layout, keras.distribution.LayoutMap):
        tensor_layout = layout[path]
        if tensor_layout is None:
            return None
        return Decision(tuple(tensor_layout.axes), f"LayoutMap {matching(layout, path)[0]!r}")
    return None


def patterns(layout: Any) -> list[str]:
    """The patterns of rules or of a stock layout map, in order; none for anything else.

    Args:
        layout: A layout in any form, or `None`.
    """
    if isinstance(layout, LayoutRules):
        return [pattern for pattern, _ in layout.rules]
    return list(layout) if isinstance(layout, keras.distribution.LayoutMap) else []


def matching(layout: Any, path: str) -> list[str]:
    """The patterns that match a path, the winner first, matched as this layout matches.

    Args:
        layout: `LayoutRules` or a stock `LayoutMap`; other layouts have no patterns.
        path: The path of a variable, or of a layer's output (`".../output"`).
    """
    if isinstance(layout, LayoutRules):
        return [layout.rules[i][0] for i in layout.matches(path)]
    if path in patterns(layout):
        return [path]
    return [pattern for pattern in patterns(layout) if re.fullmatch(pattern, path)]


def dead_patterns(layout: Any, paths: Iterable[str]) -> list[str]:
    """The patterns that match none of the paths.

    Args:
        layout: `LayoutRules` or a stock `LayoutMap`.
        paths: The paths of a model's variables, and of its layers' outputs.

    Example:

    >>> dead_patterns(LayoutRules([("dense/kernal", ("model",))]), ["m/dense/kernel"])
    ['dense/kernal']
    """
    alive = {pattern for path in paths for pattern in matching(layout, path)}
    return [pattern for pattern in patterns(layout) if pattern not in alive]


def nearest_path(pattern: str, paths: Iterable[str]) -> str | None:
    """The existing path that is most similar to a pattern, or `None`.

    Args:
        pattern: A pattern that matches nothing.
        paths: The existing paths.
    """
    plain = re.sub(r"\\[dwSs]|[\^$.*+?()\[\]{}|\\]", "", pattern).strip("/")
    segments = plain.count("/") + 1
    scored = [
        (difflib.SequenceMatcher(None, plain, "/".join(path.split("/")[-segments:])).ratio(), path)
        for path in paths
    ]
    score, path = max(scored, key=lambda pair: pair[0], default=(0.0, None))
    return path if score >= 0.5 else None


def checked(decision: Decision, path: str, shape: Sequence[int], mesh: Mesh) -> Decision:
    """Validates a decision against a variable's shape and the mesh.

    Args:
        decision: The decision of a rule.
        path: The variable's path, for the error.
        shape: The variable's shape.
        mesh: The mesh.
    """
    received = {
        "variable": path,
        "shape": tuple(shape),
        "layout": decision.axes,
        "from": decision.reason,
        "mesh": dict(mesh.shape),
    }
    if len(decision.axes) > len(shape):
        raise TooManyEntriesError(
            message(
                "A layout cannot have more entries than the variable has dimensions.",
                received=received,
                fix=f"Give at most {len(shape)}, or another rule for this variable.",
            )
        )
    for dim, entry in enumerate(decision.axes):
        ways = axis_size(mesh, entry)
        if shape[dim] % ways:
            raise IndivisibleError(
                message(
                    f"A split dimension must be divisible by its mesh axes: dimension {dim} has "
                    f"{shape[dim]} elements for {ways} shards.",
                    received=received,
                    fix=f"Make it {shape[dim] // ways * ways or ways} or "
                    f"{(shape[dim] // ways + 1) * ways}, split another dimension, or replicate "
                    "it with None.",
                )
            )
    return decision


def _from_the_right(pattern: str) -> str:
    """A regular expression that matches whole segments of a path from the right."""
    return _within("(?:.*/)?", pattern)


def _within(before: str, pattern: str, after: str = "") -> str:
    rest = _FLAGS.sub("", pattern, count=1)
    return f"{pattern.removesuffix(rest)}{before}(?:{rest}){after}"


def _checked_rule(rule) -> tuple[str, Axes]:
    fix = 'Write for example ("dense/kernel", (None, "model")).'
    if not (isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)):
        raise value_error(
            "A layout rule is a (pattern, axes) pair.", received={"rule": rule}, fix=fix
        )
    pattern, axes = rule
    try:
        re.compile(pattern)
        re.compile(_from_the_right(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise value_error(
            "The pattern of a layout rule is a regular expression.",
            received=f"pattern={pattern!r}, which fails with: {error}.",
            fix="Escape special characters with a backslash.",
        ) from error
    if axes is None:
        axes = ()
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise value_error(
            "The axes of a layout rule are a tuple with one entry per dimension.",
            received={"pattern": pattern, "axes": axes},
            fix=fix,
        )
    entries = tuple(tuple(e) if isinstance(e, list) else e for e in axes)
    for entry in entries:
        names = names_in((entry,)) if isinstance(entry, (str, tuple)) or entry is None else [entry]
        if not all(isinstance(name, str) for name in names):
            raise value_error(
                "An entry of a layout is None, an axis name or a tuple of axis names.",
                received={"pattern": pattern, "entry": entry},
                fix=fix,
            )
    names = names_in(entries)
    if len(set(names)) != len(names):
        raise value_error(
            "A mesh axis can split only one dimension of a tensor.",
            received={"pattern": pattern, "axes": entries},
            fix="Use an axis only once.",
        )
    return pattern, entries
