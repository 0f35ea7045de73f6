"""What an error says of a directory that cannot be written."""

import pytest

from keras_tpu_dist.checkpoint.manifest import CheckpointError
from keras_tpu_dist.checkpoint.reader import checkpoint_errors


@pytest.mark.parametrize(
    ("directory", "words"),
    [("gs://bucket/run7", "roles/storage.legacyBucketReader"), ("/runs/7", "free space")],
)
def test_what_to_check_if_nothing_can_be_written(directory, words):
    with (
        pytest.raises(CheckpointError, match=rf"Checkpoint 3 of '{directory}' .*{words}"),
        checkpoint_errors(directory, "written", 3),
    ):
        raise PermissionError("403 Forbidden")
