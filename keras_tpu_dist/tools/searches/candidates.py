"""Strategies to consider for a slice: meshes, plans, split optimizers, remat policies."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from keras_tpu_dist.common.checks import TEXT, require
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.hardware.mesh import build_mesh
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.layout.planner import BOTH, Planner, layout_named, planner_code
from keras_tpu_dist.layout.rules import LayoutRules
from keras_tpu_dist.strategy import TPUStrategy
from keras_tpu_dist.tools.hlo import Wire, seconds_over

# Splitting a weight further than this makes products too thin for the matrix units.
_MOST_MODEL_WAYS = 16

POLICIES = (None, "dots", "full")


@dataclass(frozen=True, repr=False)
class Candidate(Printed):
    """Arguments of a `TPUStrategy`.

    Attributes:
        mesh: Axis names and sizes.
        layout: The `layout` of `TPUStrategy`: `None`, the name of a plan, rules.
        shard_optimizer: Whether slots are split over the data axes.
        remat: A policy, or `None`.
    """

    mesh: tuple[tuple[str, int], ...]
    layout: Any = None
    shard_optimizer: bool = False
    remat: str | None = None

    @property
    def mesh_text(self) -> str:
        """The mesh in one line."""
        return " x ".join(f"{name} {n}" for name, n in self.mesh)

    @property
    def layout_text(self) -> str:
        """The layout in at most 40 characters."""
        text = "replicated" if self.layout is None else str(self.layout)
        return text if len(text) <= 40 else f"{text[:37]}..."

    @property
    def way(self) -> tuple[Any, ...]:
        """The mesh and the layout, without the other choices."""
        return self.mesh, repr(self.layout)

    @property
    def whatever_order(self) -> tuple[Any, ...]:
        """Everything except the order of the mesh's axes."""
        return tuple(sorted(self.mesh)), repr(self.layout), self.shard_optimizer, self.remat

    def strategy(self, topology: str | Topology | None = None) -> TPUStrategy:
        """The strategy.

        Args:
            topology: The slice, if you don't have it; `None` for the attached devices.
        """
        return TPUStrategy(
            dict(self.mesh),
            layout_named(self.layout),
            topology=topology,
            shard_optimizer=self.shard_optimizer,
            remat=self.remat,
        )

    @property
    def line(self) -> str:
        """The strategy as a line of Python, to copy into a program."""
        # Sizes may be NumPy's.
        arguments = [json.dumps(dict(self.mesh), default=int)]
        if self.layout is not None:
            arguments.append(_layout_code(layout_named(self.layout)))
        if self.shard_optimizer:
            arguments.append("shard_optimizer=True")
        if self.remat is not None:
            arguments.append(f"remat={json.dumps(self.remat)}")
        return f"strategy = ktd.TPUStrategy({', '.join(arguments)})"

    def __str__(self) -> str:
        return self.line.removeprefix("strategy = ")


def _layout_code(layout: Any) -> str:
    """A layout as Python; a layout without an expression becomes the variable `layout`."""
    if isinstance(layout, str):
        return json.dumps(layout)
    if isinstance(layout, LayoutRules):
        return repr(list(layout.rules))
    if isinstance(layout, Planner):
        return planner_code(layout)
    return repr(layout) if isinstance(layout, list) else "layout"


def candidates_of(among: Any) -> list[Candidate]:
    """The candidates that a user names, as mappings of arguments or as candidates."""
    several = isinstance(among, Sequence) and not isinstance(among, str)
    if not several or not among:
        raise value_error(
            "among is a list of strategies to compare.",
            received={"among": among},
            fix='Write for example among=[{"mesh": {"data": 8}, "layout": "fsdp"}].',
        )
    return [each if isinstance(each, Candidate) else _candidate_of(each) for each in among]


def _candidate_of(arguments: Any) -> Candidate:
    words = [field.name for field in fields(Candidate)]
    if not isinstance(arguments, Mapping) or not isinstance(arguments.get("mesh"), Mapping):
        raise value_error(
            f"A strategy to compare is a mapping with {', '.join(words)}, of which mesh is needed.",
            received={"among": arguments},
            fix='Write for example {"mesh": {"data": 2, "model": 4}, "layout": "tensor_parallel"}.',
        )
    for word in arguments:
        if word not in words:
            raise value_error(
                f"A strategy to compare has only {', '.join(words)}.",
                received={"among": arguments},
                fix=f"Leave {word!r} out.",
                name=str(word),
                choices=words,
            )
    options: dict[str, Any] = {**arguments, "mesh": tuple(arguments["mesh"].items())}
    require("a strategy to compare", TEXT, True, remat=options.get("remat"))
    return Candidate(**options)


def candidates(devices: int, topology: Topology | None = None) -> Iterator[Candidate]:
    """All candidates for a number of devices.

    Args:
        devices: The number of devices.
        topology: The slice, to distinguish orders of axes by its links; `None` for one order of
            each.
    """
    for mesh, layout in _layouts(devices, topology):
        axes = tuple(mesh.items())
        # If weights are split over the data axes, so are their slots.
        whole = layout in (None, "tensor_parallel") and mesh["data"] > 1
        for shard_optimizer in (False, True) if whole else (False,):
            for policy in POLICIES:
                yield Candidate(axes, layout, shard_optimizer, policy)


def _layouts(
    devices: int, topology: Topology | None
) -> Iterator[tuple[dict[str, int], str | None]]:
    for mesh, layout in _meshes(devices):
        yield mesh, layout
        other = dict(reversed(mesh.items()))
        if topology is not None and _seconds(mesh, topology) != _seconds(other, topology):
            yield other, layout


def _seconds(mesh: dict[str, int], topology: Topology) -> list[float]:
    """The time of a collective along every axis, by the mesh's place on the torus."""
    placed = build_mesh(mesh, topology.devices())
    wire = Wire.of(mesh, list(placed.devices.flat), topology)
    return [seconds_over(wire, "all-reduce", 2**30, (axis,)) for axis in sorted(mesh)]


def _meshes(devices: int) -> Iterator[tuple[dict[str, int], str | None]]:
    yield {"data": devices}, None
    if devices == 1:
        return
    yield {"fsdp": devices}, "fsdp"
    for model in _divisors(min(devices, _MOST_MODEL_WAYS)):
        if model == 1 or devices % model:
            continue
        yield {"data": devices // model, "model": model}, "tensor_parallel"
        if devices > model:
            yield {"fsdp": devices // model, "model": model}, BOTH


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]
