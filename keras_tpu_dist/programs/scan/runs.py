"""Equal layers, their calls in a traced program, and those that follow one another."""

import contextlib
import contextvars
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from keras_tpu_dist import _keras
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.programs.equal import text_of
from keras_tpu_dist.programs.jaxprs import opened, with_equations

# Keys of configs in which equal layers may differ.
_NAMES = ("name", "layer_name")
_OWN = {"seed", "shared_object_id", "build_config", "registered_name"}


def equal_layers(model: Any) -> dict[int, Hashable]:
    """The layers with weights that have an equal one beside them, only the outermost.

    Args:
        model: A built model.

    Returns:
        From the `id` of a layer to a key that equal layers share.

    Example:

    >>> import keras
    >>> blocks = [keras.layers.Dense(4, "relu", name=f"block_{i}") for i in range(3)]
    >>> model = keras.Sequential([keras.Input((4,)), *blocks, keras.layers.Dense(1)])
    >>> [id(layer) in equal_layers(model) for layer in model.layers]
    [True, True, True, False]
    """
    found: dict[int, Hashable] = {}
    inner = {id(layer): layer for layer in _keras.sublayers(model) if layer.variables}
    keys = {number: what_counts(layer) for number, layer in inner.items()}
    counts = Counter(keys.values())
    for number, layer in inner.items():
        if counts[keys[number]] > 1:
            found[number] = keys[number]
        else:
            found.update(equal_layers(layer))
    return found


def what_counts(layer: Any) -> Hashable:
    """The key that a layer shares with equal layers.

    Args:
        layer: A built layer.
    """
    weights = tuple((tuple(v.shape), str(v.dtype), v.trainable, _spec(v)) for v in layer.variables)
    return type(layer), config_of(layer), weights


def _spec(variable: Any) -> str:
    return str(getattr(_keras.variable_layout(variable), "spec", None))


def config_of(layer: Any) -> str:
    """A layer's config without names; empty if it has none.

    The programs of the layers are compared as well.

    Args:
        layer: The layer.
    """
    try:
        config = layer.get_config()
    except NotImplementedError:
        return ""
    names = {name: f"#{i}" for i, name in enumerate(dict.fromkeys(_names(config)))}
    return repr(_without_names(config, names))


def _names(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        for key, value in config.items():
            if key in _NAMES and isinstance(value, str):
                yield value
            elif key != "dtype":
                yield from _names(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _names(value)


def _without_names(config: Any, names: dict[str, str]) -> Any:
    if isinstance(config, dict):
        return {
            key: value if key == "dtype" else _without_names(value, names)
            for key, value in config.items()
            if key not in _OWN
        }
    if isinstance(config, (list, tuple)):
        return [_without_names(value, names) for value in config]
    if isinstance(config, str):
        return names.get(config, config)
    return config


_NAME = "equal_block_"


@dataclass(frozen=True)
class Block:
    """The call of a block in a program.

    Attributes:
        inputs: Its inputs: values from outside, arguments, masks, and finally the values of its
            variables.
    """

    layer: Any
    equation: Any
    position: int
    inputs: tuple[Any, ...]

    @functools.cached_property
    def variables(self) -> list:
        """The layer's variables."""
        return self.layer.variables

    @property
    def arguments(self) -> int:
        """The number of inputs that are not variables."""
        return len(self.inputs) - len(self.variables)

    @functools.cached_property
    def text(self) -> Hashable | None:
        """What it computes, and its gradients; `None` if its program does not say it."""
        return text_of(with_gradients(self.equation.params["jaxpr"]))


@dataclass
class Run:
    """Equal blocks, each of which gets its input from the one before.

    Attributes:
        carried: From the position of an input to that of the output of the previous block.
    """

    blocks: list[Block]
    carried: dict[int, int] = field(default_factory=dict)

    def by_kind(self) -> tuple[list[int], list[int]]:
        """The inputs that are the same for all blocks, and those that differ."""
        rest = [i for i in range(len(self.blocks[0].inputs)) if i not in self.carried]
        same = [i for i in rest if len({_identity(b.inputs[i]) for b in self.blocks}) == 1]
        return same, [i for i in rest if i not in same]


class Tracing:
    """Records which equations of a program are calls of certain layers.

    Args:
        keys: From the `id` of a layer to the key that equal layers share.
    """

    def __init__(self, keys: Mapping[int, Hashable]):
        self.keys = keys
        self.layers: list[Any] = []

    def call(self, stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        """Calls a layer as a separate program within the traced one.

        Args:
            stock: The layer's call.
            layer: The layer.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        call = _keras.PureCall(stock, layer, args, kwargs)
        call.read = tuple(layer.variables)
        values = [_keras.full_precision(variable) for variable in call.read]

        def block(inputs, values):
            return call(inputs, values)

        block.__name__ = f"{_NAME}{len(self.layers)}"
        self.layers.append(layer)
        # Calls inside the block are part of it.
        with tracing(Tracing({})):
            results = jax.jit(block)(call.inputs, values)
        return call.finish(results)

    def layer_of(self, equation: Any) -> Any:
        """The layer that an equation is the call of, or `None`.

        Args:
            equation: An equation of the program.
        """
        if not is_block(equation):
            return None
        return self.layers[int(equation.params["name"].removeprefix(_NAME))]


def is_block(equation: Any) -> bool:
    """Whether an equation is the call of a block.

    Args:
        equation: An equation of a program that was traced with `Tracing`.
    """
    program = equation.params.get("jaxpr")
    if program is None or not str(equation.params.get("name")).startswith(_NAME):
        return False
    # A user's function may have the same name, but it is not from this file.
    source = opened(program).debug_info.func_src_info
    return f" at {Tracing.call.__code__.co_filename}:" in source


_tracing: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("tracing", default=None)


def tracing(notes: Tracing) -> contextlib.AbstractContextManager[Tracing]:
    """A context in which calls of layers are recorded.

    Args:
        notes: The record.
    """
    return setting(_tracing, notes)


def is_tracing() -> bool:
    """Whether a model's blocks are already being searched."""
    return _tracing.get() is not None


def noted(stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a layer class of which some layers are blocks, for `route_calls`.

    Args:
        stock: The layer's call.
        layer: The layer.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    notes = _tracing.get()
    if notes is None or id(layer) not in notes.keys:
        return stock(*args, **kwargs)
    return notes.call(stock, layer, args, kwargs)


def find_runs(jaxpr: Any, notes: Tracing) -> tuple[list[Run], dict[int, str]]:
    """The runs of a program.

    Args:
        jaxpr: The program, in which no value has two names; see `without_aliases`.
        notes: The record of its trace.

    Returns:
        The runs of two blocks or more, and from the `id` of a layer to the reason why its call is
        in none.
    """
    finder = _Finder(jaxpr, notes)
    runs = [run for run in finder.runs if len(run.blocks) > 1]
    within = {id(block.layer) for run in runs for block in run.blocks}
    reasons = {id(layer): _HIDDEN for layer in notes.layers}
    reasons |= {id(run.blocks[0].layer): _ALONE for run in finder.runs} | finder.reasons
    return runs, {number: why for number, why in reasons.items() if number not in within}


_HIDDEN = "it is called within another transformation, such as jax.checkpoint, of the program"
_ALONE = "no equal block is fed by it"
_UNFED = "no equal block feeds it directly"
_SHARED = "it is called more than once"
_OTHER = "it computes something else than the block before, whatever their configs say"
_UNKNOWN = "its program calls Python functions, which may differ from those of the block before"
_WAYS = "what it takes of the block before is not what that one takes of the one before it"
_AROUND = "it is also fed by earlier blocks, past the one before"
_INPUT = "one of its inputs is neither the block before's output nor the same for both blocks"


class _Finder:
    def __init__(self, jaxpr: Any, notes: Tracing):
        self._notes = notes
        self.runs: list[Run] = []
        self.reasons: dict[int, str] = {}
        # For every value, as bits, the positions of the blocks that it depends on.
        self._after: dict[Any, int] = {}
        times = [id(layer) for layer in notes.layers]
        for position, equation in enumerate(opened(jaxpr).eqns):
            before = 0
            for atom in equation.invars:
                before |= self._depends(atom)
            layer = notes.layer_of(equation)
            if layer is not None:
                before |= 1 << position
                if times.count(id(layer)) > 1:
                    self.reasons[id(layer)] = _SHARED
                else:
                    self._add(Block(layer, equation, position, tuple(equation.invars)))
            self._after.update((variable, before) for variable in equation.outvars)

    def _depends(self, atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else self._after.get(atom, 0)

    def _add(self, block: Block) -> None:
        why = _UNFED
        for run in self.runs:
            fed = _fed(run.blocks[-1], block)
            if not fed:
                continue
            why = self._obstacle(run, block, fed)
            if not why:
                run.blocks.append(block)
                run.carried = fed
                return
        if self.runs:
            self.reasons[id(block.layer)] = why
        self.runs.append(Run([block]))

    def _obstacle(self, run: Run, block: Block, fed: dict[int, int]) -> str:
        last, keys = run.blocks[-1], self._notes.keys
        if keys[id(last.layer)] != keys[id(block.layer)]:
            return _UNFED
        try:
            texts = last.text, block.text
        except Exception as error:  # of JAX, or of a rule for gradients, which may be the user's
            return f"its gradients cannot be traced ({type(error).__name__})"
        if None in texts:
            return _UNKNOWN
        if last.text != block.text:
            return _OTHER
        if len(run.blocks) > 1 and fed != run.carried:
            return _WAYS
        members = sum(1 << member.position for member in run.blocks)
        for i, (before, here) in enumerate(zip(last.inputs, block.inputs, strict=True)):
            if i in fed:
                continue
            if self._depends(here) & members:
                return _AROUND
            own = i < block.arguments and _identity(here) != _identity(before)
            if own and here.aval.shape:
                return _INPUT
        return ""


def _fed(before: Block, block: Block) -> dict[int, int]:
    """For inputs of a block, the outputs of the previous block that they are."""
    made = {variable: i for i, variable in enumerate(before.equation.outvars)}
    return {
        i: made[atom]
        for i, atom in enumerate(block.inputs)
        if not isinstance(atom, core.Literal) and atom in made
    }


def _identity(atom: Any) -> Hashable:
    return _value(atom.val) if isinstance(atom, core.Literal) else atom


def _value(array: Any) -> Hashable:
    array = np.asarray(array)
    return array.shape, str(array.dtype), array.tobytes()


def with_gradients(jaxpr: Any) -> Any:
    """A program that computes the gradients of all floats too.

    A program only names the functions of its rules for gradients, such as those of
    `jax.custom_vjp`. This one has their operations and numbers, as it has those that a policy of
    `jax.checkpoint` keeps.
    """
    compute = core.jaxpr_as_fun(jaxpr)
    floats = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in jaxpr.in_avals]
    trained = [i for i, is_float in enumerate(floats) if is_float]
    kept = [i for i, v in enumerate(jaxpr.out_avals) if jnp.issubdtype(v.dtype, jnp.inexact)]

    def both(inputs: list, gradients: list) -> Any:
        def forward(values: list) -> Any:
            given = dict(enumerate(inputs)) | dict(zip(trained, values, strict=True))
            outputs = compute(*given.values())
            return [outputs[i] for i in kept], outputs

        _, backward, outputs = jax.vjp(forward, [inputs[i] for i in trained], has_aux=True)
        return outputs, backward(gradients)

    def shapes(avals: Any) -> list:
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    return jax.make_jaxpr(both)(shapes(jaxpr.in_avals), shapes([jaxpr.out_avals[i] for i in kept]))


def without_aliases(jaxpr: Any, notes: Tracing) -> Any:
    """The program in which values that a block returns unchanged, as masks, keep their name.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        notes: The record of its trace.
    """
    names: dict[Any, Any] = {}

    def named(atoms):
        return [a if isinstance(a, core.Literal) else names.get(a, a) for a in atoms]

    equations = []
    for equation in opened(jaxpr).eqns:
        equation = equation.replace(invars=named(equation.invars))
        equations.append(equation)
        if notes.layer_of(equation) is None:
            continue
        inner = opened(equation.params["jaxpr"])
        place = {variable: i for i, variable in enumerate(inner.invars)}
        for own, outer in zip(inner.outvars, equation.outvars, strict=True):
            if not isinstance(own, core.Literal) and own in place:
                names[outer] = equation.invars[place[own]]
    return with_equations(jaxpr, equations, outvars=named(opened(jaxpr).outvars))
