"""Runs a rewritten program on simulated devices, in a process of its own. Imports no Keras."""

import os
import runpy
from typing import Any


def execute(job: dict[str, Any]) -> dict[str, Any]:
    """Runs launches of a program, one after the other.

    Args:
        job: A dict with
            - `"texts"`: the programs, all with the same arguments and results;
            - `"devices"`: the number of devices;
            - `"arguments"`: the arguments of each launch; `None` for one that is a result of the
              launch before;
            - `"carried"`: from such an argument to the result, by their numbers;
            - `"inputs"`, `"outputs"`: for each argument and each result the part that each device
              has, as pairs of start and stop;
            - `"shapes"`: shapes of the whole results;
            - `"x64"`: whether JAX has 64 bits.

    Returns:
        A dict with `"results"`: for each program the results of its last launch, or its error as
        text. A result is a pair: the whole array, and the largest difference between devices that
        hold the same part.
    """
    import jax

    jax.config.update("jax_enable_x64", job["x64"])
    results: list[Any] = []
    for text in job["texts"]:
        try:
            results.append(_run(job, text))
        except Exception as error:
            # One program of many, as after a pass whose output cannot be run.
            results.append(f"{type(error).__name__}: {error}")
    return {"results": results}


def _run(job: dict[str, Any], text: str) -> list[tuple[Any, float]]:
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    # By its path: importing it from the package would import Keras.
    file = os.path.join(os.path.dirname(__file__), "..", "..", "_keras", "replicas.py")
    seam = runpy.run_path(file)
    devices = jax.devices()[: job["devices"]]
    mesh = Mesh(np.array(devices), ("replica",), axis_types=(AxisType.Auto,))
    each_its_own = NamedSharding(mesh, PartitionSpec())
    executable = seam["compiled_replicas"](text, devices)

    def placed(parts: list[Any]) -> Any:
        # JAX takes the parts for copies of one array, and hands each device its own.
        arrays = [jax.device_put(part, d) for part, d in zip(parts, devices)]
        return jax.make_array_from_single_device_arrays(
            arrays[0].shape, each_its_own, arrays, dtype=arrays[0].dtype
        )

    found: list[Any] = []
    for launch in job["arguments"]:
        arguments = []
        for number, array in enumerate(launch):
            if array is None:
                arguments.append(placed(found[job["carried"][number]]))
            else:
                cuts = [tuple(slice(*ends) for ends in cut) for cut in job["inputs"][number]]
                arguments.append(placed([array[cut] for cut in cuts]))
        found = seam["run_replicas"](executable, arguments)
    return [_whole(*each) for each in zip(found, job["outputs"], job["shapes"], strict=True)]


def _whole(parts: list[Any], cuts: list[Any], shape: tuple[int, ...]) -> tuple[Any, float]:
    """An array from its parts, and how far devices that hold the same part differ."""
    import numpy as np

    first = np.asarray(parts[0])
    whole = np.zeros(shape, first.dtype)
    seen: dict[Any, Any] = {}
    apart = 0.0
    for part, cut in zip(parts, cuts, strict=True):
        array, key = np.asarray(part), tuple(cut)
        if key not in seen:
            seen[key] = array
            whole[tuple(slice(*ends) for ends in cut)] = array
        elif array.tobytes() != seen[key].tobytes():
            with np.errstate(invalid="ignore"):
                gap = np.abs(array.astype("float64") - seen[key].astype("float64"))
            apart = max(apart, float(np.max(np.nan_to_num(gap, nan=np.inf), initial=0.0)))
    return whole, apart
