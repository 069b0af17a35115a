"""Measuring a model in eval mode, whatever mode its modules are in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for a while; afterwards each module is in the mode that it was in."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training
