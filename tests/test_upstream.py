"""The patches of docs/upstream.md fit the Keras that is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import keras
import pytest

from keras_tpu_dist import _keras

PAGE = (Path(__file__).parents[1] / "docs" / "upstream.md").read_text()
SECTIONS = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:] if "```diff" in part]
ROOT = Path(keras.__file__).parents[1]


@pytest.mark.skipif(not keras.__version__.startswith("3.15."), reason="patches of Keras 3.15")
@pytest.mark.parametrize("section", SECTIONS, ids=[s.splitlines()[0] for s in SECTIONS])
def test_a_patch_applies(section, tmp_path):
    (patch,) = re.findall(r"```diff\n(.*?)```", section, flags=re.DOTALL)
    files = re.findall(r"^--- a/(.*)$", patch, flags=re.MULTILINE)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = {name: (tmp_path / name).read_text() for name in files}
    command = ["git", "apply", "-"]
    done = subprocess.run(
        command, input=patch, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in files:
        text = (tmp_path / name).read_text()
        assert text != before[name]
        compile(text, name, "exec")


def test_every_replaced_name_is_on_the_page():
    missing = {each.name for each in _keras.table() if f"{each.name}`" not in PAGE}
    # `fit` and the others are one patch.
    assert missing == {"train_on_batch", "test_on_batch", "predict_on_batch"}
