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


# what takes the time of a notebook, and what the shorter run has instead
LONG = {
    "max_steps=600": "max_steps=8",
    "logging_steps=50": "logging_steps=4",
    "num_train_epochs=4": "max_steps=8",
}


@pytest.mark.parametrize(
    "is_whole",
    [
        pytest.param(False, marks=pytest.mark.slow, id="short"),
        pytest.param(True, marks=pytest.mark.nightly, id="whole"),
    ],
)
@each_notebook
def test_runs(path, is_whole, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    text = path.read_text(encoding="utf-8")
    if not is_whole:
        assert any(long in text for long in LONG)
        for long, short in LONG.items():
            text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources)
    client.execute(env=os.environ | {"MPLBACKEND": "agg"})  # raises the error of a cell
    assert any(output for cell in notebook.cells for output in cell.get("outputs", []))
