"""Forecasts memory and time of a step on a mesh, in closed form, to decide what to compile.

A forecast ranks candidates; it does not replace the compiler. It knows the products, how their
weights are split, and what must cross the links for them. It does not know the compiler's kernels
or its schedule.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_tpu_dist.hardware.compiler_options import uses_rings
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.programs.products import Lookup, MatrixProduct
from keras_tpu_dist.programs.tables import width
from keras_tpu_dist.tools.hlo import Wire, latency_over, seconds_over
from keras_tpu_dist.tools.searches.activations import BATCH, Origin, peak_bytes
from keras_tpu_dist.tools.searches.facts import Facts, Spec, Weight
from keras_tpu_dist.training.guard import states_that_fit


@dataclass(frozen=True)
class Ground:
    """The mesh of a forecast.

    Attributes:
        shard_optimizer: Whether optimizer slots are split over them.
    """

    wire: Wire
    topology: Topology
    data_axes: tuple[str, ...]
    shard_optimizer: bool

    def ways(self, axes: Sequence[str]) -> int:
        """The number of parts into which axes split something.

        Args:
            axes: The axes.
        """
        sizes = dict(self.wire.axes)
        return math.prod(sizes[axis] for axis in axes)

    def seconds(self, kind: str, whole: float, axes: Sequence[str]) -> float:
        """Seconds of a collective over axes.

        Args:
            kind: `"all-reduce"` and so on.
            whole: Bytes of the whole array.
            axes: The axes.
        """
        return seconds_over(self.wire, kind, whole, axes)

    def seconds_to_wait(self, kind: str, whole: float, axes: Sequence[str]) -> float:
        """Seconds of a collective that the next layer waits for, however few its bytes are.

        Those of gradients go together, so that their hops hardly count.
        """
        return max(self.seconds(kind, whole, axes), latency_over(self.wire, kind, axes))


@dataclass(frozen=True)
class Side:
    """Dimensions of a weight taken together."""

    size: float
    ways: int


@dataclass(frozen=True)
class Placed:
    """A model on a mesh.

    Attributes:
        batches: The number of rows, relative to the traced batch.
    """

    facts: Facts
    specs: tuple[Spec, ...]
    ground: Ground
    batches: float

    @property
    def share(self) -> float:
        """One device's rows, relative to the traced batch."""
        return self.batches / self.ground.ways(self.ground.data_axes)

    def split(self, index: int) -> list[tuple[str, ...]]:
        """The axes of every dimension that stay split while a weight is used: the model axes.

        Args:
            index: The number of the weight.
        """
        return self._splits[index]

    @functools.cached_property
    def _splits(self) -> list[list[tuple[str, ...]]]:
        data = self.ground.data_axes
        return [
            [tuple(axis for axis in axes if axis not in data) for axes in spec]
            for spec in self.specs
        ]

    @functools.cached_property
    def most_split(self) -> int:
        """The number of parts of the most finely split dimension of a weight."""
        every = (axes for spec in self._splits for axes in spec)
        return max(map(self.ground.ways, every), default=1)

    def stored(self, index: int) -> tuple[str, ...]:
        """The data axes that split a stored weight.

        Args:
            index: The number of the weight.
        """
        data = self.ground.data_axes
        return tuple(axis for axes in self.specs[index] for axis in axes if axis in data)

    def ways(self, index: int) -> int:
        """The number of parts in which a weight is stored.

        Args:
            index: The number of the weight.
        """
        return math.prod(map(self.ground.ways, self.specs[index]))

    def used_ways(self, index: int) -> int:
        """The number of parts in which a weight is used.

        Args:
            index: The number of the weight.
        """
        return math.prod(map(self.ground.ways, self.split(index)))

    @functools.cached_property
    def tables(self) -> frozenset[int]:
        """The weights that rows are looked up in."""
        return frozenset(lookup.weight for lookup in self.facts.lookups)

    def columns(self, index: int) -> float:
        """The columns of a table's rows on one device; 0 for a vector, which has none.

        Args:
            index: The number of the weight.
        """
        shape, axes = self.facts.weights[index].shape, self.specs[index]
        return shape[-1] / self.ground.ways(axes[-1]) if len(shape) > 1 else 0.0

    @functools.cached_property
    def by_width(self) -> frozenset[int]:
        """The tables that a step uses by their width, as `programs.tables.width` decides."""
        products = {product.weight for product in self.facts.products}
        return frozenset(
            lookup.weight
            for lookup in self.facts.lookups
            if lookup.weight not in products and self._is_by_width(lookup)
        )

    def _is_by_width(self, lookup: Lookup) -> bool:
        index, weight = lookup.weight, self.facts.weights[lookup.weight]
        if len(weight.shape) != 2 or weight.size * weight.itemsize < width.LEAST_BYTES:
            return False
        ways, stored = self.ways(index), self.stored(index)
        if ways == 1 or self.used_ways(index) > 1 or weight.shape[1] % ways:
            return False
        every = [other for other in self.facts.lookups if other.weight == index]
        ids = sum(one.ids for one in every)
        item = lookup.taken_bytes // (lookup.ids * weight.shape[1])
        by_rows = bool(set(self.specs[index][0]) & set(stored))
        lookups = width.StepLookups(ids * self.batches, item, weight.trainable)
        return width.is_shorter_for(weight.shape, ways, by_rows, lookups)

    def in_a_loop(self, product: MatrixProduct) -> bool:
        """Whether a product runs in a loop instead of once on every device.

        Args:
            product: The product.
        """
        return product.times > self.ground.wire.size

    def sides(self, product: MatrixProduct, weight: int) -> tuple[Side, Side]:
        """The dimensions that a product sums over, and the features that it computes.

        Args:
            product: The product.
            weight: The weight that it reads.
        """
        shape, split = self.facts.weights[weight].shape, self.split(weight)
        found = []
        for summed in (True, False):
            dims = [d for d in range(len(shape)) if (d in product.contracted) == summed]
            ways = math.prod(self.ground.ways(split[d]) for d in dims)
            taps = 1 if summed else product.taps
            found.append(Side(math.prod(shape[d] for d in dims) / taps / ways, ways))
        return found[0], found[1]

    @functools.cached_property
    def gradient_itemsizes(self) -> tuple[float, ...]:
        """Bytes of an element of every gradient: as wide as the product that computes it.

        Gradients from loops are summed in float32.
        """
        weights = self.facts.weights
        sizes = {
            p.weight: p.weight_bytes / weights[p.weight].size
            for p in self.facts.products
            if p.weight is not None and p.times == 1
        }
        narrow = min(sizes.values(), default=4.0)
        sizes |= dict.fromkeys(self.tables, narrow)
        return tuple(sizes.get(i, float(w.itemsize)) for i, w in enumerate(weights))


# The step time depends on two fitted numbers, and on the chip. Every other number that was tried
# changed no rank correlation for seven models by more than 0.01 (`python benchmarks/search.py
# --without`).
#
# The first is the ratio of the compiler's cycles for effort "quick", by which a search decides, to
# the chip's cycles at its peak rates. A search compares the cycles with time on the links, which
# counts in full. With a value of 1, the steps of the mixture of experts correlate by 0.72 instead
# of 0.92.
_QUICK = 2.5
# The minimal time of a round for pieces of a gradient, however small the piece. With a value of 0,
# ViT's steps correlate by 0.80 instead of 0.97.
_ROUND_S = 2e-5
# An array is written once and read once.
_PASSES = 2
# The matrix units and the vectors have 128 columns; fewer take as long. Without this, the CNN's
# steps correlate by 0.81 instead of 0.95, and its memory not at all instead of by 0.61.
_COLUMNS = 128


def padding(size: float) -> float:
    """The factor by which padding to full columns increases the chip's work.

    Args:
        size: The number of columns.
    """
    return math.ceil(size / _COLUMNS) * _COLUMNS / size if size else 1.0


@dataclass(frozen=True)
class Part:
    """One device's part of a product. Its gradients are two more products of the same size.

    Attributes:
        forward_s: Seconds of the matrix units at their peak rate.
    """

    forward_s: float
    moved_bytes: float


def part_of(placed: Placed, product: MatrixProduct) -> Part:
    """One device's part of a product.

    Args:
        placed: The model on its mesh.
        product: The product.
    """
    ground, often = placed.ground, product.times * placed.share
    whole = product.flops * often / ground.topology.peak_flops()
    read, written = product.read_bytes * often, product.written_bytes * often
    weight = product.weight
    if weight is None:
        # Attention's own products are split as the heads around them.
        ways = placed.most_split
        return Part(whole / ways, (read + written) / ways)
    if product.times > 1:
        # Within a loop, such as a recurrence, weights are whole.
        return Part(whole, read + written + product.weight_bytes)
    summed, made = placed.sides(product, weight)
    columns = padding(summed.size) * padding(made.size)
    if product.taps > 1:
        # Convolutions may have the batch in place of features.
        batch = padding(placed.facts.rows * placed.share)
        columns = min(columns, batch * min(padding(summed.size), padding(made.size)))
    one = whole * columns / summed.ways / made.ways
    moved = read / summed.ways + written / made.ways
    return Part(one, moved + product.weight_bytes / summed.ways / made.ways)


@dataclass(frozen=True)
class Ring:
    """A gradient that is computed piece by piece.

    Attributes:
        laid_out_bytes: Bytes of an operand that is copied to another layout for them.
    """

    seconds: float = 0.0
    moved_bytes: float = 0.0
    laid_out_bytes: float = 0.0


def ring_of(placed: Placed, product: MatrixProduct, again: float = 0.0) -> Ring:
    """A product's gradient that is computed piece by piece; every piece is sent when it is ready.

    XLA does this for gradients that end up split over the data axes, unless an option keeps
    products whole, and if a row of the batch has many rows of its own (a time or an image). Other
    gradients are summed and scattered. An operand is copied to another layout, with the columns of
    one piece at a time.

    Args:
        placed: The model on its mesh.
        product: The product.
        again: The share of the forward pass that is recomputed.
    """
    ground, weight = placed.ground, product.weight
    if weight is None or product.times > 1 or not uses_rings(ground.wire.size):
        return Ring()
    flat = 2 * placed.facts.weights[weight].size * placed.facts.rows
    if product.taps == 1 and product.flops <= flat:
        return Ring()
    stored = placed.stored(weight)
    ways = ground.ways(stored or ground.data_axes)
    # Pieces go both ways around the ring, so two devices need no ring.
    rounds = ways // 2 - 1
    if rounds < 1 or not (stored or ground.shard_optimizer):
        return Ring()
    summed, made = placed.sides(product, weight)
    cut, operand = made, product.written_bytes
    if summed.size >= made.size:
        cut, operand = summed, product.read_bytes
    pieces = _PASSES * product.weight_bytes / summed.ways / made.ways
    laid_out = operand * placed.share / cut.ways * padding(cut.size / ways)
    # How often the ring is walked: for the gradient; to gather the weight forwards; and again, if
    # the forward pass is recomputed.
    uses = 1.0
    if stored and (again or product.taps > 1):
        # A convolution also uses the gathered weight once more, and so does recomputation.
        uses = 3 + again if product.taps > 1 else 2
    moved = pieces + laid_out * uses
    return Ring(_ROUND_S * rounds * uses, moved * rounds, laid_out)


def table_bytes(placed: Placed) -> float:
    """Bytes moved for tables in another layout: with at least 128 columns, or by their width.

    Args:
        placed: The model on its mesh.
    """
    moved = 0.0
    for index in placed.tables:
        weight, wide = placed.facts.weights[index], padding(placed.columns(index))
        moved += _PASSES * wide * weight.size * weight.itemsize / placed.ways(index)
    for index in placed.by_width:
        # As it is used, its gradient as it is summed up, and as it is exchanged.
        item, summed = placed.gradient_itemsizes[index], 4
        copies = (2 * item + summed) * placed.facts.weights[index].size / placed.ways(index)
        moved += _PASSES * copies
    for lookup in placed.facts.lookups:
        if lookup.weight in placed.by_width:
            moved += 2 * _PASSES * _columns_bytes(placed, lookup)
    return moved


def output_bytes(placed: Placed) -> float:
    """Bytes of the model's outputs on one device, split as the last product's features.

    Args:
        placed: The model on its mesh.
    """
    ways = 1
    last = next((p for p in reversed(placed.facts.products) if p.weight is not None), None)
    if last is not None and last.weight is not None and last.times == 1:
        ways = placed.sides(last, last.weight)[1].ways
    return placed.facts.output_bytes * placed.share / ways


def links(placed: Placed, again: float) -> float:
    """Seconds on the links at full speed, as if nothing overlapped with them.

    Args:
        placed: The model on its mesh.
        again: The share of the forward pass that is recomputed.
    """
    seconds = 0.0
    last: tuple | None = None
    for product in placed.facts.products:
        if product.weight is None:
            continue
        shape, spec = placed.facts.weights[product.weight].shape, placed.specs[product.weight]
        # Queries, keys and values read one array, whose gradient is summed once.
        alike = (shape, spec, product.read_bytes, product.contracted)
        forwards, backwards = _partial_sums(placed, product, product.weight)
        seconds += forwards * (1 + again) + (0.0 if alike == last else backwards)
        last = alike
        seconds += _gathers(placed, product, product.weight)
    for lookup in placed.facts.lookups:
        if lookup.weight in placed.by_width:
            seconds += _exchanged(placed, lookup)
        else:
            seconds += _taken(placed, lookup.taken_bytes, lookup.weight)
    seconds += sum(_laid_by_width(placed, index) for index in placed.by_width)
    for index, weight in enumerate(placed.facts.weights):
        # If a table is stored split, every device adds up the rows of its own part.
        if weight.trainable and not (index in placed.tables and placed.stored(index)):
            seconds += _gradient(placed, index, weight)
    return seconds


def _partial_sums(placed: Placed, product: MatrixProduct, weight: int) -> tuple[float, float]:
    """Seconds for partial sums in the forward pass, and for partial input gradients in the
    backward."""
    if product.times > 1:
        return 0.0, 0.0
    forwards = backwards = 0.0
    written, read = product.written_bytes * placed.share, product.read_bytes * placed.share
    for dimension, axes in enumerate(placed.split(weight)):
        if dimension in product.contracted:
            forwards += placed.ground.seconds_to_wait("all-reduce", written, axes)
        else:
            backwards += placed.ground.seconds_to_wait("all-reduce", read, axes)
    return forwards, backwards


def _gathers(placed: Placed, product: MatrixProduct, weight: int) -> float:
    """Seconds to gather a weight: once for a loop, else in the forward and the backward pass."""
    if product.times > 1:
        axes = [axis for axes in placed.specs[weight] for axis in axes]
        return placed.ground.seconds("all-gather", product.weight_bytes, axes)
    part = product.weight_bytes / placed.used_ways(weight)
    return 2 * placed.ground.seconds("all-gather", part, placed.stored(weight))


def _taken(placed: Placed, taken: float, weight: int) -> float:
    """Seconds for rows of a split table: every device has some of them, and they are summed."""
    seconds = 0.0
    # If a data axis splits the table, this covers the whole batch. Then every device gets the rows
    # of its own batch, and in the backward pass the gradients go the other way.
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


def _exchanged(placed: Placed, lookup: Lookup) -> float:
    """Seconds to exchange features of a table by its width, and their gradients."""
    stored = placed.stored(lookup.weight)
    return 2 * placed.ground.seconds("all-to-all", _columns_bytes(placed, lookup), stored)


def _columns_bytes(placed: Placed, lookup: Lookup) -> float:
    """Bytes that a device looks up for the whole batch in a table by its width: its columns."""
    return lookup.taken_bytes * placed.batches / placed.ground.ways(placed.stored(lookup.weight))


def looked_up(placed: Placed) -> float:
    """Seconds to look all ids up in tables by their width, and to add up their gradients.

    Args:
        placed: The model on its mesh.
    """
    return sum(
        # A row takes as long as gathering some bytes.
        2
        * placed.ground.seconds("all-gather", width.BYTES_PER_ROW * lookup.ids * placed.batches, s)
        for lookup in placed.facts.lookups
        if lookup.weight in placed.by_width
        for s in [placed.stored(lookup.weight)]
    )


def _laid_by_width(placed: Placed, index: int) -> float:
    """Seconds to exchange rows of a table for columns, and columns of its gradient for rows."""
    stored, weight = placed.stored(index), placed.facts.weights[index]
    if not set(placed.specs[index][0]) & set(stored):
        return 0.0
    used = weight.size * placed.gradient_itemsizes[index] / placed.ground.ways(stored)
    return 2 * placed.ground.seconds("all-to-all", used, stored)


def _gradient(placed: Placed, index: int, weight: Weight) -> float:
    """Seconds to sum a gradient over the data axes, and to gather updated weights."""
    ground = placed.ground
    whole = weight.size / placed.used_ways(index)
    summed = whole * placed.gradient_itemsizes[index]
    stored = placed.stored(index)
    if not stored and not (ground.shard_optimizer and weight.slot_bytes):
        return ground.seconds("all-reduce", summed, ground.data_axes)
    scattered = ground.seconds("reduce-scatter", summed, ground.data_axes)
    if stored:
        return scattered
    updated = ground.seconds("all-gather", whole * weight.itemsize, ground.data_axes)
    return scattered + updated


# The program itself, and small arrays. Like the other numbers here, from `python
# benchmarks/search.py --recorded`. It does not affect the ranking; without it, ViT's memory is
# forecast at 0.6 of the compiler's.
_PROGRAM = 50 * 2**20
# A loss holds the outputs and their gradient in float32. Without this, the encoder-decoder's memory
# is forecast at 0.8 of the compiler's.
_OUTPUTS = 2
# Operands that are copied to another layout for piecewise gradients are held at the same time; if
# the weights are whole and only their slots are split, only some are. Without this, the CNN's
# memory correlates by 0.39 instead of 0.61.
_LAID_OUT_OF_SPLIT_SLOTS = 0.3
# A gathered weight, and the next one. Without this, the ranking model's memory correlates by 0.88
# instead of 0.94.
_GATHERED = 2


def memory_of(placed: Placed, policy: str | None) -> tuple[float, float, float]:
    """Forecasts the memory of a train step.

    Args:
        placed: The model on its mesh.
        policy: The remat policy.

    Returns:
        Bytes of the state, the most that is held at one time between operations, and all of it.
    """
    state = _state_bytes(placed)
    held = peak_bytes(
        placed.facts.kept[policy].buffers,
        parts_on(placed),
        lambda weight: _scattered(placed, weight),
    )
    # When the new state exists beside the old one, the activations are no longer held.
    variables = placed.facts.variables
    sizes = [int(state / variables)] * variables
    kept = states_that_fit("auto", sizes, placed.ground.topology.hbm_bytes)
    beside = max(held, state if kept else 0.0)
    beside += _OUTPUTS * output_bytes(placed) + _laid_out_bytes(placed) + _together_bytes(placed)
    batch = placed.facts.input_bytes * placed.share
    return state, held, state + beside + batch + _PROGRAM


def _state_bytes(placed: Placed) -> float:
    total, ground = 0.0, placed.ground
    for index, weight in enumerate(placed.facts.weights):
        ways = placed.ways(index)
        over = {axis for axes in placed.specs[index] for axis in axes}
        left = [axis for axis in ground.data_axes if axis not in over]
        extra = ground.ways(left) if ground.shard_optimizer and weight.shape else 1
        total += weight.size * weight.itemsize / ways + weight.slot_bytes / ways / extra
    return total


def parts_on(placed: Placed) -> Callable[[frozenset[Origin]], float]:
    """A function for the number of parts of an activation's dimension, relative to the traced
    batch.

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
        return min(map(ways, weights), default=1) * (rows if BATCH in origins else 1)

    return parts


def _scattered(placed: Placed, weight: int) -> int:
    """The factor between the parts of a gradient and those of its weight."""
    ground, stored = placed.ground, placed.stored(weight)
    return ground.ways(stored or (ground.data_axes if ground.shard_optimizer else ()))


def _laid_out_bytes(placed: Placed) -> float:
    """Bytes of operands for piecewise gradients; two pieces go both ways at once."""
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
    """Bytes of gathered weights: the largest one in use, and tables after an update."""
    largest = tables = 0.0
    for product in placed.facts.products:
        if product.weight is not None and placed.stored(product.weight):
            used = product.weight_bytes / placed.used_ways(product.weight)
            largest = max(largest, used)
    for index in placed.tables:
        weight = placed.facts.weights[index]
        if placed.ground.shard_optimizer and not placed.stored(index):
            used = weight.size * weight.itemsize / placed.used_ways(index)
            tables += used * padding(placed.columns(index))
    return _GATHERED * largest + tables


@dataclass(frozen=True)
class Forecast:
    """The expected time and memory of a step on one device.

    Attributes:
        state_bytes: Weights and the optimizer's slots.
        held_bytes: The maximum that is held at one time between operations.
        memory_bytes: All of it.
        compute_s: Products, in the compiler's cycles for effort "quick".
        traffic_s: Reads and writes, likewise.
        links_s: Collectives at full speed.
    """

    state_bytes: float
    held_bytes: float
    memory_bytes: float
    compute_s: float
    traffic_s: float
    links_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.traffic_s + self.links_s


def forecast(
    facts: Facts, specs: Sequence[Spec], ground: Ground, rows: int, policy: str | None
) -> Forecast:
    """Forecasts a train step.

    Args:
        facts: The facts about the model.
        specs: The axes of every weight's dimensions.
        ground: The mesh.
        rows: Rows of all devices together.
        policy: The remat policy.
    """
    placed = Placed(facts, tuple(specs), ground, rows / facts.rows)
    again = _computed_again(facts, policy)
    state, held, total = memory_of(placed, policy)
    compute = rounds = 0.0
    # Activations; weights and slots; and weights whose updates are gathered.
    moved = _written_bytes(placed, policy) + state + _gathered_bytes(placed)
    moved = _PASSES * moved + table_bytes(placed)
    for product in facts.products:
        part, ring = part_of(placed, product), ring_of(placed, product, again)
        compute += part.forward_s * (3 + again)
        moved += part.moved_bytes * (3 + again) + ring.moved_bytes
        rounds += ring.seconds
    return Forecast(
        state_bytes=state,
        held_bytes=held,
        memory_bytes=total,
        compute_s=_QUICK * compute + rounds + looked_up(placed),
        traffic_s=_QUICK * moved / ground.topology.hbm_bandwidth,
        links_s=links(placed, again),
    )


def _computed_again(facts: Facts, policy: str | None) -> float:
    """The share of the forward pass that a policy recomputes."""
    forward = sum(p.flops * p.times for p in facts.products)
    again = facts.kept[policy].flops - facts.kept[None].flops
    return again / forward if forward else 0.0


def _gathered_bytes(placed: Placed) -> float:
    """Bytes of weights whose updates are computed in parts, because their slots are split."""
    return sum(
        weight.size * weight.itemsize / placed.ways(index)
        for index, weight in enumerate(placed.facts.weights)
        if placed.ground.shard_optimizer and weight.slot_bytes and not placed.stored(index)
    )


def _written_bytes(placed: Placed, policy: str | None) -> float:
    """Bytes written on one device between the operations of a step, without gradients."""
    parts = parts_on(placed)
    return sum(
        math.prod(size / parts(origins) for size, origins in zip(b.shape, b.origins, strict=True))
        * b.itemsize
        for b in placed.facts.kept[policy].buffers
        if b.gradient is None
    )
