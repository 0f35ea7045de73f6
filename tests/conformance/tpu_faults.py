"""Which faults of XLA's partitioner the TPU's has: the programs of the table, through libtpu.

    python tests/conformance/tpu_faults.py [--chip v5e]

Each runs in a process of its own, with a timeout, as it is and as this package repairs it.
"""

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["JAX_PLATFORMS"] = "cpu"
HERE = Path(__file__)
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2])]
_LARGEST = 1e-5


def one(name: str, repaired: bool) -> str:
    """What becomes of one program, in this process."""
    import keras_tpu_dist as ktd

    ktd.simulate(8)
    import fault_programs
    import jax
    import numpy as np
    import tpu_programs

    from keras_tpu_dist.hardware.libtpu import libtpu_environment
    from keras_tpu_dist.tools.checkup.bounds import gap

    os.environ.update(libtpu_environment())
    ready = fault_programs.ready(name)
    plain = types.SimpleNamespace(program=lambda *args: ready.plain)
    owner = ready.repaired if repaired else plain
    try:
        (found,) = tpu_programs.Replayed(owner, ready.arrays, ready.mesh)(*ready.arrays)
    except jax.errors.JaxRuntimeError as error:
        return f"refused: {str(error).splitlines()[0][:90]}"
    except tpu_programs.CopiesDiffer as error:
        return f"wrong, {error}"
    off = gap(np.asarray(found), ready.expected)
    return "right" if off <= _LARGEST else f"wrong by {off:.0e}"


def answer(name: str, repaired: bool, chip: str) -> str:
    """What becomes of one program, in a process of its own."""
    command = [sys.executable, str(HERE), "--one", name, *(["--repaired"] if repaired else [])]
    environment = {**os.environ, "KTD_CHIP": chip}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode:
        return f"ends the process ({done.returncode})"
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="v5e")
    parser.add_argument("--one", help="in this process")
    parser.add_argument("--repaired", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        print(one(arguments.one, arguments.repaired))
        return
    from keras_tpu_dist.hardware.versions import libtpu_version, version_text
    from keras_tpu_dist.programs.partitioner.table import FAULTS

    version = version_text(libtpu_version())
    print(f"| fault | libtpu {version}, {arguments.chip} | repaired |", "|---|---|---|", sep="\n")
    for fault in FAULTS:
        cells = [answer(fault.name, repaired, arguments.chip) for repaired in (False, True)]
        print(f"| {fault.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
