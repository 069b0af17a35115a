"""The notebooks run, offline, and are stored without outputs."""

import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["from_scratch", "upcycle"]


@each_notebook
def test_is_stored_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.slow
@each_notebook
def test_runs(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources)
    client.execute(env=os.environ | {"MPLBACKEND": "agg"})  # raises the error of a cell
    assert any(output for cell in notebook.cells for output in cell.get("outputs", []))
