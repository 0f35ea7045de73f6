"""Whatever mesh the user has set with `jax.set_mesh`, the numbers are those without one."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, stepped
from jax.sharding import AxisType, Mesh, PartitionSpec

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.checkup import run

MESH = {"data": 2, "fsdp": 2, "model": 2}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 8)).astype("float32")
Y = RNG.normal(size=(13, 4)).astype("float32")
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def users_mesh(kind):
    return jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(TYPES[kind],) * 2)


def within(order, strategy, mesh):
    """The contexts of the user's mesh and of the strategy, one within the other."""
    stack = contextlib.ExitStack()
    if order == "mesh first":
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(strategy.scope())
    elif order == "scope first":
        stack.enter_context(strategy.scope())
        stack.enter_context(jax.set_mesh(mesh))
    else:
        keras.distribution.set_distribution(strategy)
        stack.callback(keras.distribution.set_distribution, None)
        stack.enter_context(jax.set_mesh(mesh))
    return stack


ORDERS = ("mesh first", "scope first", "set_distribution")


def model(seed=0):
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu", name="up"),
        keras.layers.BatchNormalization(name="bn"),
        keras.layers.Dropout(0.2, name="drop"),
        keras.layers.Dense(4, name="down"),
    ]
    made = keras.Sequential(layers, name="mlp")
    made.compile("adam", "mse", metrics=["mae"], steps_per_execution=4)
    return made


def of_fit(made):
    """The doors of Keras."""
    validation = {"validation_data": (X[:5], Y[:5]), "validation_batch_size": 2}
    history = made.fit(X, Y, batch_size=2, epochs=2, shuffle=False, verbose=0, **validation).history
    return {
        "fit": [history[name] for name in sorted(history)],
        "evaluate": made.evaluate(X, Y, batch_size=2, verbose=0),
        "predict": made.predict(X, batch_size=5, verbose=0),
        "train_on_batch": made.train_on_batch(X, Y),
        "test_on_batch": made.test_on_batch(X, Y),
        "predict_on_batch": made.predict_on_batch(X),
        "get_weights": made.get_weights(),
    }


def of_loops(strategy, made):
    """The doors of custom loops."""
    optimizer, mae = keras.optimizers.SGD(0.1), keras.metrics.MeanAbsoluteError()
    optimizer.build(made.trainable_variables)

    def step(batch):
        x, y = batch
        loss, outputs = stepped(made, optimizer, x, lambda outputs: jnp.mean((outputs - y) ** 2))
        mae.update_state(y, outputs)
        return loss, outputs

    dataset = strategy.distribute_dataset((X[:12], Y[:12]), batch_size=4)
    batches = iter(dataset)
    loss, outputs = strategy.run(step, (next(batches),))
    stacked, _ = strategy.run(step, (batches,), steps=2, outputs="all")
    looped = [
        strategy.local_results(losses)
        for _, (losses, _) in strategy.loop(step, dataset, steps_per_launch=2)
    ]
    uneven = strategy.distribute_values_from_function(
        lambda context: np.arange(1 + context.replica_id_in_sync_group, dtype="float32")
    )
    found = {
        "run": [strategy.local_results(each) for each in (loss, outputs, stacked)],
        "loop": looped,
        "reduce": [strategy.reduce("mean", loss), strategy.reduce("sum", uneven, axis=0)],
        "gather": [strategy.gather(outputs, 0), strategy.gather(uneven, 0)],
        "weights": made.get_weights(),
    }
    with strategy.scope():
        found["result"] = mae.result()
    return found


def of_files(strategy, made, folder):
    """The doors of checkpoints: each loads into a model of another seed."""
    found = {}
    made.save_weights(folder / "a.weights.h5")
    with ktd.LoopCheckpoint(folder / "loop", made) as checkpoint:
        checkpoint.save(3)
    kept = ktd.callbacks.Checkpoint(folder / "fit", every_steps=3)
    made.fit(X, Y, batch_size=2, shuffle=False, verbose=0, callbacks=[kept])
    weights = made.get_weights()
    for name, load in {
        "load_weights": lambda other: other.load_weights(folder / "a.weights.h5"),
        "restore": lambda other: ktd.restore(other, folder / "fit"),
        "loop": lambda other: ktd.LoopCheckpoint(folder / "loop", other).restore(),
    }.items():
        other = model(seed=1)
        other.optimizer.build(other.trainable_variables)
        load(other)
        found[name] = other.get_weights()
    found["after"] = weights
    return found


def of_reports(strategy, made):
    """The doors that run nothing."""
    run = strategy.dry_run(made, batch_size=13)
    described = ktd.dry_run(model, ktd.TPUStrategy(topology="v5e:2x4"), batch_size=13)
    return {
        "explain": str(strategy.explain(made)),
        "lint": str(strategy.lint(made)),
        "plan": str(ktd.TPUStrategy(MESH, "auto").explain(made)),
        "show": str(strategy.show(made)),
        "dry_run": [str(run), str(described)],
    }


def everything(folder, context, layout="tensor_parallel"):
    strategy = ktd.TPUStrategy(MESH, layout)
    with context(strategy):
        made = model()
        found = of_fit(made)
        found["in loops"] = of_loops(strategy, made)
        found["files"] = of_files(strategy, made, folder)
        found["reports"] = of_reports(strategy, made)
    # What was made within the user's mesh also runs without one.
    found["outside"] = made.evaluate(X, Y, batch_size=5, verbose=0)
    found["trained outside"] = made.fit(X, Y, batch_size=5, shuffle=False, verbose=0).history[
        "loss"
    ]
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    keras.utils.clear_session(free_memory=False)
    return everything(tmp_path_factory.mktemp("none"), lambda strategy: strategy.scope())


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_door_within_a_mesh_of_the_user(kind, order, expected, tmp_path):
    mesh = users_mesh(kind)
    found = everything(tmp_path, lambda strategy: within(order, strategy, mesh))
    reports = found.pop("reports")
    assert reports == expected["reports"]
    assert_close(found, {name: each for name, each in expected.items() if name != "reports"})


@pytest.mark.parametrize(
    ("kind", "order"),
    [("explicit", "scope first"), pytest.param("auto", "mesh first", marks=pytest.mark.slow)],
)
def test_a_fit_and_a_run_within_a_mesh_of_the_user(kind, order):
    def trained(context):
        strategy = ktd.TPUStrategy(MESH)
        with context(strategy):
            made = model()
            losses = made.fit(X, Y, batch_size=5, shuffle=False, verbose=0).history["loss"]
            squares = strategy.run(lambda x: x**2, (jnp.arange(3.0),))
            return losses, strategy.reduce("sum", squares), made.predict(X, verbose=0)

    mesh = users_mesh(kind)
    expected = trained(lambda strategy: strategy.scope())
    assert_close(trained(lambda strategy: within(order, strategy, mesh)), expected)


class Constrained(keras.layers.Layer):
    """Names axes without a mesh, which needs one that is set."""

    def call(self, x):
        return jax.lax.with_sharding_constraint(x, PartitionSpec("data", None))

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.parametrize("kind", TYPES)
def test_a_mesh_with_the_axes_of_the_strategy_stays_set(kind):
    """A layer may name its axes, as before; an Explicit one is set as ours, which is Auto."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    layers = [keras.Input((8,)), Constrained(), keras.layers.Dense(4)]
    with strategy.scope():
        made = keras.Sequential(layers)
        made.compile("sgd", "mse")
    grid = strategy.mesh.devices
    mesh = Mesh(grid, ("data", "model"), axis_types=(TYPES[kind],) * 2)
    with jax.set_mesh(mesh):
        assert made.fit(X[:8], Y[:8], batch_size=8, verbose=0).history["loss"]
        assert jax.sharding.get_mesh() is mesh
    with strategy.scope(), jax.set_mesh(mesh):
        assert jax.sharding.get_mesh() is mesh


def test_the_mesh_of_the_user_is_set_again_after_an_error():
    strategy, mesh = ktd.TPUStrategy(), users_mesh("explicit")
    with jax.set_mesh(mesh):
        with contextlib.suppress(OSError), strategy.scope():
            assert jax.sharding.get_mesh().empty
            raise OSError
        assert jax.sharding.get_mesh() is mesh
        with pytest.raises(ValueError, match="at least one row"), strategy.scope():
            model().fit(X[:0], Y[:0])
        assert jax.sharding.get_mesh() is mesh


def test_a_scope_within_a_traced_function():
    """JAX sets no mesh there; a program keeps the one in which it began."""
    strategy = ktd.TPUStrategy()
    with jax.set_mesh(strategy.mesh):

        @jax.jit
        def twice(x):
            with strategy.scope():
                return 2 * x

        assert_close(twice(jnp.arange(3.0)), [0, 2, 4])
    with jax.set_mesh(users_mesh("auto")):
        assert_close(jax.jit(twice.__wrapped__)(jnp.arange(3.0)), [0, 2, 4])


def test_a_mesh_with_axes_of_another_default_type(monkeypatch):
    """`jax.make_mesh` makes Explicit axes by default; one day `Mesh` may, which Keras calls."""
    made, default = Mesh.__new__, (AxisType.Explicit,)
    monkeypatch.setattr(
        Mesh,
        "__new__",
        lambda cls, devices, names, axis_types=None: made(
            cls, devices, names, axis_types or default * np.ndim(devices)
        ),
    )
    assert Mesh(np.array(jax.devices()), ("data",)).axis_types == default
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    assert set(strategy.mesh.axis_types) == {AxisType.Auto}
    rules = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((4, 2), ("data", "model")))
    rules["up/kernel"] = (None, "model")
    for each in (strategy, ktd.TPUStrategy(layout=rules)):
        with each.scope():
            kernel = model().layers[0].kernel
        assert kernel.value.sharding.mesh is each.mesh


@pytest.mark.slow
def test_a_check_within_a_mesh_of_the_user():
    parts = ("products", "collectives", "random numbers", "programs")
    with jax.set_mesh(users_mesh("explicit")):
        found = run.run_check(
            ktd.TPUStrategy({"data": 4, "model": 2}), run.steps(), 30.0, None, parts
        )
    assert not [part for part in found.parts if part.problems], str(found)
