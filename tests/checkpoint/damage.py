"""Truncates files of checkpoints and flips their bytes: each is found, or harmless, never wrong.

python tests/checkpoint/damage.py [--cases 50] [--seed 0]
"""

import argparse
import logging
import os
import pathlib
import random
import shutil
import sys
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parent)]


def damage(folder, rng):
    """Truncates a file, or flips a bit of it; says what."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        end = rng.randrange(len(content))
        what, content = f"cut to {end} of {len(content)} bytes", content[:end]
    else:
        place = rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
        what = f"a bit of byte {place} flipped"
    path.write_bytes(bytes(content))
    return f"{path.relative_to(folder)}: {what}"


def outcome(folder, rng, expected):
    """What a damaged checkpoint does: "found", "harmless" or "WRONG"."""
    import numpy as np
    from test_restore import made, numbers

    import keras_tpu_dist as ktd

    what = damage(folder / "8", rng)
    other = made("fsdp")
    before = other.get_weights()
    try:
        ktd.restore(other, folder, step=8)
    except ktd.CheckpointError as error:
        same = all(map(np.array_equal, other.get_weights(), before))
        return what, "found" if same and "8" in str(error) else "WRONG"
    same = all(np.allclose(a, b, 1e-6) for a, b in zip(numbers(other), expected, strict=True))
    # Without a step, the one before is taken where this one is not whole.
    newest = ktd.restore(other, folder).step
    return what, "harmless" if same and newest in (4, 8) else "WRONG"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"--cases": 50, "--seed": 0}.items():
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    import keras_tpu_dist as ktd

    ktd.simulate(8)
    logging.disable(logging.CRITICAL)
    from test_restore import numbers, trained

    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        whole, copy = pathlib.Path(name, "whole"), pathlib.Path(name, "copy")
        expected = numbers(trained("tensor", whole))
        for case in range(arguments.cases):
            shutil.copytree(whole, copy)
            rng = random.Random(arguments.seed * 10**6 + case)
            what, how = outcome(copy, rng, expected)
            outcomes.append(how)
            print(f"{case:3} {how:8} {what}", flush=True)
            shutil.rmtree(copy)
    print({how: outcomes.count(how) for how in sorted(set(outcomes))})
    return "WRONG" in outcomes or "found" not in outcomes


if __name__ == "__main__":
    sys.exit(main())
