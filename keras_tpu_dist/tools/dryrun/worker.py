"""Compiles one exported program in a separate process: both ends. Imports no Keras.

    python -P dryrun_worker.py JOB RESULT PARENT < PIPE

A compiler can abort, hang or run out of memory; here it ends only its own process. JOB is a pickled
dict. RESULT is written as a pickled dict in any case. The process ends with PARENT at the latest;
PIPE is a pipe that the parent holds open and never writes to.
"""

import contextvars
import ctypes
import os
import pickle
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Once set, it ends the compilations of this context: an interrupt only reaches the main thread.
STOP: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("stop", default=None)
_LOOKS_S = 0.2


def run(
    job_path: str, result_path: str, *, env: Mapping[str, str], log: str, timeout: float
) -> int | None:
    """Runs this file as a separate process and waits for its end.

    Args:
        job_path: The pickled job, which the process deletes once it has read it.
        result_path: Where the process writes its pickled result.
        env: All environment variables of the process.
        log: The file for its output, overwritten.
        timeout: Seconds after which it is stopped.

    Returns:
        Its exit code, or `None` if it was stopped, because it took too long or `STOP` was set.
    """
    # -P: the script's own folder must not hide packages of the same names
    command = [sys.executable, "-P", __file__, job_path, result_path, str(os.getpid())]
    with (
        open(log, "wb") as log_file,
        # its standard input is a pipe that closes when this process ends
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file
        ) as process,
    ):
        try:
            return _waited(process, timeout)
        finally:  # also after an interrupt, after which `Popen` itself does not wait
            process.kill()
            process.wait()


def _waited(process: subprocess.Popen, timeout: float) -> int | None:
    stop, until = STOP.get(), time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        try:
            return process.wait(left if stop is None else min(left, _LOOKS_S))
        except subprocess.TimeoutExpired:
            if stop is not None and stop.is_set():
                break
    return None


def main(job_path: str, result_path: str, parent: str) -> None:
    """Compiles the job and writes the result.

    Args:
        job_path: The pickled job; it is deleted once it is read.
        result_path: The file for the pickled result, or the error if compiling failed.
        parent: The parent's process id, as the command line has it.
    """
    end_with(int(parent))
    with open(job_path, "rb") as file:
        job = pickle.load(file)
    os.unlink(job_path)  # if the parent was killed, nobody else deletes it
    started = time.perf_counter()
    try:
        # What runs here beside the compiler imports no Keras either.
        script = job.get("script")
        result: dict[str, object] = (
            _compile(job) if script is None else runpy.run_path(script)["execute"](job)
        )
    except Exception as error:  # every failure is an answer, which the parent reports
        result = {"error": f"{type(error).__name__}: {error}"}
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result["seconds"] = time.perf_counter() - started
    result["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    result["peak_bytes"] = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    with open(result_path + ".part", "wb") as file:
        pickle.dump(result, file)
    os.replace(result_path + ".part", result_path)


def end_with(parent: int) -> None:
    """Ends this process as soon as the parent has ended, for whatever reason.

    Args:
        parent: The parent's process id, to find out whether it has ended already.
    """
    if sys.platform == "linux":
        # The kernel does this even while the compiler holds the interpreter's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_end_of_pipe, daemon=True).start()
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _wait_for_end_of_pipe() -> None:
    os.read(0, 1)
    os._exit(1)


def _compile(job: dict) -> dict:
    import jax

    # Programs for described devices are written to a persistent cache, but not read from it:
    # "PjRtCompiler must be constructed with a Client to call DeserializeLoadedExecutable"
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_enable_x64", job["x64"])  # the program's arguments have its dtypes
    mesh = _mesh(job)
    exported = pickle.loads(job["program"])
    shardings = exported.in_shardings_jax(mesh)
    flat = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(exported.in_tree, flat)
    donated = (0,) if job["donate"] else ()
    to_run = job.get("to_run", False)
    jitted = jax.jit(exported.call, donate_argnums=donated, keep_unused=to_run)
    lowered = jitted.lower(*args, **kwargs)
    compiled, refused = _compiled(lowered, job, list(mesh.devices.flat))
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler reports no memory figures")
    return {
        "text": _of_seam("whole_text")(compiled) if to_run else compiled.as_text(),
        "refused_options": refused,
        **(parts(compiled, exported, list(mesh.devices.flat)) if to_run else {}),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
        },
    }


def parts(compiled, exported, devices: list) -> dict:
    """The part of each argument and result that each device has, as `execute` needs it."""
    import jax

    def cuts(shardings, shapes) -> list:
        found = []
        for sharding, shape in zip(jax.tree.leaves(shardings), shapes, strict=True):
            by_device = sharding.devices_indices_map(shape)
            found.append(
                [
                    tuple(
                        s.indices(size)[:2]
                        for s, size in zip(by_device[device], shape, strict=True)
                    )
                    for device in devices
                ]
            )
        return found

    inputs = [aval.shape for aval in exported.in_avals]
    outputs = [aval.shape for aval in exported.out_avals]
    return {
        "devices": len(devices),
        "inputs": cuts(compiled.input_shardings, inputs),
        "outputs": cuts(compiled.output_shardings, outputs),
        "shapes": outputs,
    }


def _compiled(lowered, job: dict, devices: list) -> tuple:
    """The program, and the optional options that the compiler refuses."""
    import jax

    options = job["compiler_options"]
    try:
        return lowered.compile(compiler_options=options), {}
    except jax.errors.JaxRuntimeError as error:
        if not job["optional_options"] or "RESOURCE_EXHAUSTED" in str(error):
            raise
        file = os.path.join(os.path.dirname(__file__), "..", "..", "hardware", "option_trial.py")
        refused = runpy.run_path(file)["refused_options"](options, job["optional_options"], devices)
        if not refused:
            raise
    rest = {name: value for name, value in options.items() if name not in refused}
    return lowered.compile(compiler_options=rest), refused


def _of_seam(name: str):
    # By its path: importing it from the package would import Keras.
    file = os.path.join(os.path.dirname(__file__), "..", "..", "_keras", "replicas.py")
    return runpy.run_path(file)[name]


def _mesh(job: dict):
    import jax
    import numpy as np

    if job["topology"] is None:
        found = jax.devices()[: len(job["places"])]
    else:
        from jax.experimental import topologies

        described = topologies.get_topology_desc(**job["topology"]).devices
        by_place = {
            (getattr(d, "slice_index", None) or 0, *d.coords, d.core_on_chip): d for d in described
        }
        found = [by_place[tuple(place)] for place in job["places"]]
    grid = np.empty(len(found), dtype=object)
    grid[:] = found
    auto = (jax.sharding.AxisType.Auto,) * len(job["axes"])
    return jax.sharding.Mesh(
        grid.reshape([size for _, size in job["axes"]]),
        [name for name, _ in job["axes"]],
        axis_types=auto,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
