"""A compiled program's cost per step, loops included, by Keras layer."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from keras_tpu_dist.tools.hlo import collectives, cost, kernels, silent, traffic
from keras_tpu_dist.tools.hlo.collectives import Collective
from keras_tpu_dist.tools.hlo.layers import LayerOf, layers_of, phase
from keras_tpu_dist.tools.hlo.loops import Execution, executions
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program, Shape, parse
from keras_tpu_dist.tools.hlo.wire import Wire

# Instructions that only name another instruction's buffer.
_VIEWS = {"tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant"}


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer on one device in one step.

    Args:
        layer: Path of the layer; `"(other)"` for operations without a layer.
        flops: Operations of its matrix products.
        hbm_bytes: Bytes read from and written to HBM.
        cycles: Estimated cycles of its kernels, as in `ProgramCost`.
        backward_cycles: The part of `cycles` in the backward pass.
        link_seconds: Time of its collectives at full link speed.
        float32_bytes: The part of `hbm_bytes` in float32, by the arrays of each kernel.
    """

    layer: str
    flops: int
    hbm_bytes: int
    cycles: int
    backward_cycles: int
    link_seconds: float
    float32_bytes: int = 0


@dataclass(frozen=True)
class Buffer:
    """A large array that the program keeps in HBM.

    Args:
        bytes: Its size on one device.
        shape: Dtype and dimensions, as in `"bf16[8,512,2048]"`.
        layer: The layer that makes it; `"(input)"` for the program's arguments.
        name: Its name in the program.
    """

    bytes: int
    shape: str
    layer: str
    name: str


@dataclass(frozen=True)
class ProgramCost:
    """The cost of a compiled program on one device in one step.

    Operations are those that run: recomputation in the backward pass counts again, and flash
    attention counts the blocks that its mask leaves (see `kernels.flops`), so that causal attention
    over many blocks costs little more than half of full attention.

    Args:
        flops: Operations of matrix products (two per multiply-add).
        flops_by_rate: The same by the dtype whose peak rate applies, times the passes that higher
            precisions need.
        hbm_bytes: Bytes read from and written to HBM. Slices and updates in place count with the
            tiles that they move, see `traffic.hbm_bytes`.
        cycles: Sum of the compiler's cycle estimates and of `silent_cycles`; 0 if it reports none
            (CPU).
        layers: The layers, most cycles first (most operations first without cycles).
        collectives: All collectives.
        largest_buffers: The largest arrays in HBM.
        kernel_flops: Operations of hand-written (Pallas) kernels, for which the compiler reports no
            cycles; part of `flops`.
        kernel_bytes: Their HBM traffic; part of `hbm_bytes`. If a kernel updates an array in place
            and its author states no traffic, the array counts as much as the kernel's other arrays.
        silent_cycles: The part of `cycles` that is estimated here, because the compiler reports
            none: scatters, gathers, slices and sorts (see `silent.cycles`). 0 without a slice.
        unknown_loops: Loops whose trip count is not in the program, counted once.
        unestimated_kernels: Hand-written kernels whose authors state no cost: their operations are
            missing above.
        whole_kernels: Flash attention with a mask that depends on data: counted as if no block were
            skipped.
    """

    flops: int
    flops_by_rate: tuple[tuple[str, int], ...]
    hbm_bytes: int
    cycles: int
    layers: tuple[LayerCost, ...]
    collectives: tuple[Collective, ...]
    largest_buffers: tuple[Buffer, ...] = ()
    kernel_flops: int = 0
    kernel_bytes: int = 0
    silent_cycles: int = 0
    unknown_loops: tuple[str, ...] = ()
    unestimated_kernels: tuple[str, ...] = ()
    whole_kernels: tuple[str, ...] = ()

    @property
    def link_seconds(self) -> float:
        """Time of all collectives at full link speed, one after the other."""
        return sum(c.total_seconds for c in self.collectives)

    @property
    def exposed_link_seconds(self) -> float:
        """The part of `link_seconds` that the compiler does not overlap with other work."""
        return sum(c.exposed_seconds for c in self.collectives)

    def to_dict(self) -> dict[str, object]:
        """The cost as plain data."""
        return asdict(self)


@dataclass
class _Tally:
    flops: int = 0
    hbm_bytes: int = 0
    float32_bytes: int = 0
    cycles: int = 0
    backward_cycles: int = 0
    link_seconds: float = 0.0


@dataclass
class _Tallies:
    layers: dict[str, _Tally] = field(default_factory=dict)
    flops_by_rate: dict[str, int] = field(default_factory=dict)
    collectives: dict[tuple[str, str, str], Collective] = field(default_factory=dict)
    unestimated: dict[str, None] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    kernel_flops: int = 0
    kernel_bytes: int = 0
    silent_cycles: int = 0

    def layer(self, name: str) -> _Tally:
        return self.layers.setdefault(name, _Tally())


def analyze(
    text: str,
    *,
    wire: Wire | None = None,
    layer_names: Iterable[str] = (),
    steps: int = 1,
) -> ProgramCost:
    """Reads a compiled program's cost from its text.

    In contrast to XLA's own `cost_analysis()`, a loop's body counts as often as it runs.

    Args:
        text: `compiled.as_text()` of the TPU or the CPU compiler.
        wire: The mesh the program was compiled for. Without it, collectives have no axes and no
            times, and kernels for which the compiler reports no cycles have none.
        layer_names: Names of the model's layers.
        steps: The steps of a launch, to return the cost of one.
    """
    cost_of = _cost(parse(text), wire, layer_names)
    return cost_of if steps == 1 else _of_a_step(cost_of, steps)


def _of_a_step(cost_of: ProgramCost, steps: int) -> ProgramCost:
    """The cost of one step of a launch. What runs once a launch counts with its share."""

    def counts(of: ProgramCost | LayerCost) -> dict[str, Any]:
        every = {name: count for name, count in vars(of).items() if isinstance(count, int)}
        return {name: round(count / steps) for name, count in every.items()}

    return replace(
        cost_of,
        **counts(cost_of),
        flops_by_rate=tuple((rate, round(flops / steps)) for rate, flops in cost_of.flops_by_rate),
        layers=tuple(
            replace(layer, **counts(layer), link_seconds=layer.link_seconds / steps)
            for layer in cost_of.layers
        ),
        collectives=tuple(
            replace(collective, times=collective.times / steps)
            for collective in cost_of.collectives
        ),
    )


@dataclass(frozen=True)
class LoopCost:
    """The cost of a program that is mainly a loop whose trip count depends on data.

    Args:
        outside: What the program costs outside of the loop.
        round: What one round of the loop costs.
        carried: The arrays that the loop carries from round to round, on one device.
    """

    outside: ProgramCost
    round: ProgramCost
    carried: tuple[Shape, ...]


def analyze_loop(
    text: str,
    *,
    wire: Wire | None = None,
    layer_names: Iterable[str] = (),
) -> LoopCost | None:
    """Reads a program's cost inside and outside of its largest loop of unknown length.

    Args:
        text: See `analyze`.
        wire: See `analyze`.
        layer_names: See `analyze`.

    Returns:
        A `LoopCost`, or `None` for a program without such a loop.
    """
    program = parse(text)
    runs = executions(program).executions
    loops = {run.loop.name: run.loop for run in runs if run.loop is not None}
    if not loops:
        return None
    loop = max(loops.values(), key=lambda each: sum(s.bytes for s in each.shapes))
    inside = [run for run in runs if run.loop is loop]
    outside = [run for run in runs if run.loop is not loop]
    return LoopCost(
        _cost(program, wire, layer_names, outside),
        _cost(program, wire, layer_names, inside),
        loop.shapes,
    )


def _cost(
    program: Program,
    wire: Wire | None,
    layer_names: Iterable[str],
    part: list[Execution] | None = None,
) -> ProgramCost:
    """The cost of a program, or of a part of its instructions."""
    wire, layer_of = wire or Wire(()), layers_of(layer_names)
    unknown: tuple[str, ...] = ()
    if part is None:
        runs = executions(program)
        part, unknown = list(runs.executions), runs.unknown_loops
    tallies = _Tallies()
    for run in part:
        _count_products(program, run, layer_of, tallies)
        _count_memory(program, run, layer_of, wire, tallies)
        _count_collective(program, run, layer_of, wire, tallies)
    layers = [LayerCost(name, **vars(t)) for name, t in tallies.layers.items()]
    layers.sort(key=lambda c: (c.cycles, c.flops, c.hbm_bytes), reverse=True)
    return ProgramCost(
        flops=sum(c.flops for c in layers),
        flops_by_rate=tuple(sorted(tallies.flops_by_rate.items())),
        hbm_bytes=sum(c.hbm_bytes for c in layers),
        cycles=sum(c.cycles for c in layers),
        layers=tuple(layers),
        collectives=tuple(tallies.collectives.values()),
        largest_buffers=_largest_buffers(program, part, layer_of),
        unknown_loops=unknown,
        kernel_flops=tallies.kernel_flops,
        kernel_bytes=tallies.kernel_bytes,
        silent_cycles=tallies.silent_cycles,
        unestimated_kernels=tuple(tallies.unestimated),
        whole_kernels=tuple(tallies.whole),
    )


def _count_products(program: Program, run: Execution, layer_of: LayerOf, tallies: _Tallies) -> None:
    for product, rate, flops, passes in cost.matrix_flops(
        program, run.computation, run.instruction
    ):
        layer = layer_of(product.op_name or run.instruction.op_name)
        tallies.layer(layer).flops += flops * run.times
        total = flops * run.times * passes
        tallies.flops_by_rate[rate] = tallies.flops_by_rate.get(rate, 0) + total
    if kernels.is_kernel(run.instruction):
        kernel_flops = kernels.flops(run.instruction, run.computation.operands(run.instruction))
        tallies.kernel_flops += (kernel_flops or 0) * run.times
        moved = traffic.hbm_bytes(program, run.computation, run.instruction)
        tallies.kernel_bytes += moved * run.times
        if kernel_flops is None:
            tallies.unestimated[run.instruction.name] = None
        elif kernels.counted_whole(run.instruction):
            tallies.whole[run.instruction.name] = None


def _count_memory(
    program: Program, run: Execution, layer_of: LayerOf, wire: Wire, tallies: _Tallies
) -> None:
    moved = traffic.hbm_bytes(program, run.computation, run.instruction) * run.times
    cycles = cost.estimated_cycles(run.instruction) * run.times
    if wire.topology is not None:
        chip = wire.topology.chip
        unstated = silent.cycles(program, run.computation, run.instruction, chip) * run.times
        tallies.silent_cycles += unstated
        cycles += unstated
    if not moved and not cycles:
        return
    op_name = _origin(program, run.instruction)
    tally = tallies.layer(layer_of(op_name))
    tally.hbm_bytes += moved
    tally.float32_bytes += round(moved * _float32_share(run.computation, run.instruction))
    tally.cycles += cycles
    if phase(op_name) == "backward":
        tally.backward_cycles += cycles


def _float32_share(computation: Computation, instruction: Instruction) -> float:
    """The share of float32 in the arrays that an instruction reads and writes in HBM."""
    arrays = [s for i in (instruction, *computation.operands(instruction)) for s in i.shapes]
    everything = sum(s.hbm_bytes for s in arrays)
    return sum(s.hbm_bytes for s in arrays if s.dtype == "f32") / everything if everything else 0.0


def _count_collective(
    program: Program, run: Execution, layer_of: LayerOf, wire: Wire, tallies: _Tallies
) -> None:
    match = collectives.find(program, run.computation, run.instruction)
    if match is None:
        return
    computation, instruction, kind, asynchronous = match
    key = (run.computation.name, kind, _identity(instruction, run.instruction))
    if key in tallies.collectives:
        return
    op_name = _largest_part(program, computation, instruction) or _origin(program, run.instruction)
    layer = layer_of(op_name)
    arrays = [o for o in computation.operands(instruction) if any(s.bytes for s in o.shapes)]
    combined = len(arrays) - 1
    collective = collectives.describe(
        computation,
        instruction,
        kind,
        wire=wire,
        layer=f"{layer} and {combined} more" if combined > 0 else layer,
        phase=phase(op_name),
        times=run.times,
        asynchronous=asynchronous,
    )
    if collective.group_size < 2:
        return
    if kind == "all-to-all" and run.instruction.opcode.endswith("-start"):
        beside = _seconds_beside(program, run, wire)
        collective = replace(collective, exposed=max(collective.seconds - beside, 0.0))
    tallies.collectives[key] = collective
    tallies.layer(layer).link_seconds += collective.total_seconds


def _seconds_beside(program: Program, run: Execution, wire: Wire) -> float:
    """The time of the kernels that the compiler's schedule has between a start and its end."""
    if wire.topology is None:
        return 0.0
    chip, cycles = wire.topology.chip, 0
    order = iter(run.computation)
    while next(order) is not run.instruction:
        pass
    for instruction in order:
        if run.instruction.name in instruction.operand_names:
            break
        cycles += cost.estimated_cycles(instruction)
        cycles += silent.cycles(program, run.computation, instruction, chip)
    return cycles / chip.clock


def _identity(collective: Instruction, run: Instruction) -> str:
    """A key that distinguishes a collective from the others of its kind in a computation.

    Copies of one collective in the kernels that overlap with it share a channel, and so do all that
    a `shard_map` requests by name. Sends to other slices have a separate numbering of channels.
    """
    channel = collective.attribute("channel_id") or collective.name
    if collective.opcode == "send":
        return f"send {channel}"
    if collective is run:
        return collective.name
    groups = collective.attribute("replica_groups") or ""
    # Copies may be in different memories.
    arrays = [(shape.dtype, shape.dims) for shape in collective.shapes]
    return " ".join((channel, groups, str(arrays), collective.op_name))


def _largest_part(program: Program, computation: Computation, collective: Instruction) -> str:
    """The name stack of a collective; if it combines several, that of the largest array."""
    parts = computation.operands(collective)
    if len(parts) < 2:
        return collective.op_name
    part = max(parts, key=lambda i: sum(s.bytes for s in i.shapes))
    while part.opcode in ("get-tuple-element", "bitcast", "copy", "convert") and not part.op_name:
        part = computation.operands(part)[0]  # the instruction before it
    return _origin(program, part) or collective.op_name


def _largest_buffers(
    program: Program, runs: Iterable[Execution], layer_of: LayerOf, count: int = 8
) -> tuple[Buffer, ...]:
    buffers: dict[tuple[str, str], Buffer] = {}
    for run in runs:
        i = run.instruction
        is_argument = i.opcode == "parameter" and run.computation is program.entry
        if i.opcode in _VIEWS or (i.opcode == "parameter" and not is_argument):
            continue
        for shape in i.shapes:
            if not shape.hbm_bytes:
                continue
            op_name = _origin(program, i)
            layer = "(input)" if is_argument else layer_of(op_name)
            text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
            buffers.setdefault((text, layer), Buffer(shape.bytes, text, layer, i.name))
    return tuple(sorted(buffers.values(), key=lambda b: b.bytes, reverse=True)[:count])


def _origin(program: Program, instruction: Instruction) -> str:
    """The name stack of an instruction; for a fusion that of its matrix product, if it has one."""
    if instruction.opcode != "fusion":
        return instruction.op_name
    names = []
    for called in instruction.called:
        inner = program.computations[called]
        for i in inner:
            if i.opcode in ("convolution", "dot") and i.op_name:
                return i.op_name
        if inner.root is not None and inner.root.op_name:
            names.append(inner.root.op_name)
        names += [i.op_name for i in reversed(inner.instructions) if "/" in i.op_name]
    return instruction.op_name or next(iter(names), "")
