"""A program in two processes of four devices each, as `keras_tpu_dist launch` starts them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def results(program: dict, timeout: float) -> dict[str, np.ndarray]:
    """What process 0 found; their last words are an error if they fail or take too long."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.json"
        path.write_text(json.dumps(program))
        command = [
            *(sys.executable, "-m", "keras_tpu_dist", "launch"),
            *("--processes", "2", "--devices", "4", __file__, str(path)),
        ]
        log = Path(folder) / "log.txt"
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    command, stdout=file, stderr=file, timeout=timeout, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"none after {timeout:.0f} s"
        if code != 0:
            words = log.read_text(errors="replace")[-1900:]
            raise RuntimeError(f"two processes: exit code {code}: {words}")
        return dict(np.load(Path(folder) / "found.npz"))


def main(path: Path) -> None:
    """Runs the program of a file as one of the processes, and writes what it gives beside it."""
    here = Path(__file__).parent
    sys.path[:0] = [str(here.parent / "conformance"), str(here), str(here.parent)]
    import keras_tpu_dist as ktd

    ktd.initialize()
    import contextlib

    import jax
    import programs
    from drawing import Program
    from precision import in_float64

    program = Program(**json.loads(path.read_text()))
    precise = program.choices["policy"] == "float64"
    with in_float64() if precise else contextlib.nullcontext():
        found = programs.results_here(program, True, path.parent)
    if jax.process_index() == 0:
        # A file of NumPy's knows no bfloat16.
        found = {name: np.asarray(each, np.float64) for name, each in found.items()}
        np.savez(path.parent / "found.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
