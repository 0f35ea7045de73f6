"""Runs the notebooks, and stores what their cells print, as text that every viewer shows.

    python docs/notebooks.py [NAME ...]       # tour, kaggle_tpu, colab_tpu

HTML is left out, since viewers of code take its style away.
"""

import pathlib
import re
import sys

# Seconds of simulated devices say nothing.
_SECONDS = re.compile(r"(?<=\d - )\d+m?s - \d+m?s/step")
NOTEBOOKS = pathlib.Path(__file__).parents[1] / "examples" / "notebooks"


def stored(outputs: list) -> list:
    """The outputs of a cell as text, without standard error and seconds.

    Args:
        outputs: What running the cell left.
    """
    found = [out for out in outputs if out.get("name") != "stderr"]
    for out in found:
        if "data" in out:
            out["data"] = {"text/plain": out["data"]["text/plain"]}
        if "text" in out:
            out["text"] = _SECONDS.sub("...", out["text"])
    return found


def main(names: list[str]) -> None:
    """Runs notebooks and writes them.

    Args:
        names: Their names; all of them if there are none.
    """
    import tempfile

    import nbformat
    from nbclient import NotebookClient

    for path in [NOTEBOOKS / f"{name}.ipynb" for name in names] or sorted(
        NOTEBOOKS.glob("*.ipynb")
    ):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            where = {"metadata": {"path": folder}}
            client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where)
            client.execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if "outputs" in cell:
                cell.outputs = stored(cell.outputs)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
