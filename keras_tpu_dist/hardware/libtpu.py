"""JAX and libtpu on machines without a TPU."""

import glob
import os

import jax

from keras_tpu_dist._keras import jax_backend_started

# Device files of TPUs, and of NVIDIA's and AMD's GPUs.
_CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")
_ACCELERATORS = (*_CHIPS, "/dev/nvidia[0-9]*", "/dev/kfd")


def chip_files() -> list[str]:
    """The device files of this machine that look like those of TPU chips."""
    return sorted(file for pattern in _CHIPS for file in glob.glob(pattern))


def start_without_tpu() -> None:
    """Keeps JAX on the CPU if libtpu is installed without a TPU or GPU, before JAX starts.

    Otherwise JAX tries the TPU first, and prints five lines of warnings.
    """
    attached = any(map(glob.glob, _ACCELERATORS))
    if not (attached or jax_backend_started() or os.environ.get("JAX_PLATFORMS")):
        jax.config.update("jax_platforms", "cpu")


def libtpu_environment() -> dict[str, str]:
    """Environment variables for a process that compiles with libtpu without a TPU.

    They keep JAX on the CPU, silence libtpu, stop it from asking a metadata server about the
    machine, and allow several processes to load it at once.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # One heap for all threads: compiling the step of a billion-parameter model peaked at 1.26
        # GB instead of 1.52 GB, without more CPU time.
        "MALLOC_ARENA_MAX": "1",
    }
