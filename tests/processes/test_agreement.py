"""What several processes do alike: here, as one of them sees it."""

import contextlib
import os

import keras
import pytest

from keras_tpu_dist.processes import agreement


@pytest.fixture
def second(monkeypatch):
    """As if this were process 1."""
    monkeypatch.setattr(agreement.jax, "process_index", lambda: 1)


def logs():
    return keras.callbacks.CSVLogger("log.csv"), keras.callbacks.TensorBoard("board")


def test_process_0_writes_where_its_user_says():
    csv, board = logs()
    with agreement.files_of_one([csv, board]):
        assert (csv.filename, board.log_dir) == ("log.csv", "board")


def test_the_others_write_to_nowhere(second):
    csv, board = logs()
    with contextlib.suppress(OSError), agreement.files_of_one([csv, board]):
        elsewhere = {csv.filename, board.log_dir}
        assert len(elsewhere) == 2
        assert all(os.path.isdir(os.path.dirname(path)) for path in elsewhere)
        raise OSError("full")
    assert (csv.filename, board.log_dir) == ("log.csv", "board")
    assert not any(os.path.exists(os.path.dirname(path)) for path in elsewhere)


def test_a_backup_of_one_process_is_refused():
    backup = keras.callbacks.BackupAndRestore("backup")
    with (
        pytest.raises(
            NotImplementedError,
            match=r"Received: BackupAndRes.*Use keras_tpu_dist\.callbacks\.Checkpoint",
        ),
        agreement.files_of_one([backup]),
    ):
        pass
