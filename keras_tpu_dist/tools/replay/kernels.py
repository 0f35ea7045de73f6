"""Hand-written kernels as computations that run on simulated devices.

A compiled program holds a kernel as bytes for the chip. The traced step still has its equation,
which Pallas can lower to plain operations instead: its interpreter.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax

from keras_tpu_dist.tools.hlo.parse import Instruction, Shape
from keras_tpu_dist.tools.replay.errors import cannot_run
from keras_tpu_dist.tools.replay.rewrite import InterpretedKernel, Interpreter

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "pred"}
_REFERENCES = re.compile(
    r"\b((?:to_apply|condition|body|calls|select|scatter|true_computation|false_computation)=)"
    r"([\w.\-]+)|\b(branch_computations=\{)([\w.\-, ]+)"
)
_HEADER = re.compile(r"^(ENTRY )?([\w.\-]+) \{$", re.MULTILINE)


def interpreted(equations: Iterable[Any]) -> Interpreter:
    """Finds the computation for a kernel among the equations of the traced step.

    Returns:
        A function for `rewrite.runnable`. It refuses kernels that no equation belongs to, and
        those to which several different ones do.
    """
    by_shapes = defaultdict(list)
    for equation in equations:
        by_shapes[_key(equation)].append(equation)
    computed: dict[str, InterpretedKernel] = {}

    def find(instruction: Instruction, operands: list[Shape]) -> InterpretedKernel:
        name = _name(instruction)
        key = (name, _texts(operands), _texts(instruction.shapes))
        different = {str(equation.params["jaxpr"]): equation for equation in by_shapes[key]}
        if len(different) != 1:
            why = "none" if not different else f"{len(different)} different ones"
            raise cannot_run(
                instruction,
                f"it is a hand-written kernel, and {why} of the traced step's has its name "
                f"{name!r} and shapes",
            )
        ((text, equation),) = different.items()
        if text not in computed:
            try:
                computed[text] = _computation(equation, len(computed))
            except Exception as error:
                first = str(error).partition("\n")[0]
                raise cannot_run(
                    instruction,
                    f"Pallas cannot interpret the kernel {name!r} ({type(error).__name__}: "
                    f"{first[:200]})",
                ) from error
        return computed[text]

    return find


def _key(equation: Any) -> tuple:
    def texts(variables: Any) -> tuple:
        return tuple(
            (_dtype(variable.aval.dtype), tuple(variable.aval.shape)) for variable in variables
        )

    return kernel_name(equation), texts(equation.invars), texts(equation.outvars)


def kernel_name(equation: Any) -> str:
    """The name of a kernel."""
    named = equation.params.get("name_and_src_info")
    return str(equation.params.get("name") if named is None else named.name)


def _texts(shapes: Iterable[Shape]) -> tuple:
    return tuple((shape.dtype, shape.dims) for shape in shapes)


def _dtype(dtype: Any) -> str:
    name = str(dtype)
    return _DTYPES.get(name) or re.sub(r"^(u?)int", lambda m: f"{m[1] or 's'}", name)


def _name(instruction: Instruction) -> str:
    """The kernel's name, before `/pallas_call` in the name stack of the operation."""
    parts = instruction.op_name.split("/")
    return parts[-2] if len(parts) > 1 and parts[-1] == "pallas_call" else ""


def _computation(equation: Any, number: int) -> InterpretedKernel:
    parameters = {**equation.params, "interpret": True}

    def interpret(*arguments: Any) -> Any:
        results = equation.primitive.bind(*arguments, **parameters)
        return results[0] if len(results) == 1 else tuple(results)

    shapes = [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
        for variable in equation.invars
    ]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        lowered = jax.jit(interpret, keep_unused=True).lower(*shapes)
    computation: Any = lowered.compiler_ir("hlo")
    text = computation.as_hlo_text(print_large_constants=True)
    # Other computations of the program have such names too.
    prefix = f"kernel_{number}."

    def prefixed(found: re.Match) -> str:
        names = (found[2] or found[4]).split(",")
        return (found[1] or found[3]) + ", ".join(prefix + name.strip() for name in names)

    body = text[text.index("\n\n") :].strip()
    body = _REFERENCES.sub(prefixed, body)
    (entry,) = (name for is_entry, name in _HEADER.findall(body) if is_entry)
    body = _HEADER.sub(lambda found: f"{prefix}{found[2]} {{", body)
    return InterpretedKernel(prefix + entry, body, len(equation.outvars) > 1)
