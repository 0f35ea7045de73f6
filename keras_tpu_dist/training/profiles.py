"""A trace of train steps by JAX's profiler, and what `read_profile` needs beside it."""

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.extend

from keras_tpu_dist import _keras

MANIFEST = "profile.json"


class Trace:
    """A trace that runs."""

    def __init__(self, folder: Path, first: int):
        self.folder, self.first = folder, first
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_devices()
        options = jax.profiler.ProfileOptions()
        # Python's calls would make most of the file.
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(folder), profiler_options=options)
        self._started = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        """Waits for what was launched, and writes the trace."""
        _wait_for_devices()
        self._seconds = time.perf_counter() - self._started
        jax.profiler.stop_trace()

    def describe(
        self,
        last: int,
        asked: tuple[int, int],
        model: Any,
        texts: Iterable[tuple[str, str]] | None = None,
    ) -> None:
        """Writes what is to be known beside the trace."""
        programs = {}
        for name, text in _programs() if texts is None else texts:
            file = f"program_{len(programs)}.txt"
            (self.folder / file).write_text(text)
            programs[file] = name
        devices = jax.local_devices()
        described = {
            "steps": [self.first, last],
            "asked": list(asked),
            "seconds": self._seconds,
            "devices": len(devices),
            "platform": devices[0].platform,
            "device_kind": devices[0].device_kind,
            "layers": sorted(_keras.layer_names(model)),
            "programs": programs,
            "jax": jax.__version__,
        }
        (self.folder / MANIFEST).write_text(json.dumps(described, indent=1))


def _programs() -> list[tuple[str, str]]:
    """Names and texts of the compiled train steps of this process."""
    found = []
    for executable in jax.extend.backend.get_backend().live_executables():
        for module in executable.hlo_modules():
            # One step, or several in a launch.
            if module.name.startswith("jit_train_step"):
                found.append((module.name, module.to_string()))
    return found


def _wait_for_devices() -> None:
    """Waits until nothing that was launched runs any more."""
    for array in jax.live_arrays():
        # Another thread, such as the one that brings batches, may delete some.
        with contextlib.suppress(RuntimeError, ValueError):
            if not array.is_deleted():
                array.block_until_ready()
