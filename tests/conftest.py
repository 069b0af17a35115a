"""Settings for every test: no network, reproducible products, one thread per worker process."""

import gc
import os
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# Products to the bit, wherever in memory a file's weights stand: on some processors MKL's last bit
# depends on that.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Inductor takes the compiler to know the processor's vectors, instead of ten seconds of trying.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
from accelerate.utils import memory
from covering import leave_others_to_the_night
from scheduling import FilesOfTests, longest_first

from hf_moa.modeling.core.mechanism import MECHANISMS

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items):
    """Nightly tests are not among the slow ones, whichever of the marks a test or its case has."""
    longest_first(items)
    leave_others_to_the_night(items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("nightly"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FilesOfTests(config, log) if config.getoption("dist") == "loadfile" else None


# A Trainer collects garbage before it trains, among all that tests have imported: a quarter of a second,
# in every seventh test. What Python collects by itself is enough on a CPU.
memory.gc = SimpleNamespace(collect=lambda: 0)


def pytest_collection_finish():
    """What is imported by now stays: no collection of garbage need go through it."""
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
