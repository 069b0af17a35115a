"""Random numbers that an interruption of training does not use up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Put Python's, NumPy's and torch's global generators, the accelerator's included, back to where
    they were when the block began.

    An evaluation in the middle of training draws (starting a `DataLoader` does already), and a run that
    resumes after it does not repeat it. Both draw the same from there on with

        with kept_random_states():
            trainer.evaluate()
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    device = _device_module()
    states = None if device is None else _get_states(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)
        if device is not None:
            _set_states(device, states)


def _device_module() -> Any:
    """`torch.cuda` or its like; None where there is no accelerator, or where it was never used."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    is_used = getattr(module, "is_initialized", lambda: True)()
    return module if is_used else None


def _get_states(device: Any) -> Any:
    return device.get_rng_state_all() if hasattr(device, "get_rng_state_all") else device.get_rng_state()


def _set_states(device: Any, states: Any) -> None:
    if hasattr(device, "set_rng_state_all"):
        device.set_rng_state_all(states)
    else:
        device.set_rng_state(states)
