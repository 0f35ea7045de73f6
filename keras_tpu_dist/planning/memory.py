"""Memory of a step on a mesh, in closed form: the state, and what is held beside it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from keras_tpu_dist.planning.buffers import peak_bytes
from keras_tpu_dist.planning.ground import Placed
from keras_tpu_dist.planning.origins import BATCH, Origin
from keras_tpu_dist.planning.work import output_bytes, padding, ring_of
from keras_tpu_dist.training.guard import states_that_fit

# The program itself, and small things: read from `python benchmarks/search.py --recorded`, as the
# other numbers here are.
_PROGRAM = 50 * 2**20
# A loss holds the outputs and their gradient in float32.
_OUTPUTS = 2
# Operands that are laid out anew for gradients made piece by piece are held at the same time, fewer
# of them where weights are whole; and tables that are brought together after an update.
_LAID_OUT_OF_SPLIT_SLOTS = 0.3
_TABLES_OF_SPLIT_SLOTS = 0.3
# A weight that is brought together, and the next one.
_GATHERED = 2


@dataclass(frozen=True)
class Memory:
    """What a step holds on one device.

    Attributes:
        state_bytes: Weights and the optimizer's slots.
        held_bytes: The most that is held at a time between operations.
        total_bytes: All together.
    """

    state_bytes: float
    held_bytes: float
    total_bytes: float


def memory_of(placed: Placed, policy: str | None) -> Memory:
    """Forecasts the memory of a train step.

    Args:
        placed: The model on its mesh.
        policy: The remat policy.
    """
    state = _state_bytes(placed)
    held = peak_bytes(
        placed.facts.kept[policy].buffers,
        parts_on(placed),
        lambda weight: _scattered(placed, weight),
    )
    # A new state beside the old is there when activations are no longer.
    variables = placed.facts.variables
    sizes = [int(state / variables)] * variables
    kept = states_that_fit("auto", sizes, placed.ground.topology.hbm_bytes)
    beside = max(held, state if kept else 0.0)
    beside += _OUTPUTS * output_bytes(placed) + _laid_out_bytes(placed) + _together_bytes(placed)
    batch = placed.facts.input_bytes * placed.share
    return Memory(state, held, state + beside + batch + _PROGRAM)


def _state_bytes(placed: Placed) -> float:
    total, ground = 0.0, placed.ground
    for index, weight, spec in placed.weights():
        ways = placed.ways(index)
        over = {axis for axes in spec for axis in axes}
        left = [axis for axis in ground.data_axes if axis not in over]
        extra = ground.ways(left) if ground.shard_optimizer and weight.shape else 1
        total += weight.size * weight.itemsize / ways + weight.slot_bytes / ways / extra
    return total


def parts_on(placed: Placed) -> Callable[[frozenset[Origin]], float]:
    """In how many parts a dimension of an activation is, of the batch that was traced.

    Args:
        placed: The model on its mesh.
    """
    ground, facts = placed.ground, placed.facts
    looped = {p.weight for p in facts.products if placed.in_a_loop(p)}
    rows = ground.ways(ground.data_axes) / placed.batches

    def ways(origin: Origin) -> int:
        weight, dimension = origin
        return 1 if weight in looped else ground.ways(placed.split(weight)[dimension])

    @functools.cache
    def parts(origins: frozenset[Origin]) -> float:
        weights = [o for o in origins if o != BATCH]
        # Vectors are not what decides how a product's result is split.
        large = [o for o in weights if len(facts.weights[o[0]].shape) > 1] or weights
        return min(map(ways, large), default=1) * (rows if BATCH in origins else 1)

    return parts


def _scattered(placed: Placed, weight: int) -> int:
    """In how many parts more than the weight its gradient is held."""
    ground, stored = placed.ground, placed.stored(weight)
    return ground.ways(stored or (ground.data_axes if ground.shard_optimizer else ()))


def _laid_out_bytes(placed: Placed) -> float:
    """Operands of gradients that are made piece by piece; two pieces go both ways at once."""
    total, ground = 0.0, placed.ground
    for product in placed.facts.products:
        laid_out = ring_of(placed, product).laid_out_bytes
        if not laid_out or product.weight is None:
            continue
        stored = placed.stored(product.weight)
        if stored:
            total += laid_out * (1 - 2 / ground.ways(stored))
        elif placed.used_ways(product.weight) == 1:
            others = 1 - 2 / ground.ways(ground.data_axes)
            total += _LAID_OUT_OF_SPLIT_SLOTS * laid_out * others
    return total


def _together_bytes(placed: Placed) -> float:
    """Weights that are brought together: the largest for its use, tables after an update."""
    largest = tables = 0.0
    for product in placed.facts.products:
        if product.weight is not None and placed.stored(product.weight):
            used = product.weight_bytes / placed.used_ways(product.weight)
            largest = max(largest, used)
    for index in placed.tables:
        weight, columns = placed.facts.weights[index], placed.columns(index)
        if placed.ground.shard_optimizer and not placed.stored(index):
            used = weight.size * weight.itemsize / placed.used_ways(index)
            tables += _TABLES_OF_SPLIT_SLOTS * used * padding(columns.size)
    return _GATHERED * largest + tables
