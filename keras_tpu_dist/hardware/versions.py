"""Versions of JAX that are known to give wrong results."""

import logging

import jaxlib

from keras_tpu_dist.common.once import log_once

# By the version of jaxlib, which contains the compiler. `tests/versions/test_versions.py` runs the
# first report's program on the installed version.
KNOWN_WRONG: dict[str, str] = {
    "0.10.2": "sums of products over more than 16384 rows on CPU (jax-ml/jax 39103), and gradients "
    "of x[:, i, :] outside of jit on TPU (jax-ml/jax 39025)",
}


def warn_of_wrong_jax() -> None:
    """Warns once if the installed JAX is known to give wrong results."""
    what = KNOWN_WRONG.get(jaxlib.__version__)
    if what is not None:
        log_once(
            f"jaxlib {jaxlib.__version__} is known to give wrong results: {what}. Install another: "
            "pip install 'jax>=0.10.1,!=0.10.2'.",
            logging.WARNING,
        )
