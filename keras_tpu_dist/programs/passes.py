"""What may be computed otherwise than a model is written, in order: read this file first.

A pass gets a program and where it runs. It returns the results of another program that computes
the same, or the reason why the program stays as it is. The answers are stored on the model, or on
the layer whose call it was; `strategy.explain(model)` prints them below the weights.

`training` wraps each of Keras's steps, each launch of several and the loop of `generate` in
`rewritten`. `route_layers` wraps the calls of layers, before a model of a strategy runs. So the
passes run whenever JAX traces the program; code that runs eagerly stays as it is.

Some passes decide how a program is traced, so they cannot get a traced program. They are
`Elsewhere`: here they have only their place in the order. The module that decides keeps the
answers.

To add a pass, look at `programs.answers`, which has the classes that it gets and returns. Then:

1. Write a class with `name`, `level`, `rewritten` and `waits`; for layers' calls also `wants`.
2. `rewritten` returns `Rewritten` or `Why`, each with an `Answer` for every line of `explain`, such
   as `Why([Answer(where.model.name, "too small")])`. `Why()` prints nothing.
3. Put an object of the class into `PASSES`, among those of its level.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.extend import core

from keras_tpu_dist import _keras
from keras_tpu_dist.programs.answers import (
    Answer,
    CallContext,
    LaunchSteps,
    Level,
    PassContext,
    Rewritten,
    Why,
    WrittenProgram,
    keep,
    kept,
)
from keras_tpu_dist.programs.between.sums import SumsByTime
from keras_tpu_dist.programs.experts.layer import ChosenExperts
from keras_tpu_dist.programs.generation.in_place import CachesInPlace
from keras_tpu_dist.programs.head.step import HeadInPieces
from keras_tpu_dist.programs.low_rank import LowRankFactors
from keras_tpu_dist.programs.muon import WholeKernels
from keras_tpu_dist.programs.partitioner import in_compiled_code
from keras_tpu_dist.programs.sums.launch import SumsOnDevices
from keras_tpu_dist.programs.tables.step import TablesByRows


class Pass(Protocol):
    """A way to compute programs otherwise."""

    @property
    def name(self) -> str:
        """Its name, as `explain` prints it; no other pass has it."""
        ...

    @property
    def level(self) -> Level:
        """Which programs it gets."""
        ...

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """What `explain` prints for paths that have no stored answer yet; `[]` for nothing."""
        ...


@runtime_checkable
class ProgramPass(Pass, Protocol):
    """A pass of steps or launches."""

    def rewritten(self, program: WrittenProgram, where: PassContext) -> Rewritten | Why:
        """The results of another program, or why this one stays as it is.

        Args:
            program: The step or launch. `program.run()` has its results as they are written; those
                of another program have the same structure.
            where: The model, and the devices.
        """
        ...


@runtime_checkable
class LayerPass(Pass, Protocol):
    """A pass of layers' calls."""

    def wants(self, layer: Any, strategy: Any) -> bool:
        """Whether it may compute calls of a layer otherwise.

        Args:
            layer: Any layer of a model, also a model within it.
            strategy: The strategy that runs it, or `None`.
        """
        ...

    def rewritten(self, program: WrittenProgram, where: CallContext) -> Rewritten | Why:
        """The results of another program, or why this one stays as it is.

        Args:
            program: The call. Its `jaxpr` is the traced program; the results are a list, in the
                order of the jaxpr's outputs.
            where: The layer, and the devices.
        """
        ...


class Elsewhere(NamedTuple):
    """A pass that is decided in another module.

    Attributes:
        module: The module that decides, and keeps answers with `answers.keep` if there are any.
        what: What it computes otherwise.
    """

    name: str
    level: Level
    module: str
    what: str

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """Nothing: the module keeps an answer as soon as it has decided."""
        return []


_LAUNCH, _LAYER = Level.LAUNCH, Level.LAYER
_REPAIRED = "operations that XLA would partition wrongly are replaced, in the whole program"
_ROWS = "batches of several numbers of rows share a program, with the number as data"
_WATCHED = "each step looks for NaN and infinity, and changes nothing from the first on"
_SCANNED = "equal consecutive blocks are one loop over their stacked weights"
_ASSIGNED = "one logical device of a replica computes a layer for the others"
_NAMED = "outputs get the names by which `remat` keeps them"
_GATHERED = "features that a layer computes in parts are gathered"
_RECOMPUTED = "the backward pass recomputes activations"
_BY_HEADS = "the kernel of queries, keys and values is split by heads"
_LOOKED_UP = "`IntegerLookup` compares with its vocabulary, without TensorFlow"
# The outermost first: a pass gets programs that those below it have rewritten. So a layer that is
# recomputed is so with its experts and LoRA rewritten, and one that a device computes for others is
# all of that within the device's branch.
PASSES: tuple[Pass, ...] = (
    # What is compiled and launched.
    Elsewhere("faults", _LAUNCH, "programs.partitioner.jit", _REPAIRED),
    Elsewhere("rows", _LAUNCH, "training.rows", _ROWS),
    CachesInPlace(),
    SumsOnDevices(),
    Elsewhere("finite", _LAUNCH, "training.step", _WATCHED),
    # A step.
    TablesByRows(),
    HeadInPieces(),
    WholeKernels(),
    # A layer's call.
    Elsewhere("scan", _LAYER, "memory.scan_blocks", _SCANNED),
    Elsewhere("assign", _LAYER, "logical.assign", _ASSIGNED),
    Elsewhere("names", _LAYER, "memory.again", _NAMED),
    Elsewhere("gather", _LAYER, "layout.use", _GATHERED),
    Elsewhere("remat", _LAYER, "memory.remat", _RECOMPUTED),
    Elsewhere("fused", _LAYER, "layout.use", _BY_HEADS),
    SumsByTime(),
    ChosenExperts(),
    LowRankFactors(),
    Elsewhere("lookups", _LAYER, "_keras.lookups", _LOOKED_UP),
)


def set_order() -> None:
    """Lets the passes of layers wrap calls in their order."""
    _keras.order_calls(pass_.name for pass_ in PASSES if pass_.level is Level.LAYER)


set_order()


def rewritten(
    level: Level,
    function: Callable[..., Any],
    where: PassContext,
    steps: LaunchSteps | None = None,
) -> Callable[..., Any]:
    """Wraps a function, so that the passes of a level may compute it otherwise when it is traced.

    Args:
        level: `STEP` or `LAUNCH`.
        function: The step, or the launch.
        where: Whose program it is, and where it runs.
        steps: For a launch of several steps, what it consists of.
    """
    for pass_ in reversed(PASSES):
        if pass_.level is level and isinstance(pass_, ProgramPass):
            function = _by(pass_, function, where, steps)
    return function


def _by(
    pass_: ProgramPass, function: Callable[..., Any], where: PassContext, steps: LaunchSteps | None
) -> Callable[..., Any]:
    def otherwise(*args: Any) -> Any:
        program = WrittenProgram(function, args, steps=steps)
        if not in_compiled_code():
            return program.run()
        answer = pass_.rewritten(program, where)
        keep(pass_.name, where.model, answer.answers, where.kind)
        return answer.results if isinstance(answer, Rewritten) else program.run()

    return otherwise


def route(pass_: LayerPass, kind: type) -> None:
    """Wraps the calls of a layer class, so that a pass may compute them otherwise.

    Args:
        pass_: The pass. It is asked for each layer of the class whether it wants it.
        kind: The class.
    """
    _keras.route_calls(kind, pass_.name, functools.partial(_around, pass_))


def route_layers(model: Any, strategy: Any) -> None:
    """Routes the calls of a model's layers to the passes that want them."""
    for pass_ in PASSES:
        if isinstance(pass_, LayerPass):
            for layer in _keras.flatten_layers(model):
                if pass_.wants(layer, strategy):
                    route(pass_, type(layer))


def _around(pass_: LayerPass, stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """A layer's call: by the pass, if it wants the layer and the call is traced, or as written."""
    wanted = pass_.wants(layer, _keras.active_strategy())
    if not wanted or not _keras.in_compiled_call():
        return stock(*args, **kwargs)
    # In code for each device, arrays are the part of one device already.
    in_parts = bool(jax.sharding.get_abstract_mesh().manual_axes)
    where = CallContext(layer, *((None, ()) if in_parts else _keras.active_mesh()))

    def compute(jaxpr: Any, inputs: list) -> Any:
        program = WrittenProgram(core.jaxpr_as_fun(jaxpr), inputs, jaxpr)
        answer = pass_.rewritten(program, where)
        keep(pass_.name, layer, answer.answers)
        return answer.results if isinstance(answer, Rewritten) else None

    return _keras.computed_otherwise(stock, layer, args, kwargs, compute)


def explained(model: Any, strategy: Any) -> dict[str, list[Answer]]:
    """The answers of every pass, by its name: what it computed otherwise, or why it did not.

    For paths without a stored answer, such as before the first step, it is what `waits` returns.
    """
    return {pass_.name: _answers(pass_, model, strategy) for pass_ in PASSES}


def _answers(pass_: Pass, model: Any, strategy: Any) -> list[Answer]:
    answers = {answer.path: answer for answer in pass_.waits(model, strategy)}
    for layer in _keras.flatten_layers(model):  # the model is one of them
        for answer in kept(layer, pass_.name).values():
            # What was decided before the model was built does not know the layer's path.
            answer = answer if answer.path else replace(answer, path=layer.path)
            answers[answer.path] = answer
    if len(answers) > 1:
        answers.pop("", None)  # what is said of the whole model, until something is known of a part
    return list(answers.values())
