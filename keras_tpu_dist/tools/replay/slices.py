"""What several slices exchange: the hosts carry it, and the TPU's program is that of one slice.

A program for several slices has the partitions of one. A collective between slices is a `send` to
the host and a `recv` from it, with a common key, and the runtime between the hosts does the rest.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from keras_tpu_dist.tools.hlo.parse import Instruction, Shape
from keras_tpu_dist.tools.replay.errors import cannot_run

_ATTRIBUTE = re.compile(r'_xla_(megascale_\w+|host_transfer_rendezvous)=("[^"]*"|\{\{.*?\}\})')
_PAIR = re.compile(r"\{(\d+)->(\d+)\}")
_GROUP = re.compile(r"\{([\d,]+)\}")
# "{1,2}x{0:3}": of these slices, the chips with one number in their slice.
_PRODUCT = re.compile(r"\{([\d,]+)\}x\{(\d+)(?::(\d+))?\}")
# The first slice is number 1, and its first chip has the id 100000.
_IDS_OF_A_SLICE = 100_000
_REDUCED_BY = {"SUM": "add", "MAX": "maximum", "MIN": "minimum", "PRODUCT": "multiply"}


@dataclass(frozen=True)
class Exchange:
    """A collective between slices.

    Args:
        opcode: The collective of HLO that computes the same.
        attributes: Its attributes, with groups of replicas.
        before: A computation that it calls, or `""`.
    """

    opcode: str
    attributes: str
    before: str = ""


def replicas_of(devices: Sequence[int]) -> list[list[int]]:
    """The replicas of each slice, in the order of its partitions; a mesh may mix slices.

    Args:
        devices: The ids of all devices, in the order of the replicas.
    """
    found: dict[int, list[int]] = {device // _IDS_OF_A_SLICE: [] for device in sorted(devices)}
    for replica, device in enumerate(devices):
        found[device // _IDS_OF_A_SLICE].append(replica)
    return list(found.values())


def key_of(instruction: Instruction) -> str:
    """What the `send` and the `recv` of one collective have in common; `""` without it."""
    return _attributes(instruction).get("host_transfer_rendezvous", "")


def exchange_of(instruction: Instruction, sent: Shape, devices: Sequence[int]) -> Exchange:
    """The collective of which an instruction receives the result.

    Args:
        instruction: The `recv`.
        sent: The array that is sent.
        devices: The ids of all devices, in the order of the replicas.

    Raises:
        CannotRun: If it is none that is known.
    """
    given, received = _attributes(instruction), instruction.shapes[0]
    kind, target = given.get("megascale_transfer_type"), given.get("megascale_target", "")
    number = {device: replica for replica, device in enumerate(devices)}
    try:
        if kind == "ONE_TO_ONE":
            pairs = [(number[int(a)], number[int(b)]) for a, b in _PAIR.findall(target)]
            listed = ",".join(f"{{{source},{to}}}" for source, to in pairs)
            return Exchange("collective-permute", f"source_target_pairs={{{listed}}}")
        groups = [[number[device] for device in group] for group in _groups(target)]
    except KeyError as error:
        raise cannot_run(instruction, f"no device has the id {error} of {target}") from error
    size = len(groups[0]) if groups else 0
    if not size or sorted(chain.from_iterable(groups)) != list(range(len(devices))):
        raise cannot_run(instruction, f"the groups of {target} are not known")
    listed = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
    attributes = f"replica_groups={{{listed}}}"
    if kind == "ALL_TO_ALL":
        # The hosts see bytes: parts follow one another along the slowest dimension.
        slowest = int((sent.layout.partition(":")[0] or "0").split(",")[-1])
        if sent.dims[slowest] % size == 0 and sent.dims == received.dims:
            return Exchange("all-to-all", f"{attributes}, dimensions={{{slowest}}}")
    along = _longer(sent.dims, received.dims, size)
    if kind == "ALL_GATHER" and along is not None:
        return Exchange("all-gather", f"{attributes}, dimensions={{{along}}}")
    if kind in ("ALL_REDUCE", "REDUCE_SCATTER"):
        joins = _REDUCED_BY.get(given.get("megascale_reduce_operation", ""))
        if joins is None or sent.dtype == "pred":
            raise cannot_run(instruction, "its reduction between slices is not known")
        name, one = f"%between_slices_{joins}_{sent.dtype}", f"{sent.dtype}[]"
        before = (
            f"{name} {{\n  %a = {one} parameter(0)\n  %b = {one} parameter(1)\n"
            f"  ROOT %c = {one} {joins}(%a, %b)\n}}"
        )
        attributes += f", to_apply={name}"
        if kind == "ALL_REDUCE" and sent.dims == received.dims:
            return Exchange("all-reduce", attributes, before)
        along = _longer(received.dims, sent.dims, size)
        if kind == "REDUCE_SCATTER" and along is not None:
            return Exchange("reduce-scatter", f"{attributes}, dimensions={{{along}}}", before)
    raise cannot_run(instruction, f"the exchange {kind} of {sent.dims} is not known")


def _attributes(instruction: Instruction) -> dict[str, str]:
    return {name: text.strip('"') for name, text in _ATTRIBUTE.findall(instruction.attributes)}


def _groups(target: str) -> list[list[int]]:
    """The ids of the devices that take part together."""
    if product := _PRODUCT.fullmatch(target):
        slices = [int(number) * _IDS_OF_A_SLICE for number in product[1].split(",")]
        chips = range(int(product[2]), int(product[3] or product[2]) + 1)
        return [[first + chip for first in slices] for chip in chips]
    return [[int(device) for device in group.split(",")] for group in _GROUP.findall(target)]


def _longer(shorter: Sequence[int], longer: Sequence[int], times: int) -> int | None:
    """The only dimension that differs, if it is so many times as long."""
    if len(shorter) != len(longer):
        return None
    differ = [d for d, (one, other) in enumerate(zip(shorter, longer, strict=True)) if one != other]
    if len(differ) != 1 or shorter[differ[0]] * times != longer[differ[0]]:
        return None
    return differ[0]
