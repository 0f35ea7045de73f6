r"""A LoRA fine-tune over several processes, whose checkpoints leave out what is frozen.

python -m keras_tpu_dist launch --processes 2 --devices 4 trained_only.py FOLDER MESH EPOCHS SEED
"""

import pathlib
import sys

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))

from helpers import loaded  # noqa: E402

of_one = loaded(HERE.parent / "checkpoint" / "test_trained_only.py", "process_trained_only")
WHERE = {"4x2": of_one.ONE, "2x2x2": of_one.OTHER}


def main(folder, mesh, epochs, seed):
    ktd.initialize()
    folder = pathlib.Path(folder)
    model = of_one.built(WHERE[mesh], seed=int(seed))
    ran = []
    noted = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: ran.append(epoch))
    saved = ktd.callbacks.Checkpoint(folder / "run", only="trained")
    how = {"batch_size": 13, "shuffle": False, "verbose": 0, "callbacks": [saved, noted]}
    losses = model.fit(of_one.X, of_one.Y, epochs=int(epochs), **how).history["loss"]
    state = {str(i): value for i, value in enumerate(of_one.values_of(model))}
    if jax.process_index() == 0:
        np.savez(folder / "state.npz", losses=losses, ran=ran, **state)


if __name__ == "__main__":
    main(*sys.argv[1:])
