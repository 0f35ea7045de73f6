"""Checks of random models on right devices: any problem that is found is a false alarm.

    python tests/checkup/run.py --models 200 --seed 0 [--whole 10] [--floatx float16 ...]

Models, meshes, layouts and precisions are those of tests/random_models; Keras's `floatx`, and
whether models compute in it, are drawn too. Each model's step is checked; with every tenth model
all parts run.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [
    *(str(Path(__file__).parents[1] / name) for name in ("conformance", "random_models")),
    str(Path(__file__).parents[1]),
]

import serving  # noqa: E402, F401  first: it chooses the devices

# isort: split
import keras  # noqa: E402
import programs  # noqa: E402
from options import drawn  # noqa: E402

from keras_tpu_dist.tools.checkup import run  # noqa: E402
from keras_tpu_dist.tools.checkup.batch import Given  # noqa: E402
from keras_tpu_dist.tools.checkup.report import Check  # noqa: E402

MESHES = ("8", "4x2", "2x2x2")
FLOATX = ("float32", "float64", "bfloat16", "float16")
FIXED = (("trainer", "fit"), ("run_eagerly", False), ("processes", 1))


def precision(seed: int, floatx: Sequence[str], policy: str) -> tuple[str, str]:
    """Keras's `floatx`, and a policy: the same, as without one, or that of a program."""
    rng = random.Random(seed)
    drawn = rng.choice(floatx)
    return drawn, rng.choice((drawn, policy))


def checked(seed: int, whole: bool, floatx: Sequence[str] = FLOATX) -> Check:
    """A check with a random model."""
    mesh = MESHES[seed % len(MESHES)]
    try:
        program = drawn(seed, [*FIXED, ("mesh", mesh)])
    except ValueError:  # a model that this mesh has no axis for
        program = drawn(seed, [*FIXED, ("mesh", "4x2")])
    keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    own, policy = precision(seed, floatx, program.choices["policy"])
    keras.config.set_floatx(own)
    keras.config.set_dtype_policy(policy)
    try:
        strategy = programs._strategy(program)
        with strategy.scope():
            model = programs._compiled(program, strategy)
        only = None if whole else ["step"]
        check = run.run_check(strategy, run.steps(model, Given()), 60.0, None, only)
        assert (keras.config.floatx(), keras.config.dtype_policy().name) == (own, policy)
        return check
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        keras.distribution.set_distribution(None)


def main() -> int:
    """Prints each false alarm, and how many there were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", type=int, default=10, help="every so many with all parts")
    parser.add_argument("--floatx", nargs="+", choices=FLOATX, default=FLOATX)
    arguments = parser.parse_args()
    alarms, compared, begin = 0, 0, time.perf_counter()
    for number in range(arguments.models):
        seed = arguments.seed + number
        whole = arguments.whole > 0 and number % arguments.whole == arguments.whole - 1
        check = checked(seed, whole, arguments.floatx)
        step = check.part("step")
        compared += step.ok and "as on one device" in step.words
        if not check.ok or step.left_out or "not compared" in step.words:
            alarms += not check.ok
            print(f"seed {seed}: {check if not check.ok else step}", flush=True)
        print(f"{number + 1} done, {alarms} alarms", file=sys.stderr, flush=True)
    print(
        f"{arguments.models} models from seed {arguments.seed}, {compared} steps compared with one "
        f"device: {alarms} false alarms; {time.perf_counter() - begin:.0f} s"
    )
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
