"""Checkpoints as somebody else could have written them: changed, with a checksum that is right."""

import json
import pathlib

from keras_tpu_dist.checkpoint import manifest


def manifest_of(directory, step):
    """The manifest's file, and what it says."""
    path = pathlib.Path(directory, str(step), "manifest", "metadata")
    return path, json.loads(path.read_text())


def rewrite(directory, step, change):
    """Changes a manifest in place, and its checksum with it."""
    path, data = manifest_of(directory, step)
    data = change(data) or data
    if isinstance(data, dict):
        content = {key: value for key, value in data.items() if key != "crc32"}
        data = {"crc32": manifest._crc32(content), **content}
    path.write_text(json.dumps(data))
