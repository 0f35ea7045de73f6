"""Bytes and seconds of a save with LoRA: of all of a model, and of what trains.

    python benchmarks/trained_only.py [--width 2048] [--rank 4] [--times 7]
    python benchmarks/trained_only.py --gemma

The first has a model of 33.7 MB, split over 8 simulated devices; the second counts the bytes of
Gemma 4 26B as `examples/fine_tune_gemma.py` trains it.
`written` are the bytes of a checkpoint's files, `save` the seconds of a synchronous save, and
`fingerprints` those of them in which the devices compare what is left out with the base.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import pathlib
import statistics
import sys
import tempfile
import time

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.snapshot import snapshot
from keras_tpu_dist.checkpoint.store import Store
from keras_tpu_dist.checkpoint.trained import TRAINED, Base, frozen_weights, numbers_of
from keras_tpu_dist.common.sizes import bytes_of

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def model_of(width, rank):
    with ktd.TPUStrategy({"fsdp": 4, "model": 2}, "fsdp").scope():
        layers = [keras.layers.Dense(width, name=name) for name in ("one", "two")]
        model = keras.Sequential([keras.Input((width,)), *layers])
        for layer in layers:
            layer.enable_lora(rank)
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    # Zeros would be compressed away.
    numbers = np.random.default_rng(0)
    for variable in (*model.trainable_variables, *model.optimizer.variables):
        if variable.shape:
            variable.assign(numbers.normal(size=variable.shape))
    return model


def written(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def saved(model, only, times):
    """The bytes of a checkpoint, and the seconds of each save and of each restore."""
    base = Base("the base") if only == TRAINED else None
    if base is not None:
        base.begin([model])
    seconds, back = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        for step in range(times + 1):  # the first one compiles
            began = time.perf_counter(), time.process_time()
            store.save(step, *snapshot(model, {"run": "a", "step": step}, {}, base=base))
            ended = time.perf_counter(), time.process_time()
            seconds.append([after - before for after, before in zip(ended, began, strict=True)])
        store.close()
        for _ in range(3):
            began = time.perf_counter()
            ktd.restore(model, folder)
            back.append(time.perf_counter() - began)
        return written(pathlib.Path(folder) / str(times)), seconds[1:], back[1:]


def small(width, rank, times):
    model = model_of(width, rank)
    whole = sum(bytes_of(v) for v in model.variables)
    trained = sum(bytes_of(v) for v in model.trainable_variables)
    print(f"{whole / 1e6:.1f} MB of weights, of which {trained / 1e6:.2f} MB train")
    frozen = frozen_weights([model])
    numbers_of(frozen)
    began = time.perf_counter()
    numbers_of(frozen)
    compared = time.perf_counter() - began
    for only in (None, TRAINED):
        size, seconds, back = saved(model, only, times)
        fingerprints = f", fingerprints {compared * 1e3:.0f} ms" if only else ""
        wall, processor = (statistics.median(each) * 1e3 for each in zip(*seconds, strict=True))
        print(
            f"only={only!r}: {size / 1e6:.2f} MB written, save {wall:.0f} ms "
            f"({processor:.0f} of the CPU), restore "
            f"{statistics.median(back) * 1e3:.0f} ms{fingerprints}"
        )


def gemma():
    """Counts the bytes of Gemma 4 26B with LoRA and AdamW, which is built without values."""
    sys.path.insert(0, str(EXAMPLES))
    import fine_tune_gemma

    keras.config.set_dtype_policy("bfloat16")
    with _keras.abstract_variables():
        model = fine_tune_gemma.gemma(fine_tune_gemma.WHOLE, chosen=False)
        frozen = {id(v) for v in frozen_weights([model])}
    kept = sum(bytes_of(v) for v in model.variables if id(v) not in frozen)
    left = sum(bytes_of(v) for v in model.variables if id(v) in frozen)
    slots = 2 * sum(bytes_of(v) for v in model.trainable_variables)
    print(f"Gemma 4 26B: {(kept + left + slots) / 1e9:.1f} GB in a checkpoint of all of it")
    print(f"only='trained': {(kept + slots) / 1e6:.1f} MB, {len(frozen)} fingerprints")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gemma", action="store_true")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    if options.gemma:
        gemma()
        return
    ktd.simulate(8)
    small(options.width, options.rank, options.times)


if __name__ == "__main__":
    main()
