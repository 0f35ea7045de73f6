"""Compiler options by chip, which let it compute while gradients are summed, and by libtpu's
version, which keep it from computing wrongly."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.hardware.option_trial import first_line, refused_options
from keras_tpu_dist.hardware.versions import (
    DISABLED_PASSES,
    disabled_passes,
    libtpu_version,
    tpu_faults,
    version_text,
    warn_of_wrong_libtpu,
)

# Matrix products run while a gradient is summed over a torus; without this, the chips wait. It is
# CF_FOR_ALL_REDUCE in MaxText's recipes; the rest of that is libtpu's default (0.0.42 and 0.0.50).
# For v5e only: from 0.0.48 on, libtpu refuses the two options together on every other chip, because
# there they "might lead to ... incorrect results, hang, SDC"; 0.0.40 to 0.0.42 accept them
# silently.
OVERLAP: dict[str, Any] = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    # Small gradients are summed together, large ones one by one: a hundred megabytes in one
    # all-reduce, which is the compiler's choice, have nothing to run beside
    # (`python benchmarks/fsdp.py`).
    "xla_jf_crs_combiner_threshold_in_bytes": 4 * 2**20,
}
# Products stay whole; without this, XLA cuts them into rings of small ones. It is MaxText's
# DISABLE_COLLECTIVE_MATMUL. On more than 8 chips the rings take longer than the transfers they
# hide; on 8 chips, where they do overlap, they save 5 %. If every device has whole weights, a step
# takes 6 to 8 % longer with this option (`python benchmarks/overlap.py`).
WHOLE_PRODUCTS: dict[str, Any] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
_MOST_IN_RINGS = 8
# From this libtpu on, rings abort the compiler where an axis of the mesh is manual: "Check failed:
# !UseNamedShardingLeaf() ReplicateOnLastTileDim should not be called for HloShardingV3".
_RINGS_ABORT = (0, 0, 50)
_BY_KIND: dict[str, dict[str, Any]] = {"TPU v5 lite": OVERLAP}


def checked_compiler_options(options: Any) -> Any:
    """Checks the compiler options of a strategy.

    Args:
        options: `"auto"`, `None`, or a mapping from the names of options to values.
    """
    values = (str, bool, int, float)
    plain = isinstance(options, Mapping) and all(
        isinstance(name, str) and isinstance(value, values) for name, value in options.items()
    )
    if not (plain or options is None or options == "auto"):
        raise value_error(
            "compiler_options is 'auto', None, or a dict from XLA's names of options to "
            "strings, booleans or numbers.",
            received={"compiler_options": options},
            fix='Write for example {"xla_enable_async_all_reduce": False}.',
        )
    return options if options is None or options == "auto" else dict(options)


def uses_rings(devices: int, split: bool = True) -> bool:
    """Whether `"auto"` leaves matrix products on a TPU to be cut into rings.

    Args:
        devices: The number of devices of the mesh.
        split: Whether weights or slots may be split over them.
    """
    return devices <= _MOST_IN_RINGS or not split


def options_for(
    options: Any, device: Any, devices: int, split: bool = True
) -> dict[str, Any] | None:
    """What to give `jax.jit` as `compiler_options`.

    Args:
        options: As `checked_compiler_options` gives them.
        device: A device of the mesh, attached or described.
        devices: The number of devices of the mesh.
        split: Whether weights or slots may be split over them.

    Returns:
        The options given, and with them those chosen for this generation of chips; `None` for the
        compiler's own defaults. Passes that are known to compute wrongly are left out in any case.

    References:
        - MaxText, benchmarks/xla_flags_library.py
    """
    given = _given(options)
    chosen = _chosen_for(options, device, devices, split)
    options = {**chosen, **given}
    if DISABLED_PASSES in chosen:  # it contains what was given
        options[DISABLED_PASSES] = chosen[DISABLED_PASSES]
    return options or None


def chosen_names(options: Any, device: Any, devices: int, split: bool = True) -> tuple[str, ...]:
    """The options of `options_for` that you did not ask for, so a compiler may go without them.

    Args:
        options: As `checked_compiler_options` gives them.
        device: A device of the mesh, attached or described.
        devices: The number of devices of the mesh.
        split: Whether weights or slots may be split over them.
    """
    chosen = _chosen_for(options, device, devices, split)
    return tuple(name for name in chosen if name not in _given(options))


def for_replicas(options: dict[str, Any] | None, device: Any) -> dict[str, Any] | None:
    """The options for code that runs in each replica: the axes of the batch are manual there.

    Args:
        options: Those for the steps of a model.
        device: One of the devices.
    """
    version = libtpu_version()
    if device.platform != "tpu" or (version is not None and version < _RINGS_ABORT):
        return options
    return {**WHOLE_PRODUCTS, **(options or {})}


def accepted(options: Any, mesh: Mesh, split: bool = True) -> dict[str, Any] | None:
    """`options_for` attached devices, less what their compiler refuses.

    What was chosen and is refused is left out, with one WARNING for each option. It takes one
    compilation of a small program, some 0.3 s, in the process and on TPUs only.

    Args:
        options: As `checked_compiler_options` gives them.
        mesh: A mesh of attached devices.
        split: Whether weights or slots may be split over them.

    Returns:
        The options, or `None` for the compiler's own defaults.
    """
    first = mesh.devices.flat[0]
    wanted = options_for(options, first, mesh.size, split)
    if wanted is None or not mesh.local_devices:
        return wanted
    try:
        refused = refused_options(
            wanted, chosen_names(options, first, mesh.size, split), mesh.local_devices
        )
    except jax.errors.JaxRuntimeError as error:
        raise value_error(
            "compiler_options are options of XLA that the devices' compiler knows.",
            received=f"{_given(options)}, of which XLA says: {error}",
            fix=f"Leave out what is not for {first.platform!r}, or correct it.",
        ) from error
    warn_of_refused(refused, first.device_kind)
    return {name: value for name, value in wanted.items() if name not in refused} or None


def warn_of_refused(refused: Mapping[str, str], where: str) -> None:
    """Logs one WARNING for each option that a compiler does not take.

    Args:
        refused: From names of options to what the compiler says of each.
        where: The kind of the devices, or the name of a slice.
    """
    for name, why in refused.items():
        if name == DISABLED_PASSES:
            wrong = "; ".join(f"{f.what} ({f.report})" for f in tpu_faults(libtpu_version()))
            log_once(
                f"libtpu {version_text(libtpu_version())} refuses {name} ({first_line(why)}), "
                f"which keeps it from computing wrongly: {wrong}. Install another: "
                "pip install --upgrade 'jax[tpu]'.",
                logging.WARNING,
            )
            continue
        log_once(
            f"compiler option {name} is left out: the compiler for {where} refuses it "
            f"({first_line(why)}). compiler_options={{...}} sets it, compiler_options=None leaves "
            "all options to the compiler.",
            logging.WARNING,
        )


def _given(options: Any) -> dict[str, Any]:
    return {} if options in ("auto", None) else dict(options)


def _chosen_for(options: Any, device: Any, devices: int, split: bool) -> dict[str, Any]:
    if device.platform != "tpu":
        return {}
    faults = tpu_faults(libtpu_version())
    warn_of_wrong_libtpu(faults)
    passes = disabled_passes(faults, _given(options).get(DISABLED_PASSES))
    right = {DISABLED_PASSES: passes} if passes else {}
    if options is None:
        return right
    whole = {} if uses_rings(devices, split) else WHOLE_PRODUCTS
    return {**_BY_KIND.get(device.device_kind, {}), **whole, **right}
