"""`jax.jit` for a mesh: the program that is compiled is one that XLA partitions rightly."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from keras_tpu_dist.partitioner.classes import Axes, spec_axes
from keras_tpu_dist.partitioner.jaxprs import opened


class Jitted:
    """A function that is compiled once for all arguments of the same shapes.

    It is traced, and where its program has an operation that XLA partitions wrongly on this mesh
    (see `keras_tpu_dist.partitioner.table`) another one is compiled in its place. A program
    without one is that of `jax.jit`.

    Args:
        function: A function of arrays.
        mesh: The mesh.
        layouts: From the arguments to a structure of `NamedSharding` or `None` for each of them:
            one for each array, or a prefix of the argument's structure.
        outputs: The same for the structure that the function returns, if it is given layouts.
        kind_of: From the arguments to what tells programs apart, where the shapes of some
            arguments never change; by default all shapes and dtypes.
        **options: Those of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable,
        mesh: Mesh,
        layouts: Callable[..., Sequence[Any]],
        outputs: Sequence[Any] = (),
        kind_of: Callable[..., Hashable] | None = None,
        **options: Any,
    ):
        self._plain = jax.jit(function, **options)
        self._name = getattr(function, "__name__", "program")
        self._mesh = mesh
        self._layouts = layouts
        self._outputs = outputs
        self._kind_of = kind_of or shapes_of
        self._options = options
        self._programs: dict[Hashable, Callable] = {}

    def __call__(self, *args: Any) -> Any:
        """Runs the program for such arguments."""
        return self.program(*args)(*args)

    def trace(self, *args: Any) -> Any:
        """The function traced, as `jax.jit` would compile it.

        Args:
            *args: The function's arguments, or `jax.ShapeDtypeStruct` for their arrays.
        """
        return self._plain.trace(*args)

    def lower(self, *args: Any) -> Any:
        """The program for such arguments, lowered.

        Args:
            *args: The function's arguments.
        """
        return self.program(*args).lower(*args)

    def program(self, *args: Any) -> Any:
        """The `jax.jit` function to call with such arguments.

        Args:
            *args: The function's arguments; `kind_of` says which of them share a program.
        """
        kind = self._kind_of(*args)
        program = self._programs.get(kind)
        if program is None:
            program = self._programs[kind] = self._made(args)
        return program

    def _made(self, args: tuple) -> Callable:
        if self._mesh.size == 1:
            return self._plain
        # Who compiles nothing for a mesh loads no repair.
        from keras_tpu_dist.partitioner.rewrite import rewritten

        traced = self._plain.trace(*args)
        inputs = [axes for pair in zip(self._layouts(*args), args) for axes in _axes_of(*pair)]
        shapes = traced.out_info
        results = [axes for pair in zip(self._outputs, shapes) for axes in _axes_of(*pair)]
        jaxpr = rewritten(traced.jaxpr, self._mesh, inputs, results)
        if jaxpr is traced.jaxpr:
            return self._plain
        call = _call_of(jaxpr, self._name)
        structure = jax.tree.structure(shapes)

        def program(*args):
            return jax.tree.unflatten(structure, call(jax.tree.leaves(args)))

        program.__name__ = self._name
        return jax.jit(program, **self._options)


def shapes_of(*args: Any) -> Hashable:
    """What tells programs apart: the structure, shapes and dtypes of arguments.

    Args:
        *args: Arrays, numbers, or structures of them.
    """
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((jax.numpy.shape(x), jax.numpy.result_type(x)) for x in leaves)


def _call_of(jaxpr: Any, name: str) -> Callable[[list], list]:
    """A function that runs a program, traced in no time however long the program is.

    It becomes one call in the program around it, as a `jax.jit` within a `jax.jit` does.
    """
    inputs, outputs = opened(jaxpr).invars, opened(jaxpr).outvars
    primitive, params = _call_template(name, len(inputs), len(outputs))
    # What goes through unchanged is handed on by jax.jit, neither copied nor donated.
    position = {v: i for i, v in enumerate(inputs)}
    passed = [None if isinstance(v, core.Literal) else position.get(v) for v in outputs]

    def call(arrays: list) -> list:
        results = primitive.bind(*arrays, **{**params, "jaxpr": jaxpr})
        return [r if i is None else arrays[i] for r, i in zip(results, passed)]

    return call


def _call_template(name: str, inputs: int, outputs: int) -> tuple[Any, dict[str, Any]]:
    """The primitive and parameters with which `jax.jit` calls a program of so many arrays."""

    def identity(x):
        return x + 1

    identity.__name__ = name
    (equation,) = opened(jax.make_jaxpr(jax.jit(identity))(0.0)).eqns
    counts = {"in": inputs, "donated": inputs, "out": outputs}
    params = {
        key: value * counts[key.split("_")[0]]
        if isinstance(value, tuple) and key.split("_")[0] in counts
        else value
        for key, value in equation.params.items()
    }
    return equation.primitive, params


def _axes_of(shardings: Any, tree: Any) -> list[Axes]:
    """The mesh axes of each dimension of each array of a structure."""

    def is_leaf(x):
        return x is None or isinstance(x, jax.sharding.Sharding)

    given, arrays = jax.tree.leaves(shardings, is_leaf=is_leaf), jax.tree.leaves(tree)
    if len(given) != len(arrays):
        spread = jax.tree.broadcast(shardings, tree, is_leaf=is_leaf)
        given = jax.tree.leaves(spread, is_leaf=is_leaf)
    return [spec_axes(sharding) for sharding in given]
