"""Programs in which somebody else holds the arrays of a model that trains with donated state.

python tests/training/shared_arrays.py target '{"data": 4, "model": 2}' 41
"""

import json
import sys

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(13, 8)).astype("float32")
Y = _RNG.normal(size=(13, 4)).astype("float32")


def build(blocks, **optimizer):
    """Two weights for each block, and two more; three times as many variables with Adam's."""
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((8,))
    for _ in range(blocks):
        x = x + 0.1 * keras.layers.Dense(8, activation="tanh")(x)
    model = keras.Model(inputs, keras.layers.Dense(4)(x))
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-3, **optimizer), "mse")
    return model


def fit(model, **options):
    """The losses of a fit, of which the last step is ragged."""
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, **options).history["loss"]


def _follow(target, online):
    for a, b in zip(target.weights, online.weights):
        a.assign(b)


def target(blocks):
    """A target network takes the online one's weights; both train on."""
    online, target = build(blocks), build(blocks)
    found = [fit(online)]
    _follow(target, online)
    found += [fit(target), target.train_on_batch(X, Y), fit(online)]
    return [*found, target.predict(X, verbose=0), *online.get_weights()]


def deleted(blocks):
    """Training one model leaves those alone that took its weights."""
    online, target = build(blocks), build(blocks)
    _follow(target, online)
    return [fit(online), target.predict(X, verbose=0), *target.get_weights()]


def within(blocks):
    """A callback has a target network follow at every step, and uses it."""
    online, target = build(blocks), build(blocks)
    found = []

    def follow(batch, logs=None):
        _follow(target, online)
        found.append(target.predict(X, verbose=0))

    found.append(fit(online, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=follow)]))
    return [*found, *target.get_weights()]


def averages(blocks):
    """A fit ends with averages as weights: both variables hold one array."""
    model = build(blocks, use_ema=True, ema_momentum=0.5)
    return [fit(model), fit(model), model.train_on_batch(X, Y), fit(model), *model.get_weights()]


def kept(blocks):
    """A callback keeps arrays, shards of them, and what it put elsewhere."""
    model, arrays, copies = build(blocks), [], []

    def keep(batch, logs=None):
        for variable in (
            model.weights[0],
            model.optimizer.variables[3],
            model.metrics_variables[0],
        ):
            value = variable.value
            device = next(iter(value.sharding.device_set))
            for each in (value, value.addressable_shards[0].data, jax.device_put(value, device)):
                arrays.append(each)
                copies.append(np.array(each))

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=keep)]
    found = [fit(model, callbacks=callbacks), model.train_on_batch(X, Y), fit(model)]
    for array, copy in zip(arrays, copies):
        np.testing.assert_array_equal(np.asarray(array), copy)
    return found


def given(blocks):
    """Variables are assigned arrays that their giver still holds, also within a fit."""
    model = build(blocks)
    device = next(iter(model.weights[0].value.sharding.device_set))
    arrays = [jax.device_put(np.asarray(w.value) * 0.5, device) for w in model.weights]
    values = [w.assign(array) for w, array in zip(model.weights, arrays)]

    def assign(batch, logs=None):
        values.append(model.weights[0].assign(arrays[0]))

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=assign)]
    found = [fit(model), fit(model, callbacks=callbacks), fit(model)]
    return [*found, *map(np.asarray, arrays), *map(np.asarray, values)]


def replicas(blocks):
    """`strategy.run` between fits gives variables one array, and returns what they hold."""
    model, other = build(blocks), build(blocks)
    strategy = keras.distribution.distribution()

    def step():
        for a, b in zip(other.weights, model.weights):
            a.assign(b.value)
        return model.weights[-1].value

    found = [fit(model)]
    returned = strategy.run(step)
    found += [fit(model), fit(other), model.train_on_batch(X, Y), other.predict(X, verbose=0)]
    return [*found, strategy.local_results(returned)[0], *other.get_weights()]


CASES = {each.__name__: each for each in (target, deleted, within, averages, kept, given, replicas)}


def difference(case, mesh, blocks, **options):
    """The largest difference to one device, whose steps leave their input state alone."""
    one = ktd.TPUStrategy(devices=jax.devices()[:1], donate_state=False)
    results = []
    for strategy in (one, ktd.TPUStrategy(mesh, **options)):
        with strategy.scope():
            results.append([np.asarray(a, np.float64) for a in CASES[case](blocks)])
    gaps = (np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-2) for a, b in zip(*results))
    return max(map(float, gaps))


if __name__ == "__main__":
    ktd.simulate(8)
    print(difference(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
