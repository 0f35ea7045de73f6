"""What a strategy says about logical devices, as layers of a functional model."""

from collections.abc import Sequence

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.partitioner import in_compiled_code


class UnevenBatch(ValueError):
    """Rows of an array outside of compiled code that the devices cannot share evenly."""


class _Annotation(keras.layers.Layer):
    """A layer that says where its input lies; without a strategy it does nothing."""

    def __init__(self, batch_axis: int | None = 0, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.batch_axis = batch_axis
        self.supports_masking = True

    def call(self, inputs):
        strategy = _keras.active_strategy()
        if strategy is None or strategy.num_logical_devices == 1:
            return inputs
        if isinstance(inputs, jax.core.Tracer) and not in_compiled_code():
            return inputs  # run_eagerly: the batch is whole
        try:
            return self._say(strategy, inputs)
        except UnevenBatch:
            return inputs  # only a compiled program can hold an uneven array

    def _say(self, strategy, inputs):
        raise NotImplementedError

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def get_config(self):
        return {**super().get_config(), "batch_axis": self.batch_axis}


@keras.saving.register_keras_serializable("keras_tpu_dist")
class SplitToLogicalDevices(_Annotation):
    """`strategy.split_to_logical_devices` as a layer of a functional model.

    It splits over the logical devices of the strategy that the model runs under; with no strategy,
    or one logical device, it returns its input.

    Args:
        partition_dimensions: How many parts, for each dimension.
        batch_axis: The dimension that the replicas split, or `None`.
    """

    # Else `lint` would take the axes for unused, which split no weight.
    splits_over_logical_devices = True

    def __init__(self, partition_dimensions: Sequence[int], batch_axis: int | None = 0, **kwargs):
        super().__init__(batch_axis, **kwargs)
        self.partition_dimensions = tuple(partition_dimensions)

    def _say(self, strategy, inputs):
        return strategy.split_to_logical_devices(inputs, self.partition_dimensions, self.batch_axis)

    def get_config(self):
        """The arguments it is made from."""
        return {**super().get_config(), "partition_dimensions": list(self.partition_dimensions)}


@keras.saving.register_keras_serializable("keras_tpu_dist")
class ReplicateToLogicalDevices(_Annotation):
    """`strategy.replicate_to_logical_devices` as a layer of a functional model.

    Args:
        batch_axis: The dimension that the replicas split, or `None`.
    """

    def _say(self, strategy, inputs):
        return strategy.replicate_to_logical_devices(inputs, self.batch_axis)
