"""Steps whose gradient of one weight is wrong: whether `ktd.verify` sees it, and only then.

    python tests/replay/wrong_gradients.py 40 --seed 3

Draws models, optimizers of Keras, meshes, plans and policies, compiles the right step for a TPU,
and compares it with a step on one device that multiplies half of one weight's gradient by a factor.
With a factor of 1 both are the same, and must be found equal; with another one they must not.
"""

import argparse
import json
import os
import pathlib
import random
import sys
from dataclasses import dataclass

import keras
import numpy as np

import keras_tpu_dist as ktd

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from laws import catalogue

kl = keras.layers
WIDTH = 16
SLICE = os.environ.get("KTD_SLICE", "v5e:2x2")  # of four devices
# The rounding of half precision hides what is wrong in a small update.
FACTORS = {"float32": (1.0, 1.0, 0.0, 0.9, 1.1, 2.0), "mixed_bfloat16": (1.0,)}
MESHES = ({"data": 4}, {"data": 2, "model": 2}, {"model": 4}, {"data": 2, "fsdp": 2})
PLANS = {"data": (None, "fsdp"), "fsdp": ("fsdp",), "model": ("auto", "tensor_parallel")}


def mlp():
    """Dense layers, the gradients of whose weights are of many sizes."""
    return keras.Sequential(
        [keras.Input((8,)), kl.Dense(WIDTH, "gelu"), kl.LayerNormalization(), kl.Dense(4)]
    ), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def attention():
    """Words; the bias of the keys has no gradient."""
    ids = keras.Input((12,), dtype="int32")
    x = kl.Embedding(64, WIDTH)(ids)
    x = x + kl.MultiHeadAttention(2, 8)(*[kl.LayerNormalization()(x)] * 2, use_causal_mask=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.Model(ids, kl.Dense(64)(kl.LayerNormalization()(x))), loss


def images():
    """Convolutions; a bias before a normalization has no gradient."""
    layers = [keras.Input((8, 8, 3)), kl.Conv2D(8, 3), kl.BatchNormalization(), kl.ReLU()]
    return keras.Sequential([*layers, kl.Flatten(), kl.Dropout(0.2), kl.Dense(3)]), "mse"


def recurrent():
    """A recurrent layer."""
    return keras.Sequential([keras.Input((6, 4)), kl.LSTM(WIDTH), kl.Dense(2)]), "mse"


def table():
    """A table of which a step uses some rows, and a head that shares it."""
    ids = keras.Input((4,), dtype="int32")
    words = kl.ReversibleEmbedding(256, WIDTH)
    x = kl.Dense(WIDTH, "tanh")(kl.GlobalAveragePooling1D()(words(ids)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.Model(ids, words(x, reverse=True)), loss


MODELS = (mlp, attention, images, recurrent, table)


@dataclass(frozen=True)
class Case:
    """A step, and what is wrong with its counterpart.

    Attributes:
        weight: Which of the weights that have a gradient: a number from 0 to 1.
        factor: What its gradient is multiplied by.
    """

    model: str
    optimizer: str
    mesh: dict
    plan: str | None
    remat: str | None
    policy: str
    steps: int
    weight: float
    factor: float


def drawn(seed):
    """A case."""
    dice = random.Random(seed)
    optimizers = sorted(name for name in catalogue.subjects() if name.startswith("optimizers/"))
    policy = dice.choice(("float32", "float32", "mixed_bfloat16"))
    mesh = dice.choice(MESHES)
    return Case(
        dice.choice(MODELS).__name__,
        dice.choice(optimizers),
        mesh,
        dice.choice(PLANS[list(mesh)[-1]]),
        dice.choice((None, None, "full")),
        policy,
        dice.choice((1, 3)),
        dice.random(),
        dice.choice(FACTORS[policy]),
    )


def multiplied(optimizer, number, factor):
    """The optimizer, with half of a weight's gradient, by its number, multiplied.

    The norm to which a gradient is clipped would hide what is wrong in all of it.
    """
    # One that scales the loss does not go through its own.
    applying = getattr(optimizer, "inner_optimizer", optimizer)
    applied = applying.apply

    def apply(gradients, *given, **named):
        gradients = list(gradients)
        gradient = gradients[number]
        odd = np.arange(np.prod(gradient.shape)).reshape(gradient.shape) % 2
        gradients[number] = gradient * np.where(odd, 1.0, factor).astype("float32")
        return applied(gradients, *given, **named)

    applying.apply = apply
    return optimizer


def has_gradient(weight):
    """Whether a loss depends on a weight: on a bias before a normalization it does not."""
    return not weight.path.endswith(("/key/bias", "conv2d/bias"))


def build(case, factor):
    """The model, compiled."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.policy)
    try:
        model, loss = globals()[case.model]()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = catalogue.subjects()[case.optimizer].options()["optimizer"]
    if factor != 1:
        numbers = [n for n, v in enumerate(model.trainable_variables) if has_gradient(v)]
        optimizer = multiplied(optimizer, numbers[int(case.weight * len(numbers))], factor)
    model.compile(optimizer, loss, steps_per_execution=case.steps)
    return model


def verified(case):
    """What `ktd.verify` says."""
    factors = iter((1.0, case.factor))
    strategy = ktd.TPUStrategy(case.mesh, case.plan, remat=case.remat, topology=SLICE)
    return ktd.verify(lambda: build(case, next(factors)), strategy, batch_size=13)


def seen(case):
    """Whether it is found equal as it should be, and what differs."""
    found = verified(case)
    wrong = [(row.name, row.difference, row.allowed) for row in found.wrong]
    return found.equal == (case.factor == 1), wrong[:3]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.number):
        case = drawn(seed)
        try:
            right, wrong = seen(case)
        except (RuntimeError, ValueError) as error:
            right, wrong = False, str(error)[:500]
        print(json.dumps([right, seed, case.__dict__, wrong]), flush=True)


if __name__ == "__main__":
    ktd.simulate(8)
    main()
