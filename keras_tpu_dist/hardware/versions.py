"""Versions of JAX and of libtpu that are known to compute wrongly, and what avoids it."""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

import jaxlib

from keras_tpu_dist.common.once import log_once

# By the version of jaxlib, which contains the CPU's compiler. `tests/versions/test_versions.py`
# runs the report's program on the installed version.
KNOWN_WRONG: dict[str, str] = {
    "0.10.2": "sums of products over more than 16384 rows on CPU (jax-ml/jax 39103)",
}

DISABLED_PASSES = "xla_disable_hlo_passes"

Version = tuple[int, ...]


@dataclass(frozen=True)
class TpuFault:
    """A fault of libtpu, which compiles for TPUs and is released apart from jaxlib.

    Args:
        mended: The first version without it, or `None` if none is known.
        passes: The compiler's passes that must not run; `()` if nothing avoids it.
        program: The program of tests and checks that shows it, or `""`.
    """

    report: str
    what: str
    first: Version
    mended: Version | None
    passes: tuple[str, ...] = ()
    program: str = ""

    def is_in(self, version: Version | None) -> bool:
        """Whether a version of libtpu has it.

        Args:
            version: The version. `None`, an unknown one, may have it if it can be avoided: that
                costs next to nothing, and a warning without a reason would be noise.
        """
        if version is None:
            return bool(self.passes)
        return self.first <= version and (self.mended is None or version < self.mended)


# docs/versions.md has a row for every one; `tests/replay/test_verify.py` runs their programs.
TPU_FAULTS = (
    TpuFault(
        "openxla/xla 49143",
        "sums of scattered rows that a loop adds up, such as counts of ids with several steps per "
        "launch",
        # The pass moves such sums since openxla/xla 36224. No older libtpu runs with a jax that
        # this package supports.
        (0, 0, 36),
        (0, 0, 50),
        ("while-loop-all-reduce-code-motion",),
        "counts",
    ),
    TpuFault(
        "jax-ml/jax 39025",
        "gradients of x[:, indices, :] outside of jit",
        (0, 0, 42),
        (0, 0, 43),
    ),
    TpuFault(
        "vllm-project/tpu-inference 3329",
        'results that its report does not name ("Known bug in 0.45")',
        (0, 0, 45),
        (0, 0, 46),
    ),
    TpuFault(
        # The change of 0.0.50 does not cover these; found by `strategy.verify_run` on 0.0.50.1.
        "openxla/xla 49143",
        "sums over replicas that a loop adds up, as in strategy.run with several steps per launch",
        (0, 0, 50),
        None,
        ("while-loop-all-reduce-code-motion",),
    ),
)


def warn_of_wrong_jax() -> None:
    """Warns once if the installed JAX is known to give wrong results."""
    what = KNOWN_WRONG.get(jaxlib.__version__)
    if what is not None:
        log_once(
            f"jaxlib {jaxlib.__version__} is known to give wrong results: {what}. Install another: "
            "pip install 'jax>=0.10.1,!=0.10.2'.",
            logging.WARNING,
        )


def libtpu_version() -> Version | None:
    """The version of the TPU compiler that JAX loads, or `None` if it is unknown."""
    path = os.environ.get("TPU_LIBRARY_PATH", "")
    # JAX sets the variable itself, to the library of the package.
    if path and os.path.basename(os.path.dirname(path)) != "libtpu":
        return None
    for package in ("libtpu", "libtpu-nightly"):
        try:
            numbers = re.match(r"\d+(?:\.\d+)*", metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
        return tuple(int(n) for n in numbers[0].split(".")) if numbers else None
    return None


def tpu_faults(version: Version | None) -> tuple[TpuFault, ...]:
    """The known faults of a version of libtpu."""
    return tuple(fault for fault in TPU_FAULTS if fault.is_in(version))


def warn_of_wrong_libtpu(faults: Iterable[TpuFault]) -> None:
    """Warns once of every fault that nothing avoids."""
    for fault in faults:
        if not fault.passes:
            log_once(
                f"libtpu {version_text(libtpu_version())} is known to compute wrongly: "
                f"{fault.what} ({fault.report}). Install another, with the jax that belongs to it: "
                "pip install --upgrade 'jax[tpu]'.",
                logging.WARNING,
            )


def version_text(version: Version | None) -> str:
    """A version as text."""
    return "of an unknown version" if version is None else ".".join(map(str, version))


def disabled_passes(faults: Iterable[TpuFault], given: str | None) -> str:
    """The value of `xla_disable_hlo_passes` that avoids faults.

    A value that you give for a process, in `LIBTPU_INIT_ARGS` or `XLA_FLAGS`, or for a strategy
    stays in force: the option replaces it, so it is repeated.

    Args:
        faults: As `tpu_faults` returns them.
        given: The value given for a strategy, or `None`. An empty one switches all of this off.

    Returns:
        The names of passes with commas between them; `""` if all passes run.
    """
    if given == "":
        return ""
    passes = list(dict.fromkeys(name for fault in faults for name in fault.passes))
    if not passes and given is None:
        return ""
    flags = " ".join(os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"))
    of_process = re.findall(rf"--{DISABLED_PASSES}=(\S+)", flags)
    named = [name for text in (*of_process, given or "") for name in text.split(",") if name]
    return ",".join(dict.fromkeys([*named, *passes]))
