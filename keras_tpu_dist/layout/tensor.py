"""Tensor parallelism: which dimension of a weight the model axes split, by data flow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import Axes, axis_size, dividing_axes, splitting_entries
from keras_tpu_dist.layout.banks import banks_of, biases_of
from keras_tpu_dist.layout.flow import Arguments, NotTraced, flow_of
from keras_tpu_dist.layout.rules import Decision, Gathered, View
from keras_tpu_dist.programs.cuts import Cut

# An uneven split of a table needs at least this many rows in a part.
_FEWEST_IN_A_PART = 8

# Sending a table with at most this many rows (types, positions) costs less than sending the rows
# that a batch looks up, because a batch has as many tokens.
_MOST_SENT_WHOLE = 4096

# In reasons.
_INDIVISIBLE = "not divisible by"

_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_TRANSPOSED = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)


@dataclass(frozen=True, eq=False)
class Projection:
    """A layer that multiplies features by one kernel.

    Dimensions are those of the kernel as it is multiplied. A kernel of 4 bits is stored otherwise:
    as a matrix, what is summed over by what is not, of which a byte has two values in a row.

    Attributes:
        ins: The dimensions that are summed over.
        outs: The dimensions that become features of the output.
        experts: The dimensions that input and output have too.
        bias_dims: For every dimension of the bias, the kernel dimension it belongs to.
        output_dims: The same for the last dimensions of the output.
    """

    layer: Any
    kernel: Any
    sizes: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    experts: tuple[int, ...] = ()
    bias: Any = None
    bias_dims: tuple[int | None, ...] = ()
    output_dims: tuple[int | None, ...] = ()

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """The sizes of the feature dimensions."""
        return tuple(self.sizes[dim] for dim in self.outs)

    @property
    def packed(self) -> bool:
        """Whether two values share a byte."""
        return tuple(self.kernel.shape) != self.sizes

    def stored(self, dim: int) -> int | None:
        """The dimension of the stored kernel that equal parts of a dimension cut, or `None`.

        Args:
            dim: The dimension.
        """
        if not self.packed or dim == 0:
            return dim
        return 1 if math.prod(self.sizes[:dim]) == self.kernel.shape[0] else None

    def parts(self, dim: int) -> int:
        """A number by whose divisors a dimension, and its bytes, can be cut.

        Args:
            dim: The dimension.
        """
        stored = self.stored(dim)
        return 1 if stored is None else math.gcd(self.sizes[dim], self.kernel.shape[stored])

    def stored_axes(self, axes: Axes) -> Axes:
        """The layout of the stored kernel.

        Args:
            axes: That of the kernel's dimensions.
        """
        if not self.packed:
            return axes
        entries: list[Any] = [None] * len(self.kernel.shape)
        for dim, entry in enumerate(axes):
            stored = self.stored(dim)
            if entry is not None and stored is not None:
                entries[stored] = entry
        return tuple(entries)

    def axes(self, stored: Axes) -> Axes:
        """The layout of the kernel's dimensions.

        Args:
            stored: That of the stored kernel.
        """
        if not self.packed or not stored:
            return stored
        entries, taken = [], set()
        for dim in range(len(self.sizes)):
            at = self.stored(dim)
            entries.append(None if at is None or at in taken else stored[at])
            taken.add(at)
        return tuple(entries)


def projection_of(layer: Any) -> Projection | None:
    """Describes a layer as a projection, or returns `None`.

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
        sizes = (spec.axes[-1], layer.units)
        return Projection(layer, kernel, sizes, (0,), (1,), (), bias, (1,), (1,))
    sizes = tuple(kernel.shape)
    if isinstance(layer, _TRANSPOSED):
        ins, outs = (rank - 1,), (rank - 2,)
    elif isinstance(layer, _CONVOLUTIONS) and layer.groups == 1:
        ins, outs = (rank - 2,), (rank - 1,)
    else:
        return None
    return Projection(layer, kernel, sizes, ins, outs, (), bias, outs, outs)


def _einsum_projection(layer, kernel, bias) -> Projection | None:
    left, _, output = layer.equation.replace("...", "").replace(" ", "").partition("->")
    inputs, _, names = left.partition(",")
    sizes = tuple(kernel.shape)
    if layer.quantization_mode == "int4":
        sizes = tuple(layer.original_kernel_shape)
    if len(names) != len(sizes):
        return None
    dims = range(len(names))
    ins = tuple(d for d in dims if names[d] in inputs and names[d] not in output)
    outs = tuple(d for d in dims if names[d] in output and names[d] not in inputs)
    experts = tuple(d for d in dims if names[d] in inputs and names[d] in output)
    bias_dims: tuple[int | None, ...] = ()
    if bias is not None:
        letters = [c for c in output if c in layer.bias_axes]
        dims_of_letters = tuple(names.index(c) if c in names else None for c in letters)
        # Keras appends dimensions of size 1, so that the bias broadcasts.
        bias_dims = dims_of_letters + (None,) * (len(bias.shape) - len(dims_of_letters))
    output_dims = tuple(names.index(c) if c in names else None for c in output)
    return Projection(layer, kernel, sizes, ins, outs, experts, bias, bias_dims, output_dims)


_BY_CHANNEL = (
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


class TensorPlan:
    """Decides for every weight of a model that tensor parallelism has a rule for.

    Args:
        model: A built model.
        mesh: The mesh.
        axes: The mesh axes that split weights.
        min_size: A projection without a partner is not split if it has fewer elements.
    """

    def __init__(self, model: Any, mesh: Mesh, axes: Sequence[str], min_size: int):
        self._mesh = mesh
        self._axes = tuple(axes)
        self._min_size = min_size
        # By id: the model holds its variables while the plan is made, and the plan is not kept.
        # `_by_flow` decides first, by pairs of kernels; then `_layer`, by rules per class; then
        # `_remaining`. Who decides first wins: `_decide` overwrites, so its callers ask before.
        self.decisions: dict[int, Decision] = {}
        # Ids of tables that compute logits.
        self._makes_logits: set[int] = set()
        # Ids of kernels that other kernels follow.
        self._feeding: set[int] = set()
        # From ids of kernels to the reason why no call shows what follows them.
        self._untraced: dict[int, str] = {}
        self._projections: dict[int, Projection | None] = {}
        layers = list(_keras.flatten_layers(model))
        self._by_flow(layers)
        for layer in layers:
            self._layer(layer)
        for layer in layers:
            self._remaining(layer)

    def _by_flow(self, layers) -> None:
        """Splits weights that belong together by a layer's call, inner layers before outer ones."""
        ruled, called = self._ruled(layers), _calls_in_graphs(layers)
        self._feeding |= _feeding_in_graphs(layers)
        tables = {
            id(table)
            for layer in layers
            if (table := _keras.stored_weight(layer, "embeddings")) is not None
            and self._first_dividing(table.shape, (0,))[1] is None
        }
        for layer in reversed(layers):
            kernels = _kernels_in(layer)
            free = [v for v in kernels if id(v) not in self.decisions and id(v) not in ruled]
            open_here = [*free, *(v for v in kernels if id(v) in tables)]
            if len(kernels) < 2 or not open_here or not _may_hold_pairs(layer):
                continue
            if len(open_here) < 2 and _keras.graph(layer) is not None:
                continue
            variables = _keras.variables_of(layer)
            try:
                flow = flow_of(layer, variables, called.get(id(layer)))
            except NotTraced as error:
                why = f", as the call of {layer.path!r} cannot be traced: {error}"
                for v in free:
                    self._untraced.setdefault(id(v), why)
                continue
            for v in kernels:
                self._untraced.pop(id(v), None)
            views = {w: View(shape, layer.path) for w, shape in flow.views.items()}
            for entry in splitting_entries(self._axes, self._mesh):
                for cut in flow.cuts(axis_size(self._mesh, entry)):
                    self._put_cut(cut, variables, entry, ruled, views)
            self._makes_logits |= {
                id(v)
                for w, v in enumerate(variables)
                if id(v) in tables and flow.makes_features(w, 0)
            }
            self._feeding |= {id(variables[w]) for w in flow.feeding}
            routers = [w for w in flow.routers() if id(variables[w]) not in ruled]
            self._put_whole(routers, variables, "what it computes is searched whole")

    def _ruled(self, layers) -> set[int]:
        """Weights of layers for which a rule for their class is better: by heads, gates,
        experts."""
        ruled = set()
        for layer in layers:
            projection = self._projections[id(layer)] = projection_of(layer)
            if isinstance(layer, _ATTENTION) or _gates(layer):
                ruled.update(id(variable) for variable in layer.variables)
            elif (
                _keras.stored_weight(layer, "embeddings") is not None
                or banks_of(layer)
                or (projection is not None and projection.experts)
            ):
                ruled.update(id(variable) for variable in _keras.own_variables(layer))
        return ruled

    def _put_cut(self, cut: Cut, variables, entry, ruled, views: Mapping[int, View]) -> None:
        kernels = [variables[w] for w, _ in (*cut.columns, *cut.rows)]
        if any(id(v) in self.decisions or id(v) in ruled for v in kernels):
            return
        first_column, first_row = (variables[g[0][0]] for g in (cut.columns, cut.rows))
        columns = {_owner(variables[w]) for w, _ in cut.columns}
        biases = [(w, dim) for w, dim in cut.follows if _owner(variables[w]) in columns]
        reasons = {
            f"column: feeds {_owner(first_row)!r}": (*cut.columns, *biases),
            f"row: fed by {_owner(first_column)!r}": cut.rows,
            f"follows the features of {_owner(first_column)!r}": set(cut.follows) - set(biases),
        }
        for reason, members in reasons.items():
            for w, dim in members:
                if w in views and dim > len(variables[w].shape) - 1:
                    self._put_apart(variables[w], dim, entry, reason, views[w])
                    continue
                axes = tuple(entry if d == dim else None for d in range(len(variables[w].shape)))
                self._decide(variables[w], axes, reason)
        few = [w for w in cut.whole if id(variables[w]) not in ruled]
        self._put_whole(few, variables, "few heads, which all that are split share")

    def _put_apart(self, variable, dim: int, entry, reason: str, view: View) -> None:
        """Lets a layer use a fused weight for queries, keys and values by heads.

        The kernel is stored split along its first dimension. In every step, each device gets its
        heads of all three kinds; the bias is replicated.
        """
        by_input = len(variable.shape) > 1 and not variable.shape[0] % axis_size(self._mesh, entry)
        self._decide(variable, (entry, None) if by_input else (), reason)
        used = tuple(entry if d == dim else None for d in range(len(view.shape)))
        self._also(variable, f"used as {view.shape}, dimension {dim} split", used=used, view=view)

    def _put_whole(self, whole: Sequence[int], variables, why: str) -> None:
        for w in whole:
            whole_here = Decision((), f"tensor_parallel: replicated: {why}")
            self.decisions.setdefault(id(variables[w]), whole_here)

    def _layer(self, layer) -> None:
        if isinstance(layer, _ATTENTION):
            self._attention(layer)
        elif _keras.stored_weight(layer, "embeddings") is not None:
            self._embedding(layer)
        elif gates := _gates(layer):
            self._recurrent(layer, gates)
        elif (projection := self._projections[id(layer)]) is not None:
            if id(projection.kernel) not in self.decisions:
                self._projection(projection)
            else:
                self._beside(projection)
        else:
            self._experts(layer)

    def _beside(self, p: Projection) -> None:
        """The companions of a kernel that is already decided: its bias, factors and scales."""
        decision = self.decisions[id(p.kernel)]
        if p.bias is not None and id(p.bias) not in self.decisions:
            self.decisions[id(p.bias)] = Decision((), decision.reason)
        self._beside_kernel(p, p.axes(decision.axes))

    def _projection(self, p: Projection) -> None:
        layer = p.layer
        if p.experts:
            self._split_kernel(p, p.experts, "experts, one group per shard")
        elif _elements(p.kernel) >= self._min_size:
            why = self._untraced.get(id(p.kernel), "")
            self._split_kernel(p, (*p.outs, *p.ins), f"without a partner{why}")
            axes = p.axes(self.decisions[id(p.kernel)].axes)
            split = [d for d, entry in enumerate(axes) if entry]
            if id(p.kernel) in self._feeding:
                if split and split[0] in p.outs:
                    self._gather(layer, p.kernel, p.out_sizes)
            elif p.outs and split and split[0] in p.ins and not p.packed:
                largest = max(p.outs, key=lambda d: p.sizes[d])
                self._use(p.kernel, largest, axes[split[0]], "features")
        else:
            self._replicate_layer(
                layer,
                f"no partner, and its {_elements(p.kernel)} elements are below "
                f"min_size={self._min_size}",
            )

    def _split_kernel(self, p: Projection, dims, reason: str) -> None:
        # The dimensions that a pair shares have equal sizes, so both kernels split the same one.
        dim, entry = self._first_dividing([p.parts(d) for d in range(len(p.sizes))], dims)
        if entry is None:
            sizes = [p.sizes[d] for d in dims]
            packed = ", two values in a byte," if p.packed else ""
            self._replicate_layer(
                p.layer, f"{reason}; but {sizes}{packed} are {_INDIVISIBLE} {self._ways()}"
            )
            return
        self._assign_projection(p, dim, entry, reason)

    def _assign_projection(self, p: Projection, dim: int, entry, reason: str) -> None:
        axes = tuple(entry if d == dim else None for d in range(len(p.sizes)))
        self._decide(p.kernel, p.stored_axes(axes), reason)
        if p.bias is not None:
            self._decide(p.bias, tuple(entry if d == dim else None for d in p.bias_dims), reason)
        self._beside_kernel(p, axes)

    def _attention(self, layer) -> None:
        inner = [q for q in map(projection_of, _keras.sublayers(layer)) if q is not None]
        heads = [q for q in inner if len(q.outs) > 1]
        back = [q for q in inner if len(q.ins) > 1]
        parts = [q.parts(q.outs[0]) for q in heads]
        entry = dividing_axes(max(parts, default=0), self._axes, self._mesh)
        if entry is None:
            most = max(heads, key=lambda q: q.out_sizes[0], default=None)
            what = "no kernels by heads" if most is None else self._heads_of(most)
            self._replicate_layer(layer, f"attention: {what} are {_INDIVISIBLE} {self._ways()}")
            return
        ways = axis_size(self._mesh, entry)
        for q, most_parts in zip(heads, parts, strict=True):
            if most_parts % ways:
                reason = (
                    f"attention: {self._heads_of(q, 'key-value heads')} are {_INDIVISIBLE} {ways}"
                )
                self._replicate_layer(q.layer, reason)
            else:
                self._assign_projection(q, q.outs[0], entry, "attention: column, by heads")
        for q in back:
            if q.parts(q.ins[0]) % ways == 0:
                self._assign_projection(q, q.ins[0], entry, "attention: row, by heads")

    @staticmethod
    def _heads_of(q: Projection, kind: str = "heads") -> str:
        """The heads of a kernel, in words."""
        heads, *width = q.out_sizes
        packed = f" of {math.prod(width)} values, two in a byte," if q.packed else ""
        return f"{heads} {kind}{packed}"

    def _embedding(self, layer) -> None:
        """A table for tokens or positions, and an untied one that computes logits from features."""
        names = ("vocabulary", "width")
        for name, sides in (("embeddings", names), ("reverse_embeddings", names[::-1])):
            table = _keras.stored_weight(layer, name)
            if table is None or len(table.shape) != 2 or id(table) in self.decisions:
                continue
            by_vocabulary = sides.index("vocabulary")
            dim, entry = self._first_dividing(table.shape, (by_vocabulary, 1 - by_vocabulary))
            if entry is None:
                reason = f"embedding: {tuple(table.shape)} is {_INDIVISIBLE} {self._ways()}"
                self._decide(table, (), f"replicated: {reason}")
                continue
            axes = tuple(entry if d == dim else None for d in (0, 1))
            self._decide(table, axes, f"embedding: by {sides[dim]}")
            reverses = name != "embeddings" or getattr(layer, "tie_weights", False)
            if dim != by_vocabulary and (reverses or id(table) in self._makes_logits):
                self._use(table, by_vocabulary, entry, "vocabulary")
            if dim != by_vocabulary and not self.decisions[id(table)].used:
                self._look_up(layer, table)
            self._factors(layer, name, table, axes)
            words = axes[by_vocabulary]
            scale = _keras.stored_weight(layer, f"{name}_scale")
            # One scale per word, or per group of its features, which come last in a table.
            grouped = scale is not None and len(scale.shape) == 2 and by_vocabulary == 0
            self._scales(layer, name, table, (words, None) if grouped else (words,))

    def _look_up(self, layer, table) -> None:
        """Gathers features from a table split by width, because they are added to whole ones."""
        if table.shape[0] > _MOST_SENT_WHOLE:
            self._gather(layer, table, table.shape[1:])
        elif _elements(table) < self._min_size:
            few = f"its {_elements(table)} elements are below min_size={self._min_size}"
            self._decide(table, (), f"replicated: embedding: {few}")
        else:
            self._use_whole(table)

    def _gather(self, layer, weight, sizes: Sequence[int]) -> None:
        """Lets a layer gather the features that it computes in parts.

        Otherwise every later norm and kernel would gather them.
        """
        gathered = Gathered(layer.path, tuple(sizes))
        self._also(weight, "its features are gathered", gathered=gathered)

    def _use_whole(self, variable) -> None:
        """Lets calls use a weight whole that is stored in parts."""
        if self.decisions[id(variable)].axes:
            self._also(variable, "used whole", used=(None,) * len(variable.shape))

    def _use(self, variable, dim: int, entry, what: str) -> None:
        """Lets calls use a weight in unequal parts, along a dimension that is not divisible."""
        size, ways = variable.shape[dim], axis_size(self._mesh, entry)
        if self.decisions[id(variable)].axes and size >= ways * _FEWEST_IN_A_PART:
            why = f"used by {what}, padded: {size} is {_INDIVISIBLE} {ways}"
            used = tuple(entry if d == dim else None for d in range(len(variable.shape)))
            self._also(variable, why, used=used)

    def _recurrent(self, layer, gates: int) -> None:
        units = layer.units if hasattr(layer, "units") else layer.filters
        # With one gate every split is inside it, and its units are independent.
        size = gates if gates > 1 else units
        entry = dividing_axes(size, self._axes, self._mesh)
        if entry is None:
            reason = f"recurrent: {size} gates or units are {_INDIVISIBLE} {self._ways()}"
            self._replicate_layer(layer, f"{reason}, and a gate must not cross a shard")
            return
        for weight in _keras.own_variables(layer):
            if len(weight.shape) and weight.shape[-1] == gates * units:
                axes = (*(None,) * (len(weight.shape) - 1), entry)
                self._decide(weight, axes, "recurrent: whole gates per shard")

    def _experts(self, layer) -> None:
        """In an unknown layer, kernels with three dimensions and the same first size are experts.

        Biases of shape `(experts, features)` belong to them; a router does not.
        """
        banks = banks_of(layer)
        if not banks:
            return
        count = banks[0].shape[0]
        entry = dividing_axes(count, self._axes, self._mesh)
        if entry is None:
            self._replicate_layer(layer, f"experts: {count} is {_INDIVISIBLE} {self._ways()}")
            return
        for weight in (*banks, *biases_of(layer, banks)):
            axes = (entry, *(None,) * (len(weight.shape) - 1))
            self._decide(weight, axes, "experts, one group per shard")

    def _remaining(self, layer) -> None:
        """Large weights without a rule: depthwise kernels by channel, others along a divisible
        dimension.

        A scale or a bias is replicated, like the features that it applies to; those that follow a
        cut are already decided.
        """
        for weight in _keras.own_variables(layer):
            if id(weight) in self.decisions or _elements(weight) < self._min_size:
                continue
            shape = weight.shape
            if max(shape) == _elements(weight):
                self._put_whole([0], [weight], "its features are not split")
                continue
            dims = sorted(range(len(shape)), key=lambda d: (-shape[d], -d))
            reason = "no rule for this layer class: the largest divisible dimension"
            if isinstance(layer, _BY_CHANNEL) and len(shape) > 2:
                channels = (len(shape) - 1, len(shape) - 2)
                dims, reason = sorted(channels, key=lambda d: -shape[d]), "by channels"
            dim, entry = self._first_dividing(shape, dims)
            if entry is not None:
                axes = tuple(entry if d == dim else None for d in range(len(shape)))
                self._decide(weight, axes, reason)
                if not _multiplies(layer, weight):
                    self._use_whole(weight)

    def _beside_kernel(self, p: Projection, axes: Axes) -> None:
        """LoRA factors and quantization scales are split as the kernel that they belong to."""
        axes = axes or (None,) * len(p.sizes)
        self._factors(p.layer, "kernel", p.kernel, axes)
        # A stored matrix has one scale per column; others have one per feature of the output.
        last = p.stored_axes(axes)[1:]
        if not p.packed:
            last = tuple(None if d is None or d in p.ins else axes[d] for d in p.output_dims)
        self._scales(p.layer, "kernel", p.kernel, last)

    def _factors(self, layer, name: str, base, axes: Axes) -> None:
        used = self.decisions[id(base)].used
        if used and not any(used):
            axes = used  # their product is added to the whole base
        factors = {"a": (*axes[:-1], None), "b": (None, axes[-1])}
        for which, factor_axes in factors.items():
            factor = _keras.stored_weight(layer, f"lora_{name}_{which}")
            if factor is not None:
                self._decide(factor, factor_axes, f"follows {base.path!r}")

    def _scales(self, layer, name: str, base, last: Axes) -> None:
        """Splits scales and zero points, whose last dimensions are given."""
        for companion in (f"{name}_scale", f"{name}_zero"):
            scale = _keras.stored_weight(layer, companion)
            decided = None if scale is None else self.decisions.get(id(scale))
            if scale is not None and len(scale.shape) and not (decided and decided.view):
                axes = ((None,) * len(scale.shape) + last)[-len(scale.shape) :]
                self._decide(scale, axes, f"follows {base.path!r}")
        if (groups := _keras.stored_weight(layer, "g_idx")) is not None:
            self._put_whole([0], [groups], f"which scale of {base.path!r} is whose")

    def _first_dividing(self, shape, dims) -> tuple[int, Any]:
        for dim in dims:
            entry = dividing_axes(shape[dim], self._axes, self._mesh)
            if entry is not None:
                return dim, entry
        return -1, None

    def _decide(self, variable, axes: Axes, reason: str) -> None:
        for size, entry in zip(variable.shape, axes, strict=bool(axes)):
            if size % axis_size(self._mesh, entry):
                reason = f"{reason}; but {axes} does not split {tuple(variable.shape)} evenly"
                axes = ()
                break
        if not any(axes):
            axes = ()
        self.decisions[id(variable)] = Decision(axes, f"tensor_parallel: {reason}")

    def _also(self, variable, why: str, **more: Any) -> None:
        """Adds to the decision about a weight how its layer uses it."""
        before = self.decisions[id(variable)]
        self.decisions[id(variable)] = replace(before, reason=f"{before.reason}; {why}", **more)

    def _replicate_layer(self, layer, reason: str) -> None:
        for variable in layer.variables:
            self.decisions[id(variable)] = Decision((), f"tensor_parallel: replicated: {reason}")

    def _ways(self) -> str:
        return f"{ {name: self._mesh.shape[name] for name in self._axes} }"


def _multiplies(layer, weight) -> bool:
    """Whether a layer's call multiplies by a weight, or might, if it cannot be traced."""
    variables = _keras.variables_of(layer)
    try:
        flow = flow_of(layer, variables)
    except NotTraced:
        return True
    number = [id(v) for v in variables].index(id(weight))
    return any(number in product.weights for product in flow.products)


def _kernels_in(layer) -> list:
    """Weights with two or more dimensions, in a layer and its sublayers."""
    return [weight for weight in layer.weights if len(weight.shape) > 1]


def _calls_in_graphs(layers) -> dict[int, Arguments]:
    """From the id of a layer in the graph of a model to the arguments of its call."""
    return {
        id(operation): _keras.call_arguments(node)
        for layer in layers
        for node, operation, _ in _keras.graph(layer) or ()
        if _keras.graph(operation) is None
    }


def _feeding_in_graphs(layers) -> set[int]:
    """The ids of kernels of layers in a graph, if other kernels follow in it."""
    feeding: set[int] = set()
    for layer in layers:
        followed: set[int] = set()
        for node, operation, parents in reversed(_keras.graph(layer) or ()):
            kernels = _kernels_in(operation) if isinstance(operation, keras.Layer) else []
            if id(node) in followed:
                feeding.update(map(id, kernels))
            if kernels or id(node) in followed:
                followed.update(map(id, parents))
    return feeding


def _may_hold_pairs(layer) -> bool:
    """Whether a layer's call may show more than its class."""
    if isinstance(layer, (*_ATTENTION, keras.layers.RNN, keras.layers.Wrapper)):
        return False
    return _keras.graph(layer) is not None or projection_of(layer) is None


def _owner(variable) -> str:
    return variable.path.rpartition("/")[0]


_GATES: dict[Any, int] = {
    keras.layers.LSTMCell: 4,
    keras.layers.GRUCell: 3,
    keras.layers.SimpleRNNCell: 1,
}


def _gates(layer) -> int:
    for cell, gates in _GATES.items():
        if isinstance(layer, cell):
            return gates
    # ConvLSTMCell is not exported.
    recurrent = _keras.stored_weight(layer, "recurrent_kernel")
    filters = getattr(layer, "filters", None)
    if recurrent is None or not isinstance(filters, int):
        return 0
    return recurrent.shape[-1] // filters if recurrent.shape[-1] % filters == 0 else 0


def _elements(variable) -> int:
    return math.prod(variable.shape)
