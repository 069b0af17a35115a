"""The example scripts are imported from their own folder."""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from accelerate_runs import make_arguments
from accelerate_state import fresh_accelerator  # noqa: F401 - fixture
from glue_runs import checkpoint, glue_arguments, glue_dir, run_glue  # noqa: F401 - fixtures

from hf_moa.recipes.accelerate import GatedTraining


@pytest.fixture
def fresh_import(monkeypatch):
    """folder -> an import of its files: again in each test, beside files of the same names elsewhere."""
    names, hidden = set(), {}

    def import_of(folder):
        monkeypatch.syspath_prepend(str(folder))
        for name in {path.stem for path in folder.glob("*.py")} - names:
            names.add(name)
            if name in sys.modules:
                hidden[name] = sys.modules.pop(name)
        return importlib.import_module

    yield import_of
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


@pytest.fixture
def arguments(fresh_accelerator, tmp_path):  # noqa: F811
    """Makes the flags of an Accelerate script."""
    return partial(make_arguments, tmp_path)


@pytest.fixture
def caught(monkeypatch):
    """The `GatedTraining` of a script, without its training."""
    made = []
    monkeypatch.setattr(GatedTraining, "train", lambda self: made.append(self))
    return made
