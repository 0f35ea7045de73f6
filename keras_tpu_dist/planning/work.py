"""What the chips do in a step: products, and what moves through memory beside them."""

import math
from dataclasses import dataclass

from keras_tpu_dist.dryrun.products import Product
from keras_tpu_dist.hardware.compiler_options import uses_rings
from keras_tpu_dist.planning.ground import Placed

# The compiler's cycles of effort "quick", by which a search decides, over what a product would
# take at the chip's peak (`python benchmarks/search.py --cycles`, libtpu 0.0.42.1, v5e).
PRODUCT_CYCLES = 4.2
# The matrix units and the vectors have 128 columns; fewer take as long.
_COLUMNS = 128
# What a round of pieces of a gradient takes at least, and how often bytes of its are moved.
_ROUND_S = 2e-5
_ROUND_PASSES = 2


def padding(size: float) -> float:
    """How much more the chip does for so many columns.

    Args:
        size: The columns.
    """
    return math.ceil(size / _COLUMNS) * _COLUMNS / size if size else 1.0


@dataclass(frozen=True)
class Part:
    """One device's part of a product.

    Attributes:
        forward_s: Seconds of the matrix units forwards.
        backward_s: And for both gradients.
        moved_bytes: Its operands and its result, once.
    """

    forward_s: float
    backward_s: float
    moved_bytes: float


def part_of(placed: Placed, product: Product) -> Part:
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
        # Attention's own products are split as the heads around them are. Flash attention is a
        # kernel, whose cycles the compiler does not estimate: at full speed.
        ways = placed.most_split
        return Part(whole / ways, 2 * whole / ways, (read + written) / ways)
    moved = read + written + product.weight_bytes
    if placed.in_a_loop(product):
        # The step of a recurrence is a kernel too, with its weights whole, on the chip; the
        # gradient of the weights is one product after it.
        return Part(whole, whole * (1 + PRODUCT_CYCLES), moved)
    if product.times > 1:
        return Part(whole * PRODUCT_CYCLES, 2 * whole * PRODUCT_CYCLES, moved)
    summed, made = placed.sides(product, weight)
    columns = padding(summed.size) * padding(made.size)
    if product.taps > 1:
        # Convolutions may have the batch where others have features.
        batch = padding(placed.facts.rows * placed.share)
        columns = min(columns, batch * min(padding(summed.size), padding(made.size)))
    one = whole * PRODUCT_CYCLES * columns / summed.ways / made.ways
    moved = read / summed.ways + written / made.ways
    return Part(one, 2 * one, moved + product.weight_bytes / summed.ways / made.ways)


@dataclass(frozen=True)
class Ring:
    """A gradient that is made piece by piece.

    Attributes:
        seconds: The least that the rounds take.
        moved_bytes: What they move.
        laid_out_bytes: An operand that is laid out anew for them.
    """

    seconds: float = 0.0
    moved_bytes: float = 0.0
    laid_out_bytes: float = 0.0


def ring_of(placed: Placed, product: Product, again: float = 0.0) -> Ring:
    """A product's gradient that is made piece by piece, each sent on when it is ready.

    So XLA does with gradients that end split over the batch's axes, where it is not told to leave
    products whole, and where a row of the batch has many rows, of a time or an image: others are
    summed and scattered. An operand is laid out anew, with the columns of one piece at a time.

    Args:
        placed: The model on its mesh.
        product: The product.
        again: Of the forward pass, how much is computed twice.
    """
    ground, weight = placed.ground, product.weight
    if weight is None or product.times > 1 or not uses_rings(ground.wire.size):
        return Ring()
    flat = 2 * placed.facts.weights[weight].size * placed.facts.rows
    if product.taps == 1 and product.flops <= flat:
        return Ring()
    stored = placed.stored(weight)
    ways = ground.ways(stored or ground.data_axes)
    # Pieces go both ways round, so that two devices need no ring.
    rounds = ways // 2 - 1
    if rounds < 1 or not (stored or ground.shard_optimizer):
        return Ring()
    summed, made = placed.sides(product, weight)
    cut, operand = made, product.written_bytes
    if summed.size >= made.size:
        cut, operand = summed, product.read_bytes
    pieces = _ROUND_PASSES * product.weight_bytes / summed.ways / made.ways
    laid_out = operand * placed.share / cut.ways * padding(cut.size / ways)
    uses = 1.0
    if stored and (again or product.taps > 1):
        # The gathered weight of a convolution too, and of what is computed again.
        uses = 3 + again if product.taps > 1 else 2
    moved = pieces + laid_out * uses
    return Ring(_ROUND_S * rounds * uses, moved * rounds, laid_out)


def table_bytes(placed: Placed) -> float:
    """Bytes moved for tables and their gradients.

    Both are laid out anew, and then have 128 columns where they are of fewer.

    Args:
        placed: The model on its mesh.
    """
    moved = 0.0
    for index in placed.tables:
        weight, wide = placed.facts.weights[index], padding(placed.columns(index).size)
        one = weight.size * weight.itemsize / placed.ways(index)
        # Read as stored and written half as wide, then copied, as the gradient is.
        moved += one * (1.5 + 1 + wide)
    return moved


def taken_bytes(placed: Placed) -> float:
    """Bytes moved of rows that are looked up: of the whole batch where a table is stored split.

    Args:
        placed: The model on its mesh.
    """
    total, ground = 0.0, placed.ground
    for lookup in placed.facts.lookups:
        stored, columns = placed.stored(lookup.weight), placed.columns(lookup.weight)
        rest = ground.ways([axis for axis in ground.data_axes if axis not in stored])
        wide = padding(columns.size) / columns.ways
        total += 4 * lookup.taken_bytes * placed.batches * wide / rest
    return total


def output_bytes(placed: Placed) -> float:
    """The model's outputs on one device, split as the last product's features are.

    Args:
        placed: The model on its mesh.
    """
    ways = 1
    last = next((p for p in reversed(placed.facts.products) if p.weight is not None), None)
    if last is not None and last.weight is not None and last.times == 1:
        ways = placed.sides(last, last.weight)[1].ways
    return placed.facts.output_bytes * placed.share / ways
