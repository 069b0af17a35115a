"""The example scripts find what they share in their own folder, as when they are run."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from accelerate_runs import forget_accelerator, make_arguments
from accelerate_training import GatedTraining


@pytest.fixture
def fresh_accelerator():
    forget_accelerator()
    yield
    forget_accelerator()


@pytest.fixture
def arguments(fresh_accelerator, tmp_path):
    """Makes the flags of an Accelerate script."""
    return partial(make_arguments, tmp_path)


@pytest.fixture
def caught(monkeypatch):
    """The `GatedTraining` of a script, without its training."""
    made = []
    monkeypatch.setattr(GatedTraining, "train", lambda self: made.append(self))
    return made
