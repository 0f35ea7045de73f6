"""CPU time of `import keras_tpu_dist` after Keras, as installed by pip (compiled) and from source.

python benchmarks/importing.py
"""

import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import time
import keras
start = time.process_time()
import keras_tpu_dist
print(time.process_time() - start)
"""


def import_s(**environment: str) -> float:
    """CPU seconds of an import in a new process."""
    # A machine may be told to write no bytecode: each import would compile 200 files again.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", **environment}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def main() -> None:
    """Prints the medians of five imports each."""
    with tempfile.TemporaryDirectory() as cache:
        import_s(PYTHONPYCACHEPREFIX=cache)
        compiled = [import_s(PYTHONPYCACHEPREFIX=cache) for _ in range(5)]
    with tempfile.TemporaryDirectory() as empty:
        source = [
            import_s(PYTHONPYCACHEPREFIX=empty, PYTHONDONTWRITEBYTECODE="1") for _ in range(5)
        ]
    print(f"compiled, as after pip install: {statistics.median(compiled):.2f} CPU s after Keras")
    print(f"from source, with no bytecode: {statistics.median(source):.2f} CPU s")


if __name__ == "__main__":
    main()
