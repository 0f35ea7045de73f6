"""What `test_checkup.py` runs as two processes: a check of right devices, one of a faulty one."""

import json
import pathlib
import sys
from functools import partial

import jax
import keras

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from checkup.faults import FlipsABit

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.checkup import run
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.bench import Launcher
from keras_tpu_dist.tools.checkup.programs import MODELS, programs

PARTS = ("products", "collectives", "step")


def built(strategy, seed):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    return model


class RaisesInOne(Launcher):
    """Of two processes the second fails in the middle of a part."""

    def run(self, job, program, *args):
        if job.kind == "product" and jax.process_index() == 1:
            raise RuntimeError("INTERNAL: broken")
        return super().run(job, program, *args)


def main(folder):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    small = run.Planned("programs", partial(programs, models=MODELS[-1:]), 0.0)
    todo = [s for s in run.steps(built(strategy, 0), Given()) if s.name != small.name] + [small]
    right = run.run_check(strategy, todo, 60.0, None, (*PARTS, small.name))
    device = jax.devices()[-2].id
    faulty = run.run_check(strategy, todo, 60.0, FlipsABit(device=device), PARTS)
    unlike = run.steps(built(strategy, jax.process_index()), Given())
    drew = run.run_check(strategy, unlike, 60.0, None, ["step"])
    raised = run.run_check(strategy, todo, 60.0, RaisesInOne(), ["products", "collectives"])
    checks = {"right": right, "faulty": faulty, "drew": drew, "raised": raised}
    found = {name: check.to_dict() for name, check in checks.items()}
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(found))
    (folder / "device").write_text(str(device))


if __name__ == "__main__":
    ktd.initialize()
    main(pathlib.Path(sys.argv[1]))
