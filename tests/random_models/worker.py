"""Runs programs: a line of JSON in, a line out."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "conformance"), str(HERE), str(HERE.parent)]

import serving  # first: it chooses the devices  # noqa: E402

# isort: split
import programs  # noqa: E402
from drawing import Program  # noqa: E402

if __name__ == "__main__":
    serving.serve(
        lambda job: programs.compared(Program(job["seed"], job["choices"]), job["timeout"])
    )
