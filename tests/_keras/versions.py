"""One device equals a mesh under other versions of Keras; prints the table of what ran.

    python tests/_keras/versions.py 3.15.0 3.15.1 ~/src/keras     # releases, and sources

Releases are installed by pip into folders of their own; sources are folders with `keras/`. Each
runs in a process of its own: fit with ragged batches, validation, several steps a launch, evaluate,
predict and train_on_batch, on three meshes and plans, against one device.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOLERANCE = 1e-5
ROOT = Path(__file__).parents[2]
PROGRAM = """
import contextlib, json, sys
import keras_tpu_dist as ktd
ktd.simulate(8)
import keras, numpy as np
rng = np.random.default_rng(0)
x, y = rng.normal(size=(77, 6)).astype("float32"), rng.integers(0, 3, 77)
def run(strategy, steps):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(), keras.layers.Dense(3, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"],
            steps_per_execution=steps)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False,
        validation_data=(x, y)).history
    return keras.tree.flatten([history, model.predict(x, verbose=0),
        model.evaluate(x, y, verbose=0), model.train_on_batch(x[:5], y[:5]), model.get_weights()])
expected, found = run(None, 1), {}
for mesh, layout, steps in (({"data": 8}, None, 1), ({"data": 4, "model": 2}, "tensor_parallel", 3),
        ({"data": 2, "fsdp": 2, "model": 2}, "fsdp", 4)):
    made = run(ktd.TPUStrategy(mesh, layout), steps)
    found[f"{mesh} {layout} {steps} step(s)"] = max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in zip(expected, made))
from keras_tpu_dist import _keras
print(json.dumps([keras.__version__, len(_keras.table()), found]))
"""


def sources(wanted: str, into: Path) -> Path:
    """The folder to import a version of Keras from."""
    if Path(wanted).expanduser().is_dir():
        return Path(wanted).expanduser()
    folder = into / wanted
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, f"keras=={wanted}"], check=True)
    return folder


def checked(folder: Path) -> tuple[str, int, dict[str, float]]:
    """Version, number of names replaced, and the largest difference on each mesh."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(versions: list[str]) -> None:
    """Checks each and prints the table."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as into:
        for wanted in versions:
            version, replaced, found = checked(sources(wanted, Path(into)))
            for setting, difference in found.items():
                worst = max(worst, difference)
                print(
                    f"keras {version} from {wanted}, {replaced} names: {setting}: {difference:.1e}"
                )
    if worst > TOLERANCE:
        raise SystemExit(f"not equal: {worst:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["3.15.0", "3.15.1"])
