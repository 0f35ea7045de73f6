"""The time loop as one TPU kernel: weights and states stay on the chip, steps stream through.

A compiled loop runs about ten kernels in every step, one after the other, and every kernel waits
for its operands. In a single kernel, the next step's projection fills the matrix unit while this
step's gates are computed, and the arrays of later steps arrive meanwhile.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
# Rows of a tile in bfloat16, twice as many as in float32.
TILE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How a time loop becomes a kernel.

    Args:
        parts: The number of parts of the rows. Every part goes through all of time, one after the
            other or on its own core.
        reread: Whether every step reads the weights again. If they are read once for all steps of a
            block, they are faster (up to 6 % in the compiler's schedule), but stored twice, because
            there are too few registers for them.
        vmem_bytes: On-chip memory it may use, or None for the compiler's default.
        interpret: Whether to run the kernel's steps as plain JAX, without a TPU; or how to simulate
            a TPU's memory and copies.
    """

    parts: int = 1
    reread: bool = False
    vmem_bytes: int | None = None
    interpret: bool | pltpu.InterpretParams = False


@dataclasses.dataclass(frozen=True)
class _KernelCall:
    """Everything but the arrays; `step` holds none either."""

    kernel: Kernel
    name: str
    step: Step
    reverse: bool
    unroll: int
    directions: int


def over_time(
    kernel: Kernel,
    name: str,
    step: Step,
    held,
    carry,
    inputs,
    *,
    reverse: bool,
    unroll: int,
    directions: int = 1,
) -> tuple[Any, Any]:
    """`lax.scan` of `step` in a single TPU kernel.

    Args:
        kernel: How to run.
        name: Its name in profiles and compiled programs.
        step: `(held, carry, inputs of one step) -> (carry, outputs of one step)` of one direction.
            It must not use other arrays.
        held: Arrays that every step reads, such as weights.
        carry: Arrays before the first step, each `(batch, units)`.
        inputs: Arrays `(time, batch, ...)`.
        reverse: Whether time runs backwards.
        unroll: The maximal number of steps in one iteration; the largest divisor of the length of
            time up to it is used.
        directions: With 2, `held` and `carry` have a leading axis of two, and `inputs` and outputs
            have it after time.

    Returns:
        The carry after the last step, and the outputs of all steps, `(time, batch, ...)`. You can
        differentiate them like those of a scan.
    """
    return _run(_KernelCall(kernel, name, step, reverse, unroll, directions), held, carry, inputs)


def steps_in_block(length: int, most: int) -> int:
    """The largest divisor of `length` that is at most `most`.

    Args:
        length: Length of time in steps, at least 1.
        most: Most steps in one block, at least 1.
    """
    return max(n for n in range(1, min(most, length) + 1) if length % n == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: _KernelCall, held, carry, inputs):
    every = jax.tree.leaves(inputs)
    grid = _grid(call, every[0].shape[0])
    out = _outputs(call, held, carry, inputs)
    arguments, results = (held, carry, inputs), (carry, out)
    cuts = (grid.whole, grid.rows, grid.steps)
    made = pl.pallas_call(
        functools.partial(_body, call, list(map(jax.tree.structure, arguments))),
        grid=grid.shape,
        in_specs=[
            cut(a) for cut, part in zip(cuts, arguments, strict=True) for a in jax.tree.leaves(part)
        ],
        out_specs=[
            cut(a)
            for cut, part in zip(cuts[1:], results, strict=True)
            for a in jax.tree.leaves(part)
        ],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.tree.leaves(results)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=call.kernel.vmem_bytes,
        ),
        cost_estimate=_cost(call, arguments, results),
        interpret=call.kernel.interpret,
        name=call.name,
    )(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(results), made)


def _body(call: _KernelCall, trees, *refs):
    """One block of steps. The states are in the results that the last of them are written to."""
    step, reverse, reread = call.step, call.reverse, call.kernel.reread
    ends = [sum(t.num_leaves for t in trees[:n]) for n in range(4)]
    held_refs, first_refs, input_refs = (refs[a:b] for a, b in itertools.pairwise(ends))
    state_refs = refs[ends[3] : ends[3] + len(first_refs)]
    out_refs = refs[ends[3] + len(first_refs) :]

    @pl.when(pl.program_id(2) == 0)
    def _():
        for state, first in zip(state_refs, first_refs, strict=True):
            state[...] = first[...]

    state = jax.tree.unflatten(trees[1], [ref[...] for ref in state_refs])
    held = None
    order = range(input_refs[0].shape[0])
    for t in reversed(order) if reverse else order:
        if reread or held is None:
            held = jax.tree.unflatten(trees[0], [ref[...] for ref in held_refs])
        state, made = step(held, state, jax.tree.unflatten(trees[2], [r[t] for r in input_refs]))
        for ref, value in zip(out_refs, jax.tree.leaves(made), strict=True):
            ref[t] = value
    for ref, value in zip(state_refs, jax.tree.leaves(state), strict=True):
        ref[...] = value


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Directions, parts of the rows, blocks of time; and the block of an array for each of them."""

    directions: int
    parts: int
    blocks: int
    per_block: int
    reverse: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.directions, self.parts, self.blocks

    def whole(self, a) -> pl.BlockSpec:
        """Read by every step: one buffer, because nothing is fetched while steps are computed."""
        own, at = self._direction()
        rest = a.shape[len(own) :]
        return pl.BlockSpec(
            (*own, *rest),
            lambda d, p, t: (*at(d), *[0] * len(rest)),
            pipeline_mode=pl.Buffered(1),
        )

    def rows(self, a) -> pl.BlockSpec:
        """States: the same block for all of time."""
        own, at = self._direction()
        rows, width = a.shape[-2:]
        return pl.BlockSpec((*own, rows // self.parts, width), lambda d, p, t: (*at(d), p, 0))

    def steps(self, a) -> pl.BlockSpec:
        """Arrays over time."""
        own, at = self._direction()
        rows, width = a.shape[-2:]

        def index(d, p, t):
            return (self.blocks - 1 - t if self.reverse else t, *at(d), p, 0)

        return pl.BlockSpec((self.per_block, *own, rows // self.parts, width), index)

    def _direction(self):
        """The leading axis of a block, hidden from kernels, and its index."""
        return ((None,), lambda d: (d,)) if self.directions == 2 else ((), lambda d: ())


def _grid(call: _KernelCall, length: int) -> _Grid:
    per_block = steps_in_block(length, call.unroll)
    return _Grid(
        directions=call.directions,
        parts=call.kernel.parts,
        blocks=length // per_block,
        per_block=per_block,
        reverse=call.reverse,
    )


def _one_step(call: _KernelCall, arguments):
    """The shapes of the arguments for one step of one direction."""
    own = call.directions - 1
    cut = own, own, own + 1
    return [
        jax.tree.map(lambda a, n=n: jax.ShapeDtypeStruct(a.shape[n:], a.dtype), part)
        for n, part in zip(cut, arguments, strict=True)
    ]


def _outputs(call: _KernelCall, held, carry, inputs):
    """Shapes of the outputs of all steps."""
    _, out = jax.eval_shape(call.step, *_one_step(call, (held, carry, inputs)))
    over = jax.tree.leaves(inputs)[0].shape[: call.directions]
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*over, *s.shape), s.dtype), out)


def _cost(call: _KernelCall, arguments, results) -> pl.CostEstimate:
    """The cost that the compiler and dry runs read: all steps, and every array moved once."""
    one = pl.estimate_cost(call.step, *_one_step(call, arguments))
    times = jax.tree.leaves(arguments[2])[0].shape[0] * call.directions
    arrays = jax.tree.leaves((arguments, results))
    return pl.CostEstimate(
        flops=one.flops * times,
        transcendentals=one.transcendentals * times,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays),
    )


def _plain(call: _KernelCall, held, carry, inputs):
    step = functools.partial(jax.vmap(call.step) if call.directions == 2 else call.step, held)
    return lax.scan(step, carry, inputs, reverse=call.reverse)


def _run_forwards(call: _KernelCall, held, carry, inputs):
    return _run(call, held, carry, inputs), (held, carry, inputs)


def _run_backwards(call: _KernelCall, arguments, cotangents):
    return jax.vjp(functools.partial(_plain, call), *arguments)[1](cotangents)


_run.defvjp(_run_forwards, _run_backwards)
