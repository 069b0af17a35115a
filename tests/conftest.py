"""Settings for every test: no network, and one thread per worker process."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    """Tests do not depend on which ran before them."""
    torch.manual_seed(0)
