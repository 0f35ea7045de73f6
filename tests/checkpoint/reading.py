"""What reading a checkpoint does beside giving a model its values: nothing. Prints what it did.

python tests/checkpoint/reading.py orbax|keras FOLDER
"""

import os
import pathlib
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path[:0] = [str(pathlib.Path(__file__).parents[2])]

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What runs code that was no code before, or another program.
CODE = ("exec", "compile", "pickle.find_class", "marshal.loads", "subprocess.Popen", "os.system")
CODE += ("os.exec", "os.posix_spawn", "os.fork", "import", "ctypes.dlopen")
CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate")
CHANGES += ("os.chmod", "os.utime", "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp")
MIB = 2**20


def files(*folders):
    """Every file with its size and time."""
    found = {}
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            status = path.lstat()
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def peak():
    """The most memory of this process since `reset`, in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def made():
    import keras

    import keras_tpu_dist as ktd

    keras.utils.clear_session()
    with ktd.TPUStrategy(layout="fsdp").scope():
        layers = [keras.layers.Dense(1024, name=f"d{i}") for i in range(8)]
        model = keras.Sequential([keras.Input((1024,), name="x"), *layers], name="m")
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def main(kind, folder):
    import keras_tpu_dist as ktd

    ktd.simulate(8)
    import numpy as np

    model, path = made(), pathlib.Path(folder, "saved")
    if kind == "keras":
        path = path.with_suffix(".keras")
        model.save(path)
    else:
        saved = ktd.callbacks.Checkpoint(path, every_epochs=1)
        x = np.ones((8, 1024), "float32")
        model.fit(x, x, batch_size=8, verbose=0, callbacks=[saved])
    os.chdir(folder)
    for _ in range(2):
        ktd.restore(model, path)  # imports what it needs, and compiles what compares values
    state = sum(v.value.nbytes for v in model.variables + model.optimizer.variables) / MIB
    done = []

    def note(event, arguments):
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if watching and (opened or event in (*CODE, *CHANGES)):
            done.append(f"{event} {arguments!r:.200}")

    watching = False
    sys.addaudithook(note)
    before, now = files(folder), peak()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    now, watching = peak(), True
    report = ktd.restore(model, path)
    grown, watching = peak() - now, False
    time.sleep(0.5)
    assert report.optimizer or kind == "keras"
    print(f"a state of {state:.0f} MiB, {grown:.0f} MiB while it was read")
    assert grown <= state + 64, "it took more memory than the model"
    assert done == [], done
    assert files(folder) == before, "files were changed"


if __name__ == "__main__":
    main(*sys.argv[1:])
