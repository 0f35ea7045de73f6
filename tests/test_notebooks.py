"""The notebooks run, from the first cell to the last."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("libtpu")
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


def test_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["tour"]
