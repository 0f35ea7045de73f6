"""The migration guide names only what exists and leaves nothing out; its example runs."""

import importlib.util
import inspect
import pathlib
import re

import keras
import pytest

import keras_tpu_dist as ktd

ROOT = pathlib.Path(ktd.__file__).parent.parent
GUIDE = ROOT / "docs" / "migration.md"
EXAMPLE = ROOT / "examples" / "migrate_from_tpustrategy.py"

# tensorflow.org/api_docs/python/tf/distribute/TPUStrategy and .../StrategyExtended (2.16).
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
    "context": """
all_gather all_reduce merge_call devices num_replicas_in_sync
replica_id_in_sync_group strategy
    """,
    "options": """
experimental_enable_dynamic_batch_size experimental_bucketizing_dynamic_shape
experimental_xla_options experimental_fetch_to_device experimental_replication_mode
experimental_place_dataset_on_device experimental_per_replica_buffer_size
    """,
    "assignment": """
build coordinates core_assignment host_device lookup_replicas
num_cores_per_replica num_replicas topology tpu_device tpu_ordinal computation_stride
    """,
    "estimator": """
model_fn model_dir config params use_tpu train_batch_size eval_batch_size
predict_batch_size batch_axis eval_on_tpu export_to_tpu export_to_cpu warm_start_from
embedding_config_spec export_saved_model_api_version
mode predictions loss train_op eval_metrics export_outputs scaffold_fn host_call training_hooks
evaluation_hooks prediction_hooks CrossShardOptimizer
iterations_per_loop num_shards num_cores_per_replica per_host_input_for_training tpu_job_name
initial_infeed_sleep_secs input_partition_dims eval_training_input_configuration
experimental_host_call_every_n_steps experimental_allow_per_host_v2_parallel_get_next
experimental_customized_tpu_infeed_outfeed_session_hook_class
tpu_config evaluation_master master cluster tf_random_seed save_summary_steps
save_checkpoints_steps save_checkpoints_secs session_config keep_checkpoint_max
keep_checkpoint_every_n_hours log_step_count_steps train_distribute device_fn protocol
eval_distribute experimental_distribute experimental_max_worker_delay_secs
session_creation_timeout_secs checkpoint_save_graph_def
    """,
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


@pytest.mark.slow
def test_the_example_runs(capsys):
    specification = importlib.util.spec_from_file_location("migrate", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    assert example.custom_training_loop(steps=3) < 1e-5
    assert example.images_over_logical_devices() < 1e-5
    printed = capsys.readouterr().out
    assert printed.count("on 8 replicas") == 3
    assert "(4, 8, 8, 3) on each" in printed
