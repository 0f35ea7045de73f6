"""What the compiler is told beside the program: to compute while it sums gradients."""

from collections.abc import Mapping
from typing import Any

import jax

from keras_tpu_dist.common.errors import message

# Matrix products run while a gradient is summed over a torus, for which the chips else wait: in
# MaxText's recipes CF_FOR_ALL_REDUCE, of which the rest is libtpu's default (0.0.42 and 0.0.50).
OVERLAP: dict[str, Any] = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
# Products stay whole, which XLA else cuts into rings of small ones, MaxText's
# DISABLE_COLLECTIVE_MATMUL. On more than 8 chips the rings take longer than what they hide; on 8,
# whose transfers they do overlap with, they save 5 % (`python benchmarks/overlap.py`).
WHOLE_PRODUCTS: dict[str, Any] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
_MOST_IN_RINGS = 8


def checked_compiler_options(options: Any) -> Any:
    """Compiler options as a strategy takes them, checked.

    Args:
        options: `"auto"`, `None`, or a mapping from the names of options to values.

    Raises:
        ValueError: If it is none of those, or a name or value can be none of an option.
    """
    values = (str, bool, int, float)
    plain = isinstance(options, Mapping) and all(
        isinstance(name, str) and isinstance(value, values) for name, value in options.items()
    )
    if not (plain or options is None or options == "auto"):
        raise ValueError(
            message(
                "compiler_options is 'auto', None, or a dict from XLA's names of options to "
                "strings, booleans or numbers.",
                received={"compiler_options": options},
                fix='Write for example {"xla_enable_async_all_reduce": False}.',
            )
        )
    return options if options is None or options == "auto" else dict(options)


def options_for(options: Any, platform: str, devices: int) -> dict[str, Any] | None:
    """What to give `jax.jit` as `compiler_options`.

    Args:
        options: As `checked_compiler_options` gives them.
        platform: The devices' platform, such as `"tpu"`.
        devices: The number of devices of the mesh.

    Returns:
        The options, those given added to those chosen; `None` for the compiler's own defaults.

    References:
        - MaxText, benchmarks/xla_flags_library.py
    """
    if options is None:
        return None
    chosen = OVERLAP if platform == "tpu" else {}
    if platform == "tpu" and devices > _MOST_IN_RINGS:
        chosen = {**chosen, **WHOLE_PRODUCTS}
    return {**chosen, **({} if options == "auto" else options)} or None


def check_known(options: Mapping[str, Any] | None, device: Any) -> None:
    """Raises if the compiler of a device does not know an option, before a model is compiled.

    Args:
        options: What a user gave, or `None`.
        device: A device that this process can compile for.

    Raises:
        ValueError: If there is no such option, or it has no such value.
    """
    if not options:
        return
    program = jax.jit(lambda: 0, compiler_options=dict(options))
    with jax.default_device(device):
        try:
            program.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                message(
                    "compiler_options are options of XLA that the devices' compiler knows.",
                    received=f"{dict(options)}, of which XLA says: {error}",
                    fix=f"Leave out what is not for {device.platform!r}, or correct it.",
                )
            ) from error
