"""Programs that XLA's partitioner would get wrong, rewritten so that it does not."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from keras_tpu_dist.partitioner.jaxprs import (
    any_equation,
    is_jaxpr,
    opened,
    with_equations,
    with_inner_jaxprs,
)
from keras_tpu_dist.partitioner.spread import Axes, Spread, spec_axes
from keras_tpu_dist.partitioner.table import REPAIRS

# Programs of kernels are not partitioned.
_CLOSED = ("pallas_call",)


def made_right(
    function: Callable, mesh: Mesh, shardings: Callable[..., Sequence[Any]], outputs: Any = ()
) -> Callable:
    """A function whose compiled program computes on a mesh what it computes on one device.

    It traces the function, and where the program has an operation that XLA partitions wrongly on
    this mesh (see `keras_tpu_dist.partitioner.table`) it puts in its place what is partitioned
    rightly. A program without one stays as it is. Call it under `jax.jit`.

    Args:
        function: A function of arrays.
        mesh: The mesh.
        shardings: From the arguments to a structure of `NamedSharding` or `None` for each of them,
            one for each array or a prefix of its structure.
        outputs: The same for the structure that it returns, if it is given layouts.
    """
    if mesh.size == 1:
        return function

    @functools.wraps(function)
    def right(*args):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        inputs = [axes for pair in zip(shardings(*args), args) for axes in _axes_of(*pair)]
        results = [axes for pair in zip(outputs, shapes) for axes in _axes_of(*pair)]
        closed = rewritten(closed, mesh, inputs, results)
        flat = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return right


def rewritten(jaxpr: Any, mesh: Mesh, inputs: Sequence[Axes], outputs: Sequence[Axes] = ()) -> Any:
    """A program with every operation repaired that XLA would partition wrongly.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        mesh: The mesh.
        inputs: For each input, the mesh axes of each dimension.
        outputs: The same for results that are given a layout.

    Returns:
        The program; the same object where nothing is to be done.
    """
    if not any_equation(jaxpr, lambda equation: equation.primitive.name in REPAIRS):
        return jaxpr
    return _Rewriter(Spread(jaxpr, inputs, outputs, mesh)).program(jaxpr)


class _Rewriter:
    def __init__(self, spread: Spread):
        self._spread = spread
        self._done: dict[Any, Any] = {}

    def program(self, jaxpr: Any) -> Any:
        key = (id(opened(jaxpr)), self._spread.manual)
        if key not in self._done:
            # The original is kept as well: while it lives, nothing else has its identity.
            self._done[key] = (self._edited(jaxpr), jaxpr)
        return self._done[key][0]

    def _edited(self, jaxpr: Any) -> Any:
        equations: list = []
        changed = False
        for equation in opened(jaxpr).eqns:
            new = self._equation(equation)
            changed = changed or new is not equation
            equations.extend(new if isinstance(new, list) else [new])
        return with_equations(jaxpr, equations) if changed else jaxpr

    def _equation(self, equation: Any) -> Any:
        name = equation.primitive.name
        if name in _CLOSED:
            return equation
        repaired = REPAIRS.get(name)
        if repaired is not None and (equations := repaired(equation, self._spread)) is not None:
            return equations
        if not any(map(is_jaxpr, jax.tree.leaves(equation.params, is_leaf=is_jaxpr))):
            return equation
        manual = equation.params["newly_manual_axes"] if name == "shard_map" else ()
        with self._spread.within(manual):
            return with_inner_jaxprs(equation, self.program)


def _axes_of(shardings: Any, tree: Any) -> list[Axes]:
    """The mesh axes of each dimension of each array of a structure."""

    def is_leaf(x):
        return x is None or isinstance(x, jax.sharding.Sharding)

    given, arrays = jax.tree.leaves(shardings, is_leaf=is_leaf), jax.tree.leaves(tree)
    if len(given) != len(arrays):
        spread = jax.tree.broadcast(shardings, tree, is_leaf=is_leaf)
        given = jax.tree.leaves(spread, is_leaf=is_leaf)
    return [spec_axes(sharding) for sharding in given]
