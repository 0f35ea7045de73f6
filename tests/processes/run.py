"""Compares every plan with every input and number of steps, over processes, with one process.

python tests/processes/run.py
"""

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

if __name__ == "__main__":
    import keras_tpu_dist as ktd

    ktd.simulate(8)
    from test_processes import FEEDS, PLANS, compared

    started, right = time.monotonic(), 0
    cases = list(itertools.product(PLANS, FEEDS, (1, 4)))
    for processes, devices in ((2, 4), (4, 2)):
        for plan in PLANS:
            chosen = [case for case in cases if case[0] == plan]
            with tempfile.TemporaryDirectory() as folder:
                compared(Path(folder), chosen, processes, devices)
            right += len(chosen)
            print(f"{processes} x {devices} {plan}: {len(chosen)} cases equal", flush=True)
    print(f"{right} of {2 * len(cases)} equal, {time.monotonic() - started:.0f} s")
