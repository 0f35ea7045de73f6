"""One device equals a mesh under other versions of Keras; prints the table of what ran.

    python tests/_keras/versions.py 3.15.0 3.15.1 ~/src/keras     # releases, and sources
    python tests/_keras/versions.py --tests ~/src/keras           # and tests, by that Keras

Releases are installed by pip into folders of their own; sources are folders with `keras/`. Each
runs in processes of its own: fit with ragged batches, validation, several steps a launch, evaluate,
predict and train_on_batch, on three meshes and plans, against one device; then `resume.py`,
trainings that stop and go on, on every kind of input, within an epoch and between epochs. `--tests`
runs tests/checkpoint and tests/callbacks too, and prints their counts.
"""

import argparse
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


def environment(folder: Path) -> dict[str, str]:
    """Variables under which Python imports Keras from a folder."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": "jax"}


def printed(folder: Path, *arguments: str):
    """The JSON that a Python program prints last, under the Keras in a folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def checked(folder: Path) -> tuple[str, int, dict[str, float]]:
    """Version, number of names replaced, and the largest difference in each setting."""
    version, replaced, found = printed(folder, "-c", PROGRAM)
    resumed = printed(folder, str(Path(__file__).with_name("resume.py")))
    return version, replaced, {**found, **{f"resumed, {case}": d for case, d in resumed.items()}}


def tested(folder: Path) -> str:
    """The last line of pytest for what concerns checkpoints and callbacks."""
    rooms = ["tests/checkpoint", "tests/callbacks"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-rf", *rooms],
        env=environment(folder),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    return "\n".join([*(line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1]])


def main() -> None:
    """Checks each and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=["3.15.0", "3.15.1"])
    parser.add_argument("--tests", action="store_true", help="run tests of checkpoints, too")
    arguments = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as into:
        for wanted in arguments.versions:
            folder = sources(wanted, Path(into))
            version, replaced, found = checked(folder)
            for setting, difference in found.items():
                worst = max(worst, difference)
                print(
                    f"keras {version} from {wanted}, {replaced} names: {setting}: {difference:.1e}",
                    flush=True,
                )
            if arguments.tests:
                print(f"keras {version} from {wanted}: {tested(folder)}", flush=True)
    if worst > TOLERANCE:
        raise SystemExit(f"not equal: {worst:.1e}")


if __name__ == "__main__":
    main()
