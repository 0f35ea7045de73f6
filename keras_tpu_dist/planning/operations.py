"""A trace as one list of operations: what it calls is read in place, a loop's body once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_tpu_dist.dryrun.products import sharing_devices
from keras_tpu_dist.partitioner.jaxprs import inner_jaxprs, opened
from keras_tpu_dist.planning.origins import (
    BATCH,
    Origins,
    batch_origins,
    origins_back,
    origins_of,
    weight_origins,
)

# The name of operations that hand a value on, into or out of what is called.
ENTER = "enter"
# Whose programs are not read: those of kernels, and of which one only is run.
_CLOSED = frozenset(["pallas_call", "custom_call", "cond", "while", "sort", "reduce", "scatter"])


@dataclass(eq=False)
class Value:
    """A value of a trace.

    Attributes:
        seen: Its shape there, within a `shard_map` that of one device.
        itemsize: Bytes of an element.
        parts: How many devices share what `seen` is a part of.
        origins: What its dimensions are.
        shape: Its shape, of all devices together.
        readers: The operations that read it.
        roots: What is held for it: itself, or what it is computed of where it is used.
        born: The operation that writes it.
        dies: The last that reads it.
    """

    seen: tuple[int, ...]
    itemsize: int
    parts: int = 1
    origins: Origins = ()
    shape: tuple[int, ...] = ()
    readers: list["Operation"] = field(default_factory=list)
    roots: tuple["Value", ...] = ()
    born: int = -1
    dies: int = -1

    @property
    def size_bytes(self) -> int:
        """Its bytes, of all devices together."""
        return math.prod(self.shape) * self.itemsize

    def comes_from(self, origins: Origins) -> None:
        """Notes what its dimensions are.

        Args:
            origins: Of each dimension.
        """
        self.origins, self.shape = origins, self.seen
        if self.parts > 1:
            rows = next((d for d, o in enumerate(origins) if BATCH in o), None)
            whole = [s * self.parts if d == rows else s for d, s in enumerate(self.seen)]
            self.shape = tuple(whole)


@dataclass(eq=False)
class Operation:
    """An operation of a trace.

    Attributes:
        name: Its primitive's name, or `ENTER`.
        equation: Its equation, or that which calls.
        operands: What it reads; `None` for constants.
        results: What it makes.
        sliced: How many dimensions `ENTER` takes off in front, as a loop does.
        body: What the body of a loop makes, for each result. Gradients are rather as the weights,
            which the loop reads.
    """

    name: str
    equation: Any
    operands: list[Value | None]
    results: list[Value]
    sliced: int = 0
    body: list[Value | None] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """A trace taken apart.

    Attributes:
        inputs: Its inputs.
        operations: Its operations, in order.
        outputs: Its results; `None` for constants.
    """

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Value | None, ...]


def program_of(trace: Any, num_weights: int, rows: int) -> Program:
    """Takes a trace apart.

    Args:
        trace: The trace; its first inputs are the weights.
        num_weights: How many weights there are.
        rows: The batch's rows.
    """
    jaxpr = opened(trace)
    names = {v: _value(v.aval, 1) for v in (*jaxpr.invars, *jaxpr.constvars)}
    inputs = tuple(names[v] for v in jaxpr.invars)
    for number, value in enumerate(inputs):
        weight = number < num_weights
        ndim = len(value.seen)
        value.comes_from(
            weight_origins(number, ndim) if weight else batch_origins(value.seen, rows)
        )
    operations = tuple(_flat(jaxpr, names, 1))
    for operation in operations:
        _read(operation)
    for operation in reversed(operations):
        _read_back(operation)
    outputs = (None if isinstance(v, core.Literal) else names[v] for v in jaxpr.outvars)
    return Program(inputs, operations, tuple(outputs))


def _value(aval: Any, parts: int) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    plain = dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    value = Value(shape, np.dtype(dtype).itemsize if plain else 4, parts)
    value.comes_from((frozenset(),) * len(shape))
    return value


def _flat(jaxpr: Any, names: dict[Any, Value], parts: int) -> Iterator[Operation]:
    """The operations of a program and of those that it calls."""

    def read(atom: Any) -> Value | None:
        return None if isinstance(atom, core.Literal) else names[atom]

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        called = [] if name in _CLOSED else list(map(opened, inner_jaxprs(equation)))
        operands = [read(atom) for atom in equation.invars]
        if not called:
            results = [_value(v.aval, parts) for v in equation.outvars]
            names.update(zip(equation.outvars, results))
            yield Operation(name, equation, operands, results)
            continue
        body = called[0]
        inner_parts = parts * sharing_devices(equation) if name == "shard_map" else parts
        inner = {v: _value(v.aval, inner_parts) for v in (*body.invars, *body.constvars)}
        # Where operands come first that the program does not take, as a rule's constants do.
        first = max(0, len(operands) - len(body.invars))
        for v, operand in zip(body.invars, operands[first:]):
            sliced = 0 if operand is None else len(operand.seen) - len(inner[v].seen)
            yield Operation(ENTER, equation, [operand], [inner[v]], max(0, sliced))
        yield from _flat(body, inner, inner_parts)
        results = [_value(v.aval, parts) for v in equation.outvars]
        names.update(zip(equation.outvars, results))
        last = [None if isinstance(v, core.Literal) else inner[v] for v in body.outvars]
        if name == "scan" or len(last) != len(results):
            # A loop writes what it carries and what it stacks.
            yield Operation(name, equation, operands, results, body=last)
            continue
        for operand, result in zip(last, results):
            yield Operation(ENTER, equation, [operand], [result])


def _read_back(operation: Operation) -> None:
    """Notes what operands are that come from nowhere, such as numbers that are counted off."""
    if operation.body or not any(
        v is not None and v.parts == 1 and not all(v.origins) for v in operation.operands
    ):
        return
    made = [v.origins for v in operation.results]
    if operation.name == ENTER:
        known = [((frozenset(),) * operation.sliced + made[0])]
    else:
        known = origins_back(operation.equation, made)
    for value, origins in zip(operation.operands, known):
        if value is not None and value.parts == 1 and len(origins) == len(value.seen):
            value.comes_from(tuple(o or back for o, back in zip(value.origins, origins)))


def _read(operation: Operation) -> None:
    """Notes where results come from, and who reads the operands."""
    origins = [None if v is None else v.origins for v in operation.operands]
    for number, value in enumerate(operation.results):
        made = operation.body[number] if number < len(operation.body) else None
        if made is not None and any(BATCH in o for o in made.origins):
            stacked = (frozenset(),) * (len(value.seen) - len(made.seen))
            value.comes_from((*stacked, *made.origins))
        elif operation.name != ENTER:
            value.comes_from(origins_of(operation.equation, origins, number))
        elif origins[0] is not None and (value.parts == 1 or any(BATCH in o for o in origins[0])):
            # Weights come whole into what is written for one device.
            value.comes_from(origins[0][operation.sliced :])
    for value in operation.operands:
        if value is not None:
            value.readers.append(operation)
