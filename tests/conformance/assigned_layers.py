"""Every layer of the table assigned to a logical device, alone and in pairs.

A case of one is `"Dense/plain on 1"`: the layer in the model of the table, and layers that are not
assigned around it. A case of two is `"Dense/plain on 0 > Conv2D/same on 1"`: the second one's
inputs are scaled by what the first one gives for the row.
"""

import itertools
import random

import keras
import layers
import numpy as np
from keras import layers as kl
from layer_cases import Join, Scale

import keras_tpu_dist as ktd

ROWS = tuple(range(1, 18))
THEN, ON = " > ", " on "
BY_NAME = {case.name: case for case in layers.CASES}


def _of_each_class() -> list[str]:
    """The names of one case of each class."""
    return list({name.split("/")[0]: name for name in reversed(BY_NAME)}.values())


SINGLE = [f"{name}{ON}{i % 2}" for i, name in enumerate(BY_NAME)]
PAIRS = [
    f"{one}{ON}{i}{THEN}{other}{ON}{k}"
    for one, other in itertools.product(sorted(_of_each_class()), repeat=2)
    for i, k in ((0, 1), (1, 1))
]


def rows(case: str) -> tuple[int, ...]:
    """Two of 1 to 17 rows, always the same for a case; all cases together have all of them."""
    return tuple(sorted(random.Random(case).sample(ROWS, 2)))


def meshes(case: str) -> tuple[str, ...]:
    return (random.Random(f"{case} on").choice(("4x2", "2x4", "2x2x2")),)


def _parts(case: str) -> list[tuple]:
    return [
        (BY_NAME[name], int(device))
        for name, device in (part.split(ON) for part in case.split(THEN))
    ]


def model_of(case: str, rows: int) -> keras.Model:
    """The model of a case, not compiled."""
    inputs, factor, joined = [], None, []
    for one, device in _parts(case):
        sample = one.inputs(rows, np.random.default_rng(0))
        own = [keras.Input(a.shape[1:], dtype=a.dtype.name) for a in sample]
        tensors = [Scale()(t) if "float" in t.dtype else t for t in own]
        if factor is not None:
            tensors = [_scaled(t, factor) if "float" in t.dtype else t for t in tensors]
        layer = ktd.assign(one.build(), device)
        outputs = one.call(layer, *tensors) if one.call else layer(*tensors)
        joined.append(Join()(keras.tree.flatten(outputs)))
        factor = kl.Dense(1, activation="sigmoid")(joined[-1])
        inputs += own
    kernel = keras.initializers.RandomNormal(stddev=1.0)
    whole = joined[0] if len(joined) == 1 else kl.Concatenate()(joined)
    y = kl.Dense(2, kernel_initializer=kernel, name="head")(whole)
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], y)


def _scaled(tensor, factor):
    return tensor * keras.ops.reshape(factor, (-1, *[1] * (len(tensor.shape) - 1)))


def data_of(case: str, rows: int) -> tuple:
    """Inputs, an array or a tuple, and targets (rows, 2)."""
    rng = np.random.default_rng(0)
    x = sum((tuple(one.inputs(rows, rng)) for one, _ in _parts(case)), ())
    return (x if len(x) > 1 else x[0]), rng.normal(size=(rows, 2)).astype("float32")
