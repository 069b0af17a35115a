"""Settings for every test: no network, reproducible products, one thread per worker process."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# Products to the bit, wherever in memory a file's weights stand: on some processors MKL's last bit
# depends on that.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import pytest
import torch
from covering import leave_others_to_the_night

from hf_moa.modeling.core.mechanism import MECHANISMS

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items):
    """Nightly tests are not among the slow ones, whichever of the marks a test or its case has."""
    leave_others_to_the_night(items)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]


def pytest_collection_finish():
    """What is imported by now stays: each `gc.collect` of a Trainer need not go through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed():
    """Tests do not depend on which ran before them."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the call stack for each device


@pytest.fixture(autouse=True)
def _mechanisms():
    """What a test registers is unknown to the next."""
    known = dict(MECHANISMS)
    yield
    if known != MECHANISMS:
        MECHANISMS.clear()
        MECHANISMS.update(known)
