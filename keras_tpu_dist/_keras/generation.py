"""`generate` of KerasHub's language models, which Keras's trainer does not have.

A `CausalLM` compiles its own function from `generate_step`, in `make_generate_function`. A model of
a strategy gets a function that compiles the strategy's program instead. These are public names of
KerasHub's classes. A `Distribution` hook in `generate` would replace this.
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
    """Makes a model that generates ask for its function.

    Args:
        model: The model; one that does not generate is not changed.
        make: Returns the function for a model, or `None` for the model's own.
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
    """The variables of the sampler that `compile` gave a model: random states.

    Args:
        model: A model that generates.
    """
    return list(model.sampler.variables)
