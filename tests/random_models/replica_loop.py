"""A user's loop of `strategy.run` or `loop`; what it should give, by replicas on one device."""

from typing import Any

import feeds
import jax
import keras
import numpy as np
from drawing import Program
from jax import numpy as jnp

import keras_tpu_dist as ktd

# A row's result depends on other rows of its replica, or is not finite for one of zeros: batches
# that give each replica as many rows. All others get whatever the last batch has.
_EVEN = ("normalized", "masked", "nested_masked", "grouped", "experts", "strided", "shifted")
_EVEN = (*_EVEN, "moved_rows")


def trained(
    program: Program, model: keras.Model, strategy: Any, number: int, epochs: int
) -> dict[str, np.ndarray]:
    """Losses of each step, and a metric, of a model that replica code trains."""
    size, even = program.choices["batch_size"], program.choices["model"] in _EVEN
    rows = program.choices["rows"]
    if even:
        size, rows = (max(n // number, 1) * number for n in (size, rows))
    x, y = feeds.Data(program, model, rows).of_replicas()
    if strategy is None:
        metric = keras.metrics.SparseCategoricalAccuracy()
        step = _Alone(model, metric, number if even else 1)
        batches = [_cut((x, y), start, size) for start in range(0, rows, size)]
    else:
        with strategy.scope():
            metric = keras.metrics.SparseCategoricalAccuracy()
        step = _OnReplicas(strategy, model, metric, even)
        batches = strategy.distribute_dataset((x, y), batch_size=size)
    steps = program.choices["steps_per_execution"]
    steps = 32 if steps == "auto" else steps
    losses = [loss for _ in range(epochs) for loss in step.over(batches, steps)]
    if program.choices["optimizer"].startswith("averaged"):
        model.optimizer.finalize_variable_values(model.trainable_variables)
    accuracy = np.asarray(metric.result())
    return {"replicas' losses": np.asarray(losses), "replicas' accuracy": accuracy}


def _cut(arrays: Any, start: int, size: int) -> Any:
    return keras.tree.map_structure(lambda a: a[start : start + size], arrays)


def _state(model: keras.Model) -> tuple[list, list]:
    kinds = (model.trainable_variables, model.non_trainable_variables)
    return tuple([v.value for v in kind] for kind in kinds)


def _loss(model, weights, others, x, y, mask, total, shares):
    """One replica's share of a batch's loss, and what else its call gives."""
    logits, others, losses = model.stateless_call(
        weights, others, x, training=True, return_losses=True
    )
    each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    each = jnp.mean(jnp.reshape(each, (each.shape[0], -1)), axis=1)
    if mask is not None:
        each = jnp.where(mask, each, 0)
    loss = jnp.sum(each) / total + sum(losses) / shares
    return model.optimizer.scale_loss(loss), (loss, logits, others)


class _OnReplicas:
    """A step by `strategy.run`."""

    def __init__(self, strategy, model, metric, even):
        self._strategy, self._model, self._metric, self._even = strategy, model, metric, even
        self._options = None if even else ktd.RunOptions(dynamic_batch=True)

    def over(self, batches: Any, steps: int) -> Any:
        """The losses of an epoch, of so many steps a launch."""
        strategy = self._strategy
        if steps == 1:
            for batch in batches:
                losses = strategy.run(self._step, (batch,), options=self._options)
                yield np.asarray(strategy.reduce("sum", losses))
            return
        launched = strategy.loop(self._step, batches, steps, options=self._options, outputs="all")
        for _, losses in launched:
            yield from np.asarray(strategy.reduce("sum", losses))

    def _step(self, batch):
        (x, y), model = batch, self._model
        context = ktd.get_replica_context()
        mask = None if self._even else context.batch_mask
        rows = y.shape[0] if self._even else context.batch_size
        total = context.all_reduce("sum", jnp.asarray(rows, "float32"))
        shares = context.num_replicas_in_sync
        weights, others = _state(model)
        (_, (loss, logits, others)), gradients = jax.value_and_grad(
            lambda w: _loss(model, w, others, x, y, mask, total, shares), has_aux=True
        )(weights)
        model.optimizer.apply(context.all_reduce("sum", gradients), model.trainable_variables)
        for variable, value in zip(model.non_trainable_variables, others, strict=True):
            kind = "mean" if "float" in variable.dtype else "max"
            variable.assign(context.all_reduce(kind, value))
        weight = None if mask is None else mask.astype("float32")
        if weight is not None and y.ndim > 1:
            weight = jnp.broadcast_to(weight[:, None], y.shape)
        self._metric.update_state(y, logits, sample_weight=weight)
        return loss


class _Alone:
    """The same step on one device."""

    def __init__(self, model, metric, number):
        self._model, self._metric, self._number = model, metric, number
        self._part = jax.jit(jax.value_and_grad(self._loss, has_aux=True))

    def _loss(self, weights, others, x, y, total):
        return _loss(self._model, weights, others, x, y, None, total, self._number)

    def over(self, batches: Any, steps: int) -> Any:
        """The losses of an epoch, step by step."""
        return map(self._losses_of, batches)

    def _losses_of(self, batch: Any) -> np.ndarray:
        weights, others = _state(self._model)
        rows = len(batch[1])
        parts = [
            _cut(batch, n * (rows // self._number), rows // self._number)
            for n in range(self._number)
        ]
        found = [self._part(weights, others, *part, float(rows)) for part in parts]
        gradients = [sum(each) for each in zip(*(gradients for _, gradients in found))]
        self._apply(gradients)
        after = zip(*(others for (_, (_, _, others)), _ in found))
        for variable, values in zip(self._model.non_trainable_variables, after, strict=True):
            mean = "float" in variable.dtype
            variable.assign(sum(values) / len(values) if mean else np.max(values, axis=0))
        for (_, y), ((_, (_, logits, _)), _) in zip(parts, found):
            self._metric.update_state(y, logits)
        return np.asarray(sum(loss for (_, (loss, _, _)), _ in found))

    def _apply(self, gradients):
        optimizer, weights = self._model.optimizer, self._model.trainable_variables
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.apply(gradients, weights)
            return
        # Its `apply` assigns within a branch, which JAX does not let out.
        if not optimizer.built:
            optimizer.build(weights)
        state = list(optimizer.variables)
        values = [[v.value for v in kind] for kind in (state, weights)]
        new_weights, new_state = optimizer.stateless_apply(values[0], gradients, values[1])
        for variable, value in zip([*weights, *state], [*new_weights, *new_state], strict=True):
            variable.assign(value)
