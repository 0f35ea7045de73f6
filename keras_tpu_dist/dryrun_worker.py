"""Compiles one exported program in a process of its own. Run as a script; imports no Keras.

    python -P dryrun_worker.py JOB RESULT

A compiler can abort, hang or run out of memory; here it takes nobody with it. JOB is the pickled
`Job`, a dict; RESULT is written as a pickled dict, whatever becomes of the compilation.
"""

import os
import pickle
import resource
import sys
import time


def main(job_path: str, result_path: str) -> None:
    """Compiles the job and writes the result."""
    with open(job_path, "rb") as file:
        job = pickle.load(file)
    started = time.perf_counter()
    try:
        result: dict[str, object] = _compile(job)
    except Exception as error:  # every failure is an answer, which the parent words
        result = {"error": f"{type(error).__name__}: {error}"}
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result["seconds"] = time.perf_counter() - started
    result["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    result["peak_bytes"] = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    with open(result_path + ".part", "wb") as file:
        pickle.dump(result, file)
    os.replace(result_path + ".part", result_path)


def _compile(job: dict) -> dict:
    import jax

    mesh = _mesh(job)
    exported = pickle.loads(job["program"])
    shardings = exported.in_shardings_jax(mesh)
    flat = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings)
    ]
    args, kwargs = jax.tree.unflatten(exported.in_tree, flat)
    donated = (0,) if job["donate"] else ()
    lowered = jax.jit(exported.call, donate_argnums=donated).lower(*args, **kwargs)
    compiled = lowered.compile(compiler_options=job["compiler_options"])
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler states no memory figures")
    return {
        "text": compiled.as_text(),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
    }


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
    main(sys.argv[1], sys.argv[2])
