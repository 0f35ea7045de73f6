"""Cases that compute, move and pick entries of arrays, of linear algebra, signals and images."""

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops


def holes(p, x):
    return ops.where(p.mask, np.float32(np.nan), x)


def infinite(p):
    return ops.where(p.mask, np.float32(np.inf), ops.where(p.mask2, np.float32(-np.inf), p.x))


def pairs(p):
    return ops.view_as_complex(p.pairs)


def count(p):
    return p.x.shape[0]


def few(p, rows):
    """So many rows, or all: a replica has only three or four."""
    return min(rows, count(p))


def cuts(p, *places):
    """Where rows are cut."""
    return [few(p, place) for place in places]


def start(p):
    """A place in 1..3 that is only known at run time."""
    return ops.cast(1 + ops.sum(p.ids) % 3, "int32")


def gram(p):
    """6 x 6, summed over the batch."""
    return ops.matmul(ops.transpose(p.x), p.x) + ops.diag(np.arange(6, dtype="float32") * 9 + 1)


def wide_gram(p):
    """The batch both ways."""
    return ops.matmul(p.x, ops.transpose(p.x)) + 9 * ops.eye(count(p))


def places(p):
    """Coordinates for `p.image[..., 0]`: each row samples its own image."""
    own = ops.broadcast_to(ops.arange(count(p), dtype="float32")[:, None], (count(p), 5))
    return ops.stack([own, p.coordinates[..., 0], p.coordinates[..., 1]])


def grid(p):
    """Every row's index beside one of its columns."""
    return ops.stack([ops.cast(ops.arange(count(p)), "int32"), p.labels], axis=1)


def stretched(p):
    """A wide-spread (n, 6): its singular values are far apart."""
    return p.x * np.float32([1, 2, 4, 8, 16, 32]) / 32


SMOOTH: dict[str, Callable[[Any], Any]] = {
    # complex numbers
    "abs/complex": lambda p: ops.abs(pairs(p)),
    "angle/complex": lambda p: ops.angle(pairs(p)),
    "conj/complex": lambda p: ops.imag(ops.conj(pairs(p))),
    "conjugate/complex": lambda p: ops.view_as_real(ops.conjugate(pairs(p))),
    "imag/complex": lambda p: ops.imag(pairs(p)),
    "real/complex": lambda p: ops.real(pairs(p)),
    "polar/batch": lambda p: ops.view_as_real(ops.polar(p.positive, p.unit)),
    "view_as_complex/batch": lambda p: ops.real(ops.square(pairs(p))),
    "view_as_real/batch": lambda p: ops.view_as_real(pairs(p)),
    "sum/complex": lambda p: ops.view_as_real(ops.sum(pairs(p), axis=0)),
    # options of elementwise functions
    "celu/alpha": lambda p: ops.celu(p.x, 0.7),
    "elu/alpha": lambda p: ops.elu(p.x, 0.7),
    "gelu/exact": lambda p: ops.gelu(p.x, approximate=False),
    "leaky_relu/slope": lambda p: ops.leaky_relu(p.x, 0.05),
    "hard_shrink/threshold": lambda p: ops.hard_shrink(p.x, 0.31),
    "soft_shrink/threshold": lambda p: ops.soft_shrink(p.x, 0.31),
    "squareplus/b": lambda p: ops.squareplus(p.x, b=1),
    "threshold/batch": lambda p: ops.threshold(p.x, 0.31, -0.5),
    "round/decimals": lambda p: ops.round(p.wholes / 10, decimals=1),
    "clip/batch": lambda p: ops.clip(p.x, -0.81, 0.93),
    "clip/batch_bounds": lambda p: ops.clip(p.x, -p.positive, p.row[:, None] + 3),
    "clip/weight_bounds": lambda p: ops.clip(p.x, -p.w_positive, p.w_positive),
    "nan_to_num/infinite": lambda p: ops.nan_to_num(infinite(p), posinf=2.0, neginf=-3.0),
    "nan_to_num/nan": lambda p: ops.nan_to_num(holes(p, p.x), nan=0.5),
    "ldexp/batch": lambda p: ops.ldexp(p.x, p.shifts),
    "cast/float": lambda p: ops.cast(p.digits, "float32") * p.x,
    "add/row": lambda p: ops.add(p.x, p.row[:, None]),
    "multiply/row": lambda p: ops.multiply(p.row[:, None, None], p.seq),
    "subtract/mean": lambda p: ops.subtract(p.x, ops.mean(p.x, axis=0)),
    # reductions
    "average/all": lambda p: ops.average(p.x),
    "average/axis0": lambda p: ops.average(p.x, axis=0),
    "average/weighted0": lambda p: ops.average(p.x, axis=0, weights=p.share),
    "average/weighted_last": lambda p: ops.average(p.x, axis=-1, weights=p.w_positive),
    "average/weighted_all": lambda p: ops.average(p.x, weights=p.positive),
    "max/initial": lambda p: ops.max(p.x, axis=0, initial=1.8),
    "min/initial": lambda p: ops.min(p.x, axis=0, initial=-1.7),
    "sum/empty_axes": lambda p: ops.sum(p.x, axis=()),
    "sum/counted": lambda p: ops.sum(p.digits, axis=0) * p.x,
    "sum/where": lambda p: ops.sum(ops.where(p.row_mask[:, None], p.x, 0.0), axis=0),
    "mean/masked": lambda p: ops.sum(p.x * p.mask) / ops.sum(ops.cast(p.mask, "float32")),
    "moments/axis0": lambda p: ops.moments(p.x, axes=[0]),
    "moments/last": lambda p: ops.moments(p.x, axes=[-1], keepdims=True),
    "moments/channels": lambda p: ops.moments(p.image, axes=[0, 1, 2]),
    "moments/instance": lambda p: ops.moments(p.image, axes=[1, 2]),
    "trapezoid/last": lambda p: ops.trapezoid(p.x),
    "trapezoid/axis0": lambda p: ops.trapezoid(p.x, dx=0.3, axis=0),
    "trapezoid/places": lambda p: ops.trapezoid(p.x, x=p.y, axis=0),
    "corrcoef/batch": lambda p: ops.corrcoef(p.x),
    "corrcoef/features": lambda p: ops.corrcoef(ops.transpose(p.x)),
    "correlate/valid": lambda p: ops.correlate(p.row, p.column[:4]),
    "correlate/same": lambda p: ops.correlate(p.row, p.column[:4], mode="same"),
    "correlate/full": lambda p: ops.correlate(p.row, p.column, mode="full"),
    "correlate/weight": lambda p: ops.correlate(p.row, p.w_x, mode="full"),
    # order
    "sort/last": lambda p: ops.sort(p.x),
    "sort/axis0": lambda p: ops.sort(p.x, axis=0),
    "sort/all": lambda p: ops.sort(p.x, axis=None),
    "sort/row": lambda p: ops.sort(p.row),
    "top_k/last": lambda p: ops.top_k(p.x, 3),
    "top_k/batch": lambda p: ops.top_k(ops.transpose(p.x), few(p, 4)),
    "top_k/all": lambda p: ops.top_k(ops.ravel(p.x), 5)[0],
    "top_k/row": lambda p: ops.top_k(p.row, 3),
    "diff/last": lambda p: ops.diff(p.x),
    "diff/axis0": lambda p: ops.diff(p.x, axis=0),
    "diff/twice": lambda p: ops.diff(p.x, n=2, axis=0),
    # products
    "dot/weight": lambda p: ops.dot(p.x, p.w_matrix),
    "dot/over_batch": lambda p: ops.dot(ops.transpose(p.x), p.y),
    "dot/rows": lambda p: ops.dot(p.row, p.column),
    "dot/vector_matrix": lambda p: ops.dot(p.row, p.x),
    "vdot/all": lambda p: ops.vdot(p.x, p.y),
    "inner/pairs": lambda p: ops.inner(p.x, p.y),
    "inner/weight": lambda p: ops.inner(p.x, p.w_table),
    "inner/rows": lambda p: ops.inner(p.row, p.column),
    "outer/rows": lambda p: ops.outer(p.row, p.column),
    "outer/flattened": lambda p: ops.outer(p.vec, p.w_x),
    "kron/weight": lambda p: ops.kron(p.vec, p.w_small),
    "kron/weight_first": lambda p: ops.kron(p.w_small, p.vec),
    "matmul/weight": lambda p: ops.matmul(p.x, p.w_matrix),
    "matmul/over_batch": lambda p: ops.matmul(ops.transpose(p.x), p.y),
    "matmul/pairs": lambda p: ops.matmul(p.x, ops.transpose(p.y)),
    "matmul/batched": lambda p: ops.matmul(p.square, p.rhs),
    "matmul/batched_weight": lambda p: ops.matmul(p.seq, p.w_square),
    "matmul/weight_first": lambda p: ops.matmul(p.w_frame, p.image[..., 0]),
    "matmul/vector": lambda p: ops.matmul(p.row, p.x),
    "tensordot/default": lambda p: ops.tensordot(p.seq, p.w_plane),
    "tensordot/over_batch": lambda p: ops.tensordot(p.x, p.seq, axes=[[0], [0]]),
    "tensordot/batch_and_more": lambda p: ops.tensordot(p.image, p.image2, axes=[[0, 1], [0, 1]]),
    "tensordot/outer": lambda p: ops.tensordot(p.row, p.column, axes=0),
    "tensordot/weight": lambda p: ops.tensordot(p.seq, p.w_square, axes=1),
    "einsum/dense": lambda p: ops.einsum("btd,de->bte", p.seq, p.w_square),
    "einsum/over_batch": lambda p: ops.einsum("btd,bte->de", p.seq, p.gates),
    "einsum/scores": lambda p: ops.einsum("bqhd,bkhd->bhqk", p.query, p.key),
    "einsum/across": lambda p: ops.einsum("bi,ci->bc", p.x, p.y),
    "einsum/diagonal": lambda p: ops.einsum("bii->bi", p.square),
    "einsum/trace": lambda p: ops.einsum("bii->", p.square),
    "einsum/transposed": lambda p: ops.einsum("btd->dtb", p.seq),
    "einsum/three": lambda p: ops.einsum("bi,bj,ij->b", p.vec, p.vec2, p.w_small),
    "einsum/ellipsis": lambda p: ops.einsum("...d,de->...e", p.image, p.w_square),
    "cross/last": lambda p: ops.cross(p.vec, p.vec2),
    "cross/first": lambda p: ops.cross(ops.transpose(p.vec), ops.transpose(p.vec2), axis=0),
    "cross/weight": lambda p: ops.cross(p.vec, p.w_small[0]),
    "trace/across": lambda p: ops.trace(p.x),
    "trace/offset": lambda p: ops.trace(p.x, offset=2),
    "trace/inner": lambda p: ops.trace(p.square, axis1=1, axis2=2),
    "trace/batch_and_time": lambda p: ops.trace(p.seq),
    "diag/row": lambda p: ops.diag(p.row),
    "diag/below": lambda p: ops.diag(p.row, k=-2),
    "diag/matrix": lambda p: ops.diag(p.x, k=1),
    "diagflat/matrix": lambda p: ops.diagflat(p.vec),
    "diagflat/row": lambda p: ops.diagflat(p.row, k=1),
    "diagonal/across": lambda p: ops.diagonal(p.x),
    "diagonal/inner": lambda p: ops.diagonal(p.square, offset=1, axis1=1, axis2=2),
    "diagonal/batch_and_channels": lambda p: ops.diagonal(p.seq, axis1=0, axis2=2),
    "tril/across": lambda p: ops.tril(p.x),
    "tril/inner": lambda p: ops.tril(p.square, k=-1),
    "triu/across": lambda p: ops.triu(p.x, k=-3),
    "triu/inner": lambda p: ops.triu(p.square, k=1),
    "vander/row": lambda p: ops.vander(p.row, 4),
    "vander/increasing": lambda p: ops.vander(p.row, 3, increasing=True),
    # made from the batch's size or from its values
    "arange/batch": lambda p: p.x * ops.arange(count(p), dtype="float32")[:, None],
    "eye/batch": lambda p: ops.matmul(ops.eye(count(p), k=1), p.x),
    "identity/batch": lambda p: ops.matmul(ops.identity(count(p)), p.x),
    "tri/batch": lambda p: ops.matmul(ops.tri(count(p), k=-1), p.x),
    "full/batch": lambda p: p.x + ops.full((count(p), 6), 0.5),
    "full/value": lambda p: ops.full((count(p), 3), ops.sum(p.x)),
    "full_like/batch": lambda p: p.x * ops.full_like(p.y, 0.5),
    "ones/batch": lambda p: p.x + ops.ones((count(p), 6)),
    "ones_like/batch": lambda p: p.x + ops.ones_like(p.y),
    "zeros/batch": lambda p: ops.concatenate([p.x, ops.zeros((count(p), 6))]),
    "zeros_like/batch": lambda p: ops.concatenate([p.x, ops.zeros_like(p.y)], axis=1),
    "linspace/axis0": lambda p: ops.linspace(p.row, p.column, 5),
    "linspace/last": lambda p: ops.linspace(p.x, p.y, 4, endpoint=False, axis=-1),
    "linspace/retstep": lambda p: ops.linspace(p.row, p.column, 5, retstep=True),
    "logspace/axis0": lambda p: ops.logspace(p.unit, p.positive, 4, base=2),
    "logspace/last": lambda p: ops.logspace(p.unit, p.positive, 4, base=2, axis=-1),
    "geomspace/axis0": lambda p: ops.geomspace(p.positive, p.above_one, 4),
    "geomspace/last": lambda p: ops.geomspace(p.positive, p.above_one, 4, axis=-1),
    "meshgrid/xy": lambda p: ops.meshgrid(p.row, p.w_x),
    "meshgrid/ij": lambda p: ops.meshgrid(p.row, p.column, indexing="ij"),
    "shape/batch": lambda p: p.x * ops.shape(p.x)[0],
    "size/batch": lambda p: p.x / ops.size(p.x),
    "ndim/batch": lambda p: p.x * ops.ndim(p.x),
    "dtype/batch": lambda p: p.x * ops.cast(p.digits, ops.dtype(p.x)),
    "is_tensor/batch": lambda p: p.x * float(ops.is_tensor(p.x)),
    # shapes
    "reshape/flat": lambda p: ops.reshape(p.x, (-1,)),
    "reshape/merged": lambda p: ops.reshape(p.seq, (-1, 4)),
    "reshape/parted": lambda p: ops.reshape(p.seq, (-1, 3, 4, 4)),
    "reshape/scrambled": lambda p: ops.reshape(p.x, (6, -1)),
    "reshape/narrow": lambda p: ops.reshape(p.x, (-1, 2)),
    "ravel/image": lambda p: ops.ravel(p.image),
    "transpose/all": lambda p: ops.transpose(p.x),
    "transpose/inner": lambda p: ops.transpose(p.seq, (0, 2, 1)),
    "transpose/batch_last": lambda p: ops.transpose(p.seq, (1, 2, 0)),
    "moveaxis/batch": lambda p: ops.moveaxis(p.seq, 0, -1),
    "moveaxis/several": lambda p: ops.moveaxis(p.image, (0, 1), (2, 0)),
    "swapaxes/batch": lambda p: ops.swapaxes(p.seq, 0, 1),
    "swapaxes/inner": lambda p: ops.swapaxes(p.seq, 1, 2),
    "expand_dims/axis0": lambda p: ops.expand_dims(p.x, 0),
    "expand_dims/last": lambda p: ops.expand_dims(p.x, (1, -1)),
    "squeeze/all": lambda p: ops.squeeze(p.x[:, None, :, None]),
    "squeeze/axis": lambda p: ops.squeeze(p.x[None, :, :1], axis=0),
    "broadcast_to/row": lambda p: ops.broadcast_to(p.row[:, None], (count(p), 6)),
    "broadcast_to/leading": lambda p: ops.broadcast_to(p.x, (3, count(p), 6)),
    "broadcast_to/weight": lambda p: ops.broadcast_to(p.w_x, (count(p), 6)) * p.x,
    "flip/all": lambda p: ops.flip(p.x),
    "flip/axis0": lambda p: ops.flip(p.x, axis=0),
    "flip/last": lambda p: ops.flip(p.x, axis=-1),
    "fliplr/batch": lambda p: ops.fliplr(p.x),
    "flipud/batch": lambda p: ops.flipud(p.x),
    "rot90/batch": lambda p: ops.rot90(p.x),
    "rot90/back": lambda p: ops.rot90(p.seq, k=3, axes=(1, 0)),
    "rot90/inner": lambda p: ops.rot90(p.image, axes=(1, 2)),
    "roll/all": lambda p: ops.roll(p.x, 3),
    "roll/axis0": lambda p: ops.roll(p.x, 2, axis=0),
    "roll/last": lambda p: ops.roll(p.x, -2, axis=-1),
    "roll/both": lambda p: ops.roll(p.x, (1, -2), axis=(0, 1)),
    "repeat/all": lambda p: ops.repeat(p.x, 2),
    "repeat/axis0": lambda p: ops.repeat(p.x, 3, axis=0),
    "repeat/last": lambda p: ops.repeat(p.x, 2, axis=-1),
    "repeat/uneven": lambda p: ops.repeat(p.x, np.array([1, 2, 0, 1, 3, 1]), axis=1),
    "repeat/uneven_rows": lambda p: ops.repeat(p.x, np.arange(count(p)) % 3, axis=0),
    "tile/axis0": lambda p: ops.tile(p.x, (2, 1)),
    "tile/last": lambda p: ops.tile(p.x, 2),
    "tile/leading": lambda p: ops.tile(p.x, (2, 1, 2)),
    "concatenate/axis0": lambda p: ops.concatenate([p.x, p.y]),
    "concatenate/last": lambda p: ops.concatenate([p.x, p.row[:, None]], axis=-1),
    "concatenate/weight": lambda p: ops.concatenate([p.w_table, p.x, p.y[:3]]),
    "concatenate/short_last": lambda p: ops.sin(ops.concatenate([p.x[:1], p.x, p.x[:2]])),
    "concatenate/short_between": lambda p: ops.sin(ops.concatenate([p.x[:2], p.x[1:3], p.x])),
    "append/all": lambda p: ops.append(p.x, p.y),
    "append/axis0": lambda p: ops.append(p.x, p.w_table, axis=0),
    "append/last": lambda p: ops.append(p.x, p.vec, axis=1),
    "stack/axis0": lambda p: ops.stack([p.x, p.y]),
    "stack/last": lambda p: ops.stack([p.x, p.y, p.unit], axis=-1),
    "hstack/matrices": lambda p: ops.hstack([p.x, p.vec]),
    "hstack/rows": lambda p: ops.hstack([p.row, p.column]),
    "vstack/matrices": lambda p: ops.vstack([p.x, p.y]),
    "vstack/rows": lambda p: ops.vstack([p.row, p.column]),
    "dstack/matrices": lambda p: ops.dstack([p.x, p.y]),
    "split/axis0": lambda p: ops.split(p.x, cuts(p, 4, 9)),
    "split/last": lambda p: ops.split(p.x, 3, axis=-1),
    "array_split/axis0": lambda p: ops.array_split(p.x, 3),
    "array_split/last": lambda p: ops.array_split(p.x, 4, axis=1),
    "hsplit/matrix": lambda p: ops.hsplit(p.x, 2),
    "hsplit/row": lambda p: ops.hsplit(p.row, cuts(p, 5)),
    "vsplit/matrix": lambda p: ops.vsplit(p.x, cuts(p, 3, 5)),
    "dsplit/seq": lambda p: ops.dsplit(p.seq, 2),
    "unstack/axis0": lambda p: ops.unstack(p.x),
    "unstack/last": lambda p: ops.unstack(p.x, axis=-1),
    "rearrange/merged": lambda p: ops.rearrange(p.seq, "b t c -> (b t) c"),
    "rearrange/time_first": lambda p: ops.rearrange(p.seq, "b t c -> t b c"),
    "rearrange/inner_batch": lambda p: ops.rearrange(p.seq, "b t c -> t (b c)"),
    "rearrange/two_merged": lambda p: ops.rearrange(p.image, "b h w c -> (h b) (w c)"),
    "pad/batch": lambda p: ops.pad(p.x, ((2, 1), (0, 3))),
    "pad/inner": lambda p: ops.pad(p.seq, ((0, 0), (1, 2), (0, 0))),
    "pad/value": lambda p: ops.pad(p.x, ((1, 0), (2, 0)), constant_values=0.5),
    # indices
    "get_item/one": lambda p: (ops.get_item(p.x, 2), ops.get_item(p.x, -1)),
    "get_item/strided": lambda p: ops.get_item(p.x, slice(1, 9, 2)),
    "get_item/reversed": lambda p: ops.get_item(p.x, (slice(None, None, -1), slice(4, None, -2))),
    "get_item/inner": lambda p: ops.get_item(p.seq, (slice(None), slice(2, 7), None, -1)),
    "get_item/order": lambda p: ops.get_item(p.x, p.order),
    "get_item/fixed": lambda p: ops.get_item(p.x, np.array([0, 2, 2, -1])),
    "get_item/own_label": lambda p: ops.get_item(p.x, (ops.arange(count(p)), p.labels)),
    "get_item/traced": lambda p: ops.get_item(p.x, start(p)),
    "take/table": lambda p: ops.take(p.w_table, p.ints, axis=0),
    "take/table_columns": lambda p: ops.take(p.w_table, p.picks, axis=1),
    "take/table_flat": lambda p: ops.take(p.w_table, p.ints),
    "take/fixed": lambda p: ops.take(p.x, [0, 2, 1], axis=0),
    "take/fixed_negative": lambda p: ops.take(p.x, [-1, 5, -2], axis=0),
    "take/fixed_last": lambda p: ops.take(p.x, [5, 0], axis=-1),
    "take/order": lambda p: ops.take(p.x, p.order, axis=0),
    "take/ids": lambda p: ops.take(p.x, p.ids, axis=0),
    "take/columns": lambda p: ops.take(p.x, p.labels, axis=1),
    "take/flat": lambda p: ops.take(p.x, p.ints),
    "take/one": lambda p: ops.take(p.x, start(p), axis=0),
    "take_along_axis/last": lambda p: ops.take_along_axis(p.x, p.picks, axis=1),
    "take_along_axis/seq": lambda p: ops.take_along_axis(p.seq, p.picks[:, :, None], axis=1),
    "take_along_axis/axis0": lambda p: ops.take_along_axis(p.x, ops.argsort(p.y, axis=0), axis=0),
    "take_along_axis/rows": lambda p: ops.take_along_axis(p.x, p.order[:, None], axis=0),
    "take_along_axis/flat": lambda p: ops.take_along_axis(p.x, p.order, axis=None),
    "where/batch": lambda p: ops.where(p.mask, p.x, p.y),
    "where/rows": lambda p: ops.where(p.row_mask[:, None], p.x, p.w_x),
    "where/compared": lambda p: ops.where(p.x > 0.1, p.x, 0.0),
    "select/batch": lambda p: ops.select([p.mask, p.mask2], [p.x, p.y], default=0.5),
    "scatter/ids": lambda p: ops.scatter(p.ids[:, None], p.x, (6, 6)),
    "scatter/own_rows": lambda p: ops.scatter(p.order[:, None], p.x, (count(p), 6)),
    "scatter/own_label": lambda p: ops.scatter(grid(p), p.row, (count(p), 6)),
    "scatter/fixed": lambda p: ops.scatter(np.array([[3], [0], [3]]), p.x[:3], (5, 6)),
    "scatter_update/sorted": lambda p: ops.scatter_update(p.x, ops.argsort(p.row)[:, None], p.y),
    "scatter_update/add": lambda p: ops.scatter_update(p.w_table, p.ids[:, None], p.x, "add"),
    "scatter_update/max": lambda p: ops.scatter_update(p.w_table, p.ids[:, None], p.x, "max"),
    "scatter_update/min": lambda p: ops.scatter_update(p.w_table, p.ids[:, None], p.x, "min"),
    "scatter_update/own_rows": lambda p: ops.scatter_update(p.x, p.order[:, None], p.y),
    "scatter_update/own_rows_add": lambda p: ops.scatter_update(p.x, p.ids[:, None], p.y, "add"),
    "scatter_update/own_label": lambda p: ops.scatter_update(p.x, grid(p), p.row),
    "scatter_update/fixed": lambda p: ops.scatter_update(p.x, [[1], [4]], p.y[:2]),
    "scatter_update/fixed_place": lambda p: ops.scatter_update(p.x, [[1, 2], [4, 0]], p.w_factor),
    "slice/fixed": lambda p: ops.slice(p.x, (2, 1), (few(p, 7) - 2, 3)),
    "slice/rest": lambda p: ops.slice(p.x, (3, 0), (-1, 6)),
    "slice/traced_rows": lambda p: ops.slice(p.x, [start(p), 0], (few(p, 4), 6)),
    "slice/traced_columns": lambda p: ops.slice(p.x, [0, start(p)], (count(p), 2)),
    "slice/clamped_rows": lambda p: ops.slice(p.x, [start(p) + 100, 0], (few(p, 4), 6)),
    "slice/clamped_columns": lambda p: ops.slice(p.x, [0, start(p) + 100], (count(p), 2)),
    "slice_update/fixed": lambda p: ops.slice_update(p.x, (2, 1), p.y[: few(p, 7) - 2, :3]),
    "slice_update/traced_rows": lambda p: ops.slice_update(
        p.x, [start(p), 0], p.w_table[: few(p, 4)]
    ),
    "slice_update/traced_columns": lambda p: ops.slice_update(
        p.x, [0, start(p)], p.positive[:, :2]
    ),
    "slice_update/clamped_rows": lambda p: ops.slice_update(p.x, [start(p) + 100, 0], p.y[:4]),
    "slice_update/clamped_columns": lambda p: ops.slice_update(
        p.x, [0, start(p) + 100], p.y[:, :2]
    ),
    "slice_update/table": lambda p: ops.slice_update(p.w_table, [start(p), 0], p.x[:4]),
    # linear algebra
    "cholesky/batched": lambda p: ops.cholesky(p.spd),
    "cholesky/upper": lambda p: ops.cholesky(p.spd, upper=True),
    "cholesky/over_batch": lambda p: ops.cholesky(gram(p)),
    "cholesky/batch_both_ways": lambda p: ops.cholesky(wide_gram(p)),
    "cholesky_inverse/over_batch": lambda p: ops.cholesky_inverse(ops.cholesky(gram(p))),
    "cholesky_inverse/upper": lambda p: ops.cholesky_inverse(ops.cholesky(gram(p), True), True),
    "det/batched": lambda p: ops.det(p.square),
    "det/over_batch": lambda p: ops.log(ops.det(gram(p))),
    "slogdet/batched": lambda p: ops.slogdet(p.square),
    "slogdet/batch_both_ways": lambda p: ops.slogdet(wide_gram(p)),
    "logdet/batched": lambda p: ops.logdet(p.spd),
    "logdet/over_batch": lambda p: ops.logdet(gram(p)),
    "eigh/batched": lambda p: (ops.eigh(p.spd)[0], ops.abs(ops.eigh(p.spd)[1])),
    # Small values: the sine of a large one has float32's rounding of the large one.
    "eigh/over_batch": lambda p: ops.eigh(gram(p) / 20)[0],
    "inv/batched": lambda p: ops.inv(p.square),
    "inv/batch_both_ways": lambda p: ops.inv(wide_gram(p)),
    "lu_factor/batched": lambda p: ops.lu_factor(p.square),
    "lu_factor/over_batch": lambda p: ops.lu_factor(gram(p)),
    "norm/all": lambda p: ops.norm(p.x),
    "norm/axis0": lambda p: ops.norm(p.x, axis=0),
    "norm/last": lambda p: ops.norm(p.x, ord=1, axis=-1),
    "norm/max0": lambda p: ops.norm(p.x, ord=np.inf, axis=0, keepdims=True),
    "norm/cubic": lambda p: ops.norm(p.x, ord=3, axis=0),
    "norm/frobenius": lambda p: ops.norm(p.seq, ord="fro", axis=(0, 1)),
    "norm/nuclear": lambda p: ops.norm(p.rect, ord="nuc", axis=(1, 2)),
    "norm/spectral": lambda p: ops.norm(stretched(p), ord=2),
    "norm/matrix_one": lambda p: ops.norm(p.x, ord=1, axis=(0, 1)),
    "qr/batched": lambda p: ops.qr(p.rect),
    "qr/over_batch": lambda p: ops.qr(p.x),
    "solve/batched": lambda p: ops.solve(p.square, p.rhs),
    "solve/over_batch": lambda p: ops.solve(gram(p), ops.matmul(ops.transpose(p.x), p.y)),
    "solve/batch_both_ways": lambda p: ops.solve(wide_gram(p), p.x),
    "solve/weight": lambda p: ops.solve(p.w_small, ops.transpose(p.vec)),
    "solve_triangular/batched": lambda p: ops.solve_triangular(p.square, p.rhs, lower=True),
    "solve_triangular/weight": lambda p: ops.solve_triangular(p.w_small, ops.transpose(p.vec)),
    "svd/batched": lambda p: [ops.abs(a) for a in ops.svd(p.rect, full_matrices=False)],
    "svd/values": lambda p: ops.svd(stretched(p), compute_uv=False),
    "lstsq/over_batch": lambda p: ops.lstsq(p.x, p.y),
    "lstsq/row": lambda p: ops.lstsq(p.x, p.row),
    "pinv/batched": lambda p: ops.pinv(p.rect),
    "pinv/over_batch": lambda p: ops.pinv(p.x),
    "cdist/across": lambda p: ops.cdist(p.x, p.y),
    "cdist/batched": lambda p: ops.cdist(p.seq, p.gates),
    "cdist/weight": lambda p: ops.cdist(p.x, p.w_table),
    # segments and signals
    "segment_sum/ids": lambda p: ops.segment_sum(p.x, p.ids, num_segments=6),
    "segment_sum/own_rows": lambda p: ops.segment_sum(p.x, p.order, num_segments=count(p)),
    "segment_sum/empty": lambda p: ops.segment_sum(p.seq, p.ids, num_segments=9),
    "segment_sum/sorted": lambda p: ops.segment_sum(p.x, ops.sort(p.ids), 6, sorted=True),
    "segment_max/ids": lambda p: ops.segment_max(p.x, p.ids, num_segments=6),
    "segment_max/own_rows": lambda p: ops.segment_max(p.x, p.order, num_segments=count(p)),
    "segment_min/ids": lambda p: ops.segment_min(p.x, p.ids, num_segments=6),
    "segment_min/row": lambda p: ops.segment_min(p.row, p.ids, num_segments=6),
    "fft/last": lambda p: ops.fft((p.signal, p.signal2)),
    "fft/batch": lambda p: ops.fft((ops.transpose(p.x), ops.transpose(p.y))),
    "fft2/batch": lambda p: ops.fft2((p.signal, p.signal2)),
    "fft2/image": lambda p: ops.fft2((p.image, p.image2)),
    "ifft2/batch": lambda p: ops.ifft2((p.signal, p.signal2)),
    "ifft2/image": lambda p: ops.ifft2((p.image[..., 0], p.image2[..., 0])),
    "rfft/last": lambda p: ops.rfft(p.signal),
    "rfft/cut": lambda p: ops.rfft(p.signal, fft_length=20),
    "rfft/batch": lambda p: ops.rfft(ops.transpose(p.x)),
    "irfft/last": lambda p: ops.irfft((p.signal[:, :17], p.signal2[:, :17])),
    "irfft/longer": lambda p: ops.irfft((p.signal, p.signal2), fft_length=70),
    "stft/signal": lambda p: ops.stft(p.signal, 8, 4, 16),
    "stft/plain": lambda p: ops.stft(p.signal, 6, 3, 6, window="hamming", center=False),
    "istft/signal": lambda p: ops.istft(ops.stft(p.signal, 8, 4, 16), 8, 4, 16),
    "istft/length": lambda p: ops.istft(ops.stft(p.signal, 8, 2, 8), 8, 2, 8, length=30),
    "extract_sequences/signal": lambda p: ops.extract_sequences(p.signal, 8, 3),
    "extract_sequences/row": lambda p: ops.extract_sequences(p.row, 4, 2),
    # images
    "image.resize/antialias": lambda p: ops.image.resize(p.image, (3, 5), antialias=True),
    "image.resize/crop": lambda p: ops.image.resize(p.image, (4, 6), crop_to_aspect_ratio=True),
    "image.resize/pad": lambda p: ops.image.resize(p.image, (4, 6), pad_to_aspect_ratio=True),
    "image.affine_transform/interpolation": lambda p: ops.image.affine_transform(
        p.image, p.transform, interpolation="nearest", fill_value=0.5
    ),
    "image.affine_transform/one": lambda p: ops.image.affine_transform(
        p.image[few(p, 5) - 1], p.transform[1]
    ),
    "image.perspective_transform/own": lambda p: ops.image.perspective_transform(
        p.image, p.corners, p.corners2
    ),
    "image.perspective_transform/nearest": lambda p: ops.image.perspective_transform(
        p.image, p.corners, p.corners2, interpolation="nearest", fill_value=0.5
    ),
    "image.map_coordinates/order0": lambda p: ops.image.map_coordinates(
        p.image[..., 0], places(p) + 0.13, 0
    ),
    "image.map_coordinates/between_rows": lambda p: ops.image.map_coordinates(
        p.image[..., 0], places(p)[:, ::-1] * 0.93 + 0.21, 1, fill_mode="nearest"
    ),
    "image.map_coordinates/weight": lambda p: ops.image.map_coordinates(
        p.w_frame, ops.moveaxis(p.coordinates, -1, 0), 1
    ),
    "image.crop_images/sides": lambda p: ops.image.crop_images(p.image, 1, 2, 3, 1),
    "image.crop_images/target": lambda p: ops.image.crop_images(
        p.image, 1, 2, target_height=4, target_width=5
    ),
    "image.pad_images/sides": lambda p: ops.image.pad_images(p.image, 1, 2, 3, 1),
    "image.pad_images/target": lambda p: ops.image.pad_images(
        p.image, 1, 2, target_height=12, target_width=11
    ),
    "image.extract_patches/same": lambda p: ops.image.extract_patches(
        p.image, 3, strides=2, padding="same"
    ),
    "image.extract_patches/dilated": lambda p: ops.image.extract_patches(
        p.image, (2, 3), strides=1, dilation_rate=2
    ),
    "image.extract_patches_3d/valid": lambda p: ops.image.extract_patches_3d(p.volume, 2),
    "image.gaussian_blur/image": lambda p: ops.image.gaussian_blur(p.image, (3, 5), (0.8, 1.2)),
    "image.sobel_edges/image": lambda p: ops.image.sobel_edges(p.image),
    "image.hsv_to_rgb/image": lambda p: ops.image.hsv_to_rgb(p.rgb),
    "image.rgb_to_hsv/image": lambda p: ops.image.rgb_to_hsv(p.rgb),
    "image.rgb_to_grayscale/image": lambda p: ops.image.rgb_to_grayscale(p.rgb),
    "image.ssim/image": lambda p: ops.image.ssim(p.image, p.image2, 4.0, filter_size=5),
    "image.scale_and_translate/linear": lambda p: ops.image.scale_and_translate(
        p.image, (count(p), 6, 10, 4), p.w_factor, p.w_offset, (1, 2), "linear"
    ),
    "image.scale_and_translate/cubic": lambda p: ops.image.scale_and_translate(
        p.image, (count(p), 6, 10, 4), p.w_factor, p.w_offset, (1, 2), "cubic", antialias=False
    ),
    "image.scale_and_translate/batch": lambda p: ops.image.scale_and_translate(
        p.image, (9, 8, 8, 4), p.w_factor[:1], p.w_offset[:1], (0,), "lanczos3"
    ),
}

DISCRETE: dict[str, Callable[[Any], Any]] = {
    "cast/integer": lambda p: ops.cast(p.halves, "int32"),
    "cast/boolean": lambda p: ops.cast(p.digits, "bool"),
    "saturate_cast/int8": lambda p: ops.cast(ops.saturate_cast(p.halves * 90, "int8"), "int32"),
    "view/int32": lambda p: ops.view(p.x, "int32"),
    "view/bytes": lambda p: ops.cast(ops.view(p.digits, "uint8"), "int32"),
    "isfinite/batch": lambda p: ops.isfinite(infinite(p)),
    "isinf/batch": lambda p: ops.isinf(infinite(p)),
    "isnan/batch": lambda p: ops.isnan(holes(p, p.x)),
    "isneginf/batch": lambda p: ops.isneginf(infinite(p)),
    "isposinf/batch": lambda p: ops.isposinf(infinite(p)),
    "isreal/complex": lambda p: ops.isreal(pairs(p)),
    "isclose/nan": lambda p: ops.isclose(
        holes(p, p.x), holes(p, p.x + 0.01 * p.mask2), equal_nan=True
    ),
    "allclose/true": lambda p: ops.allclose(p.x, p.x + 1e-9),
    "allclose/false": lambda p: ops.allclose(p.x, p.y),
    "less/floats": lambda p: ops.less(p.x, p.y),
    "greater/weight": lambda p: ops.greater(p.x, p.w_x),
    "less_equal/float_pairs": lambda p: ops.less_equal(p.row[:, None], p.column),
    "isin/table": lambda p: ops.isin(p.ints, np.array([1, 3, 8])),
    "isin/batch": lambda p: ops.isin(p.ints, p.ids, invert=True),
    "all/rows": lambda p: ops.all(p.digits < 10),
    "any/rows": lambda p: ops.any(p.row > 2.5),
    "argmax/row": lambda p: ops.argmax(p.row),
    "argmin/seq": lambda p: ops.argmin(p.seq, axis=1, keepdims=True),
    "argsort/last": lambda p: ops.argsort(p.x),
    "argsort/axis0": lambda p: ops.argsort(p.x, axis=0),
    "argsort/all": lambda p: ops.argsort(p.x, axis=None),
    "argsort/ties": lambda p: ops.argsort(p.labels),
    "argpartition/last": lambda p: ops.sort(ops.argpartition(p.x, 2)[:, :3]),
    "argpartition/axis0": lambda p: ops.sort(
        ops.argpartition(p.x, few(p, 4) - 1, axis=0)[:4], axis=0
    ),
    "argpartition/all": lambda p: ops.sort(ops.argpartition(p.x, 5, axis=None)[:6]),
    "sort/integers": lambda p: ops.sort(p.digits, axis=0),
    "sum/integers": lambda p: (ops.sum(p.digits, axis=0), ops.sum(p.mask)),
    "cumsum/integers": lambda p: ops.cumsum(p.digits, axis=0),
    "max/integers": lambda p: ops.max(p.digits, axis=0, initial=3),
    "searchsorted/table": lambda p: ops.searchsorted(p.w_sorted, p.x),
    "searchsorted/right": lambda p: ops.searchsorted(ops.sort(p.ids), p.ints, side="right"),
    "searchsorted/batch": lambda p: ops.searchsorted(ops.sort(p.row), p.x),
    "digitize/table": lambda p: ops.digitize(p.x, np.float32([-1.1, -0.2, 0.4, 1.3])),
    "digitize/weight": lambda p: ops.digitize(p.row, p.w_sorted),
    "histogram/range": lambda p: ops.histogram(ops.ravel(p.x), 7, range=(-2.3, 2.4)),
    "histogram/own_range": lambda p: ops.histogram(p.row, bins=7),
    "unique/ids": lambda p: ops.unique(p.ids, size=6),
    "unique/filled": lambda p: ops.unique(p.labels, size=9, fill_value=-1),
    "unique/everything": lambda p: ops.unique(
        p.ints, return_index=True, return_inverse=True, return_counts=True, size=10, fill_value=0
    ),
    "unique/rows": lambda p: ops.unique(p.picks, axis=0, size=count(p), fill_value=-1),
    "unravel_index/batch": lambda p: ops.unravel_index(p.digits, (3, 4)),
    "take/integers": lambda p: ops.take(p.ints, p.order, axis=0),
    "take_along_axis/masks": lambda p: ops.take_along_axis(p.mask, p.picks, axis=1),
    "scatter/counts": lambda p: ops.scatter(p.ids[:, None], ops.ones_like(p.ids), (6,)),
    "scatter_update/mul": lambda p: ops.scatter_update(p.x, p.ids[:, None], p.positive, "mul"),
    "where/integers": lambda p: ops.where(p.mask, p.digits, -1),
    "concatenate/masks": lambda p: ops.concatenate([p.mask, p.mask2]),
    "triu/integers": lambda p: ops.triu(p.digits),
    "roll/masks": lambda p: ops.roll(p.mask, 3, axis=0),
    "dot/integers": lambda p: ops.dot(ops.transpose(p.digits), p.ints),
}
