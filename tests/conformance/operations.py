"""Every public function of keras.ops on arrays whose first dimension is the batch."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import operations_more as more
from keras import ops


@dataclass(frozen=True)
class Case:
    """A function of the pool's arrays, named "function/variant"."""

    name: str
    fn: Callable[[Any], Any]
    differentiable: bool = True


def pool(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays with the batch first, and those under "w_" that have none: every device's own."""
    rng = np.random.default_rng(seed)

    def spread(*shape, low=-1.93, high=2.06):
        count = int(np.prod(shape))
        jitter = rng.uniform(-0.3, 0.3, count) * (high - low) / count
        return rng.permutation(np.linspace(low, high, count) + jitter).reshape(shape)

    def near(*centres, shape, width=0.2):
        return rng.choice(centres, (rows, *shape)) + spread(rows, *shape, low=-width, high=width)

    def integers(*shape, low=0, high=10):
        return rng.integers(low, high, shape)

    def around(matrix):
        return matrix + spread(rows, *np.shape(matrix), low=-0.2, high=0.21)

    def weight(*shape):
        return spread(*shape, low=-0.52, high=0.61)

    pattern = np.add.outer(np.arange(rows), 2 * np.arange(12))
    spd = around(np.diag([1.0, 2.5, 5.0]))
    corners = np.array([[0.5, 0.5], [0.5, 7.0], [7.0, 0.5], [7.0, 7.0]])
    arrays = {
        "x": spread(rows, 6),
        "y": spread(rows, 6, low=-1.71, high=1.83),
        "positive": spread(rows, 6, low=0.5, high=1.5),
        "unit": spread(rows, 6, low=-0.8, high=0.8),
        "above_one": spread(rows, 6, low=1.3, high=3.0),
        "halves": near(-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, shape=(6,)),
        "wholes": near(-3, -2, -1, 0, 1, 2, 3, shape=(6,)),
        "probabilities": spread(rows, 6, low=0.1, high=0.85),
        "targets": spread(rows, 6, low=0.15, high=0.8),
        "pairs": near(-1.5, 1.5, shape=(6, 2), width=1.0),
        "row": spread(rows),
        "column": spread(rows, low=-1.4, high=1.3),
        "share": spread(rows, low=0.5, high=1.5),
        "image": spread(rows, 8, 8, 4),
        "image2": spread(rows, 8, 8, 4, low=-1.5, high=1.7),
        "rgb": spread(rows, 8, 8, 3, low=0.1, high=0.9),
        "volume": spread(rows, 4, 4, 4, 2),
        "seq": spread(rows, 12, 4),
        "gates": spread(rows, 12, 4, low=0.3, high=0.9),
        "signal": spread(rows, 32),
        "signal2": spread(rows, 32, low=-1.5, high=1.7),
        "query": spread(rows, 6, 4, 8),
        "key": spread(rows, 6, 4, 8, low=-1.5, high=1.7),
        "value": spread(rows, 6, 4, 8, low=-1.6, high=1.4),
        "logits": spread(rows, 12, 7),
        "square": around(np.diag([1.5, -2.5, 4.0]) + 0.5),
        "spd": (spd + spd.transpose(0, 2, 1)) / 2,
        "rect": around(np.eye(4, 3) * [1.0, 2.5, 5.0]),
        "rhs": spread(rows, 3, 2),
        "vec": spread(rows, 3),
        "vec2": spread(rows, 3, low=-1.4, high=1.3),
        "transform": spread(rows, 8, low=-0.06, high=0.07) * [1, 1, 9, 1, 1, 9, 0.1, 0.1]
        + [1.1, 0.1, 0.3, 0.1, 0.9, 0.4, 0, 0],
        "corners": around(corners),
        "corners2": around(corners + 0.3),
        "coordinates": near(0.5, 1.5, 2.5, 3.5, 4.5, shape=(5, 2)),
        "ints": integers(rows, 5),
        "digits": integers(rows, 6),
        "digits2": integers(rows, 6, low=1),
        "shifts": integers(rows, 6, high=4),
        "picks": integers(rows, 2, high=6),
        "ids": rng.permutation(np.arange(rows) % 6),
        "labels": integers(rows, high=6),
        "order": rng.permutation(rows),
        "phonemes": rng.permuted(np.tile(np.arange(1, 7), (rows, 1)), axis=1)[:, :3],
        "lengths": integers(rows, low=8, high=13),
        "phoneme_lengths": integers(rows, low=1, high=4),
        "mask": pattern[:, :6] % 3 == 0,
        "mask2": pattern[:, :6] % 5 < 2,
        "row_mask": pattern[:, 0] % 3 > 0,
        "attended": pattern[:, :6] % 4 > 0,
        "w_x": weight(6),
        "w_positive": spread(6, low=0.6, high=1.4),
        "w_sorted": np.linspace(-1.4, 1.5, 6),
        "w_table": weight(10, 6),
        "w_matrix": weight(6, 5),
        "w_square": weight(4, 4),
        "w_small": weight(3, 3) + 2 * np.eye(3),
        "w_frame": weight(8, 8),
        "w_gamma": spread(4, low=0.6, high=1.4),
        "w_beta": weight(4),
        "w_plane": spread(12, 4, low=0.6, high=1.4),
        "w_bias": weight(1, 4, 6, 6),
        "w_factor": spread(2, low=0.7, high=1.6),
        "w_offset": spread(2, low=-1.1, high=0.9),
        "w_conv1": weight(3, 4, 8),
        "w_conv2": weight(3, 3, 4, 8),
        "w_conv3": weight(2, 2, 2, 2, 3),
        "w_group": weight(3, 3, 2, 6),
        "w_depth1": weight(3, 4, 2),
        "w_depth2": weight(3, 3, 4, 2),
        "w_point1": weight(1, 8, 5),
        "w_point2": weight(1, 1, 8, 5),
        "w_back1": weight(3, 5, 4),
        "w_back2": weight(3, 3, 5, 4),
        "w_back3": weight(2, 2, 2, 3, 2),
    }
    kinds = {"f": np.float32, "i": np.int32, "b": np.bool_}
    return {name: np.asarray(a, kinds[a.dtype.kind]) for name, a in arrays.items()}


UNARY = {
    "x": "abs absolute arcsinh arctan cbrt celu conj conjugate copy cos cosh deg2rad elu erf erfc"
    " exp exp2 expm1 fabs gelu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh i0"
    " leaky_relu log_sigmoid nan_to_num negative rad2deg real relu relu6 selu sigmoid sign silu sin"
    " sinc sinh soft_shrink softplus softsign sparse_plus sparse_sigmoid square squareplus swish"
    " tanh tanh_shrink array convert_to_tensor ravel",
    "positive": "log log10 log1p log2 reciprocal rsqrt sqrt",
    "unit": "arccos arcsin arctanh erfinv tan",
    "above_one": "arccosh",
    "halves": "ceil floor trunc",
    "wholes": "round",
}
UNARY_DISCRETE = {
    "x": "angle imag signbit isreal",
    "digits": "bitwise_invert bitwise_not",
    "mask": "logical_not",
}
BINARY = {
    ("x", "y", "w_x"): "add subtract multiply maximum minimum fmax fmin arctan2 hypot logaddexp"
    " logaddexp2 heaviside",
    ("x", "positive", "w_positive"): "divide true_divide divide_no_nan mod fmod floor_divide",
    ("positive", "y", "w_x"): "power",
}
BINARY_DISCRETE = {
    ("digits", "digits2"): "equal not_equal less less_equal greater greater_equal gcd lcm"
    " bitwise_and bitwise_or bitwise_xor isclose",
    ("digits", "shifts"): "left_shift right_shift bitwise_left_shift bitwise_right_shift",
    ("mask", "mask2"): "logical_and logical_or logical_xor",
    ("x", "y"): "nextafter",
}
REDUCTIONS = {
    "x": "amax amin max min mean sum std var median ptp logsumexp",
    "positive": "prod",
    "holes": "nanmax nanmin nanmean nansum nanstd nanvar nanmedian",
    "positive_holes": "nanprod",
}
REDUCTIONS_DISCRETE = {
    "mask": "all any",
    "digits": "count_nonzero",
    "x": "argmax argmin",
    "holes": "nanargmax nanargmin",
}
CUMULATIVE = {
    "x": "cumsum",
    "positive": "cumprod",
    "holes": "nancumsum",
    "positive_holes": "nancumprod",
}
AXES = {"axis0": 0, "last": -1, "all": None}
PAD_MODES = ("edge", "reflect", "symmetric", "wrap", "linear_ramp", "maximum", "mean", "minimum")
METHODS = ("lower", "higher", "nearest", "midpoint")


def _unary(table):
    for array, names in table.items():
        for name in names.split():
            f = getattr(ops, name)
            yield f"{name}/batch", lambda p, f=f, a=array: f(_array(p, a))


def _binary(table):
    for (first, second, *weights), names in table.items():
        for name in names.split():
            f = getattr(ops, name)
            yield f"{name}/batch", lambda p, f=f, a=first, b=second: f(_array(p, a), _array(p, b))
            yield (
                f"{name}/across",
                lambda p, f=f, a=first, b=second: f(
                    _array(p, a)[:, :1], ops.transpose(_array(p, b)[:, :1])
                ),
            )
            for weight in weights:
                yield (
                    f"{name}/weight",
                    lambda p, f=f, a=first, w=weight: f(_array(p, a), _array(p, w)),
                )


def _along(table, **options):
    for array, names in table.items():
        for name in names.split():
            for label, axis in AXES.items():
                f = getattr(ops, name)
                yield (
                    f"{name}/{label}",
                    lambda p, f=f, a=array, axis=axis: f(_array(p, a), axis=axis, **options),
                )


def _kept(table):
    for array, names in table.items():
        for name in names.split():
            f = getattr(ops, name)
            yield (
                f"{name}/keepdims",
                lambda p, f=f, a=array: f(_array(p, a), axis=0, keepdims=True),
            )


def _quantiles():
    for name, scale in (("quantile", 1), ("percentile", 100)):
        for prefix, array in (("", "x"), ("nan", "holes")):
            f = getattr(ops, prefix + name)
            for label, axis in AXES.items():
                yield (
                    f"{prefix}{name}/{label}",
                    lambda p, f=f, a=array, s=scale, axis=axis: f(_array(p, a), 0.37 * s, axis),
                )
            yield (
                f"{prefix}{name}/several",
                lambda p, f=f, a=array, s=scale: f(
                    _array(p, a), np.float32([0.2 * s, 0.62 * s]), axis=0, keepdims=True
                ),
            )
            for method in METHODS:
                yield (
                    f"{prefix}{name}/{method}",
                    lambda p, f=f, a=array, s=scale, m=method: f(
                        _array(p, a), 0.37 * s, axis=0, method=m
                    ),
                )


def _array(p, name):
    if name == "holes":
        return more.holes(p, p.x)
    if name == "positive_holes":
        return more.holes(p, p.positive)
    return getattr(p, name)


def _step(state, inputs):
    state = ops.tanh(0.6 * state + inputs)
    return state, state * inputs


def _compose(left, right):
    return left[0] * right[0], left[1] * right[0] + right[1]


@ops.custom_gradient
def _clipped(x):
    def grad(*args, upstream=None):
        return ops.clip(args[0] if upstream is None else upstream, -0.4, 0.4)

    return ops.square(x), grad


def _time_first(p):
    return ops.transpose(p.seq, (1, 0, 2))


def _while(p):
    return ops.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, ops.tanh(a) + 0.1 * i), (0, p.x)
    )[1]


def _attend(p, **options):
    return ops.dot_product_attention(p.query, p.key, p.value, **options)


def _padded(width, mode):
    return lambda p: ops.pad(p.x, width, mode=mode)


def _images():
    image = ops.image
    for method in ("nearest", "bilinear", "bicubic", "lanczos3", "lanczos5"):
        yield (
            f"image.resize/{method}",
            lambda p, m=method: image.resize(p.image, (5, 11), interpolation=m),
        )
    for mode in ("constant", "nearest", "wrap", "mirror", "reflect"):
        yield (
            f"image.map_coordinates/{mode}",
            lambda p, m=mode: image.map_coordinates(
                p.image[..., 0], more.places(p) * 1.3 - 0.37, 1, fill_mode=m
            ),
        )
        yield (
            f"image.affine_transform/{mode}",
            lambda p, m=mode: image.affine_transform(p.image, p.transform, fill_mode=m),
        )


SMOOTH: dict[str, Callable[[Any], Any]] = {
    # neural networks
    "softmax/last": lambda p: ops.softmax(p.x),
    "softmax/axis0": lambda p: ops.softmax(p.x, axis=0),
    "softmax/all": lambda p: ops.softmax(p.x, axis=None),
    "softmax/two_axes": lambda p: ops.softmax(p.seq, axis=(0, 2)),
    "log_softmax/last": lambda p: ops.log_softmax(p.x),
    "log_softmax/axis0": lambda p: ops.log_softmax(p.x, axis=0),
    "log_softmax/two_axes": lambda p: ops.log_softmax(p.seq, axis=(1, 2)),
    "sparsemax/last": lambda p: ops.sparsemax(0.3 * p.x - 1),
    "sparsemax/axis0": lambda p: ops.sparsemax(0.3 * p.x - 1, axis=0),
    "glu/last": lambda p: ops.glu(p.x),
    "glu/axis0": lambda p: ops.glu(p.x[: min(12, len(p.x) // 2 * 2)], axis=0),
    "normalize/last": lambda p: ops.normalize(p.x),
    "normalize/axis0": lambda p: ops.normalize(p.x, axis=0, order=1),
    "normalize/cubic": lambda p: ops.normalize(p.x, axis=0, order=3),
    "batch_normalization/batch": lambda p: ops.batch_normalization(
        p.image, *ops.moments(p.image, [0, 1, 2]), -1, offset=p.w_beta, scale=p.w_gamma
    ),
    "batch_normalization/weights": lambda p: ops.batch_normalization(
        p.seq, p.w_beta, p.w_gamma, axis=2
    ),
    "batch_normalization/rows": lambda p: ops.batch_normalization(
        p.x, p.row, p.share, axis=0, offset=p.column
    ),
    "layer_normalization/last": lambda p: ops.layer_normalization(
        p.seq, gamma=p.w_gamma, beta=p.w_beta
    ),
    "layer_normalization/two_axes": lambda p: ops.layer_normalization(
        p.seq, gamma=p.w_plane, axis=(1, 2)
    ),
    "layer_normalization/axis0": lambda p: ops.layer_normalization(p.x, axis=0),
    "rms_normalization/last": lambda p: ops.rms_normalization(p.seq, scale=p.w_gamma),
    "rms_normalization/axis0": lambda p: ops.rms_normalization(p.x, axis=0),
    "rms_normalization/two_axes": lambda p: ops.rms_normalization(p.seq, p.w_plane, (1, 2)),
    "binary_crossentropy/probabilities": lambda p: ops.binary_crossentropy(
        p.targets, p.probabilities
    ),
    "binary_crossentropy/logits": lambda p: ops.binary_crossentropy(p.targets, p.x, True),
    "categorical_crossentropy/probabilities": lambda p: ops.categorical_crossentropy(
        p.targets, p.probabilities
    ),
    "categorical_crossentropy/logits": lambda p: ops.categorical_crossentropy(
        ops.one_hot(p.labels, 6), p.x, from_logits=True
    ),
    "categorical_crossentropy/axis0": lambda p: ops.categorical_crossentropy(
        p.targets, p.x, from_logits=True, axis=0
    ),
    "sparse_categorical_crossentropy/probabilities": lambda p: ops.sparse_categorical_crossentropy(
        p.labels, p.probabilities
    ),
    "sparse_categorical_crossentropy/logits": lambda p: ops.sparse_categorical_crossentropy(
        p.labels, p.x, from_logits=True
    ),
    "sparse_categorical_crossentropy/time": lambda p: ops.sparse_categorical_crossentropy(
        p.picks[:, :1] * np.ones((1, 12), "int32"), p.logits, from_logits=True
    ),
    "one_hot/matmul": lambda p: ops.matmul(ops.one_hot(p.ints, 10), p.w_table),
    "psnr/batch": lambda p: ops.psnr(p.image, p.image2, 4.0),
    "ctc_loss/batch": lambda p: ops.ctc_loss(p.phonemes, p.logits, p.phoneme_lengths, p.lengths),
    "ctc_loss/mask_last": lambda p: ops.ctc_loss(
        p.phonemes - 1, p.logits, p.phoneme_lengths, p.lengths, mask_index=6
    ),
    "dot_product_attention/plain": lambda p: _attend(p),
    "dot_product_attention/causal": lambda p: _attend(p, is_causal=True, scale=0.4),
    "dot_product_attention/masked": lambda p: _attend(p, mask=p.attended[:, None, None, :]),
    "dot_product_attention/bias": lambda p: _attend(p, bias=p.w_bias),
    "dot_product_attention/no_flash": lambda p: _attend(p, flash_attention=False),
    "dot_product_attention/grouped": lambda p: ops.dot_product_attention(
        p.query, p.key[:, :, :2], p.value[:, :, :2]
    ),
    "conv/1d": lambda p: ops.conv(p.seq, p.w_conv1),
    "conv/1d_strided": lambda p: ops.conv(p.seq, p.w_conv1, strides=2, padding="same"),
    "conv/1d_dilated": lambda p: ops.conv(p.seq, p.w_conv1, dilation_rate=2),
    "conv/2d": lambda p: ops.conv(p.image, p.w_conv2),
    "conv/2d_same": lambda p: ops.conv(p.image, p.w_conv2, padding="same"),
    "conv/2d_strided": lambda p: ops.conv(p.image, p.w_conv2, strides=(2, 1), padding="same"),
    "conv/2d_dilated": lambda p: ops.conv(p.image, p.w_conv2, dilation_rate=2),
    "conv/2d_groups": lambda p: ops.conv(p.image, p.w_group),
    "conv/2d_first": lambda p: ops.conv(
        p.image, ops.tile(p.w_conv2, (1, 1, 2, 1)), data_format="channels_first"
    ),
    "conv/3d": lambda p: ops.conv(p.volume, p.w_conv3),
    "conv/3d_strided": lambda p: ops.conv(p.volume, p.w_conv3, strides=2, padding="same"),
    "conv/batch_as_filters": lambda p: ops.conv(
        p.image, ops.transpose(p.image2[:, :3, :3], (1, 2, 3, 0))
    ),
    "conv/batch_as_channels": lambda p: ops.conv(
        ops.transpose(p.signal)[None], ops.transpose(p.seq[:, :5], (1, 0, 2)), padding="same"
    ),
    "conv/batch_as_time": lambda p: ops.conv(p.seq[None, :, 0], p.w_conv1, padding="same"),
    "conv_transpose/1d": lambda p: ops.conv_transpose(p.seq, p.w_back1, strides=2),
    "conv_transpose/2d": lambda p: ops.conv_transpose(p.image, p.w_back2, 2, padding="same"),
    "conv_transpose/2d_dilated": lambda p: ops.conv_transpose(p.image, p.w_back2, dilation_rate=2),
    "conv_transpose/3d": lambda p: ops.conv_transpose(p.volume, p.w_back3, strides=2),
    "depthwise_conv/1d": lambda p: ops.depthwise_conv(p.seq, p.w_depth1, 2, padding="same"),
    "depthwise_conv/2d": lambda p: ops.depthwise_conv(p.image, p.w_depth2),
    "depthwise_conv/2d_dilated": lambda p: ops.depthwise_conv(
        p.image, p.w_depth2, padding="same", dilation_rate=2
    ),
    "separable_conv/1d": lambda p: ops.separable_conv(p.seq, p.w_depth1, p.w_point1),
    "separable_conv/2d": lambda p: ops.separable_conv(p.image, p.w_depth2, p.w_point2, 2, "same"),
    "average_pool/1d": lambda p: ops.average_pool(p.seq, 3, strides=2, padding="same"),
    "average_pool/2d": lambda p: ops.average_pool(p.image, 2, strides=2),
    "average_pool/3d": lambda p: ops.average_pool(p.volume, 2, strides=1),
    "max_pool/1d": lambda p: ops.max_pool(p.seq, 3, strides=2, padding="same"),
    "max_pool/2d": lambda p: ops.max_pool(p.image, (3, 2), (2, 1), padding="same"),
    "max_pool/3d": lambda p: ops.max_pool(p.volume, 2, strides=1),
    "adaptive_average_pool/1d": lambda p: ops.adaptive_average_pool(p.seq, 5),
    "adaptive_average_pool/2d": lambda p: ops.adaptive_average_pool(p.image, (3, 4)),
    "adaptive_average_pool/3d": lambda p: ops.adaptive_average_pool(p.volume, (3, 2, 1)),
    "adaptive_max_pool/1d": lambda p: ops.adaptive_max_pool(p.seq, 5),
    "adaptive_max_pool/2d": lambda p: ops.adaptive_max_pool(p.image, (3, 4)),
    "adaptive_max_pool/3d": lambda p: ops.adaptive_max_pool(p.volume, (3, 2, 1)),
    "depth_to_space/image": lambda p: ops.depth_to_space(p.image, 2),
    "space_to_depth/image": lambda p: ops.space_to_depth(p.image, 2),
    "space_to_depth/first": lambda p: ops.space_to_depth(p.image, 2, "channels_first"),
    "unfold/image": lambda p: ops.unfold(p.image, 2, stride=2, padding=1),
    "unfold/dilated": lambda p: ops.unfold(p.image, (3, 2), dilation=2),
    "fold/seq": lambda p: ops.fold(p.seq, 4, 2, stride=2),
    "fold/overlapping": lambda p: ops.fold(p.seq, 3, 2),
    # control flow and differentiation
    "cond/traced": lambda p: ops.cond(
        ops.sum(p.row) > 0.3, lambda: p.x * 2, lambda: ops.tanh(p.x) + p.w_x
    ),
    "cond/reducing": lambda p: ops.cond(
        p.row[0] < ops.mean(p.row), lambda: ops.sum(p.x, axis=0), lambda: ops.max(p.x, axis=0)
    ),
    "switch/traced": lambda p: ops.switch(
        ops.sum(p.ids) % 3, [ops.sin, ops.square, lambda a: a - ops.mean(a, axis=0)], p.x
    ),
    "scan/time": lambda p: ops.scan(_step, p.seq[:, 0] * 0, _time_first(p)),
    "scan/time_reverse": lambda p: ops.scan(
        _step, p.seq[:, 0] * 0, _time_first(p), reverse=True, unroll=3
    ),
    "scan/time_weight": lambda p: ops.scan(
        lambda s, v: (ops.tanh(ops.matmul(s, p.w_square) + v), None), p.seq[:, 0], _time_first(p)
    )[0],
    "scan/batch": lambda p: ops.scan(_step, p.w_x, p.x),
    "scan/batch_reverse": lambda p: ops.scan(_step, p.w_x, p.x, reverse=True),
    "scan/length": lambda p: ops.scan(lambda s, _: (ops.sin(s), s[:2]), p.x, length=3),
    "associative_scan/batch": lambda p: ops.associative_scan(ops.add, p.x),
    "associative_scan/last": lambda p: ops.associative_scan(ops.maximum, p.x, axis=-1),
    "associative_scan/reverse": lambda p: ops.associative_scan(ops.multiply, p.positive, True),
    "associative_scan/recurrence": lambda p: ops.associative_scan(
        _compose, (p.gates, p.seq), axis=1
    ),
    "associative_scan/batch_recurrence": lambda p: ops.associative_scan(_compose, (p.gates, p.seq)),
    "fori_loop/state": lambda p: ops.fori_loop(0, 3, lambda i, a: ops.sin(a) * (1 + i), p.x),
    "fori_loop/rows": lambda p: ops.fori_loop(
        0, more.count(p), lambda i, a: ops.tanh(a + ops.take(p.x, i, axis=0)), p.w_x
    ),
    "map/batch": lambda p: ops.map(lambda a: ops.tanh(a) * ops.sum(a), p.x),
    "map/pairs": lambda p: ops.map(lambda ab: ops.matmul(*ab), (p.square, p.rhs)),
    "map/time": lambda p: ops.map(lambda a: a - ops.mean(a, axis=0), _time_first(p)),
    "vectorized_map/batch": lambda p: ops.vectorized_map(lambda a: ops.sin(a) * ops.max(a), p.x),
    "vectorized_map/pairs": lambda p: ops.vectorized_map(
        lambda ai: ops.take(ai[0], ai[1], axis=0), (p.x, p.picks)
    ),
    "vectorize/signature": lambda p: ops.vectorize(
        lambda a, b: ops.sum(a * b), signature="(k),(k)->()"
    )(p.x, p.w_x),
    "vectorize/scalar": lambda p: ops.vectorize(lambda a, b: a * b + 1)(p.x, p.row[:, None]),
    "stop_gradient/batch": lambda p: p.x * ops.stop_gradient(p.x),
    "custom_gradient/batch": lambda p: _clipped(p.x),
    "jvp/batch": lambda p: ops.jvp(lambda a: ops.tanh(a) * ops.sum(a, axis=0), (p.x,), (p.y,)),
    "jvp/weight": lambda p: ops.jvp(lambda w: ops.matmul(p.x, w), (p.w_matrix,), (p.w_matrix,)),
}
DISCRETE: dict[str, Callable[[Any], Any]] = {
    "one_hot/last": lambda p: ops.one_hot(p.ints, 10),
    "one_hot/axis0": lambda p: ops.one_hot(p.ids, 6, axis=0),
    "one_hot/inner": lambda p: ops.one_hot(p.ints, 10, axis=1, dtype="int32"),
    "multi_hot/last": lambda p: ops.multi_hot(p.ints, 10),
    "multi_hot/ids": lambda p: ops.multi_hot(p.ids, 6),
    "in_top_k/batch": lambda p: ops.in_top_k(p.labels, p.x, 3),
    "top_k/indices": lambda p: ops.top_k(p.x, 2)[1],
    "ctc_decode/greedy": lambda p: ops.ctc_decode(p.logits, p.lengths),
    "ctc_decode/beams": lambda p: ops.ctc_decode(
        p.logits, p.lengths, strategy="beam_search", beam_width=4, top_paths=2
    ),
    "eig/values": lambda p: ops.sort(ops.real(ops.eig(p.square)[0])),
    "eig/vectors": lambda p: ops.sort(ops.abs(ops.eig(p.spd)[1]), axis=-1),
    "svd/full": lambda p: [ops.abs(a) for a in ops.svd(p.spd)],
    "qr/complete": lambda p: ops.qr(p.rect, mode="complete"),
    "matrix_rank/batched": lambda p: ops.matrix_rank(p.square),
    "matrix_rank/across": lambda p: ops.matrix_rank(p.x),
    "segment_prod/ids": lambda p: ops.segment_prod(p.positive, p.ids, num_segments=6),
    "segment_prod/own_rows": lambda p: ops.segment_prod(p.positive, p.order, more.count(p)),
    "segment_max/integers": lambda p: ops.segment_max(p.digits, p.ids, num_segments=6),
    "segment_sum/integers": lambda p: ops.segment_sum(p.digits, p.ids, num_segments=6),
    "while_loop/state": _while,
    "while_loop/limited": lambda p: ops.while_loop(
        lambda a: ops.sum(a) < 1e9, lambda a: ops.cos(a), p.x, maximum_iterations=4
    ),
    "while_loop/until": lambda p: ops.while_loop(
        lambda i, a: ops.max(ops.abs(a)) > 0.1, lambda i, a: (i + 1, a * 0.6), (0, p.x)
    ),
    "scan/integers": lambda p: ops.scan(lambda s, v: ((s * 3 + v) % 17, s), 1, p.ids),
    "fori_loop/traced": lambda p: ops.fori_loop(0, more.start(p), lambda i, a: ops.sin(a), p.x),
}
UNJITTED = "cannot be jitted: "
LEFT_OUT: dict[str, str] = {
    "bincount": UNJITTED + "its result's length depends on the data",
    "nonzero": UNJITTED + "its result's length depends on the data",
    "image.elastic_transform": UNJITTED + "calls int() on sigma made a tensor",
    **dict.fromkeys(
        ("bartlett", "blackman", "hamming", "hanning", "kaiser"),
        UNJITTED + "makes the window's length a tensor (and takes no array)",
    ),
    "convert_to_numpy": "returns host data",
    "empty": "its values are not defined",
    "empty_like": "its values are not defined",
}


# From Keras 3.16 on.
NEWEST = {
    "column_stack/matrices": lambda p: ops.column_stack([p.x, p.vec]),
    "column_stack/rows": lambda p: ops.column_stack([p.row, 2 * p.row]),
    "copysign/batch": lambda p: ops.copysign(p.x, p.y),
    "cov/batch": lambda p: ops.cov(p.x),
    "cov/features": lambda p: ops.cov(ops.transpose(p.x)),
    "float_power/batch": lambda p: ops.float_power(ops.abs(p.x) + 0.5, p.y),
    "gammainc/batch": lambda p: ops.gammainc(ops.abs(p.x) + 0.5, ops.abs(p.y) + 0.5),
    "grad/batch": lambda p: ops.grad(lambda a: ops.sum(ops.sin(a) * p.y))(p.x),
    "image.reconstruct_patches/both": lambda p: ops.image.reconstruct_patches(
        ops.sin(ops.image.extract_patches(p.image, 2)), 2
    ),
    "lgamma/batch": lambda p: ops.lgamma(ops.abs(p.x) + 0.5),
    "matrix_power/batched": lambda p: ops.matrix_power(p.square, 3),
}


def all_names() -> list[str]:
    """Every public function, those of a submodule with its name where `keras.ops` lacks them."""
    names = {n for n in dir(ops) if not n.startswith("_") and callable(getattr(ops, n))}
    for part, module in inspect.getmembers(ops, inspect.ismodule):
        if not part.startswith("_"):
            own = {n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))}
            names |= {f"{part}.{n}" for n in own if not hasattr(ops, n)}
    return sorted(names)


def _newest():
    known = set(all_names())
    return [(name, case) for name, case in NEWEST.items() if name.split("/")[0] in known]


def _cases():
    smooth = [*_unary(UNARY), *_binary(BINARY), *_along(REDUCTIONS), *_kept(REDUCTIONS)]
    smooth += [
        *_along(CUMULATIVE),
        *_quantiles(),
        *_images(),
        *SMOOTH.items(),
        *more.SMOOTH.items(),
        *_newest(),
    ]
    for mode in PAD_MODES:
        smooth.append((f"pad/{mode}", _padded(((2, 1), (0, 0)), mode)))
        smooth.append((f"pad/{mode}_both", _padded(((1, 2), (3, 1)), mode)))
    for reduction in ("amax", "mean", "sum", "std", "var", "logsumexp"):
        f = getattr(ops, reduction)
        for label, axes in (("spatial", (1, 2)), ("batch_and_time", (0, 1))):
            smooth.append((f"{reduction}/{label}", lambda p, f=f, a=axes: f(p.image, axis=a)))
    discrete = [*_unary(UNARY_DISCRETE), *_binary(BINARY_DISCRETE), *_along(REDUCTIONS_DISCRETE)]
    discrete += [*DISCRETE.items(), *more.DISCRETE.items()]
    return (*(Case(*c) for c in smooth), *(Case(*c, differentiable=False) for c in discrete))


CASES: tuple[Case, ...] = _cases()
