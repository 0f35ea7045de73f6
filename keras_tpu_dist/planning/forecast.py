"""Memory and time of a step on a mesh, in closed form: what is worth compiling, and what is not.

A forecast ranks; it does not replace the compiler. It knows the products, where their weights lie,
and what must cross the links for them; not the kernels that the compiler makes, nor its schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_tpu_dist.dryrun.products import Product
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.hlo import Wire, seconds_over
from keras_tpu_dist.planning.facts import Facts, Kept, Spec, Weight

# What gathers of weights leave exposed: the compiler starts them ahead of the product that needs
# them. Reductions are waited for.
_EXPOSED_OF_A_GATHER = 0.3
# Each step reads weights and slots and writes them, and writes and reads the gradients.
_STATE_PASSES = 2
# Of the bytes that JAX keeps, what the compiler keeps: it computes cheap operations again.
_KEPT_BY_THE_COMPILER = 0.6


@dataclass(frozen=True)
class Forecast:
    """What a step is expected to take on one device.

    Attributes:
        state_bytes: Weights and the optimizer's slots.
        kept_bytes: Activations kept for the gradients.
        memory_bytes: All together.
        compute_s: Products at the chip's peak, or at its bandwidth where that is slower.
        traffic_s: What else is read and written.
        links_s: Collectives at full speed.
        exposed_s: The part of them that is waited for.
    """

    state_bytes: float
    kept_bytes: float
    memory_bytes: float
    compute_s: float
    traffic_s: float
    links_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return max(self.compute_s + self.traffic_s + self.exposed_s, self.links_s)


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
    share = rows / facts.rows / ground.ways(ground.data_axes)
    kept = facts.kept[policy]
    again = _computed_again(facts, kept)
    compute = links = exposed = 0.0
    for product in facts.products:
        spec = () if product.weight is None else specs[product.weight]
        compute += _product_s(product, spec, specs, ground, share) * (3 + again)
        crossing, waited = _product_links(product, spec, ground, share)
        links, exposed = links + crossing, exposed + waited
    gradients = _gradient_links(facts.weights, specs, ground)
    state = _state_bytes(facts.weights, specs, ground)
    held = _kept_bytes(kept, facts.weights, specs, ground, share) * _KEPT_BY_THE_COMPILER
    whole = _kept_bytes(facts.kept[None], facts.weights, specs, ground, share)
    # Written, read, and their gradients; what is not kept is written and read again.
    moved = 3 * whole * _KEPT_BY_THE_COMPILER + 2 * (whole * _KEPT_BY_THE_COMPILER - held)
    traffic = _STATE_PASSES * state + moved + 4 * facts.output_bytes * share
    return Forecast(
        state_bytes=state,
        kept_bytes=held,
        memory_bytes=_memory(facts, specs, ground, state, held, share),
        compute_s=compute,
        traffic_s=traffic / ground.topology.hbm_bandwidth,
        links_s=links + gradients,
        exposed_s=exposed + gradients,
    )


def _computed_again(facts: Facts, kept: Kept) -> float:
    """Of the forward pass, how much a policy computes twice."""
    plain = facts.kept[None].flops
    forward = sum(p.flops * p.times for p in facts.products)
    return (kept.flops - plain) / forward if forward else 0.0


def _split(spec: Spec, ground: Ground) -> list[tuple[str, ...]]:
    """The axes of each dimension that stay split while a product runs: those of no batch."""
    return [tuple(axis for axis in axes if axis not in ground.data_axes) for axes in spec]


def _product_s(
    product: Product, spec: Spec, specs: Sequence[Spec], ground: Ground, share: float
) -> float:
    if product.weight is None:
        # Attention's own products are split as the heads around them are.
        ways = max((ground.ways(axes) for s in specs for axes in _split(s, ground)), default=1)
    else:
        ways = math.prod(ground.ways(axes) for axes in _split(spec, ground))
    arithmetic = product.flops * share / ways / ground.topology.peak_flops()
    moved = (product.read_bytes + product.written_bytes) * share + product.weight_bytes
    return product.times * max(arithmetic, moved / ways / ground.topology.hbm_bandwidth)


def _product_links(
    product: Product, spec: Spec, ground: Ground, share: float
) -> tuple[float, float]:
    """Seconds on the links for one product and its gradients: all, and those waited for."""
    if product.weight is None:
        return 0.0, 0.0
    over = _split(spec, ground)
    reduced = waited = 0.0
    for dimension, axes in enumerate(over):
        if not axes:
            continue
        # Partial sums forwards, or partial gradients of the input backwards.
        summed = dimension in product.contracted
        whole = (product.written_bytes if summed else product.read_bytes) * share
        reduced += seconds_over(ground.wire, "all-reduce", whole, axes)
    waited += reduced
    stored = tuple(axis for axes in spec for axis in axes if axis in ground.data_axes)
    if stored:
        part = product.weight_bytes / math.prod(ground.ways(axes) for axes in over)
        gathered = 2 * seconds_over(ground.wire, "all-gather", part, stored)
        return product.times * (reduced + gathered), product.times * (
            waited + gathered * _EXPOSED_OF_A_GATHER
        )
    return product.times * reduced, product.times * waited


def _gradient_links(weights: Sequence[Weight], specs: Sequence[Spec], ground: Ground) -> float:
    total = 0.0
    for weight, spec in zip(weights, specs):
        if not weight.trainable:
            continue
        ways = math.prod(ground.ways(axes) for axes in _split(spec, ground))
        whole = weight.size * weight.itemsize / ways
        total += seconds_over(ground.wire, "all-reduce", whole, ground.data_axes)
    return total


def _ways(spec: Spec, ground: Ground) -> int:
    return math.prod(ground.ways(axes) for axes in spec)


def _state_bytes(weights: Sequence[Weight], specs: Sequence[Spec], ground: Ground) -> float:
    total = 0.0
    for weight, spec in zip(weights, specs):
        ways = _ways(spec, ground)
        over = {axis for axes in spec for axis in axes}
        left = [axis for axis in ground.data_axes if axis not in over]
        extra = ground.ways(left) if ground.shard_optimizer and weight.shape else 1
        total += weight.size * weight.itemsize / ways + weight.slot_bytes / ways / extra
    return total


def _kept_bytes(
    kept: Kept, weights: Sequence[Weight], specs: Sequence[Spec], ground: Ground, share: float
) -> float:
    """Activations on one device; features that a weight's split makes are split as it is."""
    features: dict[int, int] = {}
    for weight, spec in zip(weights, specs):
        for size, axes in zip(weight.shape, _split(spec, ground)):
            if axes and size > 1:
                features[size] = max(features.get(size, 1), ground.ways(axes))
    total = 0.0
    for shape, itemsize in kept.arrays:
        ways = max((features.get(size, 1) for size in shape[1:]), default=1)
        total += math.prod(shape) * itemsize / ways
    return total * share


def _memory(
    facts: Facts, specs: Sequence[Spec], ground: Ground, state: float, held: float, share: float
) -> float:
    gradients = sum(
        weight.size * weight.itemsize / _ways(spec, ground)
        for weight, spec in zip(facts.weights, specs)
        if weight.trainable
    )
    gathered = max(
        (
            weight.size * weight.itemsize / math.prod(map(ground.ways, _split(spec, ground)))
            for weight, spec in zip(facts.weights, specs)
        ),
        default=0.0,
    )
    # The outputs and their gradient, which a loss works on in float32.
    batch = (facts.input_bytes + 2 * facts.output_bytes) * share
    return state + max(gradients, 2 * gathered) + held + batch
