"""`generate` of a language model under a strategy: prompts split over the mesh, caches in place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch
from keras_tpu_dist.layout.planner import device_memory
from keras_tpu_dist.programs.answers import Level, PassContext, keep
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.programs.passes import rewritten
from keras_tpu_dist.training.protocol import Strategy


class Generation:
    """The function that `generate` calls: `(inputs, stop_token_ids) -> outputs`.

    Args:
        model: A language model of KerasHub, or one with the same methods.
        strategy: Its strategy.
    """

    def __init__(self, model: Any, strategy: Strategy):
        self._model, self._strategy = model, strategy
        self._programs: dict[Any, Jitted] = {}
        self._variables = _state_variables(model)

    def serves(self, strategy: Strategy) -> bool:
        """Whether it was created for this strategy and for the model's current variables.

        Args:
            strategy: The model's strategy.
        """
        now = _state_variables(self._model)
        return strategy is self._strategy and all(
            len(group) == len(known) and all(a is b for a, b in zip(group, known, strict=True))
            for group, known in zip(now, self._variables, strict=True)
        )

    def __call__(self, inputs: Any, stop_token_ids: Any = None) -> Any:
        """Generates tokens after every prompt.

        Args:
            inputs: The inputs of `generate_step`, such as `token_ids` and `padding_mask` of shape
                `(batch, time)`; any number of rows.
            stop_token_ids: Tokens that end a row, or `None`.
        """
        model, strategy = self._model, self._strategy
        stops = None if stop_token_ids is None else tuple(int(i) for i in stop_token_ids)
        inputs = keras.tree.map_structure(_on_host, inputs)
        with strategy.runner.running(strategy, model, "generate", {"x": inputs}):
            placer = strategy.placer
            if stops not in self._programs:
                options = strategy.runner.compiler_options
                self._programs[stops] = generate_program(model, placer, stops, options)
            batch = placer.place(inputs)
            sampler = _keras.sampler_variables(model)
            state = (
                [np.asarray(variable.value) for variable in sampler],
                *strategy.runner.read_state(model, self._variables),
            )
            outputs, numbers = self._programs[stops](state, batch)
            for variable, value in zip(sampler, numbers, strict=True):
                variable.assign(np.asarray(value))
            return placer.process_rows(outputs, batch)


def generate_step(
    model: Any, placer: BatchPlacer, stop_token_ids: tuple[int, ...] | None
) -> Callable[[Any, PlacedBatch], tuple[Any, list]]:
    """The model's own step as a function, `(state, batch) -> (outputs, sampler's state)`.

    Args:
        model: A model that generates.
        placer: Trims batches in the program.
        stop_token_ids: Tokens that end a row, or `None`.
    """
    sampler = _keras.sampler_variables(model)
    groups = (sampler, *_state_variables(model))
    replicated = named_sharding(placer.mesh)

    def step(state, batch: PlacedBatch):
        mapping: list = []
        for variables, values in zip(groups, state, strict=True):
            mapping += zip(variables, values, strict=True)
        with keras.StatelessScope(state_mapping=mapping) as scope:
            outputs = model.generate_step(placer.trim(batch), stop_token_ids)
        if batch.ragged or not replicated.is_fully_addressable:
            # JAX has no uneven arrays outside of a program, and every host reads all rows.
            outputs = jax.lax.with_sharding_constraint(outputs, replicated)
        return outputs, [scope.get_current_value(variable) for variable in sampler]

    return step


def generate_program(
    model: Any,
    placer: BatchPlacer,
    stop_token_ids: tuple[int, ...] | None,
    compiler_options: dict[str, Any] | None = None,
) -> Jitted:
    """The program of `generate`: `generate_step` as passes rewrite it.

    Args:
        model: See `generate_step`.
        placer: See `generate_step`.
        stop_token_ids: See `generate_step`.
        compiler_options: Options for XLA; `None` for its defaults.
    """
    replicated = named_sharding(placer.mesh)

    def layouts(state, batch: PlacedBatch):
        numbers = [replicated] * len(state[0])
        shardings = (numbers, *_keras.state_shardings(model, "predict"))
        return shardings, placer.shardings(batch)

    mesh, step = placer.mesh, generate_step(model, placer, stop_token_ids)
    where = PassContext(model, "generate", mesh, tuple(placer.data_axes), device_memory(mesh))
    program = rewritten(Level.LAUNCH, step, where)
    program.__name__ = "generate_step"
    keeps = functools.partial(keep, "faults", model, kind=where.kind)
    return Jitted(program, mesh, layouts, keep=keeps, compiler_options=compiler_options)


def _state_variables(model: Any) -> tuple[list, list]:
    return model.trainable_variables, model.non_trainable_variables


def _on_host(leaf: Any) -> Any:
    """Converts an array that `generate` has put on the devices back to a host array."""
    return np.asarray(leaf) if leaf is not None else None
