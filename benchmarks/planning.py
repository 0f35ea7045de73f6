"""CPU seconds of deciding layouts, by the number of variables, and how they grow.

    python benchmarks/planning.py [--variables 10000]

Three models without values: a chain of Dense layers, residual blocks in a functional model, and
custom layers with attention by hand, whose calls are traced (once for equal layers). The exponent
is that of seconds over variables, from a quarter of the size to the full size.
"""

import argparse
import math
import pathlib
import sys
import threading
import time

import keras_tpu_dist as ktd


def chain(variables):
    import keras

    x = h = keras.Input((16,))
    for _ in range(variables // 2):
        h = keras.layers.Dense(16, activation="relu")(h)
    return keras.Model(x, h)


def residual(variables):
    import keras

    x = h = keras.Input((16,))
    for _ in range(variables // 6):
        y = keras.layers.LayerNormalization()(h)
        y = keras.layers.Dense(16)(keras.layers.Dense(64, activation="gelu")(y))
        h = keras.layers.Add()([h, y])
    return keras.Model(x, h)


def decoder(variables):
    from decoders import Attention, Block, stacked

    return stacked(*(Block(Attention(kv=4), gated="silu") for _ in range(variables // 15)))


def planned(build, variables):
    """CPU seconds of a plan, the minimum of two; the first one traces."""
    import keras

    from keras_tpu_dist.layout.planner import Planner

    with keras.StatelessScope(initialize_variables=False):
        model = build(variables)
    mesh = ktd.TPUStrategy({"data": 2, "model": 4}).mesh
    taken = []
    for _ in range(2):
        start = time.process_time()
        Planner("tensor_parallel", min_size=1).plan(model, mesh, ("data",))
        taken.append(time.process_time() - start)
    return len(model.variables), taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variables", type=int, default=10_000)
    variables = parser.parse_args().variables
    ktd.simulate(8)
    print(f"{'model':10} {'variables':>9} {'first s':>8} {'next s':>7} {'exponent':>9}")
    for build in (chain, residual, decoder):
        fewer, before = planned(build, variables // 4)
        count, taken = planned(build, variables)
        exponent = math.log(min(taken) / min(before)) / math.log(count / fewer)
        print(f"{build.__name__:10} {count:9} {taken[0]:8.2f} {taken[1]:7.2f} {exponent:9.2f}")


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "layout"))
    # Keras walks the graph of a functional model by recursion.
    sys.setrecursionlimit(1_000_000)
    threading.stack_size(512 * 2**20)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
