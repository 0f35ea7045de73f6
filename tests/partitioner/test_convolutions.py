"""Convolutions whose kernel, image and successor are split in every way, against one device."""

import itertools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from keras_tpu_dist.programs.partitioner import Jitted

TIME, IMAGE = ("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC")
# By name: shapes of the kernel, of the scale of one row, and of the head's rows; the convolution.
KINDS = {
    "valid": ((3, 4, 8), (8, 4), 48, lambda x, k: _convolved(x, k, TIME, "VALID")),
    "same": ((3, 4, 8), (8, 4), 64, lambda x, k: _convolved(x, k, TIME, "SAME")),
    "transposed": (
        (3, 4, 8),
        (8, 4),
        80,
        lambda x, k: lax.conv_transpose(x, k, (1,), "VALID", dimension_numbers=TIME),
    ),
    "strided": ((3, 3, 4, 8), (8, 8, 4), 128, lambda x, k: _convolved(x, k, IMAGE, "SAME", 2)),
    "depthwise": (
        (1, 1, 1, 8),
        (8, 8, 4),
        512,
        lambda x, k: _convolved(x, k, IMAGE, "SAME", groups=4),
    ),
    "groups": (
        (3, 3, 2, 8),
        (8, 8, 4),
        512,
        lambda x, k: _convolved(x, k, IMAGE, "SAME", groups=2),
    ),
    "strided groups": (
        (3, 3, 2, 8),
        (8, 8, 4),
        128,
        lambda x, k: _convolved(x, k, IMAGE, "SAME", 2, groups=2),
    ),
}
# Rows over the first axis, weights over the second.
MESHES = ((2, 4), (4, 2), (1, 8))
IN_FAST = {("depthwise", (2, 4), False)}


def _convolved(x, kernel, numbers, padding, stride=1, groups=1):
    strides = (stride,) * (kernel.ndim - 2)
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=numbers, feature_group_count=groups
    )


def _layouts(shape: tuple, size: int) -> list:
    fits = [d for d, n in enumerate(shape) if n % size == 0]
    split = [PartitionSpec(*("model" if i == d else None for i in range(len(shape)))) for d in fits]
    return [PartitionSpec(), *split]


def _cases():
    for kind, mesh, inside in itertools.product(KINDS, MESHES, (False, True)):
        marks = () if (kind, mesh, inside) in IN_FAST else pytest.mark.slow
        if mesh[0] > 1 or not inside:
            yield pytest.param(kind, mesh, inside, marks=marks, id=f"{kind} {mesh} {inside}")


@pytest.mark.parametrize(("kind", "sizes", "inside"), [*_cases()])
def test_gradients_whatever_is_split(kind, sizes, inside):
    kernel_shape, scale_shape, features, convolution = KINDS[kind]
    rng = np.random.default_rng(0)
    shapes = [kernel_shape, scale_shape, (features, 2)]
    weights = tuple(rng.normal(size=shape).astype("float32") for shape in shapes)
    x = rng.normal(size=(8, *scale_shape)).astype("float32")
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(weights, x):
        kernel, scale, head = weights
        y = convolution(x * scale, kernel)
        return ((y.reshape(y.shape[0], -1) @ head) ** 2).sum()

    def replica(weights, x):
        return jax.tree.map(lambda g: lax.psum(g, "data"), jax.grad(loss)(weights, x))

    rows, whole = PartitionSpec("data"), PartitionSpec()
    program = jax.grad(loss)
    if inside:
        program = jax.shard_map(
            replica,
            mesh=mesh,
            in_specs=(whole, rows),
            out_specs=whole,
            axis_names={"data"},
            check_vma=False,
        )
    expected = jax.jit(jax.grad(loss))(weights, x)
    of_rows = NamedSharding(mesh, rows)
    for specs in itertools.product(*(_layouts(w.shape, sizes[1]) for w in weights)):
        placed = tuple(NamedSharding(mesh, spec) for spec in specs)
        jitted = Jitted(
            program,
            mesh,
            lambda weights, x, placed=placed: (placed, of_rows),
            outputs=placed,
            out_shardings=placed,
        )
        found = jitted(jax.device_put(weights, placed), jax.device_put(x, of_rows))
        for one, other in zip(found, expected, strict=True):
            apart = np.abs(np.asarray(one) - other).max() / np.abs(other).max()
            assert apart < 1e-5, (specs, one.shape)
