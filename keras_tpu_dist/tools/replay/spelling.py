"""How values, types and attributes are written in HLO."""

import re
from collections.abc import Iterator, Mapping

from keras_tpu_dist.tools.hlo.parse import Instruction, Shape, end_of_value, shapes_of

_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_NAME = re.compile(r"\s*,?\s*([a-z_]\w*)=")


def attributes_of(instruction: Instruction) -> dict[str, str]:
    """The attributes of an instruction, as text, by name."""
    text, found, at = instruction.attributes, {}, 0
    while match := _NAME.match(text, at):
        end = end_of_value(text, match.end())
        found[match[1]] = text[match.end() : end]
        at = end
    return found


def plain_type(text: str) -> str:
    """A type without layouts and comments."""
    return re.sub(r"/\*.*?\*/", "", _LAYOUT.sub("", text))


def array_type(shape: Shape, dims: tuple[int, ...] | None = None) -> str:
    """The type of an array, without its layout."""
    return f"{shape.dtype}[{listed(shape.dims if dims is None else dims)}]"


def listed(values: object) -> str:
    """Integers, with commas between them."""
    return ",".join(str(int(value)) for value in values)  # type: ignore[attr-defined]


def zero_of(dtype: str) -> str:
    """The constant 0 of a dtype."""
    return "false" if dtype == "pred" else "0"


def zeros_of(name: str, type_text: str) -> Iterator[str]:
    """Lines for zeros of any type, tuples and tokens too; the last has the name.

    Args:
        name: With its percent sign.
        type_text: As an instruction's text has it.
    """
    text = type_text.strip()
    if text.startswith("("):
        members = []
        for number, member in enumerate(members_of(text)):
            members.append(f"{name}.{number}")
            yield from zeros_of(members[-1], member)
        yield f"{name} = {plain_type(text)} tuple({', '.join(members)})"
        return
    (shape,) = shapes_of(text)
    if shape.dtype == "token":
        yield f"{name} = token[] after-all()"
        return
    yield f"{name}.zero = {shape.dtype}[] constant({zero_of(shape.dtype)})"
    yield f"{name} = {array_type(shape)} broadcast({name}.zero), dimensions={{}}"


def members_of(type_text: str) -> list[str]:
    """The members of a tuple's type, as text."""
    inner = re.sub(r"/\*.*?\*/", "", type_text.strip())[1:-1].strip()
    if not inner:
        return []
    parts, depth, start = [], 0, 0
    for at, c in enumerate(inner):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(inner[start:at].strip())
            start = at + 1
    return [*parts, inner[start:].strip()]


def program_of(line: str, operands: Mapping[str, str]) -> str:
    """A program of one instruction, which gets its operands as parameters.

    Args:
        line: The instruction.
        operands: From the names of its operands to their types.
    """
    parameters = [
        f"  %{name} = {of} parameter({number})\n"
        for number, (name, of) in enumerate(operands.items())
    ]
    return f"HloModule one\n\nENTRY %one {{\n{''.join(parameters)}  ROOT {line}\n}}\n"
