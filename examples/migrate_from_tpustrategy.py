"""The examples of tf.distribute.TPUStrategy's documentation, in Keras 3 on JAX.

    pip install . && python examples/migrate_from_tpustrategy.py

First the custom training loop of the class's own page, then images split over 8 logical devices
with partition_dimensions=[1, 2, 4, 1], each compared with plain Keras on one device. Runs on the
TPU chips here, or on 8 simulated devices. Comments give the TensorFlow line that each line stands
for; docs/migration.md has the whole table.
"""

import argparse
import importlib.util

import keras_tpu_dist as ktd

import numpy as np


def custom_training_loop(steps=5):
    """https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy"""
    import jax
    import keras

    # resolver, experimental_connect_to_cluster and initialize_tpu_system: JAX finds the chips.
    strategy = ktd.TPUStrategy()  # tf.distribute.TPUStrategy(resolver)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(2)]  # tf.keras.layers.Dense(2, input_shape=(5,))
        )
        optimizer = keras.optimizers.SGD(learning_rate=0.1)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        mean_loss = keras.metrics.Mean()
    initial = model.get_weights()

    global_batch_size = 4 * strategy.num_replicas_in_sync
    x, y = classification(steps * global_batch_size)

    def dataset_fn(context):  # the same InputContext
        size = context.get_per_replica_batch_size(global_batch_size)
        for start in range(0, len(x), size):  # no tf.data needed; a tf.data.Dataset works too
            yield x[start : start + size], y[start : start + size]

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)

    def step_fn(inputs):  # not decorated: strategy.run compiles it
        features, labels = inputs

        def compute_loss(weights, others):  # with tf.GradientTape() as tape:
            logits, _ = model.stateless_call(weights, others, features, training=True)
            return loss_fn(labels, logits)

        loss, gradients = jax.value_and_grad(compute_loss)(  # tape.gradient(loss, ...)
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
        )
        # TensorFlow's optimizer summed over replicas by itself; here you call all_reduce.
        gradients = ktd.get_replica_context().all_reduce("mean", gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean_loss.update_state(loss)
        return loss

    for inputs in dist_dataset:
        per_replica = strategy.run(step_fn, args=(inputs,))
        loss = strategy.reduce("MEAN", per_replica, axis=None)
        print(f"  loss {float(loss):.4f} on {len(strategy.local_results(per_replica))} replicas")

    # The same batches by fit, on one device.
    reference = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    reference.set_weights(initial)
    reference.compile(keras.optimizers.SGD(0.1), loss_fn)
    history = reference.fit(x, y, batch_size=global_batch_size, shuffle=False, verbose=0)
    difference = largest(model.get_weights(), reference.get_weights())
    difference = max(difference, abs(float(mean_loss.result()) - history.history["loss"][0]))
    print(f"  largest difference from fit on one device: {difference:.1e}")
    return difference


def images_over_logical_devices():
    """experimental_split_to_logical_devices and experimental_replicate_to_logical_devices."""
    import jax
    import keras

    # DeviceAssignment.build(topology, computation_shape=[1, 2, 2, 2], num_replicas=1); on a v5e
    # computation_shape=(2, 4). Here the devices are used in their order, whatever their kind.
    assignment = ktd.DeviceAssignment.from_order([jax.devices()[:8]])
    strategy = ktd.TPUStrategy(mesh=assignment)
    print(f"  {strategy.num_replicas_in_sync} replica of {strategy.num_logical_devices} devices")

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((16, 32, 3)),
                keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
                keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(4),
            ]
        )

    with strategy.scope():
        model = build()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, 16, 32, 3)).astype("float32")
    labels = rng.integers(0, 4, 4)
    split = strategy.split_to_logical_devices(images, [1, 2, 4, 1])
    print(f"  {images.shape} as [1, 2, 4, 1]: {split.addressable_shards[0].data.shape} on each")

    def step_fn(inputs):
        images, labels = inputs
        # the experimental_ spellings work as well
        images = strategy.split_to_logical_devices(images, [1, 2, 4, 1])
        output = model(images)
        labels = strategy.replicate_to_logical_devices(labels)
        output = strategy.replicate_to_logical_devices(output)
        return loss_fn(labels, output), output

    dist_dataset = strategy.distribute_dataset((images, labels), batch_size=len(images))
    iterator = iter(dist_dataset)
    ((loss, output),) = strategy.local_results(strategy.run(step_fn, args=(next(iterator),)))
    difference = float(np.abs(np.asarray(output) - np.asarray(build()(images))).max())
    print(f"  loss {float(loss):.4f}; largest difference from one device: {difference:.1e}")
    return difference


def classification(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 5)).astype("float32")
    return x, (x[:, 0] + x[:, 1] > 0).astype("int32")


def largest(a, b):
    return max(float(np.abs(one - other).max()) for one, other in zip(a, b))


def tpu_attached():
    """Whether JAX will find a TPU; without starting JAX, after which devices cannot change."""
    import glob

    chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=5)
    arguments = arguments.parse_args()
    if not tpu_attached():
        ktd.simulate(8)
    print("the custom training loop:")
    loop = custom_training_loop(arguments.steps)
    print("images over logical devices:")
    return max(loop, images_over_logical_devices())


if __name__ == "__main__":
    main()
