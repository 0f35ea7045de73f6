"""What to change about a step: a change, what it brings by a count, and the line of code."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import split_ways
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.hardware.mesh import build_mesh
from keras_tpu_dist.hardware.topology import Topology, listed_shapes
from keras_tpu_dist.layout.planner import BOTH, Planner, layout_named, planner_code
from keras_tpu_dist.memory.blocks import blocks
from keras_tpu_dist.programs.head.pieces import PIECE_BYTES
from keras_tpu_dist.programs.head.step import (
    GRADIENT_TIMES,
    LEAST_WORDS,
    can_be_in_pieces,
    described,
)
from keras_tpu_dist.show.text import duration_text, size_text
from keras_tpu_dist.tools.dryrun.figures import Estimate
from keras_tpu_dist.tools.hlo import ProgramCost, Wire, latency_over, seconds_over
from keras_tpu_dist.training.flops import count_tokens
from keras_tpu_dist.training.protocol import Strategy

if TYPE_CHECKING:
    from keras_tpu_dist.tools.dryrun.report import DryRun

MOST_CHANGES = 3
# A change is named if it brings so much of what it changes.
_WORTH = 0.1
# A batch, or a plan, is to fill this share of the memory: counts are not exact.
_FILLED = 0.85
# A batch is not made larger than this many times.
_LARGEST_TIMES = 8
# Steps shorter than this wait for Python, which starts them; see docs/mixed_precision.md.
_SHORT_STEP = 1e-3
# Six orders of axes are tried, not more.
_MOST_AXES = 3
# Layers read a weight forward and backward, and write its gradient.
_TIMES_READ = 3
# A matrix unit multiplies so many rows at once.
_ROWS_AT_ONCE = 128
_STEPS = 32
_IN_BFLOAT16 = 'keras.config.set_dtype_policy("mixed_bfloat16") before the model'
_IN_PIECES = 'TPUStrategy(..., head="pieces")'
_RECURRENT = (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)


@dataclass(frozen=True, repr=False)
class Change(Printed):
    """A change of a program, and what it brings by a count.

    Attributes:
        kind: `"batch"`, `"between"`, `"bfloat16"`, `"convert"`, `"head"`, `"layout"`, `"mesh"`,
            `"remat"`, `"slice"` or `"steps"`.
        figure: What it changes: `"memory"`, `"HBM traffic"`, `"collectives"` (in bytes),
            `"links"` (in seconds), `"rows per second"` or `"launches"`.
        before: The figure now.
        after: The figure with the change, by a count.
        line: The line of code.
        value: The batch size, the planner or its name, the policy, the steps, or the mesh.
    """

    kind: str
    figure: str
    before: float
    after: float
    line: str
    value: Any = None

    @property
    def factor(self) -> float:
        """The figure with the change, relative to the one now."""
        return self.after / self.before

    def of(self, run: "DryRun") -> float | None:
        """The figure of a compiled step, `None` if it has none.

        Args:
            run: The dry run, with the change or without it.
        """
        cost = run.cost
        if self.figure == "memory":
            # What does not fit is sized on a larger slice, before and after.
            return float(run.breakdown_bytes)
        if self.figure == "rows per second":
            return run.samples_per_second
        if self.figure == "launches":
            return self.before / run.steps
        if cost is None:
            return None
        if self.figure == "HBM traffic":
            return float(cost.hbm_bytes)
        if self.figure == "links":
            return sum(c.total_seconds for c in cost.collectives)
        return float(sum(c.bytes * c.times for c in cost.collectives))

    @property
    def effect(self) -> str:
        """The effect in words."""
        if self.figure in ("memory", "HBM traffic", "collectives"):
            of = "a device" if self.figure == "memory" else "a step"
            before, after = size_text(self.before), size_text(self.after)
            # What a kernel of all times keeps on the chip is not counted, nor what a loss of
            # probabilities computes from logits.
            less = " or less" if self.kind in ("convert", "head") else ""
            return f"{self.figure} {before} to {after}{less} {of}"
        if self.figure == "links":
            before, after = duration_text(self.before), duration_text(self.after)
            return f"collectives {before} to {after} a step"
        if self.figure == "rows per second":
            return f"about {self.factor:.1f} times the rows per second"
        return f"one launch from Python instead of {self.before:.0f}"

    def __str__(self) -> str:
        return f"{self.effect}: {self.line}"


@dataclass(frozen=True)
class Levers:
    """What of a model and its strategy could be changed.

    Attributes:
        in_float32: Names of the layers that compute in float32.
        recurrent: Names of Keras's recurrent layers, with the share of their operations that stays
            in the loop over time after `convert`.
        plan: The plan that splits the state over the data axes, `"fsdp"` or `"fsdp and
            tensor_parallel"`; `""` if it is split already, or cannot be.
        planned_bytes: Weights and optimizer on one device, if a plan splits them over the data
            axes; 0 if none can.
        largest_bytes: Bytes of the largest weight, which is whole on each device while it is used,
            however many devices store it.
        blocks: The number of repeated blocks that keep their activations.
        block_bytes: Bytes of the outputs of these blocks on one device.
        logits_bytes: Bytes of a vocabulary's logits and their gradient on one device, if they
            exist as a whole, and need not; else 0.
        rows: Rows of a device, if products have no others, as those of pixels or tokens; else 0.
        orders: The mesh on the slice's links, and the same with its axes in other orders; empty if
            its devices lie otherwise than the order of the axes decides.
        between: The plan in use, but with values between blocks split along time; `None` if they
            are already, or cannot be.
        between_bytes: Bytes of the outputs of blocks that are recomputed, on one device, of which
            it has only a part then; without the bytes of this part.
    """

    in_float32: frozenset[str]
    recurrent: Mapping[str, float]
    plan: str
    planned_bytes: int
    largest_bytes: int
    blocks: int
    block_bytes: int
    logits_bytes: int
    rows: int
    optimizer: str
    data_axes: tuple[str, ...]
    steps: int
    topology: Topology | None
    orders: tuple[Wire, ...] = ()
    between: Planner | None = None
    between_bytes: int = 0


def levers_of(model: Any, strategy: Strategy, batch: Any, steps: int) -> Levers:
    """What of a model and its strategy could be changed."""
    layers = _keras.flatten_layers(model)
    plan, planned = _plan(model, strategy)
    repeated = [layer for _, layer in blocks(model) if _keras.sublayers(layer)]
    count, kept = _blocks(repeated, strategy, batch)
    between, elsewhere = _between(model, repeated, strategy, batch)
    recurrent = dict(_recurrent(layers))
    return Levers(
        in_float32=frozenset(layer.name for layer in layers if layer.compute_dtype == "float32"),
        recurrent=recurrent,
        plan=plan,
        planned_bytes=planned,
        largest_bytes=max(map(bytes_of, model.weights), default=0),
        blocks=count,
        block_bytes=kept,
        logits_bytes=_logits(model, strategy, batch),
        rows=_rows_alone(batch[0], recurrent) // strategy.num_replicas_in_sync,
        optimizer=model.optimizer.name,
        data_axes=tuple(strategy.data_axes),
        steps=steps,
        topology=strategy.topology,
        orders=orders_of(strategy),
        between=between,
        between_bytes=elsewhere,
    )


def orders_of(strategy: Strategy) -> tuple[Wire, ...]:
    """The mesh on the links of its slice, first as it is, then with its axes in other orders.

    Returns:
        One `Wire` for each order; none for a mesh of several slices or of a part of one, of one
        axis or of more than three, or whose devices lie otherwise than `build_mesh` lays them.
    """
    sizes, topology = dict(strategy.mesh.shape), strategy.topology
    if topology is None or topology.num_slices > 1 or not 2 <= len(sizes) <= _MOST_AXES:
        return ()
    devices = topology.devices()
    if len(devices) != strategy.mesh.size:
        return ()
    placed = [build_mesh(dict(axes), devices) for axes in itertools.permutations(sizes.items())]
    if list(placed[0].devices.flat) != list(strategy.mesh.devices.flat):
        return ()
    return tuple(
        Wire.of(dict(zip(mesh.axis_names, mesh.shape, strict=True)), [*mesh.devices.flat], topology)
        for mesh in placed
    )


def _plan(model: Any, strategy: Strategy) -> tuple[str, int]:
    """A plan that splits the state over the data axes too, and its bytes on one device."""
    layout = strategy.layouts.layout
    if strategy.num_replicas_in_sync == 1 or not (layout is None or isinstance(layout, Planner)):
        return "", 0
    if layout is None:
        planner, name = Planner("fsdp"), "fsdp"
    elif layout.kind == "tensor_parallel":
        planner, name = layout_named(BOTH), BOTH
    else:
        planner, name = layout, ""
    plan = planner.plan(model, strategy.mesh, strategy.data_axes)
    stored = [(v, v) for v in _keras.variables_of(model)]
    slots = [(slot, weight) for _, slot, weight in _keras.optimizer_slots(model)]
    stored += slots
    split = {id(slot) for slot, _ in slots}
    total = sum(bytes_of(v) for v in model.optimizer.variables if id(v) not in split)
    for variable, weight in stored:
        decision = plan.decision(weight)
        ways = 1 if decision is None else split_ways(strategy.mesh, decision.axes)
        total += bytes_of(variable) // ways
    return name, total


def _blocks(repeated: list, strategy: Strategy, batch: Any) -> tuple[int, int]:
    """The number of repeated blocks without remat, and the bytes of their outputs on a device."""
    if strategy.options.remat is not None or len(repeated) < 2:
        return 0, 0
    sizes = [_output_bytes(layer, strategy, batch) for layer in repeated]
    return (len(repeated), sum(sizes)) if all(sizes) else (0, 0)


def _between(
    model: Any, repeated: list, strategy: Strategy, batch: Any
) -> tuple[Planner | None, int]:
    """The plan with a part of the times between blocks on each device, and the bytes that go.

    The inputs of kernels are whole again while a block is computed, so only what recomputed blocks
    keep is counted: their outputs.
    """
    layout = strategy.layouts.layout
    if not isinstance(layout, Planner) or strategy.options.remat is None or layout.kind == "fsdp":
        return None, 0
    if layout.between_blocks != "whole" or len(repeated) < 2:
        return None, 0
    planner = replace(layout, between_blocks="auto")
    between = planner.plan(model, strategy.mesh, strategy.data_axes).between
    if between is None:
        return None, 0
    ways, rows = split_ways(strategy.mesh, (between.axes,)), keras.tree.flatten(batch)[0].shape[0]
    length = count_tokens(batch[0]) // rows
    kept = sum(
        _output_bytes(layer, strategy, batch)
        for layer in repeated
        if _is_sequence(layer, length, ways)
    )
    return (planner, kept - kept // ways) if kept else (None, 0)


def _is_sequence(layer: Any, length: int, ways: int) -> bool:
    """Whether a layer's output is `(batch, time, features)`, its time divisible."""
    shape = getattr(getattr(layer, "output", None), "shape", ())
    return len(shape) == 3 and not (shape[1] or length) % ways


def _output_bytes(layer: Any, strategy: Strategy, batch: Any) -> int:
    """The bytes of a layer's outputs on one device; 0 if its shapes are not known."""
    # Layers of a subclassed model have no `output`.
    outputs = keras.tree.flatten(getattr(layer, "output", None))
    if not all(isinstance(output, keras.KerasTensor) for output in outputs):
        return 0
    rows = keras.tree.flatten(batch)[0].shape[0]
    length = count_tokens(batch[0]) // rows
    total = 0
    for output in outputs:
        sizes = [rows, *(length if size is None else size for size in output.shape[1:])]
        total += math.prod(sizes) * np.dtype(output.dtype).itemsize
    return total // strategy.num_replicas_in_sync


def _logits(model: Any, strategy: Strategy, batch: Any) -> int:
    """The bytes of logits and their gradient on one device, if they could be in pieces."""
    output = getattr(model, "output", None)
    if not isinstance(output, keras.KerasTensor) or strategy.sequence_axis is not None:
        return 0
    uses = described(model).values()
    if (output.shape[-1] or 0) < LEAST_WORDS or not all(map(can_be_in_pieces, uses)):
        return 0
    return int(GRADIENT_TIMES * _output_bytes(model, strategy, batch))


def _rows_alone(x: Any, recurrent: Mapping[str, float]) -> int:
    """The rows of the batch, if products have no others; else 0."""
    leaves = keras.tree.flatten(x)
    alone = all(len(leaf.shape) <= 2 for leaf in leaves) and not count_tokens(x)
    return leaves[0].shape[0] if alone or recurrent else 0


def _recurrent(layers: list) -> Iterator[tuple[str, float]]:
    """Keras's recurrent layers, and the share of operations that stays in loops after `convert`."""
    for layer in layers:
        if type(layer) in _RECURRENT and layer.built:
            features, units = layer.cell.kernel.shape[0], layer.units
            # Of three products each, forward and backward, the state's two cannot leave.
            yield layer.name, 2 * units / (3 * (features + units))


def what_to_change(run: "DryRun", levers: Levers) -> tuple[Change, ...]:
    """The changes that bring most, by counts."""
    cost, e = run.cost, run.estimate
    if run.mode != "train" or run.limit_bytes is None or cost is None or not run.memory:
        return ()
    room = run.limit_bytes * _FILLED
    if run.fits:
        found = _smaller(run, levers) if run.total_bytes > room else []
        found += [] if e is None else _faster(run, levers, cost, e, room)
    else:
        found = _smaller(run, levers)
        if all(change.after > room for change in found):
            more = [*_fewer_rows(run, room), *_larger_slice(run, levers)]
            found = [*found[: MOST_CHANGES - len(more)], *more]
            found.sort(key=lambda change: change.after > room)
    return tuple(found[:MOST_CHANGES])


def _argument(plan: str) -> str:
    return f'layout="{plan}"' if plan == "fsdp" else 'layout=ktd.Planner("auto", memory_bytes=1)'


def _smaller(run: "DryRun", levers: Levers) -> list[Change]:
    """Changes that take less memory, the one that leaves least first."""
    total, state, activations = run.breakdown_bytes, run.state.lasting, _activations(run)
    found = []
    if levers.plan and levers.planned_bytes < (1 - _WORTH) * state:
        after = total - state + levers.planned_bytes
        line = f"TPUStrategy(..., {_argument(levers.plan)})"
        found.append(Change("layout", "memory", total, after, line, levers.plan))
    if levers.blocks:
        # Of a block, its output is kept; while it is computed again, all of its activations are.
        kept = levers.block_bytes + activations // levers.blocks
        line = 'TPUStrategy(..., remat="full")'
        found.append(Change("remat", "memory", total, total - activations + kept, line, "full"))
    if levers.between is not None:
        after = total - min(levers.between_bytes, activations)
        line = f"TPUStrategy(..., layout={planner_code(levers.between)})"
        found.append(Change("between", "memory", total, after, line, levers.between))
    if levers.logits_bytes > PIECE_BYTES:
        after = total - min(levers.logits_bytes - PIECE_BYTES, activations)
        found.append(Change("head", "memory", total, after, _IN_PIECES, "pieces"))
    # Losses compute in float32, whatever the logits are.
    if levers.in_float32 and 2 * levers.logits_bytes < activations:
        after = total - (activations - levers.logits_bytes) // 2
        found.append(Change("bfloat16", "memory", total, after, _IN_BFLOAT16))
    found = [change for change in found if change.factor <= 1 - _WORTH]
    return sorted(found, key=lambda change: change.after)


def _activations(run: "DryRun") -> int:
    """The temporaries without gradients, which do not depend on the rows."""
    temporaries = run.memory["temporaries"]
    return temporaries - min(temporaries, run.state.weights)


def _faster(
    run: "DryRun", levers: Levers, cost: ProgramCost, e: Estimate, room: float
) -> Iterator[Change]:
    """Changes that make a step shorter, or do more in it."""
    if levers.recurrent:
        yield _converted(cost, levers.recurrent)
    yield from _ordered_otherwise(levers.orders, cost, e)
    if e.span[1] < _SHORT_STEP:
        if levers.steps == 1:
            line = f"model.compile(..., steps_per_execution={_STEPS})"
            yield Change("steps", "launches", _STEPS, 1, line, _STEPS)
        yield from _more_rows(run, levers, cost, e, room)
        return
    # Activations are halved. Weights, their gradients and update, and the loss stay in float32.
    wide = sum(c.float32_bytes for c in cost.layers if {*c.layer.split("/")} & levers.in_float32)
    halved = max(0, wide - _TIMES_READ * run.state.weights) / 2
    if halved >= _WORTH * cost.hbm_bytes and e.bound in ("HBM", "kernels"):
        after = cost.hbm_bytes - halved
        yield Change("bfloat16", "HBM traffic", cost.hbm_bytes, after, _IN_BFLOAT16)
    yield from _more_rows(run, levers, cost, e, room)


def _ordered_otherwise(
    orders: tuple[Wire, ...], cost: ProgramCost, e: Estimate
) -> Iterator[Change]:
    """The order of the mesh's axes in which its collectives take the slice's links shortest."""
    if not orders:
        return

    def seconds(wire: Wire) -> float:
        # Who sends to whom in a permute is not decided by axes alone.
        return sum(
            c.times
            * max(seconds_over(wire, c.kind, c.bytes, c.axes), latency_over(wire, c.kind, c.axes))
            for c in cost.collectives
            if c.kind != "collective-permute"
        )

    now, best = seconds(orders[0]), min(orders, key=seconds)
    after = seconds(best)
    if now - after >= _WORTH * e.step:
        mesh = dict(best.axes)
        yield Change("mesh", "links", now, after, f"TPUStrategy({json.dumps(mesh)}, ...)", mesh)


def _converted(cost: ProgramCost, layers: Mapping[str, float]) -> Change:
    """Recurrent layers whose products for all times are computed at once."""

    def share(name: str) -> float:
        return next((layers[part] for part in name.split("/") if part in layers), 1.0)

    line = "model = ktd.convert(model)"
    sent = sum(c.bytes * c.times for c in cost.collectives)
    # In a loop, gradients of weights are summed over devices at every time; after it, once.
    after = sum(c.bytes * (1 if share(c.layer) < 1 else c.times) for c in cost.collectives)
    if after < sent / 2:
        return Change("convert", "collectives", sent, after, line)
    read = sum(c.hbm_bytes * share(c.layer) for c in cost.layers)
    return Change("convert", "HBM traffic", cost.hbm_bytes or 1, read, line)


def _more_rows(
    run: "DryRun", levers: Levers, cost: ProgramCost, e: Estimate, room: float
) -> Iterator[Change]:
    """A larger batch, if much of a step does not depend on the rows."""
    of_rows = _activations(run) + run.state.inputs
    more = (room - run.total_bytes) / max(1, of_rows)
    times = min(2 ** int(math.log2(more + 1)) if more > 0 else 1, _LARGEST_TIMES)
    # Gradients are summed, and weights updated, once in a step of any size.
    sums = sum(
        c.total_seconds
        for c in cost.collectives
        if {*c.axes} <= {*levers.data_axes} and c.phase == "backward" and not c.asynchronous
    )
    update = sum(c.cycles for c in cost.layers if levers.optimizer in c.layer.split("/"))
    share = min(1.0, (update / max(1, cost.cycles)) * e.kernels / e.step + sums / e.step)
    now = run.batch_size / e.step
    rows = levers.rows
    grown = max(times * rows, _ROWS_AT_ONCE) / max(rows, _ROWS_AT_ONCE) if rows else times
    # `share` of a step does not grow with its rows, the rest grows `grown` times.
    after = times * now / (share + grown * (1 - share))
    if times > 1 and after >= (1 + _WORTH) * now:
        rows = times * run.batch_size
        line = f"batch_size={rows}"
        yield Change("batch", "rows per second", now, after, line, rows)


def _fewer_rows(run: "DryRun", room: float) -> Iterator[Change]:
    """A smaller batch, if the rest fits."""
    total, of_rows = run.breakdown_bytes, _activations(run) + run.state.inputs
    rows = int((room - (total - of_rows)) / max(1.0, of_rows / run.batch_size))
    if rows >= 1 and run.batch_size > rows >= run.devices:
        after = total - of_rows + rows * of_rows / run.batch_size
        yield Change("batch", "memory", total, after, f"batch_size={rows}", rows)


def _larger_slice(run: "DryRun", levers: Levers) -> Iterator[Change]:
    """The smallest larger slice whose chips together hold the state, split over all of them."""
    slice_, total = levers.topology, run.breakdown_bytes
    if slice_ is None or not levers.planned_bytes:
        return
    split = total - run.state.lasting + levers.planned_bytes
    whole = min(levers.largest_bytes, run.memory["temporaries"])
    for shape in listed_shapes(slice_.chip):
        larger = Topology(slice_.chip, shape)
        fewer = slice_.num_devices / larger.num_devices
        after = whole + (split - whole) * fewer
        if larger.num_devices > slice_.num_devices and after <= slice_.hbm_bytes * _FILLED:
            plan = f", {_argument(levers.plan)}" if levers.plan else ""
            line = f'TPUStrategy(...{plan}, topology="{larger.name}")'
            yield Change("slice", "memory", total, after, line, levers.plan)
            return
