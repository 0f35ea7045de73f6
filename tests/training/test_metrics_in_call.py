"""What `call` of a layer assigns to a metric, or reads of the optimizer, is as in a plain loop."""

import logging

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, scoped
from keras import layers as kl

import keras_tpu_dist as ktd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 6)).astype("float32")
Y = RNG.integers(0, 2, (13, 1)).astype("float32")
MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2})
FED = {"batch_size": 4, "verbose": 0}


class Endpoint(kl.Layer):
    """The layer of Keras's guide that has loss and accuracy."""

    def __init__(self, **options):
        super().__init__(**options)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, logits, targets=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits))
            self.accuracy.update_state(targets, logits)
        return logits


class Tracked(kl.Layer):
    """A block that has the mean of what it adds."""

    def __init__(self, only_training=False, **options):
        super().__init__(**options)
        self.dense = kl.Dense(6, activation="tanh")
        self.mean = keras.metrics.Mean(name="mean")
        self.only_training = only_training

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, training=False):
        h = self.dense(x)
        if training or not self.only_training:
            self.mean.update_state(h)
        return x + h


class Around(kl.Layer):
    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner = inner

    def call(self, x):
        return self.inner(x)


def trunk(inputs):
    return kl.Dense(1)(kl.Dense(4, activation="tanh")(inputs))


def endpoint(**options):
    keras.utils.set_random_seed(1)
    inputs, targets = keras.Input((6,)), keras.Input((1,))
    model = keras.Model([inputs, targets], Endpoint(name="end")(trunk(inputs), targets))
    model.compile(keras.optimizers.SGD(0.3), **options)
    return model


def compiled_with_it():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, trunk(inputs))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    accuracy = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
    model.compile(keras.optimizers.SGD(0.3), loss, metrics=[accuracy])
    return model


def of_blocks(*blocks, **options):
    h = inputs = keras.Input((6,))
    for block in blocks:
        h = block(h)
    model = keras.Model(inputs, kl.Dense(1)(h))
    with_weights(model)
    model.compile(options.pop("optimizer", "sgd"), "mse", **options)
    return model


def with_weights(model):
    """The model with weights that do not depend on when its layers were made."""
    rng = np.random.default_rng(7)
    model.set_weights([rng.normal(size=w.shape, scale=0.3) for w in model.get_weights()])
    return model


def under(mesh, make, **options):
    with ktd.TPUStrategy(mesh, **options).scope():
        return make()


def reported(model, *data):
    """What every entry point reports."""
    history = model.fit(*data, epochs=2, shuffle=False, **FED).history
    found = {name: np.asarray(values) for name, values in history.items()}
    for name, value in model.evaluate(*data, return_dict=True, **FED).items():
        found[f"evaluate {name}"] = value
    for on_batch in (model.train_on_batch, model.test_on_batch):
        for name, value in on_batch(*data, return_dict=True).items():
            found[f"{on_batch.__name__} {name}"] = value
    return dict(sorted(found.items()))


@pytest.fixture(scope="module")
def expected():
    """The same metric, compiled with the model, in stock Keras."""
    return reported(compiled_with_it(), X, Y)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"steps_per_execution": 4}, {"run_eagerly": True}], ids=str
)
def test_an_endpoint_layer_reports_as_the_metric_that_is_compiled(expected, mesh, options):
    found = reported(under(mesh, lambda: endpoint(**options)), [X, Y])
    assert_close(found, expected)
    assert 0 < found["evaluate accuracy"] < 1


def by_hand(*blocks):
    """The means of the blocks in each epoch, in stock Keras: it counts if `model` is called."""
    model = of_blocks(*blocks)
    found = []
    for _ in range(2):
        model.reset_metrics()
        for i in range(0, len(X), 4):
            model(X[i : i + 4], training=True)
            values = _metric_values(model)
            model.train_on_batch(X[i : i + 4], Y[i : i + 4])
            for variable, value in zip(_metric_variables(model), values, strict=True):
                variable.assign(value)
        found.append([float(b.mean.result()) for b in _tracked(model)])
    return np.asarray(found)


def _tracked(model):
    return [layer for layer in model._flatten_layers() if isinstance(layer, Tracked)]


def _metric_variables(model):
    return [v for layer in _tracked(model) for v in layer.mean.variables]


def _metric_values(model):
    return [np.asarray(v) for v in _metric_variables(model)]


def means(model):
    """The means of a fit in each epoch."""
    found = []
    seen = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: found.append(
            [float(layer.mean.result()) for layer in _tracked(model)]
        )
    )
    model.fit(X, Y, epochs=2, shuffle=False, callbacks=[seen], **FED)
    return np.asarray(found)


@pytest.fixture(scope="module")
def three_means():
    return by_hand(*blocks())


def blocks():
    return [Tracked(name=f"block_{i}") for i in range(3)]


def rematerialized():
    model = of_blocks(*blocks())
    for block in model.layers[1:4]:
        ktd.remat(block)
    return model


def scanned():
    model = of_blocks(*blocks())
    assert "3 blocks Tracked as one" in str(ktd.scan_blocks(model))
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: of_blocks(*blocks()), {"donate_state": True}),
        (lambda: of_blocks(*blocks()), {"remat": "full"}),
        (lambda: of_blocks(*blocks(), steps_per_execution=4), {"remat": "full"}),
        (rematerialized, {}),
        (scanned, {}),
    ],
    ids=["donated", "remat of a strategy", "in launches", "remat", "scan_blocks"],
)
def test_blocks_that_are_computed_otherwise_count_as_by_hand(three_means, make, options):
    assert_close(means(under(MESHES[2], make, **options)), three_means)


def test_accumulated_gradients_count_every_small_batch():
    def make():
        optimizer = keras.optimizers.SGD(0.3, gradient_accumulation_steps=2)
        return of_blocks(*blocks(), optimizer=optimizer, steps_per_execution=2)

    eager = make()
    eager.run_eagerly, eager.steps_per_execution = True, 1
    strategy = ktd.TPUStrategy({"data": 1}, devices=jax.devices()[:1])
    with strategy.scope():
        eager.compile(keras.optimizers.SGD(0.3, gradient_accumulation_steps=2), "mse")
    assert_close(means(under(MESHES[1], make)), means(eager))


@pytest.mark.parametrize("steps", [1, 4])
def test_it_counts_in_training_alone_within_layers_and_models(steps):
    def make(around=Around, **options):
        return of_blocks(around(Tracked(True, name="tracked"), name="around"), **options)

    def model_within(inner, name):
        return keras.Sequential([keras.Input((6,)), inner], name=name)

    (expected,) = by_hand(Tracked(True, name="tracked")).T
    for around in (Around, model_within):
        model = under(MESHES[1], lambda: make(around, steps_per_execution=steps), donate_state=True)
        assert_close(means(model)[:, 0], expected)
        model.evaluate(X, Y, **FED)
        assert float(_tracked(model)[0].mean.result()) == 0.0


def test_a_prediction_counts_in_no_metric():
    model = under(MESHES[0], lambda: of_blocks(*blocks()))
    model.fit(X, Y, **FED)
    before = _metric_values(model)
    model.predict(X, **FED)
    assert_close(_metric_values(model), before)
    assert before[1] > 0


def test_mixed_precision_counts_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = under(MESHES[1], lambda: of_blocks(Tracked(name="tracked")))
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = np.tile(X, (100, 1)), np.tile(Y, (100, 1))
    model.evaluate(x, y, **FED)
    total, count = _metric_values(model)
    assert count == 1300
    model.evaluate(X, Y, **FED)
    assert_close(_metric_values(model)[0] * 100, total, 0.5)


class ByIteration(kl.Layer):
    """A layer that reads what the optimizer counts."""

    def __init__(self, optimizer, **options):
        super().__init__(**options)
        self.counter = lambda: optimizer.iterations  # which Keras does not track

    def call(self, x):
        return x * (1.0 + 0.1 * keras.ops.cast(self.counter().value, "float32"))


def by_iteration(**options):
    optimizer = keras.optimizers.SGD(0.01)
    return of_blocks(ByIteration(optimizer), optimizer=optimizer, **options)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
def test_call_reads_the_optimizer_as_it_is_in_the_step(steps):
    def everything(model):
        first = reported(model, X, Y)
        return [*first.values(), model.predict(X, **FED), *reported(model, X, Y).values()]

    eager = under({"data": 1}, lambda: by_iteration(run_eagerly=True), devices=jax.devices()[:1])
    model = under(MESHES[1], lambda: by_iteration(steps_per_execution=steps))
    assert_close(everything(model), everything(eager))


class Assigns(kl.Layer):
    def __init__(self, variable, **options):
        super().__init__(**options)
        self.variable = lambda: variable  # which Keras does not track

    def call(self, x):
        self.variable().assign(self.variable() + 1)
        return x


def test_an_assignment_to_the_optimizer_in_call_is_an_error():
    def make():
        optimizer = keras.optimizers.SGD(0.01)
        return of_blocks(Assigns(optimizer.iterations), optimizer=optimizer)

    model = under(MESHES[0], make)
    with pytest.raises(ValueError, match=r"assigns none.*'sgd/iteration' in the call"):
        model.fit(X, Y, **FED)


def test_an_assignment_to_a_variable_of_no_layer_is_said_to_be_lost(caplog):
    model = under(MESHES[0], lambda: of_blocks(Assigns(keras.Variable(0.0, name="mine"))))
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        model.fit(X, Y, **FED)
    (text,) = [m for m in caplog.messages if "is lost" in m]
    assert "variable 'mine', which the model does not track, is lost" in text


class Model(keras.Model):
    def __init__(self):
        super().__init__(name="inner")
        self.mean = keras.metrics.Mean(name="own")

    def call(self, x):
        self.mean.update_state(x)
        return x


def test_a_metric_of_a_model_within_the_model_is_said_to_be_lost(caplog):
    model = under(MESHES[0], lambda: of_blocks(Model()))
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        model.fit(X, Y, **FED)
    (text,) = [m for m in caplog.messages if "is lost" in m]
    assert "assigns to metric 'own' of model 'inner' is lost" in text


class Counts(Tracked):
    """A layer that counts in another function than `call`, if it is given one."""

    def __init__(self, through=lambda counted, x: counted(x), **options):
        super().__init__(**options)
        self.through = through

    def call(self, x):
        def counted(x):
            self.mean.update_state(x)
            return x

        return self.through(counted, x)


def with_remat_scope():
    with keras.RematScope(mode="full"):
        return Counts(name="block")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Counts(lambda counted, x: jax.checkpoint(counted)(x), name="block"),
        with_remat_scope,
    ],
    ids=["jax.checkpoint", "keras.RematScope"],
)
def test_a_metric_within_a_function_that_jax_recomputes_is_an_error(make):
    says = r"calling Counts.call[^$]*assignment to variable 'mean/total'.*keras_tpu_dist.remat"
    with pytest.raises((ValueError, RuntimeError), match=says):
        under(MESHES[1], lambda: of_blocks(make())).fit(X, Y, **FED)


def test_a_metric_within_a_loop_is_an_error_that_names_it():
    def in_loop(counted, x):
        return jax.lax.scan(lambda carry, _: (counted(carry), None), x, None, length=2)[0]

    model = under(MESHES[1], lambda: of_blocks(Counts(in_loop, name="block")))
    with pytest.raises(ValueError, match="assignment to metric 'mean' of layer 'block' within one"):
        model.fit(X, Y, **FED)


class OwnStep(keras.Model):
    """A step with the losses of Keras, or without."""

    def __init__(self, *args, of_keras, **options):
        super().__init__(*args, **options)
        self.of_keras = of_keras

    def own_updates(self, trainable, others, metrics, x, y, **_):
        outputs, others = self.stateless_call(trainable, others, x, training=True)
        return self.compute_loss(x, y, outputs), (0.0, outputs, others, metrics)

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y = data[:2]
        updates = self.own_updates
        named = {}
        if self.of_keras:
            updates, named = self.compute_loss_and_updates, {"sample_weight": None}
            named |= {"training": True, "optimizer_variables": slots}
        (loss, aux), gradients = jax.value_and_grad(updates, has_aux=True)(
            trainable, others, metrics, x, y, **named
        )
        _, _, others, metrics = aux
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss}, (trainable, others, slots, metrics)


def with_own_step(of_keras):
    inputs = keras.Input((6,))
    outputs = kl.Dense(1)(Tracked(name="tracked")(inputs))
    model = with_weights(OwnStep(inputs, outputs, of_keras=of_keras))
    model.compile("sgd", "mse")
    return model


def test_a_step_of_the_users_passes_on_what_keras_gives_it():
    model = under(MESHES[1], lambda: with_own_step(True))
    assert_close(means(model), by_hand(Tracked(name="tracked")))


def test_a_step_that_calls_the_model_itself_is_an_error():
    model = under(MESHES[1], lambda: with_own_step(False))
    with pytest.raises(ValueError, match=r"metric 'mean' of layer 'tracked'.*step of 'OwnStep'"):
        model.fit(X, Y, **FED)


def in_replicas(updates):
    """The mean that a layer counts in `strategy.run`, on eight rows."""
    strategy = ktd.TPUStrategy({"data": 8})
    with strategy.scope():
        model = of_blocks(Tracked(name="tracked"))

    def step(batch):
        updates(model, *batch)

    for batch in strategy.distribute_dataset((X[:8], Y[:8]), batch_size=8):
        strategy.run(step, (batch,))
    return float(_tracked(model)[0].mean.result())


def state_of(model):
    groups = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
    return [[v.value for v in group] for group in groups]


def test_replica_code_counts_in_what_it_calls(caplog):
    def direct(model, x, y):
        model(x)

    def by_updates(model, x, y):
        *_, metrics = model.compute_loss_and_updates(*state_of(model), x, y, None)[1]
        for variable, value in zip(model.metrics_variables, metrics, strict=True):
            variable.assign(value)

    def stateless(model, x, y):
        model.stateless_call(*state_of(model)[:2], x)

    model = of_blocks(Tracked(name="tracked"))
    model(X[:8])
    expected = float(_tracked(model)[0].mean.result())
    assert_close([in_replicas(direct), in_replicas(by_updates)], [expected] * 2)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        assert in_replicas(stateless) == 0.0
    (text,) = [m for m in caplog.messages if "is lost" in m]
    assert "metric 'mean' of layer 'tracked' is lost" in text


def test_without_a_strategy_keras_is_as_it_is():
    with scoped(None):
        model = of_blocks(Tracked(name="tracked"))
    assert model.train_on_batch(X, Y, return_dict=True)["mean"] == 0.0
    with pytest.raises(TypeError):
        model.fit(X, Y, **FED)
