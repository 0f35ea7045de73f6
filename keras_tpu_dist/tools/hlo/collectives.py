"""Collectives of a compiled program: which devices exchange how many bytes over which links."""

import functools
import math
import re
from dataclasses import dataclass

import numpy as np

from keras_tpu_dist.programs.device_groups import Groups, replica_groups
from keras_tpu_dist.tools.hlo.operations import OperationKind, operation
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program
from keras_tpu_dist.tools.hlo.wire import Wire, latency_of, seconds_of, sent_bytes

_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclass(frozen=True)
class Collective:
    """A collective as one device sees it.

    Args:
        kind: `"all-reduce"` and so on.
        name: Its name in the program.
        layer: The Keras layer it comes from.
        phase: `"forward"` or `"backward"`.
        axes: Mesh axes that it crosses.
        group_size: Devices that take part together.
        bytes: Bytes of the whole array that is reduced or gathered.
        times: How often it runs per step; a fraction if it runs once in a launch of several steps.
        asynchronous: Whether the compiler overlaps it with other work.
        network: `"ICI"` within a slice, `"DCN"` between slices.
        sent_bytes: Bytes that one device sends in one run.
        seconds: Minimal time of one run by the speed of its links, and a microsecond for each hop
            if that is more; 0 if they are unknown.
        exposed: If it is asynchronous, the part of `seconds` that is not overlapped. Above 0 only
            for all-to-alls, which are overlapped as far as there is work between start and end:
            often there is none, because the next product needs the result.
    """

    kind: str
    name: str
    layer: str
    phase: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    times: float
    asynchronous: bool
    network: str
    sent_bytes: float
    seconds: float
    exposed: float = 0.0

    @property
    def total_seconds(self) -> float:
        """Time of all runs in a step."""
        return self.seconds * self.times

    @property
    def exposed_seconds(self) -> float:
        """The part of `total_seconds` that is not overlapped."""
        return (self.exposed if self.asynchronous else self.seconds) * self.times


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective an instruction starts or is, else `None`.

    Args:
        instruction: Any instruction.
    """
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if operation(opcode).kind is OperationKind.COLLECTIVE else None


def find(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Computation, Instruction, str, bool] | None:
    """The collective in an instruction, including those within fusions.

    The TPU compiler fuses a collective into the kernels it overlaps with, one copy in each; all
    copies have one channel, so the caller counts each channel once.

    Args:
        program: The program, to look up the computations that are called.
        computation: The computation that `instruction` is in.
        instruction: The instruction to look into.

    Returns:
        Computation and instruction of the collective, its kind and whether it is asynchronous;
        `None` if there is none.
    """
    if transfer := _MEGASCALE.search(instruction.attributes):
        # between slices, the hosts carry the data of "send"
        kind = transfer[1].lower().replace("_", "-")
        return (computation, instruction, kind, True) if instruction.opcode == "send" else None
    kind = kind_of(instruction)
    if kind is not None:
        # The compiler first makes every large collective asynchronous. If it finds nothing to
        # overlap with, it becomes a single operation again, which still has an
        # `async_collective_name`.
        return computation, instruction, kind, instruction.opcode.endswith("-start")
    handed_over = operation(instruction.opcode).kind is OperationKind.HANDOVER
    if not handed_over and instruction.opcode != "fusion":
        return None
    for name in instruction.called:
        inner = program.computations[name]
        for i in inner:
            found = find(program, inner, i)
            if found is None:
                continue
            # a reduction fused into one kernel, in which every device keeps its own part
            if found[2] == "all-reduce" and name.startswith("all-reduce-scatter"):
                return inner, found[1], "reduce-scatter", False
            fused = name.startswith("async_collective") or any(
                "AsyncCollective" in (i.attribute("custom_call_target") or "")
                for i in inner
                if i.opcode == "custom-call"
            )
            return inner, found[1], found[2], fused or handed_over
    return None


def mesh_axes(groups: Groups, axes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Names of the mesh axes along which the members of a group differ.

    A group that spans only part of an axis gives the axis's name with `"(part)"`.

    Args:
        groups: Positions in the flattened mesh; the first group stands for all.
        axes: Mesh axis names and sizes, in mesh order; a mesh too small for the groups gives none.
    """
    sizes = [size for _, size in axes]
    if not sizes or not groups or not groups[0]:
        return ()
    if math.prod(sizes) <= max((max(g) for g in groups), default=0):
        return ()
    members = np.stack(np.unravel_index(np.array(groups[0]), sizes))
    found = []
    for (name, size), positions in zip(axes, members, strict=True):
        different = len(set(positions.tolist()))
        if different > 1:
            found.append(name if different == size else f"{name} (part)")
    return tuple(found)


def groups_of(instruction: Instruction, num_devices: int) -> Groups:
    """The groups of devices that take part together; for a permute, pairs of different devices.

    Args:
        instruction: The collective.
        num_devices: What an empty list of groups stands for.
    """
    if pairs := instruction.attribute("source_target_pairs"):
        found = replica_groups(pairs, num_devices)
        moved = tuple(p for p in found if p[0] != p[1])
        return moved or found
    return replica_groups(instruction.attribute("replica_groups") or "", num_devices)


def describe(
    computation: Computation,
    instruction: Instruction,
    kind: str,
    *,
    wire: Wire,
    layer: str,
    phase: str,
    times: int,
    asynchronous: bool,
) -> Collective:
    """Measures one collective on the wire.

    Args:
        computation: The computation that `instruction` is in.
        instruction: The collective, or the `send` of one between slices.
        kind: Its kind, as `find` tells it.
        wire: The mesh that the program was compiled for.
        layer: The Keras layer it comes from.
        phase: `"forward"` or `"backward"`.
        times: How often it runs per step.
        asynchronous: Whether the compiler overlaps it with other work.
    """
    measured = functools.partial(
        Collective,
        kind=kind,
        name=instruction.name,
        layer=layer,
        phase=phase,
        times=times,
        asynchronous=asynchronous,
    )
    if instruction.opcode == "send" and wire.topology is not None:
        moved = sum(s.bytes for s in computation.operands(instruction)[0].shapes)
        slices = wire.topology.num_slices
        sent = sent_bytes(kind, moved, slices)
        return measured(
            axes=wire.crossing_axes(),
            group_size=slices,
            bytes=moved,
            network="DCN",
            sent_bytes=sent,
            seconds=sent / wire.topology.dcn_bandwidth,
        )
    groups = groups_of(instruction, len(wire.first_slice))
    if wire.topology is not None and wire.topology.num_slices > 1:
        groups = tuple(tuple(wire.first_slice[i] for i in group) for group in groups)
    operands = sum(s.bytes for o in computation.operands(instruction) for s in o.shapes)
    size = 2 if kind == "collective-permute" else len(groups[0])
    whole = operands * size if kind == "all-gather" else operands
    sent = sent_bytes(kind, whole, size)
    network, seconds = seconds_of(wire, kind, whole, groups)
    seconds = max(seconds, latency_of(wire, kind, groups))
    axes: tuple[str, ...]
    if kind == "collective-permute":
        axes = tuple(dict.fromkeys(a for g in groups for a in mesh_axes((g,), wire.axes)))
        axes = tuple(a.removesuffix(" (part)") for a in axes)
    else:
        axes = mesh_axes(groups, wire.axes)
    return measured(
        axes=axes,
        group_size=len(groups[0]),
        bytes=whole,
        network=network,
        sent_bytes=sent,
        seconds=seconds,
    )
