"""Compares job after job: a line of JSON in, a line out. A process, since XLA may abort."""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    ]
)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import keras_tpu_dist as ktd  # noqa: E402

ktd.simulate(8)

import jobs  # noqa: E402


def main() -> None:
    """Serves until its input ends."""
    # What XLA and Keras print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = jobs.Job(**json.loads(line))
        start = time.perf_counter()
        try:
            answer = jobs.compared(job)
        except Exception as error:
            answer = {"right": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps({**answer, "seconds": time.perf_counter() - start}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
