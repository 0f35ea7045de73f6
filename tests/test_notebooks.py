"""The notebooks run, from the first cell to the last."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# For those who have a TPU; without one their cells simulate devices.
ON_TPU = [path for path in NOTEBOOKS if path.stem.endswith("_tpu")]

# Runs the code of a notebook's cells in one process, as a kernel does, and shows what they end in.
RUNNER = """
import ast, json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, sys.argv[1], "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), sys.argv[1], "eval"), names)
            print("HTML" if hasattr(value, "_repr_html_") and value._repr_html_() else "", value)
"""


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path not in ON_TPU], ids=lambda path: path.stem
)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    client(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    pages = [out["data"]["text/html"] for out in outputs if "text/html" in out.get("data", {})]
    assert len(pages) >= 7  # plan, explain, lint, two pictures, dry run, compare
    assert all('class="ktd"' in page for page in pages)
    assert not [out for out in outputs if out["output_type"] == "error"]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.parametrize("path", ON_TPU, ids=lambda path: path.stem)
def test_a_notebook_for_a_tpu_runs_on_simulated_devices(path, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])}
    env |= {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", RUNNER, str(path)]
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=900, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 cpu" in done.stdout
    assert "loss" in done.stdout
    assert "HTML train step" in done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_outputs_as_text_and_names_no_address(path):
    """`python docs/notebooks.py` writes them; viewers of code show no HTML with its style."""
    text = path.read_text()
    assert "http" not in text
    outputs = [out for cell in json.loads(text)["cells"] for out in cell.get("outputs", [])]
    assert len(outputs) >= 4
    assert all({*out.get("data", ())} <= {"text/plain"} for out in outputs)
    assert not [out for out in outputs if out["output_type"] == "error"]


def test_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["colab_tpu", "kaggle_tpu", "tour"]
