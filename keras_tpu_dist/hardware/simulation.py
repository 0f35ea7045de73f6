"""Virtual CPU devices, with which a laptop simulates a slice."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from keras_tpu_dist._keras import jax_backend_started
from keras_tpu_dist.common.checks import PositiveInt, checked_arguments
from keras_tpu_dist.common.errors import runtime_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.hardware.environment import DEVICE_COUNT_FLAG, simulated_environment
from keras_tpu_dist.hardware.libtpu import chip_files

logger = logging.getLogger("keras_tpu_dist")


@checked_arguments
def simulate(num_devices: PositiveInt = 8) -> None:
    """Makes the CPU appear to JAX as `num_devices` devices.

    Call it before JAX starts its backend, that is, before the first array, `jax.devices()` or Keras
    variable. You may import jax, keras or this package before. It selects the CPU platform, splits
    it, and starts enough XLA threads; with fewer, the devices can deadlock in an all-reduce on a
    machine with few cores. A second call with the same number does nothing.

    Args:
        num_devices: Number of virtual devices, at least 1.

    Raises:
        ValueError: If `num_devices` is not a positive integer.
        RuntimeError: If JAX has already started with other devices.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> ktd.simulate(8)
    >>> import jax
    >>> len(jax.devices())
    8
    """
    import jax

    if jax_backend_started():
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) == num_devices:
            return
        raise runtime_error(
            "simulate() must run before JAX starts.",
            received=f"num_devices={num_devices}, but JAX already runs on {len(devices)} "
            f"device(s) of platform {devices[0].platform!r}.",
            fix="Call ktd.simulate() right after the imports, before the first array, model "
            "or jax.devices(); in a notebook, restart the kernel first.",
        )
    if chips := chip_files():
        logger.warning(
            "simulate(%d) trains on the CPU, though this machine seems to have TPU chips (%s); to "
            "use them, remove the call",
            num_devices,
            ", ".join(chips),
        )
    os.environ.update(simulated_environment(num_devices))
    # jax read its environment when it was imported, maybe before this line.
    jax.config.update("jax_platforms", "cpu")
    logger.info("simulating %d CPU devices with %s threads", num_devices, os.environ["PJRT_NPROC"])


def warn_without_tpu(devices: Sequence[Any]) -> None:
    """Warns once if a strategy found a CPU instead of a TPU, unless you chose the CPU.

    Args:
        devices: The devices of the strategy's mesh.
    """
    # `simulate` sets this flag, or a user who splits the CPU without it.
    asked = DEVICE_COUNT_FLAG in os.environ.get("XLA_FLAGS", "")
    if asked or any(device.platform != "cpu" for device in devices):
        return
    log_once(
        f"no TPU was found, so models train on {len(devices)} CPU device(s): "
        f"{_why_no_tpu()}. On a TPU VM install libtpu with pip install 'jax[tpu]'; to try a mesh "
        "on this machine, call ktd.simulate(8) right after the imports (in a notebook, restart the "
        "kernel first).",
        logging.WARNING,
    )


def _why_no_tpu() -> str:
    """The reason, as JAX reports it."""
    import jax

    platforms = jax.config.jax_platforms
    if platforms and "tpu" not in platforms:
        return f"JAX_PLATFORMS is {platforms!r}"
    try:
        jax.devices("tpu")
    except RuntimeError as error:
        return " ".join(str(error).split())
    return "JAX has a TPU, but the strategy got other devices"
