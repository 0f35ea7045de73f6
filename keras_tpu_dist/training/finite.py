"""Train steps that change nothing once the loss or a variable is not finite."""

import functools
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.input.batch_axis import element_names, flatten
from keras_tpu_dist.input.batches import PlacedBatch
from keras_tpu_dist.processes.arrays import put

# The newest reports, which are not read yet, because reading one waits for its launch. Nothing is
# lost: the launches after a bad one change nothing.
_UNREAD_REPORTS = 2


@dataclass(frozen=True, repr=False)
class NonFinite(Printed):
    """The first train step that gave a value that is not finite.

    Attributes:
        step: The step, counted from 1 at the start of the fit.
        launch: The first and last step of the launch it was in.
        iterations: The number of optimizer steps before the fit.
        losses: The losses that were not finite, with their values.
        variables: Paths of the variables that would have become NaN or infinite.
        inputs: The arrays of the step's batch that were not finite already.
    """

    step: int
    launch: tuple[int, int]
    iterations: int
    losses: dict[str, float]
    variables: tuple[str, ...]
    inputs: tuple[str, ...]

    def to_dict(self) -> dict:
        """The attributes as a dict of plain values."""
        return dict(vars(self))

    def __str__(self):
        found = [f"{name} became {value}" for name, value in self.losses.items()]
        if self.variables:
            more = f" and {len(self.variables) - 3} more" if len(self.variables) > 3 else ""
            found.append(f"NaN or infinity in {', '.join(self.variables[:3])}{more}")
        if self.inputs:
            found.append(f"its batch holds NaN or infinity in {', '.join(self.inputs)}")
        first, last = self.launch
        launch = f", in the launch of steps {first} to {last}" if last > first else ""
        before = f", begun after {self.iterations} optimizer steps" if self.iterations else ""
        return f"at step {self.step} of this fit{before}{launch}: {'; '.join(found)}"


class FiniteWatch:
    """Finds the first step of a fit that is not finite.

    The check is part of the compiled step. If the loss or a variable is not finite, that step and
    all steps after it leave the state unchanged. So the state is that of the last finite step,
    however late the host reads the report, even within a launch of several steps and with donated
    state.

    Args:
        trainer: The model, before its first step.
        on_found: Called, once, with the first step that was not finite.

    Attributes:
        found: The first step that was not finite, once the host knows.
        mask: Which variables are checked, in the order of the training state without metrics.
            Variables that are infinite before training, such as masks of attention layers, are not
            checked.
        health: Whether all was finite, and the number of steps, which the steps pass on beside the
            state; `None` before the first.
    """

    def __init__(self, trainer: Any, on_found: Callable[[NonFinite], None]):
        trainable, non_trainable, slots, _ = _keras.state_groups(trainer)
        variables = [*trainable, *non_trainable, *slots]
        self.mask = tuple(not bool(_is_bad(v.value)) for v in variables)
        bad = [v.path for v, finite in zip(trainable, self.mask, strict=False) if not finite]
        if bad:
            raise value_error(
                "With NameNaN, training must begin with finite weights.",
                received=f"NaN or infinity in {', '.join(bad[:3])} before the first step.",
                fix="Load or initialize these weights again.",
            )
        self.health: Any = None
        self.found: NonFinite | None = None
        self._on_found = on_found
        self._paths = [v.path for v in variables]
        optimizer = getattr(trainer, "optimizer", None)
        self._iterations = 0 if optimizer is None else int(optimizer.iterations)
        self._steps = 0
        self._unread: deque = deque()

    def health_on(self, mesh: Mesh) -> Any:
        """The health for the next launch.

        Args:
            mesh: The mesh on which these two scalars are replicated before the first launch.
        """
        if self.health is None:
            (self.health,) = put([np.array([1, 0], np.int32)], [named_sharding(mesh)])
        return self.health

    def noted(self, outputs: Any, batch: PlacedBatch, steps: int) -> Any:
        """Takes the report out of a launch's outputs and reads those of earlier launches.

        Args:
            outputs: `(outputs of the step, report)`.
            batch: The batch of the launch.
            steps: The number of its steps.
        """
        outputs, report = outputs
        structure = flatten(batch.data)[1]
        first = self._steps + 1
        self._steps += steps
        self._unread.append((report, structure, outputs, (first, self._steps)))
        self.read(all_of_them=False)
        return outputs

    def read(self, all_of_them: bool = True) -> None:
        """Reads the reports of launches that have ended, or waits for all of them.

        Args:
            all_of_them: Whether to wait for every launch; else the newest 2 are read only if ended.
        """
        while self._unread and self.found is None:
            report, structure, outputs, launch = self._unread[0]
            due = all_of_them or len(self._unread) > _UNREAD_REPORTS
            if not (due or report.is_ready()):
                return
            self._unread.popleft()
            report = np.asarray(report)
            if report[0]:
                self.found = self._explained(report, structure, outputs, launch)
                self._on_found(self.found)

    def _explained(self, report: np.ndarray, structure, outputs, launch) -> NonFinite:
        inputs = element_names(jax.tree.unflatten(structure, range(structure.num_leaves)))
        losses = [name for name, _ in _losses(outputs)]
        sizes = [2, len(losses), len(losses), len(self._paths)]
        (_, step), values, *flags = np.split(report, np.cumsum(sizes))
        bad_losses, bad_paths, bad_inputs = (
            [i for i, bad in enumerate(part) if bad] for part in flags
        )
        return NonFinite(
            int(step),
            launch,
            self._iterations,
            {losses[i]: float(values.view(np.float32)[i]) for i in bad_losses},
            tuple(self._paths[i] for i in bad_paths),
            tuple(inputs[i] for i in bad_inputs),
        )


def watched_step(step: Callable, mask: tuple[bool, ...]) -> Callable:
    """A train step that also takes and returns the health, and changes nothing once it is bad.

    Args:
        step: `(state, batch) -> (outputs, state)`.
        mask: Which variables to check; see `FiniteWatch.mask`.

    Returns:
        `((*state, health), batch) -> ((outputs, report), (*state, health))`.
    """

    def watched(state, batch: PlacedBatch):
        *state, health = state
        outputs, new_state = step(tuple(state), batch)
        *groups, _ = new_state
        variables = [value for group in groups for value in group]
        losses = [value for _, value in _losses(outputs)]
        checked = [v if check else None for v, check in zip(variables, mask, strict=True)]
        are_bad = [_is_bad(value) for value in (*losses, *checked)]
        bad = functools.reduce(operator.or_, are_bad, health[0] == 0)
        done = health[1] + 1
        inputs = flatten(batch.data)[0]

        def details():
            values = jnp.array([jnp.mean(value) for value in losses], "float32")
            flags = jnp.array([*are_bad, *map(_is_bad, inputs)], "int32")
            return jnp.concatenate([jax.lax.bitcast_convert_type(values, jnp.int32), flags])

        def none():
            return jnp.zeros(len(losses) + len(are_bad) + len(inputs), "int32")

        # In every step they took as long as a quarter of a small one, and a sum over devices.
        found = _if(bad, details, none)
        # One array: each output of a launch costs the host as much as a small callback.
        report = jnp.concatenate([jnp.stack([bad.astype("int32"), done]), found])
        kept = [
            [
                jnp.where(bad, old.astype(new.dtype), new)
                for new, old in zip(new_group, old_group, strict=True)
            ]
            for new_group, old_group in zip(new_state, state, strict=True)
        ]
        return (outputs, report), (*kept, jnp.stack([1 - bad.astype("int32"), done]))

    return watched


def first_bad(reports: jax.Array) -> jax.Array:
    """The report of the first bad step of a launch; that of the first step if none is bad.

    Args:
        reports: The reports of `watched_step`, each array stacked along a first dimension of steps.
    """
    return reports[jnp.argmax(reports[:, 0])]


def _losses(outputs) -> list[tuple[str, Any]]:
    """The losses in the outputs of a train step, or all outputs if none has such a name."""
    leaves = jax.tree_util.tree_flatten_with_path(outputs)[0]
    named = [(_name(path), leaf) for path, leaf in leaves]
    return [(name, leaf) for name, leaf in named if "loss" in name.lower()] or named


def _name(path) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) or "output"


def _if(condition: Any, first: Callable, second: Callable) -> Any:
    # An eager step would compile both branches again each time.
    if isinstance(condition, jax.core.Tracer):
        return jax.lax.cond(condition, first, second)
    return first() if condition else second()


def _is_bad(value) -> Any:
    if isinstance(value, JAXSparse):
        value = value.data
    if value is None or not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return jnp.asarray(False)
    return ~jnp.all(jnp.isfinite(value))
