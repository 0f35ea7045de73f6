"""A user's program, as pyright sees it beside the installed package (a stage of .ci/run)."""

# Keras exports its names at run time.
# pyright: basic, reportAttributeAccessIssue=false

from typing import assert_type

import keras

import keras_tpu_dist as ktd

assert_type(ktd.simulate(8), None)
strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("kernel", (None, "model"))])
assert_type(strategy, ktd.TPUStrategy)
assert_type(strategy.num_replicas_in_sync, int)
assert_type(strategy.num_logical_devices, int)
assert_type(strategy.data_axes, tuple[str, ...])
assert_type(strategy.input_shard, ktd.InputShard)


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), ktd.layers.TimeDistributed(keras.layers.Dense(2))])
    model.compile("sgd", "mse")
    return model


run = strategy.dry_run(build, batch_size=8, topology="v5e:2x4")
assert_type(run, ktd.DryRun)
assert_type(run.fits, bool | None)
assert_type(ktd.Topology.parse("v5e:2x4"), ktd.Topology)
assert_type(ktd.DeviceAssignment.build("v5e:2x4", (2, 2)), ktd.DeviceAssignment)
rules = ktd.LayoutRules([("kernel", ("data",))])
assert_type(rules.to_json(), str)
for batch in strategy.distribute_dataset([1, 2]):
    strategy.run(lambda x: x, (batch,), options=ktd.RunOptions(dynamic_batch=True))
callbacks = [ktd.callbacks.StopAtStep(3), ktd.callbacks.NameNaN(stop=True)]

# Mistakes that must be told: unnecessary ignores are errors here.
# pyright: reportUnnecessaryTypeIgnoreComment=true
ktd.simulate("8")  # pyright: ignore[reportArgumentType]
ktd.TPUStrategy(prefetch="2")  # pyright: ignore[reportArgumentType]
ktd.RunOptions(dynamic=True)  # pyright: ignore[reportCallIssue]

with ktd.show_progress():
    assert_type(run.to_html(), str | None)
    ranked = ktd.search(build, ["v5e:2x4"], 8, among=[{"mesh": {"data": 8}}])
    assert_type(ranked.to_html("comparison.html"), str | None)
