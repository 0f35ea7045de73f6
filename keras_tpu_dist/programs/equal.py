"""Equal programs, by their texts, and executables that are found again by them.

JAX finds an executable by the function that was traced. A model that is compiled or built again has
other functions, whose programs may be equal to the last character.
"""

import hashlib
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_tpu_dist.programs.graph import graph_of
from keras_tpu_dist.programs.jaxprs import any_equation, inner_jaxprs, is_key

# The executables that are held, although their models may be gone: so many, and with so much code,
# which is in the memory of the devices.
_MOST = 64
_MOST_BYTES = 256 * 2**20

# A text with these words does not say everything: functions in Python are only numbered in it.
_INCOMPLETE = (
    "callback", "custom_partitioning", "CustomSPMDPartitioning", "custom_vmap_call",
    "stablehlo.send", "stablehlo.infeed",
)  # fmt: skip
_NAME_OF_RESULT = r'jax\.result_info = "[^"]*"'
# Constants of more bytes are not compared.
_MOST_OF_CONSTANTS = 2**20
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Layouts that leave every dimension to the compiler, as `None` does: functions that JAX traces once
# have the one or the other, depending on their first call.
_ANY_LAYOUT = re.compile(
    r"NamedSharding\(mesh=AbstractMesh\([^()]*axis_types=\((?:Auto,? ?)+\)[^()]*\), "
    r"spec=P(?:artitionSpec)?\((?:None,? ?)*\)[^()]*\)"
)


def text_of(jaxpr: Any) -> Hashable | None:
    """The text of a traced program without addresses in memory, and its arrays.

    Programs with equal texts compute the same from their inputs, if they are not differentiated
    further: a text has only the names of rules for gradients.

    Returns:
        The text; `None` for a program whose text does not say everything.
    """
    constants = _constants(jaxpr, math.inf)
    text = _ANY_LAYOUT.sub("None", _ADDRESS.sub("", str(jaxpr)))
    if constants is None or any(word in text for word in _INCOMPLETE):
        return None
    return text, constants


@dataclass(frozen=True)
class Key:
    """What programs that share an executable have in common, and how this one is called.

    Attributes:
        text: What they have in common.
        inputs: The structure of the arguments of this one.
        outputs: The structure of its results.
    """

    text: Hashable
    inputs: Any
    outputs: Any


class Equal:
    """An executable of an equal program.

    Args:
        program: The program itself, for arrays that are split differently.
    """

    def __init__(self, compiled: Any, key: Key, program: Callable):
        self._compiled, self._key, self._program = compiled, key, program
        structures = compiled.in_tree, compiled.out_tree
        # `train_on_batch` has a batch of three, and `fit` one of two.
        self._is_same = structures == (key.inputs, key.outputs)

    def __call__(self, *args: Any) -> Any:
        """Runs it."""
        try:
            if self._is_same:
                return self._compiled(*args)
            arrays = jax.tree.leaves(args)
            given, options = jax.tree.unflatten(self._compiled.in_tree, arrays)
            results = jax.tree.leaves(self._compiled(*given, **options))
        except (TypeError, ValueError):
            # It compares all arguments before it runs: the program compiles for others.
            return self._program(*args)
        return jax.tree.unflatten(self._key.outputs, results)


class Executables:
    """The executables of this process by the texts of their programs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def find(self, key: Key) -> Any:
        """The executable for a key, a `jax.stages.Compiled`, or `None`."""
        with self._lock:
            if key.text not in self._found:
                return None
            self._found.move_to_end(key.text)
            return self._found[key.text][0]

    def add(self, key: Key, compiled: Any) -> None:
        """Holds an executable, and lets go of those that were not used for longest."""
        size = getattr(compiled.memory_analysis(), "generated_code_size_in_bytes", 0)
        with self._lock:
            self._found[key.text] = compiled, max(0, size)
            while len(self._found) > _MOST or (
                len(self._found) > 1 and sum(size for _, size in self._found.values()) > _MOST_BYTES
            ):
                self._found.popitem(last=False)

    def clear(self) -> None:
        """Lets go of all executables; for tests."""
        with self._lock:
            self._found.clear()


EXECUTABLES = Executables()


def key_of(
    program: Any, args: tuple, mesh: jax.sharding.Mesh, options: dict[str, Any]
) -> Key | None:
    """The key with which a program finds the executable of an equal one.

    Args:
        options: The options with which it is compiled.

    Returns:
        The key; `None` for a program whose text does not say everything.
    """
    traced = program.trace(*args)
    constants = _constants(traced.jaxpr, _MOST_OF_CONSTANTS)
    if constants is None:
        return None
    lowered = traced.lower()
    text = lowered.as_text()
    used, passed = _inputs(traced.jaxpr)
    (signature,) = re.findall(r"func\.func public @main\((.*)", text)
    all_known = len(re.findall(r"%arg\d+: ", signature)) == len(used)
    if not all_known or any(word in text for word in _INCOMPLETE):
        return None
    common = (
        # Results are named by their place in the structure.
        hashlib.sha256(re.sub(_NAME_OF_RESULT, "", text).encode()).hexdigest(),
        (used, passed, constants),
        mesh,
        tuple(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)),
        tuple(sorted((options.get("compiler_options") or {}).items())),
    )
    return Key(common, lowered.in_tree, lowered.out_tree)


def _inputs(jaxpr: Any) -> tuple[tuple, tuple]:
    """The inputs that a program uses, and for every output its number if it is an input.

    JAX drops the others from the program, which so does not show which input is which.
    """
    graph = graph_of(jaxpr)
    read = {id(atom) for operation in graph.needed({}) for atom in operation.operands}
    read |= set(map(id, graph.outputs))
    places = {id(atom): place for place, atom in enumerate(graph.inputs)}
    used = tuple(place for atom, place in places.items() if atom in read)
    return used, tuple(places.get(id(output)) for output in graph.outputs)


def _constants(jaxpr: Any, most_bytes: float) -> str | None:
    """A hash of the arrays in a program, or `None` if they are too large to compare.

    JAX may pass arrays to a compiled program whose text has only their shapes.
    """
    arrays: list[Any] = []

    def has_any(equation: Any) -> bool:
        arrays.extend(a.val for a in equation.invars if isinstance(a, core.Literal))
        arrays.extend(v for v in _leaves(equation.params.values()) if isinstance(v, np.ndarray))
        for inner in inner_jaxprs(equation):
            arrays.extend(getattr(inner, "consts", ()))
        return False

    arrays.extend(jaxpr.consts)
    any_equation(jaxpr, has_any)
    arrays = [jax.random.key_data(array) if is_key(array) else array for array in arrays]
    if sum(getattr(array, "nbytes", 0) for array in arrays) > most_bytes:
        return None
    found = hashlib.sha256()
    for array in arrays:
        if not getattr(array, "is_fully_addressable", True):
            return None
        value = np.asarray(array)
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    return found.hexdigest()


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value
