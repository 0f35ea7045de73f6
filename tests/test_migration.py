"""The migration guide names only what exists and leaves nothing out; TensorFlow's names answer."""

import importlib
import inspect
import os
import pathlib
import re
import runpy

import keras
import numpy as np
import pytest
from helpers import assert_close, loaded, python

import keras_tpu_dist as ktd
from keras_tpu_dist.common import tensorflow_names

ROOT = pathlib.Path(ktd.__file__).parent.parent
GUIDE = ROOT / "docs" / "migration.md"
ESTIMATOR = ROOT / "docs" / "coming_from.md"
EXAMPLE = ROOT / "examples" / "migrate_from_tpustrategy.py"

# Attributes by where a user writes them, public ones of the classes in TensorFlow 2.21.
ATTRIBUTES = {
    "strategy": """
cluster_resolver extended num_replicas_in_sync colocate_vars_with configure
distribute_datasets_from_function experimental_assign_to_logical_device
experimental_distribute_dataset experimental_distribute_datasets_from_function
experimental_distribute_values_from_function experimental_local_results
experimental_replicate_to_logical_devices experimental_run
experimental_split_to_logical_devices gather group make_dataset_iterator
make_input_fn_iterator reduce run scope unwrap update_config_proto
experimental_make_numpy_dataset steps_per_run
    """,
    "extended": """
batch_reduce_to broadcast_to call_for_each_replica colocate_vars_with
experimental_between_graph experimental_logical_device experimental_make_numpy_dataset
experimental_require_static_shapes experimental_run_steps_on_iterator
experimental_should_init lazy_variable_tracker non_slot_devices num_hosts
num_replicas_per_host parameter_devices read_var reduce_to should_checkpoint
should_save_summary tpu_hardware_feature tpu_run update update_non_slot value_container
variable_created_in_scope worker_devices
    """,
    "context": """
all_gather all_reduce devices experimental_logical_device merge_call
num_replicas_in_sync replica_id_in_sync_group strategy
    """,
    "value": "values",
    "dataset": "element_spec reduce",
    "iterator": "element_spec get_next get_next_as_optional",
    "options": """
experimental_bucketizing_dynamic_shape experimental_enable_dynamic_batch_size
experimental_xla_options
    """,
    "assignment": """
build coordinates core_assignment host_device lookup_replicas num_cores_per_replica
num_replicas topology tpu_device tpu_ordinal
    """,
    "topology": """
cpu_device_name_at_coordinates device_coordinates mesh_rank mesh_shape missing_devices
num_tasks num_tpus_per_task serialized task_ordinal_at_coordinates
tpu_device_name_at_coordinates tpu_device_ordinal_at_coordinates
    """,
    "package": """
CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy
MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy
ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended
TPUStrategy cluster_resolver coordinator experimental experimental_set_strategy
get_replica_context get_strategy has_strategy in_cross_replica_context
CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
CommunicationOptions PreemptionCheckpointHandler PreemptionWatcher TerminationConfig
ValueContext partitioners rpc DeviceAssignment DeviceOrderMode HardwareFeature
TPUSystemMetadata Topology embedding initialize_tpu_system shutdown_tpu_system
TPUClusterResolver TPUEstimator TPUEstimatorSpec TPUConfig RunConfig InputPipelineConfig
CrossShardOptimizer StopAtStepHook NanTensorHook cross_replica_sum bfloat16_scope
    """,
}
# Arguments by the callable that a user gives them to.
ARGUMENTS = {
    "TPUStrategy": """
tpu_cluster_resolver experimental_device_assignment experimental_spmd_xla_partitioning
device_assignment steps_per_run tpu
    """,
    "RunOptions": ATTRIBUTES["options"],
    "InputOptions": """
experimental_fetch_to_device experimental_replication_mode
experimental_place_dataset_on_device experimental_per_replica_buffer_size
    """,
    "TPUEstimator": """
model_fn model_dir config params use_tpu train_batch_size eval_batch_size
predict_batch_size batch_axis eval_on_tpu export_to_tpu export_to_cpu warm_start_from
embedding_config_spec export_saved_model_api_version
    """,
    "TPUEstimatorSpec": """
mode predictions loss train_op eval_metrics export_outputs scaffold_fn host_call
training_hooks evaluation_hooks prediction_hooks
    """,
    "TPUConfig": """
iterations_per_loop num_shards num_cores_per_replica per_host_input_for_training
tpu_job_name initial_infeed_sleep_secs input_partition_dims
eval_training_input_configuration experimental_host_call_every_n_steps
experimental_allow_per_host_v2_parallel_get_next
experimental_customized_tpu_infeed_outfeed_session_hook_class
    """,
    "RunConfig": """
tpu_config evaluation_master master cluster model_dir tf_random_seed save_summary_steps
save_checkpoints_steps save_checkpoints_secs session_config keep_checkpoint_max
keep_checkpoint_every_n_hours log_step_count_steps train_distribute device_fn protocol
eval_distribute experimental_distribute experimental_max_worker_delay_secs
session_creation_timeout_secs checkpoint_save_graph_def
    """,
}


# What the guide's tables must name; tensorflow.org/api_docs/python/tf/distribute/TPUStrategy and
# .../StrategyExtended (2.16) have no more of the strategy and of its `extended`.
LEFT = {
    "tpu_strategy": """
cluster_resolver extended num_replicas_in_sync
distribute_datasets_from_function experimental_assign_to_logical_device
experimental_distribute_dataset experimental_distribute_values_from_function
experimental_local_results experimental_replicate_to_logical_devices
experimental_split_to_logical_devices gather reduce run scope
tpu_cluster_resolver experimental_device_assignment experimental_spmd_xla_partitioning
    """,
    "extended": """
experimental_require_static_shapes parameter_devices worker_devices batch_reduce_to
colocate_vars_with reduce_to update value_container variable_created_in_scope
    """,
    "context": ATTRIBUTES["context"],
    "options": ARGUMENTS["RunOptions"] + ARGUMENTS["InputOptions"],
    "assignment": ATTRIBUTES["assignment"] + "computation_stride",
    "estimator": "CrossShardOptimizer"
    + "".join(
        ARGUMENTS[kind] for kind in ("TPUEstimator", "TPUEstimatorSpec", "TPUConfig", "RunConfig")
    ),
}


def rows():
    """`(left, right)` of each row of the guide's tables."""
    found = []
    for line in GUIDE.read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) == 2 and not set(cells[0]) <= set("- "):
            found.append((cells[0].strip(), cells[1].strip()))
    return [row for row in found if row != ("TensorFlow", "here")]


def test_every_row_has_an_answer():
    assert len(rows()) > 100
    for left, right in rows():
        assert len(right) > 3, left
        if right.startswith("none"):
            assert len(right) > len("none; "), f"{left}: {right} does not say why"


@pytest.mark.parametrize("of", LEFT)
def test_nothing_is_left_out(of):
    left = "\n".join(cell for cell, _ in rows())
    missing = [name for name in LEFT[of].split() if not re.search(rf"\b{name}\b", left)]
    assert not missing


def test_every_name_of_ours_exists():
    ours = "\n".join(right for _, right in rows()) + GUIDE.read_text().split("| TensorFlow")[0]
    strategy, context = ktd.TPUStrategy, ktd.ReplicaContext
    dotted = set(re.findall(r"\bktd\.([A-Za-z_][\w.]*\w)", ours))
    assert len(dotted) > 15
    for name in dotted:
        owner = ktd
        for part in name.split("."):
            assert hasattr(owner, part), f"ktd.{name}"
            owner = getattr(owner, part)
    for prefix, owner in (("strategy", strategy), ("context", context)):
        names = set(re.findall(rf"(?<![\w.]){prefix}\.(\w+)", ours)) - {"value"}
        assert len(names) > 5
        assert not [name for name in names if not hasattr(owner, name)]
    for name in set(re.findall(r"\bkeras\.([\w.]+\w)", ours)):
        owner = keras
        for part in name.split("."):
            assert hasattr(owner, part), f"keras.{name}"
            owner = getattr(owner, part)
    # options that rows promise
    given = set(inspect.signature(ktd.TPUStrategy.__init__).parameters)
    assert {"mesh", "devices", "topology", "batch_axis", "prefetch"} <= given
    assert {"dynamic_batch", "buckets", "axis"} <= set(inspect.signature(ktd.RunOptions).parameters)


@pytest.fixture(scope="module")
def objects():
    """What a user of TensorFlow writes names of, and what it is here."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    dataset = strategy.distribute_dataset(np.arange(16), batch_size=8)
    contexts = []

    def noted():
        contexts.append(ktd.get_replica_context())
        return 1.0

    return {
        "value": strategy.run(noted),
        "strategy": strategy,
        "extended": strategy.extended,
        "context": contexts[0],
        "dataset": dataset,
        "iterator": iter(dataset),
        "options": ktd.RunOptions(),
        "assignment": ktd.DeviceAssignment.build("v5e:2x2", computation_shape=(1, 2)),
        "topology": ktd.Topology.parse("v5e:2x2"),
        "package": ktd,
    }


def answer(name, use):
    """The sentence that says what to write instead of a name."""
    with pytest.raises((AttributeError, TypeError)) as caught:
        use()
    text = str(caught.value)
    assert re.fullmatch(r"[^\n]+ is TensorFlow's, and .+\. Received: .+\. .+\.", text), text
    assert name in text
    return text


@pytest.mark.parametrize("of", ATTRIBUTES)
def test_attributes_exist_or_say_what_to_write(of, objects):
    has_parts = {*ARGUMENTS, "TPUClusterResolver", "extended"}
    for name in ATTRIBUTES[of].split():
        if name not in has_parts and name not in dir(objects[of]):
            answer(name, lambda name=name: getattr(objects[of], name))


@pytest.mark.parametrize("of", ARGUMENTS)
def test_arguments_say_what_to_write(of):
    for name in ARGUMENTS[of].split():
        text = answer(name, lambda name=name: getattr(ktd, of)(**{name: None}))
        assert (tensorflow_names.of_argument(of, name) or "?") in text


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: ktd.TPUStrategy("tensor_parallel"), r"layout='tensor_parallel'"),
        (lambda: ktd.TPUStrategy("v5e:4x4"), r"topology='v5e:4x4'"),
        (lambda: ktd.TPUStrategy("v5e-8"), r"topology='v5e-8'"),
        (lambda: ktd.TPUStrategy("local"), "JAX finds the chips"),
        (lambda: ktd.TPUStrategy("tpu"), r"mesh='tpu'. Leave it out: JAX finds the chips"),
        (lambda: ktd.TPUStrategy(plan="fsdp"), r"Did you mean layout='fsdp'\?"),
        (lambda: ktd.TPUStrategy(iterations_per_loop=100), "steps_per_execution=N"),
        (lambda: ktd.TPUConfig(100, num_shards=8, num_cores_per_replica=2), '"model": N'),
        (lambda: ktd.callbacks.Checkpoint("x", save_checkpoints_steps=9), "every_steps="),
        (lambda: ktd.TPUStrategy().distribute_datasets_from_function(iter, 3), "prefetch=N"),
        (lambda: ktd.DeviceAssignment.build("v5e:2x2", computation_stride=[1]), "from_order"),
        (lambda: ktd.TPUStrategy().nothing_such, "no attribute 'nothing_such'"),
        (lambda: ktd.nothing_such, "no attribute 'nothing_such'"),
    ],
)
def test_what_is_written_elsewhere_or_by_position(use, said):
    with pytest.raises((AttributeError, TypeError, ValueError), match=said):
        use()


def test_what_the_answers_name_exists(objects):
    def sentences(table):
        for value in table.values():
            yield from [value] if isinstance(value, str) else sentences(value)

    tables = tensorflow_names.answers().values()
    text = "\n".join(s for table in tables for s in sentences(table))
    owners = {
        "strategy": objects["strategy"],
        "context": ktd.ReplicaContext,
        "ktd": ktd,
        "keras": keras,
    }
    owners |= {"topology": objects["topology"], "assignment": objects["assignment"]}
    found = re.findall(rf"\b({'|'.join(owners)})((?:\.[A-Za-z_]+)+)", text)
    assert len(found) > 40
    for prefix, path in found:
        if path == ".extended.NAME":
            continue
        owner = owners[prefix]
        for part in path[1:].split("."):
            assert part in dir(owner) or hasattr(owner, part), f"{prefix}{path}"
            owner = getattr(owner, part, None)


@pytest.mark.slow
def test_no_name_of_the_real_classes_is_missing():
    """The lists above, of which each name is answered, against the TensorFlow that is here."""
    tf = pytest.importorskip("tensorflow")
    strategies = tf.distribute.TPUStrategy, tf.compat.v1.distribute.experimental.TPUStrategy
    tpu = importlib.import_module("tensorflow.python.distribute.tpu_strategy")
    values = importlib.import_module("tensorflow.python.distribute.values")
    classes = {
        "strategy": strategies,
        "extended": (tf.distribute.StrategyExtended, tpu.TPUExtended),
        "context": (tf.distribute.ReplicaContext, tpu._TPUReplicaContext),
        "value": (tf.distribute.DistributedValues, values.PerReplica),
        "dataset": (tf.distribute.DistributedDataset,),
        "iterator": (tf.distribute.DistributedIterator,),
        "assignment": (tf.tpu.experimental.DeviceAssignment,),
        "topology": (tf.tpu.experimental.Topology,),
        "package": (tf.distribute, tf.distribute.experimental, tf.tpu.experimental),
    }
    for of, kinds in classes.items():
        public = {n for kind in kinds for n in dir(kind) if not n.startswith("_")}
        assert public - set(ATTRIBUTES[of].split()) == set(), of
    for of in ("RunOptions", "InputOptions"):
        assert set(getattr(tf.distribute, of)._fields) == set(ARGUMENTS[of].split())
    taken = {n for k in strategies for n in inspect.signature(k.__init__).parameters}
    assert taken - {"self"} <= set(ARGUMENTS["TPUStrategy"].split())


@pytest.mark.slow
def test_the_example_runs(capsys):
    example = loaded(EXAMPLE, "migrate")
    assert example.custom_training_loop(steps=3) < 1e-5
    assert example.images_over_logical_devices() < 1e-5
    printed = capsys.readouterr().out
    assert printed.count("on 8 replicas") == 3
    assert "(4, 8, 8, 3) on each" in printed


# The strategy of two CPUs in place of the TPU's, and the argument that Keras 3 no longer knows.
AS_ON_A_TPU = """
import runpy
import keras, tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
tf.distribute.TPUStrategy = lambda resolver: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
tf.distribute.cluster_resolver.TPUClusterResolver = lambda tpu: tpu
tf.config.experimental_connect_to_cluster = lambda resolver: None
tf.tpu.experimental.initialize_tpu_system = lambda resolver: None
stock = keras.optimizers.Optimizer.apply_gradients
keras.optimizers.SGD.apply_gradients = lambda self, pairs, skip_gradients_aggregation: stock(
    self, pairs
)
runpy.run_path("old.py")
"""


def both(page, title):
    """What a page has under a title: the code in TensorFlow, and the code here."""
    text = page.read_text().split(title)[1]
    old, new = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return old, new


def loops():
    return both(GUIDE, "## A complete custom loop")


@pytest.mark.slow
def test_the_whole_loop_in_tensorflow_runs(tmp_path):
    pytest.importorskip("tensorflow")
    (tmp_path / "old.py").write_text(loops()[0])
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "XLA_FLAGS": ""}
    for epochs in (3, 0):  # resumed, nothing is left to do
        done = python("-c", AS_ON_A_TPU, cwd=tmp_path, env=environment)
        assert len(re.findall(r"epoch \d: loss", done.stdout)) == epochs


@pytest.mark.slow
def test_the_whole_loop_here_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    new, stock = loops()[1], ktd.LoopCheckpoint.save

    def trained(folder):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        names = {}
        exec(compile(new, str(GUIDE), "exec"), names)
        return [*names["model"].get_weights(), names["optimizer"].iterations.numpy()]

    whole = trained(tmp_path / "whole")

    def stopped(saved, step, **numbers):
        stock(saved, step, **numbers)
        if step == 9:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(ktd.LoopCheckpoint, "save", stopped)
        with pytest.raises(RuntimeError, match="power cut"):
            trained(tmp_path / "stopped")
    assert_close(trained(tmp_path / "stopped"), whole, 1e-6)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == [f"epoch {i}" for i in (0, 1, 2, 0, 1, 2)]
    assert printed[4:] == printed[1:3]
    assert (tmp_path / "stopped" / "model.keras").exists()


@pytest.mark.slow
def test_the_estimator_s_counterpart_fine_tunes(tmp_path, monkeypatch, capsys):
    tf = pytest.importorskip("tensorflow")
    monkeypatch.chdir(tmp_path)
    old, new = both(ESTIMATOR, "### A complete model_fn")
    compile(old, str(ESTIMATOR), "exec")
    rng = np.random.default_rng(0)
    for file in range(2):
        with tf.io.TFRecordWriter(f"flowers-{file}.tfrecord") as writer:
            for _ in range(18):
                image = tf.io.encode_jpeg(rng.integers(0, 256, (80, 90, 3), "uint8")).numpy()
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[int(rng.integers(5))])
                    ),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    base = keras.applications.InceptionV3(
        include_top=False, weights=None, pooling="avg", input_shape=(75, 75, 3)
    )
    logits = keras.layers.Dense(7, name="logits")(base.output)
    trained = keras.Model(base.input, logits)
    trained.save("inception_v3.keras")
    # TensorFlow reads the source of what `map` is given.
    pathlib.Path("new.py").write_text(new)
    model = runpy.run_path("new.py")["model"]
    assert int(model.optimizer.iterations) == 6
    assert len(model.trainable_variables) == 2
    assert_close([v.numpy() for v in model.weights[:-2]], [v.numpy() for v in trained.weights[:-2]])
    assert "Epoch 1/100" in capsys.readouterr().out
