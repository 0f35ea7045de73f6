"""Runs a rewritten program on simulated devices, in a process of its own. Imports no Keras."""

import os
import runpy
from collections.abc import Sequence
from typing import Any


class Simulated:
    """A program that runs on simulated devices.

    Args:
        parts: A dict with
            - `"devices"`: the number of devices;
            - `"inputs"`, `"outputs"`: for each argument and each result the part that each device
              has, as pairs of start and stop;
            - `"shapes"`: shapes of the whole results.
    """

    def __init__(self, text: str, parts: dict[str, Any]):
        import jax
        import numpy as np
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

        # By its path: importing it from the package would import Keras.
        file = os.path.join(os.path.dirname(__file__), "..", "..", "_keras", "replicas.py")
        self._seam, self._parts = runpy.run_path(file), parts
        self._devices = jax.devices()[: parts["devices"]]
        mesh = Mesh(np.array(self._devices), ("replica",), axis_types=(AxisType.Auto,))
        self._each_its_own = NamedSharding(mesh, PartitionSpec())
        self._executable = self._seam["compiled_replicas"](text, self._devices)

    def launch(self, arguments: Sequence[Any]) -> list[list[Any]]:
        """Runs the program."""
        placed = []
        for argument, places in zip(arguments, self._parts["inputs"], strict=True):
            if not isinstance(argument, list):
                argument = [argument[tuple(slice(*ends) for ends in cut)] for cut in places]
            placed.append(self._placed(argument))
        return self._seam["run_replicas"](self._executable, placed)

    def _placed(self, parts: list[Any]) -> Any:
        import jax

        # JAX takes the parts for copies of one array, and hands each device its own.
        arrays = [jax.device_put(part, d) for part, d in zip(parts, self._devices, strict=True)]
        return jax.make_array_from_single_device_arrays(
            arrays[0].shape, self._each_its_own, arrays, dtype=arrays[0].dtype
        )

    def whole(self, results: list[list[Any]]) -> list[tuple[Any, float]]:
        """Arrays from their parts, and how far devices that hold the same part differ."""
        outputs, shapes = self._parts["outputs"], self._parts["shapes"]
        return [_whole(*of) for of in zip(results, outputs, shapes, strict=True)]


def execute(job: dict[str, Any]) -> dict[str, Any]:
    """Runs launches of a program, one after the other.

    Args:
        job: What a `Simulated` needs, and
            - `"text"`: the program;
            - `"arguments"`: the arguments of each launch; `None` for one that is a result of the
              launch before;
            - `"carried"`: from such an argument to the result, by their numbers;
            - `"x64"`: whether JAX has 64 bits.

    Returns:
        A dict with `"results"`, those of the last launch. Each is a pair: the whole array, and the
        largest difference between devices that hold the same part.
    """
    import jax

    jax.config.update("jax_enable_x64", job["x64"])
    program = Simulated(job["text"], job)
    found: list[list[Any]] = []
    for launch in job["arguments"]:
        found = program.launch(
            [
                found[job["carried"][number]] if array is None else array
                for number, array in enumerate(launch)
            ]
        )
    return {"results": program.whole(found)}


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
            one, other = (a.astype(np.result_type(a, "float64")) for a in (array, seen[key]))
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            with np.errstate(invalid="ignore"):
                gap = np.where(same, 0.0, np.abs(one - other))
            apart = max(apart, float(np.max(np.nan_to_num(gap, nan=np.inf), initial=0.0)))
    return whole, apart
