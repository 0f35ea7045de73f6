r"""A loop of one's own over several processes, that is ended in the middle and resumed.

python -m keras_tpu_dist launch --processes 2 --devices 4 \
    loop.py FOLDER MESH LAYOUT END STEP
"""

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np

import keras_tpu_dist as ktd

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))

from helpers import loaded  # noqa: E402

test_loop = loaded(HERE.parent / "checkpoint" / "test_loop.py", "process_test_loop")
MESHES = {"4x2": {"data": 4, "model": 2}, "2x2x2": {"data": 2, "fsdp": 2, "model": 2}}
EVERY = 4


class Watched:
    """Saves every fourth step, and ends one process, or all of them, after so many."""

    def __init__(self, saved, end, after):
        self.restore, self._saved, self._end, self._after = saved.restore, saved, end, after

    def save(self, done, **numbers):
        preempted = self._saved.preempted
        if done % EVERY == 0 or preempted:
            self._saved.save(done, **numbers)
        if preempted:
            self._saved.close()
        if self._end == "SIGTERM" and done > self._after:
            time.sleep(0.2)  # JAX looks for a signal once a second
        if done != self._after:
            return
        if self._end == "raise":
            raise RuntimeError("power cut")
        if jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), getattr(signal, self._end))


def main(folder, mesh, layout, end, after):
    ktd.initialize()
    folder = pathlib.Path(folder)
    loop = test_loop.Loop(MESHES[mesh], layout)
    with ktd.LoopCheckpoint(folder / "run", *loop.objects()) as saved:
        loop.run(Watched(saved, end, int(after)), every=1)
        steps = saved.steps
    variables = [*loop.model.variables, *loop.optimizer.variables, *loop.metric.variables]
    state = {str(i): np.asarray(v) for i, v in enumerate([*variables, loop.rows])}
    if jax.process_index() == 0:
        np.savez(folder / "state.npz", steps=steps, first=min(loop.losses), **state)


if __name__ == "__main__":
    main(*sys.argv[1:])
