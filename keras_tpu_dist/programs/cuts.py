"""Finds the weights that open a split of features and those that close it, in a program.

If a mesh axis splits a dimension of a value into equal parts, it also splits dimensions of other
values: through sums, products, reshapes, attention by heads. Dimensions that are split together
form a `Cut`. A kernel whose output features are in the cut opens it (a column in Megatron's terms),
and a kernel that sums over them closes it (a row). Biases and scales follow. Between the two,
nothing is sent.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keras_tpu_dist.programs.calls import calls
from keras_tpu_dist.programs.dimensions import Dimensions, Mapped, dimensions
from keras_tpu_dist.programs.jaxprs import opened

# A kernel that is at most so large relative to the largest one of a cut may stay whole: if there
# are fewer key and value heads than devices, query heads share them. The same goes for a router.
_SMALL = 1 / 2


_SEARCHES = ("sort", "top_k", "approx_top_k", "argmax", "argmin")


@dataclass(frozen=True)
class Cut:
    """Dimensions of weights that one mesh axis splits together, so that values between stay split.

    Attributes:
        columns: Kernels whose output features it splits: number of the variable, and its dimension.
        rows: Kernels that sum over the split features, likewise.
        follows: Biases, scales and statistics of the split features, likewise.
        whole: Kernels that feed it and should not be split, because their few heads are not
            divisible.
        saved_bytes: Bytes that its all-reduces, forwards and backwards, are less than those of the
            same kernels without a pair, whose features are gathered; estimated.
    """

    columns: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, int], ...]
    follows: tuple[tuple[int, int], ...]
    whole: tuple[int, ...]
    saved_bytes: int


class _Value(NamedTuple):
    """A value in the program.

    Attributes:
        nodes: The node of every dimension.
        weights: The weights that it is computed from; `None` if it depends on inputs, too.
        kernels: The kernels of the last products with weights that it depends on.
        bytes: Its bytes, before it was repeated.
    """

    nodes: tuple[int, ...]
    weights: frozenset[int] | None
    kernels: frozenset[int]
    bytes: int


class _Link(NamedTuple):
    """A dimension of an operand that becomes one of a result, with the same parts up to `parts`."""

    node: int
    to: int
    parts: int
    operand_bytes: int


class _Product(NamedTuple):
    """A product of a value and a kernel, by the nodes of the kernel's dimensions."""

    weights: frozenset[int]
    summed: tuple[int, ...]
    free: tuple[int, ...]
    shared: tuple[int, ...]
    operand: tuple[int, ...]
    operand_bytes: int
    result_bytes: int


@dataclass
class Flow:
    """How dimensions are split together in the call of a layer.

    Attributes:
        sizes: For every node, a dimension of a value, its size.
        steps: For every operation, the nodes that it links.
        products: Products with kernels.
        sums: Nodes over which an operation sums or searches, and the bytes of its result.
        whole: Nodes that an operation needs whole.
        meets: For products of two values, the nodes of one, and the kernels behind the other.
        searched: Kernels whose features are sorted or searched, such as a router's.
        feeding: Kernels whose features another kernel multiplies, whatever is between them.
        ends: Nodes of the layer's inputs and outputs.
        weights: For every weight, the nodes of its dimensions.
        views: For kernels that hold features of several kinds, and their biases, the shape that
            they are reshaped to, whose dimensions count.
    """

    sizes: list[int] = field(default_factory=list)
    steps: list[list[_Link]] = field(default_factory=list)
    products: list[_Product] = field(default_factory=list)
    sums: list[tuple[int, int]] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    meets: list[tuple[tuple[int, ...], frozenset[int]]] = field(default_factory=list)
    searched: set[int] = field(default_factory=set)
    feeding: set[int] = field(default_factory=set)
    ends: list[int] = field(default_factory=list)
    weights: list[tuple[int, ...]] = field(default_factory=list)
    views: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def cuts(self, ways: int) -> list[Cut]:
        """The cuts into a number of parts that need no communication between their kernels.

        Nodes that must be split alike are one class (union-find), named by its root. A class can be
        cut if its length in features is a multiple of the number of parts; it is spoiled if an
        operation needs a dimension of it whole, or mixes its parts.

        Args:
            ways: The size of the mesh axis.

        Returns:
            The cuts; those that save the most bytes come first.
        """
        root = self._together(ways)
        sums: dict[int, int] = defaultdict(int)
        for node, result_bytes in self.sums:
            sums[root[node]] += result_bytes
        spoiled = {root[node] for node in (*self.whole, *self.ends)}
        spoiled |= self._broken(root, ways, sums)
        weights: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for w, nodes in enumerate(self.weights):
            for dim, node in enumerate(nodes):
                weights[root[node]][w].append(dim)
        met: dict[int, set[int]] = defaultdict(set)
        for nodes, kernels in self.meets:
            for group in {root[node] for node in nodes}:
                met[group] |= kernels
        cuts = []
        for group, products in self._by_cut(root).items():
            if group in spoiled or self.sizes[group] % ways:
                continue
            closes = [any(root[node] == group for node in product.summed) for product in products]
            pairs = list(zip(products, closes, strict=True))
            cut = self._cut(pairs, weights[group], met[group], sums[group])
            if cut is not None:
                cuts.append(cut)
        cuts.sort(key=lambda cut: -cut.saved_bytes)
        return cuts

    def _together(self, ways: int) -> list[int]:
        """For every node, the representative of the nodes that are split with it."""
        parent = list(range(len(self.sizes)))

        def top(node: int) -> int:
            while parent[node] != node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        for links in self.steps:
            for link in links:
                if link.parts % ways == 0:
                    parent[top(link.node)] = top(link.to)
        return [top(node) for node in range(len(parent))]

    def _broken(self, root: list[int], ways: int, sums: dict[int, int]) -> set[int]:
        """Cuts of values that an operation mixes: it links a dimension, but not part by part.

        If a part of a result depends on a whole value, that value's gradient must be summed.
        """
        broken = set()
        for links in self.steps:
            from_live = {link.node for link in links if link.parts % ways == 0}
            to_live = {link.to for link in links if link.parts % ways == 0}
            broken |= {root[link.node] for link in links if link.node not in from_live}
            made = {link.to: link.operand_bytes for link in links if link.to not in to_live}
            for node, operand_bytes in made.items():
                sums[root[node]] += operand_bytes
        return broken

    def _by_cut(self, root: list[int]) -> dict[int, list[_Product]]:
        by_group: dict[int, list[_Product]] = defaultdict(list)
        for product in self.products:
            for group in {root[node] for node in (*product.summed, *product.free)}:
                by_group[group].append(product)
        return by_group

    def _cut(
        self,
        products: list[tuple[_Product, bool]],
        dims: dict[int, list[int]],
        met: set[int],
        sums: int,
    ) -> Cut | None:
        """A cut; `None` if it would not save bytes.

        Args:
            products: Its products, and whether they sum over the dimension that it splits.
            met: The kernels of values that are multiplied by one that it splits.
            sums: The bytes that operations within it sum.
        """
        if any(len(own) > 1 for own in dims.values()):
            return None
        rows: set[int] = set()
        columns: set[int] = set()
        summed = alone = 0
        operands = {}
        for product, closes in products:
            alone += product.result_bytes + 2 * product.operand_bytes
            (rows if closes else columns).update(product.weights & dims.keys())
            if closes:
                summed += product.result_bytes
            else:
                operands[product.operand] = product.operand_bytes
        if not rows or not columns or rows & columns or sums > summed:
            return None
        follows = dims.keys() - rows - columns
        numbered = (tuple((w, dims[w][0]) for w in sorted(g)) for g in (columns, rows, follows))
        # Kernels that compute a whole operand for the split features, such as keys for query heads.
        small = max(self.elements(w) for w in columns | rows) * _SMALL
        whole = sorted(w for w in met - columns - rows if self.elements(w) <= small)
        return Cut(
            *numbered,
            whole=tuple(whole),
            saved_bytes=alone - 2 * (summed + sum(operands.values()) + sums),
        )

    def makes_features(self, weight: int, dim: int) -> bool:
        """Whether a dimension of a weight becomes features of a product with it.

        Args:
            weight: The number of the weight.
            dim: Its dimension.
        """
        node = self.weights[weight][dim]
        root = self._together(self.sizes[node])
        made = [p for p in self.products if weight in p.weights]
        return any(root[node] == root[other] for product in made for other in product.free)

    def multiplies_by(self, weight: int, dim: int) -> bool:
        """Whether parts of a weight multiply their own parts of values, as an expert its tokens.

        Args:
            weight: The number of the weight.
            dim: The dimension that has the parts.
        """
        node = self.weights[weight][dim]
        root = self._together(self.sizes[node])
        made = [p for p in self.products if weight in p.weights]
        return bool(made) and all(root[node] in map(root.__getitem__, p.shared) for p in made)

    def elements(self, weight: int) -> int:
        """The number of elements of a weight.

        Args:
            weight: Its number.
        """
        return math.prod(self.sizes[node] for node in self.weights[weight])

    def routers(self) -> list[int]:
        """Kernels, small ones, whose features are sorted or searched: better whole."""
        small = max(map(self.elements, range(len(self.weights))), default=0) * _SMALL
        return sorted(w for w in self.searched if self.elements(w) <= small)


class _Reader:
    """Converts a program to a `Flow`."""

    def __init__(self):
        self.flow = Flow()

    def value(
        self,
        atom: Any,
        weights: frozenset[int] | None = None,
        kernels: frozenset[int] = frozenset(),
    ) -> _Value:
        shape = tuple(getattr(atom.aval, "shape", ()))
        first = len(self.flow.sizes)
        self.flow.sizes.extend(shape)
        item = getattr(getattr(atom.aval, "dtype", None), "itemsize", 4)
        nodes = tuple(range(first, first + len(shape)))
        return _Value(nodes, weights, kernels, math.prod(shape) * item)

    def read(self, jaxpr: Any, operands: Iterable[_Value]) -> list[_Value]:
        values = dict(zip(jaxpr.invars, operands, strict=True))
        constant: frozenset[int] = frozenset()

        def of(atom: Any) -> _Value:
            known = None if hasattr(atom, "val") else values.get(atom)
            return self.value(atom, constant) if known is None else known

        for equation in jaxpr.eqns:
            given = [of(atom) for atom in equation.invars]
            found = dimensions(equation)
            if found is not None:
                results = self._known(equation, found, given)
            else:
                results = self._called(equation, given)
            values.update(zip(equation.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def _known(self, equation: Any, found: Dimensions, given: list[_Value]) -> list[_Value]:
        weights, kernels = _union(given), _last_kernels(given)
        if equation.primitive.name in _SEARCHES:
            self.flow.searched |= kernels
        results = [self.value(atom, weights, kernels) for atom in equation.outvars]
        if equation.primitive.name == "broadcast_in_dim":
            results = [results[0]._replace(bytes=given[0].bytes)]
        links = [
            _Link(
                given[step.operand].nodes[step.dimension],
                results[step.result].nodes[step.to],
                step.parts,
                given[step.operand].bytes,
            )
            for step in found.mapped
        ]
        for (i, a), (j, b) in found.together:
            node, other = given[i].nodes[a], given[j].nodes[b]
            if self.flow.sizes[node] == self.flow.sizes[other]:
                links.append(_Link(node, other, self.flow.sizes[node], 0))
        self.flow.steps.append(links)
        product = self._gone(equation, found.mapped, given, results)
        return results if product is None else [results[0]._replace(kernels=product.weights)]

    def _gone(
        self, equation: Any, mapped: tuple[Mapped, ...], given: list[_Value], results: list[_Value]
    ) -> _Product | None:
        """Dimensions that no result has: they are summed over, or looked up in."""
        stays = {(step.operand, step.dimension) for step in mapped}
        gone = [
            [n for d, n in enumerate(v.nodes) if (i, d) not in stays and self.flow.sizes[n] > 1]
            for i, v in enumerate(given)
        ]
        result_bytes = sum(result.bytes for result in results)
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            shared: tuple = ((), ())
            if name == "dot_general":
                _, shared = equation.params["dimension_numbers"]
            return self._product(given[:2], gone, shared, results[0])
        if name.startswith(("reduce_", "arg")):
            self.flow.sums += [(node, result_bytes) for node in gone[0]]
        elif name == "gather":
            self.flow.sums += [(node, result_bytes) for node in gone[0]]
            self.flow.whole += gone[1]
        else:
            self.flow.whole += [node for nodes in gone for node in nodes]
        return None

    def _product(
        self, given: list[_Value], gone: list[list[int]], shared: tuple, result: _Value
    ) -> _Product | None:
        kernels = [i for i in (0, 1) if given[i].weights]
        if len(kernels) != 1:
            self.flow.sums += [(node, result.bytes) for node in gone[0]]
            left, right = given
            self.flow.meets += [(left.nodes, right.kernels), (right.nodes, left.kernels)]
            return None
        kernel, operand = given[kernels[0]], given[1 - kernels[0]]
        summed = tuple(gone[kernels[0]])
        free = tuple(node for node in kernel.nodes if node not in summed)
        product = _Product(
            weights=kernel.weights or frozenset(),
            summed=summed,
            free=free,
            shared=tuple(kernel.nodes[dim] for dim in shared[kernels[0]]),
            operand=operand.nodes,
            operand_bytes=operand.bytes,
            result_bytes=result.bytes,
        )
        self.flow.products.append(product)
        self.flow.feeding |= operand.kernels
        return product

    def _called(self, equation: Any, given: list[_Value]) -> list[_Value]:
        programs = calls(equation)
        if not programs or any(p.kind == "unknown" or p.devices > 1 for p in programs):
            self.flow.whole += [node for value in given for node in value.nodes]
            results = [self.value(atom) for atom in equation.outvars]
            self.flow.whole += [node for value in results for node in value.nodes]
            return results
        kernels = _last_kernels(given)
        results = [self.value(atom, kernels=kernels) for atom in equation.outvars]
        once = len(programs) == 1 and programs[0].kind == "call"
        for program in programs:
            inner = opened(program.jaxpr)
            carried = set(program.carried)
            operands = [
                _Value(
                    given[i].nodes[len(given[i].nodes) - len(atom.aval.shape) :],
                    None if i in carried else given[i].weights,
                    given[i].kernels,
                    given[i].bytes,
                )
                for i, atom in zip(program.operands, inner.invars, strict=True)
            ]
            made = self.read(inner, operands)
            for of, value in zip(program.results, made, strict=False):
                self._link(value, results[of])
                if once:
                    results[of] = results[of]._replace(weights=value.weights, kernels=value.kernels)
            for of, value in zip(program.carried, made, strict=False):
                self._link(value, given[of])
        return results

    def _link(self, inner: _Value, outer: _Value) -> None:
        own = outer.nodes[len(outer.nodes) - len(inner.nodes) :]
        pairs = zip(inner.nodes, own, strict=True)
        self.flow.steps.append([_Link(a, b, self.flow.sizes[a], 0) for a, b in pairs])


def _union(values: list[_Value]) -> frozenset[int] | None:
    """The weights that values are computed from, if they depend on nothing else."""
    found: frozenset[int] = frozenset()
    for value in values:
        if value.weights is None:
            return None
        found |= value.weights
    return found


def _last_kernels(values: list[_Value]) -> frozenset[int]:
    return frozenset().union(*(value.kernels for value in values))


def flow_in(program: Any, weights: int) -> Flow:
    """How dimensions are split together in a program.

    Args:
        program: A `ClosedJaxpr`.
        weights: How many of its inputs, the first ones, are weights.
    """
    jaxpr, reader = opened(program), _Reader()
    values = [reader.value(atom, frozenset([n])) for n, atom in enumerate(jaxpr.invars[:weights])]
    inputs = [reader.value(atom) for atom in jaxpr.invars[weights:]]
    outputs = reader.read(jaxpr, [*values, *inputs])
    flow = reader.flow
    flow.weights = [value.nodes for value in values]
    flow.ends = [node for value in (*inputs, *outputs) for node in value.nodes]
    return flow
