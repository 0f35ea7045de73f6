"""Which projections of a model form pairs: one makes the features that the next one consumes.

A pair is what tensor parallelism is made of: the first kernel is split by its output features
(column), the second by its input features (row), and nothing is exchanged in between.
"""

from dataclasses import dataclass
from typing import Any

import keras

from keras_tpu_dist import _keras

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_TRANSPOSED = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
_ELEMENTWISE = (
    *(keras.layers.Activation, keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU),
    *(keras.layers.Dropout, keras.layers.GaussianNoise, keras.layers.GaussianDropout),
    *(keras.layers.Identity, keras.layers.ActivityRegularization, keras.layers.AlphaDropout),
    *(keras.layers.SpatialDropout1D, keras.layers.SpatialDropout2D, keras.layers.SpatialDropout3D),
)
_CHANNELWISE = tuple(
    getattr(keras.layers, f"{kind}{rank}D")
    for kind in ("MaxPooling", "AveragePooling", "GlobalMaxPooling", "GlobalAveragePooling")
    for rank in (1, 2, 3)
) + tuple(
    getattr(keras.layers, f"{kind}{rank}D")
    for kind in ("UpSampling", "ZeroPadding", "Cropping")
    for rank in (1, 2, 3)
)
_MERGING = (keras.layers.Multiply, keras.layers.Add, keras.layers.Average, keras.layers.Maximum)
_OPERATIONS = {"Add", "Multiply", "Relu", "Relu6", "Gelu", "Silu", "Sigmoid", "Tanh", "Elu"}
# These mix features, so that what they read must be whole.
_MIXING_ACTIVATIONS = {"softmax", "log_softmax", "sparsemax", "glu", "squash"}


@dataclass(frozen=True, eq=False)
class Projection:
    """A layer that multiplies features by one kernel.

    Attributes:
        layer: The layer.
        kernel: Its stored kernel.
        ins: The kernel's dimensions that are summed over.
        outs: The kernel's dimensions that become features of the output.
        experts: The kernel's dimensions that input and output have too.
        bias: The bias, or `None`.
        bias_dims: For each dimension of the bias, the kernel dimension it belongs to.
        features: Input and output features where the kernel is packed (4-bit weights).
    """

    layer: Any
    kernel: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    experts: tuple[int, ...] = ()
    bias: Any = None
    bias_dims: tuple[int | None, ...] = ()
    features: tuple[int, int] | None = None

    @property
    def in_sizes(self) -> tuple[int, ...]:
        """The sizes of the summed dimensions."""
        if self.features is not None:
            return self.features[:1]
        return tuple(self.kernel.shape[dim] for dim in self.ins)

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """The sizes of the feature dimensions."""
        if self.features is not None:
            return self.features[1:]
        return tuple(self.kernel.shape[dim] for dim in self.outs)


@dataclass(frozen=True)
class Pairing:
    """What the neighbourhood says of a model's projections.

    Attributes:
        columns: From the id of a layer to the layer that consumes its features.
        rows: From the id of a layer to the layer whose features it consumes.
        followers: From the id of a BatchNormalization to the layer whose features it scales.
    """

    columns: dict[int, Any]
    rows: dict[int, Any]
    followers: dict[int, Any]


def projection_of(layer: Any) -> Projection | None:
    """Reads a layer as a projection, or returns `None`.

    Args:
        layer: A built layer.
    """
    kernel = _keras.stored_weight(layer, "kernel")
    bias = _keras.stored_weight(layer, "bias")
    if kernel is None:
        return None
    rank = len(kernel.shape)
    if isinstance(layer, keras.layers.EinsumDense):
        return _einsum_projection(layer, kernel, bias)
    if isinstance(layer, keras.layers.Dense) and rank == 2:
        spec: Any = layer.input_spec
        features = (spec.axes[-1], layer.units)
        return Projection(layer, kernel, (0,), (1,), (), bias, (1,), features)
    if isinstance(layer, _TRANSPOSED):
        return Projection(layer, kernel, (rank - 1,), (rank - 2,), (), bias, (rank - 2,))
    if isinstance(layer, _CONVOLUTIONS) and layer.groups == 1:
        return Projection(layer, kernel, (rank - 2,), (rank - 1,), (), bias, (rank - 1,))
    return None


def pair_up(model: Any) -> Pairing:
    """Finds the column and row projections of a built model.

    Functional and Sequential models are read along their graph. The layers of anything else are
    taken in the order they were assigned: a projection that widens is followed by one that
    narrows back.

    Args:
        model: A built model.

    Returns:
        The pairs.
    """
    pairing = Pairing({}, {}, {})
    for layer in _keras.flatten_layers(model):
        if isinstance(layer, _ATTENTION):
            continue
        calls = _keras.graph(layer)
        if calls is None:
            _pair_siblings(_keras.sublayers(layer), pairing)
        else:
            _pair_along(calls, pairing)
    return pairing


_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def _einsum_projection(layer, kernel, bias) -> Projection | None:
    left, _, output = layer.equation.replace("...", "").replace(" ", "").partition("->")
    inputs, _, names = left.partition(",")
    if len(names) != len(kernel.shape):
        return None
    dims = range(len(names))
    ins = tuple(d for d in dims if names[d] in inputs and names[d] not in output)
    outs = tuple(d for d in dims if names[d] in output and names[d] not in inputs)
    experts = tuple(d for d in dims if names[d] in inputs and names[d] in output)
    bias_dims: tuple[int | None, ...] = ()
    if bias is not None:
        letters = [c for c in output if c in layer.bias_axes]
        found = tuple(names.index(c) if c in names else None for c in letters)
        # Keras appends dimensions of size 1, so that the bias broadcasts.
        bias_dims = found + (None,) * (len(bias.shape) - len(found))
    return Projection(layer, kernel, ins, outs, experts, bias, bias_dims)


def _fits(column: Projection, row: Projection) -> bool:
    return bool(column.out_sizes) and column.out_sizes == row.in_sizes


def _open(projection: Projection | None) -> bool:
    if projection is None or projection.experts:
        return False
    activation = getattr(projection.layer, "activation", None)
    return getattr(activation, "__name__", "") not in _MIXING_ACTIVATIONS


def _pair_along(calls, pairing: Pairing) -> None:
    flows: dict[int, dict[int, Projection]] = {}
    leaking: set[int] = set()
    wanted: list[tuple[Projection, list[Projection]]] = []
    norms: list[tuple[Any, list[Projection]]] = []
    for node, operation, parents in calls:
        incoming = [flows.get(id(parent), {}) for parent in parents]
        sources = {key: source for flow in incoming for key, source in flow.items()}
        projection = projection_of(operation) if isinstance(operation, keras.Layer) else None
        if projection is not None:
            if sources and all(_fits(source, projection) for source in sources.values()):
                wanted.append((projection, list(sources.values())))
            else:
                leaking.update(sources)
            flows[id(node)] = {id(operation): projection} if _open(projection) else {}
        elif _passes(operation, incoming, sources):
            flows[id(node)] = sources
            if isinstance(operation, keras.layers.BatchNormalization):
                norms.append((operation, list(sources.values())))
        else:
            leaking.update(sources)
            flows[id(node)] = {}
    outputs = set(flows) - {id(parent) for _, _, parents in calls for parent in parents}
    leaking.update(key for node in outputs for key in flows[node])
    for row, sources in wanted:
        keys = [id(source.layer) for source in sources]
        if id(row.layer) in pairing.columns or any(
            key in leaking or key in pairing.rows for key in keys
        ):
            continue
        _pair(sources, row, pairing)
    for norm, sources in norms:
        if len(sources) == 1 and id(sources[0].layer) in pairing.columns:
            pairing.followers[id(norm)] = sources[0].layer


def _passes(operation, incoming, sources) -> bool:
    if not sources:
        return True
    merging = isinstance(operation, _MERGING) or type(operation).__name__ in ("Add", "Multiply")
    if merging:
        # A sum with something whole, such as a residual, needs the features whole.
        return all(incoming) and len({s.out_sizes for s in sources.values()}) == 1
    if isinstance(operation, keras.layers.Activation):
        name = getattr(operation.activation, "__name__", "")
        return name not in _MIXING_ACTIVATIONS
    if isinstance(operation, (*_ELEMENTWISE, *_CHANNELWISE)):
        return True
    if isinstance(operation, keras.layers.BatchNormalization):
        features = next(iter(sources.values())).out_sizes
        gamma = _keras.stored_weight(operation, "moving_mean")
        return gamma is not None and tuple(gamma.shape) == features
    return not isinstance(operation, keras.Layer) and type(operation).__name__ in _OPERATIONS


def _pair_siblings(layers, pairing: Pairing) -> None:
    found = [(layer, projection_of(layer)) for layer in layers]
    projections = [p for _, p in found if p is not None and not p.experts]
    taken = {**pairing.columns, **pairing.rows}
    projections = [p for p in projections if id(p.layer) not in taken]
    if _is_handwritten_attention(projections):
        _pair(projections[:3], projections[3], pairing)
        return
    waiting: list[Projection] = []
    for projection in projections:
        if waiting and all(_fits(column, projection) for column in waiting):
            _pair(waiting, projection, pairing)
            waiting = []
        elif not _open(projection) or sum(projection.out_sizes) <= sum(projection.in_sizes):
            waiting = []
        elif waiting and waiting[0].kernel.shape == projection.kernel.shape:
            waiting = [*waiting, projection]  # gate and value of a gated feed-forward layer
        else:
            waiting = [projection]


def _is_handwritten_attention(projections) -> bool:
    shapes = {tuple(p.kernel.shape) for p in projections}
    square = len(shapes) == 1 and len(set(next(iter(shapes)))) == 1
    return len(projections) == 4 and square


def _pair(columns, row, pairing: Pairing) -> None:
    pairing.rows[id(row.layer)] = columns[0].layer
    for column in columns:
        pairing.columns[id(column.layer)] = row.layer
