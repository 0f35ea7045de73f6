"""Runs the compiler in a separate process, and reports its answer."""

import dataclasses
import importlib.util
import math
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from keras_tpu_dist.common.errors import runtime_error
from keras_tpu_dist.common.forms import DictOf, ListOf, fits
from keras_tpu_dist.hardware.compiler_options import warn_of_refused
from keras_tpu_dist.hardware.libtpu import libtpu_environment
from keras_tpu_dist.hardware.topology import CHIPS, Topology
from keras_tpu_dist.show.progress import excused
from keras_tpu_dist.tools.dryrun import worker
from keras_tpu_dist.tools.dryrun.build import ToCompile
from keras_tpu_dist.tools.dryrun.cache import Cache, key_of
from keras_tpu_dist.tools.dryrun.state_bytes import total_of

# Quick against exact on v5e:2x4 (benchmarks/dry_run.py): a 12-layer transformer 31 and 90 CPU
# seconds, peak memory 2.57 and 2.74 GiB, cycles 2.5 times; two LSTM layers 5 and 16 CPU seconds,
# 126 and 38 MiB, cycles 2.4 times; MobileNetV2 28 and 52 CPU seconds, 169 and 78 MiB, 2.2 times.
EFFORTS: dict[str, dict[str, str]] = {
    "quick": {"xla_optimization_level": "EFFORT_O1"},
    "exact": {},
}
_NUMBER = re.compile(r"\(([\d.]+)([KMGT]?)\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_NO_ARGUMENTS = re.compile(r"^\s*arguments\s+0B\s*$", flags=re.MULTILINE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization.*?op_name=\"([^\"]*)\"", flags=re.DOTALL
)


# Warnings go to the log that we read: the partitioner warns if it gives up.
_LOG_WARNINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_STDERR_LOG_LEVEL": "1",
}


@dataclass(frozen=True)
class Compiled:
    """The compiler's result for a program, or its error.

    Args:
        text: The program, `""` after an error.
        memory: Bytes on one device: `arguments`, `outputs`, `aliased`, `temporaries`, `code`; and
            `peak`, their maximum at one time.
        error: The compiler's message if it refused the program for its memory, else `None`.
        rematerialized: Name stacks at which the partitioner gave up and gathers a whole array.
        effort: `"quick"` or `"exact"`.
        compiled_for: The slice, or `"CPU"`.
        seconds: Wall time of the compiling process.
        cpu_seconds: Its CPU time.
        peak_process_bytes: Its peak memory.
        refused_options: Options that were left out, with the compiler's message about them.
    """

    text: str
    memory: dict[str, int]
    error: str | None
    rematerialized: tuple[str, ...]
    effort: str
    compiled_for: str
    seconds: float
    cpu_seconds: float
    peak_process_bytes: int
    refused_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """HBM that the program needs on one device."""
        return total_of(self.memory)


@dataclass(frozen=True)
class How:
    """How a step is compiled. See `dry_run`.

    Args:
        timeout: Seconds after which a compilation is stopped.
        thorough: Whether to compile a program near the memory limit again at full effort, and one
            that does not fit for a larger slice, to see what needs the memory.
        cache: The cache of compilations. With it, the compiler's messages name no source lines.
        progress: Called with a line of text at every stage.
    """

    effort: str = "quick"
    timeout: float = 1800.0
    thorough: bool = False
    cache: Cache | None = None
    progress: Callable[[str], Any] | None = None


_USUAL = (
    "keras_tpu_dist: the TPU compiler is at work. Most models take it 10 seconds to 3 minutes, "
    "language models of billions of weights up to 10."
)


def has_libtpu() -> bool:
    """Whether the TPU compiler is installed; nothing is loaded."""
    return importlib.util.find_spec("libtpu") is not None


def job_of(lowered: ToCompile, effort: str, topology: Topology | None = None) -> dict[str, Any]:
    """What the separate process is to compile.

    Args:
        effort: `"quick"` or `"exact"`.
    """
    target = topology or lowered.topology
    devices = lowered.devices if topology is None else topology.devices()
    return {
        "program": lowered.program,
        "topology": None if target is None else target.libtpu_arguments(),
        "places": [_place(d) for d in devices],
        "axes": lowered.axes,
        "donate": lowered.donate,
        "x64": bool(jax.config.read("jax_enable_x64")),
        "compiler_options": {
            **(EFFORTS[effort] if target is not None else {}),
            **(lowered.compiler_options or {}),
        },
        "optional_options": list(lowered.optional_options),
    }


def run_compiler(
    lowered: ToCompile, job: dict[str, Any], timeout: float, where: str
) -> tuple[dict[str, Any], str]:
    """Runs the compiler once.

    Returns:
        The process's result, with `"error"` if the program does not fit into HBM; and its log.

    Raises:
        RuntimeError: If the compiler aborts, takes too long, or refuses the program for a reason
            other than memory.
    """
    on_cpu = job["topology"] is None
    environment = cpu_environment(len(job["places"])) if on_cpu else libtpu_environment()
    with excused(_USUAL):
        result, log = run_job(job, environment, timeout, where)
    error = result.get("error")
    if error and not is_about_hbm(error):
        raise runtime_error(
            "The compiler refused the program.",
            received=f"{error} (compiling for {where}).",
            fix=_fix_of(error, lowered),
        )
    return result, log


def compile_lowered(
    lowered: ToCompile,
    *,
    effort: str = "quick",
    timeout: float,
    topology: Topology | None = None,
    cache: Cache | None = None,
) -> Compiled:
    """Compiles a lowered step in a new process, or reads the result from the cache.

    Args:
        lowered: The step.
        effort: `"quick"` or `"exact"`.
        timeout: Seconds after which the compiler is stopped.
        topology: Another slice with as many devices to compile for.
        cache: The cache of compilations, which also has their times.

    Returns:
        The `Compiled`; its `error` is set if the program does not fit into HBM.

    Raises:
        RuntimeError: If the compiler aborts, takes too long, or refuses the program for a reason
            other than memory.
    """
    target = topology or lowered.topology
    job = job_of(lowered, effort, topology)
    where = "CPU" if target is None else target.name
    key = "" if cache is None else key_of(job)
    if cache is not None and (found := _cached(cache.get(key))) is not None:
        if topology is None:
            warn_of_refused(found.refused_options, where)
        return found
    result, log = run_compiler(lowered, job, timeout, where)
    if (whole := lowered.without_exchange(result.get("text", ""))) is not None:
        result, log = run_compiler(whole, job_of(whole, effort, topology), timeout, where)
    error = result.get("error")
    refused = result.get("refused_options", {})
    if topology is None:  # a larger slice's compiler need not be reported
        warn_of_refused(refused, where)
    compiled = Compiled(
        text=result.get("text", ""),
        memory=result.get("memory", {}),
        error=error,
        rematerialized=tuple(dict.fromkeys(_REMATERIALIZED.findall(log))),
        effort=effort if target is not None else "exact",
        compiled_for=where,
        seconds=result["seconds"],
        cpu_seconds=result["cpu_seconds"],
        peak_process_bytes=result["peak_bytes"],
        refused_options=refused,
    )
    if cache is not None:
        cache.put(key, dataclasses.asdict(compiled))
    return compiled


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


_MEMORY = dict.fromkeys(
    ("arguments", "outputs", "aliased", "temporaries", "code", "peak"), _is_amount
)
# Of an entry of the cache, which anybody who may write into its folder has written.
_FORM = {
    **dict.fromkeys(("text", "effort", "compiled_for"), str),
    **dict.fromkeys(("seconds", "cpu_seconds", "peak_process_bytes"), _is_amount),
    "memory": DictOf(_is_amount),
    "error": (None, str),
    "rematerialized": ListOf(str),
    "refused_options": DictOf(str),
}


def _cached(entry: Any) -> Compiled | None:
    """The result from a cache entry, unless it has another form, as that of another version."""
    if not fits(entry, _FORM) or set(entry) != set(_FORM):
        return None
    # A program that does not fit has no figures of memory.
    if not (entry["error"] or fits(entry["memory"], _MEMORY)):
        return None
    values = {**entry, "rematerialized": tuple(entry["rematerialized"])}
    return Compiled(**values)


# How XLA's messages about options begin: a value or a combination that it refuses, or an unknown
# name.
_ABOUT_OPTIONS = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "No such compile option")


def _fix_of(error: str, lowered: ToCompile) -> str:
    given = {
        name: value
        for name, value in (lowered.compiler_options or {}).items()
        if name not in lowered.optional_options
    }
    if given and any(words in error for words in _ABOUT_OPTIONS):
        return (
            f"If it is about an option: the strategy's compiler_options are {given}; leave out the "
            "one that it names, or pass compiler_options=None for the compiler's own defaults."
        )
    return (
        "This is the compiler's own message; to see what it cannot split, look at the layer that "
        "it names, or try a smaller mesh."
    )


def larger_twin(lowered: ToCompile) -> Topology | None:
    """The slice with as many devices and the most memory per device, to size what does not fit.

    Args:
        lowered: The step that does not fit.

    Returns:
        The slice, of v5p; `None` if the step is not for a TPU slice, if its own devices have as
        much memory, or if no v5p slice has as many devices.
    """
    if lowered.topology is None:
        return None
    chip = CHIPS["v5p"]
    if chip.device_hbm_bytes <= lowered.topology.hbm_bytes:
        return None
    try:
        return Topology.parse(f"{chip.name}-{lowered.topology.num_devices * chip.cores}")
    except ValueError:
        return None


def is_about_hbm(error: str) -> bool:
    """Whether a program was refused for the memory of its device, not for that of one kernel.

    Args:
        error: The compiler's message.
    """
    return "RESOURCE_EXHAUSTED" in error and not ("vmem" in error and "hbm" not in error.lower())


def bytes_in_message(error: str, *, argument_bytes: int) -> tuple[int, ...]:
    """The sizes that an out-of-memory message states, `(21.22G)` as bytes.

    libtpu 0.0.42 and newer count the arguments too, although the message speaks of temporaries:
    32.03G for a program with arguments of 16.02 and temporaries of 16.05 GiB. For the same program,
    libtpu 0.0.41 reports "Used 16.05G of 15.75G hbm", and "arguments 0B" in the table below.

    Args:
        error: The compiler's message.
        argument_bytes: Bytes of the program's arguments, for messages that leave them out.

    Returns:
        The bytes that the program needs, then the other sizes in the order of the message; `()` if
        it states none.
    """
    used = _USED.search(error)
    if used is None:
        return tuple(_bytes(n, unit) for n, unit in _NUMBER.findall(error))
    needed, limit = _bytes(used[1], used[2]), _bytes(used[3], used[4])
    return needed + (argument_bytes if _NO_ARGUMENTS.search(error) else 0), limit


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _place(device: object) -> tuple[int, ...]:
    if hasattr(device, "coords"):
        slice_index = getattr(device, "slice_index", None) or 0
        return (slice_index, *device.coords, device.core_on_chip)
    return (device.id,)


def cpu_environment(num_devices: int) -> dict[str, str]:
    """A CPU that looks like several devices, with threads enough for all of them."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "PJRT_NPROC": str(4 * num_devices),
    }


def run_job(
    job: dict[str, Any], environment: dict[str, str], timeout: float, where: str
) -> tuple[dict[str, Any], str]:
    """Runs a job in a process of its own.

    Raises:
        RuntimeError: If it ends without a result, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="keras_tpu_dist_") as folder:
        job_path, result_path, log_path = (str(Path(folder, n)) for n in ("job", "result", "log"))
        Path(job_path).write_bytes(pickle.dumps(job))
        code = worker.run(
            job_path,
            result_path,
            env={**os.environ, **environment, **_LOG_WARNINGS},
            log=log_path,
            timeout=timeout,
        )
        if code is None:
            raise runtime_error(
                "The compiler must finish within the timeout.",
                received=f"timeout={timeout:g} seconds, compiling for {where}.",
                fix='Pass a longer timeout=..., or effort="quick", or a model with fewer layers.',
            )
        log = Path(log_path).read_text(errors="replace")
        if os.path.exists(result_path):
            return pickle.loads(Path(result_path).read_bytes()), log
    last = " | ".join(line for line in log.strip().splitlines()[-6:] if line.strip())
    raise runtime_error(
        "The compiling process must not end before it has an answer.",
        received=f"exit code {code}, compiling for {where}. Its last output: {last or '(none)'}.",
        fix="Exit code -9 means that the machine ran out of memory; -6 is an abort inside the "
        "compiler, which you can only avoid by a smaller program or another slice.",
    )
