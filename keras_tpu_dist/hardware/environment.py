"""The environment that makes JAX see virtual CPU devices. Imports no JAX, for the launcher."""

import os
import re

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Eight virtual devices on two cores deadlock in XLA's all-reduce rendezvous: every device blocks a
# thread of a pool with one thread per core. Four threads per device were enough in all
# measurements.
_THREADS_PER_DEVICE = 4


def simulated_environment(num_devices: int) -> dict[str, str]:
    """The environment variables that make JAX see virtual CPU devices.

    Args:
        num_devices: Number of virtual devices, at least 1.
    """
    flags = re.sub(rf"{DEVICE_COUNT_FLAG}=\S*", "", os.environ.get("XLA_FLAGS", "")).split()
    threads = max(_THREADS_PER_DEVICE * num_devices, int(os.environ.get("PJRT_NPROC") or 0))
    return {
        "XLA_FLAGS": " ".join([*flags, f"{DEVICE_COUNT_FLAG}={num_devices}"]),
        "PJRT_NPROC": str(threads),
        "JAX_PLATFORMS": "cpu",
    }
