"""Launches of small batches whose gradients are added up over the devices once for each update.

With `gradient_accumulation_steps=N`, Keras adds the gradients of N small batches up, each of which
the compiler has summed over the devices. In a launch of several of them, the devices add up the
gradients of their own rows here, and the sum over the devices is made where the update needs it.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import entry_names, split_ways
from keras_tpu_dist.common.scopes import LAST_OF, RARE_BRANCH
from keras_tpu_dist.programs.answers import (
    Answer,
    LaunchSteps,
    Level,
    PassContext,
    Rewritten,
    Why,
    WrittenProgram,
)
from keras_tpu_dist.programs.graph import Equation, Graph, Instead, graph_of
from keras_tpu_dist.programs.jaxprs import constants_of, with_inputs
from keras_tpu_dist.programs.partitioner.jit import axes_of
from keras_tpu_dist.programs.partitioner.spread import Spread
from keras_tpu_dist.programs.sums.local import LocalSum, LocalSums, Total, added_up
from keras_tpu_dist.programs.types import check_types
from keras_tpu_dist.show.text import size_text

# The share of a device's memory that its own sums may take, which axes of the batch do not split.
_MOST_OF_MEMORY = 0.25
# Gradients of less than this share are not worth a message, as those of a normalization that the
# step needs at once.
_WORTH_A_MESSAGE = 0.01


@dataclass(eq=False)
class _Update:
    """An optimizer's update, which a step has as one operation.

    Its operands: whether this is the last small batch, gradients, the sums so far, values that the
    update changes, and arrays that it reads besides. Its results: new values, new sums.
    """

    program: Callable
    steps: int
    gradients: int
    values: int

    def apart(self, operands: list) -> tuple[Any, list, list, list, list]:
        """Its operands by kind."""
        is_last, *rest = operands
        n, values = self.gradients, 2 * self.gradients + self.values
        return is_last, rest[:n], rest[n : 2 * n], rest[2 * n : values], rest[values:]


_update = core.Primitive("accumulated_update")
_update.multiple_results = True


@_update.def_abstract_eval
def _shapes(*operands: Any, update: _Update) -> list:
    _, _, sums, values, _ = update.apart(list(operands))
    return [*values, *sums]


def _as_operation(
    optimizer: Any, is_last: Any, gradients: list, sums: list, values: list, update: Callable
) -> tuple[list, list]:
    """The optimizer's update as one operation; see `_keras.accumulating`."""
    traced = jax.make_jaxpr(update)(gradients, values)
    held = constants_of(traced)
    program = core.jaxpr_as_fun(with_inputs(traced, list(held)))
    steps = optimizer.gradient_accumulation_steps
    params = _Update(program, steps, len(gradients), len(values))
    results = _update.bind(is_last, *gradients, *sums, *values, *held.values(), update=params)
    return results[: len(values)], results[len(values) :]


@dataclass(frozen=True)
class _Sum:
    """The gradient of one weight, which is added up on each device.

    Attributes:
        place: The position in the state of the variable in which Keras adds gradients up.
        total: The gradient, with the layout of that variable.
    """

    number: int
    local: LocalSum
    place: int
    dtype: Any
    total: Total

    def bytes_per_device(self, axes: Sequence[str]) -> int:
        """The bytes of a device's own sum."""
        size = math.prod(self.total.shape) * jnp.dtype(self.dtype).itemsize
        return size // split_ways(self.total.mesh, self.whole_over(axes))

    def whole_over(self, axes: Sequence[str]) -> tuple:
        """The layout of a device's own sum, which axes of the batch do not split."""
        entries = map(entry_names, self.total.layout.spec)
        return tuple(tuple(n for n in entry if n not in axes) or None for entry in entries)


ONCE = "gradients are summed over the devices once in {} small batches"
_EVERY = "gradients are summed over the devices at every small batch, not once in {}: {}"


class SumsOnDevices:
    """The pass that sums accumulated gradients over the devices once for each update."""

    name = "sums"
    level = Level.LAUNCH

    def rewritten(self, program: WrittenProgram, where: PassContext) -> Rewritten | Why:
        """The launch with sums on each device, or why gradients are summed at every batch."""
        model, steps = where.model, program.steps
        if where.kind != "train" or steps is None or where.mesh.size == 1 or not accumulates(model):
            return Why()
        if steps.is_watched:
            return Why(_every_batch(model, "a callback looks for values that are not finite"))
        if hasattr(model.optimizer, "inner_optimizer"):
            return Why(_every_batch(model, "an optimizer that scales the loss reads them"))
        return Accumulation(where, steps).launch(*program.args)

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """What is known before a launch is traced."""
        batches = accumulates(model)
        if not batches or strategy.mesh.size == 1:
            return []
        return one_batch(model) or [
            Answer(model.name, f"{ONCE.format(batches)}, if the step allows it: a launch decides")
        ]


def one_batch(model: Any) -> list[Answer]:
    """Why gradients are summed at every batch, if a launch has only one."""
    if model.steps_per_execution != 1:
        return []
    fix = f"compile it with steps_per_execution={accumulates(model)}, or a multiple"
    return _every_batch(model, f"a launch has one batch; {fix}")


def accumulates(model: Any) -> int:
    """The small batches of an update of a model's optimizer; 0 if it does not accumulate."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(optimizer, "gradient_accumulation_steps", None) or 0


def _every_batch(model: Any, why: str) -> list[Answer]:
    batches = accumulates(model)
    words = _EVERY.format(batches, why)
    return [Answer(model.name, words, level=logging.WARNING)] if batches else []


class Accumulation:
    """A launch of small batches."""

    def __init__(self, where: PassContext, steps: LaunchSteps):
        self._model, self._mesh, self._hbm_bytes = where.model, where.mesh, where.hbm_bytes
        self._steps = steps
        self._axes = tuple(a for a in where.data_axes if where.mesh.shape[a] > 1)

    def launch(self, state: Any, batches: Any) -> Rewritten | Why:
        """The outputs of the steps of a launch and the state after it, or why they stay."""
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        with _keras.accumulating(_as_operation):
            traced, shapes = jax.make_jaxpr(self._steps.one, return_shape=True)(state, first)
        check_types(state, traced.out_avals[-len(jax.tree.leaves(state)) :])
        step, answers = self._step_of(traced, state, first)
        if step is None:
            return Why(answers)

        def body(carry: Any, batch: Any) -> Any:
            state, parts, is_first = carry
            results, parts, is_last = step(jax.tree.leaves((state, batch)), parts, is_first)
            outputs, new_state = jax.tree.unflatten(jax.tree.structure(shapes), results)
            return (new_state, parts, is_last), outputs

        # The first batch replaces the parts of the last update, which so need not be set to zero.
        start = state, step.no_parts(), jnp.ones((), bool)
        (state, parts, is_done), outputs = lax.scan(body, start, batches)
        leaves, structure = jax.tree.flatten(state)
        after = jax.tree.unflatten(structure, step.ended(leaves, parts, is_done))
        return Rewritten((outputs, after), answers)

    def _step_of(
        self, traced: Any, state: Any, first: Any
    ) -> "tuple[_StepOfLaunch | None, list[Answer]]":
        graph = graph_of(traced)
        updates = [each for each in graph.operations if each.equation.primitive is _update]
        if len(updates) != 1:
            why = "the optimizer's update is in a branch, or there are several"
            return None, _every_batch(self._model, why)
        layouts = self._steps.layouts
        spread = Spread(traced, axes_of(layouts, (state, first)), (), self._mesh)
        local = LocalSums(graph, spread, self._axes, self._steps.rows)
        sums, answers = self._sums(local, graph, updates[0], jax.tree.leaves(layouts[0]))
        size = sum(each.bytes_per_device(self._axes) for each in sums)
        if size > _MOST_OF_MEMORY * self._hbm_bytes:
            why = (
                f"each device would hold {size_text(size)} of gradients, more than a quarter of "
                "its memory"
            )
            return None, _every_batch(self._model, why)
        if not sums:
            return None, answers
        return _StepOfLaunch(graph, updates[0], sums, self._axes, self._mesh), answers

    def _sums(
        self, local: LocalSums, graph: Graph, update: Equation, layouts: list
    ) -> tuple[list[_Sum], list[Answer]]:
        """The gradients that can be added up on each device, and what is said of the others."""
        variables = _keras.state_variables(self._model)
        weights = _keras.accumulated_for(self._model.optimizer)
        places = {id(atom): place for place, atom in enumerate(graph.inputs)}
        _, gradients, before, *_ = update.equation.params["update"].apart(update.operands)
        sums, others = [], []
        for number, (gradient, total) in enumerate(zip(gradients, before, strict=True)):
            if (local_sum := local.of(gradient)) is None:
                others.append(number)
                continue
            place = places[id(total)]
            scope = weights[id(variables[place])].rpartition("/")[0]
            of = Total(scope, total.shape, layouts[place])
            sums.append(_Sum(number, local_sum, place, total.aval.dtype, of))
        once = ONCE.format(accumulates(self._model))
        answers = [Answer(self._model.name, once, done=True)] if sums else []
        sizes = [math.prod(total.shape) for total in before]
        if sum(sizes[n] for n in others) > _WORTH_A_MESSAGE * sum(sizes):
            paths = [weights[id(variables[places[id(before[n])]])] for n in others]
            names = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if paths[3:] else "")
            why = "the step uses them otherwise, or sums them up in a loop"
            answers += [replace(each, path=names) for each in _every_batch(self._model, why)]
        return sums, answers


class _StepOfLaunch:
    """A step that adds up the gradients of each device's own rows."""

    def __init__(
        self, graph: Graph, update: Equation, sums: list[_Sum], axes: tuple, mesh: jax.sharding.Mesh
    ):
        self._graph, self._operation, self._sums = graph, update, sums
        self._axes, self._mesh = axes, mesh
        self._update: _Update = update.equation.params["update"]
        self._ways = math.prod(mesh.shape[axis] for axis in axes)

    def no_parts(self) -> list:
        """The sums before the first batch."""
        return [
            self._placed(each, jnp.zeros((self._ways, *each.total.shape), each.dtype))
            for each in self._sums
        ]

    def _placed(self, of: _Sum, parts: Any) -> Any:
        layout = NamedSharding(self._mesh, PartitionSpec(self._axes, *of.whole_over(self._axes)))
        return lax.with_sharding_constraint(parts, layout)

    def ended(self, leaves: list, parts: list, is_done: Any) -> list:
        """The state at the end of a launch: Keras's sums get what belongs to no update yet.

        Args:
            is_done: Whether the last batch was that of an update.
        """
        before = [leaves[each.place] for each in self._sums]
        with jax.named_scope(RARE_BRANCH):
            after = lax.cond(is_done, lambda: before, lambda: self._added_up(parts, before))
        new = dict(zip([each.place for each in self._sums], after, strict=True))
        return [new.get(place, leaf) for place, leaf in enumerate(leaves)]

    def _added_up(self, parts: list, before: list) -> list:
        """The sums over the devices, added to those that were there before."""
        totals = [each.total for each in self._sums]
        sums = added_up(parts, totals, self._axes, self._mesh)
        return [total + before_it for total, before_it in zip(sums, before, strict=True)]

    def __call__(self, given: list, parts: list, is_first: Any) -> tuple[list, list, Any]:
        """The step's results, the parts with those of this batch, and whether it was the last.

        Args:
            is_first: Whether these are parts of an update that is done.
        """
        rest = [summand for each in self._sums for summand in each.local.rest]
        more = [operand for summand in rest for operand in summand.operands]
        instead: dict[Equation, Instead] = {}
        for each in self._sums:
            instead |= each.local.instead
        left: list[Any] = []

        def compute(arrays: list) -> list:
            count = len(self._operation.operands)
            results, *after = self._updated(arrays[:count], arrays[count:], parts, is_first)
            left.extend(after)
            return results

        instead[self._operation] = Instead([*self._operation.operands, *more], compute)
        results = self._graph.evaluate(given, instead)
        return results, *left

    def _updated(
        self, operands: list, others: list, parts: list, is_first: Any
    ) -> tuple[list, list, Any]:
        is_last, gradients, sums, values, held = self._update.apart(operands)
        steps = self._update.steps
        left = dict(enumerate(gradients))
        parts = [
            self._placed(
                each, jnp.where(is_first, 0, part) + left.pop(each.number).astype(each.dtype)
            )
            for each, part in zip(self._sums, parts, strict=True)
        ]
        for each in self._sums:
            for summand in each.local.rest:
                count = len(summand.operands)
                value = summand.compute(others[:count])
                others = others[count:]
                left[each.number] = left[each.number] + value if each.number in left else value
        sums = [total + left[n] if n in left else total for n, total in enumerate(sums)]

        def last() -> tuple:
            whole = list(sums)
            totals = self._added_up(parts, [sums[each.number] for each in self._sums])
            for each, total in zip(self._sums, totals, strict=True):
                whole[each.number] = total
            means = [total / steps for total in whole]
            news = self._update.program(*means, *values, *held)
            return news, jax.tree.map(jnp.zeros_like, sums)

        with jax.named_scope(LAST_OF.format(steps)):
            news, sums = lax.cond(is_last, last, lambda: (values, sums))
        return [*news, *sums], parts, is_last
