"""Products whose operands are split at random: on simulated devices equal to one device."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.hardware.mesh import auto_mesh
from keras_tpu_dist.programs.partitioner import Jitted

PRODUCTS = (
    *("btnh,btnr->hr", "bth,btr->hr", "btn,btnr->r", "btn,btn->", "btnh,btr->nhr"),
    *("nr,btn->btr", "bn,nr->br", "btr,btr->br"),
)
MESHES = ({"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2})


def drawn_axes(dice: random.Random, rank: int, mesh: dict[str, int]) -> PartitionSpec:
    """A layout, in which most axes split some dimension, in any order."""
    dims: list[tuple[str, ...]] = [() for _ in range(rank)]
    for name in dice.sample([*mesh], len(mesh)) if rank else ():
        if dice.random() < 0.8:
            dims[dice.randrange(rank)] += (name,)
    return PartitionSpec(*(axes or None for axes in dims))


def gradients(of):
    return jax.grad(lambda *operands: 2 * jnp.sum(of(*operands)), argnums=(0, 1))


def in_a_loop(of):
    def run(*operands):
        def step(scale, _):
            return scale + 1, of(*(operand * scale for operand in operands))

        return lax.scan(step, jnp.float32(1), None, length=3)[1]

    return run


def in_a_branch(of):
    def run(*operands):
        # One number of it, for which the operand is reshaped.
        small = operands[0].ravel()[0] > -10
        return lax.cond(small, lambda: of(*operands), lambda: of(*(2 * o for o in operands)))

    return run


# How a program may have a product.
WAYS = {
    "plain": lambda of: of,
    "gradients": gradients,
    "recomputed": lambda of: gradients(jax.checkpoint(of)),
    "in a loop": in_a_loop,
    "in a branch": in_a_branch,
}


def program(dice, mesh):
    """A product with drawn layouts of its operands, and maybe of its result."""
    product = dice.choice(PRODUCTS)
    inputs, output = product.split("->")
    ranks = map(len, inputs.split(","))
    specs = [drawn_axes(dice, rank, mesh.shape) for rank in ranks]
    of_result = [None, PartitionSpec(), drawn_axes(dice, len(output), mesh.shape)]
    result = dice.choice(of_result)

    def of(*operands):
        laid_out = (
            lax.with_sharding_constraint(operand, NamedSharding(mesh, spec))
            for operand, spec in zip(operands, specs, strict=True)
        )
        made = jnp.einsum(product, *laid_out)
        if result is None:
            return made
        return lax.with_sharding_constraint(made, NamedSharding(mesh, result))

    return product, of, (*specs, result)


def wrong(axes, seed, count, way="plain"):
    """Drawn products that differ from one device, and those that are computed otherwise."""
    mesh = auto_mesh(np.asarray(jax.devices()).reshape(*axes.values()), tuple(axes))
    dice, rng = random.Random(seed), np.random.default_rng(seed)
    found, repaired = [], []
    for _ in range(count):
        product, of, layouts = program(dice, mesh)
        sizes = dict(zip("btnhr", dice.choices((8, 8, 6, 13), k=5), strict=True))
        shapes = [[sizes[name] for name in names] for names in product.split("->")[0].split(",")]
        # Small whole numbers, whose sums have no rounding.
        operands = [rng.integers(-4, 5, shape).astype("float32") for shape in shapes]
        jitted = Jitted(WAYS[way](of), mesh, lambda *args: [None, None], keep=repaired.extend)
        plain = WAYS[way](lambda *both, product=product: jnp.einsum(product, *both))
        try:
            made = jitted(*operands)
        except ValueError as error:
            # The compiler may split a result over a part of an axis, for which JAX has no name.
            if "is incompatible with mesh_shape" not in str(error):
                raise
            continue
        pairs = zip(jax.tree.leaves(made), jax.tree.leaves(plain(*operands)))
        if not all(np.array_equal(one, other) for one, other in pairs):
            found.append((product, *layouts, sizes))
    return found, repaired


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_products_are_equal_to_one_device(axes):
    found, repaired = wrong(axes, seed=0, count=24)
    assert not found
    assert repaired


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_many_products_are_equal_to_one_device(axes, way):
    found, repaired = wrong(axes, seed=1, count=400 if way == "plain" else 100, way=way)
    assert not found
    assert repaired


@pytest.mark.parametrize("summed", ["data", "fsdp", "model"])
def test_a_convolution_in_another_order_than_the_devices(summed):
    axes = {"data": 2, "fsdp": 2, "model": 2}
    mesh = auto_mesh(np.asarray(jax.devices()).reshape(*axes.values()), tuple(axes))
    order = tuple(name for name in reversed(axes) if name != summed)

    def laid_out(array, *spec):
        return lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def convolved(x, kernel):
        numbers = ("NHC", "HIO", "NHC")
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers)

    def of(x, kernel):
        made = convolved(laid_out(x, None, None, summed), laid_out(kernel, None, summed))
        return laid_out(made, order, None, summed)

    rng = np.random.default_rng(0)
    x, kernel = (rng.integers(-4, 5, (n, 8, 8)).astype("float32") for n in (8, 3))
    found = Jitted(of, mesh, lambda *args: [None, None])(x, kernel)
    np.testing.assert_array_equal(found, convolved(x, kernel))


def test_a_product_over_rows_alone_is_left_as_written():
    mesh = auto_mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    answers = []
    jitted = Jitted(
        lambda x, y: jnp.einsum("bth,btr->hr", x, y),
        mesh,
        lambda *args: [rows] * 2,
        keep=answers.extend,
    )
    x = np.ones((8, 4, 4), "float32")
    np.testing.assert_array_equal(jitted(x, x), np.full((4, 4), 32.0))
    assert not answers
