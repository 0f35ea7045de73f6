"""What must cross the links in a step, and what of it is waited for."""

from keras_tpu_dist.dryrun.products import Product
from keras_tpu_dist.planning.facts import Weight
from keras_tpu_dist.planning.ground import Placed

# What gathers of weights leave exposed: the compiler starts them ahead of the product that needs
# them. Reductions are waited for.
_EXPOSED_OF_A_GATHER = 0.5


def links(placed: Placed, again: float) -> tuple[float, float]:
    """Seconds on the links at full speed: all, and those waited for.

    Args:
        placed: The model on its mesh.
        again: Of the forward pass, how much is computed twice.
    """
    reduced = gathered = 0.0
    last: tuple | None = None
    for product in placed.facts.products:
        if product.weight is None:
            continue
        shape, spec = placed.facts.weights[product.weight].shape, placed.specs[product.weight]
        # Queries, keys and values read one array, whose gradient is summed once; not so where each
        # gathers it for itself.
        alike = (shape, spec, product.read_bytes, product.contracted)
        forwards, backwards = _partial_sums(placed, product, product.weight)
        once = alike == last and not placed.begins_split
        reduced += forwards * (1 + again) + (0.0 if once else backwards)
        last = alike
        gathered += _gathers(placed, product, product.weight) * (1 + again / 2)
    for lookup in placed.facts.lookups:
        reduced += _taken(placed, lookup.taken_bytes, lookup.weight)
    for index, weight, _ in placed.weights():
        # Of a table that is stored split, each device adds up what is of its part.
        if weight.trainable and not (index in placed.tables and placed.stored(index)):
            summed, updated = _gradient(placed, index, weight)
            reduced, gathered = reduced + summed, gathered + updated
    return reduced + gathered, reduced + gathered * _EXPOSED_OF_A_GATHER


def _partial_sums(placed: Placed, product: Product, weight: int) -> tuple[float, float]:
    """Seconds for partial sums forwards, and for partial gradients of the input backwards."""
    if product.times > 1:
        return 0.0, 0.0
    forwards = backwards = 0.0
    written, read = product.written_bytes * placed.share, product.read_bytes * placed.share
    for dimension, axes in enumerate(placed.split(weight)):
        if dimension in product.contracted:
            forwards += placed.ground.seconds("all-reduce", written, axes)
        else:
            backwards += placed.ground.seconds("all-reduce", read, axes)
    return forwards, backwards


def _gathers(placed: Placed, product: Product, weight: int) -> float:
    """Seconds to bring a weight together: for a loop once, else forwards and backwards."""
    if product.times > 1:
        axes = [axis for axes in placed.specs[weight] for axis in axes]
        return placed.ground.seconds("all-gather", product.weight_bytes, axes)
    part = product.weight_bytes / placed.used_ways(weight)
    return 2 * placed.ground.seconds("all-gather", part, placed.stored(weight))


def _taken(placed: Placed, taken: float, weight: int) -> float:
    """Seconds for rows of a table that is split: each device has some, and they are summed."""
    seconds = 0.0
    # Where an axis of the batch splits the table, of the whole batch; then each device gets what is
    # of its own, and backwards the gradients go the other way.
    whole, data = taken * placed.batches, placed.ground.data_axes
    first, *others = placed.specs[weight]
    rows = [axis for axis in first if axis in data]
    columns = [axis for axes in others for axis in axes if axis in data]
    seconds += placed.ground.seconds("reduce-scatter", whole, rows)
    seconds += placed.ground.seconds("all-gather", whole, rows)
    part = whole / placed.ground.ways(columns)
    seconds += 2 * placed.ground.seconds("all-to-all", part, columns)
    for axes in placed.split(weight):
        seconds += placed.ground.seconds("all-reduce", taken * placed.share, axes)
    return seconds


def _gradient(placed: Placed, index: int, weight: Weight) -> tuple[float, float]:
    """Seconds to sum a gradient over the axes of the batch, and to gather updated weights."""
    ground = placed.ground
    whole = weight.size / placed.used_ways(index)
    summed = whole * placed.gradient_itemsizes[index]
    stored = placed.stored(index)
    if not stored and not (ground.shard_optimizer and weight.slot_bytes):
        return ground.seconds("all-reduce", summed, ground.data_axes), 0.0
    scattered = ground.seconds("reduce-scatter", summed, ground.data_axes)
    if stored:
        return scattered, 0.0
    return scattered, ground.seconds("all-gather", whole * weight.itemsize, ground.data_axes)
