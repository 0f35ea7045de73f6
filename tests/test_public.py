"""What `from keras_tpu_dist import` gives: the public names, and no internal package."""

import subprocess
import sys

import keras_tpu_dist as ktd

NAMES = """
CheckpointError DeviceAssignment DistributedDataset DryRun InputContext InputShard LayoutRules
LoopCheckpoint PerReplica Planner ReplicaContext RunOptions TPUStrategy Topology ValueContext
Verification __version__ assign callbacks checkpoints convert diff
dry_run freeze get_replica_context initialize layers loss_and_gradients remat replicate restore
scan_blocks search show_progress simulate split verify
"""


def test_public_names_are_these():
    assert sorted(ktd.__all__) == sorted(NAMES.split())
    assert dir(ktd) == sorted(ktd.__all__)
    assert all(hasattr(ktd, name) for name in ktd.__all__)


def test_help_lists_them():
    code = (
        "import keras_tpu_dist as ktd, pydoc;print(pydoc.render_doc(ktd, renderer=pydoc.plaintext))"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "dry_run(build" in text
    assert "class TPUStrategy" in text
