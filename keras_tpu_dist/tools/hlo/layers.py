"""The Keras layer that an instruction comes from, by its name stack."""

import functools
import re
from collections.abc import Callable, Collection, Iterable

from keras_tpu_dist.common.scopes import LAST_OF, RARE_BRANCH

# Words that JAX and XLA put around the names from Keras in a name stack.
_WRAPPED = re.compile(r"(?:jvp|vmap|remat|checkpoint|custom_jvp|custom_vjp)\(([^()]*)\)")
# The backward pass of what is computed again: its scopes stand twice, transposed and as they were.
_AGAIN = re.compile(r"(transpose\(jvp\(([^()]*)\)\)((?:/[^/]+)*?))/jvp\(\2\)\3(?=/checkpoint/)")
_STRUCTURE = {
    "while",
    "body",
    "cond",
    "closed_call",
    "eval_jaxpr",
    "call_exported",
    "checkpoint",
    "rematted_computation",
    "remat",
    "shard_map",
    "on_one_device",
    RARE_BRANCH,
}
_BRANCH = re.compile(rf"branch_\d+_fun|{LAST_OF.format('[0-9]+')}")
OTHER = "(other)"


def names(op_name: str, known: Collection[str] = ()) -> tuple[str, ...]:
    """The scopes in a name stack, outermost first, without the operation's own name.

    Args:
        op_name: The name stack, scopes joined by `/`; what follows a `;` is left out.
        known: Names of layers, which stay although JAX has a name like theirs.

    Example:

    >>> from keras_tpu_dist.tools.hlo.layers import names
    >>> names("jit(call)/call_exported/jit(train_step)/transpose(jvp(block))/dense/dot_general")
    ('block', 'dense')
    >>> names("transpose(jvp(block))/jvp(block)/checkpoint/rematted_computation/dense/dot_general")
    ('block', 'dense')
    """
    stack = _AGAIN.sub(r"\1", op_name.partition(";")[0])
    stack = stack.replace("transpose(", "(")
    while True:
        inner = _WRAPPED.sub(r"\1", stack)
        if inner == stack:
            break
        stack = inner
    scopes = [s.strip("()") for s in re.sub(r"jit\([^()]*\)", "", stack).split("/")[:-1]]
    return tuple(
        scope
        for before, scope, after in zip(
            ("", *scopes), scopes, (*scopes[1:], ""), strict=False
        )  # neighbours
        if scope and not _is_structure(before, scope, after, known)
    )


def _is_structure(before: str, scope: str, after: str, known: Collection[str]) -> bool:
    if _are_jax(before, scope) or _are_jax(scope, after):
        return True
    return (scope in _STRUCTURE or _BRANCH.fullmatch(scope) is not None) and scope not in known


def _are_jax(outer: str, inner: str) -> bool:
    """Whether two scopes are a loop or a conditional and its part."""
    loop = outer == "while" and inner in ("body", "cond")
    branch = outer == "cond" and _BRANCH.fullmatch(inner) is not None
    return loop or branch


def phase(op_name: str) -> str:
    """`"backward"` for what differentiation transposed, else `"forward"`.

    Args:
        op_name: The name stack of an instruction.
    """
    return "backward" if "transpose(" in op_name else "forward"


# From a name stack to a layer.
LayerOf = Callable[[str], str]


def layers_of(known: Iterable[str] = ()) -> LayerOf:
    """A function from name stacks to the layers of a model.

    Args:
        known: Names of the model's layers, optimizer and so on. Without any, the outermost scope
            counts as the layer.
    """
    known = frozenset(known)

    # Each layer has hundreds of instructions.
    @functools.lru_cache(maxsize=4096)
    def layer_of(op_name: str) -> str:
        scopes = names(op_name, known)
        places = [i for i, scope in enumerate(scopes) if scope in known]
        return "/".join(scopes[: places[-1] + 1 if places else 1]) or OTHER

    return layer_of
