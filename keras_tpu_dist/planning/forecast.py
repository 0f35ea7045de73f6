"""Memory and time of a step on a mesh, in closed form: what is worth compiling, and what is not.

A forecast ranks; it does not replace the compiler. It knows the products, where their weights lie,
and what must cross the links for them; not the kernels that the compiler makes, nor its schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_tpu_dist.planning.facts import Facts, Spec
from keras_tpu_dist.planning.ground import Ground, Placed
from keras_tpu_dist.planning.links import links
from keras_tpu_dist.planning.memory import memory_of, parts_on
from keras_tpu_dist.planning.work import output_bytes, part_of, ring_of, table_bytes, taken_bytes

# The compiler's cycles of effort "quick", by which a search decides, over what the bytes would
# take at the chip's bandwidth: a product's operands, of which it hides a part, whatever else
# moves, tables that are laid out anew, and the optimizer's updates
# (`python benchmarks/search.py --cycles`, v5e).
_OPERAND_CYCLES = 1.2
_TRAFFIC_CYCLES = 2.5
_TABLE_CYCLES = 3.5
_UPDATE_CYCLES = 1.65
# Each step reads weights and slots and writes them.
_STATE_PASSES = 2
# Weights that are brought together after an update are cut, written, copied and read.
_GATHERED_PASSES = 4
# How often what a step writes between its operations is written or read.
_ACTIVATION_PASSES = 2.0
# A loss reads and writes the outputs and their gradient.
_OUTPUT_PASSES = 4


@dataclass(frozen=True)
class Forecast:
    """What a step is expected to take on one device.

    Attributes:
        state_bytes: Weights and the optimizer's slots.
        held_bytes: The most that is held at a time between operations.
        memory_bytes: All together.
        compute_s: Products, as slow as the compiler's cycles of effort "quick" have them.
        traffic_s: What is read and written, likewise.
        links_s: Collectives at full speed.
        exposed_s: The part of them that is waited for.
    """

    state_bytes: float
    held_bytes: float
    memory_bytes: float
    compute_s: float
    traffic_s: float
    links_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return max(self.compute_s + self.traffic_s + self.exposed_s, self.links_s)


def forecast(
    facts: Facts, specs: Sequence[Spec], ground: Ground, rows: int, policy: str | None
) -> Forecast:
    """Forecasts a train step.

    Args:
        facts: What the model asks.
        specs: The axes of each weight's dimensions.
        ground: The mesh.
        rows: Rows of all devices together.
        policy: The remat policy.
    """
    placed = Placed(facts, tuple(specs), ground, rows / facts.rows)
    again = _computed_again(facts, policy)
    compute = operands = 0.0
    # Activations, the outputs, and the rows looked up in tables.
    moved = _ACTIVATION_PASSES * _written_bytes(placed, policy)
    moved += _OUTPUT_PASSES * output_bytes(placed) + taken_bytes(placed)
    for product in facts.products:
        part, ring = part_of(placed, product), ring_of(placed, product, again)
        compute += part.forward_s * (1 + again) + part.backward_s + ring.seconds
        operands += part.moved_bytes * (3 + again)
        moved += ring.moved_bytes
    memory = memory_of(placed, policy)
    updated = _STATE_PASSES * memory.state_bytes + _GATHERED_PASSES * _gathered_bytes(placed)
    traffic = _TRAFFIC_CYCLES * moved + _OPERAND_CYCLES * operands + _UPDATE_CYCLES * updated
    traffic += _TABLE_CYCLES * table_bytes(placed)
    all_links, exposed = links(placed, again)
    return Forecast(
        state_bytes=memory.state_bytes,
        held_bytes=memory.held_bytes,
        memory_bytes=memory.total_bytes,
        compute_s=compute,
        traffic_s=traffic / ground.topology.hbm_bandwidth,
        links_s=all_links,
        exposed_s=exposed,
    )


def _computed_again(facts: Facts, policy: str | None) -> float:
    """Of the forward pass, how much a policy computes twice."""
    forward = sum(p.flops * p.times for p in facts.products)
    again = facts.kept[policy].flops - facts.kept[None].flops
    return again / forward if forward else 0.0


def _gathered_bytes(placed: Placed) -> float:
    """Bytes of weights whose updates are made in parts, as their slots are split."""
    return sum(
        weight.size * weight.itemsize / placed.ways(index)
        for index, weight, _ in placed.weights()
        if placed.ground.shard_optimizer and weight.slot_bytes and not placed.stored(index)
    )


def _written_bytes(placed: Placed, policy: str | None) -> float:
    """What is written on one device between the operations of a step, but for gradients."""
    parts = parts_on(placed)
    return sum(
        math.prod(size / parts(origins) for size, origins in zip(b.shape, b.origins)) * b.itemsize
        for b in placed.facts.kept[policy].buffers
        if b.gradient is None
    )
