"""The products of `keras.optimizers.Muon`: those of all kernels of an update together."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_tpu_dist._keras import seam
from keras_tpu_dist._keras.seam import Replacement
from keras_tpu_dist._keras.state import stateless_scope
from keras_tpu_dist._keras.structure import optimizers_in
from keras_tpu_dist.common.setting import setting

_MUON = "keras.optimizers:Muon"


class MuonMatrix(NamedTuple):
    """What the update of a kernel orthogonalises.

    Attributes:
        variable: The kernel.
        momentum: Its slot, which may be split otherwise.
        array: The matrix.
        steps: The number of iterations.
    """

    variable: Any
    momentum: Any
    array: Any
    steps: int


# Computes the matrices of all kernels, and, within one of its two passes, that of one kernel.
_together: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
    "together", default=None
)
_one: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("one", default=None)


def newton_schulz_by(
    compute: Callable[[list[MuonMatrix], Callable], list],
) -> AbstractContextManager:
    """A context in which a function computes the products of Muon, for all kernels of an update.

    Args:
        compute: Called as `compute(matrices, iterate)`. `iterate(arrays, steps)` is what Keras
            computes of matrices, also of stacked ones. It returns the results in their order.
    """
    return setting(_together, compute)


def muons_in(optimizer: Any) -> list[Any]:
    """The `keras.optimizers.Muon` among an optimizer and those in it."""
    found = optimizers_in(optimizer).values()
    return [one for one in found if isinstance(one, keras.optimizers.Muon)]


def _kernels(muon: Any, variables: Sequence) -> set[int]:
    """The ids of the variables that a Muon orthogonalises: those that have no second moment."""
    places = ((v, muon._get_variable_index(v)) for v in variables)
    return {id(v) for v, place in places if muon.adam_velocities[place] is None}


def _update(
    stock: Callable, muon: Any, grads: Sequence, trainable_variables: Sequence, learning_rate: Any
) -> None:
    compute, around = _together.get(), stateless_scope()
    if compute is None or around is None:
        stock(muon, grads, trainable_variables, learning_rate)
        return
    every = list(zip(grads, trainable_variables, strict=True))
    chosen = _kernels(muon, trainable_variables)
    kernels = [(gradient, v) for gradient, v in every if id(v) in chosen]
    others = [(gradient, v) for gradient, v in every if id(v) not in chosen]
    asked = _asked(muon, kernels, learning_rate, around)

    def iterate(arrays: Any, steps: int) -> Any:
        return seam.stock(_MUON, "zeropower_via_newtonschulz5")(muon, arrays, steps)

    results = iter(compute(asked, iterate) if asked else [])
    with setting(_one, lambda x, steps: next(results)):
        for gradient, variable in kernels:
            muon.update_step(gradient, variable, learning_rate)
    stock(muon, [g for g, _ in others], [v for _, v in others], learning_rate)


def _asked(muon: Any, kernels: list, learning_rate: Any, around: Any) -> list[MuonMatrix]:
    """The matrices that updates orthogonalise; the updates themselves are forgotten."""
    asked: list[MuonMatrix] = []
    scope = keras.StatelessScope()
    scope.state_mapping.update(around.state_mapping)
    for gradient, variable in kernels:

        def note(x: Any, steps: int, variable: Any = variable) -> Any:
            momentum = muon.momentums[muon._get_variable_index(variable)]
            # Without Nesterov's momentum it is the variable of the momentum itself.
            array = keras.ops.convert_to_tensor(x)
            asked.append(MuonMatrix(variable, momentum, array, steps))
            return array

        with scope, setting(_one, note):
            muon.update_step(gradient, variable, learning_rate)
    return asked


def _iterations(stock: Callable, muon: Any, x: Any, steps: int) -> Any:
    one = _one.get()
    return stock(muon, x, steps) if one is None else one(x, steps)


_WHY = "the products of kernels of one shape are computed together, each kernel on one device"
_HOOK = "an optimizer that updates all variables of one shape at once"

seam.declare(
    Replacement(
        _MUON,
        "_backend_update_step",
        _update,
        why=_WHY,
        hook=_HOOK,
        parameters=("grads", "trainable_variables", "learning_rate"),
    ),
    Replacement(
        _MUON,
        "zeropower_via_newtonschulz5",
        _iterations,
        why=_WHY,
        hook=_HOOK,
        parameters=("x", "steps"),
    ),
)
