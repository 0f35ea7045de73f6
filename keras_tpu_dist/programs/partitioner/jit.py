"""`jax.jit` for a mesh: replaces operations that XLA partitions wrongly before compiling."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from keras_tpu_dist.common.compiled_programs import compiling
from keras_tpu_dist.common.phases import OTHER, phase
from keras_tpu_dist.programs.answers import Answer
from keras_tpu_dist.programs.equal import EXECUTABLES, Equal, key_of
from keras_tpu_dist.programs.jaxprs import (
    constants_of,
    inner_jaxprs,
    opened,
    with_constants,
    with_equations,
    with_inputs,
)
from keras_tpu_dist.programs.partitioner import exchanges
from keras_tpu_dist.programs.partitioner.description import description_of
from keras_tpu_dist.programs.partitioner.places import in_compiled_code
from keras_tpu_dist.programs.partitioner.spread import Axes, spec_axes
from keras_tpu_dist.programs.types import types_of


class OtherTypes(Exception):
    """A program was called with arrays of other dtypes than it was rewritten for."""


class Jitted:
    """A function that is compiled once for all arguments of the same shapes.

    If the traced program has an operation that XLA partitions wrongly on this mesh (see
    `keras_tpu_dist.programs.partitioner.table`), a repaired program is compiled. Otherwise the
    program is that of `jax.jit`.

    Args:
        function: A function of arrays.
        mesh: The mesh.
        layouts: A function of the arguments that returns a `NamedSharding` or `None` for every
            argument, or a structure of them that is a prefix of it.
        outputs: The same for every entry of the tuple that the function returns, if its results
            have layouts.
        kind_of: A function of the arguments that returns the key of their program; by default all
            shapes and dtypes. If the shapes of some arguments never change, a cheaper key makes
            every call faster.
        keep: Keeps what was repaired: the answers of the pass "faults".
        **options: The options of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable,
        mesh: Mesh,
        layouts: Callable[..., Sequence[Any]],
        outputs: Sequence[Any] = (),
        kind_of: Callable[..., Hashable] | None = None,
        keep: Callable[[list[Answer]], None] | None = None,
        **options: Any,
    ):
        self._function = function
        self._plain = jax.jit(function, **options)
        self._name = getattr(function, "__name__", "program")
        self._mesh = mesh
        self._layouts = layouts
        self._outputs = outputs
        self._kind_of = kind_of or shapes_of
        self._keep = keep
        self._options = options
        self._programs: dict[Hashable, Callable] = {}
        # Programs that were also compiled and checked for hangs, for which lowering is not enough.
        self._launched: dict[Hashable, Callable] = {}

    def __call__(self, *args: Any) -> Any:
        """Runs the program for these arguments."""
        kind = self._kind_of(*args)
        launched = self._launched.get(kind)
        if launched is not None:
            try:
                return launched(*args)
            except OtherTypes:
                del self._launched[kind]
        described = functools.partial(description_of, args, self._mesh, self._options)
        with phase(OTHER), compiling(self._name, described):
            return self._to_launch(kind, args)(*args)

    def _to_launch(self, kind: Hashable, args: tuple) -> Callable:
        if kind not in self._launched:
            if in_compiled_code():
                # A part of another program, maybe for devices of a dry run: it is not compiled
                # here.
                return self.program(*args)
            self._launched[kind] = self._equal_or_own(kind, args)
        return self._launched[kind]

    def _equal_or_own(self, kind: Hashable, args: tuple) -> Callable:
        """The executable of an equal program, or this one, which is then there for others."""
        program = self.program(*args)
        held = isinstance(program, _Holding)
        key = None if held else key_of(program, args, self._mesh, self._options)
        if key is not None and (compiled := EXECUTABLES.find(key)) is not None:
            return Equal(compiled, key, lambda *args: self._without_hangs(args)(*args))
        program = self._programs[self._key(args, False)] = self._without_hangs(args)
        if key is not None and not isinstance(program, _Holding):
            # `jax.jit` caches the executable, so the following call does not compile again.
            EXECUTABLES.add(key, program.lower(*args).compile())
        return program

    def trace(self, *args: Any) -> Any:
        """The function traced, as `jax.jit` would compile it.

        Args:
            args: The function's arguments, or `jax.ShapeDtypeStruct` for their arrays.
        """
        return self._plain.trace(*args)

    def lower(self, *args: Any) -> Any:
        """The lowered program for these arguments.

        Args:
            args: The function's arguments.
        """
        return self.program(*args).lower(*args)

    def program(self, *args: Any) -> Any:
        """The `jax.jit` function for these arguments.

        Args:
            *args: The function's arguments; `kind_of` decides which of them share a program.
        """
        key = self._key(args, exchanges.rows_are_whole())
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._repaired_or_plain(args)
        return program

    def _key(self, args: tuple, rows_are_whole: bool) -> Hashable:
        return self._kind_of(*args), tuple(types_of(jax.tree.leaves(args))), rows_are_whole

    def _repaired_or_plain(self, args: tuple) -> Callable:
        if self._mesh.size == 1:
            return self._plain
        # Imported late, because a program on one device needs no repairs.
        from keras_tpu_dist.programs.partitioner.branches import RowsExchanged

        if exchanges.rows_are_whole():
            return self._with_whole_rows(args)
        try:
            return self._repaired(self._plain, args)
        except RowsExchanged:
            return self._with_whole_rows(args)

    def _with_whole_rows(self, args: tuple) -> Callable:
        return self._repaired(
            jax.jit(exchanges.with_whole_rows(self._function), **self._options), args
        )

    def _without_hangs(self, args: tuple) -> Callable:
        """The program to launch, in which no branch waits for devices in another one."""
        program = self.program(*args)
        if self._mesh.size == 1:
            return program
        from keras_tpu_dist.programs.partitioner.branches import choosing_axes

        axes = choosing_axes(program.trace(*args).jaxpr)
        if not axes:
            return program

        def compiled(program: Any) -> str:
            # `jax.jit` caches the executable, so the following call does not compile again.
            return program.lower(*args).compile().as_text()

        sizes = dict(self._mesh.shape)
        if exchanges.exchanged_in_branches(compiled(program), sizes, axes):
            program = self._with_whole_rows(args)
            exchanges.check_no_exchange(compiled(program), sizes, axes)
        return program

    def _repaired(self, plain: Any, args: tuple) -> Callable:
        from keras_tpu_dist.programs.partitioner.rewrite import rewritten

        traced = plain.trace(*args)
        shapes = traced.out_info
        inputs = axes_of(tuple(self._layouts(*args)), args)
        results = axes_of(tuple(self._outputs), shapes) if self._outputs else ()
        faults: list[Any] = []
        jaxpr = rewritten(traced.jaxpr, self._mesh, inputs, results, faults.append)
        if self._keep is not None:
            self._keep([Answer(f.name, f.instead, done=True) for f in dict.fromkeys(faults)])
        held = {}
        if jax.process_count() > 1 and _holds_parts(jaxpr):
            jaxpr, held = _with_held(_lifted(jaxpr))
        if jaxpr is traced.jaxpr:
            return plain
        call = _call_of(jaxpr, self._name)
        structure = jax.tree.structure(shapes)
        types = types_of(jax.tree.leaves(args))

        def program(*args):
            if types_of(jax.tree.leaves(args))[: len(types)] != types:
                raise OtherTypes
            return jax.tree.unflatten(structure, call(jax.tree.leaves(args)))

        program.__name__ = self._name
        repaired = jax.jit(program, **self._options)
        return _Holding(repaired, list(held.values())) if held else repaired


class _Holding:
    """A program that gets arrays of the function's own as a further argument.

    A Keras layer may keep arrays that are no variables, such as the mean of a `Normalization`. In a
    compiled program they are constants, which JAX refuses if parts are on devices of other
    processes.
    """

    def __init__(self, program: Any, held: Sequence[Any]):
        self._program, self._held = program, tuple(held)

    def __call__(self, *args: Any) -> Any:
        """Runs the program."""
        return self._program(*args, self._held)

    def trace(self, *args: Any) -> Any:
        """The traced program."""
        return self._program.trace(*args, self._held)

    def lower(self, *args: Any) -> Any:
        """The lowered program."""
        return self._program.lower(*args, self._held)


def _holds_parts(jaxpr: Any) -> bool:
    """Whether a program, or one that it calls, has a constant that must be an argument."""
    if any(map(_spans_processes, getattr(jaxpr, "consts", ()))):
        return True
    calls = (inner for equation in opened(jaxpr).eqns for inner in inner_jaxprs(equation))
    return any(map(_holds_parts, calls))


def _lifted(jaxpr: Any) -> Any:
    """The program in which functions compiled within it get their constants from outside."""
    equations, lifted = [], constants_of(jaxpr)
    for equation in opened(jaxpr).eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive is _call_template("any", 1, 1)[0] and _holds_parts(inner):
            inner, held = _with_held(_lifted(inner))
            lifted |= held
            params = _with_more_inputs(equation.params, len(equation.invars), len(held))
            invars = [*equation.invars, *held]
            equation = equation.replace(invars=invars, params=params | {"jaxpr": inner})
        equations.append(equation)
    return with_constants(with_equations(jaxpr, equations), lifted)


def _with_held(jaxpr: Any) -> tuple[Any, dict[Any, Any]]:
    """The program that gets the constants that must be arguments, and these by their variables.

    Others stay constants: an array on one device is no argument beside those on the mesh.
    """
    held = {variable: a for variable, a in constants_of(jaxpr).items() if _spans_processes(a)}
    return with_inputs(jaxpr, list(held)), held


def _with_more_inputs(params: dict[str, Any], inputs: int, more: int) -> dict[str, Any]:
    """The parameters of a call that gets further arrays."""
    _, ours = _call_template("any", more, 1)
    longer = {
        key: (*value, *ours[key])
        for key, value in params.items()
        if isinstance(value, tuple)
        and key.split("_")[0] in ("in", "donated")
        and len(value) == inputs
    }
    return params | longer


def _spans_processes(constant: Any) -> bool:
    """Whether JAX takes an array only as an argument."""
    is_array = isinstance(constant, jax.Array)
    return is_array and not (constant.is_fully_addressable or constant.is_fully_replicated)


def shapes_of(*args: Any) -> Hashable:
    """The default key of a program: the structure, shapes and dtypes of its arguments.

    Args:
        args: Arrays, numbers, or structures of them.
    """
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((jax.numpy.shape(x), jax.numpy.result_type(x)) for x in leaves)


def _call_of(jaxpr: Any, name: str) -> Callable[[list], list]:
    """A function that runs a program as one call, like a `jax.jit` within a `jax.jit`.

    Evaluating the jaxpr equation by equation would trace it again, which takes as long as the
    program is long.
    """
    inputs, outputs = opened(jaxpr).invars, opened(jaxpr).outvars
    primitive, params = _call_template(name, len(inputs), len(outputs))
    # An output that is an input is returned directly: `jax.jit` neither copies nor donates it.
    position = {v: i for i, v in enumerate(inputs)}
    passed = [None if isinstance(v, core.Literal) else position.get(v) for v in outputs]

    def call(arrays: list) -> list:
        results = primitive.bind(*arrays, **params | {"jaxpr": jaxpr})
        return [r if i is None else arrays[i] for r, i in zip(results, passed, strict=True)]

    return call


def _call_template(name: str, inputs: int, outputs: int) -> tuple[Any, dict[str, Any]]:
    """The primitive and parameters with which `jax.jit` calls a program of so many arrays.

    Taken from a traced call, because their names differ between JAX versions.
    """

    def plus_one(x):
        return x + 1  # `return x` would be traced without a call

    plus_one.__name__ = name
    (equation,) = opened(jax.make_jaxpr(jax.jit(plus_one))(0.0)).eqns
    counts = {"in": inputs, "donated": inputs, "out": outputs}
    params = {
        key: value * counts[key.split("_")[0]]
        if isinstance(value, tuple) and key.split("_")[0] in counts
        else value
        for key, value in equation.params.items()
    }
    return equation.primitive, params


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A leaf around a layout, because `jax.tree` treats `None` as a node without leaves."""

    sharding: Any


def axes_of(layouts: Any, arrays: Any) -> list[Axes]:
    """The mesh axes of all dimensions of arrays, paired by their places in the structure.

    Args:
        layouts: A structure of `NamedSharding` or `None`, equal to that of the arrays or a prefix
            of it. A `None` may stand for anything at its place, even without an array.
        arrays: The arrays, or their shapes, in any structure.

    Returns:
        For every array, in the order of `jax.tree.leaves`, the axes of its dimensions.
    """
    marked = jax.tree.map(_Layout, layouts, is_leaf=_is_layout)
    spread = jax.tree.leaves(jax.tree.broadcast(marked, arrays))
    return [spec_axes(layout.sharding) for layout in spread]


def _is_layout(node: Any) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding)
