"""What every process that compares does: eight simulated devices, and answers to lines of JSON."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["JAX_PLATFORMS"] = "cpu"
# Comparisons compile much and run little.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    ]
)
sys.path[:0] = [str(Path(__file__).parents[n]) for n in range(3)]

import keras_tpu_dist as ktd  # noqa: E402

ktd.simulate(8)
if os.environ.get("KTD_COMPILER") == "libtpu":
    import tpu_programs

    tpu_programs.instead_of_cpu()


def serve(compared: Callable[[dict], dict[str, Any]]) -> None:
    """Answers every line of the input with what `compared` says of it, until the input ends."""
    # What XLA and Keras print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        start = time.perf_counter()
        try:
            answer = compared(json.loads(line))
        except Exception as error:
            at = " < ".join(
                f"{Path(frame.filename).name}:{frame.lineno}"
                for frame in traceback.extract_tb(error.__traceback__)[:-7:-1]
            )
            text = f"{type(error).__name__}: {error}"[:2000]
            answer = {"right": False, "error": f"{text} (at {at})"}
        answers.write(json.dumps({**answer, "seconds": time.perf_counter() - start}) + "\n")
        answers.flush()
