"""Hand-written TPU kernels in a compiled program: operations that the compiler cannot see."""

import re

from keras_tpu_dist.tools.hlo.operations import KERNEL
from keras_tpu_dist.tools.hlo.parse import Instruction, Shape

_SPLASH = re.compile(r"\bsplash_m[hq]a_(fwd|dq|dkv)(?:_segmented)?_(?:no_)?residuals\b")
# attention.kernel writes this into the name stack: the blocks that a mask leaves to compute.
_BLOCKS = re.compile(r"\bblocks_(\d+)_of_(\d+)\b")
# JAX's splash kernels name the layouts of their operands; 2 is the transposed one.
_TRANSPOSED = re.compile(r'[qkv]_layout\\*": 2')
# Products of `width` and of `value_width` for every pair of query and key. Both backward kernels
# recompute the logits and the gradient of the weights.
_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
# dkv: two accumulators and two gradients; a fused one also returns dq.
_DKV_RESULTS = 4


def is_kernel(instruction: Instruction) -> bool:
    """Whether the instruction is a hand-written TPU kernel.

    Args:
        instruction: Any instruction.
    """
    return instruction.opcode == "custom-call" and KERNEL in instruction.attributes


def stated(instruction: Instruction, key: str) -> int | None:
    """The cost that a Pallas kernel's author states; `None` without a statement.

    Args:
        instruction: The kernel.
        key: Which part of the cost, such as `"flops"` or `"bytes_accessed"`.
    """
    at = instruction.attributes.find('"cost_estimate":')
    if at < 0:
        return None
    match = re.search(rf'"{key}":"?(\d+)', instruction.attributes[at:])
    return int(match[1]) if match else None


def flops(instruction: Instruction, operands: list[Instruction]) -> int | None:
    """Operations of a kernel: as its author states, or by its shapes if it is flash attention.

    JAX's splash attention states no cost. Its products count over the blocks that the mask does not
    empty (all blocks, if the name stack does not have the number), at the padded lengths. The
    forward kernel has two products, that of dq three and that of dk and dv four, because both
    backward kernels recompute the logits.

    Args:
        instruction: The kernel.
        operands: The instructions that it reads, in order.

    Returns:
        Two per multiply-add, or `None` for a kernel without such information.

    References:
        - The kernels: https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
    """
    said = stated(instruction, "flops")
    if said is not None:
        return said
    kernel = _splash(instruction)
    arrays = _attention_arrays(operands)
    if kernel is None or arrays is None:
        return None
    query, key, value = arrays
    of_width, of_value_width = _PRODUCTS[kernel]
    if kernel == "dkv" and len(instruction.shapes) > _DKV_RESULTS:
        of_width += 1
    width = of_width * query.dims[-1] + of_value_width * value.dims[-1]
    computed, blocks = _blocks(instruction) or (1, 1)
    rows = query.size // query.dims[-1]  # for all heads and batch rows
    return 2 * rows * key.dims[-2] * width * computed // blocks


def counted_whole(instruction: Instruction) -> bool:
    """Whether `flops` counted all blocks of flash attention because their number is not known.

    Args:
        instruction: The kernel.
    """
    unsaid = stated(instruction, "flops") is None and _blocks(instruction) is None
    return unsaid and _splash(instruction) is not None


def _splash(instruction: Instruction) -> str | None:
    if not is_kernel(instruction) or _TRANSPOSED.search(instruction.attributes):
        return None
    match = _SPLASH.search(instruction.op_name) or _SPLASH.search(instruction.name)
    return match[1] if match else None


def _blocks(instruction: Instruction) -> tuple[int, int] | None:
    match = _BLOCKS.search(instruction.op_name)
    return (int(match[1]), int(match[2])) if match else None


def _attention_arrays(operands: list[Instruction]) -> tuple[Shape, Shape, Shape] | None:
    """Query, key and value: the first floats, after the integers that select the blocks."""
    floats = [s for o in operands for s in o.shapes[:1] if s.dtype in ("f32", "bf16")]
    found = floats[:3]
    if len(found) < 3 or any(len(s.dims) < 2 for s in found):
        return None
    return found[0], found[1], found[2]
