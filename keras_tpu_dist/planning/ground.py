"""A model's weights and products where a strategy puts them on a mesh."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_tpu_dist.dryrun.products import Product
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.hlo import Wire, seconds_over
from keras_tpu_dist.planning.facts import Facts, Spec, Weight


@dataclass(frozen=True)
class Ground:
    """A mesh, as a forecast sees it.

    Attributes:
        wire: Its devices and links.
        topology: The slice.
        data_axes: The axes that split the batch.
        shard_optimizer: Whether slots are split over them.
    """

    wire: Wire
    topology: Topology
    data_axes: tuple[str, ...]
    shard_optimizer: bool

    def ways(self, axes: Sequence[str]) -> int:
        """Into how many parts axes split something.

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


@dataclass(frozen=True)
class Side:
    """Dimensions of a weight taken together.

    Attributes:
        size: Their product on one device.
        ways: In how many parts they are.
    """

    size: float
    ways: int


@dataclass(frozen=True)
class Placed:
    """A model on a mesh.

    Attributes:
        facts: What the model asks.
        specs: The axes of each weight's dimensions.
        ground: The mesh.
        batches: Its rows over those that were traced.
    """

    facts: Facts
    specs: tuple[Spec, ...]
    ground: Ground
    batches: float

    @property
    def share(self) -> float:
        """One device's rows over those that were traced."""
        return self.batches / self.ground.ways(self.ground.data_axes)

    def weights(self) -> list[tuple[int, Weight, Spec]]:
        """The number, the weight and its axes of each."""
        return [(i, w, s) for i, (w, s) in enumerate(zip(self.facts.weights, self.specs))]

    def split(self, index: int) -> list[tuple[str, ...]]:
        """The axes of each dimension that stay split while a weight is used: those of no batch.

        Args:
            index: Which weight.
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
        """In how many parts the most finely split dimension of a weight is."""
        every = (axes for spec in self._splits for axes in spec)
        return max(map(self.ground.ways, every), default=1)

    def stored(self, index: int) -> tuple[str, ...]:
        """The axes of the batch that split a weight where it is stored.

        Args:
            index: Which weight.
        """
        data = self.ground.data_axes
        return tuple(axis for axes in self.specs[index] for axis in axes if axis in data)

    def ways(self, index: int) -> int:
        """In how many parts a weight is stored.

        Args:
            index: Which weight.
        """
        return math.prod(map(self.ground.ways, self.specs[index]))

    def used_ways(self, index: int) -> int:
        """In how many parts a weight is used.

        Args:
            index: Which weight.
        """
        return math.prod(map(self.ground.ways, self.split(index)))

    @functools.cached_property
    def begins_split(self) -> bool:
        """Whether the features that the first layer makes are split, as then those after it are."""
        first = next((p.weight for p in self.facts.products if p.weight is not None), None)
        return not self.tables and first is not None and bool(self.split(first)[-1])

    @functools.cached_property
    def tables(self) -> frozenset[int]:
        """The weights in which rows are looked up."""
        return frozenset(lookup.weight for lookup in self.facts.lookups)

    def columns(self, index: int) -> Side:
        """The columns of a table's rows; of a vector none.

        Args:
            index: Which weight.
        """
        shape, axes = self.facts.weights[index].shape, self.specs[index]
        if len(shape) < 2:
            return Side(0, 1)
        ways = self.ground.ways(axes[-1])
        return Side(shape[-1] / ways, ways)

    def in_a_loop(self, product: Product) -> bool:
        """Whether a product runs in a loop, not once on each device.

        Args:
            product: The product.
        """
        return product.times > self.ground.wire.size

    def sides(self, product: Product, weight: int) -> tuple[Side, Side]:
        """What a product sums over, and the features that it makes.

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
        """Bytes of an element of each gradient: as wide as the product's that makes it.

        Those of loops are summed in float32.
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
