"""Rewrites a program of the TPU compiler so that XLA's CPU client can run it.

The values of every instruction stay those of the TPU program: what was fused, scheduled, split,
moved or exchanged stays so. What changes is how it is written down:

- partitions become replicas, and groups of devices are written out;
- tiles and memory spaces go. A bitcast means the bytes of a layout, so it becomes a transpose, a
  reshape and a transpose;
- fusions become calls, and a reverse if they write in reverse;
- what is started and finished apart is computed at its start;
- operands whose dtypes differ, which the TPU has no objection to, are converted;
- hand-written kernels are replaced by computations that are given for them.

`tools.hlo.operations` has the operations. One that is not there is passed on as it stands if it is
elementwise and XLA's CPU compiler knows it. Anything else is an error, never a guess.
"""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from keras_tpu_dist._keras.replicas import is_read
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.tools.hlo.collectives import Groups, groups_of, replica_groups
from keras_tpu_dist.tools.hlo.operations import (
    SEEN,
    HloOperation,
    OperationKind,
    Replayed,
    is_elementwise,
    operation,
    target,
)
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program, Shape
from keras_tpu_dist.tools.replay import bitcast, slices
from keras_tpu_dist.tools.replay.errors import cannot_run
from keras_tpu_dist.tools.replay.spelling import (
    array_type,
    attributes_of,
    listed,
    members_of,
    plain_type,
    program_of,
    zero_of,
    zeros_of,
)

# Where a device is: in its slice, and in which.
_PARTITION, _SLICE = 0, 1

# What says nothing about values. Programs are compared as replicas, without buffers.
_DROPPED = {
    "backend_config",
    "buffer_donor",
    "channel_id",
    "control-predecessors",
    "frontend_attributes",
    "is_scheduled",
    "kind",
    "metadata",
    "origin",
    "output_to_operand_aliasing",
    "sharding",
    "use_global_device_ids",
}
# From libtpu 0.0.52 on, a fusion may write its result in reverse, and says so nowhere else.
_REVERSE = re.compile(r'"(\w*reverse\w*)":\[([^\]]+)\]')
_WRITES_IN_REVERSE = "output_reverse_dimensions"
# What XLA's CPU client can reduce over devices; truth values also by and, or.
_REDUCED = {"add", "maximum", "minimum", "multiply"}
# The dtype of a product of two integers, whole.
_TWICE = {
    **{f"{kind}{bits}": f"{kind}{2 * bits}" for kind in "su" for bits in (8, 16, 32)},
}
_FLOATS = ("bf16", "f16", "f32", "f64")


@dataclass(frozen=True)
class InterpretedKernel:
    """A computation that replaces a hand-written kernel."""

    entry: str
    text: str
    is_tuple: bool = True


Interpreter = Callable[[Instruction, list[Shape]], InterpretedKernel]


def _no_kernels(instruction: Instruction, operands: list[Shape]) -> InterpretedKernel:
    raise cannot_run(instruction, "it is a hand-written kernel")


def runnable(
    program: Program,
    devices: Sequence[int],
    *,
    kernels: Interpreter = _no_kernels,
    as_on_chip: bool = False,
) -> str:
    """The text of a program that XLA's CPU client compiles.

    Args:
        program: The program of the TPU compiler, finished or as it is after one of the passes
            behind the partitioner.
        devices: The ids of the devices, in the order of the mesh. The program of several slices
            is that of one, which runs on all of them.
        kernels: Returns the computation to use for a hand-written kernel.
        as_on_chip: Whether products of float32 round their operands to bfloat16 where the chip
            does, which is where the program asks for no other precision.

    Returns:
        HLO for as many replicas.

    Raises:
        CannotRun: If it has something that is not known.
    """
    return _Rewriter(program, tuple(devices), kernels, as_on_chip).text()


@dataclass
class _Rewriter:
    program: Program
    devices: tuple[int, ...]
    kernels: Interpreter
    as_on_chip: bool
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.num_devices = len(self.devices)
        # of one slice
        self.partitions = self.program.num_partitions or self.num_devices
        self.slices = [list(range(self.num_devices))]
        if self.partitions != self.num_devices:
            self.slices = slices.replicas_of(self.devices)
        if {len(replicas) for replicas in self.slices} != {self.partitions}:
            raise value_error(
                "Every slice must run the whole of a program for several.",
                received={"devices": self.num_devices, "partitions": self.partitions},
                fix="Pass all devices of all slices.",
            )

    def text(self) -> str:
        written = [
            self._computation(computation)
            for computation in self.program
            if computation is not self.program.entry
        ]
        written.append("ENTRY " + self._computation(self.program.entry))
        header = f"HloModule replay, replica_count={self.num_devices}"
        return "\n\n".join([header, *self.texts.values(), *written]) + "\n"

    def _computation(self, computation: Computation) -> str:
        lines = []
        for instruction in computation:
            *before, last = self._lines(computation, instruction)
            root = "ROOT " if instruction is computation.root else ""
            lines += [*before, root + last]
        return f"%{computation.name} {{\n" + "".join(f"  {line}\n" for line in lines) + "}"

    def _lines(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """The lines for an instruction; the last has its name."""
        known = operation(instruction.opcode)
        if known.replayed is Replayed.TARGET:
            known = target(instruction)
        if known.kind is OperationKind.UNKNOWN:
            yield from self._unknown(computation, instruction, known.name)
        elif known.replayed is Replayed.REFUSED:
            raise cannot_run(instruction, known.why + _since(known))
        else:
            yield from _WRITERS[known.replayed](self, computation, instruction)

    def _unknown(
        self, computation: Computation, instruction: Instruction, name: str
    ) -> Iterator[str]:
        """What is in no table: refused, or as it stands if it is elementwise and XLA reads it."""
        compared = f"the table of operations was compared with libtpu {', '.join(SEEN)}"
        if instruction.opcode == "custom-call":
            raise cannot_run(instruction, f"the custom call {name!r} is not known; {compared}")
        if not is_elementwise(computation, instruction):
            raise cannot_run(instruction, f"the operation is not known; {compared}")
        given = {one.name: array_type(one.shapes[0]) for one in computation.operands(instruction)}
        line = self._written(instruction, instruction.opcode, self._kept(instruction))
        if not is_read(program_of(line, given)):
            raise cannot_run(
                instruction,
                f"the operation is not known, to XLA's CPU compiler neither; {compared}",
            )
        yield line

    def _as_it_is(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        opcode = instruction.opcode
        if opcode == "constant" and "..." in instruction.operands:
            raise cannot_run(instruction, "the values of the constant are left out of the text")
        yield self._written(instruction, opcode, self._kept(instruction))

    def _bitcast(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        return bitcast.lines(self.program, computation, instruction)

    def _high_bits(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """The upper half of a product of integers."""
        (result,), name = instruction.shapes, instruction.name
        if result.dtype not in _TWICE:
            raise cannot_run(instruction, f"its dtype is {result.dtype}")
        wide = f"{_TWICE[result.dtype]}[{listed(result.dims)}]"
        for number, operand in enumerate(computation.operands(instruction)):
            yield f"%{name}.wide{number} = {wide} convert(%{operand.name})"
        bits = 8 * result.bytes // max(result.size, 1)
        yield f"%{name}.product = {wide} multiply(%{name}.wide0, %{name}.wide1)"
        yield f"%{name}.bits = {_TWICE[result.dtype]}[] constant({bits})"
        yield f"%{name}.by = {wide} broadcast(%{name}.bits), dimensions={{}}"
        shifted = f"shift-right-logical(%{name}.product, %{name}.by)"
        yield f"%{name}.high = {wide} {shifted}"
        yield f"%{name} = {array_type(result)} convert(%{name}.high)"

    def _number(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        if instruction.opcode == "replica-id":  # partitions of one replica, until here
            yield f"%{instruction.name} = u32[] constant(0)"
        else:
            yield from self._place(instruction.name, _PARTITION)

    def _number_of_slice(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        return self._place(instruction.name, _SLICE)

    def _kept(self, instruction: Instruction) -> str:
        found = attributes_of(instruction)
        return ", ".join(f"{name}={text}" for name, text in found.items() if name not in _DROPPED)

    def _written(
        self, instruction: Instruction, opcode: str, attributes: str = "", operands: str = ""
    ) -> str:
        operands = operands or plain_type(instruction.operands)
        return f"%{instruction.name} = {plain_type(instruction.type_text)} {opcode}({operands})" + (
            f", {attributes}" if attributes else ""
        )

    def _fusion(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        reverses = dict(_REVERSE.findall(instruction.attribute("backend_config") or ""))
        if not reverses:
            yield from self._called(computation, instruction)
            return
        dims = reverses.pop(_WRITES_IN_REVERSE, "").replace('"', "")
        if reverses or len(instruction.shapes) != 1:
            words = ", ".join(map(repr, [*reverses, *([_WRITES_IN_REVERSE] if dims else [])]))
            raise cannot_run(instruction, f"its configuration has {words}, which is not known here")
        forward = Instruction(
            f"{instruction.name}.forward",
            instruction.opcode,
            instruction.type_text,
            instruction.operands,
            instruction.attributes,
        )
        yield from self._called(computation, forward)
        yield self._written(instruction, "reverse", f"dimensions={{{dims}}}", f"%{forward.name}")

    def _called(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        called = attributes_of(instruction)["calls"]
        inner = self.program.computations[called.lstrip("%")]
        wanted = [parameter.shapes for parameter in inner.parameters]
        given = [operand.shapes for operand in computation.operands(instruction)]
        found = inner.root.shapes if inner.root else instruction.shapes
        dtypes = [[shape.dtype for shape in shapes] for shapes in (*wanted, found)]
        if dtypes == [[s.dtype for s in shapes] for shapes in (*given, instruction.shapes)]:
            yield self._written(instruction, "call", f"to_apply={called}")
            return
        wide = [dtype for (dtype,) in dtypes[:-1]]
        yield from self._typed(
            computation, instruction, wide, dtypes[-1], f"to_apply={called}", opcode="call"
        )

    def _elementwise(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation whose values have one dtype, as HLO defines it: here the widest."""
        (result,) = instruction.shapes
        dtypes = [operand.shapes[0].dtype for operand in computation.operands(instruction)]
        compares, chosen_by = instruction.opcode == "compare", instruction.opcode == "select"
        values = dtypes[chosen_by:]
        wide = self._widest(instruction, *values, *([] if compares else [result.dtype]))
        wanted = [*dtypes[:chosen_by], *[wide] * len(values)]
        results = [result.dtype if compares else wide]
        yield from self._typed(computation, instruction, wanted, results)

    def _reduction(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation with a computation of its own, whose parameters have the dtypes."""
        name = instruction.called_by("scatter") or instruction.called_by("to_apply")
        parameters = self.program.computations[name or ""].parameters
        number = len(parameters) // 2
        dtypes = [parameter.shapes[0].dtype for parameter in parameters[:number]]
        wanted = [operand.shapes[0].dtype for operand in computation.operands(instruction)]
        if instruction.opcode == "scatter":  # arrays, indices, updates
            wanted[:number] = wanted[number + 1 :] = dtypes
        else:  # arrays, and as many initial values or, to be scattered, one array and one value
            wanted = (dtypes * len(wanted))[: len(wanted)]
        yield from self._typed(computation, instruction, wanted, dtypes)

    def _of_one_dtype(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation that moves values: it has the dtype of its result."""
        (result,) = instruction.shapes
        operands = computation.operands(instruction)
        wanted = [operand.shapes[0].dtype for operand in operands]
        moved = 2 if instruction.opcode in ("dynamic-update-slice", "pad") else len(wanted)
        wanted[:moved] = [result.dtype] * moved
        yield from self._typed(computation, instruction, wanted, [result.dtype])

    def _moved(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation that moves elements, and may convert them on the way."""
        if instruction.type_text.startswith("("):  # a copy of a tuple
            yield self._written(instruction, instruction.opcode)
            return
        wanted = [operand.shapes[0].dtype for operand in computation.operands(instruction)]
        yield from self._typed(computation, instruction, wanted, wanted[:1])

    def _widest(self, instruction: Instruction, *dtypes: str) -> str:
        if len(set(dtypes)) == 1:
            return dtypes[0]
        if not set(dtypes) <= set(_FLOATS):
            raise cannot_run(instruction, f"its dtypes are {', '.join(sorted(set(dtypes)))}")
        return max(dtypes, key=_FLOATS.index)

    def _typed(
        self,
        computation: Computation,
        instruction: Instruction,
        wanted: list[str],
        results: list[str],
        attributes: str | None = None,
        sources: list[str] | None = None,
        opcode: str = "",
    ) -> Iterator[str]:
        """An instruction with operands of these dtypes, whose results have the others.

        The TPU's compiler lets them differ from what HLO asks for, above all after it has joined
        conversions with what reads or writes them.
        """
        name = instruction.name
        names = []
        for number, operand in enumerate(computation.operands(instruction)):
            (shape,) = operand.shapes
            names.append(sources[number] if sources else f"%{operand.name}")
            if shape.dtype != wanted[number]:
                target = f"{wanted[number]}[{listed(shape.dims)}]"
                yield f"%{name}.in{number} = {target} convert({names[-1]})"
                names[-1] = f"%{name}.in{number}"
        opcode = opcode or instruction.opcode
        if attributes is None:
            attributes = self._kept(instruction)
        computed = f"{opcode}({', '.join(names)})" + (f", {attributes}" if attributes else "")
        shapes = instruction.shapes
        wide = [
            f"{dtype}[{listed(shape.dims)}]" for dtype, shape in zip(results, shapes, strict=True)
        ]
        is_tuple = instruction.type_text.startswith("(")
        declared = f"({', '.join(wide)})" if is_tuple else wide[0]
        if all(shape.dtype == dtype for shape, dtype in zip(shapes, results, strict=True)):
            yield f"%{name} = {declared} {computed}"
            return
        yield f"%{name}.wide = {declared} {computed}"
        if not is_tuple:
            yield f"%{name} = {array_type(shapes[0])} convert(%{name}.wide)"
            return
        for number, shape in enumerate(shapes):
            member = f"get-tuple-element(%{name}.wide), index={number}"
            yield f"%{name}.g{number} = {wide[number]} {member}"
            yield f"%{name}.c{number} = {array_type(shape)} convert(%{name}.g{number})"
        members = ", ".join(f"%{name}.c{number}" for number in range(len(shapes)))
        yield f"%{name} = ({', '.join(map(array_type, shapes))}) tuple({members})"

    def _product(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        (result,) = instruction.shapes
        name, kept = instruction.name, attributes_of(instruction)
        # Without either, the chip multiplies in bfloat16.
        precise = "high" in kept.get("operand_precision", "") or "algorithm" in kept
        operands, sources = computation.operands(instruction), []
        for number, operand in enumerate(operands):
            (shape,) = operand.shapes
            sources.append(f"%{operand.name}")
            if self.as_on_chip and shape.dtype == "f32" and not precise:
                sources[-1] = f"%{name}.as{number}"
                yield (
                    f"{sources[-1]} = {array_type(shape)} reduce-precision(%{operand.name}), "
                    "exponent_bits=8, mantissa_bits=7"
                )
        # The chip adds up products of bfloat16 in float32.
        dtypes = [operand.shapes[0].dtype for operand in operands]
        wide = dtypes[0]
        if {*dtypes, result.dtype} <= set(_FLOATS):
            wide = self._widest(instruction, *dtypes, result.dtype, "f32")
        dropped = {*_DROPPED, "operand_precision", "algorithm"}
        attributes = ", ".join(f"{key}={text}" for key, text in kept.items() if key not in dropped)
        results = [wide if wide in _FLOATS else result.dtype]
        wanted = [wide if wide in _FLOATS else dtype for dtype in dtypes]
        yield from self._typed(computation, instruction, wanted, results, attributes, sources)

    def _collective_attributes(self, instruction: Instruction) -> str:
        """Who takes part, written out, and what else a collective is given."""
        found = attributes_of(instruction)
        if "source_target_pairs" in found:
            pairs = self._in_all_slices(replica_groups(found["source_target_pairs"], 0))
            groups = f"source_target_pairs={pairs}"
        else:
            groups = f"replica_groups={self._groups(instruction)}"
        rest = [
            f"{name}={text}"
            for name, text in found.items()
            if name not in {*_DROPPED, "replica_groups", "source_target_pairs"}
        ]
        return ", ".join([groups, *rest])

    def _groups(self, instruction: Instruction) -> str:
        return self._in_all_slices(groups_of(instruction, self.partitions))

    def _in_all_slices(self, groups: Groups) -> str:
        """Groups of partitions of one slice, or pairs of them, as replicas of all slices."""
        written = (
            f"{{{listed(replicas[partition] for partition in group)}}}"
            for replicas in self.slices
            for group in groups
        )
        return f"{{{','.join(written)}}}"

    def _place(self, name: str, which: int) -> Iterator[str]:
        """The number of a device's partition in its slice, or of its slice."""
        places = {
            replica: (partition, number)
            for number, replicas in enumerate(self.slices)
            for partition, replica in enumerate(replicas)
        }
        numbers = listed(places[replica][which] for replica in range(self.num_devices))
        yield f"%{name}.every = u32[{self.num_devices}] constant({{{numbers}}})"
        yield f"%{name}.at = u32[] replica-id()"
        operands = f"%{name}.every, %{name}.at"
        yield f"%{name}.one = u32[1] dynamic-slice({operands}), dynamic_slice_sizes={{1}}"
        yield f"%{name} = u32[] reshape(%{name}.one)"

    def _exchanged(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """A collective between slices, computed where its result is waited for."""
        opcode, name = instruction.opcode, instruction.name
        done = opcode.endswith("-done")
        receives = computation.operands(instruction)[0] if done else instruction
        key = slices.key_of(receives)
        if not key:
            raise cannot_run(instruction, "the host has a part in it")
        if opcode != "recv-done":
            yield f"%{name} = token[] after-all()"
            return
        sends = [i for i in computation if i.opcode == "send" and slices.key_of(i) == key]
        if len(sends) != 1:
            raise cannot_run(receives, f"{len(sends)} operations beside it send with its key")
        operand, *_ = computation.operands(sends[0])
        exchange = slices.exchange_of(receives, operand.shapes[0], self.devices)
        if exchange.before:
            self.texts.setdefault(exchange.before, exchange.before)
        result = array_type(instruction.shapes[0])
        given = yield from self._hidden(instruction, [operand], exchange.opcode)
        computed = f"{exchange.opcode}({given}), {exchange.attributes}"
        yield f"%{name}.result = {result} {computed}"
        yield f"%{name}.token = pred[] constant(false)"
        yield f"%{name} = ({result}, pred[]) tuple(%{name}.result, %{name}.token)"

    def _collective(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        attributes = self._collective_attributes(instruction)
        operands = yield from self._hidden(instruction, computation.operands(instruction))
        yield self._written(instruction, instruction.opcode, attributes, operands)

    def _hidden(
        self, instruction: Instruction, operands: Sequence[Instruction], opcode: str = ""
    ) -> Generator[str, None, str]:
        """The operands of a collective, by name; those of an `all-to-all` behind a barrier.

        XLA's CPU compiler cuts it into one with an operand for each device, simplifies these one by
        one, as parts of a padding, and refuses the program if their layouts then differ.
        """
        names = [f"%{operand.name}" for operand in operands]
        if (opcode or instruction.opcode.removesuffix("-start")) == "all-to-all":
            for number, operand in enumerate(operands):
                hidden = f"%{instruction.name}.given{number}"
                yield f"{hidden} = {array_type(operand.shapes[0])} opt-barrier({names[number]})"
                names[number] = hidden
        return ", ".join(names)

    def _one_by_one(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """A collective, of several arrays as several. A reduction has the dtype of its function.

        So it is as if it were called for each: XLA's CPU client wants one dtype.
        """
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "all-reduce" and not self._is_reduced(instruction):
            yield from self._reduced_by_pairs(instruction)
            return
        attributes = self._collective_attributes(instruction)
        reduced_by = self.program.computations.get(instruction.called_by("to_apply") or "")
        members = []
        for number, operand in enumerate(computation.operands(instruction)):
            source, of = f"%{operand.name}", f"%{instruction.name}.of{number}"
            (given,), shape = operand.shapes, instruction.shapes[number]
            dtype = reduced_by.parameters[0].shapes[0].dtype if reduced_by else given.dtype
            yield f"{of}.in = {dtype}[{listed(given.dims)}] convert({source})"
            computed = f"{opcode}({of}.in), {attributes}"
            yield f"{of}.out = {dtype}[{listed(shape.dims)}] {computed}"
            yield f"{of} = {array_type(shape)} convert({of}.out)"
            members.append(of)
        several = instruction.type_text.startswith("(")
        yield self._written(
            instruction, "tuple" if several else "copy", operands=", ".join(members)
        )

    def _is_reduced(self, instruction: Instruction) -> bool:
        """Whether XLA's CPU client can reduce over devices by a computation."""
        name = instruction.called_by("to_apply") or ""
        root = self.program.computations[name].root
        if root is None or len(self.program.computations[name].instructions) != 3:
            return False
        truth = root.shapes[0].dtype == "pred" and root.opcode in ("and", "or")
        return truth or root.opcode in _REDUCED

    def _reduced_by_pairs(self, instruction: Instruction) -> Iterator[str]:
        """A reduction by a computation of its own: gathered, and joined one by one."""
        name, size = instruction.name, len(groups_of(instruction, self.partitions)[0])
        groups = self._groups(instruction)
        called = attributes_of(instruction)["to_apply"]
        (wide,) = self.program.computations[called.lstrip("%")].parameters[0].shapes
        results = []
        for place, operand in enumerate(instruction.operand_names):
            shape, of = instruction.shapes[place], f"%{name}.of{place}"
            one, every = (1, *shape.dims), (size, *shape.dims)
            yield f"{of}.one = {array_type(shape, one)} reshape(%{operand})"
            gather = f"all-gather({of}.one), replica_groups={groups}, dimensions={{0}}"
            yield f"{of}.all = {array_type(shape, every)} {gather}"
            dimensions = listed(range(len(shape.dims)))
            results.append("")
            for number in range(size):
                cuts = [f"[{number}:{number + 1}]", *(f"[0:{n}]" for n in shape.dims)]
                part = f"{of}.part{number}"
                cut = f"slice({of}.all), slice={{{', '.join(cuts)}}}"
                yield f"{part}.cut = {array_type(shape, one)} {cut}"
                yield f"{part}.one = {array_type(shape)} reshape({part}.cut)"
                yield f"{part} = {wide.dtype}[{listed(shape.dims)}] convert({part}.one)"
                if results[place]:
                    both = f"map({results[place]}, {part})"
                    joined = f"{both}, dimensions={{{dimensions}}}, to_apply={called}"
                    part = f"{part}.joined"
                    yield f"{part} = {wide.dtype}[{listed(shape.dims)}] {joined}"
                results[place] = part
            yield f"{of} = {array_type(shape)} convert({results[place]})"
            results[place] = of
        opcode = "tuple" if instruction.type_text.startswith("(") else "copy"
        yield self._written(instruction, opcode, operands=", ".join(results))

    def _begun(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """What runs beside the rest, computed where it is started.

        Its result is a tuple of its operands, its result and what the chip needs to wait for it.
        """
        opcode, name = instruction.opcode.removesuffix("-start"), instruction.name
        types = members_of(instruction.type_text)
        if opcode == "all-reduce" or not instruction.type_text.startswith("("):
            yield from self._one_by_one(computation, instruction)
            return
        operands, result = types[:2]
        if opcode == "copy":  # the copy comes before the original
            operands, result = result, operands
            computed = f"{plain_type(result)} copy({plain_type(instruction.operands)})"
        elif operation(opcode).kind is OperationKind.COLLECTIVE:
            hidden = yield from self._hidden(instruction, computation.operands(instruction))
            attributes = self._collective_attributes(instruction)
            computed = f"{plain_type(result)} {opcode}({hidden}), {attributes}"
        elif opcode == "slice":
            kept = self._kept(instruction)
            computed = f"{plain_type(result)} slice({plain_type(instruction.operands)}), {kept}"
        else:
            called = attributes_of(instruction)["calls"]
            operand_names = plain_type(instruction.operands)
            computed = f"{plain_type(result)} call({operand_names}), to_apply={called}"
        yield f"%{name}.result = {computed}"
        given = [f"%{operand}" for operand in instruction.operand_names]
        first = given[0]
        if operands.startswith("("):
            first = f"%{name}.operands"
            yield f"{first} = {plain_type(operands)} tuple({', '.join(given)})"
        members = [f"%{name}.result", first] if opcode == "copy" else [first, f"%{name}.result"]
        for number, rest in enumerate(types[2:], 2):
            yield from zeros_of(f"%{name}.part{number}", rest)
            members.append(f"%{name}.part{number}")
        yield f"%{name} = {plain_type(instruction.type_text)} tuple({', '.join(members)})"

    def _finished(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        (source,) = computation.operands(instruction)
        # All-reduces are no tuple of operands and results, but results alone.
        whole = instruction.opcode == "all-reduce-done" or instruction.opcode.endswith("-update")
        if whole or not source.type_text.startswith("("):
            yield self._written(instruction, "copy")
            return
        index = 0 if instruction.opcode == "copy-done" else 1
        yield self._written(instruction, "get-tuple-element", f"index={index}")

    def _handed_over(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """What another core computes, where it is given its arrays: at the start or an update.

        The result is a tuple of operands, results and a state; at a start without operands the
        first two are empty.
        """
        name = instruction.name
        if instruction.opcode.endswith("-done"):
            yield self._written(instruction, "get-tuple-element", "index=1")
            return
        started, given = instruction, instruction.operand_names
        if instruction.opcode.endswith("-update"):
            started, given = computation.operands(instruction)[0], given[1:]
            if (
                operation(started.opcode).kind is not OperationKind.HANDOVER
                or started.operand_names
            ):
                raise cannot_run(instruction, "it gives arrays to what has some already")
        of_operands, result, *state = members_of(instruction.type_text)
        members = [f"%{name}.operands", f"%{name}.result"]
        operands = ", ".join(f"%{operand}" for operand in given)
        yield f"{members[0]} = {plain_type(of_operands)} tuple({operands})"
        computed = f"call({operands}), to_apply=%{started.called[0]}" if given else "tuple()"
        yield f"{members[1]} = {plain_type(result)} {computed}"
        for number, of_state in enumerate(state):
            members.append(f"%{name}.state{number}")
            yield from zeros_of(members[-1], of_state)
        yield self._written(instruction, "tuple", operands=", ".join(members))

    def _operand(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        first = instruction.operand_names[0]
        yield self._written(instruction, "copy", operands=f"%{first}")

    def _zeros(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        return zeros_of(f"%{instruction.name}", instruction.type_text)

    def _padded(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """Zeros behind the elements, up to whole tiles."""
        (operand,) = computation.operands(instruction)
        (source,), (result,) = operand.shapes, instruction.shapes
        zero = f"%{instruction.name}.zero"
        yield f"{zero} = {source.dtype}[] constant({zero_of(source.dtype)})"
        sizes = zip(source.dims, result.dims, strict=True)
        padding = "x".join(f"0_{size - of}" for of, size in sizes)
        given = f"%{operand.name}, {zero}"
        yield self._written(instruction, "pad", f"padding={padding}", given)

    def _joined(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """Parts that were fetched one by one, each to its place in memory.

        They are named in the order in which they are fetched, and that need not be the order of
        their places.
        """
        (result,), parts = instruction.shapes, computation.operands(instruction)
        places = sorted((_place(computation, instruction, part), part.name) for part in parts)
        operands = ", ".join(f"%{part}" for _, part in places)
        first = parts[0].shapes[0]
        of_bytes = first.dtype != result.dtype and len(first.dims) == 1
        dims = (sum(part.shapes[0].size for part in parts),) if of_bytes else result.dims
        differ = [d for d, size in enumerate(first.dims) if size != dims[d]]
        if len(differ) != 1:
            raise cannot_run(instruction, "its parts do not join along one dimension")
        along = differ[0]
        ends = [0, *(place[along][1] for place, _ in places)]
        starts = [*(place[along][0] for place, _ in places), dims[along]]
        if starts != ends:
            raise cannot_run(instruction, "its parts do not lie side by side")
        if of_bytes:
            every, joined = replace(first, dims=dims), f"%{instruction.name}.bytes"
            yield f"{joined} = {array_type(every)} concatenate({operands}), dimensions={{0}}"
            yield from bitcast.of_bytes(instruction, every, joined)
            return
        yield self._written(instruction, "concatenate", f"dimensions={{{along}}}", operands)

    def _in_fusions(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """A collective that takes its steps in the fusions between a start and an end."""
        if target(instruction).name.endswith("Start"):
            yield from self._started(computation, instruction)
            return
        # Between start and end, fusions repeat the collective, which takes its steps in them.
        operands = computation.operands(instruction)
        (collective,) = (
            o for o in operands if operation(o.opcode).kind is OperationKind.COLLECTIVE
        )
        yield self._written(instruction, "copy", operands=f"%{collective.name}")

    def _token(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        yield f"%{instruction.name} = token[] after-all()"

    def _kernel(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        operands = computation.operands(instruction)
        shapes = [shape for operand in operands for shape in operand.shapes]
        kernel = self.kernels(instruction, shapes)
        self.texts.setdefault(kernel.entry, kernel.text)
        if kernel.is_tuple or not instruction.type_text.startswith("("):
            yield self._written(instruction, "call", f"to_apply={kernel.entry}")
            return
        (shape,), one = instruction.shapes, f"%{instruction.name}.one"
        given = plain_type(instruction.operands)
        yield f"{one} = {array_type(shape)} call({given}), to_apply={kernel.entry}"
        yield self._written(instruction, "tuple", operands=one)

    def _started(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """The start of a collective that runs within the fusions that follow."""
        (collective,) = computation.operands(instruction)
        arrays = [*computation.operands(collective), collective]
        if len(collective.shapes) != 1 or len(arrays) != 2:
            raise cannot_run(instruction, "it starts a collective of several arrays")
        # Results behind these are the state of the transfer.
        for one, shape in zip(arrays, instruction.shapes, strict=False):
            if (one.shapes[0].dtype, one.shapes[0].dims) != (shape.dtype, shape.dims):
                raise cannot_run(instruction, "its result is not its operand and its result")
        members = [f"%{one.name}" for one in arrays]
        for number, shape in enumerate(instruction.shapes[2:]):
            yield from zeros_of(f"%{instruction.name}.part{number}", array_type(shape))
            members.append(f"%{instruction.name}.part{number}")
        yield self._written(instruction, "tuple", operands=", ".join(members))


def _place(
    computation: Computation, joined: Instruction, part: Instruction
) -> list[tuple[int, int]]:
    """Where a slice starts and ends in its operand, for each dimension."""
    cut = computation.operands(part)[0] if part.opcode == "slice-done" else part
    numbers = cut.integers("slice") or []
    if len(numbers) != 2 * len(part.shapes[0].dims):
        raise cannot_run(joined, f"its part %{part.name} is no slice")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _since(known: HloOperation) -> str:
    return f"; libtpu is known to write it since {known.since}" if known.since else ""


_Writer = Callable[[_Rewriter, Computation, Instruction], Iterator[str]]
# How each operation of the table is written.
_WRITERS: dict[Replayed, _Writer] = {
    Replayed.AS_IT_IS: _Rewriter._as_it_is,
    Replayed.WIDENED: _Rewriter._elementwise,
    Replayed.HIGH_BITS: _Rewriter._high_bits,
    Replayed.OF_RESULT: _Rewriter._of_one_dtype,
    Replayed.OF_FUNCTION: _Rewriter._reduction,
    Replayed.MOVED: _Rewriter._moved,
    Replayed.PRODUCT: _Rewriter._product,
    Replayed.BYTES: _Rewriter._bitcast,
    Replayed.CALLED: _Rewriter._fusion,
    Replayed.PLACE: _Rewriter._number,
    Replayed.ACROSS_SLICES: _Rewriter._exchanged,
    Replayed.FOR_EACH: _Rewriter._one_by_one,
    Replayed.COLLECTIVE: _Rewriter._collective,
    Replayed.STARTED: _Rewriter._begun,
    Replayed.HANDED_OVER: _Rewriter._handed_over,
    Replayed.FINISHED: _Rewriter._finished,
    Replayed.OPERAND: _Rewriter._operand,
    Replayed.ZEROS: _Rewriter._zeros,
    Replayed.SLICE_NUMBER: _Rewriter._number_of_slice,
    Replayed.PADDED: _Rewriter._padded,
    Replayed.JOINED: _Rewriter._joined,
    Replayed.IN_FUSIONS: _Rewriter._in_fusions,
    Replayed.TOKEN: _Rewriter._token,
    Replayed.INTERPRETED: _Rewriter._kernel,
}
