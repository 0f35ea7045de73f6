"""How much Python runs between a user's call and a launch: calls, and switches between modules.

    python benchmarks/calls.py [--list]
    PYTHONPATH=/path/to/another/tree python benchmarks/calls.py

Counts one step of `fit` with one step per launch (a fit of 11 steps minus one of 10), and a second
`strategy.run` with the same shapes (the step of docs/custom_loops.md), on 8 simulated devices,
after everything is compiled.

A call enters Python code of the package: a function, method, property, lambda, or a generator each
time that it resumes. Comprehensions are part of their function, as in Python 3.12. A switch is a
call into another module than the previous call; the first call is a switch. Calls within Keras, JAX
and NumPy are not counted, nor are other threads.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras_tpu_dist as ktd

ktd.simulate(8)

import jax
import keras
import numpy as np

ROOT = pathlib.Path(ktd.__file__).parent
_PARTS_OF_A_FUNCTION = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


def main() -> None:
    """Prints the table, and with `--list` the calls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each call as well")
    wants_list = parser.parse_args().list
    print(f"{ROOT}, Python {sys.version.split()[0]}, Keras {keras.__version__}")
    print(f"{'':24} {'calls':>6} {'switches':>9} {'modules':>8}")
    both = {"a further step of fit": of_a_step(), "a second strategy.run": of_run()}
    for name, calls in both.items():
        modules = [module for module, _ in calls]
        print(f"{name:24} {len(calls):6} {switches(modules):9} {len(set(modules)):8}")
        if wants_list:
            print(*(f"    {module}: {function}" for module, function in calls), sep="\n")


def of_a_step() -> list[tuple[str, str]]:
    """The calls of one further step of a fit with one step a launch."""
    x, y = np.ones((88, 16), "float32"), np.zeros(88, "int32")
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=8, verbose=0)

    def fit(steps: int) -> None:
        model.fit(x[: 8 * steps], y[: 8 * steps], batch_size=8, verbose=0)

    fewer, more = traced(lambda: fit(10)), traced(lambda: fit(11))
    # Where they begin to differ, the longer one goes on with its further step.
    same = next((i for i, (a, b) in enumerate(zip(fewer, more)) if a != b), len(fewer))
    return more[same : same + len(more) - len(fewer)]


def of_run() -> list[tuple[str, str]]:
    """The calls of a second `strategy.run` of the same shapes."""
    x, y = np.ones((32, 16), "float32"), np.zeros(32, "int32")
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(batch):
        x, y = batch

        def loss_fn(weights, others):
            logits, _ = model.stateless_call(weights, others, x, training=True)
            return loss(y, logits), logits

        (value, logits), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
        )
        gradients = ktd.get_replica_context().all_reduce("mean", gradients)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, logits)
        return value

    (batch,) = strategy.distribute_dataset((x, y), batch_size=32)
    strategy.run(step, (batch,))
    return traced(lambda: strategy.run(step, (batch,)))


def traced(function: Callable[[], Any]) -> list[tuple[str, str]]:
    """The calls into the package that a function makes: their modules and names."""
    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in _PARTS_OF_A_FUNCTION:
            return
        path = pathlib.Path(code.co_filename)
        if path.is_relative_to(ROOT):
            calls.append((str(path.relative_to(ROOT).with_suffix("")), code.co_qualname))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def switches(modules: list[str]) -> int:
    """The number of calls into another module than the previous call."""
    return sum(a != b for a, b in zip([None, *modules], modules))


if __name__ == "__main__":
    main()
