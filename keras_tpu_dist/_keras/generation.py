"""`generate` of KerasHub's language models, which Keras's trainer does not have.

A `CausalLM` compiles its own function, `make_generate_function`, of `generate_step`. A model of a
strategy gets a function that compiles the strategy's program instead. These are public names of
KerasHub's classes; the hook that would replace this is a `Distribution` that `generate` asks.
"""

import functools
from collections.abc import Callable
from typing import Any

_METHODS = ("generate", "generate_step", "make_generate_function")


def generates(model: Any) -> bool:
    """Whether a model generates tokens, as KerasHub's language models do.

    Args:
        model: A model.
    """
    return all(callable(getattr(type(model), name, None)) for name in _METHODS)


def serve_generation(model: Any, make: Callable[[Any], Any]) -> None:
    """Has a model that generates ask for its function.

    Args:
        model: The model; one that does not generate stays as it is.
        make: From the model to the function, or to `None` for the model's own.
    """
    if generates(model):
        model.make_generate_function = functools.partial(_made, model, make)


def _made(model: Any, make: Callable[[Any], Any]) -> Any:
    function = make(model)
    if function is None:
        return type(model).make_generate_function(model)
    model.generate_function = function
    return function


def sampler_variables(model: Any) -> list:
    """The variables of the sampler that `compile` gave a model: states of random numbers.

    Args:
        model: A model that generates.
    """
    return list(model.sampler.variables)
