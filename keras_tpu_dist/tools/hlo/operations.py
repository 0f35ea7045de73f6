"""The operations of HLO: one table for what counts a compiled program and for what runs it.

`tools.hlo` asks it how bytes and runs are counted, `tools.replay` how an operation is written for
XLA's CPU compiler. What a new TPU compiler writes is added here, once for both:
`python tests/versions/opcodes.py` says what is missing.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program

# Parts of names of what exchanges arrays, or runs beside the rest.
_NOT_ELEMENTWISE = ("all-", "collective", "-start", "-update", "-done", "copy", "permute")
# The libtpus whose programs the table was compared with.
SEEN = ("0.0.41", "0.0.50.1", "0.0.52")


class OperationKind(enum.Enum):
    """What an operation does."""

    ELEMENTWISE = "computes each element by itself"
    MOVE = "moves elements"
    REDUCTION = "joins elements by a function"
    PRODUCT = "multiplies matrices"
    NAME = "names values that are there"
    CALL = "runs a computation"
    KERNEL = "is a kernel"
    COLLECTIVE = "exchanges arrays between devices"
    HOST = "exchanges arrays with the host"
    START = "starts what runs beside the rest"
    HANDOVER = "hands a computation to another core"
    UPDATE = "gives arrays to what was started"
    DONE = "waits for what was started"
    OTHER = "computes something else"
    UNKNOWN = "is not known"


class Counted(enum.Enum):
    """Which bytes count."""

    ALL = "what it reads and what it writes"
    NOTHING = "nothing: there is nothing to move, or it counts elsewhere"
    READ = "what it reads"
    TRANSFER = "what it copies, read and written"
    SLICE = "what it takes, and what it writes"
    CHANGED = "what it changes in place"
    FUSION = "what its computation reads and writes"
    KERNEL = "what its author states"


class Replayed(enum.Enum):
    """How it is written for XLA's CPU compiler."""

    AS_IT_IS = "as it is"
    WIDENED = "in the widest of its dtypes"
    HIGH_BITS = "as a product of twice the bits, and a shift"
    OF_RESULT = "in the dtype of its result"
    OF_FUNCTION = "in the dtypes of its function"
    MOVED = "as it is, and converted behind"
    PRODUCT = "in float32, of rounded operands if you ask for it"
    BYTES = "as transposes and reshapes that leave the bytes in their order"
    CALLED = "as a call"
    PLACE = "as a number of the replica"
    TARGET = "by its target"
    ACROSS_SLICES = "as a collective, between slices"
    FOR_EACH = "as one collective for each array"
    COLLECTIVE = "as a collective, with groups written out"
    STARTED = "computed where it starts"
    HANDED_OVER = "computed where it is given its arrays"
    FINISHED = "as what was computed"
    OPERAND = "as its operand"
    ZEROS = "as zeros"
    SLICE_NUMBER = "as a number of the replica's slice"
    PADDED = "as a pad of zeros"
    JOINED = "as a join of its operands"
    IN_FUSIONS = "computed before the fusions that would take its steps"
    TOKEN = "as a token"
    INTERPRETED = "by the computation that is given for it"
    REFUSED = "refused"


@dataclass(frozen=True)
class HloOperation:
    """An operation of HLO.

    Args:
        name: Its opcode, or the target of a custom call.
        kind: What it does.
        counted: Which bytes count.
        replayed: How it is written for XLA's CPU compiler.
        since: The libtpu from which on it is known to be written; `""` if all do.
        why: Why it is refused.
    """

    name: str
    kind: OperationKind
    counted: Counted
    replayed: Replayed
    since: str = ""
    why: str = ""


def _all(
    names: str,
    kind: OperationKind,
    counted: Counted,
    replayed: Replayed,
    since: str = "",
    why: str = "",
) -> Iterator[tuple[str, HloOperation]]:
    for name in names.split():
        yield name, HloOperation(name, kind, counted, replayed, since, why)


_COLLECTIVES = "all-gather all-reduce collective-permute reduce-scatter"
_OTHER_COLLECTIVES = "all-to-all ragged-all-to-all"
_STARTED = f"{_COLLECTIVES} {_OTHER_COLLECTIVES}".split()

OPERATIONS: dict[str, HloOperation] = dict(
    [
        *_all(
            "abs add and atan2 cbrt ceil clamp compare cosine count-leading-zeros divide erf "
            "exponential exponential-minus-one floor log log-plus-one logistic maximum minimum "
            "multiply negate not or popcnt power remainder round-nearest-afz round-nearest-even "
            "rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt "
            "subtract tan tanh xor",
            OperationKind.ELEMENTWISE,
            Counted.ALL,
            Replayed.WIDENED,
        ),
        *_all("sinh", OperationKind.ELEMENTWISE, Counted.ALL, Replayed.WIDENED, "0.0.52"),
        *_all("mulhi", OperationKind.ELEMENTWISE, Counted.ALL, Replayed.HIGH_BITS, "0.0.52"),
        *_all(
            "bitcast-convert complex convert imag is-finite real reduce-precision",
            OperationKind.ELEMENTWISE,
            Counted.ALL,
            Replayed.AS_IT_IS,
        ),
        *_all(
            "broadcast copy reshape reverse transpose",
            OperationKind.MOVE,
            Counted.ALL,
            Replayed.MOVED,
        ),
        *_all("dynamic-slice gather slice", OperationKind.MOVE, Counted.SLICE, Replayed.MOVED),
        *_all("concatenate pad", OperationKind.MOVE, Counted.ALL, Replayed.OF_RESULT),
        *_all("dynamic-update-slice", OperationKind.MOVE, Counted.CHANGED, Replayed.OF_RESULT),
        *_all("scatter", OperationKind.REDUCTION, Counted.CHANGED, Replayed.OF_FUNCTION),
        *_all(
            "reduce reduce-window select-and-scatter",
            OperationKind.REDUCTION,
            Counted.ALL,
            Replayed.OF_FUNCTION,
        ),
        *_all("convolution dot", OperationKind.PRODUCT, Counted.ALL, Replayed.PRODUCT),
        *_all("bitcast", OperationKind.NAME, Counted.NOTHING, Replayed.BYTES),
        *_all(
            "after-all constant get-tuple-element iota opt-barrier optimization-barrier parameter "
            "tuple",
            OperationKind.NAME,
            Counted.NOTHING,
            Replayed.AS_IT_IS,
        ),
        *_all("add-dependency domain", OperationKind.NAME, Counted.NOTHING, Replayed.OPERAND),
        *_all("partition-id replica-id", OperationKind.NAME, Counted.NOTHING, Replayed.PLACE),
        *_all("call conditional while", OperationKind.CALL, Counted.NOTHING, Replayed.AS_IT_IS),
        *_all("fusion", OperationKind.KERNEL, Counted.FUSION, Replayed.CALLED),
        *_all("custom-call", OperationKind.KERNEL, Counted.KERNEL, Replayed.TARGET),
        *_all(
            "map rng-bit-generator sort topk", OperationKind.OTHER, Counted.ALL, Replayed.AS_IT_IS
        ),
        *_all(_COLLECTIVES, OperationKind.COLLECTIVE, Counted.ALL, Replayed.FOR_EACH),
        *_all(_OTHER_COLLECTIVES, OperationKind.COLLECTIVE, Counted.ALL, Replayed.COLLECTIVE),
        *_all(
            "collective-broadcast",
            OperationKind.COLLECTIVE,
            Counted.ALL,
            Replayed.REFUSED,
            why="XLA's CPU client has no such collective",
        ),
        *_all(
            "collective-broadcast-start",
            OperationKind.START,
            Counted.READ,
            Replayed.REFUSED,
            why="XLA's CPU client has no such collective",
        ),
        *_all("send recv", OperationKind.HOST, Counted.ALL, Replayed.ACROSS_SLICES),
        *_all("send-done recv-done", OperationKind.HOST, Counted.NOTHING, Replayed.ACROSS_SLICES),
        *_all(
            "infeed outfeed",
            OperationKind.HOST,
            Counted.ALL,
            Replayed.REFUSED,
            why="the host has a part in it",
        ),
        *_all(
            " ".join(f"{name}-start" for name in _STARTED),
            OperationKind.START,
            Counted.READ,
            Replayed.STARTED,
        ),
        *_all("copy-start slice-start", OperationKind.START, Counted.TRANSFER, Replayed.STARTED),
        *_all("async-start", OperationKind.HANDOVER, Counted.NOTHING, Replayed.STARTED),
        *_all(
            " ".join(f"{name}-done" for name in [*_STARTED, "copy", "slice", "async"]),
            OperationKind.DONE,
            Counted.NOTHING,
            Replayed.FINISHED,
        ),
        *_all("async-update", OperationKind.UPDATE, Counted.NOTHING, Replayed.FINISHED),
        # Cores beside the main one: until libtpu 0.0.50, and from 0.0.52 on.
        *_all("call-start", OperationKind.HANDOVER, Counted.NOTHING, Replayed.HANDED_OVER),
        *_all(
            "call-update", OperationKind.UPDATE, Counted.NOTHING, Replayed.HANDED_OVER, "0.0.50.1"
        ),
        *_all("call-done", OperationKind.DONE, Counted.NOTHING, Replayed.HANDED_OVER),
        *_all(
            "custom-call-start",
            OperationKind.HANDOVER,
            Counted.NOTHING,
            Replayed.HANDED_OVER,
            "0.0.52",
        ),
        *_all(
            "custom-call-update",
            OperationKind.UPDATE,
            Counted.NOTHING,
            Replayed.HANDED_OVER,
            "0.0.52",
        ),
        *_all(
            "custom-call-done", OperationKind.DONE, Counted.NOTHING, Replayed.HANDED_OVER, "0.0.52"
        ),
    ]
)


KERNEL = "tpu_custom_call"
TARGETS: dict[str, HloOperation] = dict(
    [
        *_all(KERNEL, OperationKind.KERNEL, Counted.KERNEL, Replayed.INTERPRETED),
        *_all(
            "AssumeGatherIndicesInBound GatherScatterIndicesBitpacked",
            OperationKind.NAME,
            Counted.NOTHING,
            Replayed.OPERAND,
        ),
        *_all(
            "AllocateBuffer PrepareAsyncCallStart",
            OperationKind.NAME,
            Counted.NOTHING,
            Replayed.ZEROS,
        ),
        *_all("PrepareAsyncCallDone", OperationKind.NAME, Counted.NOTHING, Replayed.TOKEN),
        *_all("SliceId", OperationKind.NAME, Counted.NOTHING, Replayed.SLICE_NUMBER),
        *_all("ZeroCrop", OperationKind.MOVE, Counted.NOTHING, Replayed.PADDED),
        *_all("ConcatBitcast", OperationKind.NAME, Counted.NOTHING, Replayed.JOINED),
        *_all(
            "AsyncCollectiveStart AsyncCollectiveDone",
            OperationKind.NAME,
            Counted.NOTHING,
            Replayed.IN_FUSIONS,
        ),
        *_all(
            "Cholesky CompactWyHelper EighTpu InvertDiagBlocksLowerTriangular "
            "InvertDiagBlocksUpperTriangular LuDecompositionBlock QrDecompositionBlock",
            OperationKind.KERNEL,
            Counted.NOTHING,
            Replayed.REFUSED,
            why="a block of linear algebra, whose code is the chip's",
        ),
        *_all(
            "LuRealDecompositionBlock",
            OperationKind.KERNEL,
            Counted.NOTHING,
            Replayed.REFUSED,
            "0.0.50.1",
            "a block of linear algebra, whose code is the chip's",
        ),
        *_all(
            "X64Combine",
            OperationKind.MOVE,
            Counted.NOTHING,
            Replayed.REFUSED,
            why="it joins words to integers of 64 bits, in an order that is not documented",
        ),
    ]
)


def operation(opcode: str) -> HloOperation:
    """What is known of an operation; of one that is in no table, what its name says.

    Args:
        opcode: The opcode of an instruction.
    """
    known = OPERATIONS.get(opcode)
    if known is not None:
        return known
    counted = Counted.ALL
    if opcode.endswith("-start"):
        counted = Counted.READ
    elif opcode.endswith(("-done", "-update")):
        counted = Counted.NOTHING
    return HloOperation(opcode, OperationKind.UNKNOWN, counted, Replayed.REFUSED)


def target(instruction: Instruction) -> HloOperation:
    """What is known of the target of a custom call.

    Args:
        instruction: The custom call.
    """
    name = (instruction.attribute("custom_call_target") or "").strip('"')
    return TARGETS.get(name) or HloOperation(
        name, OperationKind.UNKNOWN, Counted.NOTHING, Replayed.REFUSED
    )


def is_elementwise(computation: Computation, instruction: Instruction) -> bool:
    """Whether an operation that is in no table computes each element by itself.

    It then has arrays of one shape as operands and result, and no attributes that say more.

    Args:
        computation: The computation that `instruction` is in.
        instruction: Any instruction.
    """
    operands = computation.operands(instruction)
    if not operands or instruction.called or instruction.type_text.startswith("("):
        return False
    if any(part in instruction.opcode for part in _NOT_ELEMENTWISE):
        return False
    return all(
        [shape.dims for shape in operand.shapes] == [instruction.shapes[0].dims]
        for operand in operands
    )


def unlisted(program: Program) -> tuple[str, ...]:
    """The operations of a program that are in no table.

    Args:
        program: A compiled program.
    """
    found = {one.opcode for computation in program for one in computation}
    return tuple(sorted(found - OPERATIONS.keys()))


def refused() -> tuple[HloOperation, ...]:
    """The operations and targets that are known, and cannot be run on simulated devices."""
    every = [*OPERATIONS.values(), *TARGETS.values()]
    return tuple(one for one in every if one.replayed is Replayed.REFUSED)
